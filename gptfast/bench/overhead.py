"""What the machinery costs: the trainer without a plugin against the bare loop."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

from gptfast.bench.measure.attempt import Attempt, Start
from gptfast.bench.measure.conditions import Conditions
from gptfast.bench.measure.messages import MachineFacts
from gptfast.bench.measure.sitting import Sitting, Tell
from gptfast.bench.result.record import Drift, Protocol, Ratio
from gptfast.bench.result.rows import busy, crowded, few, foreign_cpus
from gptfast.bench.result.statistics import drift, ratio
from gptfast.errors import GptfastError
from gptfast.plugin import Profile

ALLOWED = 0.02
"""Share of the bare loop's time."""
ALLOWED_HOOKS_US = 5.0


@dataclass(frozen=True)
class Overhead:
    """What a step costs more in the trainer than in a loop written by hand."""

    machine: MachineFacts
    profile: dict[str, Any]
    protocol: Protocol
    bare_ms: float
    """Median step of the bare loop."""
    trainer_ms: float
    slower: Ratio
    """Time of the trainer over that of the bare loop, pair by pair."""
    hooks_us: float
    """What the hooks of a step take where no plugin has any."""
    drift: Drift
    """Of the trainer's losses from those of the bare loop: 0 where they do the same."""
    before: Conditions
    after: Conditions
    foreign_cpus: float | None
    """Median number of cores that others kept busy in the bare loop's rounds."""
    warnings: list[str]

    @property
    def share(self) -> float:
        """Of the bare loop's time."""
        return self.slower.times - 1.0


def measure_overhead(
    profile: Profile,
    *,
    facts: MachineFacts,
    protocol: Protocol,
    start: Start,
    tell: Tell,
    look: Callable[[], Conditions],
) -> Overhead:
    """Both loops on a profile without its plugins, by turns, each in a process of its own.

    Raises:
        GptfastError: one of them cannot run here.
    """
    before = look()
    bare = Attempt("bare loop", [], protocol, bare=True)
    trainer = Attempt("trainer", [], protocol, other=bare)
    with ExitStack() as workers:
        sitting = Sitting(
            profile,
            device=facts.device,
            protocol=protocol,
            workers=workers,
            start=start,
            tell=tell,
        )
        sitting.seat(bare)
        sitting.seat(trainer, beside=[bare])
        sitting.finish()
        after = look()
        if not trainer.ran:
            raise GptfastError(f"the trainer cannot run here: {trainer.failure}")
        us = trainer.hooks_us()
    foreign = foreign_cpus(bare)
    return Overhead(
        machine=facts,
        profile=profile.model_dump(mode="json"),
        protocol=protocol,
        bare_ms=bare.step_ms,
        trainer_ms=median(trainer.round_step_ms.values()),
        slower=ratio(trainer.round_step_ms, bare.round_step_ms, protocol),
        hooks_us=us,
        drift=drift(trainer.losses, bare.losses),
        before=before,
        after=after,
        foreign_cpus=foreign,
        warnings=[
            *busy(before, facts.cpu_count),
            *crowded(foreign, facts.cpu_count, protocol),
            *few(protocol),
        ],
    )
