"""The loop: equal to the bare one, in the right order, and nothing lost when something fails."""

from __future__ import annotations

import math
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plugin_helpers import found, rig_of
from torch import Tensor, nn
from torch.optim import Optimizer

from gptfast.cli import main
from gptfast.contract.process import differences, process_state
from gptfast.contract.tiny import STEPS, Recorder, Rig, write_tiny_store
from gptfast.data.store import Store
from gptfast.data.windows import WindowOrder
from gptfast.device.machine import find_machine
from gptfast.errors import GptfastError
from gptfast.host import registry
from gptfast.host.hooks import Hooks
from gptfast.host.registry import Found
from gptfast.model import GPT
from gptfast.optim import PlainStepper
from gptfast.plugin import (
    Batch,
    Context,
    Evaluated,
    Machine,
    Parts,
    Plugin,
    Profile,
    Source,
    Stage,
    Stepped,
    Stepper,
    Want,
    Windows,
)
from gptfast.report import EvalRecord, Silent
from gptfast.run.checkpoint import Checkpoint
from gptfast.run.folder import Run
from gptfast.run.trainer import Trainer


@pytest.fixture(scope="module")
def bare() -> Iterator[Rig]:
    """A tiny run without plugins."""
    with rig_of() as rig:
        yield rig


# the bare loop ---------------------------------------------------------------------------------


def bare_loop(profile: Profile, store: Store) -> tuple[list[float], dict[str, Tensor]]:
    """What training is, written out: no hook, no trainer. Losses and final weights."""
    train = profile.train
    torch.manual_seed(train.seed)
    model = GPT(profile.model).train()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": train.weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=train.learning_rate,
        betas=(train.beta1, train.beta2),
        foreach=False,
    )
    tokens = np.asarray(store.tokens("train")).astype(np.int64)
    block = profile.model.block_size
    order = WindowOrder(train.seed, "train", len(tokens), block)
    losses = []
    for step in range(1, train.steps + 1):
        starts = order.starts(step, batch_size=train.batch_size)
        windows = torch.stack([torch.from_numpy(tokens[s : s + block + 1]) for s in starts])
        total = torch.zeros(())
        for part in windows.split(train.micro_batch or train.batch_size):
            loss = model(part[:, :-1], part[:, 1:]) / (train.batch_size * block)
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(parameters, train.grad_clip)
        if step <= train.warmup_steps:
            factor = step / train.warmup_steps
        else:
            done = (step - train.warmup_steps) / (train.steps - train.warmup_steps)
            factor = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = train.learning_rate * factor
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return losses, dict(model.state_dict())


@pytest.mark.parametrize(
    "changes",
    [{}, {"train__micro_batch": 2, "model__dropout": 0.1, "train__grad_clip": 0.1}],
    ids=["plain", "micro-batches, dropout, clipping"],
)
def test_without_plugins_the_trainer_is_the_bare_loop_bit_for_bit(
    bare: Rig, changes: dict[str, Any]
) -> None:
    profile = bare.profile(**changes)
    losses, weights = bare_loop(profile, bare.store)
    outcome = bare.train(profile)
    assert outcome.losses == pytest.approx(losses, rel=0, abs=0)
    assert outcome.weights.keys() == weights.keys()
    assert all(torch.equal(outcome.weights[name], weights[name]) for name in weights)


# what changes no bit ---------------------------------------------------------------------------


class Observer(Plugin):
    """Asks for everything, all the time, and draws random numbers while looking."""

    def step(self, event: Stepped) -> Want:
        return Want.EVAL | Want.SAVE

    def evaluated(self, event: Evaluated) -> Want:
        return Want.EVAL


class OwnWay:
    """Another way to the same windows, two steps ahead; knows only what a plugin is given."""

    def __init__(self, source: Source) -> None:
        self.inner = source
        self.step = source.step
        self.ahead: list[Batch] = []

    @property
    def windows(self) -> Windows:
        return self.inner.windows

    def next(self) -> Batch:
        while len(self.ahead) < 2:
            self.ahead.append(self.windows.read(self.step + len(self.ahead)))
        self.step += 1
        return self.ahead.pop(0)

    def seek(self, step: int) -> None:
        self.ahead.clear()
        self.step = step

    def close(self) -> None:
        self.inner.close()


