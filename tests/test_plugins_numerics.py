"""Each plugin that changes numbers keeps its claim, and does what it is there for."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from gptfast_plugins import chunked_loss
from gptfast_plugins.activation_checkpointing import ActivationCheckpointing, checkpoint_block
from gptfast_plugins.amp import Amp, ScaledStepper, native_dtype
from gptfast_plugins.chunked_loss import ChunkedLoss, chunked_token_loss, recomputed_loss
from gptfast_plugins.cudnn_benchmark import CudnnBenchmark
from gptfast_plugins.flash import Flash, attention_backend
from gptfast_plugins.tf32 import Tf32, tf32_matmul
from gptfast_plugins.vocab_pad import VocabPad, padded
from plugin_helpers import enabled
from pydantic import ValidationError
from torch import Tensor
from torch.nn import functional

from gptfast.contract.tiny import Recorder
from gptfast.data.store import Store
from gptfast.device.machine import find_machine
from gptfast.errors import Refused
from gptfast.host.hooks import Hooks
from gptfast.host.registry import Enabled
from gptfast.model import GPT, IGNORE, KVCache, count_parameters, token_loss
from gptfast.plugin import Machine
from gptfast.profile import ModelConfig, Profile
from gptfast.run.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS = 20
CPU = find_machine("cpu")
GPU = Machine(torch.device("cuda", 0), "a GPU")
HERE = Path(__file__).parent


@pytest.fixture
def corpus(tmp_path: Path) -> Any:
    """`corpus(vocab_size)`: a store whose ids are skewed as words are."""
    opened = []

    def make(vocab_size: int) -> Store:
        path = tmp_path / f"{vocab_size}.h5"
        ids = np.random.default_rng(0).zipf(1.3, 8000) % vocab_size
        with h5py.File(path, "w") as file:
            file["tokens"] = ids.astype(np.uint16)
        opened.append(Store.open(path))
        return opened[-1]

    yield make
    for store in opened:
        store.close()


def profile_of(vocab_size: int, **changes: Any) -> Profile:
    model = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32, "vocab_size": vocab_size}
    train = {
        "steps": STEPS,
        "batch_size": 8,
        "learning_rate": 1e-3,
        "warmup_steps": 2,
        "log_interval": 1,
        "save_interval": 0,
        "eval_interval": 0,
    }
    profile = Profile.model_validate({"model": model, "train": train})
    return profile.replace({key.replace("__", "."): value for key, value in changes.items()})


def trainer_of(store: Store, profile: Profile, *plugins: Enabled) -> tuple[Trainer, Recorder]:
    recorder = Recorder()
    hooks = Hooks(plugins, note=recorder.note)
    return Trainer(profile, hooks=hooks, machine=CPU, store=store, listener=recorder), recorder


def losses_of(store: Store, profile: Profile, *plugins: Enabled) -> list[float]:
    trainer, recorder = trainer_of(store, profile, *plugins)
    with trainer:
        trainer.run()
    assert len(recorder.losses) == profile.train.steps
    return recorder.losses


def drift(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) / b for a, b in zip(one, other, strict=True))


def tiny_model(**changes: Any) -> GPT:
    torch.manual_seed(3)
    config = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 16, "vocab_size": 61}
    return GPT(ModelConfig(**{**config, **changes}))


def tokens(seed: int = 0, *, rows: int = 3, length: int = 17, vocab_size: int = 61) -> Tensor:
    return torch.randint(vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed))


def test_importing_the_plugins_imports_no_torch() -> None:
    modules = (
        "activation_checkpointing amp chunked_loss compile cudnn_benchmark flash tf32 vocab_pad"
    )
    lines = [f"import gptfast_plugins.{name}" for name in modules.split()]
    code = "; ".join([*lines, "import sys", "sys.exit('torch' in sys.modules)"])
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# vocab-pad -------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [61, 65, 257, 1000])
@pytest.mark.parametrize("multiple", [64, 128])
def test_padding_the_vocabulary_changes_no_loss(
    corpus: Any, vocab_size: int, multiple: int
) -> None:
    store, profile = corpus(vocab_size), profile_of(vocab_size)
    with_it = losses_of(store, profile, enabled("vocab-pad", VocabPad, multiple=multiple))
    assert drift(with_it, losses_of(store, profile)) <= VocabPad.tolerance


def test_padding_an_untied_head_changes_no_loss(corpus: Any) -> None:
    store, profile = corpus(61), profile_of(61, model__tied_head=False)
    with_it = losses_of(store, profile, enabled("vocab-pad", VocabPad))
    assert drift(with_it, losses_of(store, profile)) <= VocabPad.tolerance


def test_gpt2_is_padded_to_the_well_known_size() -> None:
    assert [padded(50_257, multiple) for multiple in (64, 128)] == [50_304, 50_304]
    profile = Profile.model_validate({"model": {"vocab_size": 50_257}})
    with torch.device("meta"):
        model = GPT(VocabPad(VocabPad.Options()).configure(profile).model)
    assert count_parameters(model) == 124_475_904


def test_padded_rows_are_never_predicted_and_stay_zero(corpus: Any) -> None:
    trainer, _ = trainer_of(corpus(61), profile_of(61), enabled("vocab-pad", VocabPad))
    with trainer:
        trainer.run()
        model = trainer.raw_model
        assert model.wte.weight.shape == (128, 32)
        assert torch.equal(model.wte.weight[61:], torch.zeros(67, 32))
        assert model(tokens()[:, :-1]).shape == (3, 16, 61)


@pytest.mark.parametrize("multiple", [0, 4, 96, 100])
def test_a_multiple_that_helps_nothing_is_refused(multiple: int) -> None:
    with pytest.raises(ValidationError, match="power of two from 8: use 64 or 128"):
        VocabPad.Options(multiple=multiple)


# flash -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["auto", "flash", "math"])
@pytest.mark.parametrize("n_kv_head", [None, 1])
def test_fused_attention_equals_attention_written_out(backend: Any, n_kv_head: int | None) -> None:
    """GEN-01: a mask and `is_causal` are never both given, which the math kernel would refuse."""
    plain = tiny_model(n_kv_head=n_kv_head)
    fused = tiny_model(n_kv_head=n_kv_head, attention="sdpa")
    batch = tokens()
    plain(batch[:, :-1], batch[:, 1:]).backward()
    with attention_backend(backend):
        fused(batch[:, :-1], batch[:, 1:]).backward()
        cache = KVCache(fused.config, 3, device=torch.device("cpu"), dtype=torch.float32)
        parts = [fused(part, cache=cache) for part in batch[:, :16].split([5, 1, 10], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), plain(batch[:, :16]), atol=1e-5, rtol=1e-5)
    for one, other in zip(fused.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("backend", ["auto", "math"])
def test_fused_attention_trains_with_dropout(corpus: Any, backend: str) -> None:
    """GEN-01: the forbidden pair of arguments is refused only with dropout."""
    profile = profile_of(61, model__dropout=0.1)
    losses = losses_of(corpus(61), profile, enabled("flash", Flash, backend=backend))
    assert losses[-1] < losses[0]


def test_fused_attention_keeps_its_claim(corpus: Any) -> None:
    store, profile = corpus(61), profile_of(61)
    with_it = losses_of(store, profile, enabled("flash", Flash))
    assert drift(with_it, losses_of(store, profile)) <= Flash.tolerance


@pytest.mark.parametrize("attention", ["plain", "sdpa"])
@pytest.mark.parametrize("half", [False, True], ids=["float32", "bf16"])
def test_attention_never_sees_the_future(attention: str, half: bool) -> None:
    """GEN-02: not a bit before a changed token changes, and no gradient reaches back from it."""
    model = tiny_model(attention=attention).eval()
    batch = tokens()[:, :-1]
    changed = batch.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 61
    with autocast_if(half):
        one, other = model(batch), model(changed)
        assert torch.equal(one[:, :9], other[:, :9])
        assert not torch.equal(one[:, 9:], other[:, 9:])
        inputs: list[Tensor] = []
        model.wte.register_forward_hook(lambda _m, _i, out: inputs.append(out) or out)
        logits = model(batch)
    (gradient,) = torch.autograd.grad(logits[:, 6].float().sum(), inputs)
    assert torch.count_nonzero(gradient[:, 7:]) == 0
    assert torch.count_nonzero(gradient[:, :7]) > 0


def autocast_if(half: bool) -> AbstractContextManager[object]:
    return torch.amp.autocast("cpu", dtype=torch.bfloat16) if half else nullcontext()


@pytest.mark.parametrize("attention", ["plain", "sdpa"])
def test_evaluation_and_text_are_free_of_dropout(corpus: Any, attention: str) -> None:
    """EVL-02: equal twice, equal to the same weights without dropout, and dropout is on again."""
    store = corpus(61)
    profile = profile_of(61, model__dropout=0.5, model__attention=attention, train__steps=2)
    trainer, _ = trainer_of(store, profile)
    with trainer:
        trainer.run()
        scores = [trainer.scorer.score("train", max_targets=100) for _ in range(2)]
        assert trainer.model.training
        bare = GPT(profile.replace({"model.dropout": 0.0, "model.attention": "plain"}).model)
        bare.load_state_dict(trainer.raw_model.state_dict())
        trainer.scorer.model = bare
        without = trainer.scorer.score("train", max_targets=100)
    assert scores[0] == scores[1]
    assert scores[0] is not None
    assert without is not None
    assert scores[0].loss == pytest.approx(without.loss, abs=1e-5)


def test_a_kernel_that_this_device_lacks_is_found_by_trying() -> None:
    support = Flash(Flash.Options(backend="efficient")).supports(CPU)
    assert not support.ok
    assert 'backend = "efficient" failed' in support.reason
    assert "\n" not in support.reason
    assert Flash(Flash.Options()).supports(CPU).ok


# chunked-loss ----------------------------------------------------------------------------------


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("chunk_tokens", [1, 7, 51, 1000])
def test_chunks_have_the_gradients_of_the_whole(softcap: float | None, chunk_tokens: int) -> None:
    whole = losses_and_gradients(double_token_loss, torch.float64, softcap)
    parts = losses_and_gradients(
        partial(chunked_token_loss, chunk_tokens=chunk_tokens), torch.float64, softcap
    )
    for one, other in zip(parts, whole, strict=True):
        torch.testing.assert_close(one, other, atol=1e-13, rtol=1e-13)


@pytest.mark.parametrize("chunk_tokens", [7, 1000])
def test_torchs_own_chunks_agree_too(chunk_tokens: int) -> None:
    if not chunked_loss.has_linear_cross_entropy():
        pytest.skip("this torch has no chunked linear_cross_entropy")
    whole = losses_and_gradients(token_loss, torch.float32, None)
    parts = losses_and_gradients(
        partial(chunked_token_loss, chunk_tokens=chunk_tokens), torch.float32, None
    )
    for one, other in zip(parts, whole, strict=True):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize(
    ("by_torch", "how"), [(True, "torch's linear_cross_entropy"), (False, "from 2.13 on")]
)
def test_who_computes_the_chunks_is_said(
    by_torch: bool, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked_loss, "has_linear_cross_entropy", lambda: by_torch)
    support = enabled("chunked-loss", ChunkedLoss).plugin.supports(CPU)
    assert support.ok
    assert support.reason.endswith(how)


def losses_and_gradients(
    loss: Any, dtype: torch.dtype, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """With padded rows in the head and with targets that are not scored."""
    draw = torch.Generator().manual_seed(0)
    x_BTC = torch.randn(3, 17, 16, dtype=dtype, generator=draw, requires_grad=True)
    head_VC = torch.randn(64, 16, dtype=dtype, generator=draw, requires_grad=True)
    targets_BT = tokens()
    targets_BT[0, 3] = targets_BT[2] = IGNORE
    out = loss(x_BTC, head_VC, targets_BT, vocab_size=61, softcap=softcap)
    (out * 0.3).backward()
    assert x_BTC.grad is not None
    assert head_VC.grad is not None
    return out.detach(), x_BTC.grad, head_VC.grad


def double_token_loss(
    x_BTC: Tensor, head_VC: Tensor, targets_BT: Tensor, *, vocab_size: int, softcap: float | None
) -> Tensor:
    """The model's loss without its rounding to float32."""
    logits = functional.linear(x_BTC, head_VC)[..., :vocab_size]
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return functional.cross_entropy(
        logits.flatten(0, 1), targets_BT.flatten(), ignore_index=IGNORE, reduction="sum"
    )


