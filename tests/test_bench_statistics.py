"""The arithmetic of a bench."""

from __future__ import annotations

import math

import pytest
from bench_helpers import PROTOCOL
from hypothesis import given
from hypothesis import strategies as st

from gptfast.bench.measure.conditions import CpuUse, conditions, gpu_state
from gptfast.bench.result import statistics
from gptfast.bench.result.record import Drift, Protocol
from gptfast.plugin import ORDER_SLACK, Claim, Plugin


def test_drift_of_the_machine_cancels_in_paired_ratios() -> None:
    slowing = [1.0, 1.3, 1.7, 2.2, 2.9, 3.7]
    ratio = statistics.paired_ratio(slowing, [t / 1.25 for t in slowing], PROTOCOL)
    assert (ratio.times, ratio.low, ratio.high) == pytest.approx((1.25, 1.25, 1.25))
    assert ratio.significant


def test_no_significant_difference_when_the_interval_holds_1() -> None:
    noise = [1.0, 1.1, 0.9, 1.05, 0.95, 1.02, 0.98, 1.0]
    ratio = statistics.paired_ratio(noise, noise[::-1], PROTOCOL)
    assert ratio.low < 1 < ratio.high
    assert not ratio.significant
    assert ratio == statistics.paired_ratio(noise, noise[::-1], PROTOCOL)


def test_too_few_rounds_make_nothing_significant() -> None:
    """Two pairs on one side of 1 are a coin thrown twice."""
    for n in (2, 5, 6):
        few = [1.1] * n
        for ratio in (
            statistics.paired_ratio(few, [1.0] * n, PROTOCOL),
            statistics.unpaired_ratio(few, [1.0] * 8, PROTOCOL),
        ):
            assert ratio.low > 1
            assert ratio.significant is (n == 6)
            assert statistics.widened(ratio, 0.01).significant is (n == 6)
            assert not statistics.widened(ratio, 0.2).significant


@given(st.lists(st.tuples(st.floats(0.5, 2.0), st.floats(0.5, 2.0)), min_size=2, max_size=12))
def test_the_interval_surrounds_the_median(times: list[tuple[float, float]]) -> None:
    reference, rung = zip(*times, strict=True)
    ratio = statistics.paired_ratio(reference, rung, Protocol(resamples=200))
    pairs = [r / t for r, t in times]
    slack = 1 + 1e-12
    assert min(pairs) <= ratio.low * slack
    assert ratio.low <= ratio.times * slack
    assert ratio.times <= ratio.high * slack
    assert ratio.high <= max(pairs) * slack


@pytest.mark.parametrize(
    ("seconds", "compiled", "warm"),
    [
        ([1.0] * 5, [0] * 5, False),  # too few to tell
        ([1.0] * 6, [0] * 6, True),
        ([9.0, 1, 1, 1, 1, 1], [0] * 6, True),  # one slow step does not move a median
        ([9.0, 9, 1, 1, 1, 1], [0] * 6, False),
        ([2.0, 1.9, 1.8, 1.6, 1.5, 1.4], [0] * 6, False),
        ([1.0] * 6, [1, 0, 0, 0, 0, 0], False),
        ([1.0] * 7, [1, 0, 0, 0, 0, 0, 0], True),
        ([1.0] * 9, [1, 0, 0, 0, 1, 0, 0, 0, 0], False),
    ],
)
def test_warm_up_ends_when_nothing_compiles_and_steps_are_steady(
    seconds: list[float], compiled: list[int], warm: bool
) -> None:
    assert statistics.is_warm(seconds, compiled, PROTOCOL) is warm


def test_compiling_is_what_the_warm_up_took_beyond_steady_steps() -> None:
    seconds = [30.0, 0.5, 10.0, *[0.5] * 6]
    told = statistics.warmup(seconds, [1, 0, 1, *[0] * 6], build_s=2.0, protocol=PROTOCOL)
    assert told.compile_s == pytest.approx(29.5 + 9.5)
    assert (told.steps, told.first_step_s, told.build_s, told.steady) == (9, 30.0, 2.0, True)


