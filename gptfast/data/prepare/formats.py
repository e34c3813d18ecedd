"""How text lies in files: a format is one small reader, from an open file to pieces of documents.

Plain text is one document. In rows (JSONL, parquet) each row is one. A new format is a reader and
a line in `FORMATS`; nothing else knows of it.

Bytes are UTF-8 whatever the machine's locale, newlines stay as they are, a byte-order mark at the
start is dropped.
"""

from __future__ import annotations

import codecs
import itertools
import json
import re
import shlex
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal

from gptfast.data.prepare.packing import PACKED_SUFFIXES, PARQUET, Input, unpacked
from gptfast.errors import Refused

OnInvalid = Literal["strict", "replace"]
"""What to do with bytes that are not UTF-8: refuse the file, or put U+FFFD for each of them and
decode what its byte-order mark calls UTF-16 or UTF-32."""
Kind = Literal["auto", "text", "jsonl"]
"""What files hold: what their names end with, or all of them the same."""
OnBadRow = Literal["stop", "skip"]
"""What to do with a row that has no text: refuse the file, or leave the row out and count it."""

# The longer marks first: UTF-32's begins with UTF-16's.
_WIDE_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
_NO_CHARACTER = re.compile("[\ud800-\udfff]")
"""Surrogates: half of a pair that JSON may spell alone, and what "surrogateescape" puts for a byte
that is not UTF-8."""
_BATCH_ROWS = 64
"""Rows of a parquet file unpacked at a time: each may be long."""
_COLUMN_BUFFER = 1 << 20


@dataclass(frozen=True)
class Reading:
    """How files are to be read."""

    errors: OnInvalid = "strict"
    kind: Kind = "auto"
    text_key: str = "text"
    """The key of a JSON row, the column of a parquet file."""
    on_bad_row: OnBadRow = "stop"


STRICT = Reading()
"""Whatever is not text of the usual kind is refused."""


@dataclass
class Tally:
    """What a reader has come upon, besides text."""

    n_replaced: int = 0
    """Bytes that were not UTF-8, each now U+FFFD."""
    n_wide: int = 0
    """Files decoded from UTF-16 or UTF-32."""
    n_rows: int = 0
    n_null: int = 0
    """Rows whose text is null."""
    n_bad_rows: int = 0
    """Rows left out because they have no text."""


@dataclass(frozen=True)
class Piece:
    """The next part of a document's text."""

    text: str
    ends: bool
    """Whether the document ends with it."""


Format = Callable[[Input, Reading, Tally], Iterator[Piece]]


def read_pieces(file: Input, reading: Reading, tally: Tally) -> Iterator[Piece]:
    """The documents in a file, in pieces that fit into memory.

    Raises:
        Refused: not what its format should be.
    """
    return _format_of(file, reading.kind)(file, reading, tally)


def read_text(file: Input, reading: Reading, tally: Tally) -> Iterator[Piece]:
    """One document: the whole file."""
    # "surrogateescape" puts a stand-in for each invalid byte, which can then be counted.
    decoder = codecs.getincrementaldecoder("utf-8")(
        "strict" if reading.errors == "strict" else "surrogateescape"
    )
    at = 0
    for block in itertools.chain(_contents(file, reading, tally), [b""]):
        marked_off = block if at else block.removeprefix(codecs.BOM_UTF8)
        try:
            text = decoder.decode(marked_off, final=not block)
        except UnicodeDecodeError as error:
            byte = at + len(block) - len(error.object) + error.start
            raise Refused(
                f"{file.label}: byte {byte} (0x{error.object[error.start]:02x}) is not UTF-8: "
                "save the file as UTF-8, or use --errors replace"
            ) from None
        if reading.errors == "replace":
            text, n_replaced = _NO_CHARACTER.subn("\ufffd", text)
            tally.n_replaced += n_replaced
        yield Piece(text, ends=not block)
        at += len(block)


def read_jsonl(file: Input, reading: Reading, tally: Tally) -> Iterator[Piece]:
    """A document for each line, which is a JSON object with the text under a key."""
    return _documents(_json_rows(file, reading, tally), file.label, reading, tally)


