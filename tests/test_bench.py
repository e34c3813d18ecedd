"""The bench: arithmetic and flags with a fake clock, the protocol in real processes."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bench_plugins
import pytest
from bench_plugins import Elsewhere, Half, Hungry
from hypothesis import given
from hypothesis import strategies as st
from plugin_helpers import ROOT, enabled, gptfast

from gptfast.bench import statistics, worker
from gptfast.bench.attempt import Start
from gptfast.bench.ladder import ladder_order, measure
from gptfast.bench.messages import Built, Lap, MachineFacts, RungFailed
from gptfast.bench.process import WorkerProcess
from gptfast.bench.record import Bench, Drift, Protocol, Rung
from gptfast.bench.table import table
from gptfast.cli import main
from gptfast.console import Console, Look
from gptfast.contract.tiny import tiny_profile, write_tiny_store
from gptfast.errors import GptfastError
from gptfast.plugin import Claim, Plugin, Profile
from gptfast.registry import Enabled

PROTOCOL = Protocol(steps=5, rounds=8, lead_in=1, resamples=2000)

# arithmetic ------------------------------------------------------------------------------


def test_drift_of_the_machine_cancels_in_paired_ratios() -> None:
    slowing = [1.0, 1.3, 1.7, 2.2, 2.9, 3.7]
    ratio = statistics.ratio(slowing, [t / 1.25 for t in slowing], PROTOCOL)
    assert (ratio.times, ratio.low, ratio.high) == pytest.approx((1.25, 1.25, 1.25))
    assert ratio.significant


def test_no_significant_difference_when_the_interval_holds_1() -> None:
    noise = [1.0, 1.1, 0.9, 1.05, 0.95, 1.02, 0.98, 1.0]
    ratio = statistics.ratio(noise, noise[::-1], PROTOCOL)
    assert ratio.low < 1 < ratio.high
    assert not ratio.significant
    assert ratio == statistics.ratio(noise, noise[::-1], PROTOCOL)


@given(st.lists(st.tuples(st.floats(0.5, 2.0), st.floats(0.5, 2.0)), min_size=2, max_size=12))
def test_the_interval_surrounds_the_median(times: list[tuple[float, float]]) -> None:
    reference, rung = zip(*times, strict=True)
    ratio = statistics.ratio(reference, rung, Protocol(resamples=200))
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
        device="cpu",
    )
    assert judged.verdict == verdict


@pytest.mark.parametrize(("drift", "verdict"), [(1e-4, "kept"), (1e-2, "broken")])
def test_equal_bits_are_not_asked_of_a_device_that_adds_in_any_order(
    drift: float, verdict: str
) -> None:
    exact = plugin_with(Claim.EXACT, 0.0)
    assert statistics.judge(exact, [], Drift(drift, drift, 5), device="cuda").verdict == verdict


def test_drift_allowed_from_the_baseline_adds_up() -> None:
    rounding = [plugin_with(Claim.ROUNDING, 0.25), plugin_with(Claim.EXACT, 0.5)]
    assert statistics.drift_allowed(rounding) == 0.75
    assert statistics.drift_allowed([*rounding, plugin_with(Claim.RECIPE, 0.0)]) is None


# the ladder, with a fake clock -----------------------------------------------------------


class Doubling(Plugin):
    claim = Claim.EXACT


class Same(Plugin):
    claim = Claim.EXACT


class Needing(Plugin):
    claim = Claim.EXACT
    requires = ("hungry",)


class Wanting(Plugin):
    requires = ("same",)


def test_a_rung_comes_after_what_its_plugin_requires() -> None:
    planned = [enabled(name, kind) for name, kind in (("b", Wanting), ("c", Half), ("same", Same))]
    assert [e.name for e in ladder_order(planned, ["b", "c", "same"])] == ["c", "same", "b"]


@dataclass
class FakeMachine:
    """A clock and workers that take their time from it.

    Attributes:
        step_s: of a rung with these plugins, at a tick of the clock.
        fails: where a rung's own plugin makes it fail: (plugin, "build" or how many laps before).
        turns: which rung did how many steps on the clock, in order.
    """

    step_s: Callable[[Sequence[str], int], float]
    fails: dict[str, tuple[str | int, str]] = field(default_factory=dict)
    compile_s: dict[str, float] = field(default_factory=dict)
    tick: int = 0
    turns: list[tuple[str, int]] = field(default_factory=list)
    open: list[str] = field(default_factory=list)

    @contextmanager
    def start(self, name: str) -> Iterator[FakeWorker]:
        self.open.append(name)
        yield FakeWorker(self, name)
        self.open.remove(name)


@dataclass
class FakeWorker:
    machine: FakeMachine
    name: str
    plugins: list[str] = field(default_factory=list)
    laps: int = 0
    done: int = 0
    closed: bool = False

    def build(
        self, profile: Profile, *, device: str, plugin: str | None, patience_s: float
    ) -> Built:
        self.plugins = list(profile.plugins)
        when, reason = self.machine.fails.get(self.name, (None, ""))
        if when == "build":
            raise RungFailed(reason)
        return Built(1.5, self.plugins, "as asked", flops_per_token=859_900_000)

    def advance(self, steps: int, *, lead_in: int, patience_s: float) -> Lap:
        assert not self.closed
        when, reason = self.machine.fails.get(self.name, (None, ""))
        if when == self.laps:
            raise RungFailed(reason)
        seconds = steps * self.machine.step_s(self.plugins, self.machine.tick)
        if self.laps == 0:
            seconds += self.machine.compile_s.get(self.name, 0.0)
        self.laps += 1
        self.machine.tick += 1
        self.machine.turns.append((self.name, steps))
        first, self.done = self.done, self.done + lead_in + steps
        half = "half" in self.plugins
        losses = [4.0 / (1 + (step // 2 if half else step)) for step in range(first, self.done)]
        return Lap(steps, seconds, steps * 25_000, losses, 0, 0.25, 2**20, 2, [])

    def close(self) -> None:
        self.closed = True


FACTS = MachineFacts(
    device="cpu",
    name="a fake",
    platform="none",
    cpu_count=4,
    threads=4,
    interop_threads=1,
    python="3",
    torch="2",
    numpy="2",
    cuda=None,
    peak_flops=312e12,
    peak_dtype="bfloat16",
)


def climb(machine: FakeMachine, *order: Enabled, load: float | None = 0.5) -> Bench:
    profile = tiny_profile({one.name: {} for one in order})
    start: Start = machine.start
    told: list[str] = []
    result = measure(
        profile,
        order,
        facts=FACTS,
        protocol=PROTOCOL,
        start=start,
        tell=told.append,
        load_before=load,
    )
    assert not machine.open
    assert len(told) >= len(order) + 2
    return result


DOUBLING, SAME, HALF = enabled("doubling", Doubling), enabled("same", Same), enabled("half", Half)
HUNGRY, NEEDING = enabled("hungry", Hungry), enabled("needing", Needing)


def quarter_second(plugins: Sequence[str], tick: int) -> float:
    return 0.25 / (2 if "doubling" in plugins else 1)


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
    result = climb(noisy, SAME, load=4.5)
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


def test_a_narrow_terminal_gets_fewer_columns() -> None:
    machine = FakeMachine(quarter_second, fails={"hungry": ("build", "no memory")})
    result = climb(machine, DOUBLING, HUNGRY, SAME)
    everything, rows = table(result, width=None)
    assert len(everything) == 12
    assert rows[2] == ["+ hungry", *[None] * 10, "cannot run"]
    for width in (60, 80, 100, 140):
        columns, rows = table(result, width=width)
        assert columns[:2] == ["rung", "ms/step"]
        stream = io.StringIO()
        stream.isatty = lambda: True  # type: ignore[method-assign]  # a terminal to the console
        Console(stream, stream, Look(no_color=True, width=width)).table("", columns, rows)
        shown = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue()).splitlines()
        assert max(map(len, shown)) <= width
        # Nothing had to be folded: head, rule and a line for each rung.
        assert len([line for line in shown if line.strip()]) == 2 + len(result.rungs)
    assert len(table(result, width=60)[0]) < len(everything)


# real processes --------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder in which `bench_plugins` is installed as a foreign package."""
    folder = tmp_path / "site"
    info = folder / "bench_plugins-2.0.dist-info"
    info.mkdir(parents=True)
    shutil.copy(bench_plugins.__file__, folder)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bench-plugins\nVersion: 2.0\n")
    names = ("Paced", "Half", "Hungry", "Dying", "Hanging", "Elsewhere")
    lines = [f"{name.lower()} = bench_plugins:{name}" for name in names]
    (info / "entry_points.txt").write_text("\n".join(["[gptfast.plugins]", *lines]) + "\n")
    return folder