def test_compiling_pays_back() -> None:
    assert statistics.pays_back_steps(saved_ms=20.0, spent_s=40.0) == 2000
    assert statistics.pays_back_steps(saved_ms=20.0, spent_s=-1.0) == 0


def test_drift_is_over_the_steps_that_both_did() -> None:
    drift = statistics.drift([4.0, 3.3, 2.0], [4.0, 3.0, 2.02, 1.0])
    assert drift.largest == pytest.approx(0.1)
    assert drift.last == pytest.approx(0.02 / 2.02)
    assert drift.steps == 3


def plugin_with(claim: Claim, tolerance: float) -> Plugin:
    kind: type[Plugin] = type("P", (Plugin,), {"claim": claim, "tolerance": tolerance})
    return kind(None)


@pytest.mark.parametrize(
    ("claim", "tolerance", "drift", "others", "verdict"),
    [
        (Claim.EXACT, 0.0, 0.0, [0.01], "kept"),
        (Claim.EXACT, 0.0, 1e-9, [0.01], "broken"),
        (Claim.EXACT, 1e-6, 1e-7, [], "kept"),
        (Claim.EXACT, 1e-6, 1e-5, [], "broken"),
        (Claim.EXACT, 1e-6, 1e-5, [1e-2], "kept"),  # in bf16 other sums show as bf16's rounding
        (Claim.ROUNDING, 1e-3, 1e-3, [], "kept"),
        (Claim.ROUNDING, 1e-3, 2e-3, [1e-4], "broken"),
        (Claim.RECIPE, 0.0, 0.5, [], "recipe"),
    ],
)
def test_a_claim_is_judged_by_the_drift_from_the_rung_before(
    claim: Claim, tolerance: float, drift: float, others: list[float], verdict: str
) -> None:
    judged = statistics.judge(
        plugin_with(claim, tolerance),
        [plugin_with(Claim.ROUNDING, other) for other in others],
        Drift(drift, drift, 5),
        slack=0.0,
    )
    assert judged.verdict == verdict


@pytest.mark.parametrize(
    ("kind", "noise", "slack"),
    [("cpu", None, 0.0), ("cpu", 1e-3, 0.0), ("cuda", None, ORDER_SLACK), ("cuda", 1e-5, 3e-5)],
)
def test_equal_bits_are_what_two_runs_of_the_baseline_say(
    kind: str, noise: float | None, slack: float
) -> None:
    seen = None if noise is None else Drift(noise, 0.0, 5)
    assert statistics.order_slack(kind, seen, PROTOCOL) == pytest.approx(slack)
    exact = plugin_with(Claim.EXACT, 0.0)
    for drift, verdict in ((slack, "kept"), (slack + 1e-6, "broken")):
        judged = statistics.judge(exact, [], Drift(drift, drift, 5), slack=slack)
        assert (judged.verdict, judged.allowed) == (verdict, slack)


def test_drift_allowed_from_the_baseline_adds_up() -> None:
    rounding = [plugin_with(Claim.ROUNDING, 0.25), plugin_with(Claim.EXACT, 0.5)]
    assert statistics.drift_allowed(rounding) == 0.75
    assert statistics.drift_allowed([*rounding, plugin_with(Claim.RECIPE, 0.0)]) is None


def test_unpaired_rounds_keep_the_drift_that_pairs_cancel() -> None:
    slowing = {n: 1.3**n for n in range(8)}
    faster = {n: t / 1.25 for n, t in slowing.items()}
    assert statistics.ratio(slowing, faster, PROTOCOL).low == pytest.approx(1.25)
    later = {n + 100: t for n, t in faster.items()}
    apart = statistics.ratio(slowing, later, PROTOCOL)
    assert not apart.paired
    assert apart.times == pytest.approx(1.25)
    assert apart.low < 0.8
    assert not apart.significant