def largest_allocation(work: Callable[[], object]) -> int:
    """Most bytes that any one operation allocates, those inside torch's own functions too."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    return max(event.self_cpu_memory_usage for event in seen.events())


@pytest.mark.parametrize("by_torch", [False, True], ids=["own", "torch"])
def test_the_full_logits_never_exist(by_torch: bool) -> None:
    if by_torch and not chunked_loss.has_linear_cross_entropy():
        pytest.skip("this torch has no chunked linear_cross_entropy")
    n_tokens, vocab_size, width, chunk = 256, 1000, 8, 16

    def largest(loss: Any) -> int:
        x_BTC = torch.ones(4, n_tokens // 4, width, requires_grad=True)
        head_VC = torch.ones(vocab_size, width, requires_grad=True)
        targets_BT = torch.zeros(4, n_tokens // 4, dtype=torch.int64)
        return largest_allocation(
            lambda: loss(x_BTC, head_VC, targets_BT, vocab_size=vocab_size, softcap=None).backward()
        )

    def own(x_BTC: Tensor, head_VC: Tensor, targets_BT: Tensor, **rest: Any) -> Tensor:
        x_NC, targets_N = x_BTC.flatten(0, 1), targets_BT.flatten()
        return recomputed_loss(x_NC, head_VC, targets_N, chunk_tokens=chunk, **rest)

    assert largest(token_loss) == 4 * n_tokens * vocab_size
    chunked = partial(chunked_token_loss, chunk_tokens=chunk) if by_torch else own
    assert largest(chunked) == 4 * chunk * vocab_size


@pytest.mark.parametrize("by_torch", [False, True], ids=["own", "torch"])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_the_chunked_loss_keeps_its_claim(
    corpus: Any, monkeypatch: pytest.MonkeyPatch, by_torch: bool, softcap: float | None
) -> None:
    if not by_torch:
        monkeypatch.setattr(chunked_loss, "has_linear_cross_entropy", lambda: False)
    store, profile = corpus(257), profile_of(257, model__logit_softcap=softcap)
    with_it = losses_of(store, profile, enabled("chunked-loss", ChunkedLoss, chunk_tokens=48))
    assert drift(with_it, losses_of(store, profile)) <= 1e-6 < ChunkedLoss.tolerance


def test_the_chunked_loss_is_summed_in_float32_under_autocast() -> None:
    """torch's own function returns the sum in bf16 there, with three digits."""
    x_BTC, head_VC = torch.randn(4, 64, 16), torch.randn(61, 16)
    targets_BT = tokens(rows=4, length=64)
    with autocast_if(True):
        parts, whole = (
            loss(x_BTC, head_VC, targets_BT, vocab_size=61, softcap=None)
            for loss in (partial(chunked_token_loss, chunk_tokens=32), token_loss)
        )
    assert parts.dtype == torch.float32
    torch.testing.assert_close(parts, whole, rtol=1e-6, atol=0)


