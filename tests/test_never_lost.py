"""A run survives what happens to it: damaged files, failing plugins, signals, kills, full disks."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plugin_helpers import found
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from gptfast.cli import main
from gptfast.contract.tiny import write_tiny_store
from gptfast.errors import Refused
from gptfast.files import replace_text
from gptfast.host import registry
from gptfast.optim import PlainStepper
from gptfast.plugin import Evaluated, Plugin, Stepped, Stepper, Want
from gptfast.run import folder as run_folder
from gptfast.run import session
from gptfast.run.checkpoint import Checkpoint, save_checkpoint
from gptfast.run.folder import Run, only_writer
from gptfast.run.signals import signals_stop
from gptfast.run.state import State

MARKER = "PICKLE-CODE-RAN"

Captured = pytest.CaptureFixture[str]
Tally = Callable[..., None]


PROFILE = """
[profiles.tiny]
[profiles.tiny.model]
n_layer = 2
n_head = 2
n_embd = 32
block_size = 16
[profiles.tiny.data]
path = "tiny.h5"
[profiles.tiny.train]
steps = 8
batch_size = 2
learning_rate = 1e-2
eval_interval = 0
save_interval = 2
keep_checkpoints = 3
log_interval = 1
sample_tokens = 0
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs of the same training: `one` up to step 6, `two` up to step 7."""
    folder = tmp_path_factory.mktemp("trained")
    write_tiny_store(folder / "tiny.h5")
    (folder / "gptfast.toml").write_text(PROFILE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, stop in (("one", "6"), ("two", "7")):
            train("--profile", "tiny", "--run", name, "--stop-at", stop)
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of `trained`, which is the current folder."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(folder: Path) -> Run:
    return Run(folder / "runs" / "one")


def train(*args: str) -> int:
    return main(["train", "--device", "cpu", *args])


def resume(*args: str) -> int:
    return train("--run", "one", "--resume", *args)


def weights(run: Run) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = load_file(run.latest().folder / "model.safetensors")
    return tensors


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def said_in_one_line(captured: Captured) -> str:
    error = captured.readouterr().err
    assert error.count("\n") == 1, error
    return error


# damaged checkpoints ---------------------------------------------------------------------------


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def zeroed(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def zeroed_at_the_end(path: Path) -> None:
    """What a power failure leaves of a file whose last blocks never reached the disk."""
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 3 // 4] + bytes(len(data) - len(data) * 3 // 4))


class RunsCode:
    def __reduce__(self) -> tuple[object, ...]:
        return print, (MARKER,)


def hostile_zip(path: Path) -> None:
    """A state that torch would have written, but for a call in its pickle."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            hostile = name.endswith("/data.pkl")
            archive.writestr(name, pickle.dumps(RunsCode(), 2) if hostile else data)


def hostile_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps({"progress": RunsCode()}))


Damage = Callable[[Path], None]
DAMAGES = [
    *[
        (name, damage)
        for name in ("model.safetensors", "trainer.pt", "meta.json")
        for damage in (cut, zeroed, hostile_pickle)
    ],
    ("trainer.pt", Path.unlink),
    ("trainer.pt", lambda path: path.write_bytes(b"")),
    ("trainer.pt", lambda path: path.write_text("a text under this name")),
    ("model.safetensors", zeroed_at_the_end),
    ("trainer.pt", zeroed_at_the_end),
    ("trainer.pt", hostile_zip),
    ("meta.json", lambda path: path.write_text('{"format": 1, "step": 6, "profile": {}}')),
]


@pytest.mark.parametrize(("name", "damage"), DAMAGES)
def test_resume_falls_back_to_the_newest_checkpoint_that_loads(
    run: Run, capsys: Captured, tally: Tally, name: str, damage: Damage
) -> None:
    """RES-07, and the result is the one of a run to which nothing happened."""
    damage(run.checkpoint_folder(6) / name)
    assert resume("--stop-at", "7") == 0
    out = capsys.readouterr()
    said = [line for line in (out.out + out.err).splitlines() if "resumed from step 4" in line]
    assert len(said) == 1
    assert "step-000006" in said[0]
    assert name in said[0]
    assert "step-000006.damaged" in said[0]
    assert MARKER not in out.out + out.err
    assert run.checkpoints.joinpath("step-000006.damaged").is_dir()
    assert (run.folder / "latest").read_text() == "step-000007\n"
    assert run.latest().step == 7
    assert equal(weights(run), weights(Run(run.folder.with_name("two"))))
    steps = [record["step"] for record in run.metrics() if record["kind"] == "step"]
    assert steps == list(range(1, 8))
    tally("faults injected")
    tally("resumes compared")


