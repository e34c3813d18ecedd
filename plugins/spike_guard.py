"""Leaves out the updates of steps whose loss or gradient stands far above those before.

What: before every update, the step's loss and the norm of its gradient are compared with those of
    the last `window` steps that were not left out. More than `z` standard deviations above their
    mean, the update is skipped and said so; the schedule does not advance. After `in_a_row` skipped
    steps it is no spike but a new level: the window begins anew. The total is said at the end.
When it helps: in long runs on text that nobody has read: one garbled document can throw weights and
    optimizer back by hours.
Costs: on a GPU one wait for the device in each step, because whether to update is decided by
    numbers that must be read. A skipped step is a step whose windows were not learnt from.
Numerics: recipe. Where nothing stands out, every bit is as without it.

A loss or norm that is not finite is no spike and does not enter the window: fp16's stepper leaves
such an update out by itself, and otherwise the run stops.
Source: z-scores over a window of past steps, as in OLMo-core's SkipStepOptimizer.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from gptfast.plugin import Claim, Context, Options, Plugin, Stage, Stepped, Update, Want

LEAST_SPREAD = 1e-3
"""Share of the mean: a deviation below it counts as it, or equal values would make any other an
outlier."""


def z_score(value: float, past: deque[float]) -> float:
    """How many standard deviations `value` stands above the mean of `past`."""
    mean = statistics.fmean(past)
    spread = max(statistics.pstdev(past, mean), LEAST_SPREAD * abs(mean))
    return (value - mean) / spread if spread else math.copysign(math.inf, value - mean)


class SpikeGuardOptions(Options):
    z: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 6.0
    """Standard deviations above the mean from which a step is skipped."""
    window: Annotated[int, Field(ge=2)] = 128
    """Steps, not skipped, that mean and deviation are taken over."""
    least: Annotated[int, Field(ge=2)] = 20
    """Steps in the window before any is skipped; at most `window`."""
    in_a_row: Annotated[int, Field(ge=1)] = 5
    """Skipped steps after which the window begins anew."""
    watch: Literal["both", "loss", "grad_norm"] = "both"
    """Which of the two may skip a step."""


class SpikeGuard(Plugin):
    summary = "Skips the updates of steps whose loss or gradient is an outlier"
    stage = Stage.OUTER
    claim = Claim.RECIPE
    Options = SpikeGuardOptions
    options: SpikeGuardOptions

    def setup(self, context: Context) -> None:
        options = self.options
        watched = ("loss", "grad_norm") if options.watch == "both" else (options.watch,)
        self._past = {name: deque[float](maxlen=options.window) for name in watched}
        self._skipped = self._in_a_row = self._steps = 0
        self._skips = False
        self._values: dict[str, float] = {}
        self._note = context.note

    def before_step(self, event: Update) -> Want:
        self._values = {name: getattr(event, name).item() for name in self._past}
        outlier = self._outlier(self._values)
        self._skips = outlier is not None
        if outlier is None:
            return Want.NOTHING
        total = self._skipped + 1
        self._note(f"plugin spike-guard: step {event.step} is skipped: {outlier} ({total} so far)")
        return Want.SKIP

    def _outlier(self, values: Mapping[str, float]) -> str | None:
        """In words, what stands out. None: nothing, or something is not finite."""
        if not all(math.isfinite(value) for value in values.values()):
            return None
        for name, past in self._past.items():
            if len(past) < min(self.options.least, self.options.window):
                continue
            z = z_score(values[name], past)
            if z > self.options.z:
                mean = statistics.fmean(past)
                return f"{name} {values[name]:.4g} is {z:.1f} deviations above {mean:.4g}"
        return None

    def step(self, event: Stepped) -> Want:
        # All counting is here, not before the update: a step that fails is not counted.
        self._steps += 1
        if self._skips:
            self._skipped += 1
            self._in_a_row += 1
            if self._in_a_row == self.options.in_a_row:
                self._begin_anew(event.step)
        elif event.committed:
            self._in_a_row = 0
            for name, past in self._past.items():
                past.append(self._values[name])
        return Want.NOTHING

    def _begin_anew(self, step: int) -> None:
        for past in self._past.values():
            past.clear()
        self._note(
            f"plugin spike-guard: {self._in_a_row} steps in a row were skipped up to {step}: taken "
            "for a new level, the window begins anew"
        )
        self._in_a_row = 0

    def metrics(self) -> Mapping[str, float]:
        return {"skipped": self._skipped}

    def teardown(self) -> None:
        if self._values:  # it has been training, and not only evaluating
            self._note(f"plugin spike-guard: {self._skipped} of {self._steps} steps were skipped")

    def state(self) -> dict[str, Any]:
        return {
            "past": {name: list(past) for name, past in self._past.items()},
            "skipped": self._skipped,
            "in_a_row": self._in_a_row,
            "steps": self._steps,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        for name, past in self._past.items():
            past.extend(state["past"].get(name, ()))
        self._skipped, self._in_a_row = state["skipped"], state["in_a_row"]
        self._steps = state["steps"]