# activation-checkpointing ----------------------------------------------------------------------


@pytest.mark.parametrize("layers", [None, 1])
def test_computing_again_changes_no_bit(corpus: Any, layers: int | None) -> None:
    """Dropout draws the same numbers in the second pass."""
    store, profile = corpus(61), profile_of(61, model__dropout=0.2)
    plugin = enabled("activation-checkpointing", ActivationCheckpointing, layers=layers)
    assert losses_of(store, profile, plugin) == losses_of(store, profile)


@pytest.mark.parametrize(("layers", "again"), [(None, 2), (1, 1), (5, 2)])
def test_as_many_blocks_as_asked_are_computed_again(layers: int | None, again: int) -> None:
    model = tiny_model()
    names = [name for name, _ in model.named_parameters()]
    ActivationCheckpointing(ActivationCheckpointing.Options(layers=layers)).wrap_model(model)
    assert [name for name, _ in model.named_parameters()] == names
    passes = count_passes(model)
    batch = tokens()
    model(batch[:, :-1], batch[:, 1:]).backward()
    assert len(passes) == 2 + again
    model.eval()
    passes.clear()
    with torch.no_grad():
        model(batch[:, :-1], batch[:, 1:])
    assert len(passes) == 2


def count_passes(model: GPT) -> list[int]:
    passes: list[int] = []
    for layer, block in enumerate(model.h):
        block.mlp.c_fc.register_forward_pre_hook(lambda *_, layer=layer: passes.append(layer))
    return passes