def test_pointers_name_no_checkpoint_that_was_set_aside(run: Run) -> None:
    (run.folder / "best").write_text("step-000006\n")
    cut(run.checkpoint_folder(6) / "trainer.pt")
    assert resume("--stop-at", "4") == 0
    assert (run.folder / "latest").read_text() == "step-000004\n"
    assert not (run.folder / "best").exists()


def test_falling_back_behind_the_best_leaves_no_pointer_to_a_deleted_one(run: Run) -> None:
    """Step 4 says that 2 was the best, and then 6 was better and 2 was deleted."""
    path = run.checkpoint_folder(4) / "trainer.pt"
    state = torch.load(path, weights_only=True)
    state["progress"].update(best_step=2, best_loss=2.0)
    torch.save(state, path)
    cut(run.checkpoint_folder(6) / "trainer.pt")
    shutil.rmtree(run.checkpoint_folder(2))
    assert resume("--stop-at", "4") == 0
    assert not (run.folder / "best").exists()


def test_resume_falls_back_over_several_and_refuses_when_none_loads(
    run: Run, capsys: Captured
) -> None:
    for step, damage in ((6, cut), (4, zeroed)):
        damage(run.checkpoint_folder(step) / "trainer.pt")
    resumable = run.newest_intact()
    assert resumable.checkpoint.step == 2
    assert list(resumable.damaged) == [6, 4]
    shutil.rmtree(run.checkpoint_folder(2))
    assert resume() == 2
    assert "none of its 2 checkpoints loads" in said_in_one_line(capsys)
    assert run.steps() == [4, 6], "a refused command changes nothing"


def test_a_refused_resume_leaves_damaged_checkpoints_where_they_are(run: Run) -> None:
    cut(run.checkpoint_folder(6) / "trainer.pt")
    assert resume("--set", "model.n_layer=3") == 2
    assert run.steps() == [2, 4, 6]


