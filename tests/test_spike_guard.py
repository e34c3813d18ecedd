"""spike-guard: outliers are left out and told, nothing else changes, and a resumed run knows."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from gptfast_plugins.amp import ScaledStepper
from gptfast_plugins.spike_guard import z_score
from hypothesis import given
from hypothesis import strategies as st
from plugin_helpers import found
from torch import Tensor, nn
from torch.optim import Optimizer

from gptfast.contract.tiny import Rig, build_rig, copied, require_equal_tensors
from gptfast.host.registry import discover
from gptfast.plugin import Options, Plugin, Stage, Stepped, Stepper, Want
from gptfast.run.folder import Run

Tally = Callable[..., None]


class Garbled(Plugin):
    """Multiplies the loss of some steps, and so their gradients."""

    stage = Stage.REPORT

    class Options(Options):
        steps: list[int]
        factor: float = 50.0

    def wrap_model(self, model: nn.Module) -> nn.Module:
        self.step_now = 1

        def garble(module: nn.Module, args: Any, loss: Tensor) -> Tensor:
            garbled = module.training and self.step_now in self.options.steps
            return loss * self.options.factor if garbled else loss

        model.register_forward_hook(garble)
        return model

    def step(self, event: Stepped) -> Want:
        self.step_now = event.step + 1
        return Want.NOTHING

    def state(self) -> dict[str, Any]:
        return {"step_now": self.step_now}

    def load_state(self, state: dict[str, Any]) -> None:
        self.step_now = state["step_now"]


class Scaled(Plugin):
    """The fp16 stepper on a CPU, whose scale makes the gradient of some steps overflow."""

    class Options(Options):
        overflows: list[int]

    def build_stepper(self) -> Stepper:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
        return ScaledStepper(self.scaler)

    def wrap_model(self, model: nn.Module) -> nn.Module:
        self.now = 1
        first = next(model.parameters())
        first.register_hook(
            lambda grad: grad * math.inf if self.now in self.options.overflows else grad
        )
        return model

    def step(self, event: Stepped) -> Want:
        self.now = event.step + 1
        return Want.NOTHING


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    known = {**discover(), **found(garbled=Garbled, scaled=Scaled)}
    with build_rig({}, machine=None, found=known) as rig:
        yield rig


GUARD = {"least": 4, "window": 8, "z": 8.0}


def plugins(steps: Sequence[int], **options: Any) -> dict[str, dict[str, Any]]:
    return {"spike-guard": {**GUARD, **options}, "garbled": {"steps": list(steps)}}


def trained(rig: Rig, on: dict[str, dict[str, Any]], **changes: Any) -> tuple[Any, list[str], Run]:
    """(the trainer, what was said, the run) of 16 steps."""
    changes = {"train__steps": 16, "train__micro_batch": 2, "train__warmup_steps": 0, **changes}
    profile = rig.profile(on, **changes)
    run = Run.create(rig.folder / f"run-{len(list(rig.folder.iterdir()))}", profile_toml="")
    trainer, _ = rig.trainer(profile, run=run)
    said: list[str] = []
    trainer.hooks._note = said.append
    with trainer:
        trainer.run()
    return trainer, said, run


def skipped(run: Run) -> list[int]:
    return [r["step"] for r in run.metrics() if r["kind"] == "step" and not r["committed"]]


@given(
    st.lists(st.floats(0.1, 1e3), min_size=2, max_size=20),
    st.floats(0.1, 1e4),
)
def test_the_z_score_is_the_textbook_one(past: list[float], value: float) -> None:
    mean, spread = statistics.mean(past), statistics.pstdev(past)
    z = z_score(value, deque(past))
    if spread > 2e-3 * mean:
        assert z == pytest.approx((value - mean) / spread, rel=1e-6, abs=1e-6)
    else:
        assert abs(z) <= abs(value - mean) / (1e-3 * mean) + 1e-6


def test_outliers_are_skipped_told_and_counted(rig: Rig) -> None:
    trainer, said, run = trained(rig, plugins([7, 12]))
    assert skipped(run) == [7, 12]
    assert (trainer.progress.step, trainer.progress.committed) == (16, 14)
    told = [line for line in said if "is skipped" in line]
    assert [line.split(": ")[1] for line in told] == ["step 7 is skipped", "step 12 is skipped"]
    assert "(1 so far)" in told[0]
    assert "(2 so far)" in told[1]
    assert said[-1] == "plugin spike-guard: 2 of 16 steps were skipped"
    assert trainer.log._skipped_steps == 2


def copied_state(optimizer: Optimizer) -> dict[str, Tensor]:
    states = optimizer.state_dict()["state"]
    return {f"{n} {key}": t.clone() for n, state in states.items() for key, t in state.items()}


def test_a_skipped_step_changes_neither_weights_nor_optimizer_nor_schedule(rig: Rig) -> None:
    on = plugins([7])
    profile = rig.profile(on, train__steps=16, train__micro_batch=2)
    trainer, _ = rig.trainer(profile)
    with trainer:
        trainer.run(6)
        weights, moments = copied(trainer.raw_model), copied_state(trainer.optimizer)
        trainer.run(7)
        require_equal_tensors(copied(trainer.raw_model), weights, what="a skipped step")
        require_equal_tensors(copied_state(trainer.optimizer), moments, what="a skipped step")
        trainer.run(8)
        changed = copied(trainer.raw_model)
        assert all(not torch.equal(changed[name], weights[name]) for name in changed)


def test_where_nothing_stands_out_every_bit_is_as_without(rig: Rig) -> None:
    changes = {"train__steps": 16, "model__dropout": 0.1}
    plain = rig.train(rig.profile({}, **changes))
    guarded = rig.train(rig.profile({"spike-guard": GUARD}, **changes))
    rig.require_equal(guarded, plain, what="with spike-guard")


@pytest.mark.parametrize(
    ("watch", "factor", "right"), [("loss", 50.0, [7]), ("grad_norm", 50.0, [7]), ("both", 1.0, [])]
)
def test_either_number_can_be_watched(
    rig: Rig, watch: str, factor: float, right: list[int]
) -> None:
    on = plugins([7], watch=watch)
    on["garbled"]["factor"] = factor
    assert skipped(trained(rig, on)[2]) == right


def test_before_the_window_is_filled_nothing_is_skipped(rig: Rig) -> None:
    for step, right in ((4, []), (5, [5])):
        assert skipped(trained(rig, plugins([step]))[2]) == right


def test_a_new_level_is_taken_after_so_many_in_a_row(rig: Rig) -> None:
    _, said, run = trained(rig, plugins(range(7, 17), in_a_row=3))
    assert skipped(run) == [7, 8, 9]
    assert [line for line in said if "3 steps in a row were skipped up to 9" in line]


def test_fp16s_stepper_is_told_and_skips_its_own(rig: Rig) -> None:
    """A skipped step grows the scale as any other without overflow; an overflow is no spike."""
    on = {**plugins([7]), "scaled": {"overflows": [10]}}
    trainer, said, run = trained(rig, on)
    assert skipped(run) == [7, 10]
    assert said[-1] == "plugin spike-guard: 1 of 16 steps were skipped"
    scaled = next(e.plugin for e in trainer.hooks.enabled if e.name == "scaled")
    assert isinstance(scaled, Scaled)
    # Doubled after steps 4 and 8, halved at 10, doubled after 14.
    assert scaled.scaler.get_scale() == 1024.0 * 2 * 2 / 2 * 2


@pytest.mark.parametrize("stops", [(6,), (7,), (8,), (3, 7, 12)])
def test_a_resumed_run_skips_the_same_steps(
    rig: Rig, tmp_path: Path, stops: tuple[int, ...], tally: Tally
) -> None:
    profile = rig.profile(
        plugins([7, 8, 12], in_a_row=2),
        train__steps=16,
        train__micro_batch=2,
        model__dropout=0.1,
    )
    straight = Run.create(tmp_path / "straight", profile_toml="")
    stopped = Run.create(tmp_path / "stopped", profile_toml="")
    right = rig.train(profile, run=straight)
    rig.train(profile, run=stopped, until=stops[0])
    for stop in (*stops[1:], None):
        outcome = rig.train(profile, run=stopped, checkpoint=stopped.latest(), until=stop)
    assert skipped(stopped) == skipped(straight) == [7, 8]
    require_equal_tensors(outcome.weights, right.weights, what="resumed")
    states = [run.latest().load_trainer()["plugins"]["spike-guard"] for run in (straight, stopped)]
    assert states[0] == states[1]
    tally("resumes compared")
