"""flex: who sees whom, in training, in a cache and in FlexAttention's own masks."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from gptfast_plugins.flex import Flex, sees, whole_mask
from plugin_helpers import enabled
from torch import Tensor

from gptfast.contract.tiny import build_rig
from gptfast.device.machine import find_machine
from gptfast.errors import Refused
from gptfast.host.hooks import Hooks
from gptfast.host.registry import discover
from gptfast.model import GPT
from gptfast.plugin import Machine, Profile
from gptfast.profile import ModelConfig
from gptfast.run.generate import Sampling, generate_tokens, seeded

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = find_machine("cpu")
END = 7
"""The separator of these tests."""
SHAPES: list[dict[str, Any]] = [{}, {"n_kv_head": 2, "position": "rope", "qk_norm": True}]


def model_with(options: dict[str, Any] | None, machine: Machine = CPU, **shape: Any) -> GPT:
    """A model of two layers with flex on it; None: without."""
    config: dict[str, Any] = {"n_layer": 2, "n_head": 4, "n_embd": 64, "block_size": 32}
    profile = Profile(model=ModelConfig.model_validate({**config, "vocab_size": 50, **shape}))
    torch.manual_seed(0)
    model = GPT(profile.model).to(machine.device)
    if options is None:
        return model
    with Hooks([enabled("flex", Flex, **options)], note=lambda line: None) as hooks:
        hooks.setup(profile, machine)
        wrapped = hooks.wrap_model(model)
    assert wrapped is model
    return model


def batch(separators: list[int], *, seed: int = 1) -> Tensor:
    """(3, 33) ids with separators at these places and nowhere else."""
    ids = torch.randint(END + 1, 50, (3, 33), generator=torch.Generator().manual_seed(seed))
    ids[:, separators] = END
    return ids


def loss_and_gradients(model: GPT, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
    loss = model(ids[:, :-1], ids[:, 1:])
    return loss, list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("shape", SHAPES)
def test_without_options_it_is_causal_attention(shape: dict[str, Any]) -> None:
    ids = batch([5])
    expected, right = loss_and_gradients(model_with(None, **shape), ids)
    loss, gradients = loss_and_gradients(model_with({}, **shape), ids)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for one, other in zip(gradients, right, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("separators", [None, [0], [4], [4, 5]])
@pytest.mark.parametrize("new", [8, 3])
def test_a_mask_is_what_counting_by_hand_gives(
    window: int | None, separators: list[int] | None, new: int
) -> None:
    documents = None
    if separators is not None:
        documents = torch.tensor([[sum(s <= t for s in separators) for t in range(8)]] * 2)
    mask = whole_mask(sees(documents, window), B=2, T=new, S=8, device=CPU.device)
    mask = mask.expand(2, 1, new, 8)
    for q in range(8 - new, 8):
        for k in range(8):
            near = window is None or q - k < window
            same = not any(k < s <= q for s in separators or [])
            expected = k <= q and near and same
            assert (mask[:, 0, q - 8 + new, k] == expected).all(), (q, k)


def test_a_document_is_scored_as_if_it_stood_alone() -> None:
    """Rotary positions are relative, so that the place in the window does not matter."""
    model = model_with({"separator": END}, position="rope").eval()
    ids = batch([12])
    with torch.no_grad():
        packed = model(ids[:, :-1])
        alone = model(ids[:, 12:-1])
        plain = model_with(None, position="rope").eval()(ids[:, :-1])
    assert torch.allclose(packed[:, 12:], alone, atol=1e-5)
    assert torch.allclose(packed[:, :12], plain[:, :12], atol=1e-5)
    assert not torch.allclose(packed[:, 12:], plain[:, 12:], atol=1e-3)


def test_nothing_beyond_the_window_is_seen() -> None:
    """Two layers reach twice as far as one."""
    model = model_with({"window": 5}).eval()
    ids = batch([])[:, :-1]
    changed = ids.clone()
    changed[:, 3] = END
    with torch.no_grad():
        moved = (model(ids) - model(changed)).abs().amax((0, 2)) > 1e-6
    assert [t for t in range(32) if moved[t]] == list(range(3, 3 + 2 * 4 + 1))


@pytest.mark.parametrize("options", [{"separator": END, "window": 6}, {"window": 3}])
def test_a_cache_gives_the_same_text(options: dict[str, Any]) -> None:
    """Over the end of the block too, where the cache is begun anew."""
    model = model_with(options)
    with torch.no_grad():  # a head that likes the separator, so that documents end
        model.wte.weight[END] *= 3
    texts = [
        list(
            generate_tokens(
                model,
                [9, END, 12, 13],
                max_new_tokens=50,
                sampling=Sampling(temperature=1.0, top_k=None),
                generator=seeded(4, CPU.device),
                forward_scope=nullcontext,
                cached=cached,
            )
        )
        for cached in (True, False)
    ]
    assert texts[0] == texts[1]
    if "separator" in options:
        assert END in texts[0]


@pytest.mark.parametrize("options", [{"window": 9}, {"separator": END, "window": 9}])
def test_flex_attention_is_given_the_same_masks(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward alone: it has no backward pass on a CPU. Traced whole, as plugin compile does."""
    ids = batch([6, 20])
    shape = SHAPES[1]
    expected = model_with({**options, "kernel": "whole"}, **shape)(ids[:, :-1], ids[:, 1:])
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    model = model_with({**options, "kernel": "flex"}, **shape)
    traced = torch.compile(model, fullgraph=True, dynamic=False)
    with torch.no_grad():
        found = traced(ids[:, :-1], ids[:, 1:])
        shorter = model(ids[:, :9])  # not the length that is compiled for
    torch.compiler.reset()
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    assert shorter.shape == (3, 9, 50)


