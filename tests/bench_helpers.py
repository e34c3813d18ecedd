"""A clock, a memory and workers that are made up, for what `bench` computes and whom it seats."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench_plugins import Half, Hungry
from plugin_helpers import enabled

from gptfast.bench.ladder import Bound, measure, measure_without
from gptfast.bench.measure.conditions import Conditions
from gptfast.bench.measure.gauge import Gauge
from gptfast.bench.measure.messages import (
    Built,
    Footprint,
    Lap,
    MachineFacts,
    Operator,
    Phases,
    RungFailed,
)
from gptfast.bench.measure.process import WorkerProcess
from gptfast.bench.measure.worker import Desk
from gptfast.bench.result.record import Bench, Protocol
from gptfast.contract.tiny import tiny_profile
from gptfast.host.registry import Enabled
from gptfast.plugin import Claim, Plugin, Profile

PROTOCOL = Protocol(steps=5, rounds=8, lead_in=1, resamples=2000)
GIB = 2**30

FACTS = MachineFacts(
    device="cpu",
    name="a fake",
    platform="none",
    cpu_count=4,
    usable_cpus=4,
    threads=4,
    interop_threads=1,
    python="3",
    torch="2",
    numpy="2",
    cuda=None,
    uuid=None,
    peak_flops=312e12,
    peak_dtype="bfloat16",
)
CONDITIONS = Conditions(0.5, 2300.0, None, None, None, None)


class Doubling(Plugin):
    claim = Claim.EXACT


class Same(Plugin):
    claim = Claim.EXACT


class Needing(Plugin):
    claim = Claim.EXACT
    requires = ("hungry",)


DOUBLING, SAME, HALF = enabled("doubling", Doubling), enabled("same", Same), enabled("half", Half)
HUNGRY, NEEDING = enabled("hungry", Hungry), enabled("needing", Needing)


def quarter_second(plugins: Sequence[str], tick: int) -> float:
    return 0.25 / (2 if "doubling" in plugins else 1)


@dataclass
class FakeMachine:
    """A clock and workers that take their time from it, and a memory that they share.

    Attributes:
        step_s: of a rung with these plugins, at a tick of the clock.
        fails: where a rung makes trouble: name -> ("build" or how many laps before, reason).
        noise: relative difference of the losses of every other rung from what they should be.
        memory: of the device; each rung holds `rest` between laps and `peak` in one.
        turns: which rung did how many steps on the clock, in order.
    """

    step_s: Callable[[Sequence[str], int], float] = quarter_second
    fails: dict[str, tuple[str | int, str]] = field(default_factory=dict)
    compile_s: dict[str, float] = field(default_factory=dict)
    noise: float = 0.0
    memory: int = 100 * GIB
    rest: int = GIB
    peak: Mapping[str, int] = field(default_factory=dict)
    free_is_known: bool = True
    foreign_cpus: float = 0.0
    tick: int = 0
    turns: list[tuple[str, int]] = field(default_factory=list)
    divisions: list[str] = field(default_factory=list)
    """Whose steps were divided up, in order."""
    open: list[str] = field(default_factory=list)
    workers: list[FakeWorker] = field(default_factory=list)
    most_at_once: int = 0
    turn_of: str = ""
    """Who computes now."""

    @contextmanager
    def start(self, name: str) -> Iterator[FakeWorker]:
        self.open.append(name)
        worker = FakeWorker(self, name.removeprefix("+ "))
        self.workers.append(worker)
        yield worker
        worker.close()
        self.open.remove(name)

    @property
    def built(self) -> list[str]:
        """Who was built, in order."""
        return [worker.name for worker in self.workers if worker.standing or worker.closed]

    def free(self) -> int:
        return self.memory - sum(self.rest for worker in self.workers if worker.standing)


@dataclass
class FakeWorker:
    machine: FakeMachine
    name: str
    plugins: list[str] = field(default_factory=list)
    laps: int = 0
    done: int = 0
    standing: bool = False
    closed: bool = False

    def build(
        self, profile: Profile, *, device: str, plugin: str | None, bare: bool, patience_s: float
    ) -> Built:
        self.plugins = list(profile.plugins)
        self._trouble("build")
        self._take(self.machine.rest)
        self.standing = True
        at_once = sum(worker.standing for worker in self.machine.workers)
        self.machine.most_at_once = max(self.machine.most_at_once, at_once)
        return Built(1.5, self.plugins, "as asked", flops_per_token=859_900_000)

    def advance(self, steps: int, *, lead_in: int, patience_s: float) -> Lap:
        assert not self.closed
        machine = self.machine
        machine.turn_of = self.name
        self._trouble(self.laps)
        peak = machine.peak.get(self.name, 2 * machine.rest)
        self._take(peak - machine.rest)
        seconds = steps * machine.step_s(self.plugins, machine.tick)
        if self.laps == 0:
            seconds += machine.compile_s.get(self.name, 0.0)
        self.laps += 1
        machine.tick += 1
        machine.turns.append((self.name, steps))
        first, self.done = self.done, self.done + lead_in + steps
        half = "half" in self.plugins
        off = 1.0 + machine.noise * (machine.workers.index(self) % 2)
        losses = [4.0 / (1 + (i // 2 if half else i)) * off for i in range(first, self.done)]
        return Lap(
            steps=steps,
            seconds=seconds,
            tokens=steps * 25_000,
            losses=losses,
            compiled=0,
            data_wait_ms=0.25,
            memory_bytes=2**20,
            n_micro=2,
            notes=[],
            foreign_cpus=machine.foreign_cpus,
            footprint=Footprint(
                machine.rest, peak, machine.free() if machine.free_is_known else None
            ),
        )

    def _trouble(self, now: str | int) -> None:
        when, reason = self.machine.fails.get(self.name, (None, ""))
        if when == now:
            raise RungFailed(reason)

    def _take(self, n_bytes: int) -> None:
        if n_bytes > self.machine.free():
            raise RungFailed("out of memory: no more", out_of_memory=True)

    def score(self, max_targets: int | None, *, patience_s: float) -> float:
        assert self.standing
        return 4.0 / (1 + self.done)

    def divide(self, steps: int, *, patience_s: float) -> Phases:
        assert self.standing
        self.machine.divisions.append(self.name)
        return Phases(1.0, 80.0, 120.0, 40.0, 9.0 * self.machine.divisions.count(self.name))

    def profile(self, steps: int, *, trace: Path, patience_s: float) -> list[Operator]:
        assert self.standing
        return [Operator("aten::mm", 100.0, 24.0)]

    def hooks_us(self, *, patience_s: float) -> float:
        assert not self.closed
        return 1.5

    def close(self) -> None:
        self.closed, self.standing = True, False


def gauge(peak: float = FACTS.peak_flops) -> Gauge:
    """One that sees the same at each look."""
    return Gauge(peak, lambda: peak, between_rounds=True, tell=lambda line: None)


class AtHand(WorkerProcess):
    """A worker without a process of its own."""

    def __init__(self, scratch: Path) -> None:
        self._rungs = ExitStack()
        self._desk = Desk(self._rungs)

    def _ask(self, request: dict[str, Any], patience_s: float) -> dict[str, Any]:
        with redirect_stderr(io.StringIO()):  # which a process has in its log
            said = json.dumps(self._desk.answer(json.loads(json.dumps(request))))
        answer: dict[str, Any] = json.loads(said)
        return answer

    def close(self, *, farewell_s: float = 0.0) -> None:
        self._rungs.close()


def there(machine: FakeMachine, *order: Enabled, **changes: Any) -> Bound:
    """What a bench on the made-up machine is bound to."""
    bound = Bound(
        profile=tiny_profile({one.name: {} for one in order}),
        facts=FACTS,
        protocol=PROTOCOL,
        start=machine.start,
        tell=lambda line: None,
        look=lambda: CONDITIONS,
        gauge=gauge(changes.get("facts", FACTS).peak_flops),
    )
    return replace(bound, **changes)


def climb(machine: FakeMachine, *order: Enabled, **changes: Any) -> Bench:
    result = measure(there(machine, *order, **changes), order)
    assert not machine.open
    return result


def leave_out(machine: FakeMachine, *order: Enabled, **changes: Any) -> Bench:
    result = measure_without(there(machine, *order, **changes), order)
    assert not machine.open
    return result


def on_gpu(**changes: Any) -> MachineFacts:
    return replace(FACTS, device="cuda:0", **changes)
