"""Plugins that update the weights or average them: each claim is tried."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from gptfast_plugins.ema import EMA, decay_at, exchange, update_average
from gptfast_plugins.fused_adamw import FusedAdamW
from gptfast_plugins.muon import Muon, orthogonalised, split_parameters
from plugin_helpers import enabled, found
from torch import Tensor, nn
from torch.optim import Optimizer

from gptfast.contract.tiny import Rig, build_rig, copied, require_equal_tensors
from gptfast.device.machine import find_machine
from gptfast.errors import Refused
from gptfast.host.hooks import Hooks
from gptfast.model import GPT
from gptfast.optim import build_adamw
from gptfast.plugin import Machine, Plugin, Stepped, Stepper, Want
from gptfast.profile import ModelConfig, Profile
from gptfast.run.folder import Run

pytestmark = pytest.mark.usefixtures("one_thread")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    known = found(fused_adamw=FusedAdamW, muon=Muon, ema=EMA)
    with build_rig({}, machine=None, found=known) as built:
        yield built


def optimizer_of(plugin: type[Plugin] | None, model: nn.Module, profile: Profile) -> Optimizer:
    if plugin is None:
        return build_adamw(model, profile.train)
    built = plugin(plugin.Options()).build_optimizer(model, profile)
    assert built is not None
    return built


def tiny_gpt(rig: Rig, device: str = "cpu", **changes: Any) -> tuple[GPT, Profile]:
    torch.manual_seed(3)
    profile = rig.profile({}, **changes)
    return GPT(profile.model).to(device), profile


OPTIMIZERS = pytest.mark.parametrize("plugin", [None, FusedAdamW, Muon])


# every optimizer --------------------------------------------------------------------------


@pytest.mark.parametrize("plugin", [None, Muon])
def test_gpt2_decays_its_matrices_alone_and_each_tensor_once(
    plugin: type[Plugin] | None, rig: Rig
) -> None:
    """TRN-08. On the meta device nothing of the 124 million is stored; fused AdamW takes none
    there, and has its groups from the same function as the baseline."""
    with torch.device("meta"):
        model = GPT(ModelConfig(vocab_size=50_257))
    optimizer = optimizer_of(plugin, model, rig.profile({}))
    sizes = {True: 0, False: 0}
    seen: list[int] = []
    for group in optimizer.param_groups:
        sizes[group["weight_decay"] > 0] += sum(p.numel() for p in group["params"])
        seen += [id(p) for p in group["params"]]
    assert sizes == {True: 124_318_464, False: 121_344}
    assert sorted(seen) == sorted(id(p) for p in model.parameters())


@OPTIMIZERS
def test_a_step_without_gradient_only_decays_matrices(
    plugin: type[Plugin] | None, rig: Rig
) -> None:
    """TRN-08."""
    model, profile = tiny_gpt(rig, train__learning_rate=0.01, train__weight_decay=0.5)
    before = copied(model)
    optimizer = optimizer_of(plugin, model, profile)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            assert torch.allclose(parameter, before[name] * 0.995, rtol=1e-6, atol=0)
        else:
            assert torch.equal(parameter, before[name])


@pytest.mark.parametrize("plugin", ["fused-adamw", "muon", "ema"])
def test_a_resumed_run_is_the_uninterrupted_one(plugin: str, rig: Rig, tmp_path: Path) -> None:
    profile = rig.profile({plugin: {}}, model__dropout=0.1)
    whole = rig.train(profile)
    run = Run.create(tmp_path / "run", profile_toml=profile.to_toml())
    rig.train(profile, run=run, until=3)
    again = Run.resumed(tmp_path / "run")
    rest = rig.train(profile, run=again, checkpoint=again.latest())
    assert rest.losses == whole.losses[3:]
    assert rest.val_loss == whole.val_loss
    require_equal_tensors(rest.weights, whole.weights, what=plugin)


# fused-adamw ------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_fused_adamw_computes_adamw(device: str, rig: Rig) -> None:
    """Given the same gradients, 20 steps of it are 20 steps of the baseline's."""
    pairs = [tiny_gpt(rig, device) for _ in range(2)]
    (ours, profile), (right, _) = pairs
    optimizers = optimizer_of(FusedAdamW, ours, profile), optimizer_of(None, right, profile)
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        for one, other in zip(ours.parameters(), right.parameters(), strict=True):
            one.grad = torch.randn(one.shape, generator=generator).to(device)
            other.grad = one.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for (name, one), other in zip(ours.named_parameters(), right.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-7), name


def test_fused_adamw_keeps_its_claim_over_a_run(rig: Rig) -> None:
    changes = {"train__steps": 60}
    right = rig.train(rig.profile({}, **changes)).losses
    losses = rig.train(rig.profile({"fused-adamw": {}}, **changes)).losses
    assert 0 < rig.difference(losses, right) <= FusedAdamW.tolerance