def test_only_rounds_of_one_number_are_pairs() -> None:
    ratio = statistics.ratio({0: 1.0, 1: 1.0, 7: 99.0}, {0: 2.0, 1: 2.0, 9: 0.01}, PROTOCOL)
    assert (ratio.times, ratio.low, ratio.high, ratio.paired) == (0.5, 0.5, 0.5, True)


@given(
    st.lists(st.floats(0.5, 2.0), min_size=2, max_size=9),
    st.lists(st.floats(0.5, 2.0), min_size=2, max_size=9),
)
def test_two_sides_turned_round_are_the_inverse(a: list[float], b: list[float]) -> None:
    protocol = Protocol(resamples=300)
    there, back = (
        statistics.unpaired_ratio(a, b, protocol),
        statistics.unpaired_ratio(b, a, protocol),
    )
    assert there.times == pytest.approx(1 / back.times)
    assert there.low <= there.high
    assert min(a) / max(b) <= there.low * (1 + 1e-12)
    assert there.high <= max(a) / min(b) * (1 + 1e-12)


def test_the_interval_is_as_wide_as_theory_says() -> None:
    """Against the normal approximation: the median of n normal values has a standard error of
    sqrt(pi / 2 / n) sigma."""
    n, sigma = 400, 0.01
    quantiles = [math.sqrt(2) * _erfinv(2 * (i + 0.5) / n - 1) for i in range(n)]
    times = {i: 1.0 / (1.0 + sigma * q) for i, q in enumerate(quantiles)}
    ratio = statistics.ratio(dict.fromkeys(times, 1.0), times, PROTOCOL)
    expected = 2 * 1.96 * math.sqrt(math.pi / 2 / n) * sigma
    assert ratio.high - ratio.low == pytest.approx(expected, rel=0.15)


def _erfinv(y: float) -> float:
    """By bisection."""
    low, high = -5.0, 5.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if math.erf(middle) < y else (low, middle)
    return low


def test_a_widened_interval_may_lose_its_significance() -> None:
    ratio = statistics.paired_ratio([1.02] * 6, [1.0] * 6, PROTOCOL)
    assert ratio.significant
    assert not statistics.widened(ratio, 0.03).significant
    assert statistics.widened(ratio, 0.03).low == pytest.approx(1.02 / 1.03)
    assert statistics.widened(ratio, 0.01).significant


# the machine's state ---------------------------------------------------------------------


def test_what_nvidia_smi_says_is_read_and_what_it_does_not_say_is_none() -> None:
    asked: list[list[str]] = []

    def smi(command: list[str]) -> str:
        asked.append(list(command))
        return "560.35.03, 1695, 1980, 41, [N/A], 3\n"

    gpu = gpu_state("GPU-1", run=smi)
    assert gpu is not None
    assert (gpu.driver, gpu.clock_mhz, gpu.max_clock_mhz) == ("560.35.03", 1695.0, 1980.0)
    assert (gpu.temperature_c, gpu.power_w, gpu.busy_percent) == (41.0, None, 3.0)
    assert "--id=GPU-1" in asked[0]
    assert asked[0][2].count(",") == 5

    def no_smi(command: list[str]) -> str:
        raise FileNotFoundError(command[0])

    assert gpu_state("GPU-1", run=no_smi) is None


def test_this_machine_says_how_it_is() -> None:
    now = conditions(None)
    assert now.load_average >= 0
    assert now.gpu is None


def test_what_others_compute_is_told_from_what_we_do(monkeypatch: pytest.MonkeyPatch) -> None:
    from gptfast.bench.measure import conditions as module

    monkeypatch.setattr(module, "_busy_s", iter([100.0, 107.0]).__next__)
    monkeypatch.setattr(module, "_our_s", iter([10.0, 14.5]).__next__)
    assert CpuUse().foreign_s() == 2.5
