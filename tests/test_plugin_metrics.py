"""A plugin's own numbers: asked for where a log is written, kept there, shown, refused if bad."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gptfast_plugins.batch_warmup import BatchWarmup
from gptfast_plugins.ema import EMA
from gptfast_plugins.sequence_warmup import SequenceWarmup
from gptfast_plugins.spike_guard import SpikeGuard
from plugin_helpers import enabled, found, rig_of
from torch import Tensor

from gptfast.console.board import Board
from gptfast.console.console import Console, Look
from gptfast.console.live import PlainView
from gptfast.contract.tiny import Rig, build_rig
from gptfast.errors import GptfastError
from gptfast.host.hooks import Hooks
from gptfast.plugin import Plugin, Stepped, Want
from gptfast.report import Logged, RunInfo
from gptfast.run.folder import Run


class Counts(Plugin):
    """A stranger's: counts steps on the device, and how often it is asked."""

    asked = 0

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.steps = torch.zeros(())

    def step(self, event: Stepped) -> Want:
        self.steps += 1
        return Want.NOTHING

    def metrics(self) -> Mapping[str, float | Tensor]:
        Counts.asked += 1
        return {"steps": self.steps, "odd": math.nan}

    def state(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


def logged(run: Run, name: str) -> dict[int, Any]:
    return {r["step"]: r[name] for r in run.metrics() if r["kind"] == "step" and name in r}


@pytest.fixture
def rig() -> Iterator[Rig]:
    with rig_of(counts=Counts) as made:
        yield made


def test_numbers_are_asked_for_at_logged_steps_and_kept_after_a_resume(
    rig: Rig, tmp_path: Path
) -> None:
    profile = rig.profile(train__log_interval=2, train__eval_interval=0, train__steps=8)
    run, Counts.asked = Run(tmp_path), 0
    heard: list[Mapping[str, float]] = []
    trainer, recorder = rig.trainer(profile, run=run)
    recorder.logged = lambda record: heard.append(record.plugin_metrics)  # type: ignore[method-assign]
    with trainer:
        trainer.run(until=4)
    assert Counts.asked == 2
    assert [one["counts.steps"] for one in heard] == [2.0, 4.0]
    assert all(math.isnan(one["counts.odd"]) for one in heard)
    trainer, _ = rig.trainer(profile, run=run, checkpoint=run.latest())
    with trainer:
        trainer.run()
    assert Counts.asked == 4
    assert logged(run, "counts.steps") == {2: 2.0, 4: 4.0, 6: 6.0, 8: 8.0}
    assert logged(run, "counts.odd") == {2: None, 4: None, 6: None, 8: None}


class Answers(Plugin):
    answer: Any = None

    def metrics(self) -> Mapping[str, float | Tensor]:
        return self.answer  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ([("a", 1)], "is no mapping"),
        (None, "is no mapping"),
        ({"a": "1"}, "a is neither a number nor"),
        ({"a": torch.zeros(2)}, "a is neither a number nor"),
        ({"a": 1j}, "a is neither a number nor"),
        ({"a.b": 1}, "'a.b' is no name"),
        ({1: 1}, "1 is no name"),
        ({"": 1}, "'' is no name"),
    ],
)
def test_an_answer_that_is_none_is_refused_in_the_plugins_name(answer: Any, said: str) -> None:
    one = enabled("one", Answers)
    one.plugin.answer = answer  # type: ignore[attr-defined]
    blamed = rf"plugin one \(tests 1.0\) failed in metrics: .*{said}"
    with pytest.raises(GptfastError, match=blamed):
        Hooks([one], note=print).metrics()


def test_numbers_of_every_kind_become_floats_under_their_plugins_names() -> None:
    one, two, idle = enabled("one", Answers), enabled("two", Answers), enabled("idle", Plugin)
    one.plugin.answer = {"a": 1, "b": np.float32(0.5)}  # type: ignore[attr-defined]
    two.plugin.answer = {"a": torch.tensor([2])}  # type: ignore[attr-defined]
    values = Hooks([one, two, idle], note=print).metrics()
    assert values == {"one.a": 1.0, "one.b": 0.5, "two.a": 2.0}
    assert {type(value) for value in values.values()} == {float}


class FailsLate(Plugin):
    def step(self, event: Stepped) -> Want:
        self.step_seen = event.step
        return Want.NOTHING

    def metrics(self) -> Mapping[str, float]:
        if self.step_seen == 4:
            raise ValueError("no number left")
        return {}


def test_a_failing_answer_costs_no_step(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with rig_of(fails=FailsLate) as rig:
        trainer, _ = rig.trainer(rig.profile(train__log_interval=2), run=run)
        with pytest.raises(GptfastError, match=r"fails .* in metrics: .*no number"), trainer:
            trainer.run()
    assert list(logged(run, "loss")) == [1, 2, 3, 4]
    assert run.latest().meta["step"] == 4


def test_shipped_plugins_say_where_they_are(tmp_path: Path) -> None:
    known = found(
        batch_warmup=BatchWarmup, sequence_warmup=SequenceWarmup, ema=EMA, spike_guard=SpikeGuard
    )
    tables = {
        "batch-warmup": {"start": 1, "steps": 4},
        "sequence-warmup": {"start": 8, "steps": 4},
        "ema": {},
        "spike-guard": {},
    }
    run = Run(tmp_path)
    with build_rig(tables, machine=None, found=known) as rig:
        trainer, _ = rig.trainer(rig.profile(), run=run)
        with trainer:
            trainer.run()
    windows = logged(run, "batch-warmup.windows")
    lengths = logged(run, "sequence-warmup.block_size")
    assert (windows[1], windows[6]) == (1, 4)
    assert (lengths[1], lengths[6]) == (8, 16)
    assert logged(run, "loss").keys() == windows.keys()
    tokens = logged(run, "tokens")
    assert all(tokens[step] == windows[step] * lengths[step] for step in tokens)
    assert logged(run, "ema.decay")[1] == pytest.approx(2 / 11)
    assert set(logged(run, "spike-guard.skipped").values()) == {0}


def test_they_are_shown_in_the_live_view_and_in_plain_lines() -> None:
    info = RunInfo(
        name=None,
        folder=None,
        profile="p",
        device="cpu",
        params=1,
        flops_per_token=1,
        peak_flops=None,
        steps=9,
        start_step=0,
        batch_size=1,
        n_micro=1,
        block_size=1,
        vocab_size=1,
    )
    record = Logged(
        step=1,
        steps=9,
        loss=1.0,
        learning_rate=1.0,
        grad_norm=1.0,
        step_ms=1.0,
        tokens_per_s=1.0,
        peak_share=None,
        data_wait_ms=0.0,
        memory_bytes=None,
        skipped_steps=0,
        epoch=0.0,
        plugin_metrics={"ema.decay": 0.123456789},
    )
    out = io.StringIO()
    console = Console(out, out, Look())
    view = PlainView(console)
    view.started(info)
    view.logged(record)
    assert "  ema.decay 0.12346  " in out.getvalue()
    board = Board(info)
    board.logged(record)
    console.show(board.render(80))
    assert "ema.decay 0.12346 " in out.getvalue().splitlines()[-2]