class OtherLoader(Plugin):
    def wrap_source(self, source: Source) -> Source:
        return OwnWay(source)


class Flags(Plugin):
    stage = Stage.SURGERY

    def setup(self, context: Context) -> None:
        context.setattr(torch.backends.cudnn, "benchmark", True)

    def forward_scope(self) -> AbstractContextManager[object]:
        return nullcontext()

    @contextmanager
    def micro_scope(self, last: bool) -> Iterator[None]:
        yield


def test_observers_loaders_and_flags_change_no_bit(bare: Rig, tmp_path: Path) -> None:
    changes = {"model__dropout": 0.1, "train__micro_batch": 2}
    plain = bare.train(bare.profile(**changes))
    with rig_of(observer=Observer, other_loader=OtherLoader, flags=Flags) as rig:
        profile = rig.profile(**changes)
        run = Run.create(tmp_path / "run", profile_toml=profile.to_toml())
        rig.require_equal(rig.train(profile, run=run), plain, what="with them")
        assert len(run.metrics()) == 2 * STEPS


class Doubles(Plugin):
    stage = Stage.SURGERY

    def configure(self, profile: Profile) -> Profile:
        return profile.replace({"train.learning_rate": profile.train.learning_rate * 2})


class AddsLater(Plugin):
    stage = Stage.OUTER

    def configure(self, profile: Profile) -> Profile:
        return profile.replace({"train.learning_rate": profile.train.learning_rate + 1e-3})


class Sgd(Plugin):
    stage = Stage.SHARD

    def build_optimizer(self, model: nn.Module, profile: Profile) -> Optimizer:
        return torch.optim.SGD(model.parameters(), lr=profile.train.learning_rate)


def test_the_order_of_the_profile_changes_nothing_across_stages() -> None:
    with rig_of(doubles=Doubles, sgd=Sgd, adds=AddsLater) as rig:
        outcomes = [
            rig.train(rig.profile({name: {} for name in names}))
            for names in (("doubles", "sgd", "adds"), ("adds", "sgd", "doubles"))
        ]
        rig.require_equal(*outcomes, what="in another order")
        # The learning rate that only doubling first and adding then gives.
        recorded: list[float] = []
        trainer, _ = rig.trainer(rig.profile({"adds": {}, "doubles": {}}))
        with trainer:
            recorded.append(trainer.profile.train.learning_rate)
        assert recorded == [2e-2 + 1e-3]


# globals ---------------------------------------------------------------------------------------


class TurnsSwitches(Plugin):
    def setup(self, context: Context) -> None:
        context.setattr(torch.backends.cudnn, "deterministic", True)
        context.enter(torch.autocast("cpu", dtype=torch.bfloat16))
        context.undo(lambda: torch.use_deterministic_algorithms(False))
        torch.use_deterministic_algorithms(True)


class Fails(Plugin):
    stage = Stage.REPORT

    class Options(Plugin.Options):
        at: str
        error: str = "RuntimeError"

    def fail(self, at: str) -> None:
        if self.options.at == at:
            if self.options.error == "KeyboardInterrupt":
                raise KeyboardInterrupt
            raise RuntimeError(f"on purpose at {at}")

    def setup(self, context: Context) -> None:
        self.fail("setup")

    def ready(self, parts: Parts) -> None:
        self.fail("ready")

    def step(self, event: Stepped) -> Want:
        self.fail(f"step {event.step}")
        return Want.NOTHING

    @contextmanager
    def micro_scope(self, last: bool) -> Iterator[None]:
        yield
        self.fail("micro")

    @contextmanager
    def eval_scope(self) -> Iterator[None]:
        self.fail("eval")
        yield

    def teardown(self) -> None:
        self.fail("teardown")


