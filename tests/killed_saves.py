"""Kills a training that saves each step, again and again; a program for `test_never_lost.py`.

    python killed_saves.py FOLDER ROUNDS SEED

FOLDER holds a `gptfast.toml`. Each round forks after the imports, resumes the run and kills it at a
random moment. Then one save is killed before each of its file operations in turn. Prints what it
found as JSON.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from gptfast import config
from gptfast.contract.tiny import build_rig
from gptfast.report import RunInfo, Silent
from gptfast.run import session
from gptfast.run.checkpoint import Checkpoint
from gptfast.run.folder import Run

LONGEST_S = 0.2
"""Most that a round may live once it trains; a step with its save takes a fraction of that."""


class Starts(Silent):
    """Makes sure that nothing half-made is left when a run begins, and tells of the beginning."""

    def __init__(self, run: Run, tell: int | None) -> None:
        self.run, self.tell = run, tell

    def started(self, info: RunInfo) -> None:
        assert not unfinished(self.run)
        if self.tell is not None:
            os.write(self.tell, b"!")


def unfinished(run: Run) -> list[str]:
    return [path.name for path in run.folder.rglob(".*")]


def train(run: Run, *, stop_at: int | None = None, tell: int | None = None) -> None:
    session.train(
        config.load(folder=run.folder.parent.parent),
        run=run.folder.name,
        resume=bool(run.steps()),
        stop_at=stop_at,
        device="cpu",
        folder=run.folder.parent.parent,
        listener=Starts(run, tell),
    )


def killed_round(run: Run, seconds: float, *, once_started: bool) -> None:
    hear, tell = os.pipe()
    child = os.fork()
    if child == 0:
        train(run, tell=tell)
        os._exit(0)
    os.close(tell)
    if once_started:
        assert os.read(hear, 1), "the round has not begun to train"
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    os.close(hear)
    assert os.WIFSIGNALED(status), f"ended by itself: {status}"


FILE_EVENTS = {"open", "os.rename", "os.mkdir", "os.rmdir", "os.remove"}


def killed_before_each_file_operation(folder: Path) -> int:
    """How many operations a save has that rotates an older checkpoint away; all were survived."""
    with build_rig({}, machine=None, found={}) as rig:
        profile = rig.profile(train__keep_checkpoints=1, train__eval_interval=0)
        run = Run.create(folder / "saved", profile_toml=profile.to_toml())
        trainer, _ = rig.trainer(profile, run=run)
        with trainer:
            trainer.run(3)
            trainer.one_step()
            for number in itertools.count():
                trainer.saver.run = Run(folder / f"saved-{number}")
                shutil.copytree(run.folder, trainer.saver.run.folder)
                child = os.fork()
                if child == 0:
                    kill_before(number)
                    trainer.saver.save()
                    os._exit(0)
                _, status = os.waitpid(child, 0)
                again = Run.resumed(trainer.saver.run.folder)
                found = again.newest_intact()
                assert not found.damaged, found.damaged
                assert not unfinished(again)
                if not os.WIFSIGNALED(status):
                    assert (status, again.steps()) == (0, [4])
                    return number
    raise AssertionError


def kill_before(number: int) -> None:
    """Have this process killed before its next file operation but `number`."""
    left = itertools.count(number, -1)

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event in FILE_EVENTS and next(left) == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def main(folder: Path, rounds: int, seed: int) -> None:
    torch.set_num_threads(1)
    # A quarter of a second of warming up in each round would hit no save.
    session.measure_matmul_peak = lambda *args, **kwargs: 1.0
    chance = random.Random(seed)
    run = Run(folder / "runs" / "killed")
    # What torch imports in its first step is imported before the forks.
    train(Run(folder / "runs" / "first"), stop_at=1)
    in_save = 0
    for number in range(rounds):
        before = run.steps()
        # One in four may be hit while it is still being built and resumed.
        killed_round(run, chance.uniform(0, LONGEST_S), once_started=number % 4 != 0)
        in_save += bool(run.folder.exists() and unfinished(run))
        steps = run.steps()
        assert steps[-1:] >= before[-1:], "a newer checkpoint is gone"
        for step in steps:
            Checkpoint.open(run.checkpoint_folder(step)).check()
    last = run.steps()[-1] + 1
    train(run, stop_at=last)
    straight = Run(folder / "runs" / "straight")
    train(straight, stop_at=last)
    one, other = (load_file(one.latest().folder / "model.safetensors") for one in (run, straight))
    sys.stdout.write(
        json.dumps(
            {
                "operations": killed_before_each_file_operation(folder),
                "kills": rounds,
                "kills_in_a_save": in_save,
                "steps": last,
                "logged": [r["step"] for r in run.metrics() if r["kind"] == "step"],
                "unfinished": unfinished(run),
                "equal": all(torch.equal(one[name], other[name]) for name in one),
            }
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
