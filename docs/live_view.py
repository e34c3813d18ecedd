"""Makes docs/live.svg: a real run, and the live view as it stood at some step.

gptfast prepare shakespeare --tokenizer chars
python docs/live_view.py --profile fast --steps 600 --at 400
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from gptfast import config
from gptfast.console.picture import live_view_svg
from gptfast.report import EvalRecord, Logged, RunInfo, Silent
from gptfast.run.session import train


class Watcher(Silent):
    """Keeps what the live view is told, up to a step."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.records: list[Logged | EvalRecord] = []

    def started(self, info: RunInfo) -> None:
        self.info = info
        self.start = time.perf_counter()

    def logged(self, record: Logged) -> None:
        if record.step <= self.at:
            self.records.append(record)
            self.seconds = time.perf_counter() - self.start

    def evaluated(self, record: EvalRecord) -> None:
        if record.step <= self.at:
            self.records.append(record)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", default="fast")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--at", type=int, default=400)
    arguments = parser.parse_args()
    loaded = config.load(
        arguments.profile,
        overrides=[f"train.steps={arguments.steps}", "train.sample_tokens=0"],
    )
    watcher = Watcher(arguments.at)
    with tempfile.TemporaryDirectory() as folder:
        train(loaded, run=arguments.profile, folder=Path(folder), listener=watcher)
    svg = live_view_svg(watcher.info, watcher.records, seconds=watcher.seconds)
    Path(__file__).with_name("live.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