def test_a_cache_is_filled_once() -> None:
    plain, wrapped = tiny_model(), tiny_model()
    for block in wrapped.h:
        checkpoint_block(block)
    batch = tokens()[:, :16]
    logits = []
    for model in (plain, wrapped):
        cache = KVCache(model.config, 3, device=torch.device("cpu"), dtype=torch.float32)
        with torch.no_grad():
            logits.append([model(part, cache=cache) for part in batch.split(8, dim=1)])
        assert cache.length == 16
    for one, other in zip(*logits, strict=True):
        assert torch.equal(one, other)


def test_a_copied_block_computes_with_its_own_weights() -> None:
    model = tiny_model()
    for block in model.h:
        checkpoint_block(block)
    twin = copy.deepcopy(model)
    batch = tokens()
    before = twin(batch[:, :-1], batch[:, 1:])
    with torch.no_grad():
        for parameter in model.h.parameters():
            parameter.zero_()
    assert torch.equal(twin(batch[:, :-1], batch[:, 1:]), before)


# amp -------------------------------------------------------------------------------------------


def amp(dtype: str = "auto") -> Amp:
    return Amp(Amp.Options(dtype=dtype))


@pytest.mark.parametrize("unit", ["amx_bf16", "avx512_bf16", "bf16", None])
def test_auto_takes_bf16_only_where_the_cpu_has_units_for_it(
    monkeypatch: pytest.MonkeyPatch, unit: str | None
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, unit: True})
    support = amp().supports(CPU)
    assert support.ok == (unit is not None)
    assert ("bf16 units" in support.reason) == (unit is None)
    assert native_dtype(CPU) == (torch.bfloat16 if unit else None)
    explicit = amp("bf16").supports(CPU)
    assert explicit.ok
    assert ("emulated" in explicit.reason) == (unit is None)