@pytest.fixture
def profile(tmp_path: Path) -> Profile:
    write_tiny_store(tmp_path / "tiny.h5")
    return tiny_profile({}).replace({"data.path": str(tmp_path / "tiny.h5")})


@pytest.fixture
def config(tmp_path: Path, profile: Profile) -> Path:
    path = tmp_path / "bench.toml"
    path.write_text(profile.to_toml())
    return path


def on(*names: str) -> list[str]:
    return list(itertools.chain.from_iterable(("--plugin", name) for name in names))


def test_a_ladder_in_real_processes(tmp_path: Path, package: Path, config: Path) -> None:
    """BEN-01 and BEN-08 end to end, with plugins that print to stdout."""
    done = gptfast(
        *("bench", "--config", str(config), *on("half", "paced")),
        *("--json", "--steps", "4", "--rounds", "3", "--device", "cpu", "--out", "kept"),
        path=[package],
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["format"] == 1
    assert result == json.loads((tmp_path / "kept" / "bench.json").read_text())
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["bench.json"]
    baseline, half, paced = result["rungs"]

    assert paced["step_ms"] == pytest.approx(100, rel=0.1)
    assert paced["warmup"]["first_step_s"] == pytest.approx(3.0, rel=0.1)
    assert paced["warmup"]["compile_s"] == pytest.approx(3.0, rel=0.1)
    assert paced["notes"] == ["paces"]
    assert (paced["package"], paced["version"]) == ("bench-plugins", "2.0")
    assert paced["before"] == "+ half"
    assert paced["verdict"]["verdict"] == "kept"
    assert paced["drift_before"]["largest"] == 0.0

    assert half["verdict"]["verdict"] == "broken"
    assert half["drift"]["last"] > 1e-3
    steps = baseline["warmup"]["steps"] + (3 + 3 + 3) * (4 + 2)
    assert len(baseline["losses"]) == steps
    assert baseline["losses"][0] == half["losses"][0] == pytest.approx(4.1, abs=0.1)


@pytest.mark.skipif(sys.platform == "win32", reason="process groups")
def test_ctrl_c_ends_every_process_and_leaves_nothing(
    tmp_path: Path, package: Path, config: Path
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "gptfast", "bench", "--config", str(config)),
            *on("hanging"),
        ],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(package), str(ROOT)]),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(scratch),
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    pid_file = tmp_path / "child.pid"
    give_up = time.monotonic() + 60
    while not (pid_file.exists() and pid_file.read_text()) and time.monotonic() < give_up:
        time.sleep(0.05)
    child = int(pid_file.read_text())
    assert alive(child)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "gptfast: error: stopped by SIGINT"
    assert "Traceback" not in errors
    assert_ends(child)
    assert list(scratch.iterdir()) == []
    assert not (tmp_path / "bench").exists()


