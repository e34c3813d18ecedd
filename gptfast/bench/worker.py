"""The process of one rung: builds a trainer and advances it when told to. `python -m` runs it.

Requests come as JSON lines on stdin; each gets one JSON line as its answer on what was stdout when
the process began. Everything else that is printed, by a plugin or a library, goes to stderr. The
end of stdin, also that of a parent killed, is the end of the process.

A lap is on the clock from one synchronisation of the device to the next, with none in between and
with Python's garbage collection off.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gptfast import __version__, registry
from gptfast.bench.messages import Built, Lap, MachineFacts
from gptfast.data.store import Store
from gptfast.errors import GptfastError, Refused
from gptfast.hooks import Hooks
from gptfast.machine import (
    find_machine,
    measure_matmul_peak,
    peak_dtype,
    peak_memory_bytes,
    synchronize,
)
from gptfast.model import count_parameters, flops_per_token
from gptfast.plugin import Plugin, Profile, Stage, Stepped, Want
from gptfast.registry import Enabled
from gptfast.report import Logged, Silent
from gptfast.session import with_vocabulary
from gptfast.trainer import Trainer


class LossRecorder(Plugin):
    """Keeps the loss of each step on the device until it is asked for; changes nothing."""

    stage = Stage.REPORT

    def __init__(self) -> None:
        super().__init__(Plugin.Options())
        self.losses: list[Tensor] = []
        self.tokens = 0

    def step(self, event: Stepped) -> Want:
        self.losses.append(event.loss)
        self.tokens = event.tokens
        return Want.NOTHING


class Ear(Silent):
    """Remembers what the trainer and the plugins said."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.data_wait_ms = 0.0

    def note(self, line: str) -> None:
        self.notes.append(line)

    def logged(self, record: Logged) -> None:
        self.data_wait_ms = record.data_wait_ms


class Rung:
    """A trainer that keeps nothing, never evaluates, and is advanced in laps."""

    def __init__(self, trainer: Trainer, recorder: LossRecorder, ear: Ear) -> None:
        self._trainer = trainer
        self._recorder = recorder
        self._ear = ear
        self._compiled = graphs_compiled()

    def advance(self, steps: int, *, lead_in: int) -> Lap:
        """`lead_in` steps before the clock, then `steps` on it."""
        device, trainer = self._trainer.machine.device, self._trainer
        for _ in range(lead_in):
            trainer.one_step()
        self._flush()
        gc.collect()
        gc.disable()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        try:
            synchronize(device)
            start = time.perf_counter()
            for _ in range(steps):
                trainer.one_step()
            synchronize(device)
            seconds = time.perf_counter() - start
        finally:
            gc.enable()
        self._flush()
        lap = Lap(
            steps=steps,
            seconds=seconds,
            tokens=self._recorder.tokens * steps,
            losses=torch.stack(self._recorder.losses).tolist(),
            compiled=graphs_compiled() - self._compiled,
            data_wait_ms=self._ear.data_wait_ms,
            memory_bytes=peak_memory_bytes(device),
            n_micro=trainer.profile.train.n_micro,
            notes=list(self._ear.notes),
        )
        self._recorder.losses.clear()
        self._ear.notes.clear()
        self._compiled += lap.compiled
        if device.type == "cuda":
            # The rungs of a ladder are held at the same time: leave the others what is not in use.
            torch.cuda.empty_cache()
        return lap

    def _flush(self) -> None:
        """Have the trainer read the losses and refuse those that are not finite."""
        self._trainer.run(until=self._trainer.progress.step)


