"""Attention by torch's fused kernels, which never write the T x T scores to memory.

What: the model calls `scaled_dot_product_attention`; torch picks a kernel, or `backend` names one.
Helps: everywhere, the more the longer the context: memory of attention grows with T, not T * T.
Costs: nothing. "flash" and "cudnn" on CUDA take half precision only: use them with `amp`. With
dropout, other random numbers are drawn than by attention written out.
Claim: rounding, within 0.5 % of the baseline's loss: the softmax is summed block by block.
Source: Dao et al. 2022, FlashAttention;
https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Literal

from gptfast.plugin import Claim, Context, Machine, Options, Plugin, Profile, Stage, Support, Tries

if TYPE_CHECKING:
    import torch

Backend = Literal["auto", "flash", "efficient", "cudnn", "math"]
HALF_ONLY = ("flash", "cudnn")
"""Backends that on CUDA take no float32."""


def attention_backend(backend: Backend) -> AbstractContextManager[object]:
    """Inside, `scaled_dot_product_attention` uses this kernel or fails; "auto": torch's choice."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if backend == "auto":
        return nullcontext()
    kernels = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "math": SDPBackend.MATH,
    }
    scope: AbstractContextManager[object] = sdpa_kernel(kernels[backend])
    return scope


class FlashOptions(Options):
    backend: Backend = "auto"
    """Kernel of torch's attention: flash, efficient, cudnn or math; auto: torch's choice."""


class Flash(Plugin):
    summary = "Fused attention: no T x T matrix in memory"
    stage = Stage.SURGERY
    claim = Claim.ROUNDING
    tolerance = 5e-3
    tries = Tries(backend=("auto", "flash", "efficient", "cudnn", "math"))
    Options = FlashOptions

    def supports(self, machine: Machine) -> Support:
        import warnings

        import torch

        backend = self.options.backend
        half_only = machine.kind == "cuda" and backend in HALF_ONLY
        dtype = torch.float16 if half_only else torch.float32
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns of each kernel that it passes over
                _launch(machine, backend, dtype)
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            return Support.no(f'a trial of backend = "{backend}" failed: {reason}: use "auto"')
        return Support.yes("in half precision" if half_only else "")

    def configure(self, profile: Profile) -> Profile:
        return profile.replace({"model.attention": "sdpa"})

    def setup(self, context: Context) -> None:
        backend = self.options.backend
        if (
            context.machine.kind == "cuda"
            and backend in HALF_ONLY
            and "amp" not in context.profile.plugins
        ):
            raise ValueError(
                f'backend = "{backend}" takes half precision only: switch amp on or use "auto"'
            )

    def forward_scope(self) -> AbstractContextManager[object]:
        return attention_backend(self.options.backend)


def _launch(machine: Machine, backend: Backend, dtype: torch.dtype) -> None:
    import torch

    heads = torch.zeros(1, 1, 64, 64, device=machine.device, dtype=dtype, requires_grad=True)
    with attention_backend(backend):
        out = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    out.sum().backward()  # type: ignore[no-untyped-call]  # torch's own
