"""`gptfast train --verify-resume`: it sees what a stop loses, and blames nothing else."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plugin_helpers import found
from torch import Tensor, nn

from gptfast.cli import main
from gptfast.contract.tiny import write_tiny_store
from gptfast.host import registry
from gptfast.optim import PlainStepper
from gptfast.plugin import Plugin, Stepped, Stepper, Want
from gptfast.run.verify_resume import differences

FREELY = ("--set", "train.grad_clip=0", "--set", "train.learning_rate=0.01")
Verify = Callable[..., int]
Captured = pytest.CaptureFixture[str]


class Forgets(Plugin):
    """Gradients grow with a count that no checkpoint keeps."""

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.count = 1

    def build_stepper(self) -> Stepper:
        return Growing(self)

    def step(self, event: Stepped) -> Want:
        self.count += 1
        return Want.NOTHING


class Growing(PlainStepper):
    def __init__(self, owner: Forgets) -> None:
        self.owner = owner

    def backward(self, loss: Tensor) -> None:
        super().backward(loss * self.owner.count)


class Clock(Plugin):
    """Its state is another in each run, and its training the same."""

    def state(self) -> dict[str, Any]:
        return {"drawn": int.from_bytes(os.urandom(8), "little")}


class Chance(Clock):
    """No run equals another."""

    def wrap_model(self, model: nn.Module) -> nn.Module:
        def drown(module: nn.Module, args: Any, loss: Tensor) -> Tensor:
            return loss * (1 + int.from_bytes(os.urandom(4), "little") / 2**34)

        model.register_forward_hook(drown)
        return model


@pytest.fixture
def verify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inputs: Path) -> Verify:
    """`verify(*args)`: the check in a folder with a tiny profile."""
    write_tiny_store(tmp_path / "tiny.h5")
    monkeypatch.chdir(tmp_path)
    known = {**registry.discover(), **found(forgets=Forgets, clock=Clock, chance=Chance)}
    monkeypatch.setattr(registry, "discover", lambda: known)
    profile = (inputs / "profiles" / "tiny.toml").read_text()
    profile = profile.replace("block_size = 64", "block_size = 16\ndropout = 0.1")
    (tmp_path / "gptfast.toml").write_text(profile + '\n[data]\npath = "tiny.h5"\n')
    return lambda *args: main(["train", "--verify-resume", "--device", "cpu", *args])


def test_a_sound_profile_is_equal_and_leaves_nothing(
    verify: Verify, tmp_path: Path, capsys: Captured, tally: Callable[..., None]
) -> None:
    before = sorted(tmp_path.rglob("*"))
    plugins = ("--plugin", "ema", "--plugin", "clock", "--set", "train.micro_batch=2")
    assert verify(*plugins) == 0
    out = capsys.readouterr()
    assert "stopped at step 3 of 6 and resumed, the run equals the one without a stop" in out.out
    assert "plugins clock.state.drawn differs" in out.out
    assert "and so do two runs without a stop" in out.out
    assert sorted(tmp_path.rglob("*")) == before
    tally("resumes compared")


def test_what_a_stop_loses_is_named_with_its_size(
    verify: Verify, tmp_path: Path, capsys: Captured, tally: Callable[..., None]
) -> None:
    forgets = ("--plugin", "forgets", *FREELY)
    assert verify(*forgets, "--json") == 1
    out = capsys.readouterr()
    result = json.loads(out.out)
    assert result["equal"] is False
    named = {one["what"]: one for one in result["differences"]}
    assert {"loss of step 6", "model wte.weight", "optimizer state.0.exp_avg"} <= named.keys()
    assert not {"loss of step 3", "loss of step 4", "random torch"} & named.keys()
    assert 0 < named["model wte.weight"]["by"] < 0.1
    assert all(one["repeats"] for one in named.values())
    assert len(named) < result["compared"]
    error = out.err.splitlines()[-1]
    assert f"{len(named)} of {result['compared']} tensors and values differ" in error
    assert not (tmp_path / "runs").exists()

    assert verify(*forgets) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 20
    assert all(" differs by " in line for line in lines)
    tally("resumes compared", 2)


def test_a_run_that_does_not_repeat_itself_is_not_called_equal(
    verify: Verify, capsys: Captured
) -> None:
    # Clipped, gradients of two runs differ by rounding alone, and a small tensor may be equal.
    assert verify("--plugin", "chance", *FREELY) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines
    assert all("and so do two runs without a stop" in line for line in lines)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--run", "one"), "keeps no run"),
        (("--resume",), "keeps no run"),
        (("--set", "train.steps=1"), "train.steps = 1 cannot be stopped"),
    ],
)
def test_what_cannot_be_verified_is_refused(
    verify: Verify, capsys: Captured, args: tuple[str, ...], said: str
) -> None:
    assert verify(*args) == 2
    assert said in capsys.readouterr().err


def test_differences_see_a_bit_a_dtype_and_what_is_missing() -> None:
    one = torch.arange(4.0)
    other = one.clone()
    other[2] += 2.0**-20
    assert differences({"a": one}, {"a": one.clone()}) == {}
    assert differences({"a": one}, {"a": other}) == {"a": 2.0**-20}
    assert differences({"a": one}, {"a": one.double()}) == {"a": 0.0}
    assert differences({"a": one}, {"a": one[:2]}) == {"a": None}
    assert differences({"a": 1, "b": "x"}, {"a": 3}) == {"a": 2, "b": None}
