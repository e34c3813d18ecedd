"""A loss whose gradients were found together with it, as a part of autograd's graph."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def with_gradients(
    loss: Tensor, gradients: Sequence[Tensor], parameters: Sequence[Tensor]
) -> Tensor:
    """`loss`, whose `backward` adds the given gradients, times what arrives, to the parameters.

    For a plugin that finds loss and gradients in one go. The gradients are scaled in place: each is
    a tensor of its own, and backward works once.

    Args:
        loss: scalar, outside of any graph.
        gradients: d loss / d parameter, each in its parameter's shape.
        parameters: leaves that require gradients.
    """
    known: Tensor = _known().apply(gradients, loss, *parameters)
    return known


def has_gradients(loss: Tensor) -> bool:
    """Whether a loss is one of `with_gradients`."""
    return getattr(loss.grad_fn, "_forward_cls", None) is _known()


@cache
def _known() -> Any:
    """The class is made here, and not above, because listing the plugins must not import torch."""
    import torch

    class Known(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, gradients: Sequence[Tensor], loss: Tensor, *parameters: Tensor
        ) -> Tensor:
            ctx.gradients = gradients
            return loss.clone()

        @staticmethod
        def backward(ctx: Any, scale: Tensor) -> Any:
            # Let go of: what nobody else holds becomes `.grad` without a copy.
            gradients, ctx.gradients = ctx.gradients, None
            torch._foreach_mul_(gradients, scale)
            return None, None, *gradients

    return Known
