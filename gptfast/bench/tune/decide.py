"""When `tune` takes a change, by the ratio of the two that took turns."""

from __future__ import annotations

from gptfast.bench.measure.attempt import Attempt
from gptfast.bench.measure.messages import MachineFacts
from gptfast.bench.result.record import Ratio
from gptfast.bench.result.statistics import drift, judge
from gptfast.plugin import least_tolerance

AS_FAST = 0.99
"""Where the interval holds 1, what is left out must look at least so many times as fast: many small
losses, none of them certain, would add up."""
ORDER_TOLERANCE = 1e-5
"""Relative difference of the loss that other micro-batches may bring: they add in another order."""


def broken_claim(attempt: Attempt, best: Attempt, facts: MachineFacts) -> str | None:
    """How the losses differ from the best's by more than a claim allows. None: they do not."""
    found = drift(attempt.losses, best.losses)
    slack = least_tolerance(facts.device.partition(":")[0])
    plugins = [one.plugin for one in (*attempt.on, *best.on)]
    if attempt.judged is None:
        allowed = max(ORDER_TOLERANCE, slack, *(plugin.tolerance for plugin in plugins))
        if found.largest <= allowed:
            return None
    else:
        verdict = judge(attempt.judged.plugin, plugins, found, slack=slack)
        if verdict.verdict != "broken":
            return None
        allowed = verdict.allowed or 0.0
    return f"the loss differs by {found.largest:.1e}, {allowed:.1e} is allowed"


def decide(over: Ratio, *, leaves_out: bool, broken: str | None = None) -> tuple[bool, str]:
    """Whether a change is taken, and why.

    Args:
        over: how many times as fast as the best so far.
        leaves_out: whether it only leaves something out.
        broken: how it broke a claim; None: it did not.
    """
    if broken is not None:
        return False, broken
    if over.low > 1:
        return True, "faster"
    if over.high < 1:
        return False, "slower"
    if leaves_out:
        as_fast = over.times >= AS_FAST
        return as_fast, "not slower" if as_fast else "perhaps slower, so it stays"
    return False, "no significant difference"


def gives_way(over: Ratio, *, tuned: bool) -> bool:
    """Whether the result is taken back.

    Args:
        over: how many times as fast as the profile that it would give way to.
        tuned: whether that is an earlier search's. Then it does as soon as it looks slower, so that
            repetitions do not creep; else beyond what is as fast.
    """
    return over.high < 1 or over.times < (1.0 if tuned else AS_FAST)
