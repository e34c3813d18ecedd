"""What is advanced in a worker: a trainer that keeps nothing and never evaluates, or the bare loop.

A lap is on the clock from one synchronisation of the device to the next, with none in between and
with Python's garbage collection off.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol as Interface

import psutil
import torch
from torch import Tensor

from gptfast import __version__
from gptfast.bench.measure.bare import bare_loop
from gptfast.bench.measure.conditions import CpuUse
from gptfast.bench.measure.messages import Built, Footprint, Lap
from gptfast.data.store import Store
from gptfast.device.machine import find_machine, peak_memory_bytes, synchronize
from gptfast.errors import Refused
from gptfast.host import registry
from gptfast.host.hooks import Hooks
from gptfast.host.registry import Enabled
from gptfast.model import count_parameters, flops_per_token
from gptfast.plugin import Machine, Plugin, Profile, Stage, Stepped, Want
from gptfast.report import Logged, Silent
from gptfast.run.session import with_vocabulary
from gptfast.run.trainer import Trainer

CUDA_CONTEXT_BYTES = 512 * 2**20
"""What a process takes of a GPU besides its tensors, which no allocator counts: about so much."""


class Loop(Interface):
    """What trains, a step at a time."""

    machine: Machine
    losses: list[Tensor]
    """Of the steps since they were last taken away, on the device."""
    tokens: list[int]
    """Target tokens of the same steps, which a plugin may have left fewer of."""
    data_wait_ms: float
    """Mean wait for the windows of a step, of those last settled."""
    notes: list[str]

    @property
    def profile(self) -> Profile:
        """What it trains by, as it is now."""

    def one_step(self) -> None: ...
    def settle(self) -> None:
        """Read what steps left on the device, off the clock."""


class LossRecorder(Plugin):
    """Keeps loss and tokens of each step until they are asked for; changes nothing."""

    stage = Stage.REPORT

    def __init__(self, losses: list[Tensor], tokens: list[int]) -> None:
        super().__init__(Plugin.Options())
        self._losses = losses
        self._tokens = tokens

    def step(self, event: Stepped) -> Want:
        self._losses.append(event.loss)
        self._tokens.append(event.tokens)
        return Want.NOTHING


class TrainerLoop(Silent):
    """A trainer, and what it and the plugins say meanwhile."""

    trainer: Trainer

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.losses: list[Tensor] = []
        self.tokens: list[int] = []
        self.data_wait_ms = 0.0
        self.notes: list[str] = []

    def note(self, line: str) -> None:
        self.notes.append(line)

    def logged(self, record: Logged) -> None:
        self.data_wait_ms = record.data_wait_ms

    @property
    def profile(self) -> Profile:
        return self.trainer.profile

    def one_step(self) -> None:
        self.trainer.one_step()

    def settle(self) -> None:
        """Have the trainer read the losses and refuse those that are not finite."""
        self.trainer.run(until=self.trainer.progress.step)


class BareLoop:
    """The hand-written loop, to measure the trainer against."""

    def __init__(self, profile: Profile, *, store: Store, machine: Machine) -> None:
        self.machine = machine
        self.losses: list[Tensor] = []
        self.tokens: list[int] = []
        self.data_wait_ms = 0.0
        self.notes: list[str] = []
        self.profile = profile
        self._one_step = bare_loop(profile, store=store, machine=machine)

    def one_step(self) -> None:
        self.losses.append(self._one_step())
        self.tokens.append(self.profile.train.batch_size * self.profile.model.block_size)

    def settle(self) -> None: ...


class Rung:
    """A loop that is advanced in laps."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self._windows = loop.profile.train.windows_per_micro
        self._compiled = graphs_compiled()

    def advance(self, steps: int, *, lead_in: int) -> Lap:
        """`lead_in` steps before the clock, then `steps` on it.

        Raises:
            OutOfMemoryError: the trainer went on with smaller micro-batches, which is other work.
        """
        loop, device = self.loop, self.loop.machine.device
        for _ in range(lead_in):
            loop.one_step()
        loop.settle()
        gc.collect()
        gc.disable()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        others = CpuUse()
        try:
            synchronize(device)
            start = time.perf_counter()
            for _ in range(steps):
                loop.one_step()
            synchronize(device)
            seconds = time.perf_counter() - start
        finally:
            gc.enable()
        foreign_s = others.foreign_s()
        loop.settle()
        train = loop.profile.train
        if train.windows_per_micro < self._windows:
            raise torch.OutOfMemoryError(
                f"{self._windows} windows do not fit into a forward pass, "
                f"{train.windows_per_micro} do: set train.micro_batch to that"
            )
        lap = Lap(
            steps=steps,
            seconds=seconds,
            tokens=sum(loop.tokens[-steps:]),
            losses=torch.stack(loop.losses).tolist(),
            compiled=graphs_compiled() - self._compiled,
            data_wait_ms=loop.data_wait_ms,
            memory_bytes=peak_memory_bytes(device),
            n_micro=train.n_micro,
            notes=list(loop.notes),
            foreign_cpus=foreign_s / seconds,
            footprint=footprint(device),
        )
        loop.losses.clear()
        loop.tokens.clear()
        loop.notes.clear()
        self._compiled += lap.compiled
        return lap


