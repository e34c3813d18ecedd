"""The process of one rung: builds it and advances it when told to. `python -m` runs it.

Requests come as JSON lines on stdin; each gets one JSON line as its answer on what was stdout when
the process began. Everything else that is printed, by a plugin or a library, goes to stderr. The
end of stdin, also that of a parent killed, is the end of the process.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from gptfast.bench.measure.bare import hooks_us
from gptfast.bench.measure.messages import MachineFacts
from gptfast.bench.measure.phases import divide, profiled
from gptfast.bench.measure.rung import Rung, TrainerLoop, built_rung
from gptfast.data.store import Store
from gptfast.device.machine import find_machine, measure_matmul_peak, peak_dtype
from gptfast.device.memory import is_out_of_memory
from gptfast.errors import GptfastError
from gptfast.host import registry
from gptfast.plugin import Profile
from gptfast.run.session import with_vocabulary
from gptfast.run.trainer import Trainer

Request = dict[str, Any]
LOOK_S = 0.1
"""How long another look at the matmul peak takes."""


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
        cpu_count=psutil.cpu_count() or 1,
        usable_cpus=_usable_cpus(),
        threads=torch.get_num_threads(),
        interop_threads=torch.get_num_interop_threads(),
        python=platform.python_version(),
        torch=torch.__version__,
        numpy=np.__version__,
        cuda=torch.version.cuda,
        uuid=_uuid(machine.device),
        peak_flops=measure_matmul_peak(machine.device, dtype),
        peak_dtype=str(dtype).removeprefix("torch."),
    )


def _usable_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return psutil.cpu_count() or 1


def _uuid(device: torch.device) -> str | None:
    """By which nvidia-smi knows a GPU, whatever CUDA_VISIBLE_DEVICES says."""
    if device.type != "cuda":
        return None
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def unsupported(profile: Profile, device: str) -> dict[str, str]:
    """Plugins of the profile that this machine does not support, with the reasons."""
    selection = registry.select(registry.plan(profile), find_machine(device), unsupported="skip")
    return {skipped.name: skipped.reason for skipped in selection.skipped}


def reason(error: BaseException) -> str:
    """One line that says what happened."""
    text = str(error) if isinstance(error, GptfastError) else f"{type(error).__name__}: {error}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # Ours end with what to do; what torch says below its first line is for its developers.
    said = " ".join(lines) if isinstance(error, GptfastError) else lines[0]
    return f"out of memory: {said}" if is_out_of_memory(error) else said


class Desk:
    """Answers requests; holds the rung once it is built."""

    def __init__(self, standing: ExitStack) -> None:
        self._standing = standing
        self._rung: Rung

    def answer(self, request: Request) -> dict[str, Any]:
        """What to say; an error is the answer of a request that failed."""
        try:
            handle: Callable[[Request], dict[str, Any]] = getattr(self, f"_{request['do']}")
            return handle(request)
        # Whatever a plugin or torch may raise: it is a row of the table, not its end.
        except Exception as error:
            traceback.print_exc()
            return {
                "failed": reason(error),
                "exit_code": getattr(error, "exit_code", 1),
                "out_of_memory": is_out_of_memory(error),
            }

    def _machine(self, request: Request) -> dict[str, Any]:
        profile = Profile.model_validate(request["profile"])
        return asdict(machine_facts(profile, request["device"]))

    def _peak(self, request: Request) -> dict[str, Any]:
        device = find_machine(request["device"]).device
        flops = measure_matmul_peak(device, peak_dtype(device), seconds=LOOK_S)
        return {"flops": flops}

    def _supports(self, request: Request) -> dict[str, Any]:
        profile = Profile.model_validate(request["profile"])
        return {"skipped": unsupported(profile, request["device"])}

    def _build(self, request: Request) -> dict[str, Any]:
        self._rung, built = self._standing.enter_context(
            built_rung(
                Profile.model_validate(request["profile"]),
                device=request["device"],
                plugin=request["plugin"],
                bare=request["bare"],
            )
        )
        # What stands now stays: a collection between laps need not look through it.
        gc.freeze()
        self._standing.callback(gc.unfreeze)
        return asdict(built)

    def _advance(self, request: Request) -> dict[str, Any]:
        return asdict(self._rung.advance(request["steps"], lead_in=request["lead_in"]))

    def _score(self, request: Request) -> dict[str, Any]:
        trainer = self._trainer
        with trainer.hooks.eval_scope():
            score = trainer.scorer.score("val", max_targets=request["max_targets"])
        assert score is not None, "only an interrupt ends an evaluation early"
        return {"loss": score.loss}

    def _divide(self, request: Request) -> dict[str, Any]:
        return asdict(divide(self._trainer, request["steps"]))

    def _profile(self, request: Request) -> dict[str, Any]:
        largest = profiled(self._trainer, request["steps"], trace=Path(request["trace"]))
        return {"operators": [asdict(operator) for operator in largest]}

    @property
    def _trainer(self) -> Trainer:
        loop = self._rung.loop
        assert isinstance(loop, TrainerLoop), "the bare loop has no parts"
        return loop.trainer

    def _hooks(self, request: Request) -> dict[str, Any]:
        return {"microseconds": hooks_us()}


def serve(requests: Iterator[str], answer: Callable[[dict[str, Any]], None]) -> None:
    """Answer each request; a failed one is answered with its reason."""
    with ExitStack() as standing:
        desk = Desk(standing)
        for line in requests:
            answer(desk.answer(json.loads(line)))


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
