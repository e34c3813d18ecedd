"""AdamW with decay on matrices only, and the learning rate of each step.

Importing this module imports no torch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from gptfast.errors import Refused
from gptfast.helpers import decay_groups

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from gptfast.profile import TrainConfig


def build_adamw(model: nn.Module, train: TrainConfig) -> Optimizer:
    """The baseline's optimizer: torch's AdamW, one parameter after the other."""
    import torch

    return torch.optim.AdamW(
        decay_groups(model.named_parameters(), train.weight_decay),
        lr=train.learning_rate,
        betas=(train.beta1, train.beta2),
        foreach=False,
    )


def clip_gradients(parameters: Iterable[Tensor], most: float, *, looks: bool) -> Tensor:
    """Scale the gradient down to a norm of at most `most` (0: as it is); returns its norm before.

    Args:
        looks: read the norm and leave a gradient that is small enough as it is. Cheaper than to
            scale by 1, but on a device it would wait. NaN is scaled too.
    """
    from torch import nn

    moved = [p for p in parameters if p.grad is not None]
    norm: Tensor = nn.utils.get_total_norm([p.grad for p in moved if p.grad is not None])
    fits = looks and bool(norm + 1e-6 <= most)
    if most > 0 and not fits:
        nn.utils.clip_grads_with_norm_(moved, most, norm)
    return norm


def lr_factor(train: TrainConfig, step: int) -> float:
    """Learning rate of an update as a share of the peak. The first update is 1, the last `steps`.

    Linear warm-up reaches the peak at the end of `warmup_steps`; the last step has `final_lr`
    (for "constant": the peak). Never 0 in the warm-up, so that the first step moves the weights.
    """
    if step <= train.warmup_steps:
        return step / train.warmup_steps
    floor = train.final_lr / train.learning_rate
    if train.schedule == "constant":
        return 1.0
    start = train.warmup_steps
    if train.schedule == "wsd":
        start = max(start, train.steps - max(1, round(train.steps * train.decay_fraction)))
        if step <= start:
            return 1.0
    # Past the end (a run continued beyond its schedule) the rate stays at the floor.
    progress = min(1.0, (step - start) / (train.steps - start)) if step < train.steps else 1.0
    if train.schedule == "wsd":
        return 1.0 + (floor - 1.0) * progress
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


def with_own_options(saved: Any, own: Any) -> Any:
    """A saved optimizer state that keeps its moments and takes the options of `own`.

    So a resumed run trains as its profile says now: another rate, decay or a fused kernel.

    Args:
        saved, own: as `state_dict()` gives them, also nested in one another.
    """
    if isinstance(saved, list):
        return [with_own_options(s, o) for s, o in zip(saved, own, strict=True)]
    if not isinstance(saved, dict):
        return saved
    if "param_groups" in saved:
        groups = [
            {**theirs, **{key: value for key, value in ours.items() if key != "params"}}
            for theirs, ours in zip(saved["param_groups"], own["param_groups"], strict=True)
        ]
        return {**saved, "param_groups": groups}
    return {key: with_own_options(value, own[key]) for key, value in saved.items()}


def remember_peaks(optimizer: Optimizer) -> None:
    """The rate that each group has now is its peak."""
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", float(group["lr"]))


def set_rates(optimizer: Optimizer, factor: float) -> None:
    """Set the rate of each group to `factor` times its peak.

    A tensor is filled in place: a compiled optimizer step must not see a new number.
    """
    for group in optimizer.param_groups:
        rate = group["initial_lr"] * factor
        if isinstance(group["lr"], int | float):
            group["lr"] = rate
        else:
            group["lr"].fill_(rate)


def load_optimizer(optimizer: Optimizer, saved: dict[str, Any], *, source: str) -> None:
    """Give an optimizer its saved moments; its options stay its own.

    Raises:
        Refused: it was saved by another kind of optimizer, or for other parameters.
    """
    try:
        optimizer.load_state_dict(with_own_options(saved, optimizer.state_dict()))
    except (KeyError, ValueError) as error:
        raise Refused(
            f"{source}: its optimizer has other parameters than this run's ({error}): resume with "
            "the optimizer plugins it was trained with"
        ) from error


class PlainStepper:
    """Backward, nothing to unscale, step; `gptfast.plugin.Stepper`."""

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def unscale(self, optimizer: Optimizer) -> None: ...

    def step(self, optimizer: Optimizer) -> bool:
        optimizer.step()
        return True

    def skip(self, optimizer: Optimizer) -> None: ...
