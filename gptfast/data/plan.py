"""Which part of each text is for training and which for validation, from counts alone."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from gptfast.data.corpus import Survey


@dataclass(frozen=True)
class Border:
    """Where training ends in a source: in which document, before which of its characters."""

    document: int
    """Its number among those of the source with text, from 0."""
    char: int

    def n_train(self, document: int) -> int:
        """How many characters of a document are for training, at most."""
        if document == self.document:
            return self.char
        return sys.maxsize if document < self.document else 0


@dataclass(frozen=True)
class Plan:
    """What becomes of the text of a corpus."""

    borders: tuple[Border, ...]
    """One for each source."""
    has_documents: bool
    """Whether a separator follows each document: one stream has no end."""


def plan(surveys: Sequence[Survey], val_fraction: float) -> Plan:
    """The last part of the whole corpus is for validation."""
    n_documents = sum(len(s.sizes) for s in surveys)
    document, char = _border(surveys, val_fraction)
    borders = []
    for surveyed in surveys:
        borders.append(Border(document, char))
        document -= len(surveyed.sizes)
    # A row is a document even if it is the only one.
    has_documents = n_documents > 1 or any(s.tally.n_rows for s in surveys)
    return Plan(tuple(borders), has_documents)


def _border(surveys: Sequence[Survey], val_fraction: float) -> tuple[int, int]:
    """The document, counted through all sources, and the character in it."""
    n_documents = sum(len(s.sizes) for s in surveys)
    n_train = (1 - val_fraction) * sum(sum(s.sizes) for s in surveys)
    if n_documents == 1:
        return 0, max(1, int(n_train))
    if val_fraction == 0:
        return n_documents, 0
    ends = itertools.accumulate(itertools.chain.from_iterable(s.sizes for s in surveys))
    inner = enumerate(itertools.islice(ends, n_documents - 1), 1)
    document, _ = min(inner, key=lambda border: abs(border[1] - n_train))
    return document, 0
