"""How much of which text goes into the data file: mixed, without copies, up to a size.

In a mix, `a.txt:0.7 b.jsonl:0.3`, a weight is the share of a source in the characters of the data
file, of training and validation alike; only their proportions count. Nothing is repeated: the
source that is used up first, for its weight, sets the size, and the rest of the others is left out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from gptfast.data.prepare.corpus import Survey, survey
from gptfast.data.prepare.dedupe import Copies, Dedupe, Flags, copies
from gptfast.data.prepare.formats import Reading
from gptfast.data.prepare.plan import Part, Plan, plan
from gptfast.data.prepare.sources import Corpus, Found
from gptfast.errors import Refused


@dataclass(frozen=True)
class Selection:
    """What is asked for."""

    weights: tuple[float, ...] | None = None
    """Of each source of a mix; None: all of every source."""
    dedupe: Dedupe | None = None
    """Which documents count as copies of an earlier one."""
    max_chars: int | None = None
    """How much text, to a hundredth."""

    def limits(self, n_names: int) -> tuple[float, ...]:
        """How many characters of each name are enough, as far as that can be known before."""
        if self.max_chars is None:
            return (math.inf,) * n_names
        if self.weights is None:
            return (self.max_chars,) * n_names
        return tuple(self.max_chars * weight / sum(self.weights) for weight in self.weights)


ALL = Selection()
"""Each text once and whole."""


@dataclass(frozen=True)
class Ingredient:
    """A source of a mix and its share."""

    name: str
    weight: float


@dataclass(frozen=True)
class Share:
    """What has been taken of a source of a mix."""

    name: str
    weight: float
    """As it was asked for."""
    share: float
    """Of all characters, as it has become."""
    n_texts: int
    """Files that it stands for, as far as they were read."""
    n_chars: int
    n_left_out: int
    """Characters that there was no room for."""


@dataclass(frozen=True)
class Chosen:
    """The text of a corpus, and what becomes of it."""

    surveys: tuple[Survey, ...]
    plan: Plan
    n_copies: int
    """Documents left out as copies."""
    shares: tuple[Share, ...]
    """Of a mix."""
    n_left_out: int
    """Characters that were read and have no place, copies not counted."""


def parse_mix(values: Sequence[str]) -> list[Ingredient]:
    """What stands behind `--mix`; a name may have colons, the weight is behind the last.

    Raises:
        Refused: no weight, one that is no number above 0, a source twice.
    """
    ingredients: list[Ingredient] = []
    for value in values:
        name, colon, written = value.rpartition(":")
        if not (name and colon):
            raise Refused(f"--mix {value}: has no weight: write {value or 'SOURCE'}:0.5, say")
        if name in [ingredient.name for ingredient in ingredients]:
            raise Refused(f"--mix {value}: {name} is in it twice: give it one weight")
        ingredients.append(Ingredient(name, _weight(written, value)))
    return ingredients


def choose(
    corpus: Corpus,
    selection: Selection,
    *,
    val_fraction: float,
    reading: Reading,
    alphabet: set[str] | None,
    note: Callable[[str], None],
) -> Chosen:
    """Read a corpus once, and say what goes into the data file.

    Args:
        alphabet: gets every character of the text; None: not wanted.
        note: told in one line what the user should know.

    Raises:
        Refused: no text in it, or in a source of a mix; a file that is in two of its sources.
        GptfastError: it cannot be read.
    """
    finder = None if selection.dedupe is None else copies(selection.dedupe)
    groups = _surveyed(corpus, selection, reading=reading, alphabet=alphabet, copies=finder)
    surveys = tuple(itertools.chain.from_iterable(groups))
    _check_text(surveys, corpus.description)
    flags = np.zeros(sum(len(s.sizes) for s in surveys), bool) if finder is None else finder.found()
    if finder is not None and len(flags) == 1:
        note("--dedupe: there is one document, and nothing to compare it with")
    if selection.weights is not None:
        _check_mix(corpus.found, groups, flags)
    planned = plan(
        surveys,
        val_fraction,
        copies=flags,
        groups=None if selection.weights is None else [len(group) for group in groups],
        weights=selection.weights or (1.0,),
        max_chars=selection.max_chars,
    )
    return Chosen(
        surveys,
        planned,
        n_copies=int(np.count_nonzero(flags)),
        n_left_out=sum(map(_n_left_out, surveys, planned.parts)),
        shares=_shares(corpus.found, selection.weights or (), groups, planned),
    )


def _surveyed(
    corpus: Corpus,
    selection: Selection,
    *,
    reading: Reading,
    alphabet: set[str] | None,
    copies: Copies | None,
) -> list[list[Survey]]:
    """The sources of each name, as many as are needed."""
    groups: list[list[Survey]] = []
    n_chars = 0
    for found, limit in zip(corpus.found, selection.limits(len(corpus.found)), strict=True):
        n_chars = n_chars if selection.weights is None else 0
        group: list[Survey] = []
        for source in found.sources:
            if n_chars < limit:
                group.append(survey(source, reading, alphabet=alphabet, copies=copies))
                n_chars += sum(group[-1].sizes)
        groups.append(group)
    return groups


def _shares(
    found: Sequence[Found],
    weights: Sequence[float],
    groups: Sequence[Sequence[Survey]],
    planned: Plan,
) -> tuple[Share, ...]:
    total = sum(part.n_chars for part in planned.parts)
    parts = iter(planned.parts)
    shares = []
    for one, weight, group in zip(found, weights, groups, strict=False):
        its_parts = list(itertools.islice(parts, len(group)))
        n_chars = sum(part.n_chars for part in its_parts)
        n_left_out = sum(map(_n_left_out, group, its_parts))
        shares.append(Share(one.name, weight, n_chars / total, len(group), n_chars, n_left_out))
    return tuple(shares)


def _n_left_out(surveyed: Survey, part: Part) -> int:
    sizes = np.frombuffer(surveyed.sizes, dtype=np.int64)
    return int(sizes[~part.copies].sum()) - part.n_chars


def _check_text(surveys: Sequence[Survey], description: str) -> None:
    if not any(s.sizes for s in surveys):
        n_bad_rows = sum(s.tally.n_bad_rows for s in surveys)
        skipped = f" ({n_bad_rows} bad rows are left out)" if n_bad_rows else ""
        raise Refused(f"{description}: 0 tokens, no text in it{skipped}: name a longer text")


def _check_mix(found: Sequence[Found], groups: Sequence[Sequence[Survey]], flags: Flags) -> None:
    """A share of nothing cannot be had, and a text belongs to one source."""
    at = 0
    for one, group in zip(found, groups, strict=True):
        if one.n_elsewhere:
            raise Refused(
                f"--mix: {one.name} has {one.n_elsewhere:,} of the files of an earlier source: "
                "name each file in one of them"
            )
        _check_text(group, one.name)
        n_documents = sum(len(s.sizes) for s in group)
        if flags[at : at + n_documents].all():
            raise Refused(
                f"--mix: {one.name} has copies of earlier documents only: leave it or --dedupe out"
            )
        at += n_documents


def _weight(written: str, value: str) -> float:
    try:
        weight = float(written)
    except ValueError:
        weight = math.nan
    if not 0 < weight < math.inf:
        raise Refused(
            f"--mix {value}: the weight {written or 'after the colon'} is no number above 0: write "
            "the share of the source in the text, as in a.txt:0.7"
        )
    return weight
