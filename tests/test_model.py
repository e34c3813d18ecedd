"""The reference GPT against independent formulas, GPT-2's own numbers, and itself with a cache."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptfast.model import (
    GPT,
    IGNORE,
    KVCache,
    count_parameters,
    flops_per_token,
    ngram_ids,
    plain_attention,
    rotate,
    sdpa_attention,
)
from gptfast.profile import ModelConfig

pytestmark = pytest.mark.usefixtures("one_thread")
PARTS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "sdpa": {"attention": "sdpa"},
    "rope": {"position": "rope"},
    "rmsnorm": {"norm": "rmsnorm"},
    "qk-norm": {"qk_norm": True},
    "gelu-erf": {"activation": "gelu-erf"},
    "relu2": {"activation": "relu2"},
    "swiglu": {"activation": "swiglu"},
    "grouped": {"n_kv_head": 2},
    "grouped-sdpa": {"n_kv_head": 1, "attention": "sdpa"},
    "softcap": {"logit_softcap": 2.0},
    "no-bias": {"bias": False},
    "untied": {"tied_head": False},
    "padded": {"padded_vocab_size": 64},
    "ngrams": {"ngram_rows": 97},
    "all": {
        "attention": "sdpa",
        "position": "rope",
        "norm": "rmsnorm",
        "qk_norm": True,
        "activation": "swiglu",
        "n_kv_head": 2,
        "ngram_rows": 97,
        "logit_softcap": 15.0,
        "bias": False,
        "tied_head": False,
    },
}
"""Each modern part alone, and all at once."""

every_part = pytest.mark.parametrize("part", PARTS)
attentions = pytest.mark.parametrize("attend", [plain_attention, sdpa_attention])


def tiny(seed: int = 0, **changes: Any) -> GPT:
    """Weights far enough from zero that every formula shows."""
    torch.manual_seed(seed)
    shape = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 16, "vocab_size": 61}
    model = GPT(ModelConfig.model_validate({**shape, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def some_tokens(model: GPT, batch: int = 2, length: int = 16) -> Tensor:
    assert model.config.vocab_size is not None
    return torch.randint(model.config.vocab_size, (batch, length))


# GPT-2's numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "padded", "parameters"),
    [
        ("gpt2", None, 124_439_808),
        ("gpt2", 50_304, 124_475_904),
        ("gpt2-medium", None, 354_823_168),
        ("gpt2-large", None, 774_030_080),
        ("gpt2-xl", None, 1_557_611_200),
    ],
)
def test_the_published_shapes_have_the_published_parameters(
    preset: str, padded: int | None, parameters: int
) -> None:
    """TRN-09: neither the shared matrix twice nor the embeddings left out."""
    config = ModelConfig.model_validate(
        {"preset": preset, "vocab_size": 50_257, "padded_vocab_size": padded}
    )
    with torch.device("meta"):
        model = GPT(config)
    assert count_parameters(model) == parameters
    assert sum(tensor.numel() for tensor in model.state_dict().values()) == parameters


def test_flops_and_their_share_of_the_peak() -> None:
    """BEN-05: 859.9e6 FLOPs a token; 100,000 tokens/s are 27.6 % of a peak of 312e12."""
    config = ModelConfig.model_validate({"preset": "gpt2", "vocab_size": 50_257})
    flops = flops_per_token(config, 124_439_808)
    assert flops == 6 * 124_439_808 + 12 * 12 * 768 * 1024
    assert flops / 1e6 == pytest.approx(859.9, abs=0.05)
    assert 100 * 100_000 * flops / 312e12 == pytest.approx(27.6, abs=0.05)


@every_part
def test_an_untrained_model_knows_nothing(part: str) -> None:
    """The first loss is that of a guess, ln(vocabulary)."""
    torch.manual_seed(1)
    shape = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 16, "vocab_size": 61}
    model = GPT(ModelConfig.model_validate({**shape, **PARTS[part]}))
    tokens = some_tokens(model, batch=32, length=17)
    loss = model(tokens[:, :-1], tokens[:, 1:]) / tokens[:, 1:].numel()
    assert loss.item() == pytest.approx(math.log(61), abs=0.05)


def test_initial_weights_have_gpt2s_spread() -> None:
    torch.manual_seed(1)
    model = GPT(
        ModelConfig(n_layer=8, n_head=4, n_embd=128, block_size=64, vocab_size=500, bias=True)
    )
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "ln_" in name:
            assert (parameter == 1).all(), name
        else:
            # 16 projections join the residual stream, and together add what one would.
            std = 0.02 / 4 if name.endswith("c_proj.weight") else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.03), name
            assert abs(parameter.mean().item()) < std / 20, name


# the whole model against the formulas ----------------------------------------------------------


def reference_logits(model: GPT, tokens: Tensor) -> np.ndarray:
    """GPT-2 in float64, one position and one head at a time; (T, vocab_size)."""
    w = {name: p.detach().double().numpy() for name, p in model.named_parameters()}
    config = model.config
    size = config.head_size

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        centred = x - x.mean()
        scaled = centred / np.sqrt((centred**2).mean() + 1e-5)
        return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return w[f"{name}.weight"] @ x + w[f"{name}.bias"]

    def gelu(x: np.ndarray) -> np.ndarray:
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    xs = [w["wte.weight"][t] + w["wpe.weight"][at] for at, t in enumerate(tokens.tolist())]
    for layer in range(config.n_layer):
        at = f"h.{layer}"
        qkv = [linear(norm(x, f"{at}.ln_1"), f"{at}.attn.c_attn") for x in xs]
        for t in range(len(xs)):
            mixed = []
            for head in range(config.n_head):
                part = slice(head * size, (head + 1) * size)
                q, ks, vs = np.split(qkv[t], 3)[0][part], [], []
                for s in range(t + 1):
                    _, k, v = np.split(qkv[s], 3)
                    ks.append(k[part])
                    vs.append(v[part])
                weights = np.exp([q @ k / np.sqrt(size) for k in ks])
                mixed.append(weights / weights.sum() @ np.array(vs))
            xs[t] = xs[t] + linear(np.concatenate(mixed), f"{at}.attn.c_proj")
        xs = [
            x + linear(gelu(linear(norm(x, f"{at}.ln_2"), f"{at}.mlp.c_fc")), f"{at}.mlp.c_proj")
            for x in xs
        ]
    return np.array([w["wte.weight"] @ norm(x, "ln_f") for x in xs])


@pytest.mark.parametrize("attention", ["plain", "sdpa"])
def test_logits_and_loss_are_those_of_the_formulas(attention: str) -> None:
    model = tiny(attention=attention)
    tokens = some_tokens(model, batch=1, length=17)
    expected = reference_logits(model, tokens[0, :-1])
    logits = model(tokens[:, :-1])[0].detach().numpy()
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-4)
    largest = expected.max(axis=1)
    log_sum = largest + np.log(np.exp(expected - largest[:, None]).sum(axis=1))
    loss = (log_sum - expected[np.arange(16), tokens[0, 1:]]).sum()
    assert model(tokens[:, :-1], tokens[:, 1:]).item() == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("attention", ["plain", "sdpa"])
def test_gradients_are_those_of_a_model_built_of_torchs_own_layers(attention: str) -> None:
    model = tiny(attention=attention).double()
    tokens = some_tokens(model, length=17)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    model(inputs, targets).backward()

    weights = {
        name: parameter.detach().clone().requires_grad_()
        for name, parameter in model.named_parameters()
    }
    blocked = torch.ones(16, 16, dtype=torch.bool).triu(1)
    x = F.embedding(inputs, weights["wte.weight"]) + weights["wpe.weight"]

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (32,), weights[f"{name}.weight"], weights[f"{name}.bias"])

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    for layer in range(2):
        at = f"h.{layer}"
        query = norm(x, f"{at}.ln_1").transpose(0, 1)
        mixed, _ = F.multi_head_attention_forward(
            query,
            query,
            query,
            32,
            4,
            weights[f"{at}.attn.c_attn.weight"],
            weights[f"{at}.attn.c_attn.bias"],
            None,
            None,
            False,
            0.0,
            weights[f"{at}.attn.c_proj.weight"],
            weights[f"{at}.attn.c_proj.bias"],
            attn_mask=blocked,
            need_weights=False,
        )
        x = x + mixed.transpose(0, 1)
        hidden = F.gelu(linear(norm(x, f"{at}.ln_2"), f"{at}.mlp.c_fc"), approximate="tanh")
        x = x + linear(hidden, f"{at}.mlp.c_proj")
    logits = norm(x, "ln_f") @ weights["wte.weight"].T
    F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").backward()

    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        # Double, but the loss itself is in float32 for every dtype of the weights.
        torch.testing.assert_close(
            parameter.grad,
            weights[name].grad,
            rtol=1e-5,
            atol=1e-5,
            msg=lambda m, n=name: f"{n} {m}",
        )


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="transformers is no dependency: install it to compare with it",
)
def test_logits_are_those_of_hugging_face() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = tiny()
    theirs = GPT2LMHeadModel(
        GPT2Config(vocab_size=61, n_positions=16, n_embd=32, n_layer=2, n_head=4)
    ).eval()
    transposed = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    weights = {
        f"transformer.{name}": p.T if name.endswith(transposed) else p
        for name, p in model.state_dict().items()
    }
    theirs.load_state_dict({**weights, "lm_head.weight": model.wte.weight})
    tokens = some_tokens(model)
    torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-4)


# every part alone ------------------------------------------------------------------------------


@every_part
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_future_is_not_seen(part: str, dtype: torch.dtype) -> None:
    """GEN-02: exactly nothing before a changed token changes."""
    model = tiny(**PARTS[part])
    tokens = some_tokens(model)
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 61
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        difference = (model(tokens) - model(changed)).abs().amax(dim=(0, 2))
    assert not difference[:9].any()
    assert (difference[9:] > 0).all()


@every_part
def test_no_gradient_flows_to_the_future(part: str) -> None:
    """GEN-02: exactly none from position 9 to those behind it."""
    model = tiny(**PARTS[part])
    embedded: list[Tensor] = []
    hook = model.drop.register_forward_hook(lambda m, i, out: embedded.append(out))
    logits = model(some_tokens(model))
    hook.remove()
    embedded[0].retain_grad()
    logits[:, 9].square().sum().backward()
    gradient = embedded[0].grad
    assert gradient is not None
    assert not gradient[:, 10:].any()
    assert (gradient[:, :10].abs().amax(dim=2) > 0).all()


@every_part
def test_it_learns(part: str) -> None:
    """Every parameter gets a gradient, and the loss of one batch falls far."""
    model = tiny(**PARTS[part])
    tokens = some_tokens(model, batch=4, length=17)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = model(tokens[:, :-1], tokens[:, 1:]) / 64
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.any() for p in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] * 0.6


@every_part
def test_the_cache_changes_nothing(part: str) -> None:
    """The tokens in pieces of 5, 1, 3 and 7 give the logits of all at once."""
    model = tiny(**PARTS[part]).eval()
    tokens = some_tokens(model)
    cache = KVCache.of(model, batch_size=2)
    with torch.no_grad():
        pieces = [model(piece, cache=cache) for piece in tokens.split([5, 1, 3, 7], dim=1)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), model(tokens), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(model.next_logits(tokens), model(tokens)[:, -1])
    assert cache.length == 16


@every_part
def test_padded_rows_and_unscored_positions_play_no_part(part: str) -> None:
    model = tiny(**{**PARTS[part], "padded_vocab_size": 64})
    tokens = some_tokens(model, length=17)
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[0, 3:] = IGNORE
    assert model(inputs).shape == (2, 16, 61)
    before = model(inputs, targets)
    before.backward()
    with torch.no_grad():
        model.head_VC[61:] = 1e3
    assert torch.equal(model(inputs, targets), before)
    assert model.head_VC.grad is not None
    assert not model.head_VC.grad[61:].any()
    scored = model(inputs[:1, :3], targets[:1, :3]) + model(inputs[1:], targets[1:])
    assert before.item() == pytest.approx(scored.item(), rel=1e-5)


@attentions
def test_several_new_tokens_are_masked_to_the_lower_right(attend: Any) -> None:
    """GEN-01, design: 3 new tokens behind 5 cached ones see 6, 7 and 8."""
    q, k, v = (torch.randn(1, 2, length, 8) for length in (3, 8, 8))
    mask = torch.ones(8, 8, dtype=torch.bool).tril()[5:]
    out = attend(q, k, v, mask_TS=mask, dropout=0.0)
    for row in range(3):
        seen = 6 + row
        weights = (q[:, :, row : row + 1] @ k[:, :, :seen].mT / math.sqrt(8)).softmax(-1)
        torch.testing.assert_close(out[:, :, row : row + 1], weights @ v[:, :, :seen])


@attentions
def test_grouped_heads_are_repeated_heads(attend: Any) -> None:
    q, k, v = torch.randn(2, 6, 8, 4), torch.randn(2, 2, 8, 4), torch.randn(2, 2, 8, 4)
    mask = torch.ones(8, 8, dtype=torch.bool).tril()
    repeated = [torch.cat([x[:, :1]] * 3 + [x[:, 1:]] * 3, dim=1) for x in (k, v)]
    torch.testing.assert_close(
        attend(q, k, v, mask_TS=mask, dropout=0.0),
        plain_attention(q, *repeated, mask_TS=mask, dropout=0.0),
    )


def test_rope_turns_by_the_distance_alone() -> None:
    model = tiny(position="rope", block_size=32)
    q, k = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8)

    def score(at: int, other: int) -> float:
        turned = [
            rotate(x, model.rope_cos[p : p + 1], model.rope_sin[p : p + 1])
            for x, p in ((q, at), (k, other))
        ]
        return float((turned[0] * turned[1]).sum())

    assert score(0, 0) == pytest.approx(float((q * k).sum()), rel=1e-5)
    assert score(7, 4) == pytest.approx(score(31, 28), rel=1e-4)
    assert abs(score(7, 4) - score(8, 4)) > 1e-3


def test_an_ngram_has_a_row_of_its_own_wherever_it_stands() -> None:
    """Row by row against the hash in Python's integers; nothing before the first token is 0."""
    tokens = torch.tensor([[5, 7, 7, 0, 5, 7, 7]])
    ids = ngram_ids(tokens, longest=4, rows=1009)
    digits = [0, 0, 0, *(t + 1 for t in tokens[0].tolist())]
    for at in range(7):
        hashed = digits[at + 3]
        for n in (2, 3, 4):
            hashed = (48_271 * hashed + digits[at + 4 - n]) % 2_147_483_647
            assert ids[0, at, n - 2] == hashed % 1009
    assert ids[0, 5, 0] == ids[0, 1, 0], "5 7, twice"
    assert ids[0, 6, 1] == ids[0, 2, 1], "5 7 7, twice"
    assert ids[0, 6, 2] != ids[0, 2, 2], "0 5 7 7, and the beginning"


