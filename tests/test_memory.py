"""Out of memory: the largest micro-batch that fits is found, and one that does not is halved."""

from __future__ import annotations

import json
import re
import shutil
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plugin_helpers import enabled, found, rig_of
from torch import Tensor, nn

from gptfast.cli import main
from gptfast.contract.tiny import STEPS, Rig, copied, require_equal_tensors, write_tiny_store
from gptfast.device.memory import micro_batches
from gptfast.host import registry
from gptfast.optim import PlainStepper
from gptfast.plugin import Options, Plugin, Stage, Stepped, Stepper, Want
from gptfast.run.fit import first_that_fits
from gptfast.run.folder import Run

Tally = Callable[..., None]


class SmallDevice(Plugin):
    """A device that holds `room` windows: more raise its error where `at` says.

    Dropout is drawn before it happens, and what the failed attempt made is watched.
    """

    stage = Stage.REPORT

    class Options(Options):
        room: int
        at: str = "forward"
        """ "forward", "backward", "update" or "evaluation"."""
        since: int = 1
        """The first step in which it is so small."""

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.attempts: list[int] = []
        self.left: weakref.ref[Tensor] | None = None
        self.windows = 0
        self.steps = 0

    def fail(self, at: str) -> None:
        too_many = self.windows > self.options.room
        if at == self.options.at and too_many and self.steps + 1 >= self.options.since:
            raise torch.OutOfMemoryError(f"cannot hold {self.windows} windows")

    def wrap_model(self, model: nn.Module) -> nn.Module:
        def forward(module: nn.Module, args: Any, loss: Tensor) -> None:
            self.windows = len(args[0])
            if module.training:
                assert self.left is None or self.left() is None, "the failed attempt is still held"
                self.attempts.append(self.windows)
            if self.windows > self.options.room:
                self.left = weakref.ref(loss)
            self.fail("forward" if module.training else "evaluation")

        model.register_forward_hook(forward)
        return model

    def build_stepper(self) -> Stepper:
        return Watched(self)

    def step(self, event: Stepped) -> Want:
        self.steps = event.step
        return Want.NOTHING

    def state(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


class Watched(PlainStepper):
    def __init__(self, device: SmallDevice) -> None:
        self.device = device

    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        self.device.fail("backward")

    def step(self, optimizer: Any) -> bool:
        self.device.fail("update")
        return super().step(optimizer)


@given(batch=st.integers(1, 400), room=st.integers(0, 400))
def test_the_largest_micro_batch_is_found_in_few_tries(batch: int, room: int) -> None:
    tried: list[int] = []

    def fits(windows: int) -> bool:
        tried.append(windows)
        return windows <= room

    falling = micro_batches(batch)
    assert falling == sorted((n for n in range(1, batch + 1) if batch % n == 0), reverse=True)
    right = [n for n in falling if n <= room]
    assert first_that_fits(falling, fits) == (right[0] if right else None)
    assert len(tried) <= 1 + len(falling).bit_length()
    assert len(set(tried)) == len(tried)


# in the middle of a run ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with rig_of(small_device=SmallDevice) as rig:
        yield rig


@pytest.mark.parametrize("at", ["forward", "backward"])
def test_a_step_out_of_memory_is_repeated_with_half_the_micro_batch(
    rig: Rig, tmp_path: Path, at: str, tally: Tally
) -> None:
    """The same windows and dropout as a run that was stopped there and resumed with the half."""
    changes = {"model__dropout": 0.1, "train__batch_size": 12}
    whole, half = (rig.profile({}, **changes, train__micro_batch=n) for n in (6, 3))
    run = Run.create(tmp_path / "run", profile_toml="")
    rig.train(whole, run=run, until=2)
    right = rig.train(half, checkpoint=run.latest())

    small = enabled("small-device", SmallDevice, room=3, at=at, since=3)
    trainer, recorder = rig.trainer(whole, extra=[small])
    notes: list[str] = []
    recorder.note = notes.append
    with trainer:
        trainer.run()
        assert trainer.profile.train.micro_batch == 3
        require_equal_tensors(copied(trainer.raw_model), right.weights, what="repeated")
    assert recorder.losses[2:] == right.losses
    assert isinstance(small.plugin, SmallDevice)
    assert small.plugin.attempts == [6] * 4 + [6] + [3] * 4 * (STEPS - 2)
    assert [note for note in notes if "6 windows" in note and "goes on with 3" in note] == notes
    tally("faults injected")


def test_an_evaluation_out_of_memory_goes_on_with_less(rig: Rig, tally: Tally) -> None:
    profile = rig.profile({"small-device": {"room": 2, "at": "evaluation"}}, train__steps=3)
    trainer, recorder = rig.trainer(profile)
    with trainer:
        trainer.run()
        assert trainer.profile.train.micro_batch == 2
    right = rig.trainer(rig.profile({}, train__steps=3, train__micro_batch=4))
    with right[0]:
        right[0].run()
    (one,), (other,) = recorder.evaluations, right[1].evaluations
    assert one.loss == pytest.approx(other.loss, rel=1e-5)
    tally("faults injected")


# through the command line ----------------------------------------------------------------------

Train = Callable[..., int]
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inputs: Path) -> Train:
    """`train(*args)`: `gptfast train` on a tiny file, 12 windows in a step."""
    write_tiny_store(tmp_path / "tiny.h5")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GPTFAST_CACHE", str(tmp_path / "cache"))
    known = {**registry.discover(), **found(small_device=SmallDevice)}
    monkeypatch.setattr(registry, "discover", lambda: known)
    profile = (inputs / "profiles" / "tiny.toml").read_text()
    profile = profile.replace("block_size = 64", "block_size = 16")
    profile = profile.replace("batch_size = 4", "batch_size = 12")
    (tmp_path / "gptfast.toml").write_text(profile + '\n[data]\npath = "tiny.h5"\n')
    return lambda *args: main(["train", "--device", "cpu", *args])


