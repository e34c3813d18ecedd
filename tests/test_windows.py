"""The order of the windows: every epoch whole, every step a pure function."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gptfast.data.windows import WindowOrder
from gptfast.errors import Refused


def order(n_tokens: int, block_size: int, *, seed: int = 7, split: str = "train") -> WindowOrder:
    return WindowOrder(seed=seed, split=split, n_tokens=n_tokens, block_size=block_size)


@st.composite
def orders(draw: st.DrawFn) -> WindowOrder:
    block_size = draw(st.integers(1, 40))
    n_tokens = block_size + 1 + draw(st.integers(0, 2000))
    return order(n_tokens, block_size, seed=draw(st.integers(0, 2**63 - 1)))


@settings(deadline=None, max_examples=60)
@given(orders())
def test_an_epoch_visits_each_window_once(windows: WindowOrder) -> None:
    block, first, later = windows.block_size, windows.n_windows(0), windows.n_windows(1)
    starts = windows.starts(1, batch_size=first + 3 * later)
    assert np.array_equal(np.sort(starts[:first]), np.arange(first) * block)
    for epoch in np.split(np.sort(starts[first:].reshape(3, later)), 3):
        assert (np.diff(epoch[0]) == block).all(), "one phase, no window twice"
        assert epoch.min() >= 0
        assert epoch.max() + block + 1 <= windows.n_tokens


@settings(deadline=None, max_examples=60)
@given(
    windows=orders(),
    step=st.integers(1, 10**9),
    per_rank=st.integers(1, 8),
    world=st.integers(1, 8),
)
def test_ranks_share_the_step_of_one_process(
    windows: WindowOrder, step: int, per_rank: int, world: int
) -> None:
    batch_size = per_rank * world
    alone = windows.starts(step, batch_size=batch_size)
    ranks = [
        windows.starts(step, batch_size=batch_size, rank=rank, world=world) for rank in range(world)
    ]
    assert np.array_equal(np.stack(ranks, axis=1).ravel(), alone)


@settings(deadline=None, max_examples=60)
@example(windows=order(6, 1), first=1, batch_size=3)
@given(windows=orders(), first=st.integers(1, 50), batch_size=st.integers(1, 16))
def test_steps_join_without_gap_or_overlap(
    windows: WindowOrder, first: int, batch_size: int
) -> None:
    """Batches are consecutive parts of one sequence, so their size does not change it."""
    apart = [windows.starts(first + n, batch_size=batch_size) for n in range(3)]
    joined = windows.starts(1, batch_size=batch_size * (first + 2))
    assert np.array_equal(np.concatenate(apart), joined[-3 * batch_size :])


def test_the_order_never_changes() -> None:
    """These numbers are in checkpoints' past: a resumed run must see what it would have seen."""
    assert order(20_000, 64).starts(1, batch_size=6).tolist() == [
        6208,
        12608,
        15552,
        4928,
        18688,
        10560,
    ]
    assert order(20_000, 64).starts(1000, batch_size=6).tolist() == [
        11326,
        19838,
        4862,
        318,
        15614,
        7358,
    ]


def test_seed_split_and_epoch_each_give_another_order() -> None:
    n = order(20_000, 64).n_windows(1)
    epochs = order(20_000, 64).starts(1, batch_size=3 * n + 1)[1:].reshape(3, n)
    seen = [
        order(20_000, 64).starts(1, batch_size=n),
        order(20_000, 64, seed=8).starts(1, batch_size=n),
        order(20_000, 64, split="val").starts(1, batch_size=n),
        epochs[1] - epochs[1].min(),
        epochs[2] - epochs[2].min(),
    ]
    for a in range(len(seen)):
        for b in range(a):
            assert np.mean(seen[a] == seen[b]) < 0.05
    assert len({int(e.min()) for e in epochs[1:]} - {0}) == 2, "a phase of its own for each"


def test_the_order_is_even() -> None:
    """Each of the 24 orders of 4 windows is as likely: chi-squared with 23 degrees of freedom."""
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(4800):
        key = tuple(order(33, 8, seed=seed).starts(1, batch_size=4).tolist())
        counts[key] = counts.get(key, 0) + 1
    assert len(counts) == 24
    assert sum((n - 200) ** 2 / 200 for n in counts.values()) < 50


def test_later_epochs_reach_the_last_token() -> None:
    """66 tokens leave one beyond the only window of 65; a phase brings it in."""
    starts = order(66, 64).starts(1, batch_size=50)
    assert starts[0] == 0
    assert set(starts[1:]) == {0, 1}


@pytest.mark.parametrize("n_tokens", [1, 63, 64])
def test_a_split_shorter_than_a_window_is_refused(n_tokens: int) -> None:
    """TXT-02."""
    with pytest.raises(Refused, match=rf"{n_tokens} < 65 tokens"):
        order(n_tokens, 64)


def test_a_split_of_one_window_has_exactly_that() -> None:
    """TXT-02: 65 tokens."""
    windows = order(65, 64)
    assert windows.n_windows(0) == windows.n_windows(5) == 1
    assert windows.starts(3, batch_size=4).tolist() == [0, 0, 0, 0]


def test_epochs_are_counted_by_the_windows_seen() -> None:
    windows = order(10 * 8 + 1, 8)
    assert (windows.n_windows(0), windows.n_windows(1)) == (10, 9)
    assert windows.epoch(1, 5) == 0.5
    assert windows.epoch(2, 5) == 1.0
    assert windows.epoch(1, 19) == 2.0


def test_a_step_far_away_costs_no_memory_and_no_time() -> None:
    windows = order(10**12, 1024)
    starts = windows.starts(10**9, batch_size=512)
    assert len(set(starts.tolist())) == 512
    assert 0 <= starts.min() <= starts.max() <= 10**12 - 1025
