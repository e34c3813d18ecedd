"""The bench in real processes: protocol, failures, what is left behind. And in this process, where
what a worker does is what counts."""

from __future__ import annotations

import errno
import gc
import gzip
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_plugins
import pytest
import torch
from bench_helpers import AtHand
from bench_plugins import Elsewhere
from plugin_helpers import ROOT, gptfast

from gptfast.bench.measure import bare, phases, rung, worker
from gptfast.bench.measure.conditions import conditions
from gptfast.bench.measure.messages import RungFailed
from gptfast.bench.measure.phases import Stopwatch
from gptfast.bench.measure.process import WorkerProcess
from gptfast.cli import main
from gptfast.contract.tiny import tiny_profile, write_tiny_store
from gptfast.helpers import with_gradients
from gptfast.plugin import Profile


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder in which `bench_plugins` is installed as a foreign package."""
    folder = tmp_path / "site"
    info = folder / "bench_plugins-2.0.dist-info"
    info.mkdir(parents=True)
    shutil.copy(bench_plugins.__file__, folder)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bench-plugins\nVersion: 2.0\n")
    names = ("Paced", "Half", "Hungry", "Dying", "Hanging", "Elsewhere", "Shrinking")
    lines = [f"{name.lower()} = bench_plugins:{name}" for name in names]
    (info / "entry_points.txt").write_text("\n".join(["[gptfast.plugins]", *lines]) + "\n")
    return folder


@pytest.fixture
def profile(tmp_path: Path) -> Profile:
    write_tiny_store(tmp_path / "tiny.h5")
    return tiny_profile({}).replace({"data.path": str(tmp_path / "tiny.h5")})


@pytest.fixture
def config(tmp_path: Path, profile: Profile, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPTFAST_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "bench.toml"
    path.write_text(profile.to_toml())
    return path


def on(*names: str) -> list[str]:
    return list(itertools.chain.from_iterable(("--plugin", name) for name in names))


def test_a_ladder_in_real_processes(
    tmp_path: Path, package: Path, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BEN-01, BEN-07 with no compiler, BEN-08; the plugins print to stdout."""
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("CXX", "")
    names = on("half", "paced", "compile")
    done = gptfast(
        *("bench", "--config", str(config), *names, "--breakdown"),
        *("--json", "--steps", "4", "--rounds", "3", "--device", "cpu", "--out", "kept"),
        path=[package],
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["format"] == 2
    assert result == json.loads((tmp_path / "kept" / "bench.json").read_text())
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == [
        *("bench.json", "breakdown.png", "breakdown.svg", "ladder.png", "ladder.svg", "traces")
    ]
    baseline, compiled, half, paced = result["rungs"]

    assert (compiled["name"], compiled["ran"]) == ("+ compile", False)
    assert "No working C++ compiler found" in compiled["reason"]
    assert compiled.keys() == paced.keys()
    assert half["plugins"] == ["half"]

    assert paced["step_ms"] == pytest.approx(100, rel=0.1)
    assert paced["warmup"]["first_step_s"] == pytest.approx(3.0, rel=0.1)
    assert paced["warmup"]["compile_s"] == pytest.approx(3.0, rel=0.1)
    first_note, last_note = paced["notes"]
    assert first_note == "paces"
    assert "failed in teardown: RuntimeError: no last words" in last_note
    assert half["notes"] == []
    assert (paced["package"], paced["version"]) == ("bench-plugins", "2.0")
    assert paced["before"] == "+ half"
    assert paced["verdict"]["verdict"] == "kept"
    assert paced["drift_before"]["largest"] == 0.0

    assert half["verdict"]["verdict"] == "broken"
    assert half["drift"]["last"] > 1e-3
    steps = baseline["warmup"]["steps"] + (3 + 3 + 3) * (4 + 2) + 5 * 4
    assert len(baseline["losses"]) == steps
    assert len(result["peaks_flops"]) == 1 + 3
    assert result["machine"]["peak_flops"] == max(result["peaks_flops"])
    assert baseline["losses"][0] == half["losses"][0] == pytest.approx(4.1, abs=0.1)

    # A stranger's plugin has its part of every table, and its trace.
    parts = paced["breakdown"]
    phases = parts["phases"]
    assert phases.pop("backward_in_forward") is False
    assert list(phases) == [
        f"{name}_ms" for name in ("data", "forward", "backward", "optimizer", "rest")
    ]
    assert min(phases.values()) > 0
    assert sum(phases.values()) == pytest.approx(100, rel=0.1)
    assert phases["rest_ms"] > 60, "the sleep is in none of the four"
    assert len(parts["operators"]) == 10
    assert parts["trace"] == "with-paced.json.gz"
    with gzip.open(tmp_path / "kept" / "traces" / parts["trace"]) as trace:
        names = {event.get("name") for event in json.load(trace)["traceEvents"]}
    assert {"forward", "backward", "optimizer", "data", "aten::mm"} <= names
    for picture in ("ladder.svg", "breakdown.svg"):
        assert "+ paced" in (tmp_path / "kept" / picture).read_text()


@pytest.mark.skipif(
    sys.platform == "win32", reason="Windows has no process groups to send Ctrl-C to"
)
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
        process.build(lost, device="cpu", plugin=plugin, bare=False, patience_s=60)
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
        build = {
            "do": "build",
            "profile": on.model_dump(),
            "device": "cpu",
            "plugin": plugin,
            "bare": False,
        }
        worker.serve(iter(map(json.dumps, [build, *requests])), answers.append)
        return answers

    assert serve("elsewhere") == [
        {
            "failed": Elsewhere("").supports(None).reason,  # it asks none
            "exit_code": 2,
            "out_of_memory": False,
        }
    ]
    *_, out_of_memory = serve("hungry", {"do": "advance", "steps": 4, "lead_in": 0})
    assert out_of_memory["out_of_memory"] is True
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
    assert 0 < lap["footprint"]["rest_bytes"] <= lap["footprint"]["peak_bytes"]
    assert lap["footprint"]["free_bytes"] > 0


# in this process --------------------------------------------------------------------------


@pytest.mark.usefixtures("at_hand")
@pytest.mark.parametrize("fault", ["file", "taken", "no data"])
def test_a_bench_that_is_impossible_is_refused_at_once(
    tmp_path: Path,
    config: Path,
    fault: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """CLI-17, and data that is not there."""
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


@pytest.mark.usefixtures("at_hand")
def test_one_left_out_at_a_time(
    package: Path, config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(package))
    names = on("half", "elsewhere", "fused-adamw")
    shown = ["--leave-one-out", "--control", "--steps", "2", "--rounds", "2", "--device", "cpu"]
    assert main(["bench", "--config", str(config), *names, *shown]) == 0
    out = capsys.readouterr().out
    for text in ("baseline", "full", "- half", "- elsewhere", "- fused-adamw", "x full"):
        assert text in out
    assert "- elsewhere cannot run here: needs a quantum computer" in out
    assert "- half broke its claim" in out
    result = json.loads(Path("bench/contract/bench.json").read_text())
    assert result["kind"] == "leave-one-out"
    assert result["control"]["drift"]["largest"] == 0.0
    assert result["control"]["drift"]["steps"] >= 6 + 2 * (2 + 2)
    by_name = {row["name"]: row for row in result["rungs"]}
    assert by_name["- half"]["plugins"] == ["fused-adamw"]
    assert by_name["- half"]["verdict"]["verdict"] == "broken"
    assert by_name["- fused-adamw"]["verdict"]["verdict"] == "kept"
    assert sorted(path.name for path in Path("bench/contract").iterdir()) == [
        *("bench.json", "ladder.png", "ladder.svg")
    ]


def test_a_lack_of_memory_is_told_from_any_other_failure(
    tmp_path: Path, package: Path, profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be the fault of the rungs beside it."""
    monkeypatch.syspath_prepend(str(package))
    with AtHand(tmp_path) as at_hand:
        for plugin, lacked in (("elsewhere", False), ("hungry", True)):
            wanted = profile.replace({"plugins": {plugin: {}}})
            with pytest.raises(RungFailed) as failed:
                _built_and_advanced(at_hand, wanted)
            assert failed.value.out_of_memory is lacked


def _built_and_advanced(process: WorkerProcess, profile: Profile) -> None:
    process.build(profile, device="cpu", plugin=None, bare=False, patience_s=1)
    process.advance(4, lead_in=0, patience_s=1)


@pytest.mark.usefixtures("at_hand")
def test_the_overhead_is_that_of_a_loop_that_does_the_same(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["bench", "--config", str(config), "--overhead", "--steps", "3", "--rounds", "2"]
    assert main([*asked, "--device", "cpu", "--json", *on("fused-adamw")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["drift"]["largest"] == 0.0
    assert found["drift"]["steps"] >= 6 + 2 * (3 + 2)
    assert found["profile"]["plugins"] == {}
    assert found["bare_ms"] > 0
    assert found["slower"]["paired"] is True
    assert 0 < found["hooks_us"] < 100
    assert main([*asked, "--device", "cpu"]) == 0
    assert "hooks that no plugin has" in capsys.readouterr().out
    assert main([*asked, "--breakdown"]) == 2
    assert not Path("bench").exists()


@pytest.mark.usefixtures("at_hand")
def test_without_matplotlib_the_figures_are_there(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    asked = ["bench", "--config", str(config), "--steps", "1", "--rounds", "2", "--device", "cpu"]
    assert main([*asked, "--out", "kept"]) == 0
    assert [path.name for path in Path("kept").iterdir()] == ["bench.json"]
    assert "a picture needs matplotlib" in capsys.readouterr().err


@pytest.mark.usefixtures("at_hand")
@pytest.mark.parametrize("rounds", [5, 6])
def test_a_training_will_know_what_has_paid_where_the_rounds_could_tell(
    rounds: int, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["bench", "--config", str(config), "--steps", "1", "--device", "cpu", "--json"]
    assert main([*asked, "--rounds", str(rounds), *on("fused-adamw", "prefetch")]) == 0
    rungs = json.loads(capsys.readouterr().out)["rungs"]
    kept = [json.loads(path.read_text()) for path in (tmp_path / "cache").glob("payback/*")]
    assert {one["asked"]["plugin"]: one["after_steps"] for one in kept} == (
        {rung["plugin"]: rung["pays_back_steps"] for rung in rungs[1:]} if rounds == 6 else {}
    )


@pytest.mark.usefixtures("at_hand")
def test_a_full_disk_takes_no_more_than_the_files(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["bench", "--config", str(config), "--steps", "1", "--rounds", "2", "--device", "cpu"]
    write_bytes = Path.write_bytes

    def full(path: Path, content: bytes) -> int:
        if path.suffix == ".svg":  # all before it had room
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_bytes(path, content)

    monkeypatch.setattr(Path, "write_bytes", full)
    assert main([*asked, "--out", "kept/here"]) == 1
    shown = capsys.readouterr()
    assert "ms/step" in shown.out
    assert "kept in" not in shown.out
    assert "here: the result cannot be kept (No space left on device)" in shown.err.splitlines()[-1]
    assert not Path("kept").exists()


def built(profile: Profile, stack: ExitStack, **changes: Any) -> rung.Rung:
    made, _ = stack.enter_context(
        rung.built_rung(profile.replace(changes), device="cpu", plugin=None)
    )
    return made


def test_a_lap_waits_for_the_device_at_its_ends_and_never_between(
    profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BEN-02, with a device that works while the program goes on: a step puts 10 ms of work on it,
    only waiting for it takes time."""
    now = 0.0
    owed = 0.0
    waits = 0

    def wait(device: torch.device) -> None:
        nonlocal now, owed, waits
        now, owed, waits = now + owed, 0.0, waits + 1

    with ExitStack() as stack:
        made = built(profile, stack)
        one_step = made.loop.one_step

        def on_the_device() -> None:
            nonlocal owed
            owed += 0.010
            one_step()

        monkeypatch.setattr(made.loop, "one_step", on_the_device)
        monkeypatch.setattr(rung, "synchronize", wait)
        monkeypatch.setattr(rung, "time", SimpleNamespace(perf_counter=lambda: now))
        lap = made.advance(7, lead_in=3)
    assert waits == 2
    assert lap.seconds == pytest.approx(0.070)
    assert lap.step_ms == pytest.approx(10.0)


def test_step_times_add_up_to_one_wall_clock_around_all_steps(
    profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BEN-02, for real: nothing but the steps is on the clock, and all of them are."""
    ends: list[float] = []
    with ExitStack() as stack:
        made = built(profile, stack)
        one_step = made.loop.one_step

        def noted() -> None:
            ends.append(time.perf_counter())
            one_step()
            ends.append(time.perf_counter())

        monkeypatch.setattr(made.loop, "one_step", noted)
        lap = made.advance(50, lead_in=10)
    assert lap.step_ms * 50 / 1e3 == pytest.approx(ends[-1] - ends[2 * 10], rel=0.03)


def test_a_step_in_smaller_parts_is_no_measurement_of_it(
    package: Path, profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that helps itself out of a lack of memory does other work than its rung."""
    monkeypatch.syspath_prepend(str(package))
    with ExitStack() as stack:
        made = built(profile, stack, plugins={"shrinking": {}})
        made.advance(1, lead_in=0)
        with pytest.raises(torch.OutOfMemoryError, match=r"4 windows do not fit.*, 2 do"):
            made.advance(2, lead_in=0)


def test_nothing_is_collected_on_the_clock(
    profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is evaluated, saved or sampled, whatever the profile says."""
    seen: list[bool] = []
    changes = {"train.eval_interval": 1, "train.save_interval": 1, "train.sample_interval": 1}
    with ExitStack() as stack:
        made = built(profile, stack, **changes)
        loop = made.loop
        assert isinstance(loop, rung.TrainerLoop)
        for part, name in ((loop.trainer.scorer, "evaluate"), (loop.trainer.scorer, "sample")):
            monkeypatch.setattr(part, name, pytest.fail)
        monkeypatch.setattr(loop.trainer.saver, "save", pytest.fail)
        one_step = loop.one_step

        def watched() -> None:
            seen.append(gc.isenabled())
            one_step()

        monkeypatch.setattr(loop, "one_step", watched)
        made.advance(3, lead_in=2)
    assert seen == [True, True, False, False, False]
    assert gc.isenabled()


def test_the_parts_of_a_trainer_are_as_before_when_it_was_divided_up(
    profile: Profile, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        made = built(profile, stack)
        loop = made.loop
        assert isinstance(loop, rung.TrainerLoop)
        trainer = loop.trainer
        parts = trainer.source, trainer.model, trainer.stepper
        divided = phases.divide(trainer, 4)
        largest = phases.profiled(trainer, 2, trace=tmp_path / "trace.json")
        assert (trainer.source, trainer.model, trainer.stepper) == parts
        plain = made.advance(4, lead_in=0)
        straight = built(profile, stack).advance(4 + 1 + 2 + 4, lead_in=0)
    assert plain.losses == straight.losses, "dividing up changes nothing that is learnt"
    assert all(ms > 0 for ms in divided.parts_ms)
    assert not divided.backward_in_forward
    assert len(largest) == phases.LARGEST
    assert [one.ms for one in largest] == sorted((one.ms for one in largest), reverse=True)
    calls = {one.name: one.calls for one in largest}
    assert calls["aten::addmm"] == 2 * 4, "four linear layers with a bias in each of two blocks"


def test_a_loss_that_brings_its_gradients_is_seen() -> None:
    weight = torch.zeros(2, requires_grad=True)

    class Joint(torch.nn.Module):
        def forward(self, joint: bool) -> torch.Tensor:
            if joint:
                return with_gradients(torch.tensor(1.0), [torch.ones(2)], [weight])
            return weight.sum()

    model = phases.TimedModel(Joint(), Stopwatch(torch.device("cpu")))
    model(False)
    assert not model.found_gradients
    model(True)
    assert model.found_gradients
    model(False)
    assert model.found_gradients, "one pass of a step is enough"


def test_a_stopwatch_adds_up() -> None:
    watch = Stopwatch(torch.device("cpu"))
    for _ in range(2):
        with watch.phase("a"):
            time.sleep(0.01)
    watch.lap("b", watch.moment())
    ms = watch.milliseconds()
    assert ms["a"] >= 20
    assert 0 <= ms["b"] < ms["a"]


def test_empty_hooks_are_counted_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that moves a millisecond at each look: rounds of 500 steps, less an empty loop's."""
    ticks = itertools.count()
    monkeypatch.setattr(bare.time, "perf_counter", lambda: next(ticks) / 1e3)
    assert bare.hooks_us(steps=500, rounds=3) == pytest.approx(0.0)


@pytest.mark.skipif(
    sys.platform == "win32", reason="Windows has no SIGKILL to tell a want of memory by"
)
def test_a_worker_that_the_system_kills_may_have_lacked_memory(
    tmp_path: Path, profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with WorkerProcess(tmp_path) as process:
        os.kill(process._process.pid, signal.SIGKILL)
        with pytest.raises(RungFailed, match="signal SIGKILL") as lost:
            process.build(profile, device="cpu", plugin=None, bare=False, patience_s=60)
    assert lost.value.out_of_memory


@pytest.mark.gpu
def test_a_rung_on_a_gpu(profile: Profile, tmp_path: Path) -> None:
    """Memory, phases and kernels as the device tells them."""
    with ExitStack() as stack:
        made, _ = stack.enter_context(rung.built_rung(profile, device="cuda", plugin=None))
        made.advance(5, lead_in=0)
        lap = made.advance(20, lead_in=2)
        loop = made.loop
        assert isinstance(loop, rung.TrainerLoop)
        divided = phases.divide(loop.trainer, 20)
        largest = phases.profiled(loop.trainer, 2, trace=tmp_path / "trace.json.gz")
    assert lap.footprint.free_bytes is not None
    assert 0 < lap.footprint.rest_bytes <= lap.footprint.peak_bytes
    assert divided.step_ms == pytest.approx(lap.step_ms, rel=0.5)
    assert min(divided.forward_ms, divided.backward_ms, divided.optimizer_ms) > 0
    assert len(largest) == phases.LARGEST
    assert not [one for one in largest if one.name.startswith("aten::")], "kernels, no operators"
    uuid = worker.machine_facts(profile, "cuda").uuid
    assert uuid is not None
    state = conditions(uuid)
    assert state.gpu is not None
    assert state.gpu.driver
