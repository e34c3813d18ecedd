"""Stopped and resumed equals uninterrupted; what may change on the way, and what may not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plugin_helpers import found
from torch import Tensor
from torch.optim import Optimizer

from gptfast.cli import main
from gptfast.contract.tiny import build_rig, write_tiny_store
from gptfast.device.machine import find_machine
from gptfast.host import registry
from gptfast.host.registry import discover
from gptfast.model import GPT
from gptfast.optim import PlainStepper
from gptfast.plugin import Evaluated, Plugin, Profile, Stepped, Stepper, Want
from gptfast.run.folder import Run
from gptfast.run.verify_resume import differences, everything_in


class Averages(Plugin):
    """A plugin whose state is a tensor and two counts, and which steers the run by them."""

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.mean = torch.zeros(())
        self.count = 0
        self.heard: list[float] = []

    def build_stepper(self) -> Stepper:
        return Steered(self)

    def step(self, event: Stepped) -> Want:
        self.count += 1
        self.mean += (event.loss - self.mean) / self.count
        return Want.NOTHING

    def evaluated(self, event: Evaluated) -> Want:
        self.heard.append(event.loss)
        return Want.NOTHING

    def state(self) -> dict[str, Any]:
        return {"mean": self.mean, "count": self.count, "heard": self.heard}

    def load_state(self, state: dict[str, Any]) -> None:
        self.mean, self.count, self.heard = state["mean"], state["count"], state["heard"]


class Steered(PlainStepper):
    """Gradients grow with what was averaged and heard: to lose that is to lose the run."""

    def __init__(self, owner: Averages) -> None:
        self.owner = owner

    def unscale(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(1 + self.owner.mean + sum(self.owner.heard))


KNOWN = {**discover(), **found(averages=Averages)}

Tally = Callable[..., None]


def losses(run: Run) -> dict[int, tuple[float, float]]:
    """Loss and learning rate of each step, by step; each step once."""
    records = [r for r in run.metrics() if r["kind"] == "step"]
    by_step = {r["step"]: (r["loss"], r["learning_rate"]) for r in records}
    assert len(by_step) == len(records)
    return by_step


def weights(run: Run) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(run.latest().folder / "model.safetensors")


STEERED: dict[str, Any] = {"averages": {}}
GUARD = {"least": 3, "window": 8, "z": 1.5}
EVERYTHING: dict[str, Any] = {
    "ema": {"decay": 0.9},
    "muon": {},
    "spike-guard": GUARD,
    "prefetch": {},
    "activation-checkpointing": {},
}


@pytest.mark.parametrize(
    ("plugins", "stops"),
    [
        pytest.param(STEERED, (10,), id="mid-epoch, later epochs"),
        pytest.param(STEERED, (4,), id="between two epochs"),
        pytest.param(STEERED, (3, 7, 17), id="three stops"),
        pytest.param({**STEERED, "loader": {"workers": 0}}, (10,), id="no workers"),
        pytest.param({**STEERED, "loader": {"workers": 2}}, (10,), id="two workers"),
        pytest.param({"ema": {"decay": 0.9}}, (5, 12), id="ema"),
        pytest.param({"muon": {}}, (5, 12), id="muon"),
        pytest.param({"spike-guard": GUARD}, (5, 12), id="spike-guard"),
        pytest.param(EVERYTHING, (5, 12), id="all together"),
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one(
    tmp_path: Path, plugins: dict[str, dict[str, Any]], stops: tuple[int, ...], tally: Tally
) -> None:
    """RES-01: with dropout and micro-batches, everything in the last checkpoint is equal."""
    with build_rig(plugins, machine=find_machine("cpu"), found=KNOWN) as rig:
        profile = rig.profile(
            model__dropout=0.1,
            train__micro_batch=2,
            train__steps=20,
            train__eval_interval=5,
        )
        straight = Run.create(tmp_path / "straight", profile_toml=profile.to_toml())
        rig.train(profile, run=straight)
        stopped = Run.create(tmp_path / "stopped", profile_toml=profile.to_toml())
        rig.train(profile, run=stopped, until=stops[0])
        for stop in (*stops[1:], None):
            rig.train(profile, run=stopped, checkpoint=stopped.latest(), until=stop)
        assert losses(stopped) == losses(straight)
        assert sorted(losses(stopped)) == list(range(1, 21))
        one, other = held(straight), held(stopped)
        assert len(one) > 100
        assert differences(one, other) == {}
        assert evaluations(stopped) == evaluations(straight)
        assert [step for step, _, _ in evaluations(stopped)] == [5, 10, 15, 20]
        tally("resumes compared")


def evaluations(run: Run) -> list[tuple[int, float, bool]]:
    return [(r["step"], r["loss"], r["best"]) for r in run.metrics() if r["kind"] == "eval"]


def held(run: Run) -> dict[str, Any]:
    return everything_in(run, run.latest())


# through the command line ----------------------------------------------------------------------

Train = Callable[..., int]
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inputs: Path) -> Train:
    """`train(*args)`: `gptfast train` in an empty folder on a tiny file."""
    write_tiny_store(tmp_path / "tiny.h5")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "discover", lambda: KNOWN)
    (tmp_path / "gptfast.toml").write_text(
        (inputs / "profiles" / "tiny.toml").read_text() + '\n[data]\npath = "tiny.h5"\n'
    )

    def train(*args: str) -> int:
        small = ("--set", "model.block_size=16") if "--resume" not in args else ()
        return main(["train", "--run", "one", "--device", "cpu", *small, *args])

    return train


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "runs" / "one")


def test_ten_and_ten_is_twenty(train: Train, run: Run, tmp_path: Path) -> None:
    assert train("--stop-at", "10") == 0
    assert run.steps() == [10]
    assert train("--resume") == 0
    assert train("--run", "two") == 0
    assert losses(run) == losses(Run(tmp_path / "runs" / "two"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("model.n_layer=3", "model.n_layer 2 -> 3"),
        ("model.block_size=32", "model.block_size 16 -> 32"),
    ],
)
def test_another_shape_is_refused_in_one_line(
    train: Train, run: Run, capsys: Captured, change: str, said: str
) -> None:
    """RES-05."""
    assert train("--stop-at", "2") == 0
    capsys.readouterr()
    assert train("--resume", "--set", change) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert run.steps() == [2]


@pytest.mark.parametrize("what", ["data", "tokenizer"])
def test_another_data_file_or_tokenizer_is_refused(
    train: Train, run: Run, capsys: Captured, what: str
) -> None:
    """RES-05: in one line with the old and the new."""
    assert train("--stop-at", "2") == 0
    other = run.folder.parent.parent / "other.h5"
    if what == "data":
        write_tiny_store(other, train_tokens=300)
    else:
        text = other.with_suffix(".txt")
        text.write_text("some other text " * 40)
        assert main(["prepare", str(text), "--tokenizer", "bytes", "--out", str(other)]) == 0
    capsys.readouterr()
    assert train("--resume", "--set", "data.path=other.h5") == 2
    error = capsys.readouterr().err
    assert f"cannot resume with another {what}" in error
    assert ("tiny.h5 -> " in error) if what == "data" else ("chars -> bytes" in error)
    assert error.count("\n") == 1
    assert run.steps() == [2]


def test_another_learning_rate_and_length_are_taken_and_said(
    train: Train, run: Run, capsys: Captured
) -> None:
    """RES-05."""
    assert train("--stop-at", "5") == 0
    changes = ("--set", "train.learning_rate=2e-3", "--set", "train.steps=8")
    capsys.readouterr()
    changes += ("--set", "train.schedule=constant", "--plugin", "ema")
    assert train("--resume", *changes) == 0
    out = capsys.readouterr()
    said = out.out + out.err
    assert "train.learning_rate 0.001 -> 0.002" in said
    assert "train.steps 20 -> 8" in said
    assert "plugins.ema off -> on" in said
    assert said.count("resumed with ") == 4
    rates = losses(run)
    assert rates[5][1] < 1e-3
    assert [rates[step][1] for step in (6, 7, 8)] == [2e-3] * 3
    assert sorted(rates) == list(range(1, 9))


def test_a_second_resume_goes_on_with_what_the_first_was_given(
    train: Train, run: Run, tmp_path: Path, capsys: Captured
) -> None:
    assert train("--stop-at", "2", "--plugin", "averages") == 0
    began = (run.folder / "profile.toml").read_text("utf-8")
    (tmp_path / "tiny.h5").rename(tmp_path / "moved.h5")
    given = ("--set", "train.steps=8", "--set", "train.batch_size=6", "--without", "averages")
    given += ("--set", "data.path=moved.h5", "--plugin", "ema")
    assert train("--resume", "--stop-at", "3", *given) == 0
    goes_on = (run.folder / "profile.toml").read_text("utf-8")
    assert goes_on != began
    capsys.readouterr()
    assert train("--resume", "--stop-at", "4") == 0
    out = capsys.readouterr()
    assert "resumed with" not in out.out + out.err
    assert (run.folder / "profile.toml").read_text("utf-8") == goes_on
    assert train("--resume", "--stop-at", "5", *given) == 0, "the same command line, once more"
    assert train("--resume", "--set", "train.steps=6") == 0
    assert run.steps()[-1] == 6, "what is given now wins"
    meta = run.latest().meta
    assert meta["profile"]["train"]["batch_size"] == 6
    assert sorted(meta["profile"]["plugins"]) == ["ema"]
    first, second, third, fourth, fifth = (one["changes"] for one in meta["sessions"])
    assert (first, third, fourth) == ([], [], [])
    assert "train.steps 20 -> 8" in second
    assert "plugins.averages on -> off" in second
    assert f"data.path {tmp_path / 'tiny.h5'} -> {tmp_path / 'moved.h5'}" in second
    assert fifth == ["train.steps 8 -> 6"]
    assert main(["runs", "show", "one"]) == 0
    assert "train.steps 8 -> 6" in capsys.readouterr().out


def test_a_refused_resume_leaves_the_profile_of_the_run(train: Train, run: Run) -> None:
    assert train("--stop-at", "2") == 0
    began = (run.folder / "profile.toml").read_text("utf-8")
    assert train("--resume", "--set", "train.steps=8", "--set", "model.n_layer=3") == 2
    assert train("--resume", "--set", "train.steps=8", "--without", "emma") == 2
    assert (run.folder / "profile.toml").read_text("utf-8") == began


def test_other_options_of_a_plugin_are_said(train: Train, run: Run, capsys: Captured) -> None:
    assert train("--stop-at", "2", "--set", "plugins.ema.decay=0.5", "--plugin", "averages") == 0
    capsys.readouterr()
    changes = ("--set", "plugins.ema.decay=0.9", "--without", "averages", "--stop-at", "3")
    assert train("--resume", *changes) == 0
    out = capsys.readouterr()
    assert "resumed with plugins.ema.decay 0.5 -> 0.9" in out.out + out.err
    assert "resumed with plugins.averages on -> off" in out.out + out.err


def test_a_missing_plugin_state_is_named_in_one_line(
    train: Train, run: Run, capsys: Captured
) -> None:
    """RES-10."""
    assert train("--stop-at", "3") == 0
    capsys.readouterr()
    assert train("--resume", "--plugin", "averages", "--stop-at", "4") == 0
    out = capsys.readouterr()
    assert (out.out + out.err).count("no state of averages: they start afresh") == 1


class Scripted(Plugin):
    """Ruins the weights after step 4, so that no later evaluation is the best."""

    def ready(self, parts: Any) -> None:
        self.model = parts.raw_model

    def step(self, event: Stepped) -> Want:
        if event.step > 4:
            with torch.no_grad():
                self.model.wte.weight.mul_(100.0)
        return Want.EVAL


def test_the_best_stays_the_best_over_a_resume(
    train: Train, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RES-10: the memory of the best survives, and its checkpoint too."""
    monkeypatch.setattr(registry, "discover", lambda: {**KNOWN, **found(scripted=Scripted)})
    assert train("--plugin", "scripted", "--stop-at", "4") == 0
    assert (run.folder / "best").read_text() == "step-000004\n"
    assert train("--resume", "--stop-at", "8") == 0
    evaluations = [r for r in run.metrics() if r["kind"] == "eval"]
    assert [r["step"] for r in evaluations] == list(range(1, 9))
    assert not any(r["best"] for r in evaluations[4:])
    assert (run.folder / "best").read_text() == "step-000004\n"
    assert 4 in run.steps()
    assert run.steps()[-2:] == [7, 8]
    assert run.checkpoint_folder(4).joinpath("model.safetensors").exists()