def read_parquet(file: Input, reading: Reading, tally: Tally) -> Iterator[Piece]:
    """A document for each row, with the text in a column of strings."""
    return _documents(_parquet_rows(file, reading), file.label, reading, tally)


FORMATS: dict[str, Format] = {
    ".txt": read_text,
    ".md": read_text,
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".parquet": read_parquet,
}
"""By what names end with, a packed file's without .gz and .zst. Any other file is plain text."""


def require_parquet(label: str) -> None:
    """
    Raises:
        Refused: the package that reads parquet is not installed.
    """
    try:
        import pyarrow.parquet  # noqa: F401  # only whether it can be
    except ImportError:
        raise Refused(
            f"{label}: is parquet data, which the package pyarrow reads, and it is not "
            "installed: pip install 'gptfast[parquet]'"
        ) from None


def bare_name(name: str) -> PurePath:
    """A file's name, without what its packing added to it."""
    path = PurePath(name)
    return path.with_suffix("") if path.suffix.lower() in PACKED_SUFFIXES else path


def _format_of(file: Input, kind: Kind) -> Format:
    if file.begins_with(PARQUET):
        return read_parquet
    ending = file.ending or bare_name(file.label).suffix.lower()
    if kind != "auto" and file.ending is None:
        return read_jsonl if kind == "jsonl" else read_text
    return FORMATS.get(ending, read_text)


# UTF-16 and UTF-32 -------------------------------------------------------------------------------


def _contents(file: Input, reading: Reading, tally: Tally) -> Iterator[bytes]:
    """Its bytes, which should be UTF-8."""
    blocks = unpacked(file)
    head = next(blocks, None)
    if head is None:
        return
    whole = itertools.chain([head], blocks)
    encoding = next((name for mark, name in _WIDE_MARKS.items() if head.startswith(mark)), None)
    if encoding is None:
        yield from whole
    elif reading.errors == "strict":
        raise Refused(
            f"{file.label}: is {encoding} text (byte-order mark at byte 0), and UTF-8 is wanted: "
            f"iconv -f {encoding} -t UTF-8 makes it so, --errors replace decodes it here"
        )
    else:
        tally.n_wide += 1
        yield from _as_utf8(whole, encoding, tally)


def _as_utf8(blocks: Iterable[bytes], encoding: str, tally: Tally) -> Iterator[bytes]:
    """The decoder that leaves out what it cannot read tells how much the other one replaces."""
    make = codecs.getincrementaldecoder(encoding)
    replacing, leaving_out = make("replace"), make("ignore")
    for block in itertools.chain(blocks, [b""]):
        text = replacing.decode(block, final=not block)
        plain = leaving_out.decode(block, final=not block)
        tally.n_replaced += text.count("\ufffd") - plain.count("\ufffd")
        if text:
            yield text.encode()


# rows --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Bad:
    """What stands in the place of a row's text."""

    reason: str
    """What was found, and what to do."""


_Row = tuple[int, "str | _Bad | None"]
"""Its number, from 1 as editors count lines, and its text."""


def _documents(rows: Iterable[_Row], label: str, reading: Reading, tally: Tally) -> Iterator[Piece]:
    for number, text in rows:
        tally.n_rows += 1
        if isinstance(text, str):
            text = _characters(text, reading, tally)
        if text is None:
            tally.n_null += 1
        elif isinstance(text, str):
            yield Piece(text, ends=True)
        elif reading.on_bad_row == "skip":
            tally.n_bad_rows += 1
        else:
            raise Refused(
                f"{label}:{number}: {text.reason}, or leave such rows out with --on-bad-row skip"
            )


def _characters(text: str, reading: Reading, tally: Tally) -> str | _Bad:
    """The text without what is no character."""
    try:
        text.encode()  # many times faster than a search
    except UnicodeEncodeError as error:
        if reading.errors == "strict":
            code = ord(text[error.start])
            what = f"byte 0x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"\\u{code:04x}"
            return _Bad(
                f"character {error.start + 1} of its text ({what}) is not Unicode: use --errors "
                "replace"
            )
        text, n_replaced = _NO_CHARACTER.subn("\ufffd", text)
        tally.n_replaced += n_replaced
    return text