def test_no_two_of_the_commonest_pairs_share_a_row_of_a_large_table() -> None:
    """Every pair of 50 letters in 2**24 rows: as few meet as by chance, 2500**2 / 2**25 = 0.2."""
    pairs = torch.cartesian_prod(torch.arange(50), torch.arange(50))
    rows = ngram_ids(pairs, longest=2, rows=2**24)[:, 1, 0]
    assert len(rows.unique()) >= 2500 - 3


def test_vectors_of_ngrams_are_added_and_cost_no_products() -> None:
    tokens = some_tokens(tiny())
    torch.manual_seed(3)
    shape = {"n_layer": 1, "n_head": 4, "n_embd": 32, "block_size": 16, "vocab_size": 61}
    with_table = GPT(ModelConfig.model_validate({**shape, "ngram_rows": 97, "max_ngram": 3}))
    table = with_table.wne.table.weight
    embedded: list[Tensor] = []
    with_table.drop.register_forward_hook(lambda m, i, out: embedded.append(out))
    with_table(tokens)
    expected = with_table.wte.weight[tokens] + with_table.wpe.weight
    expected = expected + table[ngram_ids(tokens, longest=3, rows=97)].sum(dim=2)
    torch.testing.assert_close(embedded[0], expected)
    config = with_table.config
    without = count_parameters(with_table) - table.numel()
    assert flops_per_token(config, without + table.numel()) == 6 * without + 12 * 32 * 16


