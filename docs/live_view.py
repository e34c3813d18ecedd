"""Makes docs/live.svg: a real run, and the live view as it stood at some step.

gptfast prepare shakespeare --tokenizer chars
python docs/live_view.py --profile fast --steps 600 --at 400
"""

from __future__ import annotations

import argparse
import io
import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from gptfast import config
from gptfast.console.board import MAX_WIDTH, Board
from gptfast.report import EvalRecord, Logged, RunInfo, Silent
from gptfast.run.session import train

_WEB_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


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


def live_view_svg(
    info: RunInfo,
    records: Sequence[Logged | EvalRecord],
    *,
    seconds: float,
    saved: int | None = None,
    width: int = MAX_WIDTH,
) -> str:
    """The live view as SVG, as it looks `seconds` into a run, after `records`.

    The picture is the same each time and loads nothing from the network.
    """
    readings = [0.0]
    board = Board(info, now=lambda: readings[-1], saved=saved)
    readings.append(seconds)
    for record in records:
        if isinstance(record, Logged):
            board.logged(record)
        else:
            board.evaluated(record)
    console = Console(
        record=True,
        file=io.StringIO(),
        width=width,
        force_terminal=True,
        color_system="truecolor",
        _environ={},
    )
    console.print(board.render(width))
    svg = console.export_svg(title="gptfast train", unique_id="gptfast")
    return _WEB_FONTS.sub("", svg)


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
