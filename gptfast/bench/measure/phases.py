"""Where the time of a step goes: four phases by a stopwatch, the largest operators by torch's
profiler.

The phases are timed without the profiler, which would slow them. On a GPU the stopwatch is made of
events that the device records on its stream in passing, so nothing waits for it: a phase lasts
until the device is through with it, and waiting for data counts where it leaves the device idle.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from gptfast.bench.measure.messages import Operator, Phases
from gptfast.device.machine import synchronize
from gptfast.helpers import has_gradients
from gptfast.plugin import Batch, Source, Stepper, Windows
from gptfast.run.trainer import Trainer

LARGEST = 10
DATA, FORWARD, BACKWARD, OPTIMIZER = "data", "forward", "backward", "optimizer"


def divide(trainer: Trainer, steps: int) -> Phases:
    """Do `steps` steps under the stopwatch."""
    watch = Stopwatch(trainer.machine.device)
    with timed(trainer, watch) as model, watch.phase("step"):
        for _ in range(steps):
            trainer.one_step()
    ms = {phase: total / steps for phase, total in watch.milliseconds().items()}
    return Phases(
        data_ms=ms[DATA],
        forward_ms=ms[FORWARD],
        backward_ms=ms[BACKWARD],
        optimizer_ms=ms[OPTIMIZER],
        rest_ms=ms["step"] - ms[DATA] - ms[FORWARD] - ms[BACKWARD] - ms[OPTIMIZER],
        backward_in_forward=model.found_gradients,
    )


def profiled(trainer: Trainer, steps: int, *, trace: Path) -> list[Operator]:
    """The largest operators of `steps` steps under torch's profiler, the first not counted.

    Args:
        trace: file to write for Perfetto; one that ends in .gz is packed.
    """
    with timed(trainer, Stopwatch(trainer.machine.device)):  # its phases have bars in the trace
        return _profiled(trainer, steps, trace=trace)


def _profiled(trainer: Trainer, steps: int, *, trace: Path) -> list[Operator]:
    device = trainer.machine.device
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    # The first step under a profiler pays for its beginning.
    plan = schedule(wait=0, warmup=1, active=steps, repeat=1)
    with profile(activities=activities, schedule=plan) as profiler:
        for _ in range(1 + steps):
            trainer.one_step()
            synchronize(device)
            profiler.step()
    profiler.export_chrome_trace(str(trace))
    # Kernels where there are any; our own phases are no operators.
    kind, time_of = (
        ("CUDA", "self_device_time_total")
        if device.type == "cuda"
        else ("CPU", "self_cpu_time_total")
    )
    found = [
        Operator(row.key, float(getattr(row, time_of)) / 1e3 / steps, row.count / steps)
        for row in profiler.key_averages()
        if row.device_type.name == kind and not row.is_user_annotation
    ]
    return sorted(found, key=lambda operator: -operator.ms)[:LARGEST]


class Stopwatch:
    """Adds up the time within each phase; nothing is known before `milliseconds` is asked."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._laps: defaultdict[str, list[tuple[Any, Any]]] = defaultdict(list)

    def moment(self) -> Any:
        """A mark in time: of the host's clock, or in the device's stream."""
        if self._device.type == "cpu":
            return time.perf_counter()
        if self._device.type == "mps":
            mark = torch.mps.event.Event(enable_timing=True)
            mark.record()
            return mark
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch
        event.record(torch.cuda.current_stream(self._device))
        return event

    def lap(self, phase: str, start: Any) -> None:
        """`phase` lasted from `start` until now."""
        self._laps[phase].append((start, self.moment()))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What is inside belongs to a phase, which has a bar of its own in a trace."""
        with record_function(name):
            start = self.moment()
            yield
            self.lap(name, start)

    def milliseconds(self) -> dict[str, float]:
        """Of each phase, all its laps together."""
        synchronize(self._device)
        return {
            phase: sum(_between(start, end) for start, end in laps)
            for phase, laps in self._laps.items()
        }


def _between(start: Any, end: Any) -> float:
    """Milliseconds from one moment to another."""
    if isinstance(start, float):
        return float(end - start) * 1e3
    return float(start.elapsed_time(end))


@contextmanager
def timed(trainer: Trainer, watch: Stopwatch) -> Iterator[TimedModel]:
    """Have the parts of a trainer under the stopwatch; afterwards they are as before."""
    before = trainer.source, trainer.model, trainer.stepper
    trainer.source = TimedSource(trainer.source, watch)
    trainer.model = model = TimedModel(trainer.model, watch)
    trainer.stepper = TimedStepper(trainer.stepper, watch)
    try:
        yield model
    finally:
        trainer.source, trainer.model, trainer.stepper = before


class TimedSource:
    def __init__(self, source: Source, watch: Stopwatch) -> None:
        self._source = source
        self._watch = watch

    @property
    def windows(self) -> Windows:
        return self._source.windows

    @property
    def step(self) -> int:
        return self._source.step

    @step.setter
    def step(self, step: int) -> None:
        self._source.step = step

    def next(self) -> Batch:
        with self._watch.phase(DATA):
            return self._source.next()

    def seek(self, step: int) -> None:
        self._source.seek(step)

    def close(self) -> None:
        self._source.close()


class TimedModel(nn.Module):
    def __init__(self, model: nn.Module, watch: Stopwatch) -> None:
        super().__init__()
        self.model = model
        self.found_gradients = False
        """Whether a loss came with its gradients."""
        self._watch = watch

    def forward(self, *args: Any) -> Any:
        with self._watch.phase(FORWARD):
            loss = self.model(*args)
        self.found_gradients |= has_gradients(loss)
        return loss


class TimedStepper:
    """The optimizer's phase begins with `unscale`: clipping comes after it and is in it."""

    def __init__(self, stepper: Stepper, watch: Stopwatch) -> None:
        self._stepper = stepper
        self._watch = watch
        self._update: Any

    def backward(self, loss: Tensor) -> None:
        with self._watch.phase(BACKWARD):
            self._stepper.backward(loss)

    def unscale(self, optimizer: Optimizer) -> None:
        self._update = self._watch.moment()
        self._stepper.unscale(optimizer)

    def step(self, optimizer: Optimizer) -> bool:
        with record_function(OPTIMIZER):
            stepped = self._stepper.step(optimizer)
        self._watch.lap(OPTIMIZER, self._update)
        return stepped

    def skip(self, optimizer: Optimizer) -> None:
        self._stepper.skip(optimizer)
        self._watch.lap(OPTIMIZER, self._update)
