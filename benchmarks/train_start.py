"""Seconds from `gptfast train` to the end of its first step, each start a process of its own.

Without more it starts a profile that compiles nothing. With `--compile` each round is a pair: a
start with an empty folder for what the compiler makes, and one with what the first left there.
Processor seconds of the process and its compilers are printed too: others on the machine do not
change them much.

    gptfast prepare shakespeare --tokenizer chars
    python benchmarks/train_start.py --rounds 9
    python benchmarks/train_start.py --compile --rounds 5
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from gptfast.bench.result.record import Protocol
from gptfast.bench.result.statistics import paired_ratio

QUICK_END = (
    *("train.steps=1", "train.log_interval=1", "train.warmup_steps=0"),
    *("train.eval_tokens=768", "train.sample_tokens=0"),
)
"""One step, and as little as may be behind it."""


@dataclass(frozen=True)
class Start:
    first_step_s: float
    cpu_s: float
    """User and system time until the process has ended."""


def start(arguments: list[str], *, folder: Path, compiled_in: Path | None) -> Start:
    environment = dict(os.environ)
    if compiled_in is not None:
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(compiled_in)
    command = [sys.executable, "-m", "gptfast", "train", "--plain", "--device", "cpu", *arguments]
    for change in QUICK_END:
        command += ["--set", change]
    begin = time.perf_counter()
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        first_step_s = None
        for line in process.stdout:
            if first_step_s is None and line.startswith("step 1/1"):
                first_step_s = time.perf_counter() - begin
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode or first_step_s is None:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return Start(first_step_s, usage.ru_utime + usage.ru_stime)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("data/shakespeare-chars.h5"))
    parser.add_argument("--compile", action="store_true", help="pairs of first and second starts")
    parser.add_argument("--profile", help="default: char; with --compile: fast")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()

    profile = asked.profile or ("fast" if asked.compile else "char")
    arguments = ["--profile", profile, "--set", f"data.path={asked.data.absolute()}"]
    if asked.compile:
        arguments += ["--plugin", "compile"]
    names = ["first start", "second start"] if asked.compile else ["start"]
    found: dict[str, list[Start]] = {name: [] for name in names}
    for number in range(asked.rounds):
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            for name, starts in found.items():
                cache = folder / "compiled" if asked.compile else None
                starts.append(start(arguments, folder=folder, compiled_in=cache))
                taken = starts[-1].first_step_s
                print(f"round {number + 1}, {name}: {taken:.2f} s", file=sys.stderr)
    print(f"{profile}, median of {asked.rounds} rounds: seconds to the end of the first step")
    for name, starts in found.items():
        seconds = [one.first_step_s for one in starts]
        print(
            f"{name:14}{statistics.median(seconds):7.2f} s ({min(seconds):.2f} to "
            f"{max(seconds):.2f}), {statistics.median(one.cpu_s for one in starts):.1f} s of "
            "processor time in all"
        )
    if asked.compile:
        second, first = ([one.first_step_s for one in found[name]] for name in reversed(names))
        ratio = paired_ratio(second, first, Protocol())
        print(f"second / first  {ratio.times:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]")


if __name__ == "__main__":
    main()
