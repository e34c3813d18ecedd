"""The console: what goes to stdout, what to stderr, and in which dress.

Three dresses. A terminal gets colour and regions that are redrawn. Anything else (a pipe, a file,
TERM=dumb) gets plain lines, written as they happen, without one control code. Where colour is
forced upon a file, the lines have colour and still nothing moves the cursor.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TextIO

from rich import box
from rich.console import Console as RichConsole
from rich.console import RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gptfast.console.progress import PrepareProgress
from gptfast.console.text import one_line, printable

_NUMBER = re.compile(r"[-+±]?[\d.,]+(\s?\S{1,6})?|-|inf|nan|")


@dataclass(frozen=True)
class Look:
    """What the environment says about output."""

    dumb: bool = False
    """TERM=dumb: the terminal cannot move its cursor."""
    no_color: bool = False
    """NO_COLOR: no colour anywhere."""
    force_color: bool = False
    """FORCE_COLOR: colour also where it is not a terminal."""
    width: int | None = None
    """COLUMNS. None: as wide as the terminal says."""
    folder: Path | None = None
    """Paths inside it are shown relative to it."""


class _Rich(RichConsole):
    def on_broken_pipe(self) -> None:
        # Called while the BrokenPipeError is handled. Rich would exit with 1 here; a reader that
        # has seen enough is no failure, and `cli` decides how to leave.
        raise


class Console:
    """Writes to a pair of streams. Text is shown as it is: no markup is ever read out of it."""

    def __init__(self, stdout: TextIO, stderr: TextIO, look: Look | None = None) -> None:
        self._look = look or Look()
        self._stdout = stdout
        self._out = self._rich(stdout)
        self._err = self._rich(stderr)
        self._live: RichConsole | None = None

    def _rich(self, stream: TextIO) -> RichConsole:
        if isinstance(stream, io.TextIOWrapper):
            # What the stream cannot encode is spelt out rather than the end of an hour's work.
            stream.reconfigure(errors="backslashreplace")
        look = self._look
        terminal = stream.isatty() and not look.dumb
        colour = (terminal or look.force_color) and not look.no_color
        return _Rich(
            file=stream,
            force_terminal=terminal,
            color_system="standard" if colour else None,
            width=look.width,
            markup=False,
            emoji=False,
            highlight=False,
            legacy_windows=False,
            _environ={},  # `Look` has been told already; rich is not to ask again
        )

    # what the streams can do -------------------------------------------------------------

    @property
    def is_terminal(self) -> bool:
        """Whether text goes to a terminal whose cursor may be moved."""
        return self._out.is_terminal

    @property
    def ascii_only(self) -> bool:
        """Whether the text stream cannot take block and box characters."""
        return not self._out.encoding.startswith("utf")

    @property
    def width(self) -> int:
        """Columns."""
        return self._out.width

    def path(self, path: str) -> str:
        """`path` as short as it can be given back on the command line."""
        folder = self._look.folder
        if folder is None or not Path(path).is_relative_to(folder):
            return path
        return str(Path(path).relative_to(folder))

    # lines -------------------------------------------------------------------------------

    def line(self, text: str = "", *, style: str = "") -> None:
        """One line of the result, however long: no wrapping, no cropping."""
        self._print(self._out, Text(printable(text), style=style))

    def note(self, text: str) -> None:
        """Something worth knowing, on stderr."""
        self._print(self._err, Text(one_line(text), style="dim"))

    def warn(self, text: str) -> None:
        """One line on stderr."""
        self._labelled("warning", "yellow", text)

    def error(self, text: str, *, label: str = "error") -> None:
        """One line on stderr, whatever `text` holds."""
        self._labelled(label, "bold red", text)

    def _labelled(self, label: str, style: str, text: str) -> None:
        self._print(self._err, Text.assemble("gptfast: ", (f"{label}: ", style), one_line(text)))

    def _print(self, stream: RichConsole, text: Text) -> None:
        # Above a live region only the console that draws it can print, for either stream.
        if self._live is not None and stream.is_terminal:
            stream = self._live
        stream.print(text, soft_wrap=True)

    def stream(self, text: str) -> None:
        """Generated text, as it comes: whole characters, no newline added.

        A file gets it unchanged; on a terminal control characters are spelt out.
        """
        file = self._out.file
        file.write(printable(text) if self.is_terminal else text)
        file.flush()

    def show(self, picture: RenderableType) -> None:
        """What rich can render, on as many lines as it takes."""
        (self._live or self._out).print(picture)

    # progress ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def prepare_progress(
        self, total_bytes: int | None, *, verb: str = "prepare"
    ) -> Iterator[PrepareProgress]:
        """A call `(bytes_done, bytes_total, tokens)` that shows the progress, on stderr."""
        if not self._err.is_terminal:
            yield PrepareProgress(self._err, None, total_bytes, verb=verb)
            return
        with self._drawn_on(self._err, transient=True) as live:
            yield PrepareProgress(self._err, live, total_bytes, verb=verb)

    def region(self) -> AbstractContextManager[Live]:
        """A part of the terminal that is redrawn in place; lines and prints scroll above it."""
        return self._drawn_on(self._out, transient=False)

    @contextlib.contextmanager
    def _drawn_on(self, stream: RichConsole, *, transient: bool) -> Iterator[Live]:
        live = Live(
            console=stream,
            auto_refresh=False,
            transient=transient,
            redirect_stdout=self._out.is_terminal,
            redirect_stderr=self._err.is_terminal,
        )
        self._live = stream
        try:
            with live:
                yield live
        finally:
            self._live = None

    # tables and JSON ---------------------------------------------------------------------

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Rows of cells; a column of numbers stands to the right. None is shown as `-`.

        A terminal's table fits its width, with cells folded. Elsewhere no cell is ever cut.
        """
        cells = [["-" if cell is None else one_line(str(cell)) for cell in row] for row in rows]
        right = [
            bool(cells) and all(_NUMBER.fullmatch(row[at]) for row in cells)
            for at in range(len(columns))
        ]
        if self.is_terminal:
            self._out.print(_rich_table(title, columns, cells, right))
            return
        for text in _plain_table(title, columns, cells, right):
            self.line(text)

    def json(self, value: object) -> None:
        """One JSON document on stdout: dataclasses as objects, nan and inf as strings."""
        text = json.dumps(_jsonable(value), indent=2, ensure_ascii=self.ascii_only, allow_nan=False)
        self._stdout.write(text + "\n")
        self._stdout.flush()

    @contextlib.contextmanager
    def json_alone(self) -> Iterator[None]:
        """Keep stdout for `json`: text goes to stderr meanwhile, and so does any `print`."""
        before = self._out
        self._out = self._err
        try:
            with contextlib.redirect_stdout(self._err.file):
                yield
        finally:
            self._out = before


def _rich_table(
    title: str, columns: Sequence[str], cells: Sequence[Sequence[str]], right: Sequence[bool]
) -> Table:
    table = Table(
        title=Text(title, style="bold") if title else None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for column, numbers in zip(columns, right, strict=True):
        table.add_column(Text(column), justify="right" if numbers else "left", overflow="fold")
    for row in cells:
        table.add_row(*map(Text, row))
    return table


def _plain_table(
    title: str, columns: Sequence[str], cells: Sequence[Sequence[str]], right: Sequence[bool]
) -> Iterator[str]:
    if title:
        yield title
    lines = [list(columns), *cells]
    widths = [max(len(line[at]) for line in lines) for at in range(len(columns))]
    for line in lines:
        yield "  ".join(
            cell.rjust(width) if numbers else cell.ljust(width)
            for cell, width, numbers in zip(line, widths, right, strict=True)
        ).rstrip()


def _jsonable(value: object) -> Any:
    """`value` as JSON knows it. A number that JSON has no word for becomes a string."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return _jsonable(asdict(value))
    if isinstance(value, Enum):
        return _jsonable(value.value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_jsonable(item) for item in value]
    return value
