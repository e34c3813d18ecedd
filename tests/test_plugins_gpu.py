"""Plugins made for GPUs: what of them a CPU can run is run here, the rest is marked `gpu`."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from gptfast_plugins import flash
from gptfast_plugins.adamw_8bit import CODES, AdamW8Bit, EightBit
from gptfast_plugins.flash import Flash
from gptfast_plugins.fp8 import Fp8, fits, to_float8
from gptfast_plugins.gc_freeze import GcFreeze
from gptfast_plugins.liger import IGNORE, Liger
from plugin_helpers import enabled, rig_of
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
)

from gptfast.contract.tiny import STEPS, Rig, build_rig, require_equal_tensors
from gptfast.device.machine import find_machine
from gptfast.errors import Refused
from gptfast.host.hooks import Hooks
from gptfast.host.registry import discover
from gptfast.model import GPT, token_loss
from gptfast.plugin import Machine, Plugin, Profile, Stage, Stepped, Want
from gptfast.profile import ModelConfig
from gptfast.run.folder import Run

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = find_machine("cpu")
GPU = Machine(torch.device("cuda", 0), "a GPU")


@pytest.fixture
def rig() -> Iterator[Rig]:
    with build_rig({}, machine=None, found=discover()) as rig:
        yield rig


def resumed(rig: Rig, profile: Profile, folder: Path) -> tuple[Any, Any]:
    """The rest of a run that was stopped, and the whole run."""
    run = Run.create(folder / "run", profile_toml=profile.to_toml())
    rig.train(profile, run=run, until=3)
    again = Run.resumed(folder / "run")
    return rig.train(profile, run=again, checkpoint=again.latest()), rig.train(profile)


def tokens(config: ModelConfig) -> Tensor:
    assert config.vocab_size is not None
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, config.vocab_size, (4, config.block_size + 1), generator=generator)


# gc-freeze --------------------------------------------------------------------------------


class CountsCollections(Plugin):
    """What the collector did in each step."""

    stage = Stage.REPORT
    collected: list[int]

    def ready(self, parts: Any) -> None:
        type(self).collected = []
        self.before = sum(one["collections"] for one in gc.get_stats())
        self.states = [(gc.isenabled(), gc.get_freeze_count() > 1000)]

    def step(self, event: Stepped) -> Want:
        assert self.states == [(False, True)]
        now = sum(one["collections"] for one in gc.get_stats())
        type(self).collected.append(now - self.before)
        self.before = now
        return Want.NOTHING


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.usefixtures("nothing_frozen")
def test_collections_are_made_between_steps_alone() -> None:
    gc.collect()  # what is due now is not the run's
    with rig_of(gc_freeze=GcFreeze, counts=CountsCollections) as rig:
        plugins = {"gc-freeze": {"interval": 4}, "counts": {}}
        assert gc.get_freeze_count() == 0
        rig.train(rig.profile(plugins, train__eval_interval=0))
        assert gc.isenabled()
        assert gc.get_freeze_count() == 0
    # The fourth by hand; the evaluation behind the last step is not in a step.
    assert CountsCollections.collected == [0, 0, 0, 1, 0, 0]


def test_what_somebody_else_froze_stays_frozen(rig: Rig) -> None:
    frozen = gc.get_freeze_count()
    assert frozen > 0
    try:
        gc.disable()
        rig.train(rig.profile({"gc-freeze": {}}))
        assert gc.get_freeze_count() >= frozen
        assert not gc.isenabled()
    finally:
        gc.enable()


# adamw-8bit -------------------------------------------------------------------------------

PLAIN = {"adamw-8bit": {"compiled": False}}


def bytes_of(tree: Any) -> int:
    if isinstance(tree, Tensor):
        return tree.nbytes
    inner = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return sum(map(bytes_of, inner))


def test_moments_take_a_quarter_of_the_room(rig: Rig) -> None:
    """A little over: scales for each 256, and the small tensors as they were."""
    wide = {"model__n_embd": 128, "train__steps": 1, "train__eval_interval": 0}
    room = {}
    for name, plugins in (("float32", {}), ("8 bits", PLAIN)):
        trainer, _ = rig.trainer(rig.profile(plugins, **wide))
        with trainer:
            trainer.run()
            room[name] = bytes_of(trainer.optimizer.state_dict())
    assert 0.25 < room["8 bits"] / room["float32"] < 0.3


def test_8_bits_keep_their_claim_over_a_run(rig: Rig) -> None:
    changes = {"train__steps": 20}
    right = rig.train(rig.profile({}, **changes)).losses
    losses = rig.train(rig.profile(PLAIN, **changes)).losses
    assert 0 < rig.difference(losses, right) <= AdamW8Bit.tolerance


def test_8_bit_moments_are_stored_plainly_and_come_back(rig: Rig, tmp_path: Path) -> None:
    profile = rig.profile(PLAIN, model__dropout=0.1)
    rest, whole = resumed(rig, profile, tmp_path)
    assert rest.losses == whole.losses[3:]
    require_equal_tensors(rest.weights, whole.weights, what="adamw-8bit")
    trainer = Run(tmp_path / "run").latest().load_trainer()
    moments = [one["exp_avg"] for one in trainer["optimizer"][CODES]["state"].values()]
    coded = [moment for moment in moments if isinstance(moment, dict)]
    assert {moment["codes"].dtype for moment in coded} == {torch.uint8}
    assert any(moment["codes"].any() for moment in coded)
    assert {type(one) for one in moments if not isinstance(one, dict)} == {Tensor}


@pytest.mark.parametrize(("first", "then"), [({}, PLAIN), (PLAIN, {})])
def test_8_bits_and_32_do_not_take_each_others_moments(
    first: Any, then: Any, rig: Rig, tmp_path: Path
) -> None:
    profile = rig.profile(first, train__steps=2)
    run = Run.create(tmp_path / "run", profile_toml=profile.to_toml())
    rig.train(profile, run=run)
    trainer, _ = rig.trainer(rig.profile(then), run=run, checkpoint=run.latest())
    with pytest.raises(Refused, match=r"resume with the optimizer plugins"), trainer:
        pass


def test_compiled_updates_are_the_plain_ones() -> None:
    support = AdamW8Bit(AdamW8Bit.Options()).supports(CPU)
    if not support.ok:
        pytest.skip(support.reason)
    weights = []
    for compiled in (True, False):
        weight = nn.Parameter(torch.linspace(-1, 1, 64 * 64).reshape(64, 64))
        optimizer = EightBit(
            [{"params": [weight]}], lr=0.1, betas=(0.9, 0.99), block_size=256, compiled=compiled
        )
        for step in range(3):
            weight.grad = (weight.detach() * (step + 1)).sin()
            optimizer.step()
        weights.append(weight.detach())
    torch.compiler.reset()
    assert torch.allclose(*weights, rtol=0, atol=1e-5)


# fp8 --------------------------------------------------------------------------------------

EMULATED = {"amp": {"dtype": "bf16"}, "fp8": {"emulate": True}}


def test_layers_that_fit_multiply_in_float8_and_keep_their_parameters() -> None:
    model = GPT(ModelConfig(n_layer=1, n_head=2, n_embd=48, vocab_size=64, tied_head=False))
    model.h[0].attn.c_proj = nn.Linear(48, 40)
    before = dict(model.named_parameters())
    to_float8(model, recipe="tensorwise", emulate=True)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    converted = [n for n, m in model.named_modules() if type(m).__name__ == "Float8Linear"]
    assert converted == ["h.0.attn.c_attn", "h.0.mlp.c_fc", "h.0.mlp.c_proj"]
    assert not fits(model.lm_head, "lm_head")


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_float8_keeps_its_claim(recipe: str, rig: Rig) -> None:
    """Emulated; against bf16, which it is added to."""
    changes = {"model__n_embd": 64, "train__learning_rate": 1e-3}
    plugins = {**EMULATED, "fp8": {"emulate": True, "recipe": recipe}}
    found = rig.train(rig.profile(plugins, **changes)).losses
    right = rig.train(rig.profile({"amp": EMULATED["amp"]}, **changes)).losses
    assert 1e-5 < rig.difference(found, right) <= Fp8.tolerance


def test_a_float8_run_resumes_and_its_weights_load_without_it(rig: Rig, tmp_path: Path) -> None:
    profile = rig.profile(EMULATED)
    rest, whole = resumed(rig, profile, tmp_path)
    assert rest.losses == whole.losses[3:]
    plain = GPT(profile.model)
    Run(tmp_path / "run").latest().load_model(plain)
    require_equal_tensors(plain.state_dict(), whole.weights, what="loaded without fp8")


def test_float8_says_what_it_needs(monkeypatch: pytest.MonkeyPatch, rig: Rig) -> None:
    plugin = Fp8(Fp8.Options())
    assert "needs an NVIDIA GPU" in plugin.supports(CPU).reason
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert "capability 9.0, this is 8.9" in plugin.supports(GPU).reason
    with pytest.raises(Refused, match="fp8 requires amp"):
        rig.plan(rig.profile({"fp8": {}}))
    trainer, recorder = rig.trainer(rig.profile(EMULATED))
    said: list[str] = []
    recorder.note = said.append
    trainer.hooks._note = said.append
    with trainer:
        assert [line for line in said if "fp8 without compile" in line] != []


# liger ------------------------------------------------------------------------------------


@pytest.fixture
def liger_kernel(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Liger's functions by their documented meaning, in torch; returns what was called."""
    called: list[str] = []

    def liger_rms_norm(
        X: Tensor, W: Tensor, eps: float, offset: float = 0.0, casting_mode: str = "llama",
        in_place: bool = True,
    ) -> Tensor:  # fmt: skip
        called.append("rms")
        assert (offset, casting_mode, in_place) == (0.0, "llama", False)
        return X * torch.rsqrt(X.square().mean(-1, keepdim=True) + eps) * W

    def liger_layer_norm(X: Tensor, W: Tensor, B: Tensor, eps: float) -> Tensor:
        called.append("layer")
        centred = X - X.mean(-1, keepdim=True)
        return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * W + B

    def liger_fused_linear_cross_entropy(
        input: Tensor, weight: Tensor, target: Tensor, *, ignore_index: int, reduction: str,
        softcap: float | None, accum_dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        called.append("loss")
        logits = input @ weight.T
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        assert accum_dtype == torch.float32
        return functional.cross_entropy(
            logits, target, ignore_index=ignore_index, reduction=reduction
        )

    module = ModuleType("liger_kernel.transformers.functional")
    for function in (liger_rms_norm, liger_layer_norm, liger_fused_linear_cross_entropy):
        setattr(module, function.__name__, function)
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return called


@pytest.mark.parametrize(
    ("norm", "bias", "expected"),
    [
        ("rmsnorm", True, ["rms"] * 3 + ["loss"]),
        ("layernorm", True, ["layer"] * 3 + ["loss"]),
        ("layernorm", False, ["loss"]),
    ],
)
def test_liger_does_the_norms_and_the_loss(
    norm: Any, bias: bool, expected: list[str], liger_kernel: list[str]
) -> None:
    config = ModelConfig(
        n_layer=1, n_head=2, n_embd=32, block_size=16, vocab_size=61, padded_vocab_size=64,
        norm=norm, bias=bias, logit_softcap=5.0,
    )  # fmt: skip
    torch.manual_seed(2)
    model = GPT(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "ln_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        model.wte.weight[61:] = 3.0  # a padded row that counted would be seen
    ids = tokens(config)
    ids[:, -1] = IGNORE
    losses = [model(ids[:, :-1], ids[:, 1:])]
    Liger(Liger.Options(loss=True)).wrap_model(model)
    losses.append(model(ids[:, :-1], ids[:, 1:]))
    assert liger_kernel == expected
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-6)
    gradients = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]
    for one, other in zip(*gradients, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)


