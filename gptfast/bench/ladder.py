"""The ladder: the baseline, then each plugin of the profile added in turn, measured.

All rungs stand at the same time, each in its own process, and one of them computes at a time: they
are built and warmed up one after the other, then take turns, a round each, until all have done
theirs. A rung that cannot run here becomes a row with its reason, and the rungs above it are built
without its plugin.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime, timezone
from pathlib import Path
from statistics import median

import gptfast
from gptfast import registry
from gptfast.bench.attempt import Attempt, Start
from gptfast.bench.messages import MachineFacts
from gptfast.bench.process import WorkerProcess
from gptfast.bench.record import BaselineAgain, Bench, Load, Protocol
from gptfast.bench.rows import rows, warnings
from gptfast.config import Loaded
from gptfast.errors import GptfastError
from gptfast.plugin import Profile
from gptfast.registry import Enabled

Tell = Callable[[str], None]
"""Told in one line what is happening."""


def bench(
    loaded: Loaded, *, device: str = "auto", protocol: Protocol | None = None, tell: Tell
) -> Bench:
    """Measure the ladder of a profile.

    Raises:
        Refused: profile, data or device allow no run.
        GptfastError: not even the baseline runs.
    """
    protocol = protocol or Protocol()
    load_before = load_average()
    planned = registry.plan(loaded.profile, origins=loaded.origins)
    data = Path(loaded.profile.data.path).absolute()
    profile = loaded.profile.replace({"data.path": str(data)})
    with tempfile.TemporaryDirectory(prefix="gptfast-bench-") as scratch:
        with worker_process(Path(scratch), "machine") as worker:
            facts = worker.machine(profile, device=device, patience_s=protocol.patience_s)
        return measure(
            profile,
            ladder_order(planned, list(profile.plugins)),
            facts=facts,
            protocol=protocol,
            start=lambda name: worker_process(Path(scratch), name),
            tell=tell,
            load_before=load_before,
        )


@contextmanager
def worker_process(scratch: Path, name: str) -> Iterator[WorkerProcess]:
    """A worker with a folder of its own in `scratch`."""
    with WorkerProcess(Path(tempfile.mkdtemp(prefix=f"{name}-", dir=scratch))) as worker:
        yield worker


def load_average() -> float | None:
    """Of the last minute; None where the system has none."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def ladder_order(planned: Sequence[Enabled], names: Sequence[str]) -> list[Enabled]:
    """Plugins in the order in which the rungs add them: as the profile lists them, each put off
    until what it requires is on."""
    by_name = {enabled.name: enabled for enabled in planned}
    left = [by_name[name] for name in names]
    order: list[Enabled] = []
    while left:
        on = {enabled.name for enabled in order}
        following = next(e for e in left if on.issuperset(e.plugin.requires))
        left.remove(following)
        order.append(following)
    return order


def measure(
    profile: Profile,
    order: Sequence[Enabled],
    *,
    facts: MachineFacts,
    protocol: Protocol,
    start: Start,
    tell: Tell,
    load_before: float | None = None,
) -> Bench:
    """The ladder of `order`, each rung in a worker from `start`.

    Raises:
        GptfastError: not even the baseline runs.
    """
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    with ExitStack() as workers:

        def stand(added: Enabled | None, below: Sequence[Enabled]) -> Attempt:
            attempt = Attempt(added, [*below, added] if added else below, protocol)
            below_names = {enabled.name for enabled in below}
            missing = set(added.plugin.requires) - below_names if added else set()
            if missing:
                attempt.fail(f"requires {', '.join(sorted(missing))}, which cannot run here")
            else:
                worker = workers.enter_context(start(added.name if added else attempt.name))
                attempt.set_up(worker, profile, device=facts.device)
            tell(_told(attempt))
            return attempt

        baseline = stand(None, [])
        opening = baseline.laps(protocol.control_rounds)
        _check(baseline)
        attempts = [baseline]
        for added in order:
            below = [attempt for attempt in attempts if attempt.failure is None][-1]
            attempts.append(stand(added, below.on))
        standing = [attempt for attempt in attempts if attempt.failure is None]
        tell(_plan(standing, protocol))
        for number in range(protocol.rounds):
            # Up the ladder and down again, so that a machine that slows within a round favours
            # no rung.
            for attempt in standing if number % 2 == 0 else reversed(standing):
                if attempt.failure is None:
                    attempt.turn()
                    if attempt.failure is not None:
                        tell(_told(attempt))
            _check(baseline)
        closing = baseline.laps(protocol.control_rounds)

    again = None
    if len(closing) == len(opening):
        again = BaselineAgain(
            median(lap.step_ms for lap in opening), median(lap.step_ms for lap in closing)
        )
    load = Load(load_before, load_average())
    return Bench(
        gptfast=gptfast.__version__,
        started=started,
        machine=facts,
        load=load,
        profile=profile.model_dump(mode="json"),
        protocol=protocol,
        rungs=rows(attempts, facts=facts, protocol=protocol),
        baseline_again=again,
        warnings=warnings(attempts, again, load, cores=facts.cpu_count, protocol=protocol),
    )


def _check(baseline: Attempt) -> None:
    if baseline.failure is not None:
        raise GptfastError(
            f"not even the baseline runs here: {baseline.failure}: nothing was measured; "
            "try the profile with gptfast train first, or a smaller batch"
        )


def _told(attempt: Attempt) -> str:
    if attempt.failure is not None:
        return f"{attempt.name} cannot run here: {attempt.failure}"
    warmup = attempt.warmup
    return (
        f"{attempt.name}: {attempt.step_s * 1e3:.1f} ms/step after a warm-up of {warmup.steps} "
        f"steps, {warmup.compile_s:.1f} s in it for compiling and first calls"
    )


def _plan(standing: Sequence[Attempt], protocol: Protocol) -> str:
    steps = protocol.rounds * (protocol.lead_in + protocol.steps)
    seconds = steps * sum(attempt.step_s for attempt in standing)
    return (
        f"measuring {len(standing)} rungs by turns, {protocol.rounds} rounds of {protocol.steps} "
        f"steps each: about {seconds:.0f} s"
    )
