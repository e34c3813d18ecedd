"""One rung from the start of its process to its last round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from statistics import median
from typing import Protocol as Interface

from gptfast.bench.messages import Built, Lap, RungFailed
from gptfast.bench.record import Protocol, Warmup
from gptfast.bench.statistics import is_warm, warmup
from gptfast.plugin import Plugin, Profile
from gptfast.registry import Enabled

BASELINE = "baseline"


class Worker(Interface):
    """What a rung needs of its process; `WorkerProcess` is the real one."""

    def build(
        self, profile: Profile, *, device: str, plugin: str | None, patience_s: float
    ) -> Built: ...
    def advance(self, steps: int, *, lead_in: int, patience_s: float) -> Lap: ...
    def close(self) -> None: ...


Start = Callable[[str], AbstractContextManager[Worker]]
"""Starts the worker of the rung of this name."""


class Attempt:
    """A rung that is tried here: `set_up`, then rounds. A failure ends it and is kept as a reason.

    Args:
        added: the plugin that it adds; None: the baseline.
        on: all its plugins, in the order in which the ladder added them.
    """

    built: Built
    warmup: Warmup

    def __init__(self, added: Enabled | None, on: Sequence[Enabled], protocol: Protocol) -> None:
        self.added = added
        self.on = list(on)
        self.failure: str | None = None
        self.losses: list[float] = []
        """Of each step from the first."""
        self.rounds: list[Lap] = []
        """Those that count."""
        self.notes: list[str] = []
        self.step_s = 0.0
        """Of a steady step in the warm-up."""
        self._protocol = protocol
        self._worker: Worker | None = None

    @property
    def name(self) -> str:
        return f"+ {self.added.name}" if self.added else BASELINE

    @property
    def plugins(self) -> list[Plugin]:
        return [enabled.plugin for enabled in self.on]

    @property
    def ran(self) -> bool:
        """Whether it did all its rounds."""
        return len(self.rounds) == self._protocol.rounds

    @property
    def round_step_ms(self) -> list[float]:
        return [lap.step_ms for lap in self.rounds]

    @property
    def step_ms(self) -> float:
        return median(self.round_step_ms)

    def set_up(self, worker: Worker, profile: Profile, *, device: str) -> None:
        """Build the trainer and warm it up."""
        self._worker = worker
        plugins = {enabled.name: profile.plugins[enabled.name] for enabled in self.on}
        try:
            self.built = worker.build(
                profile.replace({"plugins": plugins}),
                device=device,
                plugin=self.added.name if self.added else None,
                patience_s=self._protocol.patience_s,
            )
            self._warm_up(worker)
        except RungFailed as failure:
            self.fail(str(failure))

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

    def turn(self) -> None:
        """One round that counts."""
        self.rounds += self.laps(1)

    def laps(self, n: int) -> list[Lap]:
        """`n` rounds, or as many as succeed."""
        protocol = self._protocol
        expected_s = self.step_s * (protocol.lead_in + protocol.steps)
        done: list[Lap] = []
        try:
            while self.failure is None and len(done) < n:
                assert self._worker is not None, "set_up comes first"
                lap = self._worker.advance(
                    protocol.steps,
                    lead_in=protocol.lead_in,
                    patience_s=protocol.patience_s + 10 * expected_s,
                )
                self._keep(lap)
                done.append(lap)
        except RungFailed as failure:
            self.fail(str(failure))
        return done

    def fail(self, reason: str) -> None:
        """End it; the others need its memory."""
        self.failure = reason
        if self._worker is not None:
            self._worker.close()

    def _keep(self, lap: Lap) -> None:
        self.losses += lap.losses
        self.notes += lap.notes
