"""Whether a data file is what it says it is: every id of it is read once and compared."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gptfast.data.layout import DAMAGE, OWN, Split, pieces
from gptfast.data.store import Store
from gptfast.errors import GptfastError, counted

if TYPE_CHECKING:
    from gptfast.tokenizers.tokenizer import Tokenizer

Ids = NDArray[np.integer[Any]]
Progress = Callable[[int, int, int], None]
"""Called with bytes of ids read, bytes in all, and ids read."""

_LOSSLESS = ("bpe", "bytes", "chars")
"""Kinds of tokenizers whose ids spell every byte of the text."""
_UNREADABLE = (*DAMAGE, GptfastError)
"""What damaged metadata raises when it is taken apart."""


@dataclass(frozen=True)
class Verified:
    """What was found out about a data file, a line each."""

    path: Path
    format: str
    holds: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    """What cannot be checked, because the file says nothing about it."""


def verify(store: Store, *, progress: Progress = lambda done, total, ids: None) -> Verified:
    """Compare a data file with what it says about itself, as far as it says anything."""
    layout = store.layout
    found = Verified(store.path, layout.kind)
    tokenizer = _tokenizer(store, found)
    _sources(store, found)
    if layout.kind != OWN:
        found.unknown.append(f"checksums and documents, which {layout.kind} files do not have")
    total = sum(split.n_tokens * split.dtype.itemsize for split in layout.splits.values())
    done = n_ids = 0
    for name, split in layout.splits.items():
        checks = list(_checks(store, name, tokenizer, found))
        try:
            at = 0
            for ids in pieces(store.tokens(name), split.n_tokens):
                for check in checks:
                    check.see(ids, at)
                at += len(ids)
                done, n_ids = done + ids.nbytes, n_ids + len(ids)
                progress(done, total, n_ids)
        except _UNREADABLE as error:
            found.faults.append(f"{name}: cannot be read from id {at} on ({error})")
            continue
        for check in checks:
            fault = check.fault()
            (found.faults if fault else found.holds).append(f"{name}: {fault or check.holds()}")
    return found


def _tokenizer(store: Store, found: Verified) -> Tokenizer | None:
    if store.tokenizer_name is None:
        size = "" if store.vocab_size else ", nor how many ids it has"
        found.unknown.append(f"the tokenizer, which the file does not name{size}")
        return None
    try:
        tokenizer = store.tokenizer()
    except _UNREADABLE as error:
        found.faults.append(
            f"tokenizer: its definition cannot be used ({error.__cause__ or error})"
        )
        return None
    said = f"tokenizer: {tokenizer.name}, {counted(tokenizer.vocab_size, 'id')}"
    if tokenizer.vocab_size == store.vocab_size:
        found.holds.append(said)
    else:
        found.faults.append(f"{said}, but {store.vocab_size:,} are written down")
    return tokenizer


def _sources(store: Store, found: Verified) -> None:
    try:
        store.sources()
    except _UNREADABLE as error:
        found.faults.append(f"sources: cannot be read ({error.__cause__ or error})")


def _checks(
    store: Store, name: str, tokenizer: Tokenizer | None, found: Verified
) -> Iterator[_Check]:
    split = store.layout.splits[name]
    yield _InRange(split, store.vocab_size)
    if split.sha256 is not None:
        yield _Checksum(split.sha256)
    lossless = tokenizer is not None and tokenizer.definition()["kind"] in _LOSSLESS
    if tokenizer is not None and lossless and split.n_bytes is not None:
        yield _BytesOfText(split.n_bytes, tokenizer.token_bytes())
    if store.layout.kind != OWN:
        return
    try:
        starts = store.documents(name)
    except _UNREADABLE as error:
        found.faults.append(f"{name}: its documents cannot be read ({error.__cause__ or error})")
        return
    if fault := _fault_of_starts(starts, split.n_tokens):
        found.faults.append(f"{name}: {fault}")
    elif tokenizer is not None:
        yield _Documents(starts, split.n_tokens, tokenizer.eot_id)


def _fault_of_starts(starts: NDArray[np.int64], n_tokens: int) -> str | None:
    if not len(starts) or starts[0] != 0:
        return "its first document does not begin with its first id"
    backwards = np.flatnonzero(np.diff(starts) <= 0)
    if len(backwards):
        number = int(backwards[0]) + 1
        return f"document {number} begins at id {starts[number]}, not after the one before it"
    if starts[-1] >= n_tokens:
        return f"document {len(starts) - 1} begins at id {starts[-1]}, and there are {n_tokens}"
    return None


class _Check(Protocol):
    """Sees all ids of a split, a piece at a time, and then tells what it found."""

    def see(self, ids: Ids, at: int) -> None:
        """`at`: how many came before."""

    def fault(self) -> str | None:
        """What is wrong; None: nothing."""

    def holds(self) -> str:
        """What is right, where nothing is wrong."""


class _InRange:
    """Every id is one of the vocabulary, and the largest is the one that is written down."""

    def __init__(self, split: Split, vocab_size: int | None) -> None:
        self._split = split
        self._vocab_size = vocab_size
        self._largest = 0
        self._beyond: tuple[int, int] | None = None

    def see(self, ids: Ids, at: int) -> None:
        largest = int(ids.max())
        self._largest = max(self._largest, largest)
        if self._beyond is None and self._vocab_size is not None and largest >= self._vocab_size:
            index = int(np.argmax(ids >= self._vocab_size))
            self._beyond = int(ids[index]), at + index

    def fault(self) -> str | None:
        if self._beyond is not None:
            value, at = self._beyond
            return f"id {value} at token {at} is not below {self._vocab_size}, the vocabulary"
        if self._split.max_id not in (None, self._largest):
            return f"its largest id is {self._largest}, but {self._split.max_id} is written down"
        return None

    def holds(self) -> str:
        below = "" if self._vocab_size is None else f", all below {self._vocab_size:,}"
        return f"{counted(self._split.n_tokens, 'id')}, the largest {self._largest:,}{below}"


class _Checksum:
    """The ids are those that were written."""

    def __init__(self, recorded: str) -> None:
        self._recorded = recorded
        self._digest = hashlib.sha256()

    def see(self, ids: Ids, at: int) -> None:
        self._digest.update(np.ascontiguousarray(ids).data)

    def fault(self) -> str | None:
        found = self._digest.hexdigest()
        if found == self._recorded:
            return None
        return f"the SHA-256 of its ids is {found}, but {self._recorded} is written down"

    def holds(self) -> str:
        return f"SHA-256 {self._recorded}"


class _BytesOfText:
    """The ids spell as many bytes as are written down, by which bits per byte are counted."""

    def __init__(self, recorded: int, lengths: NDArray[np.int64]) -> None:
        self._recorded = recorded
        self._lengths = lengths
        self._found = 0

    def see(self, ids: Ids, at: int) -> None:
        self._found += int(self._lengths[ids[ids < len(self._lengths)]].sum())

    def fault(self) -> str | None:
        if self._found == self._recorded:
            return None
        found = counted(self._found, "byte")
        return f"its ids spell {found} of text, but {self._recorded:,} are written"

    def holds(self) -> str:
        return f"{counted(self._recorded, 'byte')} of text"


class _Documents:
    """A separator stands before each document but the first, perhaps at the end, nowhere else."""

    def __init__(self, starts: NDArray[np.int64], n_tokens: int, separator: int | None) -> None:
        self._n_documents = len(starts)
        self._ends = starts[1:] - 1
        self._last = n_tokens - 1
        self._separator = separator
        self._missing: int | None = None
        self._extra: int | None = None

    def see(self, ids: Ids, at: int) -> None:
        if self._separator is None:
            return
        found = np.flatnonzero(ids == self._separator) + at
        low, high = np.searchsorted(self._ends, (at, at + len(ids)))
        missing = np.setdiff1d(self._ends[low:high], found, assume_unique=True)
        extra = np.setdiff1d(found, self._ends[low:high], assume_unique=True)
        extra = extra[extra != self._last]
        if self._missing is None and len(missing):
            self._missing = int(missing[0])
        if self._extra is None and len(extra):
            self._extra = int(extra[0])

    def fault(self) -> str | None:
        if self._missing is not None:
            number = int(np.searchsorted(self._ends, self._missing))
            return f"document {number} does not end with a separator, at token {self._missing}"
        if self._extra is not None:
            return f"a separator stands inside a document, at token {self._extra}"
        return None

    def holds(self) -> str:
        if self._n_documents == 1:
            return "1 document"
        how = "no separators" if self._separator is None else "a separator after each"
        return f"{self._n_documents:,} documents, {how}"