def test_fused_adamw_says_where_it_cannot_run() -> None:
    plugin = FusedAdamW(FusedAdamW.Options())
    assert plugin.supports(find_machine("cpu")).ok
    support = plugin.supports(Machine(torch.device("meta"), "nothing"))
    assert not support.ok
    assert "fused" in support.reason


# muon -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_muon_takes_the_matrices_inside_the_blocks(tied: bool, rig: Rig) -> None:
    model, _ = tiny_gpt(rig, model__tied_head=tied, model__ngram_rows=0 if tied else 8)
    hidden, rest = split_parameters(model)
    parts = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert [name for name, _ in hidden] == [f"h.{i}.{p}.weight" for i in (0, 1) for p in parts]
    assert {name for name, p in rest if p.dim() == 2} == {
        *("wte.weight", "wpe.weight"),
        *(() if tied else ("wne.table.weight", "lm_head.weight")),
    }


@pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("iterate_in", ["bfloat16", "float32"])
def test_muon_steps_as_torchs_own_two_optimizers(
    adjust_lr_fn: str, nesterov: bool, iterate_in: str, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The schedule reaches both through the joined groups, also after their state was loaded."""
    from torch.optim import _muon

    if iterate_in == "float32":
        monkeypatch.setattr(_muon, "_zeropower_via_newtonschulz", newton_schulz)
    (ours, profile), (right, _) = tiny_gpt(rig), tiny_gpt(rig)
    options = Muon.Options(
        lr=0.02,
        weight_decay=0.3,
        momentum=0.9,
        adjust_lr_fn=adjust_lr_fn,
        nesterov=nesterov,
        iterate_in=iterate_in,
    )
    joined = cast("Optimizer", Muon(options).build_optimizer(ours, profile))
    hidden, rest = split_parameters(right)
    muon = torch.optim.Muon(
        [p for _, p in hidden],
        lr=0.02,
        weight_decay=0.3,
        momentum=0.9,
        adjust_lr_fn=adjust_lr_fn,
        nesterov=nesterov,
    )
    adamw = torch.optim.AdamW(
        [
            {"params": [p for _, p in rest if p.dim() >= 2]},
            {"params": [p for _, p in rest if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=1e-2,
        betas=(0.9, 0.95),
        weight_decay=0.1,
    )
    generator = torch.Generator().manual_seed(1)
    for step in range(6):
        for one, other in zip(ours.parameters(), right.parameters(), strict=True):
            one.grad = torch.randn(one.shape, generator=generator)
            other.grad = one.grad.clone()
        if step == 3:
            joined.load_state_dict(joined.state_dict())
        for group in [*joined.param_groups, *muon.param_groups, *adamw.param_groups]:
            group["lr"] *= 0.5
        joined.step()
        muon.step()
        adamw.step()
        joined.zero_grad(set_to_none=True)
        assert all(parameter.grad is None for parameter in ours.parameters())
    if iterate_in == "bfloat16":
        require_equal_tensors(copied(ours), copied(right), what="muon")
    for one, other in zip(ours.parameters(), right.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def newton_schulz(
    x: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """As torch.optim.Muon documents it, one matrix at a time."""
    a, b, c = coefficients
    if x.size(0) > x.size(1):
        return newton_schulz(x.T, coefficients, steps, eps).T
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def test_muon_learns_faster_than_adamw_step_by_step(rig: Rig) -> None:
    """The recipe's claim, at the better of two learning rates for each, whatever the seed."""
    for seed in (1, 2, 3):
        ends = {}
        for plugins in ({}, {"muon": {}}):
            runs = [
                rig.train(
                    rig.profile(
                        plugins,
                        train__seed=seed,
                        train__steps=60,
                        train__learning_rate=rate,
                        train__eval_interval=0,
                    )
                )
                for rate in (0.01, 0.02)
            ]
            ends[bool(plugins)] = min(float(np.mean(run.losses[-5:])) for run in runs)
        assert ends[True] < 0.5 * ends[False]


@pytest.mark.parametrize("fused", [False, True])
def test_muon_works_with_a_gradient_scaler(fused: bool, rig: Rig) -> None:
    """A step with an infinite gradient is skipped for both, a finite one is taken by both."""
    model, profile = tiny_gpt(rig)
    options = Muon.Options(fused=fused)
    joined = cast("Optimizer", Muon(options).build_optimizer(model, profile))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for bad in (True, False):
        before = copied(model)
        joined.zero_grad()
        tokens = torch.arange(16)[None]
        scaler.scale(model(tokens, tokens)).backward()
        if bad:
            gradient = model.wpe.weight.grad
            assert gradient is not None
            gradient[0, 0] = torch.inf
        scaler.unscale_(joined)
        scaler.step(joined)
        scaler.update()
        for name, tensor in copied(model).items():
            assert torch.equal(tensor, before[name]) == bad, name
    assert scaler.get_scale() == 512.0


def test_muon_and_fused_adamw_do_the_same_job(rig: Rig) -> None:
    with pytest.raises(Refused, match="muon and fused-adamw conflict"):
        rig.plan(rig.profile({"muon": {}, "fused-adamw": {}}))


# ema --------------------------------------------------------------------------------------


class WeightsSeen(Plugin):
    """Keeps a copy of the weights after every step."""

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.seen: list[dict[str, Tensor]] = []

    def wrap_model(self, model: nn.Module) -> nn.Module:
        self._model = model
        self.seen.append(copied(model))
        return model

    def step(self, event: Stepped) -> Want:
        self.seen.append(copied(self._model))
        return Want.NOTHING


class EverySecond:
    """A stepper that skips the odd updates."""

    def __init__(self) -> None:
        self.calls = 0

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def unscale(self, optimizer: Optimizer) -> None: ...

    def step(self, optimizer: Optimizer) -> bool:
        self.calls += 1
        if self.calls % 2:
            return False
        optimizer.step()
        return True


class Skips(Plugin):
    def build_stepper(self) -> Stepper:
        return EverySecond()


def averaged(path: list[dict[str, Tensor]], decay: float) -> dict[str, Tensor]:
    """The formula, in float64: the first is where training starts."""
    average = {name: tensor.double() for name, tensor in path[0].items()}
    for n, weights in enumerate(path[1:], start=1):
        d = min(decay, (1 + n) / (10 + n))
        average = {name: d * a + (1 - d) * weights[name].double() for name, a in average.items()}
    return average


def test_ema_changes_no_bit_of_the_training(rig: Rig) -> None:
    right = rig.train(rig.profile({}, model__dropout=0.1))
    with_ema = rig.train(rig.profile({"ema": {}}, model__dropout=0.1))
    assert with_ema.losses == right.losses
    assert with_ema.val_loss != right.val_loss
    require_equal_tensors(with_ema.weights, right.weights, what="ema")


@pytest.mark.parametrize("decay", [0.5, 0.999])
def test_evaluations_see_the_average_of_the_path(decay: float, rig: Rig) -> None:
    """Its loss is that of a model with the averaged weights; they are back to the bit after it."""
    spy = enabled("spy", WeightsSeen)
    profile = rig.profile({"ema": {"decay": decay}}, train__steps=20)
    trainer, _ = rig.trainer(profile, extra=[spy])
    assert isinstance(spy.plugin, WeightsSeen)
    with trainer:
        trainer.run()
        average = {n: t.float() for n, t in averaged(spy.plugin.seen, decay).items()}
        with suppress(ZeroDivisionError), trainer.hooks.eval_scope():
            inside = copied(trainer.raw_model)
            inside_loss = trainer.scorer.score("val")
            raise ZeroDivisionError
        require_equal_tensors(copied(trainer.raw_model), spy.plugin.seen[-1], what="after it")
        trainer.raw_model.load_state_dict(average)
        right_loss = trainer.scorer.score("val")
    for name, tensor in inside.items():
        assert torch.allclose(tensor, average[name], rtol=1e-5, atol=1e-7), name
    assert inside_loss is not None
    assert right_loss is not None
    assert inside_loss.loss == pytest.approx(right_loss.loss, rel=1e-5)


def test_a_skipped_update_is_not_averaged(rig: Rig) -> None:
    profile = rig.profile({"ema": {}}, train__steps=8)
    spies = [enabled("spy", WeightsSeen), enabled("skips", Skips)]
    trainer, _ = rig.trainer(profile, extra=spies)
    spy = spies[0].plugin
    assert isinstance(spy, WeightsSeen)
    with trainer:
        trainer.run()
        with trainer.hooks.eval_scope():
            inside = copied(trainer.raw_model)
    right = averaged(spy.seen[::2], 0.999)
    for name, tensor in inside.items():
        assert torch.allclose(tensor, right[name].float(), rtol=1e-5, atol=1e-7), name


def test_eval_alone_has_the_average(rig: Rig, tmp_path: Path) -> None:
    """`wrap_model` and `load_state`, without `ready`: what `gptfast eval` does."""
    profile = rig.profile({"ema": {}})
    run = Run.create(tmp_path / "run", profile_toml=profile.to_toml())
    trained = rig.train(profile, run=run)
    checkpoint = run.latest()
    model = GPT(profile.model)
    checkpoint.load_model(model)
    with Hooks(rig.plan(profile), note=print) as hooks:
        assert hooks.wrap_model(model) is model
        hooks.load_state(checkpoint.load_trainer()["plugins"])
        require_equal_tensors(copied(model), trained.weights, what="outside")
        trainer, _ = rig.trainer(rig.profile({}))
        with trainer, hooks.eval_scope():
            trainer.scorer.model = model
            score = trainer.scorer.score("val")
        require_equal_tensors(copied(model), trained.weights, what="after it")
    assert score is not None
    assert score.loss == trained.val_loss


@pytest.mark.parametrize("device", DEVICES)
def test_exchanged_twice_is_as_it_was(device: str) -> None:
    """NaN and negative zero too."""
    one = [torch.tensor([1.0, -0.0, torch.nan, 3e-45], device=device), torch.ones(2, device=device)]
    other = [torch.full((4,), 2.0, device=device), torch.zeros(2, device=device)]
    bits = [tensor.view(torch.int32).clone() for tensor in (*one, *other)]
    storage = [tensor.data_ptr() for tensor in (*one, *other)]
    exchange(one, other)
    assert [tensor.view(torch.int32).tolist() for tensor in (*other, *one)] == [
        b.tolist() for b in bits
    ]
    exchange(one, other)
    assert [t.view(torch.int32).tolist() for t in (*one, *other)] == [b.tolist() for b in bits]
    assert [tensor.data_ptr() for tensor in (*one, *other)] == storage


def test_decay_warms_up_to_its_value() -> None:
    assert decay_at(1, 0.999) == 2 / 11
    assert decay_at(90, 0.999) == 91 / 100
    assert decay_at(10**6, 0.999) == 0.999
    average, weights = [torch.zeros(3)], [torch.ones(3)]
    update_average(average, weights, decay=0.75)
    assert average[0].tolist() == [0.25] * 3


@pytest.mark.gpu
def test_averaging_never_waits_for_the_gpu() -> None:
    weights = [torch.randn(64, 64, device="cuda") for _ in range(10)]
    average = [w.clone() for w in weights]
    torch.cuda.set_sync_debug_mode("error")
    try:
        update_average(average, weights, decay=0.9)
        exchange(average, weights)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("rank", [8, 2])
def test_gram_matrices_take_the_way_of_the_iteration_itself(rank: int) -> None:
    """Matrices of several shapes at once, of full rank and not, large, tiny and zero."""
    generator = torch.Generator().manual_seed(0)
    coefficients = (3.4445, -4.7750, 2.0315)

    def update(rows: int, columns: int, scale: float) -> torch.Tensor:
        left = torch.randn(rows, rank, generator=generator)
        return scale * left @ torch.randn(rank, columns, generator=generator)

    updates = [update(8, 8, 1.0), update(24, 8, 1e-6), update(8, 40, 1e4), update(12, 16, 1.0)]
    found = orthogonalised([*updates, torch.zeros(8, 8)], coefficients, 5, 1e-7)
    for one, x in zip(found, updates, strict=False):
        exact = newton_schulz(x.double(), coefficients, 5, 1e-7)
        torch.testing.assert_close(one, exact.float(), rtol=1e-4, atol=1e-4)
        singular = torch.linalg.svdvals(one)[: min(rank, *x.shape)]
        assert 0.6 < singular.min() <= singular.max() < 1.3
    assert not found[-1].any()


def test_a_resumed_optimizer_has_the_options_of_the_profile_and_the_moments_of_the_checkpoint(
    rig: Rig, tmp_path: Path
) -> None:
    plain = rig.profile(train__steps=2)
    run = Run.create(tmp_path / "run", profile_toml=plain.to_toml())
    rig.train(plain, run=run)
    changed = rig.profile(
        {"fused-adamw": {}}, train__steps=4, train__weight_decay=0.3, train__beta2=0.5
    )
    trainer, _ = rig.trainer(changed, run=run, checkpoint=run.latest())
    with trainer:
        group = trainer.optimizer.param_groups[0]
        assert (group["fused"], group["weight_decay"]) == (True, 0.3)
        assert group["betas"] == (0.9, 0.5)
        state = trainer.optimizer.state[group["params"][0]]
        assert float(state["step"]) == 2.0
        assert state["exp_avg"].abs().sum() > 0
        trainer.run()


def test_a_checkpoint_of_another_optimizer_is_refused(rig: Rig, tmp_path: Path) -> None:
    plain = rig.profile(train__steps=2)
    run = Run.create(tmp_path / "run", profile_toml=plain.to_toml())
    rig.train(plain, run=run)
    trainer, _ = rig.trainer(rig.profile({"muon": {}}), run=run, checkpoint=run.latest())
    with pytest.raises(Refused, match=r"its optimizer has other parameters"), trainer:
        pass