def _json_rows(file: Input, reading: Reading, tally: Tally) -> Iterator[_Row]:
    key = file.text_key or reading.text_key
    for number, line in enumerate(_lines(_contents(file, reading, tally)), 1):
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if line.strip():
            # Stand-ins for bytes that are not UTF-8 matter only in the text.
            yield number, _json_text(line.decode("utf-8", "surrogateescape"), key)


def _json_text(line: str, key: str) -> str | _Bad | None:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        return _Bad(f"is not JSON ({error.msg}, character {error.pos + 1}): mend the line")
    except (ValueError, RecursionError) as error:  # an endless number, brackets without end
        return _Bad(f"is not JSON that can be read ({error}): mend the line")
    if not isinstance(row, dict):
        return _Bad(f"is {_kind(row)}, which must be an object with the text under a key")
    if key not in row:
        return _Bad(_missing("key", key, list(row)))
    text = row[key]
    if text is None or isinstance(text, str):
        return text
    return _Bad(f"has {_kind(text)} under {key}, which must be a string: choose another --text-key")


def _parquet_rows(file: Input, reading: Reading) -> Iterator[_Row]:
    require_parquet(file.label)
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

    column = file.text_key or reading.text_key
    try:
        # Without a buffer, and with the next groups fetched ahead, whole groups are in memory.
        table = ParquetFile(file.file, buffer_size=_COLUMN_BUFFER, pre_buffer=False)
        if column not in table.schema_arrow.names:
            raise Refused(f"{file.label}: {_missing('column', column, table.schema_arrow.names)}")
        kind = table.schema_arrow.field(column).type
        try:
            pa.nulls(0, kind).cast(pa.large_binary())
        except pa.ArrowNotImplementedError:  # pyarrow's word for a cast that does not exist
            raise Refused(
                f"{file.label}: column {column} is {kind}, which must be strings: choose another "
                "--text-key"
            ) from None
        for number, text in enumerate(_strings(table, column), 1):
            # Nobody has checked yet that they are UTF-8.
            yield number, text if text is None else text.decode("utf-8", "surrogateescape")
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk's, not parquet's
        raise Refused(
            f"{file.label}: is cut short or damaged, or no parquet file "
            f"({_one_line(str(error))}): fetch or make it again"
        ) from None
    for _ in file.blocks():
        pass  # hashed by itself: parquet is read out of order


def _strings(table: Any, column: str) -> Iterator[bytes | None]:
    import pyarrow as pa

    for group in range(table.num_row_groups):
        for batch in table.iter_batches(
            _BATCH_ROWS, row_groups=[group], columns=[column], use_threads=False
        ):
            yield from batch.column(0).cast(pa.large_binary()).to_pylist()


# words -------------------------------------------------------------------------------------------


def _lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    parts: list[bytes] = []
    for block in blocks:
        *ends, begin = block.split(b"\n")
        for end in ends:
            yield b"".join([*parts, end])
            parts = []
        parts.append(begin)
    yield b"".join(parts)


def _missing(kind: str, wanted: str, seen: Sequence[str]) -> str:
    """A key or column that is not there, those that are, and the one that may be meant."""
    meant = [name for name in seen if name.casefold() == wanted.casefold()]
    if meant:
        advice = f"use --text-key {shlex.quote(meant[0])}"
    else:
        advice = f"name the {kind} of the text with --text-key"
    return f"has no {kind} {wanted}, it has {_one_line(', '.join(seen)) or 'none'}: {advice}"


def _one_line(text: str) -> str:
    return textwrap.shorten(text, 200, placeholder=" ...")


def _kind(value: object) -> str:
    """In JSON's words."""
    if isinstance(value, str):
        return "a string"
    if isinstance(value, list):
        return "an array"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, bool):
        return "a boolean"
    return "null" if value is None else "a number"