def test_resuming_what_was_never_started_is_refused(train: Train, capsys: Captured) -> None:
    assert train("--resume") == 2
    assert "no checkpoint to resume from" in capsys.readouterr().err


def test_a_finished_run_resumed_is_unchanged(train: Train, run: Run) -> None:
    assert train("--set", "train.steps=3") == 0
    before = weights(run)
    assert train("--resume") == 0
    after = weights(run)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert sorted(losses(run)) == [1, 2, 3]


def test_the_profile_in_the_folder_is_the_whole_one(train: Train, run: Run) -> None:
    from gptfast.config import load

    assert train("--set", "train.steps=2") == 0
    loaded = load(config=run.folder / "profile.toml").profile
    assert isinstance(loaded, Profile)
    assert (loaded.train.steps, loaded.model.vocab_size) == (2, 61)
    GPT(loaded.model).load_state_dict(weights(run))


@pytest.mark.gpu
def test_a_checkpoint_of_a_gpu_is_read_on_a_cpu(train: Train, run: Run, capsys: Captured) -> None:
    """RES-11: the same greedy text on both."""
    assert train("--device", "cuda", "--set", "train.steps=5") == 0
    texts = []
    for device in ("cuda", "cpu"):
        assert main(["eval", "one", "--device", device]) == 0
        capsys.readouterr()
        greedy = ("--temperature", "0", "--prompt", "AB", "--max-new-tokens", "8")
        assert main(["generate", "one", "--device", device, *greedy]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