@pytest.mark.parametrize("command", ["eval", "generate"])
@pytest.mark.parametrize(("name", "damage"), [d for d in DAMAGES if d[0] != "trainer.pt"])
def test_reading_a_damaged_checkpoint_is_refused(
    run: Run, capsys: Captured, tally: Tally, command: str, name: str, damage: Damage
) -> None:
    damage(run.checkpoint_folder(6) / name)
    assert main([command, "one", "--device", "cpu"]) == 2
    error = said_in_one_line(capsys)
    assert name in error
    assert MARKER not in error
    tally("faults injected")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A checkpoint of a few numbers."""
    state = dict.fromkeys(("progress", "optimizer", "random"), 0)
    return save_checkpoint(
        tmp_path_factory.mktemp("small") / "step-000001",
        model={"a": torch.arange(50.0), "b": torch.ones(3, 4)},
        trainer={**state, "plugins": torch.arange(60)},
        tokenizer=None,
        meta={},
    )


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_no_number_changes_unnoticed(small: Checkpoint, data: st.DataObject) -> None:
    """A damaged byte is refused in one line, or stands where it means nothing."""
    name = data.draw(st.sampled_from(["model.safetensors", "trainer.pt"]))
    path = small.folder / name
    good = path.read_bytes()
    bad = bytearray(good)
    bad[data.draw(st.integers(0, len(good) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(bytes(bad))
    model = nn.Module()
    model.a, model.b = nn.Buffer(torch.zeros(50)), nn.Buffer(torch.zeros(3, 4))
    refused = ""
    try:
        small.load_model(model)
        state = small.load_trainer()
    except Refused as error:
        refused = str(error)
    finally:
        path.write_bytes(good)
    if refused:
        assert name in refused
        assert "\n" not in refused
    else:
        assert torch.equal(model.a, torch.arange(50.0))
        assert torch.equal(model.b, torch.ones(3, 4))
        assert torch.equal(state["plugins"], torch.arange(60))


# weights from elsewhere ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prefix", ["_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module."]
)
def test_weights_with_the_prefix_of_a_wrapper_load(run: Run, capsys: Captured, prefix: str) -> None:
    """RES-04: evaluating, generating and resuming see the same weights; saved names are plain."""
    assert all(not name.startswith(("_orig_mod", "module")) for name in weights(run))
    path = run.latest().folder / "model.safetensors"
    foreign = {prefix + name: tensor for name, tensor in weights(run).items()}
    answers = []
    for change in (False, True):
        if change:
            save_file(foreign, path)
        assert main(["eval", "one", "--device", "cpu", "--json"]) == 0
        assert main(["generate", "one", "--device", "cpu", "--prompt", "AB", "--seed", "3"]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]
    assert resume("--stop-at", "7") == 0
    assert equal(weights(run), weights(Run(run.folder.with_name("two"))))


def test_weights_of_another_model_are_refused(run: Run, capsys: Captured) -> None:
    """RES-04: up to five names of each kind."""
    path = run.latest().folder / "model.safetensors"
    save_file({f"other.{name}": tensor for name, tensor in weights(run).items()}, path)
    for command in (["train", "--resume", "--run", "one"], ["eval", "one"], ["generate", "one"]):
        assert main([*command, "--device", "cpu"]) == 2
        error = said_in_one_line(capsys)
        assert error.count("other.") == 5
        assert "lacks: " in error


# failing in the middle of a training -----------------------------------------------------------


class FailsAt(Plugin.Options):
    hook: str
    step: int = 5


class Fails(Plugin):
    """Raises in one hook, once `step` steps are done."""

    Options = FailsAt

    def __init__(self, options: FailsAt) -> None:
        super().__init__(options)
        self.steps = 0

    def _fail(self, hook: str) -> None:
        if self.options.hook == hook and self.steps == self.options.step:
            raise RuntimeError(f"on purpose in {hook}")

    def micro_scope(self, last: bool) -> AbstractContextManager[object]:
        self._fail("micro_scope")
        return nullcontext()

    def build_stepper(self) -> Stepper:
        return HalfAnUpdate(self)

    def step(self, event: Stepped) -> Want:
        self.steps = event.step
        self._fail("step")
        self._fail("step and state")
        return Want.EVAL if self.options.hook == "evaluated" else Want.NOTHING

    def evaluated(self, event: Evaluated) -> Want:
        self._fail("evaluated")
        return Want.NOTHING

    def state(self) -> dict[str, Any]:
        if self.options.hook == "step and state":
            raise RuntimeError("no state either")
        return {"steps": self.steps}

    def load_state(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


class HalfAnUpdate(PlainStepper):
    def __init__(self, owner: Fails) -> None:
        self.owner = owner

    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        self.owner._fail("backward")

    def step(self, optimizer: Optimizer) -> bool:
        if self.owner.options.hook == "stepper" and self.owner.steps == self.owner.options.step:
            optimizer.param_groups[0]["params"][0].data.zero_()
            self.owner._fail("stepper")
        return super().step(optimizer)


class Counts(Plugin):
    """Comes after `Fails` in the profile, and must have seen the step too."""

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.seen: list[int] = []

    def step(self, event: Stepped) -> Want:
        self.seen.append(event.step)
        return Want.NOTHING

    def state(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {
        **registry.discover(),
        **found(fails=Fails, counts=Counts, signals=Signals, hangs=Hangs),
    }
    monkeypatch.setattr(registry, "discover", lambda: known)


RARELY = ("--profile", "tiny", "--run", "rare", "--set", "train.save_interval=1000")


@pytest.mark.parametrize(
    ("hook", "saved"),
    [("step", [5]), ("micro_scope", [5]), ("evaluated", [3, 4, 5]), ("stepper", [])],
)
def test_the_last_finished_step_is_saved_before_an_error_is_reported(
    folder: Path, plugins: None, capsys: Captured, tally: Tally, hook: str, saved: list[int]
) -> None:
    """The error is the one of the plugin; half an update is never saved."""
    code = train(*RARELY, "--set", f"plugins.fails.hook={hook}", "--plugin", "counts")
    assert code == 1
    errors = capsys.readouterr().err.splitlines()
    assert f"on purpose in {hook}" in errors[-1]
    assert not [line for line in errors if "Traceback" in line]
    rare = Run(folder / "runs" / "rare")
    assert rare.steps() == saved
    tally("faults injected")
    if not saved:
        return
    rare.latest().check()
    counted = rare.latest().load_trainer()["plugins"]["counts"]["state"]["seen"]
    assert counted == [1, 2, 3, 4, 5]
    going_on = ("--set", "plugins.fails.hook=none", "--stop-at", "7")
    assert train("--run", "rare", "--resume", *going_on) == 0
    assert equal(weights(rare), weights(Run(folder / "runs" / "two")))
    steps = [record["step"] for record in rare.metrics() if record["kind"] == "step"]
    assert steps == list(range(1, 8))
    tally("resumes compared")


def test_a_step_that_failed_draws_its_random_numbers_again(
    folder: Path, plugins: None, tally: Tally
) -> None:
    dropout = ("--set", "model.dropout=0.2")
    assert train("--profile", "tiny", "--run", "straight", *dropout, "--stop-at", "7") == 0
    assert train(*RARELY, *dropout, "--set", "plugins.fails.hook=backward") == 1
    going_on = ("--set", "plugins.fails.hook=none", "--stop-at", "7")
    assert train("--run", "rare", "--resume", *going_on) == 0
    rare, straight = (Run(folder / "runs" / name) for name in ("rare", "straight"))
    assert equal(weights(rare), weights(straight))
    tally("faults injected")
    tally("resumes compared")


def test_the_first_error_is_reported_also_when_saving_fails(
    folder: Path, plugins: None, capsys: Captured
) -> None:
    assert train(*RARELY, "--set", 'plugins.fails.hook="step and state"') == 1
    out = capsys.readouterr()
    assert "on purpose in step and state" in out.err.splitlines()[-1]
    assert "no state either" in out.out + out.err
    assert Run(folder / "runs" / "rare").steps() == []


def test_an_error_after_a_save_neither_repeats_it_nor_deletes_older_ones(
    folder: Path, plugins: None
) -> None:
    often = ("--set", "train.save_interval=1", "--set", "train.keep_checkpoints=2")
    assert train(*RARELY, *often, "--set", "plugins.fails.hook=step") == 1
    assert Run(folder / "runs" / "rare").steps() == [3, 4, 5]


# signals ---------------------------------------------------------------------------------------


class SignalsAt(Plugin.Options):
    at: str
    """ "evaluation", "sample" or "save"."""
    times: int = 1
    number: int = int(signal.SIGINT)
    scope: int = 1
    """Which evaluation or sample, counted from 1."""


class Signals(Plugin):
    """Sends its own process signals in step 4's evaluation, sample or save."""

    Options = SignalsAt

    def __init__(self, options: SignalsAt) -> None:
        super().__init__(options)
        self.steps = 0
        self.forwards: list[int] = []
        self.evaluating = False
        self.scopes = 0
        SEEN.append(self)

    def _send(self) -> None:
        for _ in range(self.options.times):
            os.kill(os.getpid(), self.options.number)

    @contextmanager
    def eval_scope(self) -> Iterator[None]:
        self.evaluating = True
        self.scopes += 1
        yield
        self.evaluating = False

    def forward_scope(self) -> AbstractContextManager[object]:
        if self.evaluating and self.scopes == self.options.scope:
            self.forwards.append(self.steps)
            if len(self.forwards) == 1:
                self._send()
        return nullcontext()

    def step(self, event: Stepped) -> Want:
        self.steps = event.step
        if event.step == 4:
            return {"evaluation": Want.EVAL, "save": Want.SAVE}.get(self.options.at, Want.NOTHING)
        return Want.NOTHING

    def state(self) -> dict[str, Any]:
        if self.options.at == "save" and self.steps == 4:
            self._send()
        return {}


