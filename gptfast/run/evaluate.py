"""The loss over a split: token-weighted, each target once, the same ones every time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from gptfast.errors import Refused
from gptfast.model import IGNORE

if TYPE_CHECKING:
    from gptfast.data.store import Store

NAT_IN_BITS = 1 / math.log(2)


@dataclass(frozen=True)
class Score:
    """The loss over some target tokens.

    Attributes:
        loss: mean in nats per token.
        tokens: target tokens scored.
        n_bytes: UTF-8 bytes of those tokens; None where the tokenizer is unknown.
    """

    loss: float
    tokens: int
    n_bytes: int | None

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss)

    @property
    def perplexity(self) -> float:
        """exp(loss); inf where that is too large for a float."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf

    @property
    def bits_per_byte(self) -> float | None:
        if not self.n_bytes:
            return None
        return self.loss * self.tokens * NAT_IN_BITS / self.n_bytes


def eval_batches(
    n_tokens: int, *, block_size: int, batch_size: int, max_targets: int | None = None
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Which tokens each batch reads: (starts, lengths), int64 (batch_size,) each.

    Windows follow each other without overlap, so that each of the first `max_targets` targets is
    scored once. The last window may be shorter; windows that only fill up the last batch, so
    that every batch has one shape, have length 0. `lengths` counts targets.
    """
    targets = min(n_tokens - 1, max_targets or n_tokens - 1)
    starts = np.arange(0, targets, block_size, dtype=np.int64)
    lengths = np.minimum(targets - starts, block_size)
    for first in range(0, len(starts), batch_size):
        fill = max(0, first + batch_size - len(starts))
        yield (
            np.pad(starts[first : first + batch_size], (0, fill)),
            np.pad(lengths[first : first + batch_size], (0, fill)),
        )


def read_batch(
    store: Store, split: str, starts: np.ndarray, lengths: np.ndarray, *, block_size: int
) -> tuple[Tensor, Tensor]:
    """Inputs and targets, (B, block_size) int64 each; targets beyond `lengths` are IGNORE."""
    tokens = np.zeros((len(starts), block_size + 1), dtype=np.int64)
    full = lengths == block_size
    if full.any():
        tokens[full] = store.read(split, starts[full], block_size + 1)
    for row in np.flatnonzero(~full & (lengths > 0)):
        length = int(lengths[row]) + 1
        tokens[row, :length] = store.read(split, starts[row : row + 1], length)[0]
    targets = np.where(np.arange(block_size) < lengths[:, None], tokens[:, 1:], IGNORE)
    return torch.from_numpy(tokens[:, :-1].copy()), torch.from_numpy(targets)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """No dropout and no gradients inside; the mode is as found afterwards."""
    training = model.training
    if training:  # else nothing: the walk over all modules would cost each new token 5 %
        model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        if training:
            model.train()


def evaluate(
    model: nn.Module,
    store: Store,
    split: str,
    *,
    block_size: int,
    batch_size: int,
    device: torch.device,
    forward_scope: Callable[[], AbstractContextManager[object]],
    max_targets: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Score | None:
    """Score the first `max_targets` target tokens of a split; None: all of them.

    Args:
        model: called as `model(inputs, targets) -> summed loss`.
        forward_scope: entered around each forward pass, as in training.
        should_stop: asked between batches; True ends the evaluation without a result.

    Returns:
        The score, or None where `should_stop` said so.

    Raises:
        Refused: there is no such split, or no target in it.
    """
    if store.n_tokens(split) < 2:
        raise Refused(
            f"{store.path}: split {split} has {store.n_tokens(split)} token, and 2 are the least "
            "with a target to score: prepare a longer text or a larger --val-fraction"
        )
    total = torch.zeros((), dtype=torch.float64)
    parts: list[Tensor] = []
    n_tokens = 0
    with eval_mode(model):
        for starts, lengths in eval_batches(
            store.n_tokens(split),
            block_size=block_size,
            batch_size=batch_size,
            max_targets=max_targets,
        ):
            if should_stop():
                return None
            inputs, targets = read_batch(store, split, starts, lengths, block_size=block_size)
            with forward_scope():
                parts.append(model(inputs.to(device), targets.to(device)))
            n_tokens += int(lengths.sum())
            # Summed in float64 on the host, in blocks: one wait in 64 batches, and no number
            # depends on how the windows were batched beyond float32 rounding inside a batch.
            if len(parts) == 64:
                total += torch.stack(parts).cpu().double().sum()
                parts.clear()
        if parts:
            total += torch.stack(parts).cpu().double().sum()
    n_bytes = store.bytes_of(split, n_tokens + 1)
    first = store.bytes_of(split, 1)
    return Score(
        total.item() / n_tokens,
        n_tokens,
        None if n_bytes is None or first is None else n_bytes - first,
    )
