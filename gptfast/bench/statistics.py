"""The arithmetic of a bench: pure functions on numbers, the same answer each time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median

import numpy as np

from gptfast.bench.record import Drift, Protocol, Ratio, Verdict, Warmup
from gptfast.plugin import Claim, Plugin, least_tolerance


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


def ratio(reference: Sequence[float], rung: Sequence[float], protocol: Protocol) -> Ratio:
    """How many times as fast as the reference: the median over pairs of rounds.

    The interval is that of the bootstrap: pairs drawn with replacement, percentiles of the medians.

    Args:
        reference, rung: time of each round; the rounds of one number were neighbours in time.

    Source: Efron and Tibshirani 1993, An Introduction to the Bootstrap, chapter 13.
    """
    pairs = np.asarray(reference) / np.asarray(rung)
    generator = np.random.default_rng(protocol.bootstrap_seed)
    drawn = generator.integers(len(pairs), size=(protocol.resamples, len(pairs)))
    tail = (1.0 - protocol.confidence) / 2.0
    low, high = np.quantile(np.median(pairs[drawn], axis=1), [tail, 1.0 - tail])
    return Ratio(
        times=float(np.median(pairs)),
        low=float(low),
        high=float(high),
        significant=not low <= 1.0 <= high,
    )


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


def judge(plugin: Plugin, others: Iterable[Plugin], drift_before: Drift, *, device: str) -> Verdict:
    """Whether a plugin kept its claim, by its drift from the rung before.

    A tolerance of 0 asks for equal bits, where the device adds in one order. Any other allows the
    largest tolerance among the plugins on: where the arithmetic is bfloat16, another order of the
    same sums shows as bfloat16's rounding, however small it is in float32.

    Args:
        others: the plugins that were on in the rung before.
        device: kind of the device.
    """
    allowed: float | None = max(plugin.tolerance, least_tolerance(device))
    if plugin.claim is Claim.RECIPE:
        allowed, verdict = None, "recipe"
    else:
        if plugin.tolerance > 0:
            allowed = max([allowed or 0.0, *(other.tolerance for other in others)])
        verdict = "kept" if drift_before.largest <= (allowed or 0.0) else "broken"
    return Verdict(plugin.claim.value, plugin.tolerance, allowed, verdict)


def spread(times: Sequence[float]) -> float:
    """Slowest minus fastest, over the median."""
    return (max(times) - min(times)) / median(times)