def test_liger_leaves_the_loss_alone_unless_asked(liger_kernel: list[str]) -> None:
    model = GPT(ModelConfig(n_layer=1, n_head=2, n_embd=32, block_size=16, vocab_size=61))
    Liger(Liger.Options()).wrap_model(model)
    assert model.token_loss is token_loss
    Liger(Liger.Options(norms=False)).wrap_model(model)
    assert Liger(Liger.Options()).supports(CPU).reason == "Liger's kernels are for GPUs"


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [{}, {"norm": "rmsnorm", "logit_softcap": 8.0}])
def test_liger_keeps_its_claim_on_a_gpu(shape: dict[str, Any]) -> None:
    support = Liger(Liger.Options()).supports(find_machine("cuda"))
    if not support.ok:
        pytest.skip(support.reason)
    changes = {f"model__{key}": value for key, value in shape.items()}
    plugins = {"liger": {"loss": True}}
    with build_rig(plugins, machine=find_machine("cuda"), found=discover()) as rig:
        fused = rig.train(rig.profile(**changes))
        plain = rig.train(rig.profile({}, **changes))
    assert rig.difference(fused.losses, plain.losses) <= Liger.tolerance
    assert fused.val_loss == pytest.approx(plain.val_loss, rel=Liger.tolerance)