@pytest.mark.parametrize(
    ("at", "error"),
    [
        ("nowhere", "none"),
        ("setup", "RuntimeError"),
        ("ready", "RuntimeError"),
        ("step 2", "RuntimeError"),
        ("micro", "KeyboardInterrupt"),
        ("eval", "RuntimeError"),
        ("teardown", "RuntimeError"),
    ],
)
def test_every_global_is_back_however_it_ends(at: str, error: str) -> None:
    cpu = find_machine("cpu")
    with rig_of(switches=TurnsSwitches, fails=Fails) as rig:
        profile = rig.profile({"switches": {}, "fails": {"at": at, "error": error}})
        before = process_state(cpu)
        kind = {"none": None, "RuntimeError": GptfastError, "KeyboardInterrupt": KeyboardInterrupt}
        expected = kind[error]
        if expected is None:
            rig.train(profile)
        else:
            with pytest.raises(expected):
                rig.train(profile)
        assert differences(before, process_state(cpu)) == []


# the stepper -----------------------------------------------------------------------------------


class WatchedStepper(PlainStepper):
    """Scales the loss, skips the updates it is told to, compares the weights before each call."""

    SCALE = 1024.0

    def __init__(self, skip: set[int]) -> None:
        self.skip = skip
        self.calls = 0
        self.before: list[Tensor] = []

    def parameters(self, optimizer: Optimizer) -> list[Tensor]:
        return [p for group in optimizer.param_groups for p in group["params"]]

    def backward(self, loss: Tensor) -> None:
        super().backward(loss * self.SCALE)

    def unscale(self, optimizer: Optimizer) -> None:
        for parameter in self.parameters(optimizer):
            assert parameter.grad is not None
            parameter.grad /= self.SCALE

    def step(self, optimizer: Optimizer) -> bool:
        self.calls += 1
        gradients = [p.grad for p in self.parameters(optimizer) if p.grad is not None]
        assert nn.utils.get_total_norm(gradients).item() == pytest.approx(0.05, rel=1e-4)
        now = self.parameters(optimizer)
        if self.before:
            assert all(torch.equal(a, b) for a, b in zip(self.before, now, strict=True))
        committed = self.calls not in self.skip and super().step(optimizer)
        self.before = [parameter.detach().clone() for parameter in now]
        return committed


class Skips(Plugin):
    def build_stepper(self) -> Stepper:
        self.stepper = WatchedStepper(skip={2, 3})
        return self.stepper

    def step(self, event: Stepped) -> Want:
        RATES.append((event.learning_rate, event.committed))
        return Want.NOTHING


RATES: list[tuple[float, bool]] = []


def test_only_the_stepper_commits_and_a_skipped_update_does_not_move_the_schedule() -> None:
    """Weights change in `step` alone, clipped between unscale and step."""
    RATES.clear()
    with rig_of(skips=Skips) as rig:
        trainer, _ = rig.trainer(rig.profile(train__grad_clip=0.05, train__warmup_steps=4))
        with trainer:
            trainer.run()
            assert (trainer.progress.step, trainer.progress.committed) == (STEPS, STEPS - 2)
    rates, committed = zip(*RATES, strict=True)
    assert list(committed) == [True, False, False, True, True, True]
    assert rates == pytest.approx([2.5e-3, 5e-3, 5e-3, 5e-3, 7.5e-3, 1e-2])


def test_the_schedule_counts_steps_and_not_micro_batches(bare: Rig) -> None:
    """TRN-03."""
    for micro in (1, 4):
        RATES.clear()
        with rig_of(rates=RecordsRates) as rig:
            profile = rig.profile(train__steps=40, train__warmup_steps=10, train__micro_batch=micro)
            rig.train(profile)
        rates = [rate for rate, _ in RATES]
        assert rates.index(max(rates)) == 9
        assert rates[9] == 1e-2
        assert rates[-1] == pytest.approx(1e-3)


class RecordsRates(Plugin):
    def step(self, event: Stepped) -> Want:
        RATES.append((event.learning_rate, event.committed))
        return Want.NOTHING


