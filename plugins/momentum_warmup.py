"""Momentum that rises over the first steps.

What: the optimizer's momentum (Muon's, SGD's; AdamW's beta1) begins at `start` and rises in a line
to its own value over `steps`.
Helps: where momentum is large, as Muon's 0.95 is: the first gradients point elsewhere than those a
hundred steps later, and a large momentum keeps pushing along them.
Costs: nothing.
No help in long runs: they forget how they began.
Claim: recipe. It is a function of the step alone, so that nothing need be kept for resuming.
Source: the warm-up of Muon's momentum in modded-nanogpt, 0.85 to 0.95 over 300 steps.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from gptfast.plugin import Claim, Options, Parts, Plugin, Refused, Stage, Stepped, Want


def momentum_at(step: int, *, start: float, end: float, steps: int) -> float:
    """The momentum of a step, which counts from 1."""
    return start + (end - start) * min(1.0, (step - 1) / steps)


class MomentumWarmupOptions(Options):
    start: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.85
    """Momentum of the first step; a parameter whose own is lower keeps its own."""
    steps: Annotated[int, Field(ge=1)] = 300
    """Steps until it is the optimizer's own."""


class MomentumWarmup(Plugin):
    summary = "Momentum rises over the first steps"
    stage = Stage.OUTER
    claim = Claim.RECIPE
    Options = MomentumWarmupOptions
    options: MomentumWarmupOptions

    def ready(self, parts: Parts) -> None:
        groups = parts.optimizer.param_groups
        self._ends = [(group, end) for group in groups if (end := momentum_of(group)) is not None]
        if not self._ends:
            raise Refused(
                f"plugin momentum-warmup: {type(parts.optimizer).__name__} has no momentum: use "
                "--without momentum-warmup or another optimizer"
            )
        self._set(parts.source.step)

    def step(self, event: Stepped) -> Want:
        self._set(event.step + 1)
        return Want.NOTHING

    def _set(self, step: int) -> None:
        for group, end in self._ends:
            start = min(self.options.start, end)
            set_momentum(group, momentum_at(step, start=start, end=end, steps=self.options.steps))


def momentum_of(group: dict[str, Any]) -> float | None:
    """What a parameter group calls momentum; None: it has none."""
    if "momentum" in group:
        return float(group["momentum"])
    return float(group["betas"][0]) if "betas" in group else None


def set_momentum(group: dict[str, Any], momentum: float) -> None:
    if "momentum" in group:
        group["momentum"] = momentum
    else:
        group["betas"] = (momentum, *group["betas"][1:])
