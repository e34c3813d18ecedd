"""Plays the records of an invented run to the console: `python tests/watch.py [--plain] [--wait]`.

`--wait` reads a line from stdin after the tenth record, so that a test can look in between.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator

from gptfast.cli.app import App
from gptfast.console.live import training
from gptfast.report import EvalRecord, Finished, Logged, PluginLine, RunInfo

STEPS = 400
SAMPLE = "KING [bold red]HENRY[/]:\r\nOnce \x1b[2Jmore\x07, café 数据 👑\n"
INFO = RunInfo(
    name="demo",
    folder="runs/demo",
    profile="quick",
    device="Some CPU [tm]",
    params=834_000,
    flops_per_token=5_000_000,
    peak_flops=1e11,
    steps=STEPS,
    start_step=0,
    batch_size=12,
    n_micro=2,
    block_size=64,
    vocab_size=65,
    plugins=(PluginLine("flash", "rounding", "sdpa"), PluginLine("ema", "recipe")),
    skipped=(("compile", "no C++ compiler [see docs]: install g++"),),
)


def records() -> Iterator[Logged | EvalRecord]:
    for step in range(4, STEPS + 1, 4):
        loss = 1.5 + 2.7 * math.exp(-step / 100)
        yield Logged(
            step=step,
            steps=STEPS,
            loss=loss,
            learning_rate=9.8e-4,
            grad_norm=0.914,
            step_ms=11.8,
            tokens_per_s=65_084.2,
            peak_share=0.38,
            data_wait_ms=0.05,
            memory_bytes=123 << 20,
            skipped_steps=0,
            epoch=step / 1307,
        )
        if step % 100 == 0:
            yield EvalRecord(step, loss + 0.1, 111_540, True, 0.8)


def main() -> None:
    app = App.from_environment(os.environ)
    with training(app.console, plain="--plain" in sys.argv) as listener:
        listener.started(INFO)
        listener.note("a note [with] brackets")
        for number, record in enumerate(records()):
            if number == 10 and "--wait" in sys.argv:
                sys.stdin.readline()
            if isinstance(record, Logged):
                listener.logged(record)
            else:
                listener.evaluated(record)
        listener.saved(200, "runs/demo/checkpoints/step-000200")
        listener.sampled(200, "in between")
        listener.sampled(STEPS, SAMPLE)
        listener.finished(Finished(STEPS, 23.6, 1.5301, 1.699, 1.695, None, "runs/demo [1]", 7.5))


if __name__ == "__main__":
    main()
