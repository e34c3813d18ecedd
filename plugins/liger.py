"""Liger's Triton kernels for the norms and, where asked for, head and loss.

What: RMSNorm and LayerNorm (with bias) as one kernel each, forward and backward. With `loss`, head
and cross-entropy a few tokens at a time, as `chunked-loss` does, in one kernel a chunk.
Helps: a GPU where nothing is compiled: torch's RMSNorm takes several passes over memory.
Costs: compiling a kernel for each shape in the first step. `loss` waits for the device in every
forward and backward pass, because Liger (0.8.5) reads there how many tokens are scored:
`chunked-loss` does not.
No help with `compile`, which fuses the norms by itself, and must not be on beside it: Liger's loss
compiled gives a wrong number where a target is not scored, as in the last batch of an evaluation
(https://github.com/linkedin/Liger-Kernel/pull/1338).
Claim: rounding, within 0.5 % of the baseline's loss: sums are made in another order.
Source: Hsu et al. 2024, Liger Kernel: Efficient Triton Kernels for LLM Training;
https://github.com/linkedin/Liger-Kernel
"""

from __future__ import annotations

from importlib.util import find_spec
from types import MethodType
from typing import TYPE_CHECKING, Any

from gptfast.plugin import Claim, Machine, Options, Plugin, Stage, Support, Tries

if TYPE_CHECKING:
    from torch import Tensor, nn

IGNORE = -100
"""Target of a token that is not scored."""


def fuse_norms(model: nn.Module) -> int:
    """Have the norms of `model` be Liger's, in place; returns how many are."""
    from liger_kernel.transformers.functional import liger_layer_norm, liger_rms_norm
    from torch import nn

    def rms_norm(self: nn.RMSNorm, x: Tensor) -> Any:
        # Not in place: that would write over a gradient which another layer may still read.
        return liger_rms_norm(x, self.weight, self.eps, in_place=False)

    def layer_norm(self: nn.LayerNorm, x: Tensor) -> Any:
        return liger_layer_norm(x, self.weight, self.bias, self.eps)

    fused = 0
    for module in model.modules():
        if isinstance(module, nn.RMSNorm):
            module.forward = MethodType(rms_norm, module)  # type: ignore[method-assign]  # in place
        elif isinstance(module, nn.LayerNorm) and module.bias is not None:
            module.forward = MethodType(layer_norm, module)  # type: ignore[method-assign]  # in place
        else:
            continue
        fused += 1
    return fused


def fused_token_loss(
    x_BTC: Tensor, head_VC: Tensor, targets_BT: Tensor, *, vocab_size: int, softcap: float | None
) -> Tensor:
    """Cross-entropy in float32 summed over the scored tokens, in nats; scalar.

    Args:
        x_BTC: last hidden state.
        head_VC: head, V >= vocab_size rows; those beyond are cut off.
        targets_BT: int64, IGNORE where a token is not scored.
    """
    import torch
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    loss: Tensor = liger_fused_linear_cross_entropy(
        x_BTC.flatten(0, 1),
        head_VC[:vocab_size],
        targets_BT.flatten(),
        ignore_index=IGNORE,
        reduction="sum",
        softcap=softcap,
        accum_dtype=torch.float32,
    )
    return loss


class LigerOptions(Options):
    norms: bool = True
    """RMSNorm and LayerNorm by Liger."""
    loss: bool = False
    """Head and cross-entropy by Liger; waits for the device, `chunked-loss` does not."""


class Liger(Plugin):
    summary = "Liger's fused kernels for norms and loss, where nothing is compiled"
    stage = Stage.SURGERY
    claim = Claim.ROUNDING
    tolerance = 5e-3
    conflicts = ("chunked-loss", "compile")
    tries = Tries(loss=(False, True))
    Options = LigerOptions
    options: LigerOptions

    def supports(self, machine: Machine) -> Support:
        if machine.kind != "cuda":
            return Support.no("Liger's kernels are for GPUs")
        if find_spec("liger_kernel") is None:
            return Support.no("liger-kernel is not installed: pip install 'gptfast[liger]'")
        try:
            _launch(machine)
        except (RuntimeError, ImportError) as error:
            return Support.failed("a trial of Liger's kernels", error)
        return Support.yes()

    def wrap_model(self, model: nn.Module) -> nn.Module:
        if self.options.norms:
            fuse_norms(model)
        if self.options.loss:
            model.token_loss = fused_token_loss  # type: ignore[assignment]  # knows only tensors
        return model


def _launch(machine: Machine) -> None:
    import torch

    norm = torch.nn.LayerNorm(64, device=machine.device)
    fuse_norms(norm)
    x = torch.ones(2, 16, 64, device=machine.device, requires_grad=True)
    head = torch.ones(128, 64, device=machine.device, requires_grad=True)
    targets = torch.zeros(2, 16, dtype=torch.int64, device=machine.device)
    loss = fused_token_loss(norm(x), head, targets, vocab_size=120, softcap=None)
    loss.backward()  # type: ignore[no-untyped-call]  # torch's own