AUTO = ("--set", "train.micro_batch=auto", "--set", "train.steps=4")


def room(windows: int, at: str = "update") -> tuple[str, ...]:
    return (
        "--set",
        f"plugins.small-device.room={windows}",
        "--set",
        f"plugins.small-device.at={at}",
    )


def losses(run: Run) -> list[float]:
    return [record["loss"] for record in run.metrics() if record["kind"] == "step"]


@pytest.mark.parametrize("at", ["forward", "backward", "update"])
def test_auto_finds_the_largest_that_fits_and_remembers_it(
    train: Train, tmp_path: Path, capsys: Captured, at: str, tally: Tally
) -> None:
    """Bit for bit the run whose profile says the number; a second run asks the cache."""
    assert train("--run", "one", *AUTO, *room(5, at)) == 0
    said = capsys.readouterr()
    assert "4 windows at a time fit into memory (tried 12, 3, 4, 6)" in said.out + said.err
    one = Run(tmp_path / "runs" / "one")
    assert one.latest().meta["fits"] == 4
    assert train("--run", "two", "--set", "train.micro_batch=4", "--set", "train.steps=4") == 0
    two = Run(tmp_path / "runs" / "two")
    assert losses(one) == losses(two)
    assert [r["tokens"] for r in one.metrics() if r["kind"] == "step"] == [12 * 16] * 4

    capsys.readouterr()
    assert train("--run", "three", *AUTO, *room(5, at)) == 0
    said = capsys.readouterr()
    assert "4 windows at a time, as found before" in said.out + said.err
    assert losses(Run(tmp_path / "runs" / "three")) == losses(one)
    tally("faults injected", 2)


def test_the_answer_is_that_of_this_profile(train: Train, tmp_path: Path, capsys: Captured) -> None:
    """Another model is tried anew, and so is what a damaged answer was about."""
    assert train("--run", "one", *AUTO, *room(5)) == 0
    assert train("--run", "two", *AUTO, *room(5), "--set", "model.n_embd=64") == 0
    files = sorted((tmp_path / "cache" / "micro-batch").iterdir())
    assert len(files) == 2
    for file in files:
        answer = json.loads(file.read_text())
        assert answer.pop("micro_batch") == 4
        file.write_text(json.dumps({**answer, "micro_batch": 5}))
    capsys.readouterr()
    assert train("--run", "three", *AUTO, *room(5)) == 0
    said = capsys.readouterr()
    assert "(tried 12, 3, 4, 6)" in said.out + said.err


