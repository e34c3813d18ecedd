"""When to draw, and the progress of `prepare`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.text import Text

from gptfast.console.text import bar, clock, count, size

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.live import Live

Clock = Callable[[], float]
"""Seconds that only grow."""


class Pace:
    """Says when to draw: `seconds` apart, and so rarely that drawing takes at most 1 % of it."""

    def __init__(
        self, seconds: float, *, at_once: bool = True, now: Clock = time.monotonic
    ) -> None:
        self._seconds = seconds
        self._now = now
        self._next = now() + (0.0 if at_once else seconds)

    def due(self) -> bool:
        return self._now() >= self._next

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Surrounds a drawing; the next is due the later, the longer this one takes."""
        begin = self._now()
        yield
        end = self._now()
        self._next = end + max(self._seconds, 99 * (end - begin))


class PrepareProgress:
    """How far a file has been worked through: a bar on a terminal, else a line now and then."""

    def __init__(
        self,
        console: RichConsole,
        live: Live | None,
        total_bytes: int | None,
        *,
        verb: str = "prepare",
        now: Clock = time.monotonic,
    ) -> None:
        self._console = console
        self._live = live
        self._verb = verb
        self._total = total_bytes
        self._now = now
        self._begin = now()
        # A short preparation has no line at all where lines are for keeps.
        self._pace = Pace(0.25 if live else 5.0, at_once=live is not None, now=now)

    def __call__(self, bytes_done: int, bytes_total: int | None, tokens: int) -> None:
        """What has been done so far; `bytes_total` may have become known."""
        self._total = bytes_total or self._total
        if not self._pace.due():
            return
        with self._pace.drawing():
            text = self._text(bytes_done, tokens)
            if self._live is not None:
                self._live.update(text, refresh=True)
            else:
                self._console.print(text, soft_wrap=True)

    def _text(self, bytes_done: int, tokens: int) -> Text:
        seconds = max(self._now() - self._begin, 1e-9)
        parts = [f"{count(tokens)} token{'s' * (tokens != 1)}", f"{count(tokens / seconds)} tok/s"]
        if not self._total:
            return Text("  ".join([self._verb, size(bytes_done), *parts]))
        share = bytes_done / self._total
        left = seconds / share - seconds if share else math.nan
        head = f"{self._verb} {share:4.0%}"
        tail = "  ".join([f"{size(bytes_done)}/{size(self._total)}", *parts, f"eta {clock(left)}"])
        room = self._console.width - len(head) - len(tail) - 5 if self._live else 0
        if room < 8:
            return Text(f"{head}  {tail}", no_wrap=True, overflow="crop")
        ascii_only = not self._console.encoding.startswith("utf")
        done, rest = bar(share, min(room, 40), ascii_only=ascii_only)
        return Text.assemble(head, "  ", (done, "green"), (rest, "dim"), "  ", tail, no_wrap=True)
