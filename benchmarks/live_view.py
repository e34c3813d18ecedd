"""What the live view costs: blocks of steps with and without it, by turns, in one training.

The training runs on a pseudo-terminal of 100 columns that is read by this process, as a terminal
emulator would. The view has no thread, so beside the ratio of the blocks the share of the time that
is spent in its methods is exact, however busy the machine.

    gptfast prepare shakespeare --tokenizer chars
    python benchmarks/live_view.py --rounds 20
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gptfast.bench.result.record import Protocol
from gptfast.bench.result.statistics import paired_ratio
from gptfast.report import Listener, RunInfo, Silent


class Timed:
    """A listener that hands on to another while it is `on`, and counts the seconds that takes."""

    def __init__(self, view: Listener) -> None:
        self.on = True
        self.seconds = 0.0
        self._view = view

    def __getattr__(self, name: str) -> Callable[..., None]:
        target = getattr(self._view if self.on else Silent(), name)

        def timed(*args: Any) -> None:
            start = time.perf_counter()
            target(*args)
            self.seconds += time.perf_counter() - start

        return timed


def blocks(profile: str, data: Path, *, steps: int, rounds: int) -> dict[str, Any]:
    """Seconds of each block with and without the view, and of the view's methods."""
    from gptfast.config import load
    from gptfast.console import Console, Look
    from gptfast.console.live import training
    from gptfast.data.store import Store
    from gptfast.device.machine import find_machine
    from gptfast.host import registry
    from gptfast.host.hooks import Hooks
    from gptfast.run.session import run_info, with_vocabulary
    from gptfast.run.trainer import Trainer

    changes = [f"data.path={data}", "train.steps=1000000", "train.eval_interval=0"]
    loaded = load(profile, overrides=[*changes, "train.save_interval=0"], folder=Path.cwd())
    machine = find_machine("cpu")
    console = Console(sys.stdout, sys.stderr, Look(width=100))
    assert console.is_terminal
    with Store.open(data) as store, training(console) as view:
        selection = registry.select(registry.plan(loaded.profile), machine, unsupported="skip")
        listener = Timed(view)
        with Trainer(
            with_vocabulary(loaded.profile, store),
            hooks=Hooks(selection.enabled, note=lambda line: None),
            machine=machine,
            store=store,
            listener=listener,
        ) as trainer:
            info: RunInfo = run_info(trainer, selection, None, None)
            listener.started(info)
            trainer.run(until=steps)
            listener.seconds = 0.0
            seconds: dict[bool, list[float]] = {True: [], False: []}
            for number in range(rounds):
                for listener.on in (True, False) if number % 2 == 0 else (False, True):
                    start = time.perf_counter()
                    trainer.run(until=trainer.progress.step + steps)
                    seconds[listener.on].append(time.perf_counter() - start)
    return {"with": seconds[True], "without": seconds[False], "view": listener.seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("data/shakespeare-chars.h5"))
    parser.add_argument("--profile", default="char")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=50, help="in a block")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.inside is not None:
        found = blocks(asked.profile, asked.data, steps=asked.steps, rounds=asked.rounds)
        asked.inside.write_text(json.dumps(found))
        return

    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "seconds.json")
        command = [sys.executable, __file__, "--inside", str(result), "--profile", asked.profile]
        command += ["--data", str(asked.data.absolute())]
        command += ["--rounds", str(asked.rounds), "--steps", str(asked.steps)]
        ours, theirs = pty.openpty()
        environment = {**os.environ, "TERM": "xterm-256color"}
        with subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
        ) as process:
            os.close(theirs)
            n_bytes = drained(ours)
        if process.returncode:
            raise SystemExit(f"the training ended with {process.returncode}")
        found = json.loads(result.read_text())
    ratio = paired_ratio(found["with"], found["without"], Protocol())
    share = found["view"] / sum(found["with"])
    print(
        f"{asked.profile}, {asked.rounds} pairs of blocks of {asked.steps} steps by turns, "
        f"{n_bytes:,} bytes drawn\n"
        f"time with the view / without  {ratio.times:.4f} [{ratio.low:.4f}, {ratio.high:.4f}]\n"
        f"in the view's methods         {share:.2%} of the time with it"
    )


def drained(terminal: int) -> int:
    """Read until the other side is closed; returns the number of bytes."""
    n_bytes = 0
    while True:
        try:
            n_bytes += len(os.read(terminal, 65536))
        except OSError:  # EIO: how Linux says so
            return n_bytes


if __name__ == "__main__":
    main()
