"""What the live view shows: the state of a run, and its picture as a rich renderable."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from gptfast.console.curve import TRAIN_STYLE, VAL_STYLE, Series
from gptfast.console.progress import Clock
from gptfast.console.text import (
    bar,
    clock,
    count,
    milliseconds,
    one_line,
    size,
    sparkline,
)
from gptfast.report import EvalRecord, Logged, PluginLine, RunInfo

CLAIM_STYLES = {"exact": "green", "rounding": "cyan", "recipe": "magenta"}

Cell = tuple[str, str]
"""What a number is and, with its unit, the number."""

MAX_WIDTH = 100
TWO_COLUMNS_FROM = 64


@dataclass
class Board:
    """The state of a run as its records tell it. `render` draws it, `remaining` foretells it."""

    info: RunInfo
    ascii_only: bool = False
    now: Clock = time.monotonic
    train: Series = field(default_factory=Series)
    val: Series = field(default_factory=Series)
    last: Logged | None = None
    last_eval: EvalRecord | None = None
    best: EvalRecord | None = None
    saved: int | None = None
    """Step of the newest checkpoint."""

    def __post_init__(self) -> None:
        self._begin = self.now()
        self._step_ms = 0.0

    def logged(self, record: Logged) -> None:
        self.train.add(record.step, record.loss)
        # The first interval holds the compilation; from then on the mean follows within a few.
        first = self.last is None or record.step_ms < self._step_ms / 2
        self._step_ms += (record.step_ms - self._step_ms) * (1.0 if first else 0.3)
        self.last = record

    def evaluated(self, record: EvalRecord) -> None:
        self.val.add(record.step, record.loss)
        self.last_eval = record
        if record.best:
            self.best = record

    @property
    def elapsed(self) -> float:
        """Seconds since the run began or went on."""
        return self.now() - self._begin

    @property
    def remaining(self) -> float:
        """Seconds to the last step, evaluations left out; nan before the first record."""
        if self.last is None:
            return math.nan
        return (self.last.steps - self.last.step) * self._step_ms / 1000

    # picture -----------------------------------------------------------------------------

    def render(self, width: int) -> RenderableType:
        """The whole view, at most `width` columns wide."""
        width = min(width, MAX_WIDTH)
        inner = width - 4
        rows: list[RenderableType] = [
            self._scale(),
            self._progress(inner),
            Text(),
            self._losses(inner),
            Text(),
            self._numbers(two_columns=inner >= TWO_COLUMNS_FROM),
        ]
        if self.last is not None and self.last.plugin_metrics:
            rows.append(self._plugin_metrics(self.last))
        if self.info.plugins or self.info.skipped:
            rows += [Text(), self._plugins()]
        info = self.info
        title = self._spelt(f"gptfast: {info.name}" if info.name else "gptfast")
        return Panel(
            Group(*rows),
            title=Text(title, style="bold"),
            title_align="left",
            subtitle=Text(self._spelt(f"profile {info.profile} on {info.device}")),
            subtitle_align="right",
            box=box.ASCII if self.ascii_only else box.ROUNDED,
            border_style="dim",
            width=width,
        )

    def _scale(self) -> Text:
        info = self.info
        accumulated = f" in {info.n_micro} micro-batches" if info.n_micro > 1 else ""
        return Text(
            f"{count(info.params)} parameters, {info.vocab_size:,} ids, "
            f"{info.batch_size:,} windows of {info.block_size:,} tokens a step{accumulated}",
            style="dim",
        )

    def _progress(self, width: int) -> Text:
        info = self.info
        step = self.last.step if self.last else info.start_step
        head = f"step {step:,}/{info.steps:,}"
        elapsed = f"{clock(self.elapsed)}  " if width >= TWO_COLUMNS_FROM else ""
        tail = f"{step / info.steps:4.0%}  {elapsed}eta {clock(self.remaining)}"
        room = max(width - len(head) - len(tail) - 4, 0)
        done, rest = bar(step / info.steps, room, ascii_only=self.ascii_only)
        text = Text.assemble((head, "bold"), "  ", (done, "green"), (rest, "dim"), "  ", tail)
        text.no_wrap, text.overflow = True, "crop"
        return text

    def _losses(self, width: int) -> Table:
        grid = _grid()
        spark = max(min(width - 25, 60), 0)
        if self.last is None:
            grid.add_row(_label("loss"), Text("waiting for the first record", style="dim"))
            return grid
        grid.add_row(
            _label("loss"),
            Text.assemble(
                _loss(self.last.loss),
                "  ",
                (sparkline(self.train.losses, spark, ascii_only=self.ascii_only), TRAIN_STYLE),
            ),
        )
        if self.last_eval is not None:
            best = f"best {self.best.loss:.4f} at step {self.best.step:,}" if self.best else ""
            room = max(spark - len(best) - 2, 0)
            grid.add_row(
                _label("validation"),
                Text.assemble(
                    _loss(self.last_eval.loss),
                    "  ",
                    (sparkline(self.val.losses, room, ascii_only=self.ascii_only), VAL_STYLE),
                    "  " if room else "",
                    (best, "dim"),
                ),
            )
        return grid

    def _numbers(self, *, two_columns: bool) -> Table:
        """The learning to the left and the machine to the right, or one above the other."""
        grid = _grid(2 if two_columns else 1)
        if self.last is None:
            return grid
        learning = list(self._learning(self.last))
        machine = list(_machine(self.last))
        if not two_columns:
            for cell in [*learning, *machine]:
                grid.add_row(*_cell(cell))
            return grid
        for left, right in itertools.zip_longest(learning, machine, fillvalue=("", "")):
            grid.add_row(*_cell(left), *_cell(right))
        return grid

    def _learning(self, record: Logged) -> Iterator[Cell]:
        yield "learning rate", f"{record.learning_rate:.2e}"
        yield "gradient norm", f"{record.grad_norm:.3g}"
        yield "epoch", f"{record.epoch:.2f}"
        if record.skipped_steps:
            yield "skipped steps", f"{record.skipped_steps:,}"
        if self.saved is not None:
            yield "checkpoint", f"step {self.saved:,}"

    def _plugin_metrics(self, record: Logged) -> Table:
        grid = _grid()
        grid.add_row(_label("metrics"), Text(self._spelt(", ".join(metrics_in_words(record)))))
        return grid

    def _plugins(self) -> Table:
        grid = _grid()
        if self.info.plugins:
            grid.add_row(_label("plugins"), Text(", ").join(map(self._plugin, self.info.plugins)))
        for name, reason in self.info.skipped:
            grid.add_row(
                _label("skipped"), Text.assemble((name, "yellow"), f": {self._spelt(reason)}")
            )
        return grid

    def _plugin(self, plugin: PluginLine) -> Text:
        detail = f", {self._spelt(plugin.detail)}" if plugin.detail else ""
        return Text.assemble(
            plugin.name, " (", (plugin.claim, CLAIM_STYLES.get(plugin.claim, "")), f"{detail})"
        )

    def _spelt(self, text: str) -> str:
        return one_line(text, ascii_only=self.ascii_only)


def metrics_in_words(record: Logged) -> Iterator[str]:
    """What plugins say of themselves, a few words each."""
    for name, value in record.plugin_metrics.items():
        yield f"{name} {value:.5g}"


def _machine(record: Logged) -> Iterator[Cell]:
    yield "speed", f"{record.tokens_per_s:,.0f} tok/s"
    if record.peak_share is not None:
        yield "matmul peak", f"{record.peak_share:.0%} of measured"
    yield "step", milliseconds(record.step_ms)
    yield "data wait", milliseconds(record.data_wait_ms)
    if record.memory_bytes is not None:
        yield "memory", size(record.memory_bytes)


def _grid(n_columns: int = 1) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0), expand=n_columns > 1)
    for _ in range(n_columns):
        grid.add_column(width=13, no_wrap=True)
        grid.add_column(ratio=1 if n_columns > 1 else None, overflow="fold")
    return grid


def _label(name: str) -> Text:
    return Text(name, style="dim")


def _cell(cell: Cell) -> tuple[Text, Text]:
    return _label(cell[0]), Text(cell[1])


def _loss(value: float) -> tuple[str, str]:
    return f"{value:.4f}", "bold" if math.isfinite(value) else "bold red"
