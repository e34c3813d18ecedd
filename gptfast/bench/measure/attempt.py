"""One rung from the start of its process to its last round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from typing import Protocol as Interface

from gptfast.bench.measure.messages import Built, Lap, Operator, Phases, RungFailed
from gptfast.bench.result.record import Breakdown, Protocol, Warmup
from gptfast.bench.result.statistics import is_warm, median_phases, warmup
from gptfast.host.registry import Enabled
from gptfast.plugin import Plugin, Profile

BASELINE = "baseline"


class Worker(Interface):
    """What a rung needs of its process; `WorkerProcess` is the real one."""

    def build(
        self, profile: Profile, *, device: str, plugin: str | None, bare: bool, patience_s: float
    ) -> Built: ...
    def advance(self, steps: int, *, lead_in: int, patience_s: float) -> Lap: ...
    def score(self, max_targets: int | None, *, patience_s: float) -> float: ...
    def divide(self, steps: int, *, patience_s: float) -> Phases: ...
    def profile(self, steps: int, *, trace: Path, patience_s: float) -> list[Operator]: ...
    def hooks_us(self, *, patience_s: float) -> float: ...
    def close(self) -> str | None: ...


Start = Callable[[str], AbstractContextManager[Worker]]
"""Starts the worker of the rung of this name."""


class Attempt:
    """A rung that is tried here: `set_up`, then rounds. A failure ends it and is kept as a reason.

    Args:
        on: all its plugins, in the order in which the ladder added them.
        judged: the plugin by which it differs from `other`.
        other: the rung that it is compared with.
        changes: of the profile for this rung alone, as `Profile.replace` takes them.
        bare: the hand-written loop instead of the trainer; no plugins.
    """

    built: Built
    warmup: Warmup

    def __init__(
        self,
        name: str,
        on: Sequence[Enabled],
        protocol: Protocol,
        *,
        judged: Enabled | None = None,
        other: Attempt | None = None,
        changes: Mapping[str, Any] | None = None,
        bare: bool = False,
    ) -> None:
        self.name = name
        self.on = list(on)
        self.judged = judged
        self.other = other
        self.failure: str | None = None
        self.out_of_memory = False
        """Whether it failed for lack of memory."""
        self.losses: list[float] = []
        """Of each step from the first."""
        self.tokens = 0
        """Target tokens of all steps on the clock."""
        self.rounds: dict[int, Lap] = {}
        """Those that count, by their number."""
        self.divided: list[Phases] = []
        self.breakdown: Breakdown | None = None
        self.notes: list[str] = []
        self.step_s = 0.0
        """Of a steady step in the warm-up."""
        self._changes = dict(changes or {})
        self._bare = bare
        self._protocol = protocol
        self._worker: Worker | None = None
        self._last: Lap

    @property
    def plugins(self) -> list[Plugin]:
        return [enabled.plugin for enabled in self.on]

    @property
    def ran(self) -> bool:
        """Whether it did all its rounds."""
        return len(self.rounds) >= self._protocol.rounds

    @property
    def round_step_ms(self) -> dict[int, float]:
        return {number: lap.step_ms for number, lap in self.rounds.items()}

    @property
    def step_ms(self) -> float:
        return median(self.round_step_ms.values())

    @property
    def last_lap(self) -> Lap:
        """Of the warm-up or the rounds."""
        return self._last

    def set_up(self, worker: Worker, profile: Profile, *, device: str) -> None:
        """Build the trainer and warm it up; a second time begins afresh."""
        self.failure, self.out_of_memory = None, False
        self.losses, self.notes, self.rounds, self.tokens = [], [], {}, 0
        self._worker = worker
        profile = profile.replace(self._changes)
        plugins = {enabled.name: profile.plugins[enabled.name] for enabled in self.on}
        try:
            self.built = worker.build(
                profile.replace({"plugins": plugins}),
                device=device,
                plugin=self.judged.name if self.judged and self.judged in self.on else None,
                bare=self._bare,
                patience_s=self._protocol.patience_s,
            )
            self._warm_up(worker)
        except RungFailed as failure:
            self._fail_as(failure)

    def _warm_up(self, worker: Worker) -> None:
        protocol = self._protocol
        seconds: list[float] = []
        compiled: list[int] = []
        while len(seconds) < protocol.warmup_cap and not is_warm(seconds, compiled, protocol):
            lap = worker.advance(1, lead_in=0, patience_s=protocol.patience_s)
            self._keep(lap)
            seconds.append(lap.seconds)
            compiled.append(lap.compiled)
        self.step_s = median(seconds[-protocol.warmup_window :])
        self.warmup = warmup(seconds, compiled, build_s=self.built.seconds, protocol=protocol)

    def follow(self, protocol: Protocol) -> None:
        """Go on by another protocol."""
        self._protocol = protocol

    def turn(self, number: int) -> None:
        """The round of this number, which counts."""
        for lap in self.laps(1):
            self.rounds[number] = lap

    def laps(self, n: int) -> list[Lap]:
        """`n` rounds, or as many as succeed."""
        protocol = self._protocol
        done: list[Lap] = []
        try:
            while self.failure is None and len(done) < n:
                lap = self._standing.advance(
                    protocol.steps,
                    lead_in=protocol.lead_in,
                    patience_s=self._patience_s(protocol.lead_in + protocol.steps),
                )
                self._keep(lap)
                done.append(lap)
        except RungFailed as failure:
            self._fail_as(failure)
        return done

    def go(self, steps: int) -> Lap | None:
        """The next steps, all of them on the clock. None: it failed."""
        try:
            lap = self._standing.advance(steps, lead_in=0, patience_s=self._patience_s(steps))
            self._keep(lap)
        except RungFailed as failure:
            self._fail_as(failure)
            return None
        return lap

    def score(self, max_targets: int | None) -> float | None:
        """The validation loss as it is now, off the clock. None: it failed."""
        try:
            return self._standing.score(max_targets, patience_s=self._protocol.patience_s)
        except RungFailed as failure:
            self._fail_as(failure)
            return None

    def divide(self) -> None:
        """One round in which the time of its steps is divided up."""
        steps = self._protocol.steps
        with self._failing_is_a_note("divided up"):
            phases = self._standing.divide(steps, patience_s=self._patience_s(steps))
            self.divided.append(phases)

    def profile(self, trace: Path) -> None:
        """Find its largest operators; `trace` is to be written."""
        steps = self._protocol.profiled_steps
        with self._failing_is_a_note("profiled"):
            operators = self._standing.profile(
                steps, trace=trace, patience_s=self._patience_s(steps)
            )
            self.breakdown = Breakdown(median_phases(self.divided), operators, trace.name)

    @contextmanager
    def _failing_is_a_note(self, what: str) -> Iterator[None]:
        """What was measured before stands."""
        try:
            yield
        except RungFailed as failure:
            self.notes.append(f"it could not be {what}: {failure}")
            self.fail(str(failure))

    def hooks_us(self) -> float:
        """Microseconds that the hooks of a step take in its process where no plugin has any."""
        return self._standing.hooks_us(patience_s=self._protocol.patience_s)

    @property
    def _standing(self) -> Worker:
        assert self._worker is not None, "set_up comes first"
        return self._worker

    def _patience_s(self, steps: int) -> float:
        return self._protocol.patience_s + 10 * self.step_s * steps

    def fail(self, reason: str) -> None:
        """End it; the others need its memory."""
        self.failure = reason
        self.close()

    def close(self) -> None:
        """End its process; what it measured stays."""
        last_words = self._worker.close() if self._worker is not None else None
        if last_words is not None and self.failure is None:
            self.notes.append(last_words)

    def _fail_as(self, failure: RungFailed) -> None:
        self.out_of_memory = failure.out_of_memory
        self.fail(str(failure))

    def _keep(self, lap: Lap) -> None:
        self.losses += lap.losses
        self.tokens += lap.tokens
        self.notes += lap.notes
        self._last = lap
