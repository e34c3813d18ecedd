"""Which documents are copies of an earlier one, exactly or nearly; the first is the one to keep.

Memory grows with the number of documents, not with their length: 16 bytes a document for exact
copies and 66 more at the end, to sort them; 112 for near ones and 42 more.

Near copies are found by MinHash and locality-sensitive hashing. A document is the set of its
shingles: all runs of 16 characters, with case and spacing made equal. 14 bands of 8 hashes make
a pair with three quarters of its shingles in common a copy with a chance of 77 %, one with 85 %
with 99 %, and one with half of them with 5 %.

Source: Broder, "On the resemblance and containment of documents" (1997); the bands are those of
FineWeb (Penedo et al., 2024, arXiv:2406.17557).
"""

from __future__ import annotations

import hashlib
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from gptfast.errors import Refused

Dedupe = Literal["exact", "near"]
Flags = NDArray[np.bool_]

_DIGEST = 16
_SHINGLE = 16
"""Characters. A power of two: runs of that length are hashed by halves."""
_BANDS = 14
_ROWS = 8
"""Hashes in a band: all of them must agree."""
_SEED = 42
_LONGEST = 1 << 20
"""Characters of a document that can be a near copy: its shingles are in memory at once."""
_BATCH = 1 << 18
"""Shingles for which MinHash is called."""
# Odd, with bits everywhere: multiplying by it permutes the integers and spreads what differs.
_ODD = np.uint64(0x9E3779B97F4A7C15)


class Copies(Protocol):
    """Takes the documents one after the other, tells the copies at the end."""

    def feed(self, text: str) -> None:
        """The next part of a document."""

    def end(self) -> None:
        """The document ends."""

    def found(self) -> Flags:
        """For each document: whether an earlier one is the same."""


def copies(kind: Dedupe) -> Copies:
    """What finds the copies of a kind.

    Raises:
        Refused: the package that it needs is not installed.
    """
    return ExactCopies() if kind == "exact" else NearCopies()


class ExactCopies:
    """The same text, to the character."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=_DIGEST)
        self._digests = bytearray()

    def feed(self, text: str) -> None:
        self._digest.update(text.encode())

    def end(self) -> None:
        self._digests += self._digest.digest()
        self._digest = hashlib.blake2b(digest_size=_DIGEST)

    def found(self) -> Flags:
        return _seen_before(np.frombuffer(self._digests, dtype=f"V{_DIGEST}"))


class NearCopies:
    """Nearly the same text. One too long for that is a copy if it is exactly the same."""

    def __init__(self) -> None:
        try:
            from rensa import RMinHash
        except ImportError:
            raise Refused(
                "--dedupe near: needs the package rensa, which is not installed: pip install "
                "'gptfast[dedupe]', or use --dedupe exact"
            ) from None
        self._min_hash = RMinHash.digest_matrix_from_flat_token_hashes
        self._parts: list[str] = []
        self._n_chars = 0
        self._digest = hashlib.blake2b(digest_size=8)
        self._shingles: list[NDArray[np.uint64]] = []
        self._n_shingles = 0
        self._keys = bytearray()
        """Of each document its bands, 64 bits each."""

    def feed(self, text: str) -> None:
        self._n_chars += len(text)
        self._digest.update(text.encode())
        if self._n_chars <= _LONGEST:
            self._parts.append(text)

    def end(self) -> None:
        if self._n_chars <= _LONGEST:
            self._shingles.append(shingles("".join(self._parts)))
            self._n_shingles += len(self._shingles[-1])
            if self._n_shingles >= _BATCH:
                self._sketch()
        else:
            self._sketch()
            self._keys += self._digest.digest() * _BANDS
        self._parts, self._n_chars = [], 0
        self._digest = hashlib.blake2b(digest_size=8)

    def found(self) -> Flags:
        self._sketch()
        keys = np.frombuffer(self._keys, dtype=np.uint64).reshape(-1, _BANDS)
        flags = np.zeros(len(keys), dtype=bool)
        for band in range(_BANDS):
            flags |= _seen_before(keys[:, band])
        return flags

    def _sketch(self) -> None:
        """Turn the shingles of the waiting documents into the keys of their bands."""
        if not self._shingles:
            return
        ends = np.cumsum([0, *map(len, self._shingles)])
        matrix = self._min_hash(np.concatenate(self._shingles), ends, _BANDS * _ROWS, _SEED)
        hashes = np.array(matrix.to_rows(), dtype=np.uint64).reshape(-1, _BANDS, _ROWS)
        keys = np.zeros(hashes.shape[:2], dtype=np.uint64)
        for row in range(_ROWS):
            keys = _mixed(keys ^ hashes[:, :, row])
        self._keys += keys.tobytes()
        self._shingles, self._n_shingles = [], 0


def shingles(text: str) -> NDArray[np.uint64]:
    """A hash for each run of characters, with repetitions; a shorter text is one run."""
    plain = " ".join(text.casefold().split())
    codes = np.frombuffer(plain.encode("utf-32-le"), dtype=np.uint32).astype(np.uint64)
    hashes = np.pad(codes, (0, max(0, _SHINGLE - len(codes))))
    length = 1
    while length < _SHINGLE:
        hashes = _mixed(hashes[:-length]) + hashes[length:]
        length *= 2
    return _mixed(hashes)


def _mixed(hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    spread = hashes * _ODD
    return spread ^ (spread >> np.uint64(32))


def _seen_before(keys: NDArray[np.generic]) -> Flags:
    """Whether an equal key stands before each."""
    _, firsts = np.unique(keys, return_index=True)
    flags = np.ones(len(keys), dtype=bool)
    flags[firsts] = False
    return flags
