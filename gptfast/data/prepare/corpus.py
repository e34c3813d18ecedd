"""The documents of a corpus: looked through once to be checked and counted, cut up to be encoded.

Everything is read in pieces: never a whole file in memory, never another text for the pieces.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from gptfast.data.prepare.dedupe import Copies
from gptfast.data.prepare.formats import Reading, Tally, read_pieces
from gptfast.data.prepare.sources import Source


@dataclass(frozen=True)
class Survey:
    """What one reading of a source tells."""

    source: Source
    n_file_bytes: int
    sha256: str
    """Of the file."""
    sizes: array[int]
    """Characters of each document with text: eight bytes of memory a document."""
    n_empty: int
    """Documents without."""
    n_bytes: int
    """Of all text, in UTF-8."""
    tally: Tally


def survey(
    source: Source, reading: Reading, *, alphabet: set[str] | None, copies: Copies | None = None
) -> Survey:
    """Read a source once, to check and to count it.

    Args:
        alphabet: gets every character of the text; None: not wanted.
        copies: gets every document with text; None: not wanted.

    Raises:
        Refused: not what its format should be.
        GptfastError: it cannot be read.
    """
    tally = Tally()
    sizes = array("q")
    n_bytes = n_chars = n_empty = 0
    with source.open() as file:
        for piece in read_pieces(file, reading, tally):
            n_chars += len(piece.text)
            n_bytes += utf8_size(piece.text)
            if alphabet is not None:
                alphabet.update(piece.text)
            if copies is not None:
                copies.feed(piece.text)
            if piece.ends:
                if n_chars:
                    sizes.append(n_chars)
                    if copies is not None:
                        copies.end()
                else:
                    n_empty += 1
                n_chars = 0
        return Survey(source, file.n_bytes, file.sha256(), sizes, n_empty, n_bytes, tally)


def utf8_size(text: str) -> int:
    """Bytes of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


class Chunks:
    """Joins pieces and cuts them where no tokenizer could tell.

    The patterns of gpt2, cl100k_base and o200k_base never have a token with something and then a
    space in it, nor one that crosses a single newline between two words, nor one in which
    punctuation follows a word; and what such a pattern does to the left of such a place does not
    depend on what stands to the right. So the ids of the chunks are the ids of the text. A text
    without such a place becomes one chunk.
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

    def hold(self, text: str) -> None:
        """Take more text and cut nothing off yet."""
        self._parts.append(text)

    def rest(self) -> Iterator[str]:
        """What is left at the end of the text."""
        text = "".join(self._parts)
        if text:
            yield text
        self._parts = []


_TAIL = 1 << 12
"""Characters searched for the end of a word, where there is neither space nor newline."""
_WORD_END = re.compile(
    "[0-9A-Za-z\u3041-\u3094\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3]"
    r"(?=[!-&(-/:-@\[-`{-~\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f])"
)
"""A letter or digit that every Unicode version knows as one, then punctuation: all but the
apostrophe, which may belong to the word."""


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
    tail = max(0, len(text) - _TAIL)
    ends = [match.end() for match in _WORD_END.finditer(text, tail)]
    return ends[-1] if ends else 0
