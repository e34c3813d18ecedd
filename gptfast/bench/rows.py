"""From what the rungs did to the rows of the result and its warnings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from gptfast.bench.attempt import Attempt
from gptfast.bench.messages import MachineFacts
from gptfast.bench.record import BaselineAgain, Load, Protocol, Rung
from gptfast.bench.statistics import (
    drift,
    drift_allowed,
    judge,
    pays_back_steps,
    ratio,
    spread,
)

FEWEST_ROUNDS = 6
"""With fewer pairs not even the interval from the lowest to the highest covers 95 %."""


def rows(attempts: Sequence[Attempt], *, facts: MachineFacts, protocol: Protocol) -> list[Rung]:
    """A row for each rung, also for those that cannot run here, in the order of the ladder."""
    kind = facts.device.partition(":")[0]
    ran = [attempt for attempt in attempts if attempt.ran]
    common = min(len(attempt.losses) for attempt in ran)
    table: list[Rung] = []
    before: Attempt | None = None
    for attempt in attempts:
        added = attempt.added
        row = Rung(
            name=attempt.name,
            plugin=added.name if added else None,
            package=added.package if added else None,
            version=added.version if added else None,
            ran=attempt.ran,
            reason=None if attempt.ran else attempt.failure,
        )
        if attempt.ran:
            row = _measured(row, attempt, common=common, peak_flops=facts.peak_flops)
            if before is not None:
                row = _compared(row, attempt, before, ran[0], protocol, device=kind)
            before = attempt
        table.append(row)
    return table


def _measured(row: Rung, attempt: Attempt, *, common: int, peak_flops: float) -> Rung:
    """With what the rung says by itself."""
    tokens_per_s = median(lap.tokens / lap.seconds for lap in attempt.rounds)
    memory = [lap.memory_bytes for lap in attempt.rounds if lap.memory_bytes is not None]
    return replace(
        row,
        plugins=attempt.built.plugins,
        detail=attempt.built.detail,
        step_ms=attempt.step_ms,
        round_step_ms=attempt.round_step_ms,
        tokens_per_s=tokens_per_s,
        peak_share=tokens_per_s * attempt.built.flops_per_token / peak_flops,
        data_wait_ms=median(lap.data_wait_ms for lap in attempt.rounds),
        memory_bytes=max(memory, default=None),
        n_micro=attempt.rounds[-1].n_micro,
        warmup=attempt.warmup,
        loss=attempt.losses[common - 1],
        losses=attempt.losses,
        notes=attempt.notes,
    )


def _compared(
    row: Rung,
    attempt: Attempt,
    before: Attempt,
    baseline: Attempt,
    protocol: Protocol,
    *,
    device: str,
) -> Rung:
    """With what it says beside the rung before and the baseline."""
    assert attempt.added is not None
    times = attempt.round_step_ms
    over_before = ratio(before.round_step_ms, times, protocol)
    faster = over_before.significant and over_before.times > 1
    drift_before = drift(attempt.losses, before.losses)
    return replace(
        row,
        before=before.name,
        over_baseline=ratio(baseline.round_step_ms, times, protocol),
        over_before=over_before,
        pays_back_steps=pays_back_steps(
            saved_ms=attempt.step_ms * (over_before.times - 1),
            spent_s=attempt.warmup.compile_s - before.warmup.compile_s,
        )
        if faster
        else None,
        drift=drift(attempt.losses, baseline.losses),
        drift_allowed=drift_allowed(attempt.plugins),
        drift_before=drift_before,
        verdict=judge(attempt.added.plugin, before.plugins, drift_before, device=device),
    )


def warnings(
    attempts: Sequence[Attempt],
    again: BaselineAgain | None,
    load: Load,
    *,
    cores: int,
    protocol: Protocol,
) -> list[str]:
    """What makes the numbers less certain than they look, one line each."""
    found = []
    if load.before is not None and load.before > cores:
        found.append(
            f"the machine was busy before it began: load average {load.before:.1f} on {cores} "
            "cores: repeat it when nothing else runs"
        )
    scatter = spread(attempts[0].round_step_ms)
    if scatter > protocol.max_spread:
        found.append(
            f"the baseline's rounds differ by {scatter:.0%} of their median, above "
            f"{protocol.max_spread:.0%}: something else was running, or use longer rounds (--steps)"
        )
    if again is None:
        found.append("the baseline could not be measured again at the end: its drift is unknown")
    elif abs(again.drift) > protocol.max_baseline_drift:
        found.append(
            f"the baseline drifted by {again.drift:+.1%} from start to end "
            f"({again.first_step_ms:.2f} -> {again.last_step_ms:.2f} ms/step), above "
            f"{protocol.max_baseline_drift:.0%}: the machine became slower or faster meanwhile"
        )
    if protocol.rounds < FEWEST_ROUNDS:
        found.append(
            f"{protocol.rounds} rounds are too few for an interval of {protocol.confidence:.0%}: "
            f"use --rounds {FEWEST_ROUNDS} or more"
        )
    found += [
        f"{attempt.name} was not steady after {attempt.warmup.steps} steps of warm-up"
        for attempt in attempts
        if attempt.ran and not attempt.warmup.steady
    ]
    return found