@pytest.mark.parametrize(("warmup", "steps"), [(0, 20), (20, 20), (1, 1), (5, 20), (30, 20)])
@pytest.mark.parametrize("schedule", ["cosine", "constant", "wsd"])
def test_a_degenerate_schedule_still_moves_the_weights(
    warmup: int, steps: int, schedule: str
) -> None:
    """TRN-07."""
    RATES.clear()
    with rig_of(rates=RecordsRates) as rig:
        profile = rig.profile(
            train__steps=steps, train__warmup_steps=warmup, train__schedule=schedule
        )
        trainer, _ = rig.trainer(profile)
        with trainer:
            before = {k: v.clone() for k, v in trainer.raw_model.state_dict().items()}
            trainer.one_step()
            moved = [
                not torch.equal(v, before[k]) for k, v in trainer.raw_model.state_dict().items()
            ]
            assert all(moved)
            trainer.run()
    rates = [rate for rate, _ in RATES]
    assert len(rates) == steps
    assert all(0 < rate <= 1e-2 for rate in rates)


# recovery --------------------------------------------------------------------------------------


class OutOfMemoryOnce(Plugin):
    """Fails in the second micro-batch of step 3 and knows a way out."""

    class Options(Plugin.Options):
        micro_batch: int

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.calls = 0

    @contextmanager
    def micro_scope(self, last: bool) -> Iterator[None]:
        self.calls += 1
        yield
        if self.calls == 6:
            raise RuntimeError("out of memory")

    def recover(self, error: BaseException, profile: Profile) -> Profile | None:
        if "out of memory" not in str(error):
            return None
        return profile.replace({"train.micro_batch": self.options.micro_batch})


class Gauges(Plugin):
    """Fails with something that nobody recovers from."""

    @contextmanager
    def micro_scope(self, last: bool) -> Iterator[None]:
        yield
        raise RuntimeError("unknown trouble")


def test_a_recovered_step_is_repeated_with_the_same_windows_and_random_numbers(bare: Rig) -> None:
    changes = {"model__dropout": 0.1, "train__micro_batch": 2}
    plain = bare.train(bare.profile(**changes))
    with rig_of(oom=OutOfMemoryOnce) as rig:
        profile = rig.profile({"oom": {"micro_batch": 2}}, **changes)
        rig.require_equal(rig.train(profile), plain, what="after a repeated step")


def test_a_recovered_step_goes_on_with_a_smaller_micro_batch(bare: Rig) -> None:
    changes = {"train__micro_batch": 2}
    plain = bare.train(bare.profile(**changes))
    with rig_of(oom=OutOfMemoryOnce) as rig:
        trainer, recorder = rig.trainer(rig.profile({"oom": {"micro_batch": 1}}, **changes))
        with trainer:
            trainer.run()
            assert trainer.profile.train.micro_batch == 1
        assert recorder.losses == pytest.approx(plain.losses, rel=1e-4)


def test_an_error_that_nobody_recovers_from_ends_the_run() -> None:
    with rig_of(oom=OutOfMemoryOnce, gauges=Gauges) as rig:
        profile = rig.profile({"oom": {"micro_batch": 1}, "gauges": {}})
        named = r"plugin gauges .* failed in micro_scope: RuntimeError: unknown trouble"
        with pytest.raises(GptfastError, match=named):
            rig.train(profile)


# save -> evaluate -> sample -> stop ------------------------------------------------------------


