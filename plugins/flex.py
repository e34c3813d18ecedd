"""Attention within documents and sliding windows, by torch's FlexAttention.

What: a token attends to at most `window` tokens back, and with `separator`, the id that stands
between two documents, only within its own document. On CUDA, FlexAttention compiles a kernel for
just these pairs and leaves out the blocks of the score matrix that have none; elsewhere, with
dropout, and for lengths other than `block_size`, the same mask is given to
`scaled_dot_product_attention` whole. The separator belongs to the document that it begins, as when
a text is generated from nothing. `prepare` puts one behind each document of a source that has
several: with GPT-2's tokenizer, 50256.
Helps: windows that hold many short documents (no attention to what has nothing to do with it, and
less work), and long windows, whose work grows with the window and not with the length.
Costs: the mask is made anew for each micro-batch where there are documents. Positions go on over a
separator. On a CPU it is there for trying: the whole mask costs more than plain causal attention.
Claim: recipe: masks change what is learnt. Without options it is causal attention, within rounding.
Source: Dong et al. 2024, Flex Attention;
https://docs.pytorch.org/docs/stable/nn.attention.flex_attention.html
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal
from weakref import WeakKeyDictionary

from pydantic import Field

from gptfast.plugin import (
    Claim,
    Context,
    Machine,
    Options,
    Plugin,
    Profile,
    Refused,
    Stage,
    Support,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

Sees = Callable[[Any, Any, Any, Any], Any]
"""Whether query `q` of window `b` and head `h` may see key `k`; indices are tensors."""


def sees(documents_BS: Tensor | None, window: int | None) -> Sees:
    """Who may see whom: nothing later, nothing `window` or more back, no other document.

    Args:
        documents_BS: a number for each token that differs between documents; None: all are one.
    """

    def seen(b: Any, h: Any, q: Any, k: Any) -> Any:
        allowed = q >= k
        if window is not None:
            allowed = allowed & (q - k < window)
        if documents_BS is not None:
            allowed = allowed & (documents_BS[b, q] == documents_BS[b, k])
        return allowed

    return seen


def whole_mask(allowed: Sees, *, B: int, T: int, S: int, device: torch.device) -> Tensor:
    """The last T of S tokens against all: True where attention is allowed.

    Returns:
        (T, S), or (B, 1, T, S) where windows differ.
    """
    import torch

    windows = torch.arange(B, device=device)[:, None, None, None]
    keys = torch.arange(S, device=device)
    mask: Tensor = allowed(windows, 0, keys[S - T :, None], keys)
    return mask


class Masks:
    """Makes the mask of each forward pass; stands in for the model's own.

    Args:
        separator: id that begins a document; None: there are none.
        window: tokens that one may see, itself included; None: all before it.
        block_size: the length for which FlexAttention is compiled; None: for none.
    """

    def __init__(
        self,
        *,
        separator: int | None,
        window: int | None,
        block_size: int | None,
        device: torch.device,
    ) -> None:
        self._separator = separator
        self._window = window
        self._block_size = block_size
        self._in_cache: WeakKeyDictionary[Any, Tensor] = WeakKeyDictionary()
        if block_size is not None:
            import torch
            from torch.nn.attention.flex_attention import create_block_mask

            self._create = torch.compile(create_block_mask, dynamic=False)
            self._causal = create_block_mask(
                sees(None, window), None, None, block_size, block_size, device=device
            )

    def __call__(self, tokens_BT: Tensor, cache: Any = None) -> Any:
        """A BlockMask for FlexAttention, or a whole mask.

        Args:
            tokens_BT: (B, T) int64, behind what `cache` holds.
        """
        B, T = tokens_BT.shape
        documents_BS = self._documents(tokens_BT, cache)
        if cache is None and self._block_size == T:
            if documents_BS is None:
                return self._causal
            return self._create(
                sees(documents_BS, self._window), B, None, T, T, device=tokens_BT.device
            )
        S = T if cache is None else cache.length + T
        allowed = sees(documents_BS, self._window)
        return whole_mask(allowed, B=B, T=T, S=S, device=tokens_BT.device)

    def _documents(self, tokens_BT: Tensor, cache: Any) -> Tensor | None:
        """(B, S) how many documents have begun, of the cached tokens too."""
        if self._separator is None:
            return None
        import torch

        begun_BT = (tokens_BT == self._separator).cumsum(1)
        if cache is None:
            return begun_BT
        if cache.length:
            before_BS = self._in_cache[cache]
            begun_BT = torch.cat((before_BS, before_BS[:, -1:] + begun_BT), dim=1)
        self._in_cache[cache] = begun_BT
        return begun_BT


def masked_attention(flex: Callable[..., Any] | None) -> Callable[..., Tensor]:
    """Attention that takes what `Masks` makes.

    Args:
        flex: FlexAttention, compiled; None: there are whole masks only.
    """

    def attend(
        q_BHTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, *, mask_TS: Any, dropout: float
    ) -> Tensor:
        import torch

        grouped = q_BHTD.size(1) != k_BGSD.size(1)
        if flex is not None and not isinstance(mask_TS, torch.Tensor):
            # Norms and rotations leave float32 under autocast, which this kernel does not mix.
            q_BHTD, k_BGSD = q_BHTD.to(v_BGSD.dtype), k_BGSD.to(v_BGSD.dtype)
            out: Tensor = flex(q_BHTD, k_BGSD, v_BGSD, block_mask=mask_TS, enable_gqa=grouped)
            return out
        return torch.nn.functional.scaled_dot_product_attention(
            q_BHTD, k_BGSD, v_BGSD, attn_mask=mask_TS, dropout_p=dropout, enable_gqa=grouped
        )

    return attend


class FlexOptions(Options):
    separator: Annotated[int, Field(ge=0)] | None = None
    """Id that stands between documents; tokens attend within theirs. None: over all."""
    window: Annotated[int, Field(ge=1)] | None = None
    """Tokens that a token may see, itself included. None: all before it."""
    kernel: Literal["auto", "flex", "whole"] = "auto"
    """FlexAttention's kernel, or a whole mask; auto: the kernel on CUDA without dropout."""


