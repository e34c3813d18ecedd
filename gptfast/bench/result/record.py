"""The result of a bench: plain records that are its JSON, field for field."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from gptfast.bench.measure.conditions import Conditions
from gptfast.bench.measure.messages import MachineFacts, Operator, Phases
from gptfast.errors import Refused

FORMAT = 2
"""Version of the JSON document; a reader refuses one that it does not know."""

LADDER, LEAVE_ONE_OUT = "ladder", "leave-one-out"


@dataclass(frozen=True)
class Protocol:
    """How it was measured."""

    steps: int = 10
    """Steps of a round, on the clock."""
    rounds: int = 10
    """Rounds of each rung; all that stand do one before any does the next."""
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
    max_peak_spread: float = 0.1
    """Of the matmul peaks seen, 1 - lowest / highest, above which there is a warning."""
    max_spread: float = 0.2
    """Of the baseline's rounds, (slowest - fastest) / median, above which there is a warning."""
    max_foreign: float = 0.1
    """Share of all cores that other programs may take before there is a warning."""
    noise_factor: float = 3.0
    """Where a device adds in any order, `exact` allows so many times what two runs of the baseline
    differ by. Chosen: two runs are one sample of a difference that grows from step to step."""
    control: bool = False
    """Whether the baseline is measured twice. It always is where the device adds in any order."""
    breakdown_rounds: int = 5
    """Rounds by turns in which the time of a step is divided up, where that is asked."""
    profiled_steps: int = 3
    """Steps under torch's profiler."""
    patience_s: float = 900.0
    """Longest wait for building a rung or for one step of its warm-up, which may compile."""


@dataclass(frozen=True)
class Ratio:
    """How many times as fast as another rung, and the interval of that."""

    times: float
    """Median over the pairs of rounds; where there are none, ratio of the medians."""
    low: float
    high: float
    significant: bool
    """False: there is no significant difference, since the interval holds 1 or the rounds were too
    few for one."""
    paired: bool = True
    """Whether rounds were compared that were neighbours in time."""


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
    """A plugin's claim, tested against the rung that differs by it."""

    claim: str
    """ "exact", "rounding" or "recipe"."""
    tolerance: float
    """The plugin's own; 0: equal bits."""
    allowed: float | None
    """Largest drift from the other rung that keeps the claim; None: not judged by drift."""
    verdict: str
    """ "kept", "broken", or "recipe": judged by the loss at equal time, not here."""


@dataclass(frozen=True)
class Breakdown:
    """Where the time of a step goes."""

    phases: Phases
    """Medians over rounds by turns, without a profiler."""
    operators: list[Operator]
    """The largest, of a few steps under torch's profiler, which slows them."""
    trace: str
    """File in `traces` with these steps, for Perfetto."""


@dataclass(frozen=True)
class Rung:
    """One row. In that of a rung that cannot run here, all but the first six fields are None."""

    name: str
    plugin: str | None
    """The plugin that it adds or leaves out; None: the baseline or the whole profile."""
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
    """The rung that it is compared with: in a ladder the one before it that ran, where one is left
    out the whole profile."""
    step_ms: float | None = None
    """Median over the rounds."""
    round_step_ms: list[float] | None = None
    """Mean step of each round."""
    round_numbers: list[int] | None = None
    """When each round was, counted over the whole bench: equal numbers are neighbours in time."""
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
    """Steps after which the longer warm-up that the plugin brings has paid. None: not faster."""
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
    breakdown: Breakdown | None = None
    """Where the time of a step goes; None: not asked."""


@dataclass(frozen=True)
class Control:
    """The baseline measured twice, each time in a process of its own: what nothing brings."""

    over_baseline: Ratio
    drift: Drift
    """Of its losses from those of the first: how far a device that adds in any order is off."""


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

    kind: str
    """ "ladder" or "leave-one-out"."""
    gptfast: str
    started: str
    """UTC, ISO 8601."""
    machine: MachineFacts
    before: Conditions
    after: Conditions
    """At the end of the last round."""
    foreign_cpus: float | None
    """Median number of cores that others kept busy in the baseline's rounds."""
    profile: dict[str, Any]
    protocol: Protocol
    rungs: list[Rung]
    baseline_again: BaselineAgain | None
    """None: it could not be measured again."""
    control: Control | None
    """None: not asked, or it could not be measured."""
    warnings: list[str]
    peaks_flops: list[float] = field(default_factory=list)
    """Each look at the matmul peak, in order; `machine.peak_flops` is the best of them."""
    format: int = FORMAT

    def to_dict(self) -> dict[str, Any]:
        """As JSON knows it, the format first."""
        return {"format": self.format, **asdict(self)}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n"


def read(path: Path) -> Bench:
    """A bench that was kept: its `bench.json`, or the folder of it.

    Raises:
        Refused: it cannot be read, is no such file, or of another format.
    """
    path = path / "bench.json" if path.is_dir() else path
    try:
        document = json.loads(path.read_bytes(), parse_constant=_no_number)
    except OSError as error:
        raise Refused(f"{path}: cannot be read ({error.strerror}): name a bench.json") from error
    except ValueError as error:
        raise Refused(f"{path}: no JSON ({error}): name a bench.json") from error
    found = document.get("format") if isinstance(document, dict) else None
    if found != FORMAT:
        raise Refused(
            f"{path}: format {found}, and this gptfast reads {FORMAT}: measure again, or use the "
            "gptfast that wrote it"
        )
    try:
        bench = TypeAdapter(Bench).validate_python(document)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise Refused(f"{path}: {where}: {first['msg']}: measure again") from error
    if (fault := _fault(bench)) is not None:
        raise Refused(f"{path}: {fault}: measure again")
    return bench


def _no_number(constant: str) -> float:
    raise ValueError(f"{constant} is no number")


def _fault(bench: Bench) -> str | None:
    """What no bench writes, and a hand or a damaged disk may have. None: nothing."""
    if not bench.rungs or not bench.rungs[0].ran:
        return "its baseline did not run"
    for rung in bench.rungs:
        times = [rung.step_ms or 0.0, *(rung.round_step_ms or [0.0])]
        if rung.ran and min(times) <= 0:
            return f"{rung.name} ran and has no times above 0"
    again = bench.baseline_again
    if again is not None and min(again.first_step_ms, again.last_step_ms) <= 0:
        return "baseline_again has no times above 0"
    for key in ("model", "data", "train", "plugins"):
        if not isinstance(bench.profile.get(key), dict):
            return f"its profile has no {key}"
    return None if "name" in bench.profile else "its profile has no name"