def test_what_each_part_does() -> None:
    tokens = some_tokens(tiny())
    assert tiny(logit_softcap=2.0)(tokens).abs().max() < 2
    assert tiny()(tokens).abs().max() > 2
    names = dict(tiny(bias=False, norm="rmsnorm").named_parameters())
    assert not [name for name in names if name.endswith("bias")]
    assert isinstance(tiny(norm="rmsnorm").ln_f, nn.RMSNorm)
    assert not hasattr(tiny(position="rope"), "wpe")

    plain, normed = tiny(), tiny(qk_norm=True)
    for model in (plain, normed):
        with torch.no_grad():
            model.h[0].attn.c_attn.weight[:64] *= 1e3  # queries and keys, not values
            model.h[0].attn.c_attn.bias[:64] *= 1e3
    torch.testing.assert_close(normed(tokens), tiny(qk_norm=True)(tokens), rtol=1e-3, atol=1e-3)
    assert (plain(tokens) - tiny()(tokens)).abs().max() > 0.1

    x = torch.randn(3, 32)
    gelu, erf = tiny().h[0].mlp, tiny(activation="gelu-erf").h[0].mlp
    h = gelu.c_fc(x)
    exact = 0.5 * h * (1 + torch.erf(h / math.sqrt(2)))
    by_tanh = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
    torch.testing.assert_close(erf(x), erf.c_proj(exact), rtol=1e-5, atol=5e-7)
    torch.testing.assert_close(gelu(x), gelu.c_proj(by_tanh), rtol=1e-5, atol=1e-6)
    relu2 = tiny(activation="relu2").h[0].mlp
    torch.testing.assert_close(relu2(x), relu2.c_proj(relu2.c_fc(x).clamp(min=0) ** 2))
    swiglu = tiny(activation="swiglu").h[0].mlp
    gate, value = swiglu.c_fc(x).chunk(2, dim=-1)
    torch.testing.assert_close(swiglu(x), swiglu.c_proj(gate * torch.sigmoid(gate) * value))


@pytest.mark.parametrize("attention", ["plain", "sdpa"])
def test_dropout_is_for_training_only(attention: str) -> None:
    """EVL-02, GEN-01: dropout inside attention too, and none in evaluation."""
    model = tiny(dropout=0.5, attention=attention)
    tokens = some_tokens(model)
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    torch.testing.assert_close(model(tokens), tiny(attention="plain")(tokens), rtol=1e-5, atol=1e-5)
    q, k, v = (torch.ones(1, 1, 16, 8) for _ in range(3))
    attend = sdpa_attention if attention == "sdpa" else plain_attention
    dropped = attend(q, k, v, mask_TS=model.mask, dropout=0.5)
    assert dropped.std() > 0


def test_a_model_is_built_without_the_compiler() -> None:
    """Initialised on the device "meta", an embedding imports it, which takes longer than torch."""
    code = """
import sys
from gptfast.model import GPT
from gptfast.profile import ModelConfig
GPT(ModelConfig(n_layer=1, n_head=1, n_embd=8, block_size=8, vocab_size=65))
print("torch._dynamo" in sys.modules)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"
