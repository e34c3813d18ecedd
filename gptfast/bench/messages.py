"""What a worker answers, as plain records that pass through JSON unchanged."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class MachineFacts:
    """Where the rungs run."""

    device: str
    """ "cuda:0", "mps" or "cpu"."""
    name: str
    """As its driver calls it."""
    platform: str
    cpu_count: int
    threads: int
    """Of torch within one operator."""
    interop_threads: int
    python: str
    torch: str
    numpy: str
    cuda: str | None
    """The CUDA release that torch was built for."""
    peak_flops: float
    """Measured matmul peak, per second."""
    peak_dtype: str
    """In which it was measured."""


@dataclass(frozen=True)
class Built:
    """A rung's trainer stands, at step 0."""

    seconds: float
    """Building it took; importing torch and the plugins' probes are not in it."""
    plugins: list[str]
    """Those on, in the order in which they run."""
    detail: str
    """How the rung's own plugin runs here, in its words."""
    flops_per_token: int


@dataclass(frozen=True)
class Lap:
    """Steps done in a row.

    Attributes:
        steps: on the clock.
        seconds: of these, the device synchronised at both ends.
        tokens: target tokens of these.
        losses: of every step, also of those before the clock.
        compiled: graphs compiled, also before the clock.
        data_wait_ms: mean wait for the windows of a step on the clock.
        memory_bytes: peak of the device's allocator in these steps, or of the process so far.
        n_micro: micro-batches in a step.
        notes: what plugins had to say since the last lap.
    """

    steps: int
    seconds: float
    tokens: int
    losses: list[float]
    compiled: int
    data_wait_ms: float
    memory_bytes: int | None
    n_micro: int
    notes: list[str]

    @property
    def step_ms(self) -> float:
        return self.seconds / self.steps * 1e3


class RungFailed(Exception):
    """A rung that cannot run here, with the reason in one line."""


def parse(kind: type[T], answer: dict[str, Any]) -> T:
    """The record of an answer."""
    return kind(**{field.name: answer[field.name] for field in fields(kind)})  # type: ignore[arg-type]  # T is a dataclass
