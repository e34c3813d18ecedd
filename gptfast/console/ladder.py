"""Pictures of a bench: bars of the time after each rung, and where that time goes."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.text import Text

from gptfast.console.text import bar, one_line
from gptfast.errors import Refused

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg")
WIDEST = 60
"""Columns of the longest bar."""
NARROWEST = 8
LETTER = 0.0115
"""Width of one beside a bar, as a share of the axis."""
COLOURS = ("#4c72b0", "#55a868", "#c44e52", "#dd8452", "#8c8c8c")
"""Colours of data, forward, backward, optimizer, rest."""


@dataclass(frozen=True)
class Bar:
    """A rung's bar.

    Attributes:
        step_ms: None: it cannot run, and its row stays empty.
        said: what stands beside it.
        phases: milliseconds of each part of the step, in the order of the legend; None: unknown.
    """

    name: str
    step_ms: float | None
    said: str
    phases: Sequence[float] | None = None


def in_terminal(bars: Sequence[Bar], *, width: int, ascii_only: bool = False) -> Iterator[Text]:
    """A line for each bar, the longest as long as there is room."""
    longest = max((one.step_ms or 0.0 for one in bars), default=0.0)
    names = [one_line(one.name, ascii_only=ascii_only) for one in bars]
    said = [one_line(one.said, ascii_only=ascii_only) for one in bars]
    margin = max(map(len, names), default=0)
    room = min(WIDEST, width - margin - max(map(len, said), default=0) - 3)
    for one, name, beside in zip(bars, names, said, strict=True):
        share = (one.step_ms or 0.0) / longest if longest else 0.0
        done, _ = bar(share, max(room, NARROWEST), ascii_only=ascii_only)
        yield Text.assemble((f"{name:<{margin}}", "bold"), " ", (done, "green"), " ", beside)


def picture(
    bars: Sequence[Bar], *, title: str, suffix: str, phases: Sequence[str] | None = None
) -> bytes:
    """A file with a bar for each rung, from top to bottom, readable on a slide.

    The same bars give the same bytes with the same matplotlib.

    Args:
        suffix: one of FORMATS.
        phases: names of the parts that the bars are stacked of; None: plain bars.

    Raises:
        Refused: matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise Refused('a picture needs matplotlib: pip install "gptfast[plot]"') from error
    # SVG ids are random and dates are now, unless told otherwise.
    with matplotlib.rc_context(
        {"svg.hashsalt": "gptfast", "svg.fonttype": "none", "font.size": 14}
    ):
        figure = Figure(figsize=(12, max(3.0, 1.6 + 0.55 * len(bars))), layout="constrained")
        _draw(figure, bars, title=title, phases=phases)
        file = io.BytesIO()
        metadata = {"Date": None} if suffix == ".svg" else {}
        figure.savefig(file, format=suffix.removeprefix("."), dpi=150, metadata=metadata)
    return file.getvalue()


def _draw(figure: Figure, bars: Sequence[Bar], *, title: str, phases: Sequence[str] | None) -> None:
    axes = figure.subplots()
    if phases is None:
        axes.barh(range(len(bars)), [one.step_ms or 0.0 for one in bars], color=COLOURS[0])
    else:
        _stack(axes, bars, phases)
        # Inside it would cover what is said beside long bars.
        figure.legend(loc="outside lower center", ncols=len(phases), fontsize="small")
    axes.set_yticks(range(len(bars)), [_plain(one.name) for one in bars])
    axes.invert_yaxis()
    longest = max((one.step_ms or 0.0 for one in bars), default=1.0)
    said = max((len(one.said) for one in bars), default=0)
    axes.set_xlim(0, longest / (1.0 - 0.02 - LETTER * said))
    for at, one in enumerate(bars):
        axes.text((one.step_ms or 0.0) + longest * 0.01, at, _plain(one.said), va="center")
    times = "" if phases else "; x: times as fast as the baseline, ~ no significant difference"
    axes.set_xlabel(f"ms per step{times}")
    axes.set_title(_plain(title), fontsize="medium", loc="left")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)


def _stack(axes: Axes, bars: Sequence[Bar], phases: Sequence[str]) -> None:
    rows = [one.phases or [0.0] * len(phases) for one in bars]
    left = [0.0] * len(bars)
    for name, colour, widths in zip(phases, COLOURS, zip(*rows, strict=True), strict=True):
        axes.barh(range(len(bars)), widths, left=left, color=colour, label=name)
        left = [a + b for a, b in zip(left, widths, strict=True)]


def _plain(text: str) -> str:
    """Matplotlib reads mathematics between dollars."""
    return one_line(text).replace("$", r"\$")
