"""Workers that answer by a deadline, so that what is measured ends in time whatever it does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from gptfast.bench.measure.attempt import Start, Worker
from gptfast.bench.measure.messages import Built, Lap, Operator, Phases, RungFailed
from gptfast.plugin import Profile

T = TypeVar("T")


class OutOfTime(Exception):
    """The deadline passed while a worker was asked for something; it may not be asked again."""


class Deadline:
    """A moment on a clock, which may be moved.

    Args:
        at: in seconds of `clock`.
    """

    def __init__(self, at: float, *, clock: Callable[[], float]) -> None:
        self.at = at
        self._clock = clock

    @property
    def left_s(self) -> float:
        return self.at - self._clock()

    def hurries(self, start: Start) -> Start:
        """`start`, whose workers raise OutOfTime when the deadline passes."""

        @contextmanager
        def hurried(name: str) -> Iterator[Worker]:
            with start(name) as worker:
                yield _Hurried(worker, self)

        return hurried

    def ask(self, question: Callable[[float], T], patience_s: float) -> T:
        """The answer to `question`, which takes its patience in seconds.

        Raises:
            OutOfTime: there is none before the deadline.
        """
        left_s = self.left_s
        if left_s <= 0:
            raise OutOfTime
        try:
            return question(min(patience_s, left_s))
        except RungFailed as failure:
            if self.left_s <= 0:
                raise OutOfTime from failure
            raise


class _Hurried:
    def __init__(self, worker: Worker, deadline: Deadline) -> None:
        self._worker = worker
        self._deadline = deadline

    def build(
        self, profile: Profile, *, device: str, plugin: str | None, bare: bool, patience_s: float
    ) -> Built:
        return self._deadline.ask(
            lambda s: self._worker.build(
                profile, device=device, plugin=plugin, bare=bare, patience_s=s
            ),
            patience_s,
        )

    def advance(self, steps: int, *, lead_in: int, patience_s: float) -> Lap:
        return self._deadline.ask(
            lambda s: self._worker.advance(steps, lead_in=lead_in, patience_s=s), patience_s
        )

    def score(self, max_targets: int | None, *, patience_s: float) -> float:
        return self._deadline.ask(
            lambda s: self._worker.score(max_targets, patience_s=s), patience_s
        )

    def divide(self, steps: int, *, patience_s: float) -> Phases:
        return self._deadline.ask(lambda s: self._worker.divide(steps, patience_s=s), patience_s)

    def profile(self, steps: int, *, trace: Path, patience_s: float) -> list[Operator]:
        return self._deadline.ask(
            lambda s: self._worker.profile(steps, trace=trace, patience_s=s), patience_s
        )

    def hooks_us(self, *, patience_s: float) -> float:
        return self._deadline.ask(lambda s: self._worker.hooks_us(patience_s=s), patience_s)

    def close(self) -> str | None:
        return self._worker.close()
