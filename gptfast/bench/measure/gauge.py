"""How fast a device multiplies at best, looked at again and again."""

from __future__ import annotations

from collections.abc import Callable

from gptfast.bench.measure.messages import RungFailed

Look = Callable[[], float]
"""Measures the matmul peak once, in FLOP/s.

Raises:
    RungFailed: it could not.
"""


class Gauge:
    """All that was seen of a device's matmul peak. The best is its own: a look while others compute
    sees less, and shares of that would come out too large.

    Args:
        first: what the first look saw, FLOP/s.
        between_rounds: whether a look takes nothing from the rungs that stand. It does on a GPU,
            which keeps memory for each process; there the last look is when all have gone.
        tell: told in one line that it cannot look any more.
    """

    def __init__(
        self, first: float, look: Look, *, between_rounds: bool, tell: Callable[[str], None]
    ) -> None:
        self.seen = [first]
        """FLOP/s of each look, in order."""
        self._look: Look | None = look
        self._between_rounds = between_rounds
        self._tell = tell

    @property
    def best(self) -> float:
        return max(self.seen)

    def between(self) -> None:
        """Look between two rounds."""
        if self._between_rounds:
            self._again()

    def after(self) -> None:
        """Look when no rung stands any more."""
        if not self._between_rounds:
            self._again()

    def _again(self) -> None:
        if self._look is None:
            return
        try:
            self.seen.append(self._look())
        except RungFailed as failure:
            self._look = None
            self._tell(f"the matmul peak cannot be measured again: {failure}")
