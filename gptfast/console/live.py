"""The two ways to watch a training: a live view on a terminal, plain lines anywhere else.

Both are `gptfast.report.Listener`s. They draw when the trainer reports and have no thread, so that
nothing competes with the training; `Pace` keeps the drawing under 1 % of the time.
"""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType

from rich import box
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from gptfast.console.board import MAX_WIDTH, Board, metrics_in_words
from gptfast.console.console import Console
from gptfast.console.curve import loss_curve
from gptfast.console.progress import Clock, Pace
from gptfast.console.text import clock, count, one_line, printable
from gptfast.report import EvalRecord, Finished, Listener, Logged, RunInfo, Silent

REDRAW_S = 0.25
NOTABLE_S = 1.0
"""A first step that took as long was not all training."""


@contextmanager
def training(console: Console, *, plain: bool = False, silent: bool = False) -> Iterator[Listener]:
    """The listener for a training: the live view on a terminal, else plain lines.

    Args:
        silent: one of several processes, of which another speaks.
    """
    if silent:
        yield Silent()
    elif plain or not console.is_terminal:
        yield PlainView(console)
    else:
        with LiveView(console) as view:
            yield view


class LiveView:
    """A region of the terminal that is redrawn in place; everything else scrolls above it."""

    def __init__(self, console: Console, *, now: Clock = time.monotonic) -> None:
        self._console = console
        self._now = now
        self._pace = Pace(REDRAW_S, now=now)
        self._region = ExitStack()
        self._closing_sample: tuple[int, str] | None = None

    def __enter__(self) -> LiveView:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._region.close()

    def started(self, info: RunInfo) -> None:
        self._board = Board(info, ascii_only=self._console.ascii_only, now=self._now)
        self._live: Live = self._region.enter_context(self._console.region())
        self._draw()

    def note(self, line: str) -> None:
        self._console.note(line)

    def logged(self, record: Logged) -> None:
        self._board.logged(record)
        if self._pace.due():
            self._draw()

    def evaluated(self, record: EvalRecord) -> None:
        self._board.evaluated(record)
        self._draw()

    def saved(self, step: int, path: str) -> None:
        self._board.saved = step

    def sampled(self, step: int, text: str) -> None:
        if step < self._board.info.steps:
            _show_sample(self._console, step, text)
        else:
            self._closing_sample = (step, text)  # below the curve, where the eye ends

    def finished(self, record: Finished) -> None:
        self._draw()
        self._region.close()
        _show_curve(self._console, self._board)
        if self._closing_sample is not None:
            _show_sample(self._console, *self._closing_sample)
        _show_summary(self._console, record)

    def _draw(self) -> None:
        with self._pace.drawing():
            # Room for the ^C that a terminal echoes: wrapped, it would shift the next drawing.
            width = self._console.width - len("^C")
            self._live.update(self._board.render(width), refresh=True)


class PlainView:
    """One line for each thing that happens, written when it happens."""

    def __init__(self, console: Console, *, now: Clock = time.monotonic) -> None:
        self._console = console
        self._now = now

    def started(self, info: RunInfo) -> None:
        self._board = Board(info, now=self._now)
        self._digits = len(str(info.steps))
        line = self._console.line
        line(
            f"{f'run {info.name}: ' if info.name else ''}profile {info.profile} on {info.device}, "
            f"{count(info.params)} parameters, {info.vocab_size:,} ids, "
            f"{info.batch_size:,} windows of {info.block_size:,} tokens a step, "
            f"{info.steps:,} steps"
        )
        if info.start_step:
            line(f"continues after step {info.start_step:,}")
        if info.plugins:
            line(f"plugins: {', '.join(f'{on.name} ({on.claim})' for on in info.plugins)}")
        for name, reason in info.skipped:
            line(f"skipped: {name}: {one_line(reason)}", style="yellow")

    def note(self, line: str) -> None:
        self._console.note(line)

    def logged(self, record: Logged) -> None:
        self._board.logged(record)
        parts = [
            f"loss {record.loss:.4f}",
            f"lr {record.learning_rate:.1e}",
            f"grad {record.grad_norm:.2f}",
            f"{record.step_ms:.1f} ms/step",
            f"{record.tokens_per_s:,.0f} tok/s",
        ]
        if record.peak_share is not None:
            parts.append(f"{record.peak_share:.0%} of peak")
        if record.data_wait_ms > record.step_ms / 100:
            parts.append(f"data wait {record.data_wait_ms / record.step_ms:.0%}")
        if record.skipped_steps:
            parts.append(f"skipped {record.skipped_steps}")
        parts += map(one_line, metrics_in_words(record))
        self._step(record.step, *parts, f"eta {clock(self._board.remaining)}")

    def evaluated(self, record: EvalRecord) -> None:
        self._board.evaluated(record)
        self._step(
            record.step,
            f"validation loss {record.loss:.4f}{' (best)' if record.best else ''}",
            f"{record.tokens:,} tokens in {record.seconds:.1f} s",
        )

    def saved(self, step: int, path: str) -> None:
        self._step(step, f"saved {self._console.path(path)}")

    def sampled(self, step: int, text: str) -> None:
        _show_sample(self._console, step, text)

    def finished(self, record: Finished) -> None:
        _show_curve(self._console, self._board)
        _show_summary(self._console, record)

    def _step(self, step: int, *parts: str) -> None:
        at = f"step {step:>{self._digits}}/{self._board.info.steps}"
        self._console.line("  ".join([at, *parts]))


def _show_curve(console: Console, board: Board) -> None:
    curve = loss_curve(
        board.train.points,
        board.val.points,
        width=min(console.width, MAX_WIDTH),
        ascii_only=console.ascii_only,
    )
    if curve:
        console.show(curve)


def _show_sample(console: Console, step: int, text: str) -> None:
    title = f"sample at step {step:,}"
    if not console.is_terminal:
        console.line(f"--- {title}")
        console.line(text.rstrip("\n"))
        console.line("---")
        return
    console.show(
        Panel(
            Text(printable(text, ascii_only=console.ascii_only).rstrip("\n")),
            title=Text(title),
            title_align="left",
            box=box.ASCII if console.ascii_only else box.ROUNDED,
            border_style="dim",
            width=min(console.width, MAX_WIDTH),
        )
    )


def _show_summary(console: Console, record: Finished) -> None:
    done = f"stopped by {record.stopped_by} after" if record.stopped_by else "done:"
    parts = [f"{done} {record.steps:,} steps in {clock(record.seconds)}"]
    if record.first_step_s is not None and record.first_step_s >= NOTABLE_S:
        parts.append(f"of that {record.first_step_s:.1f} s for the first")
    if math.isfinite(record.loss):
        parts.append(f"loss {record.loss:.4f}")
    if record.val_loss is not None:
        parts.append(f"validation loss {record.val_loss:.4f}")
    if record.best_val_loss is not None and record.best_val_loss != record.val_loss:
        parts.append(f"best {record.best_val_loss:.4f}")
    console.line(", ".join(parts), style="bold")
    if record.folder is None:
        return
    folder = shlex.quote(console.path(record.folder))
    console.line(f"next: gptfast generate {folder}")
    console.line(f"      gptfast eval {folder}")
    if record.stopped_by:
        console.line("      the same command with --resume goes on")
