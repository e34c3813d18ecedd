"""The result of a bench: plain records that are its JSON, field for field."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from gptfast.bench.messages import MachineFacts

FORMAT = 1
"""Version of the JSON document; a reader refuses one that it does not know."""


@dataclass(frozen=True)
class Protocol:
    """How it was measured."""

    steps: int = 10
    """Steps of a round, on the clock."""
    rounds: int = 10
    """Rounds of each rung; all rungs do one before any does the next."""
    lead_in: int = 2
    """Steps before each round that are not on the clock: the rung before has had the caches."""
    warmup_window: int = 3
    """A warm-up ends when twice as many steps compiled nothing, and the medians of their two
    halves differ by at most `warmup_steady`."""
    warmup_steady: float = 0.1
    warmup_cap: int = 60
    """Steps after which a warm-up ends although it is not steady."""
    control_rounds: int = 3
    """Rounds of the baseline alone before any other rung is built, and again at the end."""
    resamples: int = 10_000
    """Of the bootstrap."""
    bootstrap_seed: int = 0
    confidence: float = 0.95
    max_baseline_drift: float = 0.05
    """Relative change of the baseline from start to end above which there is a warning."""
    max_spread: float = 0.2
    """Of the baseline's rounds, (slowest - fastest) / median, above which there is a warning."""
    patience_s: float = 900.0
    """Longest wait for building a rung or for one step of its warm-up, which may compile."""


@dataclass(frozen=True)
class Ratio:
    """How many times as fast as another rung: median over the pairs of rounds, and its interval."""

    times: float
    low: float
    high: float
    significant: bool
    """False: the interval holds 1, there is no significant difference."""


@dataclass(frozen=True)
class Warmup:
    """What came before the first round."""

    steps: int
    steady: bool
    """False: it ended at the cap."""
    build_s: float
    """Building model, optimizer and source."""
    first_step_s: float
    compile_s: float
    """What its steps took beyond the time of as many steady ones: compiling, first calls."""


@dataclass(frozen=True)
class Drift:
    """Relative difference of the loss, step by step on the same windows."""

    largest: float
    last: float
    """At the last step that both rungs did."""
    steps: int
    """How many steps that was."""


@dataclass(frozen=True)
class Verdict:
    """A plugin's claim, tested against the rung before."""

    claim: str
    """ "exact", "rounding" or "recipe"."""
    tolerance: float
    """The plugin's own; 0: equal bits."""
    allowed: float | None
    """Largest drift from the rung before that keeps the claim; None: not judged by drift."""
    verdict: str
    """ "kept", "broken", or "recipe": judged by the loss at equal time, not here."""


@dataclass(frozen=True)
class Rung:
    """One row. In that of a rung that cannot run here, all but the first six fields are None."""

    name: str
    plugin: str | None
    """The plugin that it adds; None: the baseline."""
    package: str | None
    version: str | None
    ran: bool
    reason: str | None
    """Why it cannot run here."""
    plugins: list[str] | None = None
    """Those on, in the order in which they run."""
    detail: str | None = None
    """How the plugin runs here, in its words."""
    before: str | None = None
    """The rung that it is compared with: the one before it that ran."""
    step_ms: float | None = None
    """Median over the rounds."""
    round_step_ms: list[float] | None = None
    """Mean step of each round."""
    over_baseline: Ratio | None = None
    over_before: Ratio | None = None
    tokens_per_s: float | None = None
    """Of the whole step, all micro-batches."""
    peak_share: float | None = None
    """Model flops per second over the measured matmul peak."""
    data_wait_ms: float | None = None
    memory_bytes: int | None = None
    """Peak of the device's allocator after the warm-up, or of the process on a CPU."""
    n_micro: int | None = None
    warmup: Warmup | None = None
    pays_back_steps: int | None = None
    """Steps after which the longer warm-up has paid against the rung before. None: not faster."""
    loss: float | None = None
    """Of the last step that every rung did."""
    losses: list[float] | None = None
    """Of each step from the first."""
    drift: Drift | None = None
    """From the baseline."""
    drift_allowed: float | None = None
    """Sum of the tolerances of the plugins on; None: a recipe is among them."""
    drift_before: Drift | None = None
    """From the rung before."""
    verdict: Verdict | None = None
    notes: list[str] | None = None


@dataclass(frozen=True)
class Load:
    """Load averages over one minute; None where the system has none."""

    before: float | None
    after: float | None


@dataclass(frozen=True)
class BaselineAgain:
    """The baseline alone at the start and again at the end."""

    first_step_ms: float
    last_step_ms: float

    @property
    def drift(self) -> float:
        return self.last_step_ms / self.first_step_ms - 1.0


@dataclass(frozen=True)
class Bench:
    """The whole result."""

    gptfast: str
    started: str
    """UTC, ISO 8601."""
    machine: MachineFacts
    load: Load
    profile: dict[str, Any]
    protocol: Protocol
    rungs: list[Rung]
    baseline_again: BaselineAgain | None
    """None: it could not be measured again."""
    warnings: list[str]
    format: int = FORMAT

    def to_dict(self) -> dict[str, Any]:
        """As JSON knows it, the format first."""
        return {"format": self.format, **asdict(self)}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n"
