"""The loss over the steps: kept in bounded memory, drawn with characters."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rich.text import Text

Point = tuple[int, float]
"""Step and loss."""

TRAIN_STYLE = "cyan"
VAL_STYLE = "yellow"


@dataclass(frozen=True)
class Line:
    """What a chart shows of one thing.

    Attributes:
        name: as in the legend, where its last value stands behind it.
        mark: the character of its points. A line has it at its end, and all along in ASCII.
        joined: a line through the points; else only the points.
    """

    name: str
    points: Sequence[Point]
    style: str
    mark: str
    joined: bool = True


class Series:
    """Losses as they come. When there are too many, neighbours become their mean.

    Drawing therefore costs the same in the millionth step as in the first.
    """

    def __init__(self, capacity: int = 512) -> None:
        self._capacity = capacity
        self._points: list[Point] = []
        self._stride = 1
        self._open: list[float] = []
        self._step = 0

    def add(self, step: int, loss: float) -> None:
        self._step = step
        self._open.append(loss)
        if len(self._open) == self._stride:
            self._points.append((step, _mean(self._open)))
            self._open = []
        if len(self._points) == self._capacity:
            self._stride *= 2
            self._points = [
                (later, _mean([first, second]))
                for (_, first), (later, second) in zip(
                    self._points[::2], self._points[1::2], strict=True
                )
            ]

    @property
    def points(self) -> list[Point]:
        """In order of the steps; the last one is the newest."""
        newest = [(self._step, _mean(self._open))] if self._open else []
        return [*self._points, *newest]

    @property
    def losses(self) -> list[float]:
        return [loss for _, loss in self.points]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def loss_curve(
    train: Sequence[Point],
    val: Sequence[Point],
    *,
    width: int,
    height: int = 10,
    ascii_only: bool = False,
) -> Text:
    """Both curves in `height` rows of at most `width` columns, axes and legend around them."""
    dot = "o" if ascii_only else "●"
    lines = [
        Line("training", train, TRAIN_STYLE, "*" if ascii_only else ""),
        Line("validation", val, VAL_STYLE, dot, joined=False),
    ]
    return chart(lines, width=width, height=height, ascii_only=ascii_only)


def chart(
    lines: Sequence[Line],
    *,
    width: int,
    height: int = 10,
    ascii_only: bool = False,
    axis: Callable[[float], str] = "{:.2f}".format,
    value: Callable[[float], str] = "{:.4f}".format,
) -> Text:
    """Lines over the same steps in `height` rows of at most `width` columns, with a legend.

    Points that are not finite are left out; without two points left there is nothing to draw.

    Args:
        axis, value: how a number is written beside the axis and in the legend.
    """
    lines = [_finite(line) for line in lines]
    everything = [point for line in lines for point in line.points]
    if len(everything) < 2:
        return Text()
    steps, values = [step for step, _ in everything], [number for _, number in everything]
    low, high = min(values), max(values)
    labels = [axis(number) for number in (high, (high + low) / 2, low)]
    margin = max(map(len, labels))
    columns = max(8, width - margin - 3)
    grid = _Grid(columns, height, steps=(min(steps), max(steps)), losses=(low, high))
    cells = _cells(lines, grid, ascii_only=ascii_only)

    wall, corner, floor = "|+-" if ascii_only else "│└─"
    label_of = dict(zip((0, height // 2, height - 1), labels, strict=True))
    text = Text(no_wrap=True, overflow="crop")
    for row in range(height):
        text.append(f"{label_of.get(row, ''):>{margin}} {wall} ", "dim")
        drawn = Text()
        in_row = [cells.get((column, row), (" ", "")) for column in range(columns)]
        for style, run in itertools.groupby(in_row, key=lambda cell: cell[1]):
            drawn.append("".join(character for character, _ in run), style)
        drawn.rstrip()
        text.append_text(drawn).append("\n")
    text.append(f"{'':>{margin}} {corner}{floor * (columns + 1)}\n", "dim")
    first, last = f"step {min(steps):,}", f"{max(steps):,}"
    text.append(f"{'':>{margin}}   {first}{last:>{columns - len(first)}}\n", "dim")
    indent = f"{'':>{margin}}   "
    return text.append_text(_legend(lines, indent, columns, value))


def _finite(line: Line) -> Line:
    return replace(line, points=[point for point in line.points if math.isfinite(point[1])])


def _cells(
    lines: Sequence[Line], grid: _Grid, *, ascii_only: bool
) -> dict[tuple[int, int], tuple[str, str]]:
    """Character and style by (column, row); marks stand above lines."""
    cells = {}
    for line in lines:
        if line.joined:
            along = grid.line(line.points, mark=line.mark if ascii_only else None)
            cells.update({cell: (character, line.style) for cell, character in along.items()})
    for line in lines:
        marked = line.points[-1:] if line.joined else line.points
        if line.mark:
            cells.update({grid.cell(point): (line.mark, line.style) for point in marked})
    return cells


def _legend(
    lines: Sequence[Line],
    indent: str,
    columns: int,
    value: Callable[[float], str],
) -> Text:
    """Name and last value of each line, as many in a row as fit."""
    text, used = Text(indent), 0
    for line in lines:
        if not line.points:
            continue
        glyph = line.mark or "⣀⡠⠔"
        entry = f"{glyph} {line.name} {value(line.points[-1][1])}"
        if used and used + 3 + len(entry) > columns:
            text.append(f"\n{indent}")
            used = 0
        elif used:
            text.append("   ")
            used += 3
        text.append(entry, line.style)
        used += len(entry)
    return text


class _Grid:
    """Maps points to character cells, and to the 2 x 4 dots in each where there is Braille."""

    def __init__(
        self, columns: int, rows: int, *, steps: tuple[int, int], losses: tuple[float, float]
    ) -> None:
        self._columns, self._rows = columns, rows
        self._steps, self._losses = steps, losses

    def _place(self, point: Point, columns: int, rows: int) -> tuple[int, int]:
        step, loss = point
        across = (step - self._steps[0]) / ((self._steps[1] - self._steps[0]) or 1)
        down = (self._losses[1] - loss) / ((self._losses[1] - self._losses[0]) or 1.0)
        return round(across * (columns - 1)), round(down * (rows - 1))

    def cell(self, point: Point) -> tuple[int, int]:
        return self._place(point, self._columns, self._rows)

    def line(self, points: Sequence[Point], *, mark: str | None) -> dict[tuple[int, int], str]:
        """Character by (column, row) of the line through `points`: `mark`, or Braille."""
        wide, high = (1, 1) if mark else (2, 4)
        dots = [self._place(point, self._columns * wide, self._rows * high) for point in points]
        trail = set(dots)
        for begin, end in itertools.pairwise(dots):
            trail.update(_between(begin, end))
        if mark:
            return dict.fromkeys(trail, mark)
        cells: dict[tuple[int, int], int] = {}
        for x, y in trail:
            cell = (x // 2, y // 4)
            cells[cell] = cells.get(cell, 0) | _DOTS[y % 4][x % 2]
        return {cell: chr(0x2800 + bits) for cell, bits in cells.items()}


_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bit of each dot of a Braille cell, by row and column. Source: Unicode, Braille Patterns."""


def _between(begin: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """The dots on the straight line from `begin` to `end`."""
    n_steps = max(abs(end[0] - begin[0]), abs(end[1] - begin[1]))
    return [
        (
            round(begin[0] + (end[0] - begin[0]) * at / n_steps),
            round(begin[1] + (end[1] - begin[1]) * at / n_steps),
        )
        for at in range(1, n_steps)
    ]
