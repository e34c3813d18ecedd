"""Several sources with weights: which part of each is taken, and what the data file then holds."""

from __future__ import annotations

from array import array
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gptfast.data.corpus import Survey
from gptfast.data.formats import Tally
from gptfast.data.plan import Plan, plan
from gptfast.data.sources import Source

# the plan ----------------------------------------------------------------------------------------


def surveyed(*sizes: int) -> Survey:
    return Survey(Source("x", Path("x")), 0, "", array("q", sizes), 0, sum(sizes), Tally())


def splits_of(planned: Plan, surveys: list[Survey]) -> tuple[list[str], list[str]]:
    """The characters of train and of val, each called by its place: source.document.number."""
    train: list[str] = []
    val: list[str] = []
    for number, (source, part) in enumerate(zip(surveys, planned.parts, strict=True)):
        for document, size in enumerate(source.sizes):
            chars = [f"{number}.{document}.{char}" for char in range(size)]
            n_train, n_taken = part.limits(document)
            train += chars[:n_train]
            val += chars[n_train:n_taken]
    return train, val


SIZES = st.lists(st.integers(1, 50), min_size=1, max_size=8)
GROUPS = st.lists(st.lists(SIZES, min_size=1, max_size=3), min_size=1, max_size=3)


@given(
    groups=GROUPS,
    weights=st.lists(st.floats(0.01, 100), min_size=3, max_size=3),
    val_fraction=st.sampled_from([0, 0.1, 0.5, 0.9]),
    max_chars=st.none() | st.integers(1, 300),
    copied=st.sets(st.integers(0, 30)),
)
@settings(max_examples=300, deadline=None)
def test_a_plan_takes_what_the_weights_allow(
    groups: list[list[list[int]]],
    weights: list[float],
    val_fraction: float,
    max_chars: int | None,
    copied: set[int],
) -> None:
    """As near as whole documents allow; nothing twice, no copy, and something of each source."""
    surveys = [surveyed(*sizes) for group in groups for sizes in group]
    weights = weights[: len(groups)]
    kept: list[list[int]] = []  # sizes by group, a copy's 0
    copies: list[bool] = []
    for group in groups:
        joined = [size for sizes in group for size in sizes]
        flags = [n > 0 and len(copies) + n in copied for n in range(len(joined))]
        kept.append([0 if flag else size for size, flag in zip(joined, flags, strict=True)])
        copies += flags
    planned = plan(
        surveys,
        val_fraction,
        copies=np.array(copies),
        groups=[len(group) for group in groups],
        weights=weights,
        max_chars=max_chars,
    )
    train, val = splits_of(planned, surveys)
    assert len(set(train + val)) == len(train + val) == sum(part.n_chars for part in planned.parts)

    whole = sum(weights)
    room = min(sum(sizes) * whole / w for sizes, w in zip(kept, weights, strict=True))
    room = min(room, max_chars or room)
    parts = iter(planned.parts)
    first = 0
    for group, sizes, weight in zip(groups, kept, weights, strict=True):
        n_chars = sum(next(parts).n_chars for _ in group)
        one = sum(size > 0 for size in sizes) == 1
        assert abs(n_chars - room * weight / whole) <= (1 if one else max(sizes))
        its_names = {f"{first + number}" for number in range(len(group))}
        first += len(group)
        its_train = sum(char.split(".")[0] in its_names for char in train)
        assert 1 <= its_train <= n_chars
        if val_fraction == 0:
            assert its_train == n_chars
        elif one:
            assert its_train == max(1, int((1 - val_fraction) * n_chars))
        else:
            assert abs(its_train - (1 - val_fraction) * n_chars) <= max(sizes)


def test_without_a_mix_the_corpus_is_one() -> None:
    surveys = [surveyed(10), surveyed(10, 10), surveyed(10)]
    planned = plan(surveys, 0.25)
    assert splits_of(planned, surveys)[1] == [f"2.0.{char}" for char in range(10)]
    assert (planned.has_documents, planned.is_mix) == (True, False)


def test_in_a_mix_each_source_has_its_own_border() -> None:
    """The second source is used up; of the first a third of its characters go."""
    surveys = [surveyed(60), surveyed(*[5] * 4)]
    planned = plan(surveys, 0.25, groups=[1, 1], weights=[1, 1])
    train, val = splits_of(planned, surveys)
    assert train == [f"0.0.{n}" for n in range(15)] + [
        f"1.{d}.{n}" for d in range(3) for n in range(5)
    ]
    assert val == [f"0.0.{n}" for n in range(15, 20)] + [f"1.3.{n}" for n in range(5)]
    assert (planned.has_documents, planned.is_mix) == (True, True)
