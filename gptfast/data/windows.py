"""Which windows a step sees: a pure function of (seed, split, step, rank, world).

So loaders differ in speed alone, a resumed run needs no loader state, and one process and eight
see the same step. An epoch visits each of its windows once, in an order that a keyed permutation
gives one by one: nothing as long as the corpus is ever in memory, and any step costs the same.

The arithmetic is written out on 64-bit integers: no release of NumPy can change an order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from gptfast.errors import Refused

UInt64s = NDArray[np.uint64]

# Odd and without pattern in their bits, so that sums of them never repeat.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_PHASE = np.uint64(0xD1B54A32D192ED03)
_ROUNDS = 8


@dataclass(frozen=True)
class WindowOrder:
    """The order in which training visits the windows of a split.

    Epoch 0 has every window that fits from token 0 on. A later epoch has one window fewer (never
    none), which leaves room to shift all of them by a phase of its own, so that the borders move
    and the last tokens are reached too.

    Raises:
        Refused: the split is shorter than one window.
    """

    seed: int
    """0 <= seed < 2**64."""
    split: str
    n_tokens: int
    block_size: int

    def __post_init__(self) -> None:
        if self.n_tokens < self.block_size + 1:
            raise Refused(
                f"split {self.split}: {self.n_tokens} < {self.block_size + 1} tokens, which one "
                f"window of block_size = {self.block_size} needs: prepare more text or lower "
                "model.block_size"
            )

    def n_windows(self, epoch: int) -> int:
        """Windows that `epoch` visits, each once."""
        first = (self.n_tokens - 1) // self.block_size
        return first if epoch == 0 else max(first - 1, 1)

    def epoch(self, step: int, batch_size: int) -> float:
        """Epochs seen once `step` (from 1) is done."""
        over = step * batch_size - self.n_windows(0)
        return 1 + over / self.n_windows(0 if over < 0 else 1)

    def starts(
        self, step: int, *, batch_size: int, rank: int = 0, world: int = 1
    ) -> NDArray[np.int64]:
        """First token of each window of one rank in one step.

        Args:
            step: from 1.
            batch_size: windows of the step over all ranks; a multiple of `world`.

        Returns:
            (batch_size // world,) int64: every `world`-th window of the step, from `rank` on.
        """
        assert step >= 1, "steps count from 1"
        assert batch_size % world == 0, "every rank takes equally many windows"
        first, later = self.n_windows(0), self.n_windows(1)
        visit = np.arange(rank, batch_size, world, dtype=np.int64) + (step - 1) * batch_size
        epoch = np.where(visit < first, 0, 1 + (visit - first) // later)
        place = np.where(visit < first, visit, (visit - first) % later)

        keys = _mix(self._key + epoch.astype(np.uint64) * _GOLDEN)
        # Bits for the first epoch in every one: an epoch's order must not depend on what else is
        # in the batch.
        half_bits = max(1, ((first - 1).bit_length() + 1) // 2)
        windows = _permute(place, np.where(epoch == 0, first, later), keys, half_bits=half_bits)
        slack = self.n_tokens - 1 - later * self.block_size
        phase = (_mix(keys ^ _PHASE) % np.uint64(slack + 1)).astype(np.int64)
        return windows * self.block_size + np.where(epoch == 0, 0, phase)

    @cached_property
    def _key(self) -> UInt64s:
        key = _mix(np.array([self.seed], dtype=np.uint64) + _GOLDEN)
        for byte in self.split.encode():
            key = _mix((key ^ np.uint64(byte)) + _GOLDEN)
        return key


def _mix(x: UInt64s) -> UInt64s:
    """SplitMix64's finaliser: 64 bits in, 64 well-mixed bits out, one to one.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: UInt64s = x ^ (x >> np.uint64(31))
    return mixed


def _permute(
    place: NDArray[np.int64], n: NDArray[np.int64], keys: UInt64s, *, half_bits: int
) -> NDArray[np.int64]:
    """Where a keyed permutation of range(n) sends each place; n and key for each place.

    A Feistel network permutes range(4**half_bits), which is n or more; a value that falls outside
    of range(n) goes through it again until one falls inside (cycle walking), which keeps it a
    permutation.

    Source: Black and Rogaway, "Ciphers with arbitrary finite domains", 2002.
    """
    half = np.uint64(half_bits)
    value = _feistel(place.astype(np.uint64), half, keys)
    limit = n.astype(np.uint64)
    while (outside := np.flatnonzero(value >= limit)).size:
        value[outside] = _feistel(value[outside], half, keys[outside])
    return value.astype(np.int64)


def _feistel(value: UInt64s, half: np.uint64, keys: UInt64s) -> UInt64s:
    """One pass of a Feistel network over values of 2 * half bits."""
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = value >> half, value & mask
    for _ in range(_ROUNDS):
        keys = keys + _GOLDEN
        left, right = right, left ^ (_mix(right + keys) & mask)
    joined: UInt64s = (left << half) | right
    return joined