@contextmanager
def built_rung(
    profile: Profile, *, device: str, plugin: str | None
) -> Iterator[tuple[Rung, Built]]:
    """The rung of `profile`; `plugin` is the one that it adds.

    Raises:
        Refused: a plugin is not supported here.
    """
    machine = find_machine(device)
    recorder, ear = LossRecorder(), Ear()
    with Store.open(profile.data.path) as store:
        selection = registry.select(registry.plan(profile), machine, unsupported="skip")
        if selection.skipped:
            skipped = selection.skipped[0]
            about = "" if skipped.name == plugin else f"{skipped.name}: "
            raise Refused(f"{about}{skipped.reason}")
        watched = [*selection.enabled, Enabled("bench", recorder, "gptfast", __version__)]
        start = time.perf_counter()
        with Trainer(
            with_vocabulary(profile, store),
            hooks=Hooks(watched, note=ear.note),
            machine=machine,
            store=store,
            listener=ear,
        ) as trainer:
            synchronize(machine.device)
            seconds = time.perf_counter() - start
            yield (
                Rung(trainer, recorder, ear),
                Built(
                    seconds=seconds,
                    plugins=[enabled.name for enabled in selection.enabled],
                    detail=next((e.detail for e in selection.enabled if e.name == plugin), ""),
                    flops_per_token=flops_per_token(
                        trainer.profile.model, count_parameters(trainer.raw_model)
                    ),
                ),
            )


def graphs_compiled() -> int:
    """Graphs that torch.compile has made in this process so far."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])


def machine_facts(profile: Profile, device: str) -> MachineFacts:
    """Where the rungs will run, once it is certain that the data can be read.

    Raises:
        Refused: no such device, no such data, or another vocabulary.
    """
    machine = find_machine(device)
    with Store.open(Path(profile.data.path)) as store:
        with_vocabulary(profile, store)
    dtype = peak_dtype(machine.device)
    return MachineFacts(
        device=str(machine.device),
        name=machine.name,
        platform=platform.platform(),
        cpu_count=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        interop_threads=torch.get_num_interop_threads(),
        python=platform.python_version(),
        torch=torch.__version__,
        numpy=np.__version__,
        cuda=torch.version.cuda,
        peak_flops=measure_matmul_peak(machine.device, dtype),
        peak_dtype=str(dtype).removeprefix("torch."),
    )


def reason(error: BaseException) -> str:
    """One line that says what happened."""
    text = str(error) if isinstance(error, GptfastError) else f"{type(error).__name__}: {error}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"out of memory: {lines[0]}" if is_out_of_memory(error) else lines[0]


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether it is, or was raised from, a device's or the host's refusal of memory."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(error, RuntimeError) and (
            "can't allocate memory" in str(error) or "out of memory" in str(error)
        ):
            return True
        error = error.__cause__
    return False


def serve(requests: Iterator[str], answer: Callable[[dict[str, Any]], None]) -> None:
    """Answer each request; a failed one is answered with its reason."""
    rung: Rung | None = None
    with ExitStack() as standing:
        for line in requests:
            request = json.loads(line)
            try:
                if request["do"] == "advance":
                    assert rung is not None, "build comes first"
                    answer(asdict(rung.advance(request["steps"], lead_in=request["lead_in"])))
                    continue
                profile = Profile.model_validate(request["profile"])
                if request["do"] == "machine":
                    answer(asdict(machine_facts(profile, request["device"])))
                else:
                    rung, built = standing.enter_context(
                        built_rung(profile, device=request["device"], plugin=request["plugin"])
                    )
                    # What stands now stays: a collection between laps need not look through it.
                    gc.freeze()
                    standing.callback(gc.unfreeze)
                    answer(asdict(built))
            # Whatever a plugin or torch may raise: it is a row of the table, not its end.
            except Exception as error:
                traceback.print_exc()
                answer({"failed": reason(error), "exit_code": getattr(error, "exit_code", 1)})


def main() -> None:
    scratch = Path(sys.argv[1])
    # Compiled code of an earlier rung, or of last week, would hide what compiling costs.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(scratch / "inductor")
    os.environ["TRITON_CACHE_DIR"] = str(scratch / "triton")
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

        def answer(record: dict[str, Any]) -> None:
            answers.write(json.dumps(record) + "\n")
            answers.flush()

        serve(iter(sys.stdin.readline, ""), answer)


if __name__ == "__main__":
    main()
