"""From what the rungs did to the rows of the result and its warnings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median

from gptfast.bench.measure.attempt import Attempt
from gptfast.bench.measure.conditions import Conditions
from gptfast.bench.measure.messages import MachineFacts
from gptfast.bench.result.record import BaselineAgain, Bench, Control, Protocol, Rung
from gptfast.bench.result.statistics import (
    FEWEST_ROUNDS,
    drift,
    drift_allowed,
    judge,
    order_slack,
    pays_back_steps,
    ratio,
    spread,
)

BUSY_GPU_PERCENT = 10.0
"""A desktop's own pictures take a few."""


def control_of(again: Attempt | None, baseline: Attempt, protocol: Protocol) -> Control | None:
    """What a second run of the baseline says; None: there was none, or it did not run."""
    if again is None or not again.ran:
        return None
    return Control(
        over_baseline=ratio(baseline.round_step_ms, again.round_step_ms, protocol),
        drift=drift(again.losses, baseline.losses),
    )


def rows(
    attempts: Sequence[Attempt],
    *,
    facts: MachineFacts,
    protocol: Protocol,
    control: Control | None = None,
) -> list[Rung]:
    """A row for each rung, also for those that cannot run here. The baseline is the first."""
    kind = facts.device.partition(":")[0]
    slack = order_slack(kind, control.drift if control else None, protocol)
    common = min(len(attempt.losses) for attempt in attempts if attempt.ran)
    table = []
    for attempt in attempts:
        judged = attempt.judged
        row = Rung(
            name=attempt.name,
            plugin=judged.name if judged else None,
            package=judged.package if judged else None,
            version=judged.version if judged else None,
            ran=attempt.ran,
            reason=None if attempt.ran else attempt.failure,
        )
        if attempt.ran:
            row = _measured(row, attempt, common=common, peak_flops=facts.peak_flops)
            if attempt.other is not None:
                row = _compared(row, attempt, _ran(attempt.other), attempts[0], protocol)
                row = _judged(row, attempt, _ran(attempt.other), slack=slack)
        table.append(row)
    return table


def _ran(attempt: Attempt) -> Attempt:
    """The nearest below that did its rounds."""
    while not attempt.ran:
        assert attempt.other is not None, "without the baseline nothing is measured"
        attempt = attempt.other
    return attempt


def _measured(row: Rung, attempt: Attempt, *, common: int, peak_flops: float) -> Rung:
    """With what the rung says by itself."""
    laps = list(attempt.rounds.values())
    tokens_per_s = median(lap.tokens / lap.seconds for lap in laps)
    memory = [lap.memory_bytes for lap in laps if lap.memory_bytes is not None]
    return replace(
        row,
        plugins=attempt.built.plugins,
        detail=attempt.built.detail,
        step_ms=attempt.step_ms,
        round_step_ms=list(attempt.round_step_ms.values()),
        round_numbers=list(attempt.rounds),
        tokens_per_s=tokens_per_s,
        peak_share=tokens_per_s * attempt.built.flops_per_token / peak_flops,
        data_wait_ms=median(lap.data_wait_ms for lap in laps),
        memory_bytes=max(memory, default=None),
        n_micro=laps[-1].n_micro,
        warmup=attempt.warmup,
        loss=attempt.losses[common - 1],
        losses=attempt.losses,
        notes=attempt.notes,
        breakdown=attempt.breakdown,
    )


def _compared(
    row: Rung, attempt: Attempt, other: Attempt, baseline: Attempt, protocol: Protocol
) -> Rung:
    """With its times beside those of the other rung and of the baseline."""
    over_other = ratio(other.round_step_ms, attempt.round_step_ms, protocol)
    # In a ladder the plugin is on in this rung, where one is left out in the other.
    adds = len(attempt.on) > len(other.on)
    gain = over_other.times - 1 if adds else 1 - over_other.times
    with_it, without = (attempt, other) if adds else (other, attempt)
    pays = over_other.significant and gain > 0 and attempt.judged is not None
    return replace(
        row,
        before=other.name,
        over_baseline=ratio(baseline.round_step_ms, attempt.round_step_ms, protocol),
        over_before=over_other,
        pays_back_steps=pays_back_steps(
            saved_ms=attempt.step_ms * gain,
            spent_s=with_it.warmup.compile_s - without.warmup.compile_s,
        )
        if pays
        else None,
        drift=drift(attempt.losses, baseline.losses),
        drift_allowed=drift_allowed(attempt.plugins),
        drift_before=drift(attempt.losses, other.losses),
    )