SEEN: list[Signals] = []


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        (signal.SIGTERM, 143),
        (signal.SIGHUP, 129),
        (signal.SIGUSR1, 138),
        (signal.SIGQUIT, 131),
        (signal.SIGXCPU, 152),
    ],
)
@pytest.mark.parametrize(
    ("at", "settings"),
    [
        ("evaluation", []),
        ("sample", ["train.sample_interval=4", "train.sample_tokens=14"]),
    ],
)
def test_a_signal_ends_an_evaluation_and_a_sample_at_once(
    folder: Path,
    plugins: None,
    capsys: Captured,
    tally: Tally,
    at: str,
    settings: list[str],
    number: signal.Signals,
    code: int,
) -> None:
    """CLI-06 and CLI-08: not a batch nor a token later; the step is saved."""
    sets = [f"--set=plugins.signals.{key}" for key in (f"at={at}", f"number={int(number)}")]
    sets += [f"--set={key}" for key in settings]
    assert train(*RARELY, *sets) == code
    assert number.name in capsys.readouterr().err
    assert SEEN.pop().forwards == [4]
    rare = Run(folder / "runs" / "rare")
    assert rare.steps() == [4]
    assert train("--run", "rare", "--resume", "--without", "signals", "--stop-at", "7") == 0
    assert equal(weights(rare), weights(Run(folder / "runs" / "two")))
    evaluated = [r["step"] for r in rare.metrics() if r["kind"] == "eval"]
    assert evaluated == ([4] if at == "evaluation" else []), "made by the resumed run"
    tally("faults injected")
    tally("resumes compared")


