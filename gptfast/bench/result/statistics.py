"""The arithmetic of a bench: pure functions on numbers, the same answer each time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, TypeAlias

import numpy as np

from gptfast.bench.measure.messages import Phases
from gptfast.bench.result.record import Drift, Protocol, Ratio, Verdict, Warmup
from gptfast.plugin import Claim, Plugin, least_tolerance

Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"
FEWEST_ROUNDS = 6
"""With fewer pairs not even the interval from the lowest to the highest covers 95 %."""


def is_warm(seconds: Sequence[float], compiled: Sequence[int], protocol: Protocol) -> bool:
    """Whether the last steps compiled nothing and have stopped changing.

    Args:
        seconds: of each step so far.
        compiled: graphs compiled in each.
    """
    window = protocol.warmup_window
    if len(seconds) < 2 * window or any(compiled[-2 * window :]):
        return False
    earlier = median(seconds[-2 * window : -window])
    later = median(seconds[-window:])
    return abs(later - earlier) <= protocol.warmup_steady * earlier


def warmup(
    seconds: Sequence[float], compiled: Sequence[int], *, build_s: float, protocol: Protocol
) -> Warmup:
    """What the steps of a warm-up cost beyond as many steady ones."""
    steady_s = median(seconds[-protocol.warmup_window :])
    return Warmup(
        steps=len(seconds),
        steady=is_warm(seconds, compiled, protocol),
        build_s=build_s,
        first_step_s=seconds[0],
        compile_s=max(0.0, sum(seconds) - steady_s * len(seconds)),
    )


def ratio(reference: Mapping[int, float], rung: Mapping[int, float], protocol: Protocol) -> Ratio:
    """How many times as fast as the reference.

    Rounds of one number were neighbours in time and are compared pair by pair. Rungs that never
    took turns have none: then all rounds of one stand against all of the other, and what changed
    on the machine between them is in the ratio.

    Args:
        reference, rung: number of each round -> time of its step.
    """
    common = sorted(reference.keys() & rung.keys())
    if common:
        return paired_ratio([reference[n] for n in common], [rung[n] for n in common], protocol)
    return unpaired_ratio(list(reference.values()), list(rung.values()), protocol)


def paired_ratio(reference: Sequence[float], rung: Sequence[float], protocol: Protocol) -> Ratio:
    """The median over pairs, with its bootstrap interval: pairs are drawn with replacement, and
    the interval is from percentile to percentile of the medians.

    Source: Efron and Tibshirani 1993, An Introduction to the Bootstrap, chapter 13.
    """
    pairs = np.asarray(reference) / np.asarray(rung)
    medians = resampled_medians(pairs, protocol, seed=0)
    return from_resampled(float(np.median(pairs)), medians, protocol, n=len(pairs), paired=True)


def unpaired_ratio(reference: Sequence[float], rung: Sequence[float], protocol: Protocol) -> Ratio:
    """The ratio of the medians, with its bootstrap interval: each side is drawn for itself.

    Source: Efron and Tibshirani 1993, An Introduction to the Bootstrap, chapter 8.
    """
    medians = resampled_medians(reference, protocol, seed=0) / resampled_medians(
        rung, protocol, seed=1
    )
    n = min(len(reference), len(rung))
    return from_resampled(median(reference) / median(rung), medians, protocol, n=n, paired=False)


def resampled_medians(values: Sequence[float] | Floats, protocol: Protocol, *, seed: int) -> Floats:
    """(resamples,) medians of as many values drawn with replacement.

    Args:
        seed: of the drawing; two that are put in relation take two.
    """
    generator = np.random.default_rng([protocol.bootstrap_seed, seed])
    drawn = generator.integers(len(values), size=(protocol.resamples, len(values)))
    medians: Floats = np.median(np.asarray(values)[drawn], axis=1)
    return medians


def from_resampled(
    times: float, resampled: Floats, protocol: Protocol, *, n: int, paired: bool
) -> Ratio:
    """A ratio with the interval from percentile to percentile of its resampled values.

    Args:
        n: of how many rounds; with too few no difference is significant.
    """
    tail = (1.0 - protocol.confidence) / 2.0
    low, high = map(float, np.quantile(resampled, [tail, 1.0 - tail]))
    significant = n >= FEWEST_ROUNDS and not low <= 1.0 <= high
    return Ratio(times, low, high, significant=significant, paired=paired)


def widened(ratio: Ratio, by: float) -> Ratio:
    """With an interval that allows for another factor of up to `1 + by` either way."""
    low, high = ratio.low / (1.0 + by), ratio.high * (1.0 + by)
    significant = ratio.significant and not low <= 1.0 <= high
    return replace(ratio, low=low, high=high, significant=significant)


def pays_back_steps(*, saved_ms: float, spent_s: float) -> int:
    """Steps after which `saved_ms` (above 0) per step has paid for `spent_s` of warm-up more."""
    return max(0, math.ceil(spent_s * 1e3 / saved_ms))


def drift(losses: Sequence[float], reference: Sequence[float]) -> Drift:
    """Relative difference over the steps that both did, from the first."""
    common = list(zip(losses, reference, strict=False))
    differences = [
        abs(loss - other) / abs(other) if loss != other else 0.0 for loss, other in common
    ]
    return Drift(largest=max(differences), last=differences[-1], steps=len(common))


def drift_allowed(plugins: Iterable[Plugin]) -> float | None:
    """Largest drift from the baseline that the claims of `plugins` allow: the sum of tolerances,
    since each may add its own. None: one of them changes what is learnt."""
    plugins = list(plugins)
    if any(plugin.claim is Claim.RECIPE for plugin in plugins):
        return None
    return sum(plugin.tolerance for plugin in plugins)


def order_slack(kind: str, noise: Drift | None, protocol: Protocol) -> float:
    """What equal bits come to on a kind of device.

    Args:
        noise: what two runs of the baseline differ by; None: not measured.
    """
    if kind == "cpu" or noise is None:
        return least_tolerance(kind)
    return noise.largest * protocol.noise_factor


def judge(plugin: Plugin, others: Iterable[Plugin], drift: Drift, *, slack: float) -> Verdict:
    """Whether a plugin kept its claim, by the drift between two rungs that differ by it.

    A tolerance of 0 asks for equal bits, where the device adds in one order. Any other allows the
    largest tolerance among the plugins on: where the arithmetic is bfloat16, another order of the
    same sums shows as bfloat16's rounding, however small it is in float32.

    Args:
        others: the other plugins of the two rungs.
        slack: what equal bits come to on this device.
    """
    if plugin.claim is Claim.RECIPE:
        return Verdict(plugin.claim.value, plugin.tolerance, None, "recipe")
    allowed = max(plugin.tolerance, slack)
    if plugin.tolerance > 0:
        allowed = max([allowed, *(other.tolerance for other in others)])
    verdict = "kept" if drift.largest <= allowed else "broken"
    return Verdict(plugin.claim.value, plugin.tolerance, allowed, verdict)


def median_phases(rounds: Sequence[Phases]) -> Phases:
    """The median of each phase; a step is their sum."""
    parts = map(median, zip(*(phases.parts_ms for phases in rounds), strict=True))
    joint = any(phases.backward_in_forward for phases in rounds)
    return replace(Phases(*parts), backward_in_forward=joint)


def spread(times: Sequence[float]) -> float:
    """Slowest minus fastest, over the median."""
    return (max(times) - min(times)) / median(times)