class Diary(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def evaluated(self, record: EvalRecord) -> None:
        self.lines.append(f"evaluated {record.step}")

    def saved(self, step: int, path: str) -> None:
        self.lines.append(f"saved {step}")

    def sampled(self, step: int, text: str) -> None:
        self.lines.append(f"sampled {step}")


class WantsAtTwo(Plugin):
    def step(self, event: Stepped) -> Want:
        return Want.EVAL | Want.SAVE | Want.STOP if event.step == 2 else Want.NOTHING


def test_saving_comes_before_evaluating_before_sampling_before_stopping(tmp_path: Path) -> None:
    with rig_of(wants=WantsAtTwo) as rig:
        profile = rig.profile(train__sample_tokens=3, train__eval_interval=0)
        trainer, _ = rig.trainer(
            profile, run=Run.create(tmp_path / "run", profile_toml=profile.to_toml())
        )
        diary = Diary()
        trainer.kit = replace(trainer.kit, listener=diary)
        with trainer:
            trainer.run()
    assert diary.lines == ["saved 2", "evaluated 2", "sampled 2"]


def test_a_failing_evaluation_loses_nothing(tmp_path: Path) -> None:
    with rig_of(fails=Fails) as rig:
        profile = rig.profile({"fails": {"at": "eval"}})
        run = Run.create(tmp_path / "run", profile_toml=profile.to_toml())
        with pytest.raises(GptfastError, match=r"fails .* failed in eval_scope"):
            rig.train(profile, run=run)
        assert run.steps() == [3]


def test_an_evaluation_leaves_the_mode_the_weights_and_the_random_state(bare: Rig) -> None:
    """EVL-02."""
    trainer, _ = bare.trainer(bare.profile(model__dropout=0.5, train__eval_interval=0))
    with trainer:
        trainer.run(2)
        weights = {k: v.clone() for k, v in trainer.raw_model.state_dict().items()}
        generator = torch.get_rng_state()
        first, second = trainer.scorer.evaluate(), trainer.scorer.evaluate()
        assert first is not None
        assert second is not None
        assert first.loss == second.loss
        assert all(module.training for module in trainer.model.modules())
        assert torch.equal(torch.get_rng_state(), generator)
        assert all(torch.equal(v, weights[k]) for k, v in trainer.raw_model.state_dict().items())


# seeds and learning ----------------------------------------------------------------------------


def test_the_seed_fixes_the_run(bare: Rig) -> None:
    """TRN-15."""
    runs = [bare.train(bare.profile(train__seed=seed, model__dropout=0.1)) for seed in (7, 7, 8)]
    bare.require_equal(runs[0], runs[1], what="same seed")
    assert all(a != b for a, b in zip(runs[0].losses, runs[2].losses, strict=True))


def test_it_learns_a_cycle(inputs: Path, tmp_path: Path) -> None:
    """TRN-15: characters that follow from the ones before are learnt to under 0.1."""
    data = tmp_path / "cycle.h5"
    text = inputs / "text" / "learnable_cycle.txt"
    assert main(["prepare", str(text), "--tokenizer", "chars", "--out", str(data)]) == 0
    with rig_of() as rig, Store.open(data) as store:
        profile = rig.profile(
            model__vocab_size=store.vocab_size,
            model__block_size=64,
            train__steps=300,
            train__eval_interval=0,
        )
        recorder = Recorder()
        with Trainer(
            profile,
            hooks=Hooks([], note=recorder.note),
            machine=rig.machine,
            store=store,
            listener=recorder,
        ) as trainer:
            trainer.run()
        assert recorder.losses[-1] < 0.1
        assert recorder.evaluations[-1].loss < 0.1


# what is kept when it fails --------------------------------------------------------------------


class NotFinite(Plugin):
    """In step 5 the loss is not a number, or only the gradient is infinite."""

    class Options(Plugin.Options):
        what: str

    def wrap_model(self, model: nn.Module) -> nn.Module:
        self.calls = 0

        def poison(module: nn.Module, args: Any, out: Tensor) -> Tensor:
            self.calls += module.training
            return out * math.nan if self._now("loss") and module.training else out

        model.register_forward_hook(poison)
        first = next(model.parameters())
        first.register_hook(lambda grad: grad + math.inf if self._now("gradient") else grad)
        return model

    def _now(self, what: str) -> bool:
        return self.calls == 5 and self.options.what == what

    def ready(self, parts: Parts) -> None:
        self.model = parts.raw_model

    def step(self, event: Stepped) -> Want:
        AFTER.append(event.step)
        return Want.NOTHING

    def teardown(self) -> None:
        WEIGHTS.append({k: v.clone() for k, v in self.model.state_dict().items()})


AFTER: list[int] = []
WEIGHTS: list[dict[str, Tensor]] = []


class SignalsItself(Plugin):
    """Sends its own process a signal in the middle of step 8."""

    class Options(Plugin.Options):
        signal: int

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.calls = 0

    @contextmanager
    def micro_scope(self, last: bool) -> Iterator[None]:
        self.calls += 1
        if self.calls == 8:
            os.kill(os.getpid(), self.options.signal)
        yield


KNOWN = found(fails=Fails, not_finite=NotFinite, signals=SignalsItself)


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inputs: Path) -> Callable[..., int]:
    """`train(*args)`: `gptfast train` on a tiny file with the plugins of this module."""
    write_tiny_store(tmp_path / "tiny.h5")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "discover", lambda: KNOWN)
    (tmp_path / "gptfast.toml").write_text(
        (inputs / "profiles" / "tiny.toml").read_text() + '\n[data]\npath = "tiny.h5"\n'
    )

    def train(*args: str) -> int:
        return main(
            ["train", "--run", "one", "--set", "model.block_size=16", "--device", "cpu", *args]
        )

    return train


