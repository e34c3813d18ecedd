"""The loss over the steps: kept in bounded memory, drawn with characters."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from rich.text import Text

Point = tuple[int, float]
"""Step and loss."""

TRAIN_STYLE = "cyan"
VAL_STYLE = "yellow"

LEGEND_WIDTH = 44
"""Columns from which both legends stand on one line."""


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
    """Both curves in `height` rows of at most `width` columns, axes and legend around them.

    Points that are not finite are left out; without two points left there is nothing to draw.
    """
    train = [point for point in train if math.isfinite(point[1])]
    val = [point for point in val if math.isfinite(point[1])]
    if len(train) + len(val) < 2:
        return Text()
    everything = [*train, *val]
    steps = [step for step, _ in everything]
    losses = [loss for _, loss in everything]
    labels = [f"{loss:.2f}" for loss in (max(losses), (max(losses) + min(losses)) / 2, min(losses))]
    margin = max(map(len, labels))
    columns = max(8, width - margin - 3)
    grid = _Grid(columns, height, steps=(min(steps), max(steps)), losses=(min(losses), max(losses)))
    line = grid.line(train, ascii_only=ascii_only)
    marks = {grid.cell(point) for point in val}

    wall, corner, floor, mark = "|+-o" if ascii_only else "│└─●"
    label_of = dict(zip((0, height // 2, height - 1), labels, strict=True))
    text = Text(no_wrap=True, overflow="crop")
    for row in range(height):
        text.append(f"{label_of.get(row, ''):>{margin}} {wall} ", "dim")
        cells = [
            (mark, VAL_STYLE)
            if (column, row) in marks
            else (line.get((column, row), " "), TRAIN_STYLE)
            for column in range(columns)
        ]
        drawn = Text()
        for style, run in itertools.groupby(cells, key=lambda cell: cell[1]):
            drawn.append("".join(character for character, _ in run), style)
        drawn.rstrip()
        text.append_text(drawn).append("\n")
    text.append(f"{'':>{margin}} {corner}{floor * (columns + 1)}\n", "dim")
    first, last = f"step {min(steps):,}", f"{max(steps):,}"
    text.append(f"{'':>{margin}}   {first}{last:>{columns - len(first)}}\n", "dim")
    indent = f"{'':>{margin}}   "
    if train:
        text.append(
            f"{indent}{'*' if ascii_only else '⣀⡠⠔'} training {train[-1][1]:.4f}", TRAIN_STYLE
        )
    if val:
        beside = "   " if train and columns >= LEGEND_WIDTH else f"\n{indent}" if train else indent
        text.append(f"{beside}{mark} validation {val[-1][1]:.4f}", VAL_STYLE)
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

    def line(self, points: Sequence[Point], *, ascii_only: bool) -> dict[tuple[int, int], str]:
        """Character by (column, row) of the line through `points`."""
        wide, high = (1, 1) if ascii_only else (2, 4)
        dots = [self._place(point, self._columns * wide, self._rows * high) for point in points]
        trail = set(dots)
        for begin, end in itertools.pairwise(dots):
            trail.update(_between(begin, end))
        if ascii_only:
            return dict.fromkeys(trail, "*")
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