# flash: FlashAttention 3 and 4 ------------------------------------------------------------


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stand-ins for both in torch's own registry; returns what they were told."""
    told: list[str] = []

    class Handle:
        def __init__(self, name: str) -> None:
            self.name = name
            told.append(f"{name} on")

        def remove(self) -> None:
            told.append(f"{self.name} off")

    from torch.nn.attention import _registry

    for name in ("FA3", "FA4"):
        monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, name, lambda name=name: Handle(name))
    return told


def on_card(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], **faults: str) -> Flash:
    """A plugin on a card with both packages, whose trials end as `faults` says; else well."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(flash, "is_installed", lambda name: True)
    monkeypatch.setattr(flash, "fault", lambda name, device: faults.get(name))
    return Flash(Flash.Options())


def found_by(plugin: Flash) -> tuple[str | None, str]:
    support = plugin._find_implementation(GPU, "")
    assert support.ok
    return plugin._implementation, support.reason


@pytest.mark.parametrize(
    ("capability", "faults", "expected"),
    [
        ((9, 0), {}, ("FA3", "FA3")),
        ((9, 0), {"FA3": "no image"}, ("FA4", "FA4")),
        ((10, 0), {}, ("FA4", "FA4")),
        ((12, 0), {}, (None, "")),
        (
            (9, 0),
            {"FA3": "no image", "FA4": "no image"},
            (None, "torch's own kernels; FA3: no image; FA4: no image"),
        ),
    ],
)
def test_auto_takes_what_the_card_runs_and_the_trial_lets_pass(
    capability: tuple[int, int],
    faults: dict[str, str],
    expected: tuple[str | None, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert found_by(on_card(monkeypatch, capability, **faults)) == expected


def test_an_implementation_is_on_during_the_run_alone(registered: list[str]) -> None:
    profile = Profile(model=ModelConfig(vocab_size=61))
    one = enabled("flash", Flash)
    one.plugin._implementation = "FA3"
    activate_flash_attention_impl("FA4")
    try:
        with Hooks([one], note=print) as hooks:
            hooks.setup(profile, CPU)
            assert current_flash_attention_impl() == "FA3"
            assert registered == ["FA4 on", "FA4 off", "FA3 on"]
        assert current_flash_attention_impl() == "FA4"
        said: list[str] = []
        with Hooks([one], note=said.append) as hooks:
            hooks.setup(profile.replace({"model.dropout": 0.1}), CPU)
            assert current_flash_attention_impl() == "FA4"
        assert "it knows no dropout" in said[0]
    finally:
        restore_flash_attention_impl()


def test_a_build_that_ends_the_process_is_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashAttention calls exit() where its build has no code for the card."""
    (tmp_path / "flash_attn_interface.py").write_text("")
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nprint('CUDA error: no kernel image', file=sys.stderr)\n"
        "sys.stderr.flush()\nos._exit(1)\n"
    )
    assert not flash.is_installed("FA3")
    assert not flash.is_installed("FA4")
    monkeypatch.syspath_prepend(tmp_path)
    assert flash.is_installed("FA3")
    monkeypatch.setenv("PYTHONPATH", os.fspath(tmp_path))
    assert flash.fault("FA3", "cuda:0") == "CUDA error: no kernel image"


