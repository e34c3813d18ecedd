"""Keeps only the input of each block and computes its inside again in the backward pass.

What: `torch.utils.checkpoint` around the first `layers` blocks, with the random state of dropout
put back for the second pass.
Helps: memory: activations of one block instead of all, so that a larger micro-batch or model fits.
Costs: one more forward pass of those blocks, about a third of a step's time.
Claim: exact, equal bits: the same operations on the same numbers.
Source: Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost;
https://docs.pytorch.org/docs/stable/checkpoint.html
"""

from __future__ import annotations

from types import MethodType
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from gptfast.plugin import Claim, Options, Plugin, Stage

if TYPE_CHECKING:
    from torch import Tensor, nn


def checkpoint_block(block: nn.Module) -> None:
    """Have `block` forget its inside after each forward pass that records gradients, in place.

    Names of parameters and the block's own hooks stay as they are.
    """
    from torch.utils.checkpoint import checkpoint

    plain = type(block).forward

    def forward(self: nn.Module, x_BTC: Tensor, **rest: Any) -> Any:
        # A cache is appended to: a second pass would append again. Only generation has one.
        if not self.training or rest.get("cache") is not None:
            return plain(self, x_BTC, **rest)
        return checkpoint(plain, self, x_BTC, use_reentrant=False, **rest)

    # A bound method, so that a deep copy of the block gets one bound to the copy.
    block.forward = MethodType(forward, block)


class ActivationCheckpointingOptions(Options):
    layers: Annotated[int, Field(ge=1)] | None = None
    """How many blocks, from the first, are computed again. None: all."""


class ActivationCheckpointing(Plugin):
    summary = "Activations computed again instead of kept: less memory, more time"
    stage = Stage.RECOMPUTE
    claim = Claim.EXACT
    Options = ActivationCheckpointingOptions

    def wrap_model(self, model: nn.Module) -> nn.Module:
        for block in list(model.h)[: self.options.layers]:  # type: ignore[arg-type]  # a ModuleList
            checkpoint_block(block)
        return model
