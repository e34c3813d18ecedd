"""What plugins share: parameter groups, sizes that grow, known gradients, quiet imports.

`gptfast.plugin` hands these on. Importing this module imports no torch: listing the plugins stays
quick.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def decay_groups(
    parameters: Iterable[tuple[str, Tensor]], weight_decay: float
) -> list[dict[str, Any]]:
    """Parameter groups: matrices with weight decay, biases and norms without; each tensor once.

    Args:
        parameters: (name, parameter) pairs, as of `model.named_parameters()`.
    """
    trained = [p for _, p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def doubling(step: int, *, start: int, whole: int, steps: int) -> int:
    """A size that doubles from `start` until it is `whole`, in stages that share out `steps`.

    Args:
        step: from 1; from `steps + 1` on the size is `whole`.
    """
    sizes = [start]
    while sizes[-1] < whole:
        sizes.append(min(2 * sizes[-1], whole))
    return sizes[min((step - 1) * (len(sizes) - 1) // steps, len(sizes) - 1)]


@contextmanager
def unlogged_warnings() -> Iterator[None]:
    """Inside, warnings that are logged go nowhere: what a package lacks, told on import, say."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        yield
    finally:
        logging.disable(before)


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