@pytest.mark.gpu
def test_the_trial_itself_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's own kernel in place of another's, it must find nothing."""
    trial = flash.TRIAL.replace("activate_flash_attention_impl(sys.argv[1])", "")
    monkeypatch.setattr(flash, "TRIAL", trial)
    assert flash.fault("FA3", "cuda:0") is None


# no step waits for the device -------------------------------------------------------------

WAYS: list[dict[str, dict[str, Any]]] = [
    {},
    {"prefetch": {}},
    {"resident": {}},
    {"amp": {}, "flash": {}, "fused-adamw": {}, "resident": {}, "gc-freeze": {}},
    {"amp": {}, "flash": {}, "vocab-pad": {}, "compile": {}, "chunked-loss": {}, "prefetch": {}},
    {"compile": {"mode": "reduce-overhead", "optimizer": True}, "accumulate": {"micro_batch": 2}},
]


@pytest.mark.gpu
@pytest.mark.parametrize("plugins", WAYS, ids=lambda plugins: "-".join(plugins) or "none")
def test_no_step_waits_but_one_that_is_logged(plugins: dict[str, dict[str, Any]]) -> None:
    with build_rig(plugins, machine=find_machine("cuda"), found=discover()) as rig:
        profile = rig.profile(train__log_interval=STEPS, train__eval_interval=0)
        trainer, _ = rig.trainer(profile)
        with trainer:
            trainer.run(STEPS // 2)
            torch.cuda.set_sync_debug_mode("error")
            try:
                while trainer.progress.step < STEPS - 1:
                    trainer.one_step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            trainer.run()


@pytest.mark.gpu
def test_a_compiled_update_in_cuda_graphs_trains_as_without() -> None:
    plugins = {"compile": {"mode": "reduce-overhead", "optimizer": True}}
    with build_rig(plugins, machine=find_machine("cuda"), found=discover()) as rig:
        graphs = rig.train(rig.profile(train__micro_batch=2))
        plain = rig.train(rig.profile({}, train__micro_batch=2))
    assert rig.difference(graphs.losses, plain.losses) <= 5e-3


def test_each_forward_pass_begins_a_new_iteration_of_cuda_graphs(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two micro-batches a step."""
    begun: list[int] = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: begun.append(1))
    changes: dict[str, Any] = {"train__micro_batch": 2, "train__eval_interval": 0}
    for mode, expected in (("default", 0), ("reduce-overhead", 2)):
        begun.clear()
        plugins = {"amp": {"dtype": "bf16"}, "compile": {"backend": "eager", "mode": mode}}
        trainer, _ = rig.trainer(rig.profile(plugins, **changes))
        with trainer:
            trainer.one_step()
        assert len(begun) == expected