@contextmanager
def built_rung(
    profile: Profile, *, device: str, plugin: str | None, bare: bool = False
) -> Iterator[tuple[Rung, Built]]:
    """The rung of `profile`; `plugin` is the one that it adds, `bare` the hand-written loop.

    Raises:
        Refused: a plugin is not supported here.
    """
    machine = find_machine(device)
    with Store.open(profile.data.path) as store:
        profile = with_vocabulary(profile, store)
        if bare:
            start = time.perf_counter()
            rung = Rung(BareLoop(profile, store=store, machine=machine))
            flops = 0
            yield rung, Built(time.perf_counter() - start, [], "", flops)
            return
        selection = registry.select(registry.plan(profile), machine, unsupported="skip")
        if selection.skipped:
            skipped = selection.skipped[0]
            about = "" if skipped.name == plugin else f"{skipped.name}: "
            raise Refused(f"{about}{skipped.reason}")
        loop = TrainerLoop(machine)
        recorder = Enabled("bench", LossRecorder(loop.losses, loop.tokens), "gptfast", __version__)
        start = time.perf_counter()
        with Trainer(
            profile,
            hooks=Hooks([*selection.enabled, recorder], note=loop.note),
            machine=machine,
            store=store,
            listener=loop,
        ) as loop.trainer:
            synchronize(machine.device)
            built = Built(
                seconds=time.perf_counter() - start,
                plugins=[enabled.name for enabled in selection.enabled],
                detail=next((e.detail for e in selection.enabled if e.name == plugin), ""),
                flops_per_token=flops_per_token(
                    loop.trainer.profile.model, count_parameters(loop.trainer.raw_model)
                ),
            )
            yield Rung(loop), built


def graphs_compiled() -> int:
    """Graphs that torch.compile has made in this process so far."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])


def footprint(device: torch.device) -> Footprint:
    """Memory that this process takes on the device, which for a CPU is the host's.

    On a GPU the blocks not in use are given back first: rungs stand beside one another.
    """
    if device.type == "cuda":
        peak = torch.cuda.max_memory_reserved(device)
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        rest = torch.cuda.memory_reserved(device)
        return Footprint(rest + CUDA_CONTEXT_BYTES, peak + CUDA_CONTEXT_BYTES, free)
    if device.type == "mps":
        held = torch.mps.driver_allocated_memory()
        return Footprint(held, held, torch.mps.recommended_max_memory() - held)
    rest = psutil.Process().memory_info().rss
    peak = peak_memory_bytes(device) or rest
    return Footprint(rest, max(rest, peak), psutil.virtual_memory().available)
