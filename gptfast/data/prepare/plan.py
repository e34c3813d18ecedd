"""What becomes of each text, training, validation or left out, from counts alone.

Without a mix the corpus is one: its last part is for validation. In a mix each of its sources is
cut by itself, so that both splits have its proportions, and what the proportions have no room for
is left out. Documents stay whole, but for one at a border of a mix or a limit, where whole ones
would miss it by more than a hundredth.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from gptfast.data.prepare.corpus import Survey

T = TypeVar("T")
Flags = NDArray[np.bool_]
Sizes = NDArray[np.int64]


_MISSED = 0.01
"""By which part a proportion may be missed so that all documents stay whole."""


@dataclass(frozen=True, order=True)
class Border:
    """A place in a source: in which document, before which of its characters."""

    document: int
    """Its number among those of the source with text, from 0."""
    char: int

    def n_before(self, document: int) -> int:
        """How many characters of a document stand before it, at most."""
        if document == self.document:
            return self.char
        return sys.maxsize if document < self.document else 0


@dataclass(frozen=True)
class Part:
    """What becomes of the text of a source."""

    train_end: Border
    """Validation begins here."""
    end: Border
    """What follows is left out."""
    copies: Flags
    """Which documents are left out because an earlier one is the same."""
    n_chars: int
    """Characters that are taken."""
    n_documents: int
    """Documents of which something is taken."""

    def has(self, split: str) -> bool:
        """Whether there may be text for a split."""
        begin, end = (
            (Border(0, 0), self.train_end) if split == "train" else (self.train_end, self.end)
        )
        return max(begin, Border(0, 0)) < min(end, Border(len(self.copies), 0))

    def limits(self, document: int) -> tuple[int, int]:
        """Up to which characters a document is for training, and up to which it is taken."""
        if self.copies[document : document + 1].any():
            return 0, 0
        end = self.end.n_before(document)
        return min(self.train_end.n_before(document), end), end


@dataclass(frozen=True)
class Plan:
    """What becomes of the text of a corpus."""

    parts: tuple[Part, ...]
    """One for each source."""
    has_documents: bool
    """Whether a separator follows each document: one stream has no end."""
    is_mix: bool
    """Whether one also follows the part of a document before a border: another text comes next."""


def plan(
    surveys: Sequence[Survey],
    val_fraction: float,
    *,
    copies: Flags | None = None,
    groups: Sequence[int] | None = None,
    weights: Sequence[float] = (1.0,),
    max_chars: int | None = None,
) -> Plan:
    """Take as much as the proportions allow, and its last part for validation.

    Args:
        val_fraction: in [0, 1).
        copies: for each document with text, through all sources, whether to leave it out.
        groups: how many of the sources each source of the mix has, one after the other; none is
            without text. None: no mix.
        weights: the share of each in the text, by any sum.
        max_chars: how much to take at most.
    """
    sizes = [np.frombuffer(s.sizes, dtype=np.int64) for s in surveys]
    flags = _flags(copies, [len(its_sizes) for its_sizes in sizes])
    kept = [_without(its_sizes, copied) for its_sizes, copied in zip(sizes, flags, strict=True)]
    members = [len(surveys)] if groups is None else groups
    grouped = list(zip(_in_groups(kept, members), _in_groups(flags, members), strict=True))
    totals = [sum(int(its_sizes.sum()) for its_sizes in group) for group, _ in grouped]
    is_mix = len(members) > 1
    parts: list[Part] = []
    for (group, its_flags), n_chars in zip(
        grouped, _shares(totals, weights, max_chars), strict=True
    ):
        parts += _parts(group, its_flags, n_chars, val_fraction, is_mix=is_mix)
    # A row is a document even if it is the only one.
    has_rows = any(s.tally.n_rows for s in surveys)
    several = sum(int(np.count_nonzero(its_sizes)) for its_sizes in kept) > 1
    return Plan(tuple(parts), has_documents=several or has_rows, is_mix=is_mix)


def _parts(
    group: Sequence[Sizes],
    flags: Sequence[Flags],
    n_chars: int,
    val_fraction: float,
    *,
    is_mix: bool,
) -> Iterator[Part]:
    """The first `n_chars` of the sources, as if they were one."""
    joined = group[0] if len(group) == 1 else np.concatenate(group)
    end = _end(joined, n_chars)
    train_end = _train_end(_before(joined, end), end, val_fraction, is_mix=is_mix)
    for sizes, copied in zip(group, flags, strict=True):
        taken = _before(sizes, end)
        yield Part(train_end, end, copied, int(taken.sum()), int(np.count_nonzero(taken)))
        train_end, end = (Border(b.document - len(sizes), b.char) for b in (train_end, end))


def _shares(totals: Sequence[int], weights: Sequence[float], limit: int | None) -> list[int]:
    """Characters of each: by weight, none twice, until the first source is used up."""
    whole = sum(weights)
    size = min(total * whole / weight for total, weight in zip(totals, weights, strict=True))
    size = size if limit is None else min(size, limit)
    return [round(size * weight / whole) for weight in weights]


def _end(sizes: Sizes, n_chars: int) -> Border:
    """Where `n_chars` have been taken."""
    if n_chars >= sizes.sum():
        return Border(len(sizes), 0)
    first, last = _first_and_last(sizes)
    if first == last:
        return _inside(sizes, n_chars)
    return _nearest(sizes, n_chars, first=first, last=last, slack=_MISSED * n_chars)


def _train_end(sizes: Sizes, end: Border, val_fraction: float, *, is_mix: bool) -> Border:
    """`sizes`: of what is taken. Of two documents or more each split gets one."""
    total = int(sizes.sum())
    n_train = (1 - val_fraction) * total
    first, last = _first_and_last(sizes)
    if first == last:
        return _inside(sizes, int(n_train))
    if val_fraction == 0:
        return end
    slack = _MISSED * min(n_train, total - n_train) if is_mix else math.inf
    return _nearest(sizes, n_train, first=first, last=last - 1, slack=slack)


def _first_and_last(sizes: Sizes) -> tuple[int, int]:
    """Of the documents that are not empty."""
    present = sizes > 0
    return int(np.argmax(present)), len(sizes) - 1 - int(np.argmax(present[::-1]))


def _nearest(sizes: Sizes, n_chars: float, *, first: int, last: int, slack: float) -> Border:
    """From behind the document `first` to behind `last`; in one of them, if all are too far off."""
    ends = np.cumsum(sizes)[first : last + 1]
    behind = min(int(np.searchsorted(ends, n_chars)), len(ends) - 1)
    nearest = min(max(0, behind - 1), behind, key=lambda at: abs(int(ends[at]) - n_chars))
    if abs(int(ends[nearest]) - n_chars) > slack:
        return _inside(sizes, int(n_chars))
    return Border(first + 1 + nearest, 0)


def _inside(sizes: Sizes, n_chars: int) -> Border:
    """Behind `n_chars` characters, and at least one."""
    n_chars = max(1, n_chars)
    ends = np.cumsum(sizes)
    document = int(np.searchsorted(ends, n_chars))
    return Border(document, n_chars - int(ends[document] - sizes[document]))


def _before(sizes: Sizes, end: Border) -> Sizes:
    """Characters of each document that stand before `end`."""
    if end.document >= len(sizes):
        return sizes
    taken = sizes.copy()
    taken[max(0, end.document) :] = 0
    if end.document >= 0:
        taken[end.document] = min(int(sizes[end.document]), end.char)
    return taken


def _flags(copies: Flags | None, n_documents: Sequence[int]) -> list[Flags]:
    """Those of each source."""
    if copies is None:
        return [np.zeros(n, dtype=bool) for n in n_documents]
    return np.split(copies, np.cumsum(n_documents)[:-1])


def _without(sizes: Sizes, copies: Flags) -> Sizes:
    return np.where(copies, 0, sizes) if copies.any() else sizes


def _in_groups(items: Iterable[T], members: Sequence[int]) -> list[list[T]]:
    rest = iter(items)
    return [list(itertools.islice(rest, n)) for n in members]