def alive(pid: int) -> bool:
    """Whether a process still runs; one that nobody has buried yet does not."""
    with suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def assert_ends(pid: int) -> None:
    """A killed process takes a moment to go, and its parent's parent is not told."""
    give_up = time.monotonic() + 10
    while alive(pid) and time.monotonic() < give_up:
        time.sleep(0.05)
    assert not alive(pid)


@pytest.mark.parametrize(
    ("plugin", "reason"),
    [
        ("hanging", "no answer for 1 s"),
        ("dying", "its process ended with exit code 7: segmentation fault or so"),
    ],
)
def test_a_worker_that_is_lost_is_a_reason(
    tmp_path: Path,
    package: Path,
    profile: Profile,
    monkeypatch: pytest.MonkeyPatch,
    plugin: str,
    reason: str,
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package), str(ROOT)]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "worker").mkdir()
    lost = profile.replace({"plugins": {plugin: {}}})
    with WorkerProcess(tmp_path / "worker") as process:
        process.build(lost, device="cpu", plugin=plugin, patience_s=60)
        process.advance(1, lead_in=0, patience_s=60)
        with pytest.raises(RungFailed, match=reason):
            process.advance(1, lead_in=0, patience_s=1 if plugin == "hanging" else 60)
        process.close(farewell_s=0.0)
    if plugin == "hanging":
        assert_ends(int((tmp_path / "child.pid").read_text()))


def test_what_a_worker_answers(
    package: Path, profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rung built in this process: a failure is a reason, and a lap is what it says."""
    monkeypatch.syspath_prepend(str(package))

    def serve(plugin: str | None, *requests: dict[str, Any]) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = []
        on = profile.replace({"plugins": {plugin: {}} if plugin else {}})
        build = {"do": "build", "profile": on.model_dump(), "device": "cpu", "plugin": plugin}
        worker.serve(iter(map(json.dumps, [build, *requests])), answers.append)
        return answers

    assert serve("elsewhere") == [{"failed": Elsewhere("").supports(None).reason, "exit_code": 2}]  # type: ignore[arg-type]  # it asks no machine
    *_, out_of_memory = serve("hungry", {"do": "advance", "steps": 4, "lead_in": 0})
    assert out_of_memory["failed"] == (
        "out of memory: plugin hungry (bench-plugins 2.0) failed in step: MemoryError: 17 TiB: "
        "report it to its authors or use --without hungry"
    )
    built, lap, second = serve(
        None,
        {"do": "advance", "steps": 3, "lead_in": 2},
        {"do": "advance", "steps": 1, "lead_in": 1},
    )
    assert built["plugins"] == []
    assert (lap["steps"], lap["tokens"], len(lap["losses"])) == (3, 3 * 4 * 16, 5)
    assert len(second["losses"]) == 2
    assert not set(second["losses"]) & set(lap["losses"])
    assert lap["n_micro"] == 1
    assert 0 < lap["data_wait_ms"] < lap["seconds"] / 3 * 1e3


@pytest.mark.parametrize("fault", ["file", "taken", "no data"])
def test_a_bench_that_is_impossible_is_refused_at_once(
    tmp_path: Path,
    config: Path,
    fault: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """CLI-17, and data that is not there."""
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out"
    if fault == "file":
        out.write_text("mine")
    elif fault == "taken":
        out.mkdir()
        (out / "bench.json").write_text("mine")
    else:
        (tmp_path / "tiny.h5").unlink()
    assert main(["bench", "--config", str(config), "--out", "out"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path / "tiny.h5" if fault == "no data" else out) in line
    if fault == "no data":
        assert not out.exists()
    else:
        assert (out / "bench.json" if fault == "taken" else out).read_text() == "mine"