def kept(tmp_path: Path, name: str = "one") -> Run:
    return Run(tmp_path / "runs" / name)


def is_intact(checkpoint: Checkpoint) -> bool:
    from safetensors.torch import load_file

    tensors = load_file(checkpoint.folder / "model.safetensors")
    return bool(tensors) and all(bool(t.isfinite().all()) for t in tensors.values())


Train = Callable[..., int]
Captured = pytest.CaptureFixture[str]


@pytest.mark.parametrize("what", ["loss", "gradient"])
@pytest.mark.parametrize("save_interval", [2, 6])
@pytest.mark.parametrize(
    ("runs_ahead", "check"),
    [(False, "auto"), (True, "auto"), (True, "update")],
    ids=["cpu", "device", "device-asked"],
)
def test_what_is_not_finite_stops_the_run_and_is_never_saved(
    train: Train,
    tmp_path: Path,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
    tally: Callable[..., None],
    what: str,
    save_interval: int,
    runs_ahead: bool,
    check: str,
) -> None:
    """TRN-06: before the update on a CPU or where asked for, else before the next save."""
    monkeypatch.setattr(Machine, "runs_ahead", runs_ahead)
    applied = runs_ahead and check == "auto"
    AFTER.clear()
    WEIGHTS.clear()
    settings = (
        f"plugins.not-finite.what={what}",
        f"train.save_interval={save_interval}",
        f'train.finite_check="{check}"',
    )
    assert train(*[word for one in settings for word in ("--set", one)]) == 1
    said = capsys.readouterr().err
    assert "step 5: loss" in said
    assert {"loss": "loss nan", "gradient": "gradient norm inf"}[what] in said
    assert ("applied and not saved" if applied else "not applied") in said
    assert "Traceback" not in said
    assert (AFTER[-1] == 4) is not applied

    run = kept(tmp_path)
    with Store.open(tmp_path / "tiny.h5") as store:
        order = WindowOrder(7, "train", store.n_tokens("train"), 16)
    starts = order.starts(5, batch_size=4).tolist()
    assert f"tokens {', '.join(map(str, starts))})" in said
    named = [r for r in run.metrics() if r["kind"] == "not_finite"]
    assert [(r["step"], r["starts"]) for r in named] == [(5, starts)]

    assert run.steps() == ([2, 4] if save_interval == 2 else [])
    assert all(is_intact(Checkpoint.open(run.checkpoint_folder(s))) for s in run.steps())
    if run.steps():
        from safetensors.torch import load_file

        saved = load_file(run.latest().folder / "model.safetensors")
        unchanged = all(torch.equal(saved[name], WEIGHTS[-1][name]) for name in saved)
        assert unchanged is not applied
    tally("faults injected")


@pytest.mark.parametrize(
    ("at", "hook", "steps"),
    [("setup", "setup", []), ("step 5", "step", [2, 4, 5]), ("teardown", "teardown", [18, 20])],
)
def test_a_failing_plugin_is_named_and_the_checkpoint_is_intact(
    train: Train, tmp_path: Path, capsys: Captured, at: str, hook: str, steps: list[int]
) -> None:
    """PLG-05."""
    code = train("--set", f"plugins.fails.at={at}", "--set", "train.save_interval=2")
    said = capsys.readouterr().err
    assert code == 1
    assert f"plugin fails (tests 1.0) failed in {hook}: RuntimeError: on purpose at {at}" in said
    assert "Traceback" not in said
    assert kept(tmp_path).steps() == steps
    if steps:
        assert kept(tmp_path).latest().step == steps[-1]
        assert is_intact(kept(tmp_path).latest())


