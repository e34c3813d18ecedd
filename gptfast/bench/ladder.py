"""Which rungs there are: the ladder, and the profile with one plugin left out at a time.

A rung that cannot run here becomes a row with its reason, and the rungs above it are built without
its plugin.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path

import gptfast
from gptfast.bench.measure.attempt import BASELINE, Attempt, Start
from gptfast.bench.measure.conditions import GPU_SAMPLE_S, Conditions, conditions
from gptfast.bench.measure.gauge import Gauge
from gptfast.bench.measure.messages import MachineFacts
from gptfast.bench.measure.process import WorkerProcess
from gptfast.bench.measure.sitting import Sitting, Tell, told
from gptfast.bench.overhead import Overhead, measure_overhead
from gptfast.bench.result.published import published
from gptfast.bench.result.record import LADDER, LEAVE_ONE_OUT, BaselineAgain, Bench, Protocol
from gptfast.bench.result.rows import control_of, foreign_cpus, rows, warnings
from gptfast.config import Loaded
from gptfast.errors import GptfastError
from gptfast.host import registry
from gptfast.host.registry import Enabled
from gptfast.plugin import Profile

FULL = "full"


@dataclass(frozen=True)
class Bound:
    """What one bench is bound to: a profile whose data is there, a machine, and processes on it."""

    profile: Profile
    facts: MachineFacts
    protocol: Protocol
    start: Start
    tell: Tell
    look: Callable[[], Conditions]
    """What state the machine is in now."""
    gauge: Gauge
    unsupported: Mapping[str, str] = field(default_factory=dict)
    """Plugins that do not run here, with the reasons, where that was asked."""
    trace: Callable[[str], Path] | None = None
    """Where the trace of a rung of this name goes; None: no breakdown."""


def bench(
    loaded: Loaded,
    *,
    kind: str = LADDER,
    device: str = "auto",
    protocol: Protocol | None = None,
    traces: Path | None = None,
    tell: Tell,
) -> Bench:
    """Measure the ladder of a profile, or the profile with one plugin left out at a time.

    Args:
        kind: LADDER or LEAVE_ONE_OUT.
        traces: an existing folder; where the time goes is found out too, with a trace of each rung
            in it.

    Raises:
        Refused: profile, data or device allow no run.
        GptfastError: not even the baseline runs.
    """
    planned = registry.plan(loaded.profile, origins=loaded.origins)
    order = ladder_order(planned, [*published().order, *loaded.profile.plugins])
    without = kind == LEAVE_ONE_OUT
    with bound(
        loaded, device=device, protocol=protocol, tell=tell, unsupported=without, looks_again=True
    ) as there:
        if traces is not None:
            there = replace(there, trace=lambda name: traces / f"{_slug(name)}.json.gz")
        return measure_without(there, order) if without else measure(there, order)


def overhead(
    loaded: Loaded, *, device: str = "auto", protocol: Protocol | None = None, tell: Tell
) -> Overhead:
    """Measure what the trainer costs without a plugin, against the bare loop.

    Raises:
        Refused: profile, data or device allow no run.
        GptfastError: one of the two does not run.
    """
    bare = replace(loaded, profile=loaded.profile.replace({"plugins": {}}))
    with bound(bare, device=device, protocol=protocol, tell=tell) as there:
        return measure_overhead(
            there.profile,
            facts=there.facts,
            protocol=there.protocol,
            start=there.start,
            tell=tell,
            look=there.look,
        )


@contextmanager
def bound(
    loaded: Loaded,
    *,
    device: str,
    protocol: Protocol | None = None,
    unsupported: bool = False,
    looks_again: bool = False,
    tell: Tell,
) -> Iterator[Bound]:
    """What a bench is bound to.

    Args:
        unsupported: whether to ask which plugins do not run here.
        looks_again: whether the gauge is to look between rounds too, where it may.

    Raises:
        Refused: data or device allow no run.
    """
    protocol = protocol or Protocol()
    data = Path(loaded.profile.data.path).absolute()
    profile = loaded.profile.replace({"data.path": str(data)})
    patience_s = protocol.patience_s
    with tempfile.TemporaryDirectory(prefix="gptfast-bench-") as scratch, ExitStack() as standing:
        worker = standing.enter_context(worker_process(Path(scratch), "machine"))
        facts = worker.machine(profile, device=device, patience_s=patience_s)
        skipped = (
            worker.supports(profile, device=device, patience_s=patience_s) if unsupported else {}
        )
        stays = looks_again and facts.device == "cpu"
        if not stays:
            standing.close()  # before the first rung begins: a GPU keeps memory for each process
        if facts.uuid is not None:
            time.sleep(GPU_SAMPLE_S)  # or measuring the peak looks like somebody else's work

        def look() -> float:
            if stays:
                return worker.peak(device=facts.device, patience_s=patience_s)
            with worker_process(Path(scratch), "peak") as another:
                return another.peak(device=facts.device, patience_s=patience_s)

        yield Bound(
            profile=profile,
            facts=facts,
            protocol=protocol,
            start=lambda name: worker_process(Path(scratch), name),
            tell=tell,
            look=lambda: conditions(facts.uuid),
            gauge=Gauge(facts.peak_flops, look, between_rounds=stays, tell=tell),
            unsupported=skipped,
        )


@contextmanager
def worker_process(scratch: Path, name: str) -> Iterator[WorkerProcess]:
    """A worker with a folder of its own in `scratch`."""
    with WorkerProcess(Path(tempfile.mkdtemp(prefix=f"{_slug(name)}-", dir=scratch))) as worker:
        yield worker


def _slug(name: str) -> str:
    """A rung's name as that of a file."""
    name = name.replace("+ ", "with-").replace("- ", "without-")
    return re.sub(r"[^\w.-]+", "-", name).strip("-")