@pytest.mark.parametrize(("times", "saved"), [(1, [4]), (2, [4]), (3, [])])
def test_ctrl_c_during_a_save_never_leaves_a_cut_file(
    folder: Path, plugins: None, times: int, saved: list[int]
) -> None:
    """The save is finished after a second Ctrl-C, and cleared away after a third."""
    sets = ("--set", "plugins.signals.at=save", "--set", f"plugins.signals.times={times}")
    assert train(*RARELY, *sets) == 130
    rare = Run(folder / "runs" / "rare")
    assert rare.steps() == saved
    assert [path.name for path in rare.checkpoints.iterdir()] == [f"step-{s:06d}" for s in saved]
    if saved:
        rare.newest_intact()


# kills and full disks --------------------------------------------------------------------------


def test_a_run_killed_while_it_saves_is_whole(tmp_path: Path, trained: Path, tally: Tally) -> None:
    """RES-06: 50 times `kill -9`, and the run equals one that was never killed.

    And a save is whole or absent before whichever of its file operations it is killed.
    """
    shutil.copy(trained / "tiny.h5", tmp_path)
    often = PROFILE.replace("save_interval = 2", "save_interval = 1")
    often = often.replace("steps = 8", "steps = 100000").replace("[profiles.tiny.", "[")
    (tmp_path / "gptfast.toml").write_text(often.replace("[profiles.tiny]\n", ""))
    program = Path(__file__).with_name("killed_saves.py")
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path), "50", "7"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(program.parent.parent), "OMP_NUM_THREADS": "1"},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["kills"] == 50
    assert found["kills_in_a_save"] >= 5
    assert found["operations"] >= 20
    assert found["logged"] == list(range(1, found["steps"] + 1))
    assert found["unfinished"] == []
    assert found["equal"]
    tally("kills survived", found["kills"] + found["operations"])
    tally("resumes compared")