class Flex(Plugin):
    summary = "Attention within documents and sliding windows"
    stage = Stage.SURGERY
    claim = Claim.RECIPE
    conflicts = ("flash",)
    Options = FlexOptions
    options: FlexOptions

    _by_kernel: bool

    def supports(self, machine: Machine) -> Support:
        if machine.kind != "cuda":
            why = "torch's FlexAttention has no backward pass off CUDA"
            if self.options.kernel == "flex":
                return Support.no(f'{why}: set plugins.flex.kernel = "whole"')
            return Support.yes(f"whole masks: {why}")
        if self.options.kernel == "whole":
            return Support.yes("whole masks")
        try:
            _launch(machine)
        except (RuntimeError, OSError, ImportError) as error:
            instead = 'set plugins.flex.kernel = "whole"'
            return Support.failed("a trial of FlexAttention", error, instead=instead)
        return Support.yes("FlexAttention")

    def configure(self, profile: Profile) -> Profile:
        separator, vocab_size = self.options.separator, profile.model.vocab_size
        if separator is not None and vocab_size is not None and separator >= vocab_size:
            raise Refused(
                f"plugins.flex.separator = {separator} is not in the vocabulary of {vocab_size} "
                "ids: use the id that `gptfast data show` calls the separator"
            )
        if separator is not None and profile.model.ngram_rows:
            raise Refused(
                f"plugins.flex.separator = {separator} keeps documents apart, and n-grams "
                f"(model.ngram_rows = {profile.model.ngram_rows}) reach over their ends: "
                "leave one of them out"
            )
        return profile

    def setup(self, context: Context) -> None:
        asked, dropout = self.options.kernel, context.profile.model.dropout
        self._by_kernel = asked == "flex" or (asked == "auto" and context.machine.kind == "cuda")
        if self._by_kernel and dropout > 0:
            self._by_kernel = False
            context.note(
                f"flex uses whole masks: FlexAttention knows no dropout (model.dropout = {dropout})"
            )

    def wrap_model(self, model: nn.Module) -> nn.Module:
        import torch

        flex = None
        if self._by_kernel:
            from torch.nn.attention.flex_attention import flex_attention

            flex = torch.compile(flex_attention, dynamic=False)
        attend = masked_attention(flex)
        gpt: Any = model  # nn.Module knows only tensors
        for block in gpt.h:
            block.attn.attend = attend
        gpt.mask_of = Masks(
            separator=self.options.separator,
            window=self.options.window,
            block_size=gpt.config.block_size if self._by_kernel else None,
            device=next(model.parameters()).device,
        )
        return model


def _launch(machine: Machine) -> None:
    """A kernel for one small window, forward and backward."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    heads = torch.zeros(1, 1, 128, 64, device=machine.device, requires_grad=True)
    mask = create_block_mask(sees(None, 64), None, None, 128, 128, device=machine.device)
    flex = torch.compile(flex_attention, dynamic=False)
    out: Any = flex(heads, heads, heads, block_mask=mask)
    out.sum().backward()