def _judged(row: Rung, attempt: Attempt, other: Attempt, *, slack: float) -> Rung:
    """With the claim of the plugin by which the two differ."""
    if attempt.judged is None:
        return row
    assert row.drift_before is not None, "it has been compared"
    # One that is left out takes with it those that require it.
    others = [one.plugin for one in (*attempt.on, *other.on) if one is not attempt.judged]
    verdict = judge(attempt.judged.plugin, others, row.drift_before, slack=slack)
    return replace(row, verdict=verdict)


def foreign_cpus(baseline: Attempt) -> float | None:
    """Cores that others kept busy in the baseline's rounds; None: the system does not say."""
    seen = [lap.foreign_cpus for lap in baseline.rounds.values() if lap.foreign_cpus is not None]
    return median(seen) if seen else None


def warnings(result: Bench, attempts: Sequence[Attempt]) -> list[str]:
    """What makes the numbers less certain than they look, one line each."""
    return [
        *busy(result.before, result.machine.cpu_count),
        *crowded(result.foreign_cpus, result.machine.cpu_count, result.protocol),
        *_unsteady(result.baseline_again, attempts[0], result.protocol),
        *_below_peak(result),
        *_uncertain(attempts, result),
    ]


def busy(before: Conditions, cores: int) -> Iterator[str]:
    """That the machine had other work before it began."""
    if before.load_average > cores / 2:
        yield (
            f"the machine was busy before it began: load average {before.load_average:.1f} on "
            f"{cores} cores: repeat it when nothing else runs"
        )
    percent = before.gpu.busy_percent if before.gpu else None
    if percent is not None and percent > BUSY_GPU_PERCENT:
        yield (
            f"the GPU was busy before it began, {percent:.0f} % of the time: repeat it when "
            "nothing else runs"
        )


def crowded(taken: float | None, cores: int, protocol: Protocol) -> Iterator[str]:
    """That other programs had `taken` of the cores meanwhile."""
    if taken is not None and taken > protocol.max_foreign * cores:
        yield (
            f"other programs kept {taken:.1f} of {cores} cores busy meanwhile: the times are "
            "theirs too"
        )


def few(protocol: Protocol) -> Iterator[str]:
    """That the rounds were too few."""
    if protocol.rounds < FEWEST_ROUNDS:
        yield (
            f"{protocol.rounds} rounds are too few for an interval of {protocol.confidence:.0%}: "
            f"use --rounds {FEWEST_ROUNDS} or more"
        )


def _unsteady(again: BaselineAgain | None, baseline: Attempt, protocol: Protocol) -> Iterator[str]:
    scatter = spread(list(baseline.round_step_ms.values()))
    if scatter > protocol.max_spread:
        yield (
            f"the baseline's rounds differ by {scatter:.0%} of their median, above "
            f"{protocol.max_spread:.0%}: something else was running, or use longer rounds (--steps)"
        )
    if again is None:
        yield "the baseline could not be measured again at the end: its drift is unknown"
    elif abs(again.drift) > protocol.max_baseline_drift:
        yield (
            f"the baseline drifted by {again.drift:+.1%} from start to end "
            f"({again.first_step_ms:.2f} -> {again.last_step_ms:.2f} ms/step), above "
            f"{protocol.max_baseline_drift:.0%}: the machine became slower or faster meanwhile"
        )


def _below_peak(result: Bench) -> Iterator[str]:
    """That the peak of which the shares are is less certain than it looks."""
    lowest, highest = min(result.peaks_flops), max(result.peaks_flops)
    if 1 - lowest / highest > result.protocol.max_peak_spread:
        yield (
            f"the matmul peak moved between {lowest / 1e9:,.0f} and {highest / 1e9:,.0f} GFLOP/s "
            f"in {len(result.peaks_flops)} looks: shares of it are no surer than that"
        )
    above = [
        rung.name for rung in result.rungs if rung.peak_share is not None and rung.peak_share > 1
    ]
    if above:
        yield (
            f"{', '.join(above)} above the matmul peak: something else was running whenever that "
            "was measured"
        )


def _uncertain(attempts: Sequence[Attempt], result: Bench) -> Iterator[str]:
    yield from few(result.protocol)
    if result.control is not None and result.control.over_baseline.significant:
        twice = result.control.over_baseline
        yield (
            f"the baseline measured twice differs from itself, x{twice.times:.3f} "
            f"[{twice.low:.3f}, {twice.high:.3f}]: believe no ratio nearer to 1 than that"
        )
    for attempt in attempts:
        if attempt.ran and not attempt.warmup.steady:
            yield f"{attempt.name} was not steady after {attempt.warmup.steps} steps of warm-up"
    for rung in result.rungs:
        if rung.over_baseline is not None and not rung.over_baseline.paired:
            yield (
                f"{rung.name} did not fit beside the baseline: its ratio to it is of unpaired "
                "rounds, and the machine's drift is in it"
            )