def test_fp16_on_a_cpu_is_refused_with_the_way_out() -> None:
    """AMP-03."""
    support = amp("fp16").supports(CPU)
    assert not support.ok
    assert 'plugins.amp.dtype = "bf16"' in support.reason


def test_bf16_keeps_its_claim_and_scores_as_float32_does(corpus: Any) -> None:
    """AMP-04: the loss is a float32 sum, close to float32's."""
    store, profile = corpus(61), profile_of(61)
    plugin = enabled("amp", Amp, dtype="bf16")
    with_it = losses_of(store, profile, plugin)
    assert 0 < drift(with_it, losses_of(store, profile)) <= Amp.tolerance
    trainer, _ = trainer_of(store, profile, plugin)
    with trainer:
        trainer.run()
        in_half = trainer.scorer.score("train")
        trainer.scorer.hooks = Hooks((), note=print)
        in_full = trainer.scorer.score("train")
    assert in_half is not None
    assert in_full is not None
    assert 0 < abs(in_half.loss - in_full.loss) < 0.02


@pytest.mark.parametrize(("dtype", "scaled"), [("fp16", True), ("bf16", False)])
def test_only_fp16_is_scaled(corpus: Any, dtype: str, scaled: bool) -> None:
    """AMP-04; products are in half precision, loss and weights are not."""
    trainer, _ = trainer_of(corpus(61), profile_of(61), enabled("amp", Amp, dtype=dtype))
    with trainer:
        assert isinstance(trainer.stepper, ScaledStepper) == scaled
        with trainer.hooks.forward_scope():
            batch = tokens()
            logits = trainer.model(batch[:, :-1])
            loss = trainer.model(batch[:, :-1], batch[:, 1:])
        assert logits.dtype == {"fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
        assert loss.dtype == torch.float32
        assert {p.dtype for p in trainer.raw_model.parameters()} == {torch.float32}
        assert not torch.is_autocast_enabled("cpu")


def test_a_step_whose_gradients_overflow_is_skipped_whole(corpus: Any) -> None:
    trainer, _ = trainer_of(corpus(61), profile_of(61), enabled("amp", Amp, dtype="fp16"))
    with trainer:
        trainer.run(3)
        stepper = trainer.stepper
        assert isinstance(stepper, ScaledStepper)
        scale = stepper.scaler.get_scale()
        assert trainer.progress.committed == 3
        weights = copy.deepcopy(trainer.raw_model.state_dict())
        moments = copy.deepcopy(trainer.optimizer.state_dict()["state"])
        spoil = trainer.raw_model.ln_f.weight.register_hook(lambda grad: grad * math.inf)
        trainer.one_step()
        spoil.remove()
        assert (trainer.progress.step, trainer.progress.committed) == (4, 3)
        assert stepper.scaler.get_scale() == scale / 2
        torch.testing.assert_close(trainer.raw_model.state_dict(), weights, rtol=0, atol=0)
        torch.testing.assert_close(trainer.optimizer.state_dict()["state"], moments, rtol=0, atol=0)
        trainer.one_step()
        assert (trainer.progress.step, trainer.progress.committed) == (5, 4)


def test_fp16_trains_as_float32_does(corpus: Any) -> None:
    store, profile = corpus(61), profile_of(61)
    with_it = losses_of(store, profile, enabled("amp", Amp, dtype="fp16"))
    assert 0 < drift(with_it, losses_of(store, profile)) <= Amp.tolerance


def test_the_scaler_goes_on_where_it_was(corpus: Any) -> None:
    """AMP-04: scale and growth count are equal after a resume."""
    store, profile = corpus(61), profile_of(61)
    trainer, _ = trainer_of(store, profile, enabled("amp", Amp, dtype="fp16"))
    with trainer:
        trainer.run(3)
        assert isinstance(trainer.stepper, ScaledStepper)
        trainer.stepper.scaler.update(512.0)
        trainer.run(5)
        state = trainer.hooks.state()
        saved = trainer.stepper.scaler.state_dict()
    assert (saved["scale"], saved["_growth_tracker"]) == (512.0, 5)
    again, _ = trainer_of(store, profile, enabled("amp", Amp, dtype="fp16"))
    with again:
        again.hooks.load_state(state)
        again.one_step()
        assert isinstance(again.stepper, ScaledStepper)
        now = again.stepper.scaler.state_dict()
    assert (now["scale"], now["_growth_tracker"]) == (512.0, 6)
    bf16, _ = trainer_of(store, profile, enabled("amp", Amp, dtype="bf16"))
    with bf16:
        bf16.hooks.load_state(state)
        assert bf16.hooks.state()["amp"]["state"] == {}


# switches of NVIDIA GPUs -----------------------------------------------------------------------


@pytest.mark.parametrize("plugin", [Tf32, CudnnBenchmark])
def test_a_switch_of_gpus_is_refused_on_a_cpu(plugin: Any) -> None:
    support = plugin(plugin.Options()).supports(CPU)
    assert not support.ok
    assert "NVIDIA GPUs" in support.reason


def test_tf32_needs_ampere(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, ok in (((7, 5), False), ((8, 0), True), ((12, 0), True)):
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda _device, known=capability: known
        )
        support = Tf32(Tf32.Options()).supports(GPU)
        assert support.ok == ok
        assert ok or "7.5" in support.reason


@pytest.mark.parametrize("found_as", ["none", "ieee", "tf32"])
def test_tf32_leaves_every_precision_as_found(found_as: str) -> None:
    backends: Any = torch.backends
    switches = (backends.cuda.matmul, backends.mkldnn.matmul)
    original = [switch.fp32_precision for switch in switches]
    torch.set_float32_matmul_precision("high" if found_as == "tf32" else "highest")
    if found_as == "none":
        for switch in switches:
            switch.fp32_precision = "none"
    found = ([s.fp32_precision for s in switches], torch.get_float32_matmul_precision())
    with tf32_matmul():
        # Both interfaces can be read: neither has been left behind by the other.
        assert backends.cuda.matmul.fp32_precision == "tf32"
        assert backends.cuda.matmul.allow_tf32
        assert torch.get_float32_matmul_precision() == "high"
    assert ([s.fp32_precision for s in switches], torch.get_float32_matmul_precision()) == found
    torch.set_float32_matmul_precision("highest")
    for switch, precision in zip(switches, original, strict=True):
        switch.fp32_precision = precision


def test_cudnn_benchmark_is_on_during_the_run_alone(corpus: Any) -> None:
    trainer, _ = trainer_of(corpus(61), profile_of(61), enabled("cudnn", CudnnBenchmark))
    assert not torch.backends.cudnn.benchmark
    with trainer:
        assert torch.backends.cudnn.benchmark
    assert not torch.backends.cudnn.benchmark


@pytest.mark.parametrize("backend", ["flash", "cudnn"])
def test_a_half_precision_kernel_without_amp_is_refused_on_a_gpu(backend: str) -> None:
    hooks = Hooks([enabled("flash", Flash, backend=backend)], note=print)
    with pytest.raises(Refused, match="half precision only: switch amp on"), hooks:
        hooks.setup(profile_of(61), GPU)
    with_amp = profile_of(61).model_copy(update={"plugins": {"amp": {}}})
    with hooks:
        hooks.setup(with_amp, GPU)


@pytest.mark.gpu
def test_tf32_changes_products_by_its_rounding() -> None:
    a, b = torch.randn(512, 512, device="cuda"), torch.randn(512, 512, device="cuda")
    exact = a @ b
    with tf32_matmul():
        rounded = a @ b
    error = ((rounded - exact).norm() / exact.norm()).item()
    assert 1e-6 < error < 2e-3
    assert torch.equal(a @ b, exact)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "flash", "efficient", "cudnn", "math"])
