"""Loss and speed of runs over their steps, or one number of a plugin: as a picture, by matplotlib,
and with characters.
"""

from __future__ import annotations

import io
import itertools
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from gptfast.console.curve import Line, Point, Series, chart, loss_curve
from gptfast.console.text import count, one_line, sparkline
from gptfast.errors import Refused
from gptfast.report import Course

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg")
MAX_POINTS = 2048
"""Most points of one line in a picture; more become means of neighbours."""
STYLES = ("cyan", "yellow", "magenta", "green", "blue", "red")
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
NARROWEST = 24
"""Columns of the least plot that can be read."""


def picture(courses: Sequence[Course], *, suffix: str, metric: str | None = None) -> bytes:
    """A file of both charts, loss above tokens per second, each run in a colour of its own.

    The same runs give the same bytes with the same matplotlib.

    Args:
        suffix: one of FORMATS.
        metric: a plugin's number, to be drawn instead.

    Raises:
        Refused: matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise Refused(
            'a picture needs matplotlib: pip install "gptfast[plot]", or leave --out out to plot '
            "in the terminal"
        ) from error
    # SVG ids are random and dates are now, unless told otherwise.
    with matplotlib.rc_context({"svg.hashsalt": "gptfast", "svg.fonttype": "none"}):
        figure = Figure(figsize=(9, 7), layout="constrained")
        if metric is None:
            _draw(figure, courses)
        else:
            _draw_metric(figure, courses, metric)
        file = io.BytesIO()
        metadata = {"Date": None} if suffix == ".svg" else {}
        figure.savefig(file, format=suffix.removeprefix("."), dpi=150, metadata=metadata)
    return file.getvalue()


def _draw(figure: Figure, courses: Sequence[Course]) -> None:
    losses, speeds = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for number, course in enumerate(courses):
        # A name that starts with _ would be left out of the legend, and $ begins mathematics.
        name = one_line(course.name).replace("$", r"\$")
        colour = f"C{number % 10}"
        losses.plot(
            *_columns(course.train), color=colour, linewidth=1, alpha=0.6, label=f"{name}, training"
        )
        if course.val:
            losses.plot(
                *_columns(course.val),
                color=colour,
                marker="o",
                markersize=4,
                label=f"{name}, validation",
            )
        speeds.plot(*_columns(course.tokens_per_s), color=colour, linewidth=1, label=name)
    losses.set_ylabel("loss (nats per token)")
    speeds.set_ylabel("tokens/s")
    speeds.set_xlabel("step")
    speeds.set_ylim(bottom=0)
    losses.legend(fontsize="small")
    for axes in (losses, speeds):
        axes.grid(alpha=0.3)


def _draw_metric(figure: Figure, courses: Sequence[Course], metric: str) -> None:
    axes = figure.subplots()
    for number, course in enumerate(courses):
        name = one_line(course.name).replace("$", r"\$")
        columns = _columns(course.metrics[metric])
        axes.plot(*columns, color=f"C{number % 10}", linewidth=1, label=name)
    axes.set_ylabel(one_line(metric).replace("$", r"\$"))
    axes.set_xlabel("step")
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)


def _columns(points: Sequence[Point]) -> tuple[list[int], list[float]]:
    kept = _thinned(points, MAX_POINTS)
    return [step for step, _ in kept], [value for _, value in kept]


def _thinned(points: Sequence[Point], capacity: int) -> list[Point]:
    series = Series(capacity)
    for step, value in points:
        series.add(step, value)
    return series.points


def in_terminal(
    courses: Sequence[Course], *, width: int, ascii_only: bool = False, metric: str | None = None
) -> Iterator[Text]:
    """The losses of one run, and its speed as one line of blocks; several runs in charts of all.

    Args:
        metric: a plugin's number, to be drawn instead.
    """
    width = max(width, NARROWEST)
    if metric is not None:
        names = [one_line(course.name, ascii_only=ascii_only) for course in courses]
        lines = _lines(names, [course.metrics[metric] for course in courses])
        short = "{:.4g}".format
        yield Text(one_line(metric, ascii_only=ascii_only), style="bold")
        drawn = chart(lines, width=width, ascii_only=ascii_only, axis=short, value=short)
        yield drawn if drawn.plain else Text("too few steps to plot", style="dim")
        return
    if len(courses) > 1:
        yield from _compared(courses, width=width, ascii_only=ascii_only)
        return
    for course in courses:
        yield Text(one_line(course.name, ascii_only=ascii_only), style="bold")
        curve = loss_curve(
            _thinned(course.train, 512), course.val, width=width, ascii_only=ascii_only
        )
        yield curve if curve.plain else Text("too few steps to plot", style="dim")
        speeds = [speed for _, speed in course.tokens_per_s]
        if speeds:
            said = f" median {count(statistics.median(speeds))} tokens/s"
            blocks = sparkline(speeds, max(width - len(said), 8), ascii_only=ascii_only)
            yield Text(f"{blocks}{said}\n", no_wrap=True)


def _compared(courses: Sequence[Course], *, width: int, ascii_only: bool) -> Iterator[Text]:
    """Training losses, validation losses and speeds, each run with a letter and a colour."""
    names = [one_line(course.name, ascii_only=ascii_only) for course in courses]
    losses = _lines(names, [course.train for course in courses])
    vals = _lines(names, [course.val for course in courses])
    speeds = _lines(names, [course.tokens_per_s for course in courses])
    charts = {
        "training loss": chart(losses, width=width, ascii_only=ascii_only),
        "validation loss": chart(vals, width=width, ascii_only=ascii_only),
        "tokens/s": chart(
            speeds, width=width, height=6, ascii_only=ascii_only, axis=count, value=count
        ),
    }
    for title, drawn in charts.items():
        yield Text(title, style="bold")
        yield drawn if drawn.plain else Text("too few steps to plot", style="dim")


def _lines(names: Sequence[str], points: Sequence[Sequence[Point]]) -> list[Line]:
    looks = zip(itertools.cycle(STYLES), itertools.cycle(LETTERS), strict=False)
    return [
        Line(name, _thinned(of_one, 512), style, letter)
        for name, of_one, (style, letter) in zip(names, points, looks, strict=False)
    ]


def write(path: Path, courses: Sequence[Course], *, metric: str | None = None) -> None:
    """Write `picture` to a file that appears complete or not at all.

    Raises:
        Refused: another suffix than FORMATS, no matplotlib, or no place to write to.
    """
    if path.suffix not in FORMATS:
        raise Refused(
            f"--out {path}: unknown picture format: end the name in {' or '.join(FORMATS)}"
        )
    drawn = picture(courses, suffix=path.suffix, metric=metric)
    beside = path.with_name(f".{path.name}.tmp")
    try:
        try:
            beside.write_bytes(drawn)
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise Refused(
            f"--out {path}: cannot be written ({error.strerror}): name another"
        ) from error
