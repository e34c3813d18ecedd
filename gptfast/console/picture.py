"""A picture of the live view, for the documentation."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence

from rich.console import Console as RichConsole

from gptfast.console.board import MAX_WIDTH, Board
from gptfast.report import EvalRecord, Logged, RunInfo

_WEB_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


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
    console = RichConsole(
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
