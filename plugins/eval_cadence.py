"""Evaluations by the clock: at most a stated share of the run's time.

What: turns the fixed interval off and asks for an evaluation when one is due and paid for. Due:
    the run wants `evaluations` of them, evenly spread. Paid for: with it, evaluations will have
    taken no more than `share` of the run's time so far; the last one tells what the next will take.
    How many tokens an evaluation scores is fixed before the start, so that its losses can be
    compared: what `evaluations` of them may cost within `share`, where a forward pass takes a third
    of a training step.
When it helps: always where nobody has tuned `eval_interval` and `eval_tokens` for this machine: a
    fast device sees a finer curve, a slow one is not held up.
Costs: the first evaluation is made unpaid, to learn what one takes; the next ones wait for it. With
    `--resume` the time spent before counts.
Numerics: exact. It changes no bit of the training; which steps are evaluated depends on the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from pydantic import Field

from gptfast.plugin import Claim, Evaluated, Options, Parts, Plugin, Profile, Stage, Stepped, Want

FORWARD_SHARE = 1 / 3
"""The forward pass's share of a training step: the backward pass computes twice as much."""


def affordable_tokens(profile: Profile, *, share: float, evaluations: int) -> int:
    """Target tokens that each evaluation may score within `share` of the run; a batch at least."""
    train, block_size = profile.train, profile.model.block_size
    trained = train.steps * train.batch_size * block_size
    # share is of the whole: training is the other 1 - share.
    paid = share / (1 - share) * trained / FORWARD_SHARE
    return max(int(paid / evaluations), train.windows_per_micro * block_size)


@dataclass
class Budget:
    """Seconds spent on training and on evaluations, and what the last evaluation took."""

    trained: float = 0.0
    evaluated: float = 0.0
    last: float = 0.0

    def affords_one(self, share: float) -> bool:
        """Whether evaluations stay within `share` of all the time with one more like the last."""
        evaluated = self.evaluated + self.last
        return evaluated <= share * (self.trained + evaluated)

    def pay(self, seconds: float) -> None:
        self.evaluated += seconds
        self.last = seconds


class EvalCadenceOptions(Options):
    share: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.05
    """Largest share of the run's time that evaluations take."""
    evaluations: Annotated[int, Field(ge=1)] = 20
    """Evaluations wanted in the run, evenly spread; fewer where they cost more than `share`."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Target tokens that an evaluation scores at most. None: as many as `share` can pay for."""


class EvalCadence(Plugin):
    summary = "Evaluations take at most a stated share of the time"
    stage = Stage.REPORT
    claim = Claim.EXACT
    Options = EvalCadenceOptions
    options: EvalCadenceOptions

    def __init__(
        self, options: EvalCadenceOptions, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        super().__init__(options)
        self.budget = Budget()
        self._clock = clock
        self._asked_at = 0
        """The step of the last evaluation asked for."""

    def configure(self, profile: Profile) -> Profile:
        limits = [
            affordable_tokens(
                profile, share=self.options.share, evaluations=self.options.evaluations
            ),
            self.options.max_tokens,
            profile.train.eval_tokens,
        ]
        eval_tokens = min(limit for limit in limits if limit is not None)
        return profile.replace({"train.eval_interval": 0, "train.eval_tokens": eval_tokens})

    def ready(self, parts: Parts) -> None:
        self._since = self._clock()

    def step(self, event: Stepped) -> Want:
        now = self._clock()
        self.budget.trained += now - self._since
        self._since = now
        due = event.step - self._asked_at >= event.steps / self.options.evaluations
        if not (due and self.budget.affords_one(self.options.share)):
            return Want.NOTHING
        # Now, and not in `evaluated`: the checkpoint is saved in between.
        self._asked_at = event.step
        return Want.EVAL

    def evaluated(self, event: Evaluated) -> Want:
        self.budget.pay(event.seconds)
        self._since = self._clock()
        return Want.NOTHING

    def state(self) -> dict[str, Any]:
        return {**asdict(self.budget), "asked_at": self._asked_at}

    def load_state(self, state: dict[str, Any]) -> None:
        budget = dict(state)
        self._asked_at = budget.pop("asked_at")
        self.budget = Budget(**budget)
