"""Text files, read in pieces: never a whole file in memory, never another text for the pieces.

Bytes are UTF-8 whatever the machine's locale, newlines stay as they are, a byte-order mark at the
start is dropped.
"""

from __future__ import annotations

import codecs
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from gptfast.data.sources import Document
from gptfast.errors import GptfastError, Refused

OnInvalid = Literal["strict", "replace"]
"""What to do with bytes that are not UTF-8: refuse the file, or put U+FFFD for each of them."""

_BLOCK = 1 << 18
"""Bytes read at a time: enough to be worth a thread, few enough to give every thread some."""
_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"PK\x03\x04": "zip",
    b"PAR1": "parquet",
    b"\x89HDF": "HDF5",
    b"%PDF": "PDF",
}
# The longer marks first: UTF-32's begins with UTF-16's.
_WIDE_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
_STAND_INS = re.compile("[\udc80-\udcff]")


@dataclass(frozen=True)
class Piece:
    """The next part of a file's text."""

    text: str
    raw: bytes
    """What was read for it. A character cut in two is in the text of the second piece."""
    n_replaced: int


@dataclass(frozen=True)
class Survey:
    """What one reading of a document tells."""

    n_raw: int
    """Bytes of the file."""
    n_chars: int
    n_replaced: int
    sha256: str
    """Of the file."""


def read_pieces(document: Document, *, errors: OnInvalid) -> Iterator[Piece]:
    """The text of a document, a quarter of a mebibyte at a time.

    Raises:
        Refused: not UTF-8 text.
        GptfastError: it cannot be read.
    """
    try:
        with document.path.open("rb") as file:
            # "surrogateescape" puts a stand-in for each invalid byte, which can then be counted.
            decoder = codecs.getincrementaldecoder("utf-8")(
                "strict" if errors == "strict" else "surrogateescape"
            )
            at = 0
            while True:
                raw = file.read(_BLOCK)
                block = raw
                if at == 0:
                    _check_kind(raw, document, errors=errors)
                    block = raw.removeprefix(codecs.BOM_UTF8)
                try:
                    text = decoder.decode(block, final=not raw)
                except UnicodeDecodeError as error:
                    byte = at + len(raw) - len(error.object) + error.start
                    raise Refused(
                        f"{document.label}: byte {byte} (0x{error.object[error.start]:02x}) is not "
                        "UTF-8: save the file as UTF-8, or use --errors replace"
                    ) from None
                text, n_replaced = _STAND_INS.subn("\ufffd", text)
                if not raw and not text:
                    return
                yield Piece(text, raw, n_replaced)
                at += len(raw)
    except OSError as error:
        raise GptfastError(f"{document.label}: cannot be read ({error.strerror})") from error


def survey(document: Document, *, errors: OnInvalid, alphabet: set[str] | None) -> Survey:
    """Read a document once, to check and to count it.

    Args:
        alphabet: gets every character of the text; None: not wanted.
    """
    digest = hashlib.sha256()
    n_raw = n_chars = n_replaced = 0
    for piece in read_pieces(document, errors=errors):
        digest.update(piece.raw)
        n_raw += len(piece.raw)
        n_chars += len(piece.text)
        n_replaced += piece.n_replaced
        if alphabet is not None:
            alphabet.update(piece.text)
    return Survey(n_raw, n_chars, n_replaced, digest.hexdigest())


class Chunks:
    """Joins pieces and cuts them where no tokenizer could tell.

    The patterns of gpt2, cl100k_base and o200k_base never have a token with something and then a
    space in it, nor one that crosses a single newline between two words; and what such a pattern
    does to the left of such a place does not depend on what stands to the right. So the ids of the
    chunks are the ids of the text. A text without such a place becomes one chunk.
    """

    def __init__(self) -> None:
        self._parts: list[str] = []

    def feed(self, text: str) -> Iterator[str]:
        """What can be cut off after this much more text."""
        cut = last_cut(text)
        if cut:
            yield "".join([*self._parts, text[:cut]])
            self._parts = [text[cut:]]
        else:
            self._parts.append(text)

    def rest(self) -> Iterator[str]:
        """What is left at the end of the text."""
        text = "".join(self._parts)
        if text:
            yield text
        self._parts = []


def last_cut(text: str) -> int:
    """The last place where the text may be cut; 0: there is none."""
    at = len(text)
    while (at := text.rfind(" ", 0, at)) > 0:
        if not text[at - 1].isspace():
            return at
    at = len(text) - 1
    while (at := text.rfind("\n", 0, at)) > 0:
        after = text[at + 1]
        # o200k_base has tokens of punctuation, newlines and slashes.
        if not text[at - 1].isspace() and not after.isspace() and after != "/":
            return at + 1
    return 0


def _check_kind(head: bytes, document: Document, *, errors: OnInvalid) -> None:
    for magic, kind in _MAGIC.items():
        if head.startswith(magic):
            raise Refused(
                f"{document.label}: is {kind} data, and only plain text is read: unpack or convert "
                "it first"
            )
    for mark, encoding in _WIDE_MARKS.items():
        if head.startswith(mark) and errors == "strict":
            raise Refused(
                f"{document.label}: is {encoding} text (byte-order mark at byte 0), and only UTF-8 "
                f"is read: iconv -f {encoding} -t UTF-8 makes it so"
            )