def ladder_order(planned: Sequence[Enabled], names: Sequence[str]) -> list[Enabled]:
    """Plugins in the order in which the rungs add them: as `names` first has them, each put off
    until what it requires is on.

    Args:
        names: all of the plugins, perhaps others too.
    """
    by_name = {enabled.name: enabled for enabled in planned}
    left = [by_name[name] for name in dict.fromkeys(names) if name in by_name]
    order: list[Enabled] = []
    while left:
        on = {enabled.name for enabled in order}
        following = next(e for e in left if on.issuperset(e.plugin.requires))
        left.remove(following)
        order.append(following)
    return order


def measure(there: Bound, order: Sequence[Enabled]) -> Bench:
    """The ladder of `order`: the baseline, then each plugin added in turn.

    Raises:
        GptfastError: not even the baseline runs.
    """

    def climb(sitting: Sitting, baseline: Attempt) -> list[Attempt]:
        attempts: list[Attempt] = []
        below = baseline
        for added in order:
            attempt = Attempt(
                f"+ {added.name}", [*below.on, added], there.protocol, judged=added, other=below
            )
            missing = set(added.plugin.requires) - {enabled.name for enabled in below.on}
            if missing:
                attempt.fail(f"requires {', '.join(sorted(missing))}, which cannot run here")
                there.tell(told(attempt))
            else:
                sitting.seat(attempt, beside=[baseline, below])
            attempts.append(attempt)
            below = below if attempt.failure else attempt
        return attempts

    return _measured(there, LADDER, climb)


def measure_without(there: Bound, order: Sequence[Enabled]) -> Bench:
    """The baseline, the whole profile, and the profile with one plugin left out at a time.

    Raises:
        GptfastError: not even the baseline runs, or not the whole profile.
    """
    able = [enabled for enabled in order if enabled.name not in there.unsupported]

    def leave_out(sitting: Sitting, baseline: Attempt) -> list[Attempt]:
        full = Attempt(FULL, able, there.protocol, other=baseline)
        sitting.seat(full, beside=[baseline])
        if full.failure is not None:
            raise GptfastError(
                f"the whole profile does not run here: {full.failure}: nothing can be left out of "
                "it; see gptfast bench without --leave-one-out for which plugin it is"
            )
        attempts = [full]
        for out in order:
            rest = without(out, able)
            attempt = Attempt(f"- {out.name}", rest, there.protocol, judged=out, other=full)
            if out in able:
                sitting.seat(attempt, beside=[baseline, full])
            else:
                attempt.fail(there.unsupported[out.name])
            attempts.append(attempt)
        return attempts

    return _measured(there, LEAVE_ONE_OUT, leave_out)


def without(out: Enabled, plugins: Sequence[Enabled]) -> list[Enabled]:
    """The plugins that stay on without one: not those that require it either."""
    gone = {out.name}
    while more := {e.name for e in plugins if gone & set(e.plugin.requires)} - gone:
        gone |= more
    return [enabled for enabled in plugins if enabled.name not in gone]


def _measured(
    there: Bound, kind: str, seat_all: Callable[[Sitting, Attempt], list[Attempt]]
) -> Bench:
    """The protocol around any set of rungs: the baseline is first and last, and between them
    `seat_all` seats the others and gives them in the order of the rows."""
    facts, protocol, gauge = there.facts, there.protocol, there.gauge
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    before = there.look()
    baseline = Attempt(BASELINE, [], protocol)
    again: Attempt | None = None
    with ExitStack() as workers:
        sitting = Sitting(
            there.profile,
            device=facts.device,
            protocol=protocol,
            workers=workers,
            start=there.start,
            tell=there.tell,
            divides=there.trace is not None,
            farewell=lambda attempt: None if attempt is again else _profile(attempt, there),
            between=gauge.between,
        )
        sitting.seat(baseline)
        opening = sitting.alone(baseline)
        if protocol.control or not facts.device.startswith("cpu"):
            again = Attempt(f"{BASELINE} again", [], protocol, other=baseline)
            sitting.seat(again, beside=[baseline])
        attempts = [baseline, *seat_all(sitting, baseline)]
        sitting.finish()
        after = there.look()  # at once, before clocks and temperature fall
        closing = sitting.alone(baseline)
        sitting.dismiss()
    gauge.after()
    facts = replace(facts, peak_flops=gauge.best)
    control = control_of(again, baseline, protocol)
    result = Bench(
        kind=kind,
        gptfast=gptfast.__version__,
        started=started,
        machine=facts,
        before=before,
        after=after,
        foreign_cpus=foreign_cpus(baseline),
        profile=there.profile.model_dump(mode="json"),
        protocol=protocol,
        rungs=rows(attempts, facts=facts, protocol=protocol, control=control),
        baseline_again=BaselineAgain(opening, closing) if opening and closing else None,
        control=control,
        warnings=[],
        peaks_flops=gauge.seen,
    )
    return replace(result, warnings=warnings(result, attempts))


def _profile(attempt: Attempt, there: Bound) -> None:
    if there.trace is not None:
        there.tell(f"{attempt.name}: its largest operators")
        attempt.profile(there.trace(attempt.name))
