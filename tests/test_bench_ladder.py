"""Which rungs stand, in which order they are measured and what is said of them: with a made-up
clock and memory."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from bench_helpers import (
    CONDITIONS,
    DOUBLING,
    GIB,
    HALF,
    HUNGRY,
    NEEDING,
    PROTOCOL,
    SAME,
    FakeMachine,
    Same,
    climb,
    leave_out,
    on_gpu,
    quarter_second,
    there,
)
from bench_plugins import Half
from plugin_helpers import enabled

from gptfast.bench.ladder import ladder_order, without
from gptfast.bench.measure.conditions import Gpu
from gptfast.bench.measure.gauge import Gauge
from gptfast.bench.measure.messages import Phases, RungFailed
from gptfast.bench.overhead import measure_overhead
from gptfast.bench.result.published import Ladder, published
from gptfast.bench.result.record import Rung
from gptfast.bench.result.table import remarks
from gptfast.errors import GptfastError
from gptfast.plugin import Plugin


class Wanting(Plugin):
    requires = ("same",)


def test_a_rung_comes_after_what_its_plugin_requires() -> None:
    planned = [enabled(name, kind) for name, kind in (("b", Wanting), ("c", Half), ("same", Same))]
    assert [e.name for e in ladder_order(planned, ["b", "c", "same"])] == ["c", "same", "b"]


def test_figures_of_a_rung() -> None:
    """BEN-05 and the rest of the arithmetic: 0.25 s a step of 25,000 tokens."""
    machine = FakeMachine(quarter_second, compile_s={"baseline": 10.0, "doubling": 50.0})
    baseline, doubled, same = climb(machine, DOUBLING, SAME).rungs
    assert [r.name for r in (baseline, doubled, same)] == ["baseline", "+ doubling", "+ same"]
    assert baseline.step_ms == pytest.approx(250.0)
    assert baseline.tokens_per_s == pytest.approx(100_000)
    assert baseline.peak_share == pytest.approx(0.276, abs=5e-4)
    assert (baseline.memory_bytes, baseline.data_wait_ms, baseline.n_micro) == (2**20, 0.25, 2)
    assert baseline.over_baseline is baseline.over_before is baseline.verdict is None
    assert doubled.over_baseline is not None
    assert doubled.over_baseline.times == pytest.approx(2.0)
    assert doubled.over_baseline.significant
    assert doubled.warmup is not None
    assert doubled.warmup.compile_s == pytest.approx(50.0)
    assert doubled.pays_back_steps == 320  # 40 s more at 125 ms a step
    assert doubled.plugins == ["doubling"]
    assert same.plugins == ["doubling", "same"]
    assert same.over_baseline == doubled.over_baseline
    assert same.over_before is not None
    assert not same.over_before.significant
    assert same.pays_back_steps is None
    assert same.verdict is not None
    assert same.verdict.verdict == "kept"


def test_rounds_go_by_turns_and_the_baseline_is_first_and_last() -> None:
    machine = FakeMachine(quarter_second)
    climb(machine, DOUBLING, SAME)
    rounds = [name for name, steps in machine.turns if steps == PROTOCOL.steps]
    again = ["baseline"] * PROTOCOL.control_rounds
    up = ["baseline", "doubling", "same"]
    turns = [name for number in range(PROTOCOL.rounds) for name in up[:: -1 if number % 2 else 1]]
    assert rounds == [*again, *turns, *again]


def test_a_slowing_machine_is_flagged_and_ratios_stand() -> None:
    """BEN-08: a clock that drifts."""
    result = climb(FakeMachine(lambda on, tick: quarter_second(on, tick) * 1.002**tick), DOUBLING)
    assert result.baseline_again is not None
    assert result.baseline_again.drift > 0.05
    assert [w for w in result.warnings if "drifted" in w]
    over = result.rungs[1].over_baseline
    assert over is not None
    assert over.times == pytest.approx(2.0, rel=5e-3)
    steady = climb(FakeMachine(quarter_second), DOUBLING)
    assert steady.baseline_again is not None
    assert steady.baseline_again.drift == pytest.approx(0.0)
    assert steady.warnings == []


def test_a_busy_machine_is_flagged() -> None:
    noisy = FakeMachine(lambda on, tick: 0.25 if tick % 3 else 0.4)
    result = climb(noisy, SAME, look=lambda: dataclasses.replace(CONDITIONS, load_average=4.5))
    assert "load average 4.5 on 4 cores" in result.warnings[0]
    assert any("rounds differ by" in warning for warning in result.warnings)


def test_fast_because_it_learns_something_else_is_flagged() -> None:
    """BEN-08: half the backward passes."""
    result = climb(FakeMachine(quarter_second), HALF, SAME)
    _, half, same = result.rungs
    assert half.verdict is not None
    assert half.verdict.verdict == "broken"
    assert half.drift is not None
    assert half.drift.largest > 0.5
    # The one above it is compared with it, and is not to blame.
    assert same.verdict is not None
    assert same.verdict.verdict == "kept"


@pytest.mark.parametrize("when", ["build", 0, 4, 9])
def test_a_rung_that_cannot_run_is_a_row_and_the_others_are_complete(when: str | int) -> None:
    """BEN-07, from the build over the warm-up to the rounds."""
    machine = FakeMachine(quarter_second, fails={"hungry": (when, "out of memory: 17 TiB")})
    result = climb(machine, HUNGRY, NEEDING, DOUBLING)
    baseline, hungry, needing, doubling = result.rungs
    assert (hungry.ran, hungry.reason) == (False, "out of memory: 17 TiB")
    assert baseline.ran
    assert doubling.ran
    if when == 9:  # found out too late to build the others without it
        assert doubling.plugins == ["hungry", "needing", "doubling"]
        assert (needing.before, doubling.before) == ("baseline", "+ needing")
    else:
        assert (needing.ran, needing.reason) == (False, "requires hungry, which cannot run here")
        assert doubling.plugins == ["doubling"]
        assert doubling.before == "baseline"
    keys = {field.name for field in dataclasses.fields(Rung)}
    written = json.loads(result.to_json())["rungs"]
    assert all(row.keys() == keys for row in written)
    assert [key for key, value in written[1].items() if value is not None] == [
        *("name", "plugin", "package", "version", "ran", "reason")
    ]


@pytest.mark.parametrize("when", ["build", 0, 7, 12])
def test_nothing_is_measured_without_the_baseline(when: str | int) -> None:
    machine = FakeMachine(quarter_second, fails={"baseline": (when, "no memory")})
    with pytest.raises(GptfastError, match="not even the baseline runs here: no memory"):
        climb(machine, SAME)
    assert ("same", PROTOCOL.steps) not in machine.turns[: 6 + PROTOCOL.control_rounds]


def test_others_that_compute_meanwhile_are_flagged() -> None:
    assert climb(FakeMachine(foreign_cpus=0.3), SAME).warnings == []
    busy = climb(FakeMachine(foreign_cpus=1.5), SAME)
    assert busy.foreign_cpus == 1.5
    assert [w for w in busy.warnings if "1.5 of 4 cores" in w]


def test_a_busy_gpu_is_flagged() -> None:
    gpu = Gpu("560", 1695.0, 1980.0, 41.0, 120.0, 63.0)
    state = dataclasses.replace(CONDITIONS, gpu=gpu)
    result = climb(FakeMachine(), SAME, look=lambda: state)
    assert [w for w in result.warnings if "GPU was busy before it began, 63 %" in w]
    assert json.loads(result.to_json())["before"]["gpu"]["driver"] == "560"


# the matmul peak ------------------------------------------------------------------------


def test_shares_are_of_the_best_peak_that_was_seen_between_the_rounds() -> None:
    """The machine was busy when it was measured first."""
    seen_while: list[int] = []
    machine = FakeMachine()

    def look() -> float:
        seen_while.append(len(machine.turns))
        return 624e12 if len(seen_while) == 3 else 280e12

    gauge = Gauge(30e12, look, between_rounds=True, tell=pytest.fail)
    result = climb(machine, SAME, gauge=gauge)
    assert len(seen_while) == PROTOCOL.rounds == len(set(seen_while)), "one before each round"
    assert result.machine.peak_flops == 624e12
    assert result.peaks_flops == [30e12, *[280e12] * 2, 624e12, *[280e12] * (PROTOCOL.rounds - 3)]
    assert result.rungs[0].peak_share == pytest.approx(0.276 / 2, abs=5e-4)
    (moved,) = [w for w in result.warnings if "the matmul peak" in w]
    assert "between 30,000 and 624,000 GFLOP/s in 9 looks" in moved
    assert any("of 624,000 GFLOP/s, matmul in bfloat16" in line for line in remarks(result))


def test_more_than_the_peak_is_flagged() -> None:
    low = Gauge(50e12, lambda: 50e12, between_rounds=True, tell=pytest.fail)
    result = climb(FakeMachine(), SAME, gauge=low)
    (above,) = [w for w in result.warnings if "the matmul peak" in w]
    assert above.startswith("baseline, + same above the matmul peak")


def test_a_gpu_is_looked_at_again_when_no_rung_takes_its_memory() -> None:
    machine = FakeMachine()
    standing: list[int] = []

    def look() -> float:
        standing.append(sum(worker.standing for worker in machine.workers))
        return 312e12

    gauge = Gauge(312e12, look, between_rounds=False, tell=pytest.fail)
    result = climb(machine, SAME, facts=on_gpu(), gauge=gauge)
    assert standing == [0]
    assert result.peaks_flops == [312e12] * 2


def test_a_bench_outlives_its_gauge() -> None:
    told: list[str] = []

    def look() -> float:
        raise RungFailed("its process ended")

    gauge = Gauge(312e12, look, between_rounds=True, tell=told.append)
    result = climb(FakeMachine(), SAME, gauge=gauge)
    assert result.peaks_flops == [312e12]
    assert told == ["the matmul peak cannot be measured again: its process ended"]


# a control --------------------------------------------------------------------------------


def test_equal_bits_on_a_gpu_are_judged_by_the_baseline_measured_twice() -> None:
    """Every second rung is off by 1e-6: so is the control, and so may an exact plugin be."""
    protocol = dataclasses.replace(PROTOCOL, noise_factor=1.5)
    off = enabled("off", type("Off", (Same,), {}))
    machine = FakeMachine(noise=1e-6)
    result = climb(machine, SAME, off, facts=on_gpu(), protocol=protocol)
    assert machine.built == ["baseline", "baseline again", "same", "off"]
    assert [row.name for row in result.rungs] == ["baseline", "+ same", "+ off"]
    assert result.control is not None
    assert result.control.drift.largest == pytest.approx(1e-6)
    verdict = result.rungs[2].verdict
    assert verdict is not None
    assert verdict.allowed == pytest.approx(1.5e-6)
    assert verdict.verdict == "kept"
    # Without the noise of the device nothing excuses half the backward passes.
    half = climb(FakeMachine(), HALF, facts=on_gpu(), protocol=protocol).rungs[1]
    assert half.verdict is not None
    assert half.verdict.verdict == "broken"


def test_a_cpu_has_no_control_unless_it_is_asked_for() -> None:
    assert climb(FakeMachine(), SAME).control is None
    protocol = dataclasses.replace(PROTOCOL, control=True)
    asked = climb(FakeMachine(noise=1e-6), SAME, protocol=protocol)
    assert asked.control is not None
    assert asked.control.over_baseline.times == pytest.approx(1.0)
    assert asked.rungs[1].verdict is not None
    assert asked.rungs[1].verdict.allowed == 0.0


def test_a_baseline_that_differs_from_itself_is_flagged() -> None:
    """The control is slower, as a process with an unlucky start is."""
    machine = FakeMachine()
    machine.step_s = lambda on, tick: 0.25 * (1.1 if machine.turn_of == "baseline again" else 1.0)
    protocol = dataclasses.replace(PROTOCOL, control=True)
    result = climb(machine, SAME, protocol=protocol)
    assert [w for w in result.warnings if "differs from itself" in w]


# memory -----------------------------------------------------------------------------------


def test_rungs_that_do_not_fit_beside_one_another_are_measured_in_groups() -> None:
    """Room for three at rest while one of them computes: nobody is out of memory."""
    machine = FakeMachine(
        memory=4 * GIB, step_s=lambda on, tick: quarter_second(on, tick) * 1.01**tick
    )
    names = [enabled(name, type(name, (Same,), {})) for name in ("a", "b", "c", "d")]
    result = climb(machine, DOUBLING, *names)
    assert [row.ran for row in result.rungs] == [True] * 6
    assert machine.most_at_once == 3
    for row in result.rungs[1:]:
        assert row.over_before is not None
        assert row.over_baseline is not None
        # Rounds by turns, although the clock runs away.
        assert row.over_before.paired
        assert row.over_baseline.paired
        assert row.over_baseline.times == pytest.approx(2.0, rel=0.05)
    # A rung is built once: the two that the next is compared with stay.
    assert machine.built == ["baseline", "doubling", "a", "b", "c", "d"]


def test_room_for_two_leaves_pairs_with_the_rung_before() -> None:
    machine = FakeMachine(memory=3 * GIB)
    result = climb(machine, DOUBLING, SAME)
    assert [row.ran for row in result.rungs] == [True] * 3
    same = result.rungs[2]
    assert same.over_before is not None
    assert same.over_baseline is not None
    assert (same.over_before.paired, same.over_baseline.paired) == (True, False)
    assert same.over_baseline.times == pytest.approx(2.0)
    assert [w for w in result.warnings if "+ same did not fit beside the baseline" in w]
    assert [w for w in result.warnings if "could not be measured again" in w]


def test_room_for_one_leaves_medians() -> None:
    machine = FakeMachine(memory=2 * GIB)
    result = climb(machine, DOUBLING, SAME)
    assert [row.ran for row in result.rungs] == [True] * 3
    assert all(row.over_before and not row.over_before.paired for row in result.rungs[1:])


def test_what_does_not_fit_alone_is_out_of_memory() -> None:
    machine = FakeMachine(memory=4 * GIB, peak={"same": 5 * GIB})
    result = climb(machine, DOUBLING, SAME, HALF)
    assert [row.ran for row in result.rungs] == [True, True, False, True]
    assert result.rungs[2].reason == "out of memory: no more"
    assert machine.built.count("same") > 1, "it was tried alone"


@pytest.mark.parametrize("memory", [3, 4, 5, 6, 7])
def test_one_that_needs_more_than_was_foreseen_is_measured_all_the_same(memory: int) -> None:
    """Where the system does not say what is free, running out of it tells."""
    machine = FakeMachine(
        memory=memory * GIB, peak={"doubling": 3 * GIB, "same": 2 * GIB}, free_is_known=False
    )
    result = climb(machine, DOUBLING, SAME, HALF)
    assert [row.ran for row in result.rungs] == [True] * 4
    assert all(len(row.round_step_ms or ()) >= PROTOCOL.rounds for row in result.rungs)


# one left out ------------------------------------------------------------------------------


def test_the_whole_profile_and_then_without_each() -> None:
    machine = FakeMachine(compile_s={"- same": 1.0, "full": 41.0})
    bound = {"unsupported": {"half": "needs another machine"}}
    result = leave_out(machine, DOUBLING, SAME, HALF, **bound)
    _, full, doubling, same, half = result.rungs
    assert result.kind == "leave-one-out"
    assert [row.name for row in result.rungs] == [
        *("baseline", "full", "- doubling", "- same", "- half")
    ]
    assert full.plugins == ["doubling", "same"]
    assert full.over_baseline is not None
    assert full.over_baseline.times == pytest.approx(2.0)
    assert full.verdict is None
    assert (doubling.plugin, doubling.plugins, doubling.before) == ("doubling", ["same"], "full")
    assert doubling.over_before is not None
    assert doubling.over_before.times == pytest.approx(0.5)
    assert doubling.over_before.significant
    assert doubling.pays_back_steps == 328  # 41 s more for 125 ms a step
    assert doubling.verdict is not None
    assert doubling.verdict.verdict == "kept"
    assert same.over_before is not None
    assert not same.over_before.significant
    assert same.pays_back_steps is None
    assert (half.ran, half.reason) == (False, "needs another machine")


def test_one_that_is_left_out_takes_with_it_what_requires_it() -> None:
    chain = enabled("chain", type("Chain", (Plugin,), {"requires": ("needing",)}))
    assert without(HUNGRY, [HUNGRY, NEEDING, SAME, chain]) == [SAME]
    assert without(NEEDING, [HUNGRY, NEEDING, SAME, chain]) == [HUNGRY, SAME]


def test_a_profile_that_does_not_run_whole_is_said_at_once() -> None:
    machine = FakeMachine(fails={"full": ("build", "no compiler")})
    with pytest.raises(GptfastError, match="whole profile does not run here: no compiler"):
        leave_out(machine, SAME)


# where the time goes, and what the machinery costs -------------------------------------------


def test_each_rung_is_divided_up_by_turns_before_it_goes(tmp_path: Path) -> None:
    machine = FakeMachine(fails={"half": (9, "no")})
    result = climb(machine, DOUBLING, SAME, HALF, trace=lambda name: tmp_path / f"{name}.json.gz")
    for row in result.rungs[:3]:
        assert row.breakdown is not None
        assert row.breakdown.phases == Phases(1.0, 80.0, 120.0, 40.0, 27.0), "medians of 5"
        assert row.breakdown.trace == f"{row.name}.json.gz"
        assert row.breakdown.operators[0].name == "aten::mm"
    assert result.rungs[3].breakdown is None
    up = ["baseline", "doubling", "same"]
    assert machine.divisions == [*up, *up[::-1], *up, *up[::-1], *up]
    assert climb(FakeMachine(), SAME).rungs[1].breakdown is None


def test_rungs_in_groups_are_divided_up_too(tmp_path: Path) -> None:
    machine = FakeMachine(memory=3 * GIB)
    result = climb(machine, DOUBLING, SAME, trace=lambda name: tmp_path / f"{name}.json.gz")
    assert all(row.breakdown is not None for row in result.rungs)


def test_the_machinery_is_measured_by_turns_with_the_bare_loop() -> None:
    machine = FakeMachine()
    machine.step_s = lambda on, tick: 0.25 * (1.01 if machine.turn_of == "trainer" else 1.0)
    bound = there(machine)
    found = measure_overhead(
        bound.profile,
        facts=bound.facts,
        protocol=PROTOCOL,
        start=machine.start,
        tell=bound.tell,
        look=lambda: dataclasses.replace(CONDITIONS, load_average=3.0),
    )
    assert [warning.partition(":")[0] for warning in found.warnings] == [
        "the machine was busy before it began"
    ]
    assert found.share == pytest.approx(0.01)
    assert (found.bare_ms, found.trainer_ms) == (pytest.approx(250.0), pytest.approx(252.5))
    assert found.hooks_us == 1.5
    assert found.drift.largest == 0.0
    rounds = [name for name, steps in machine.turns if steps == PROTOCOL.steps]
    assert rounds == ["bare loop", "trainer", "trainer", "bare loop"] * (PROTOCOL.rounds // 2)


# published ladders ---------------------------------------------------------------------------


def test_a_rung_of_several_plugins_is_said_of_the_last_of_them() -> None:
    ladder = Ladder.model_validate(
        {
            "name": "theirs",
            "machine": "m",
            "source": "s",
            "baseline_ms": 100,
            "rungs": [{"plugins": ["a", "b"], "ms": 50}, {"plugins": ["c"], "ms": 20}],
        }
    )
    asked = (["a"], ["a", "b"], ["a", "b", "x"], ["a", "b", "x", "c"], ["c"], ["b", "c"])
    assert [ladder.times(on) for on in asked] == [None, 2.0, None, 5.0, None, None]


def test_the_published_ladders_are_what_their_sources_say() -> None:
    a100, rtx = published().ladders
    assert [rung.ms for rung in a100.rungs[:5]] == [333, 300, 130, 96, 93]
    assert (a100.baseline_ms, rtx.baseline_ms, rtx.rungs[-1].ms) == (1000, 250, 80)
    assert len(rtx.rungs) == 1, "only the ends are known"
    assert published().order == [rung.plugins[0] for rung in a100.rungs]
