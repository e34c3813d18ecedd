"""The result of a race to a loss: plain records that are its JSON, field for field."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from gptfast.bench.measure.conditions import Conditions
from gptfast.bench.measure.messages import MachineFacts

FORMAT = 1


@dataclass(frozen=True)
class Point:
    """A run at an evaluation."""

    step: int
    tokens: int
    """Target tokens trained on."""
    train_s: float
    """Training alone: no compiling, no evaluation."""
    loss: float
    """On `val`, in nats."""


@dataclass(frozen=True)
class Run:
    """One contender from one seed."""

    seed: int
    startup_s: float
    """Building, compiling and first calls, beyond as many steady steps."""
    points: list[Point]
    reached: Point | None
    """Where the goal was reached first; None: never."""
    foreign_cpus: float | None
    """Median number of cores that others kept busy meanwhile; None: the system does not say."""
    late_compiles: int
    """Graphs compiled after the warm-up: their time is on the clock."""

    @property
    def lowest(self) -> float:
        return min(point.loss for point in self.points)


@dataclass(frozen=True)
class Spread:
    """A figure over the seeds: median, lowest, highest, and of how many."""

    median: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Row:
    """A contender over all seeds."""

    name: str
    plugins: list[str]
    ran: bool
    reason: str | None
    """Why it could not run."""
    most_steps: int
    runs: list[Run] = field(default_factory=list)
    steps: Spread | None = None
    """Until the goal, of the seeds that reached it. None: none did."""
    tokens: Spread | None = None
    train_s: Spread | None = None
    times_faster: Spread | None = None
    """The first contender's training time over its own, of the seeds in which both got there."""
    times_fewer_tokens: Spread | None = None


@dataclass(frozen=True)
class ToLoss:
    """The whole result."""

    gptfast: str
    started: str
    """UTC, ISO 8601."""
    machine: MachineFacts
    before: Conditions
    after: Conditions
    profile: dict[str, Any]
    goal: float
    """Validation loss, in nats."""
    seeds: list[int]
    every: int
    """Steps between two evaluations."""
    rows: list[Row]
    warnings: list[str]
    format: int = FORMAT

    def to_dict(self) -> dict[str, Any]:
        """As JSON knows it, the format first."""
        return {"format": self.format, **asdict(self)}


def spread(values: Sequence[float]) -> Spread | None:
    """None: of nothing."""
    if not values:
        return None
    return Spread(median(values), min(values), max(values), len(values))