@contextmanager
def no_file_above(n_bytes: int) -> Iterator[None]:
    """What a full disk does to a file that grows."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("name", ["model.safetensors", "trainer.pt"])
def test_a_full_disk_leaves_the_old_checkpoint(
    run: Run, capsys: Captured, tally: Tally, name: str
) -> None:
    """RES-06: exit 1 with the path and the bytes needed; with room again the run goes on."""
    folder = run.checkpoint_folder(6)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with no_file_above(len(before[name]) - 1):
        assert resume("--stop-at", "7") == 1
    error = said_in_one_line(capsys)
    assert "step-000007: cannot save" in error
    assert "File too large" in error  # what the system said, from torch too
    needed = int(error.split("about ")[1].split(" bytes")[0].replace(",", ""))
    size = sum(len(before[name]) for name in ("model.safetensors", "trainer.pt"))
    assert size * 0.8 < needed < size
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert list(run.folder.rglob(".*")) == []
    assert resume("--stop-at", "7") == 0
    assert equal(weights(run), weights(Run(run.folder.with_name("two"))))
    tally("faults injected")
    tally("resumes compared")


@pytest.mark.parametrize("name", ["latest", "best", "metrics.jsonl"])
def test_a_disk_full_at_a_small_file_is_said_so_and_loses_no_step(
    run: Run, capsys: Captured, monkeypatch: pytest.MonkeyPatch, tally: Tally, name: str
) -> None:
    def full(path: Path, text: str) -> None:
        if path.name == name:
            raise OSError(28, "No space left on device")
        replace_text(path, text)

    (run.folder / "best").unlink(missing_ok=True)
    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "replace_text", full)
        assert resume("--stop-at", "7", "--set", "train.eval_interval=7") == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"{name}: cannot be written (No space left on device): free disk space" in error
    assert "--resume" in error
    assert resume("--stop-at", "7") == 0
    assert equal(weights(run), weights(Run(run.folder.with_name("two"))))
    tally("faults injected")


def test_a_kill_between_two_renames_loses_nothing(run: Run) -> None:
    """A checkpoint that was being replaced comes back; one that was being deleted is gone."""
    run.checkpoint_folder(6).rename(run.checkpoints / ".step-000006.old")
    run.checkpoint_folder(2).rename(run.checkpoints / ".step-000002.gone")
    (run.folder / ".latest.tmp").write_text("step-")
    again = Run.resumed(run.folder)
    assert again.steps() == [4, 6]
    assert again.newest_intact().checkpoint.step == 6
    assert list(run.folder.rglob(".*")) == []


def test_two_processes_do_not_train_one_run(tmp_path: Path) -> None:
    with only_writer(tmp_path / "one"):
        other = subprocess.run(
            [sys.executable, "-c", HOLD.format(folder=str(tmp_path / "one"))],
            capture_output=True,
            text=True,
        )
    assert other.returncode == 3, other.stderr
    assert "another process trains this run" in other.stdout
    with only_writer(tmp_path / "one"):  # free again
        pass


HOLD = """
import sys
from pathlib import Path
from gptfast.errors import Refused
from gptfast.run.folder import only_writer
try:
    with only_writer(Path({folder!r})):
        pass
except Refused as refused:
    print(refused)
    sys.exit(3)
