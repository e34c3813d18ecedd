"""The tokenizers that need no vocabulary of their own: bytes and characters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gptfast.errors import Refused
from gptfast.tokenizers.text import Ids, whole_characters


class Bytes:
    """Each byte of the UTF-8 text is a token."""

    name = "bytes"
    vocab_size = 256
    eot_id: int | None = None
    needs_whole_documents = False

    def encode(self, text: str) -> Ids:
        return np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8).astype(np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return bytes(int(i) for i in ids)

    def pieces(self, ids: Iterable[int]) -> Iterator[str]:
        return whole_characters(self.decode_bytes([i]) for i in ids)

    def token_bytes(self) -> NDArray[np.int64]:
        return np.ones(256, dtype=np.int64)

    def definition(self) -> dict[str, Any]:
        return {"kind": "bytes", "name": "bytes"}


class Characters:
    """Each character of the corpus is a token; its id is its place in the alphabet."""

    name = "chars"
    eot_id: int | None = None
    needs_whole_documents = False

    def __init__(self, alphabet: str) -> None:
        self.alphabet = alphabet
        self.vocab_size = len(alphabet)
        points = _code_points(alphabet)
        self._ids = np.argsort(points).astype(np.uint32)
        self._points = points[self._ids]

    def encode(self, text: str) -> Ids:
        """(characters,) uint32.

        Raises:
            Refused: a character that the corpus does not have.
        """
        points = _code_points(text)
        places = np.searchsorted(self._points, points)
        known = places < self.vocab_size
        known[known] = self._points[places[known]] == points[known]
        if not known.all():
            at = int(np.argmin(known))
            raise Refused(
                f"character {at} of the text, {text[at]!r}, is not among the {self.vocab_size} "
                "that the chars tokenizer knows: leave it out, or prepare with gpt2 or bytes"
            )
        return self._ids[places]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.alphabet[int(i)] for i in ids)

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return self.decode(ids).encode()

    def pieces(self, ids: Iterable[int]) -> Iterator[str]:
        return (self.alphabet[i] for i in ids)

    def token_bytes(self) -> NDArray[np.int64]:
        return np.array([len(c.encode()) for c in self.alphabet], dtype=np.int64)

    def definition(self) -> dict[str, Any]:
        return {"kind": "chars", "name": "chars", "alphabet": self.alphabet}


def _code_points(text: str) -> Ids:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