def test_each_attention_kernel_agrees_on_a_gpu(backend: Any) -> None:
    machine = find_machine("cuda")
    support = Flash(Flash.Options(backend=backend)).supports(machine)
    if not support.ok:
        pytest.skip(support.reason)
    batch = tokens().to(machine.device)
    plain, fused = tiny_model(n_embd=128), tiny_model(n_embd=128, attention="sdpa")
    with torch.amp.autocast("cuda", dtype=torch.float16):
        expected = plain.to(machine.device)(batch[:, :-1], batch[:, 1:])
        with attention_backend(backend):
            found = fused.to(machine.device)(batch[:, :-1], batch[:, 1:])
    found.backward()
    assert found.item() == pytest.approx(expected.item(), rel=Flash.tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("plugin", [Tf32, Amp, Flash, ChunkedLoss, ActivationCheckpointing])
def test_a_claim_is_kept_on_a_gpu(corpus: Any, plugin: Any) -> None:
    machine = find_machine("cuda")
    one = plugin(plugin.Options())
    support = one.supports(machine)
    if not support.ok:
        pytest.skip(support.reason)
    runs = []
    for plugins in ([replace(enabled("it", plugin), plugin=one)], []):
        recorder = Recorder()
        hooks = Hooks(plugins, note=recorder.note)
        store, profile = corpus(257), profile_of(257)
        with Trainer(profile, hooks=hooks, machine=machine, store=store, listener=recorder) as t:
            t.run()
        runs.append(recorder.losses)
    assert drift(*runs) <= max(plugin.tolerance, 1e-5)
