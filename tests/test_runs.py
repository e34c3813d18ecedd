"""`gptfast runs`: what a run's folder tells, and its pictures."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from plugin_helpers import ROOT, rig_of
from safetensors.torch import load_file

from gptfast.cli import main
from gptfast.console.plot import in_terminal, picture
from gptfast.contract.tiny import write_tiny_store
from gptfast.data.store import Store
from gptfast.plugin import Claim, Plugin, Update, Want
from gptfast.report import Course, Logged
from gptfast.run import metrics
from gptfast.run.folder import Run

PROFILE = """
[profiles.tiny]
[profiles.tiny.model]
n_layer = 1
n_head = 1
n_embd = 8
block_size = 16
[profiles.tiny.data]
path = "tiny.h5"
[profiles.tiny.train]
steps = 6
batch_size = 4
micro_batch = 2
learning_rate = 1e-2
eval_interval = 2
save_interval = 2
keep_checkpoints = 2
log_interval = 1
sample_tokens = 0
seed = 11
"""
ONE = ["train", "--device", "cpu", "--profile", "tiny", "--run", "one", "--plugin", "prefetch"]
GOES_ON = ["train", "--device", "cpu", "--run", "one", "--resume"]

Captured = pytest.CaptureFixture[str]


def git(*args: str, folder: Path) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    done = subprocess.run(
        ["git", *who, *args], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository in which `one` was trained in two sessions, and `two` in one."""
    folder = tmp_path_factory.mktemp("trained")
    write_tiny_store(folder / "tiny.h5")
    (folder / "gptfast.toml").write_text(PROFILE)
    git("init", "-q", folder=folder)
    git("add", "gptfast.toml", folder=folder)
    git("commit", "-q", "-m", "a profile", folder=folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main([*ONE, "--stop-at", "4"]) == 0
        (folder / "gptfast.toml").write_text(PROFILE + "# changed\n")
        assert main(GOES_ON) == 0
        assert main(["train", "--device", "cpu", "--profile", "tiny", "--run", "two"]) == 0
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def answer(capsys: Captured, *args: str) -> Any:
    capsys.readouterr()
    assert main(["runs", *args, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


# list ------------------------------------------------------------------------------------------


def test_list_is_newest_first_with_losses_and_size(folder: Path, capsys: Captured) -> None:
    two, one = answer(capsys, "list")
    assert (two["name"], one["name"]) == ("two", "one")
    losses = [r["loss"] for r in Run(folder / "runs" / "one").metrics() if r["kind"] == "eval"]
    assert len(losses) == 3
    assert (one["val_loss"], one["best_val_loss"]) == (losses[-1], min(losses))
    assert (one["profile"], one["step"], one["steps"]) == ("tiny", 6, 6)
    files = [p for p in (folder / "runs" / "one").rglob("*") if p.is_file()]
    assert one["n_bytes"] == sum(p.stat().st_size for p in files)
    assert main(["runs"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown] == ["run", "two", "one"]
    assert f"{losses[-1]:.4f}" in shown[2]


def test_a_damaged_run_is_listed_with_its_fault(folder: Path, capsys: Captured) -> None:
    run = Run(folder / "runs" / "one")
    (run.latest().folder / "meta.json").write_text("{")
    (run.folder / "metrics.jsonl").open("ab").write(b'\xff\x00{"kind": "st')
    two, one = sorted(answer(capsys, "list"), key=lambda one: str(one["name"]), reverse=True)
    assert "meta.json" in one["fault"]
    assert one["step"] == 6
    assert two["fault"] is None
    assert main(["runs", "list"]) == 0
    assert "meta.json" in capsys.readouterr().err


def test_a_run_that_lost_its_log_is_listed_and_goes_on(folder: Path, capsys: Captured) -> None:
    """And it keeps no other run of its profile from going on."""
    shutil.copytree("runs/two", "runs/tiny")
    shutil.copytree("runs/two", "runs/tiny-9")
    Path("runs/tiny-9/metrics.jsonl").unlink()
    os.utime("runs/tiny-9", (1.0, 1.0))
    assert [one["name"] for one in answer(capsys, "list")][-1] == "tiny-9"
    assert answer(capsys, "show", "tiny-9")["step"] == 6
    goes_on = ["train", "--device", "cpu", "--profile", "tiny", "--resume"]
    for name in ("tiny", "tiny-9"):
        assert main([*goes_on, "--set", "train.steps=7"]) == 0
        assert Run(folder / "runs" / name).steps()[-1] == 7
        assert [record["step"] for record in Run(folder / "runs" / name).metrics()][-1] == 7
        shutil.rmtree("runs/tiny", ignore_errors=True)


def test_list_says_when_there_is_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["runs"]) == 0
    said = capsys.readouterr()
    assert "no run under runs" in said.err
    assert said.out == ""


def test_listing_imports_no_torch_and_no_matplotlib(folder: Path) -> None:
    code = (
        "import sys; from gptfast.cli import main; assert main(['runs']) == 0; "
        "sys.exit(bool({'torch', 'numpy', 'matplotlib'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0


# show ------------------------------------------------------------------------------------------


def test_show_is_enough_to_repeat_the_run(folder: Path, capsys: Captured) -> None:
    facts = answer(capsys, "show", "one")
    with Store.open(folder / "tiny.h5") as store:
        assert facts["data"]["sha256"] == store.fingerprint
        assert facts["data"]["source"] == store.source
    assert facts["seed"] == 11
    assert (facts["skipped_steps"], facts["micro_batch"]) == (0, 2)
    assert facts["plugins"]["prefetch"]["package"] == "gptfast"
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["versions"]["python"] == sys.version.split()[0]
    commit = git("rev-parse", "HEAD", folder=folder)
    first, second = facts["sessions"]
    assert (first["after_step"], second["after_step"]) == (0, 4)
    assert first["command"] == ["gptfast", *ONE, "--stop-at", "4"]
    assert second["command"] == ["gptfast", *GOES_ON]
    assert (first["git_commit"], second["git_commit"]) == (commit, f"{commit}-dirty")
    logged = {r["step"]: r for r in Run(folder / "runs" / "one").metrics() if r["kind"] == "step"}
    assert first["first_step_s"] == logged[1]["step_ms"] / 1e3
    assert second["first_step_s"] == logged[5]["step_ms"] / 1e3
    named = {one["step"]: one["pointers"] for one in facts["checkpoints"]}
    run = Run(folder / "runs" / "one")
    assert list(named) == run.steps()
    assert named[6][0] == "latest"
    best = int((run.folder / "best").read_text().removeprefix("step-"))
    assert "best" in named[best]

    assert main(["runs", "show", "one"]) == 0
    shown = capsys.readouterr().out
    for said in (commit, facts["data"]["sha256"], "seed 11", "--stop-at 4", ", first step 0."):
        assert said in shown

    profile = str(run.folder / "profile.toml")
    assert main(["train", "--device", "cpu", "--config", profile, "--run", "again"]) == 0
    one, again = (
        load_file(Run(folder / "runs" / name).latest().folder / "model.safetensors")
        for name in ("one", "again")
    )
    assert all(torch.equal(one[name], again[name]) for name in one)


class Compiling(Plugin):
    """Takes 3 s of a made-up clock for its first step, and a quarter of one for each other."""

    claim = Claim.EXACT
    now = 0.0

    def before_step(self, event: Update) -> Want:
        type(self).now += 3.0 if event.step == 1 else 0.25
        return Want.NOTHING


def test_a_first_step_is_no_part_of_the_speed_of_those_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Compiling, "now", 0.0)
    monkeypatch.setattr(metrics, "time", SimpleNamespace(perf_counter=lambda: Compiling.now))
    logs: list[Logged] = []
    run = Run.create(tmp_path / "run", profile_toml="")
    with rig_of(compiling=Compiling) as rig:
        profile = rig.profile(train__steps=7, train__log_interval=4, train__eval_interval=0)
        trainer, listener = rig.trainer(profile, run=run)
        monkeypatch.setattr(listener, "logged", logs.append)
        with trainer:
            Compiling.now += 100.0  # what is built before the steps is not their time
            trainer.run()
    assert trainer.log.first_step_s == 3.0
    took = [record["step_ms"] for record in run.metrics() if record["kind"] == "step"]
    assert took == [3000.0, *[250.0] * 6]
    tokens = profile.train.batch_size * profile.model.block_size
    assert [(log.step_ms, log.tokens_per_s) for log in logs] == [(250.0, tokens / 0.25)] * 2


def test_show_counts_the_skipped_updates(folder: Path, capsys: Captured) -> None:
    log = folder / "runs" / "one" / "metrics.jsonl"
    lines = log.read_text().replace('"committed": true', '"committed": false', 2)
    log.write_text(lines)
    assert answer(capsys, "show", "one")["skipped_steps"] == 2
    assert main(["runs", "show", "one"]) == 0
    assert "6 of 6, 2 skipped" in capsys.readouterr().out


def test_without_a_repository_there_is_no_commit(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    shutil.rmtree(folder / ".git")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(folder.parent))
    assert main([*ONE[:-2], "--run", "three", "--stop-at", "2"]) == 0
    assert answer(capsys, "show", "three")["sessions"][0]["git_commit"] is None
    monkeypatch.setenv("PATH", "")
    assert main([*ONE[:-2], "--run", "four", "--stop-at", "2"]) == 0


# plot ------------------------------------------------------------------------------------------


def test_pictures_of_two_runs(folder: Path, capsys: Captured) -> None:
    assert main(["runs", "plot", "one", "two", "--out", "a.png", "--out", "a.svg"]) == 0
    assert capsys.readouterr().out == "wrote a.png\nwrote a.svg\n"
    assert Path("a.png").read_bytes().startswith(b"\x89PNG")
    svg = Path("a.svg").read_text(encoding="utf-8")
    words = "".join(ElementTree.fromstring(svg).itertext())
    for said in ("one, training", "one, validation", "two, training", "tokens/s", "loss", "step"):
        assert said in words
    assert sorted(path.name for path in folder.glob(".*.tmp")) == []
    assert main(["runs", "plot", "one", "two", "--out", "b.svg"]) == 0
    assert Path("b.svg").read_text(encoding="utf-8") == svg


def course(name: str = "a", *, n: int = 5000, rate: float = 100.0) -> Course:
    return Course(
        name,
        train=[(step, 4.0 / step) for step in range(1, n + 1)],
        val=[(step, 3.0) for step in range(100, n + 1, 100)],
        tokens_per_s=[(step, rate + step % 2) for step in range(1, n + 1)],
    )


def test_a_picture_shows_the_numbers_and_stays_small() -> None:
    svg = picture([course("a_$b", n=100_000)], suffix=".svg").decode()
    assert "a_$b" in svg or r"a_\$b" in svg
    assert len(svg) < 400_000
    assert svg != picture([course("a_$b", n=100_000, rate=200.0)], suffix=".svg").decode()


@pytest.fixture
def no_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)  # as if missing


def test_without_the_extra_only_pictures_are_refused(
    folder: Path, no_matplotlib: None, capsys: Captured
) -> None:
    assert main(["runs", "plot", "one", "--out", "a.png"]) == 2
    assert "gptfast[plot]" in capsys.readouterr().err
    assert not Path("a.png").exists()
    assert main(["runs", "plot", "one", "two"]) == 0
    shown = capsys.readouterr().out
    for name, letter in (("one", "A"), ("two", "B")):
        records = Run(folder / "runs" / name).metrics()
        for kind in ("step", "eval"):
            final = [record["loss"] for record in records if record["kind"] == kind][-1]
            assert f"{letter} {name} {final:.4f}" in shown
    assert shown.count("tokens/s") == 1


@pytest.mark.parametrize("width", [10, 40, 100])
@pytest.mark.parametrize("ascii_only", [False, True])
@pytest.mark.parametrize("n_runs", [1, 3])
def test_the_terminal_plot_fits(width: int, ascii_only: bool, n_runs: int) -> None:
    courses = [course("abc"[n], rate=100.0 + n) for n in range(n_runs)]
    text = "\n".join(
        part.plain for part in in_terminal(courses, width=width, ascii_only=ascii_only)
    )
    assert text.isascii() == ascii_only
    assert max(map(len, text.splitlines())) <= max(width, 24) + 8
    assert ("median" in text) is (n_runs == 1)


def test_runs_in_the_terminal_share_one_chart() -> None:
    """The faster one runs above the slower, each under its letter."""
    courses = [course("slow", n=50), course("fast", n=50, rate=200.0)]
    parts = [part.plain for part in in_terminal(courses, width=60, ascii_only=True)]
    assert parts[::2] == ["training loss", "validation loss", "tokens/s"]
    assert parts[3] == "too few steps to plot"
    rows = [row.partition("|")[2] for row in parts[5].splitlines()[:6]]
    assert "B" in rows[0]
    assert "A" in rows[-1]
    assert not any("A" in row and "B" in row for row in rows)
    assert "A slow 100   B fast 200" in parts[5]


def test_a_number_of_a_plugin_is_plotted_by_its_name(folder: Path, capsys: Captured) -> None:
    run = Run(folder / "runs" / "one")
    run.log({**record, "x.y": 2.0 * record["step"]} for record in run.metrics())
    run.log([{**run.metrics()[-1], "x.y": None}])
    assert main(["runs", "plot", "one", "--metric", "x.y", "--out", "a.svg"]) == 0
    words = "".join(ElementTree.fromstring(Path("a.svg").read_text("utf-8")).itertext())
    assert "x.y" in words
    assert "loss" not in words
    capsys.readouterr()
    assert main(["runs", "plot", "one", "--metric", "x.y"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("x.y\n")
    assert "A one " in shown
    assert main(["runs", "plot", "one", "--metric", "x.z"]) == 2
    assert "--metric x.z: not logged by run one: name one of x.y" in capsys.readouterr().err


def test_a_run_of_one_step_has_no_curve_and_says_so() -> None:
    parts = [part.plain for part in in_terminal([course(n=1)], width=60)]
    assert "too few steps to plot" in parts


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["show", "on"], "on: no run: did you mean one?"),
        (["plot", "nothing"], "nothing: no run"),
        (["plot", "one", "--out", "a.pdf"], "a.pdf: unknown picture format"),
        (["plot", "one", "--out", "missing/a.png"], "cannot be written"),
        (["plot"], "RUN"),
    ],
)
def test_what_cannot_be_shown_is_refused_in_one_line(
    folder: Path, capsys: Captured, args: list[str], said: str
) -> None:
    assert main(["runs", *args]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