"""


def refused_in(folder: Path) -> None:
    with only_writer(folder):
        Run.create(folder, profile_toml="")
        raise Refused("too short a text")


def test_a_refused_run_leaves_no_folder_and_an_old_one_stays(tmp_path: Path) -> None:
    for folder in (tmp_path / "new", tmp_path / "old"):
        if folder.name == "old":
            folder.mkdir()
        with pytest.raises(Refused):
            refused_in(folder)
    assert not (tmp_path / "new").exists()
    assert (tmp_path / "old").exists()


def test_sigterm_after_sigint_does_not_cut_the_step_short() -> None:
    told: list[str] = []
    trainer = SimpleNamespace(can_be_cut=True, interrupt=told.append)
    with signals_stop(cast("State", trainer)) as caught:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert caught == [signal.SIGINT, signal.SIGTERM]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert told == ["SIGINT", "SIGTERM"]


def test_a_second_signal_waits_for_a_save_and_a_third_does_not() -> None:
    trainer = SimpleNamespace(can_be_cut=False, interrupt=lambda reason: None)
    with signals_stop(cast("State", trainer), grace_s=0.05) as caught:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        time.sleep(0.2)  # nor does the alarm cut it
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert caught == [signal.SIGTERM, signal.SIGTERM]


# what takes too long ---------------------------------------------------------------------------


class HangsIn(Plugin.Options):
    place: str
    number: int
    seconds: float = 30.0


class Hangs(Plugin):
    """Sends its process a signal, once step 4 is done, and then does not come to an end."""

    Options = HangsIn

    def __init__(self, options: HangsIn) -> None:
        super().__init__(options)
        self.steps = 0

    def hang(self, place: str, *, after: int = 4) -> None:
        if place != self.options.place or self.steps != after:
            return
        os.kill(os.getpid(), self.options.number)
        if self.options.seconds == 0:
            raise RuntimeError("a process of ours was ended by the same signal")
        end = time.monotonic() + self.options.seconds
        while time.monotonic() < end:
            time.sleep(0.01)

    def wrap_model(self, model: nn.Module) -> nn.Module:
        self.hang("build", after=0)
        return model

    def micro_scope(self, last: bool) -> AbstractContextManager[object]:
        self.hang("step")
        return nullcontext()

    def build_stepper(self) -> Stepper:
        return HangingStepper(self)

    def step(self, event: Stepped) -> Want:
        self.steps = event.step
        return Want.EVAL if self.options.place == "evaluation" and self.steps == 4 else Want.NOTHING

    @contextmanager
    def eval_scope(self) -> Iterator[None]:
        self.hang("evaluation")
        yield

    def state(self) -> dict[str, Any]:
        self.hang("save")
        return {"steps": self.steps}

    def load_state(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


class HangingStepper(PlainStepper):
    def __init__(self, owner: Hangs) -> None:
        self.owner = owner

    def step(self, optimizer: Optimizer) -> bool:
        self.owner.hang("update")
        return super().step(optimizer)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize(
    ("place", "seconds", "saved", "said"),
    [
        ("build", 30.0, [], "before a first step was finished"),
        ("step", 30.0, [4], "after step 4, which is saved"),
        ("step", 0.0, [4], "after step 4, which is saved"),
        ("evaluation", 30.0, [4], "after step 4, which is saved"),
        ("update", 0.6, [5], "after step 5, which is saved"),
        ("save", 0.6, [4], "after step 4, which is saved"),
    ],
)
def test_what_does_not_end_is_left_and_the_last_finished_step_saved(
    folder: Path,
    plugins: None,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
    tally: Tally,
    place: str,
    seconds: float,
    saved: list[int],
    said: str,
    number: signal.Signals,
    code: int,
) -> None:
    """CLI-06 and CLI-08: one signal is enough. An update and a save are waited for, not cut."""
    monkeypatch.setattr(session, "signals_stop", partial(signals_stop, grace_s=0.2))
    options = {"place": place, "number": int(number), "seconds": seconds}
    sets = [f"--set=plugins.hangs.{key}={value}" for key, value in options.items()]
    if place == "save":
        sets.append("--set=train.save_interval=4")
    begun = time.monotonic()
    assert train(*RARELY, *sets) == code
    assert time.monotonic() - begun < 10
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"{number.name} {said}" in error
    rare = Run(folder / "runs" / "rare")
    assert rare.steps() == saved
    tally("faults injected")
    if not saved:
        return
    assert train("--run", "rare", "--resume", "--without", "hangs", "--stop-at", "7") == 0
    assert equal(weights(rare), weights(Run(folder / "runs" / "two")))
    evaluated = [r["step"] for r in rare.metrics() if r["kind"] == "eval"]
    assert evaluated == ([4] if place == "evaluation" else [])
    tally("resumes compared")


@pytest.mark.parametrize(("at", "scope"), [("evaluation", 1), ("sample", 2)])
def test_a_signal_after_the_last_step_says_what_is_missing(
    folder: Path, plugins: None, capsys: Captured, at: str, scope: int
) -> None:
    """The evaluation that was cut short is made by --resume."""
    last = ("--set", "train.steps=4", "--set", "train.sample_tokens=14")
    last += ("--set", f"plugins.signals.scope={scope}")
    assert train(*RARELY, *last, "--set", f"plugins.signals.at={at}") == 130
    error = said_in_one_line(capsys)
    rare = Run(folder / "runs" / "rare")
    if at == "evaluation":
        assert "SIGINT in the evaluation after the last step, 4, which is saved" in error
        assert "gptfast train --resume --run rare makes it" in error
        assert [r for r in rare.metrics() if r["kind"] == "eval"] == []
        assert train("--run", "rare", "--resume", "--without", "signals") == 0
    else:
        assert "SIGINT after the last step, 4, which is saved: the run is complete" in error
    assert [r["step"] for r in rare.metrics() if r["kind"] == "eval"] == [4]


@pytest.mark.skipif(os.name == "nt", reason="modes are POSIX")
@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_all_files_of_a_run_have_the_modes_that_the_umask_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gptfast.toml").write_text(PROFILE)
    before = os.umask(umask)
    try:
        write_tiny_store(tmp_path / "tiny.h5")
        assert train("--profile", "tiny", "--run", "one", "--stop-at", "2") == 0
    finally:
        os.umask(before)
    files = [tmp_path / "tiny.h5", *(tmp_path / "runs").rglob("*")]
    modes = {path.name: path.stat().st_mode & 0o777 for path in files if path.is_file()}
    assert "model.safetensors" in modes
    modes.pop("lock")  # nobody else's to take: filelock's own
    assert modes == dict.fromkeys(modes, 0o666 & ~umask)