def test_a_plugin_that_sets_the_micro_batch_is_kept_within_what_fits(
    train: Train, tmp_path: Path, capsys: Captured
) -> None:
    whole = ("--set", "plugins.accumulate.steps=1")
    assert train("--run", "one", *AUTO, *room(5), *whole) == 0
    said = capsys.readouterr()
    assert "4 windows at a time fit into memory" in said.out + said.err
    assert "goes on with" not in said.out + said.err
    assert Run(tmp_path / "runs" / "one").latest().meta["fits"] == 4


def test_a_cache_that_cannot_be_written_stops_nothing(
    train: Train, tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "cache").write_text("a file")
    assert train("--run", "one", *AUTO, *room(5)) == 0
    said = capsys.readouterr()
    assert "the next run tries anew" in said.out + said.err


def test_a_resumed_run_keeps_the_micro_batch_that_fitted(
    train: Train, tmp_path: Path, capsys: Captured, tally: Tally
) -> None:
    """Found by `auto` or left by a halving, the resumed run equals the straight one."""
    room_for_5 = ("--set", "train.steps=6", *room(5, "forward"))
    for setting in ("auto", "12"):
        for name, stop in (("straight", ()), ("stopped", ("--stop-at", "3"))):
            run = f"{name}-{setting}"
            micro = f"train.micro_batch={setting}"
            assert train("--run", run, "--set", micro, *room_for_5, *stop) == 0
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        capsys.readouterr()
        assert train("--run", f"stopped-{setting}", "--resume") == 0
        said = capsys.readouterr()
        assert "tried" not in said.out + said.err
        assert "goes on with" not in said.out + said.err
        straight, stopped = (
            Run(tmp_path / "runs" / f"{name}-{setting}") for name in ("straight", "stopped")
        )
        assert losses(straight) == losses(stopped)
        assert straight.latest().meta["fits"] == stopped.latest().meta["fits"]
        tally("resumes compared")
    # What the profile says now counts.
    assert train("--run", "stopped-12", "--resume", "--set", "train.micro_batch=2") == 0
    assert Run(tmp_path / "runs" / "stopped-12").latest().step == 6


@pytest.mark.parametrize("setting", ["auto", "2"])
def test_where_not_even_one_window_fits_one_line_says_what_to_do(
    train: Train, capsys: Captured, setting: str, tally: Tally
) -> None:
    settings = ("--set", f"train.micro_batch={setting}", *room(0, "forward"))
    assert train("--run", "one", *settings) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "out of memory with a single window of 16 tokens" in error
    assert "use a smaller model" in error
    tally("faults injected")


@pytest.mark.parametrize("windows", ["auto", "12"])
def test_a_model_that_memory_cannot_hold_is_one_line(
    train: Train, capsys: Captured, windows: str, tally: Tally
) -> None:
    settings = ("--set", f"train.micro_batch={windows}", "--set", f"model.ngram_rows={10**15}")
    assert train("--run", "one", *settings) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    if windows == "12":
        assert re.search(r"32,0[\d,]* parameters, 128,000,000.0 GB, do not fit into the mem", error)
    assert "model" in error
    assert "bug" not in error
    assert train("--run", "one") == 0, "the name is free"
    tally("faults injected")


def test_an_update_out_of_memory_ends_the_run_in_one_line(
    train: Train, tmp_path: Path, capsys: Captured, tally: Tally
) -> None:
    """It may be half made: the last checkpoint stands, and nothing is repeated."""
    assert train("--run", "one", *room(3), "--set", "plugins.small-device.since=3") == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "after step 2: out of memory with 12 windows" in error
    assert "train.micro_batch = 1" in error
    tally("faults injected")
