"""Head and cross-entropy over a few tokens at a time, so that the full logits never exist.

What: the logits of `chunk_tokens` tokens are made, scored and thrown away. torch's own
`linear_cross_entropy` (from 2.13) does it in float32 without a soft-cap, with the gradient made in
the forward pass. Elsewhere the chunks are computed again in the backward pass: torch's function
knows no soft-cap, and in bf16 it returns a bf16 sum, measured 0.4 % off.
Helps: memory, with a large vocabulary: GPT-2's logits of 12 windows of 1,024 tokens take 2.5 GB in
float32, and their gradient as much again. On a CPU, time too, where chunks stay in its caches: the
profile `quick` (7M parameters, 50,257 ids) took 610 ms a step without and 320 ms with chunks of 128
tokens on 2 cores.
Costs: elsewhere a little time: smaller matrix products, and where chunks are computed again the
head's product once more.
No help where the step has fewer than `chunk_tokens` tokens or the vocabulary is small.
Claim: rounding, within 0.1 % of the baseline's loss: the sums over tokens are made in another
order.
Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.linear_cross_entropy.html
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from gptfast.plugin import Claim, Machine, Options, Plugin, Stage, Support, Tries

if TYPE_CHECKING:
    from torch import Tensor, nn

IGNORE = -100
"""torch's own mark of a target that is not scored; the model uses the same."""


def chunked_token_loss(
    x_BTC: Tensor,
    head_VC: Tensor,
    targets_BT: Tensor,
    *,
    vocab_size: int,
    softcap: float | None,
    chunk_tokens: int,
) -> Tensor:
    """Cross-entropy in float32 summed over the scored tokens, in nats; scalar.

    Args:
        x_BTC: last hidden state.
        head_VC: head, V >= vocab_size rows; those beyond are cut off.
        targets_BT: int64, IGNORE where a token is not scored.
        chunk_tokens: tokens whose logits exist at a time.
    """
    import torch

    x_NC, targets_N = x_BTC.flatten(0, 1), targets_BT.flatten()
    in_float32 = x_BTC.dtype == torch.float32 and not torch.is_autocast_enabled(x_BTC.device.type)
    if in_float32 and softcap is None and has_linear_cross_entropy():
        return _by_torch(x_NC, head_VC[:vocab_size], targets_N, chunk_tokens)
    return recomputed_loss(
        x_NC,
        head_VC,
        targets_N,
        vocab_size=vocab_size,
        softcap=softcap,
        chunk_tokens=chunk_tokens,
    )


def has_linear_cross_entropy() -> bool:
    """Whether this torch has the chunked form of `linear_cross_entropy`."""
    import torch

    return hasattr(torch.nn, "LinearCrossEntropyOptions")


def _by_torch(x_NC: Tensor, head_VC: Tensor, targets_N: Tensor, chunk_tokens: int) -> Tensor:
    import torch

    options = torch.nn.LinearCrossEntropyOptions(
        batch_chunk_size=min(chunk_tokens, x_NC.size(0)),
        chunking_method=None,
        # Under a compiler torch would switch this on itself, with a warning.
        allow_retain_graph=torch.compiler.is_compiling(),
    )
    return torch.nn.functional.linear_cross_entropy(
        x_NC, head_VC, targets_N, reduction="sum", ignore_index=IGNORE, options=options
    )


def recomputed_loss(
    x_NC: Tensor,
    head_VC: Tensor,
    targets_N: Tensor,
    *,
    vocab_size: int,
    softcap: float | None,
    chunk_tokens: int,
) -> Tensor:
    """The same with torch of any version: each chunk is computed again in the backward pass."""
    import torch
    from torch.utils.checkpoint import checkpoint

    def chunk_loss(x_NC: Tensor, head_VC: Tensor, targets_N: Tensor) -> Tensor:
        logits_NV = torch.nn.functional.linear(x_NC, head_VC)[:, :vocab_size]
        if softcap is not None:
            logits_NV = softcap * torch.tanh(logits_NV / softcap)
        # Not `.float()`: double stays double, so that gradients can be checked.
        logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
        return torch.nn.functional.cross_entropy(
            logits_NV, targets_N, ignore_index=IGNORE, reduction="sum"
        )

    chunks = zip(torch.split(x_NC, chunk_tokens), torch.split(targets_N, chunk_tokens), strict=True)
    losses = [
        checkpoint(chunk_loss, x, head_VC, targets, use_reentrant=False, preserve_rng_state=False)
        for x, targets in chunks
    ]
    return torch.stack(losses).sum()


class ChunkedLossOptions(Options):
    chunk_tokens: Annotated[int, Field(ge=1)] = 1024
    """Tokens whose logits exist at a time."""


class ChunkedLoss(Plugin):
    summary = "Head and loss a few tokens at a time: the full logits never exist"
    stage = Stage.SURGERY
    claim = Claim.ROUNDING
    tolerance = 1e-3
    tries = Tries(chunk_tokens=(128, 1024))
    Options = ChunkedLossOptions

    def supports(self, machine: Machine) -> Support:
        if has_linear_cross_entropy():
            return Support.yes("torch's linear_cross_entropy")
        return Support.yes("each chunk computed twice: torch does it once from 2.13 on")

    def wrap_model(self, model: nn.Module) -> nn.Module:
        loss = partial(chunked_token_loss, chunk_tokens=self.options.chunk_tokens)
        model.token_loss = loss  # type: ignore[assignment]  # nn.Module knows only tensors
        return model