def test_what_cannot_be_is_said() -> None:
    on_cpu = Flex(Flex.Options(kernel="flex")).supports(CPU)
    assert not on_cpu.ok
    assert "no backward pass off CUDA" in on_cpu.reason
    assert Flex(Flex.Options()).supports(CPU).reason.startswith("whole masks")
    profile = Profile(model=ModelConfig(vocab_size=50))
    assert Flex(Flex.Options(separator=49)).configure(profile) == profile
    with pytest.raises(Refused, match=r"separator = 50 is not in the vocabulary of 50 ids"):
        Flex(Flex.Options(separator=50)).configure(profile)
    ngrams = Profile(model=ModelConfig(vocab_size=50, ngram_rows=8))
    assert Flex(Flex.Options(window=9)).configure(ngrams) == ngrams
    with pytest.raises(Refused, match=r"model\.ngram_rows = 8\) reach over their ends"):
        Flex(Flex.Options(separator=49)).configure(ngrams)


def test_dropout_takes_the_whole_mask_and_says_so() -> None:
    said: list[str] = []
    profile = Profile(model=ModelConfig(vocab_size=50, dropout=0.1))
    plugin = enabled("flex", Flex, kernel="flex")
    with Hooks([plugin], note=said.append) as hooks:
        hooks.setup(profile, CPU)
    assert len(said) == 1
    assert "knows no dropout" in said[0]
    assert plugin.plugin._by_kernel is False


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", [{}, {"window": 9}, {"separator": END, "window": 9}])
def test_the_kernel_has_the_gradients_of_the_whole_mask(
    options: dict[str, Any], shape: dict[str, Any]
) -> None:
    machine = find_machine("cuda")
    ids = batch([6, 20]).to(machine.device)
    expected, right = loss_and_gradients(
        model_with({**options, "kernel": "whole"}, machine, **shape), ids
    )
    loss, gradients = loss_and_gradients(
        model_with({**options, "kernel": "flex"}, machine, **shape), ids
    )
    assert loss.item() == pytest.approx(expected.item(), rel=1e-3)
    for one, other in zip(gradients, right, strict=True):
        assert torch.allclose(one, other, rtol=2e-2, atol=2e-2 * other.abs().max().item())


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 192])
def test_it_trains_compiled_in_half_precision(block_size: int) -> None:
    """Windows of one block of the mask, and of two, the second not full."""
    plugins = {"amp": {}, "compile": {}, "flex": {"separator": END, "window": 9}}
    whole = {**plugins, "flex": {**plugins["flex"], "kernel": "whole"}}
    changes = {"model__block_size": block_size, "train__batch_size": 1}
    with build_rig(plugins, machine=find_machine("cuda"), found=discover()) as rig:
        by_kernel = rig.train(rig.profile(**changes)).losses
        by_mask = rig.train(rig.profile(whole, **changes)).losses
    assert rig.difference(by_kernel, by_mask) <= 1e-2