@pytest.mark.parametrize("val_tokens", [49, 0])
def test_a_short_run_leaves_a_checkpoint_that_generates(
    train: Train, tmp_path: Path, capsys: Captured, val_tokens: int
) -> None:
    """TRN-12."""
    write_tiny_store(tmp_path / "tiny.h5", val_tokens=val_tokens)
    assert train("--set", "train.save_interval=1000", "--set", "train.eval_interval=1000") == 0
    assert kept(tmp_path).steps() == [20]
    assert (kept(tmp_path).folder / "latest").read_text() == "step-000020\n"
    capsys.readouterr()
    assert main(["generate", "one", "--prompt", "AB", "--max-new-tokens", "3"]) == 0
    assert capsys.readouterr().out.startswith("AB")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_finishes_the_step_saves_and_stops(
    train: Train, tmp_path: Path, capsys: Captured, number: signal.Signals, code: int
) -> None:
    """CLI-06 and CLI-08."""
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    stop = ("--set", f"plugins.signals.signal={int(number)}", "--set", "train.save_interval=1000")
    assert train(*stop) == code
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert number.name in said
    assert kept(tmp_path).steps() == [8]
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers

    assert train("--resume", "--without", "signals") == 0
    steps = [r["step"] for r in kept(tmp_path).metrics() if r["kind"] == "step"]
    assert steps == list(range(1, 21))

    straight = ("--run", "two")
    assert train(*straight) == 0
    losses = [
        [r["loss"] for r in kept(tmp_path, name).metrics() if r["kind"] == "step"]
        for name in ("one", "two")
    ]
    assert losses[0] == losses[1]


def test_speed_is_told_as_a_share_of_the_measured_peak(train: Train, capsys: Captured) -> None:
    assert train() == 0
    shares = re.findall(r"step .* (\d+)% of peak", capsys.readouterr().out)
    assert shares
    assert all(int(share) < 100 for share in shares)


# unusable folders ------------------------------------------------------------------------------


def test_an_unusable_run_folder_is_refused_before_step_0(
    train: Train, tmp_path: Path, capsys: Captured
) -> None:
    """CLI-17."""
    (tmp_path / "file").write_text("mine")
    assert train("--run", str(tmp_path / "file")) == 2
    assert (tmp_path / "file").read_text() == "mine"
    assert str(tmp_path / "file") in capsys.readouterr().err

    read_only = Path("/proc/run") if os.geteuid() == 0 else tmp_path / "locked" / "run"
    if os.geteuid():
        read_only.parent.mkdir(mode=0o555)
    assert train("--run", str(read_only)) == 2
    assert str(read_only) in capsys.readouterr().err


def test_a_second_run_of_the_same_name_touches_nothing(
    train: Train, tmp_path: Path, capsys: Captured
) -> None:
    """CLI-17."""
    assert train() == 0
    files = [path for path in kept(tmp_path).folder.rglob("*") if path.is_file()]
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}
    assert train("--set", "train.seed=8") == 2
    assert "holds a run already" in capsys.readouterr().err
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files} == before


# whose plugin it was ---------------------------------------------------------------------------


def test_a_checkpoint_says_which_packages_plugins_trained_it(train: Train, tmp_path: Path) -> None:
    """PLG-03."""
    assert train("--set", "plugins.fails.at=nowhere") == 0
    assert kept(tmp_path).latest().meta["plugins"] == {
        "fails": {"package": "tests", "version": "1.0"}
    }


def test_a_name_taken_twice_is_noted_in_the_run(
    train: Train, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """PLG-03: the built-in is kept, and one line says so."""
    one = KNOWN["fails"]
    contested = Found("fails", registry.OURS, "1.0", one.entry_point, rivals=("thief",))
    monkeypatch.setattr(registry, "discover", lambda: {**KNOWN, "fails": contested})
    assert train("--set", "plugins.fails.at=nowhere") == 0
    said = capsys.readouterr()
    assert (said.out + said.err).count("thief registers this name too") == 1


def test_a_plugin_asked_for_and_unknown_trains_nothing(train: Train, tmp_path: Path) -> None:
    assert train("--plugin", "fales") == 2
    assert not (tmp_path / "runs").exists()
