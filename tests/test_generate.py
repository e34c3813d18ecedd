"""Text from a model: the same with a cache as without, whole characters, refusals before work."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gptfast.errors import GptfastError, Refused
from gptfast.model import GPT
from gptfast.profile import ModelConfig
from gptfast.run.generate import (
    Sampling,
    choose,
    context_start,
    generate_tokens,
    prompt_ids,
    sample_text,
    seeded,
)
from gptfast.tokenizers.tokenizer import Bytes, Characters, load_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
GREEDY = Sampling(temperature=0)


def tiny(**changes: Any) -> GPT:
    torch.manual_seed(0)
    shape = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 16, "vocab_size": 65}
    model = GPT(ModelConfig.model_validate({**shape, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def tokens_of(
    model: GPT,
    prompt: list[int],
    sampling: Sampling = GREEDY,
    *,
    n: int = 60,
    seed: int = 1,
    **options: Any,
) -> list[int]:
    return list(
        generate_tokens(
            model,
            prompt,
            max_new_tokens=n,
            sampling=sampling,
            generator=seeded(seed, CPU),
            forward_scope=nullcontext,
            **options,
        )
    )


# the window -------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 200))
def test_the_context_fits_grows_and_keeps_at_least_half(block_size: int, n_tokens: int) -> None:
    start, after = (context_start(n, block_size) for n in (n_tokens, n_tokens + 1))
    assert 0 <= start < n_tokens
    assert n_tokens - start <= block_size
    if n_tokens <= block_size:
        assert start == 0
    else:
        assert n_tokens - start > block_size // 2
    assert after in (start, start + max(1, block_size // 2))
    if after > start:
        assert n_tokens - start == block_size, "a context moves on only when it is full"


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0, None), Sampling(0.8, 10, 0.9)])
@pytest.mark.parametrize(
    "part",
    [
        {},
        {"attention": "sdpa"},
        {"position": "rope"},
        {"n_kv_head": 2, "qk_norm": True, "norm": "rmsnorm"},
        {"padded_vocab_size": 128},
        {"ngram_rows": 61, "max_ngram": 5},
    ],
    ids=str,
)
def test_cached_equals_uncached_beyond_the_context(
    part: dict[str, Any], sampling: Sampling
) -> None:
    model = tiny(**part)
    cached = tokens_of(model, [1, 2, 3], sampling)
    assert cached == tokens_of(model, [1, 2, 3], sampling, cached=False)
    assert len(cached) == 60
    assert len(set(cached)) > 3


def test_the_cache_is_used_and_rebuilt_once_in_half_a_context() -> None:
    """Tokens that go through the model: 3, then 1 each, and 9 where the older 8 are dropped."""
    model = tiny()
    fed: list[int] = []
    hook = model.drop.register_forward_hook(lambda m, i, out: fed.append(out.size(1)))
    tokens_of(model, [1, 2, 3], n=24)
    hook.remove()
    assert fed == [3] + [1] * 13 + [9] + [1] * 7 + [9, 1]


def test_each_token_is_the_likeliest_after_all_before_it() -> None:
    model = tiny().eval()
    tokens = [1, 2, 3]
    for token in tokens_of(model, [1, 2, 3], n=13):
        assert token == int(model(torch.tensor([tokens]))[0, -1].argmax())
        tokens.append(token)


@pytest.mark.parametrize("n", [0, 1, 100])
def test_a_prompt_longer_than_the_context_counts_with_its_end(n: int) -> None:
    """GEN-04: block 16, prompt of 40 tokens."""
    model = tiny()
    prompt = [(7 * i) % 65 for i in range(40)]
    tokens = tokens_of(model, prompt, n=n)
    assert len(tokens) == n
    assert tokens == tokens_of(model, prompt[-16:], n=n)
    assert tokens == tokens_of(model, prompt, n=n, cached=False)


def test_a_negative_number_of_tokens_is_refused_before_the_first() -> None:
    with pytest.raises(Refused, match="max-new-tokens -1"):
        generate_tokens(
            tiny(),
            [1],
            max_new_tokens=-1,
            sampling=GREEDY,
            generator=seeded(1, CPU),
            forward_scope=nullcontext,
        )


def test_mode_gradients_and_scope_are_as_found_between_tokens() -> None:
    """EVL-02: dropout is off for a token, and training's mode is back before it is handed over."""
    model = tiny(dropout=0.5).train()
    entered: list[bool] = []

    class Scope(nullcontext[None]):
        def __enter__(self) -> None:
            entered.append(model.training)

        def __exit__(self, *error: object) -> None:
            entered.append(model.training)

    tokens = generate_tokens(
        model,
        [1, 2, 3],
        max_new_tokens=20,
        sampling=GREEDY,
        generator=seeded(1, CPU),
        forward_scope=Scope,
    )
    drawn = [next(tokens), next(tokens)]
    assert model.training
    assert torch.is_grad_enabled()
    assert entered == [False] * 4
    assert drawn + list(tokens) == tokens_of(tiny(), [1, 2, 3], n=20)


def test_weights_that_are_damaged_are_named() -> None:
    """GEN-11."""
    model = tiny()
    with torch.no_grad():
        model.h[1].mlp.c_fc.weight[0, 0] = math.nan
    with pytest.raises(GptfastError, match=r"runs/a: non-finite logits for new token 1") as caught:
        tokens_of(model, [1], source="runs/a")
    assert caught.value.exit_code == 1


# the choice -------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-45, 1e-320])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    """GEN-07: whatever the seed."""
    model = tiny()
    for seed in (1, 2):
        assert tokens_of(model, [5], Sampling(temperature), seed=seed) == tokens_of(model, [5])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature -1.0"),
        ({"temperature": math.nan}, "temperature nan"),
        ({"temperature": math.inf}, "temperature inf"),
        ({"top_k": -3}, "top-k -3"),
        ({"top_p": 0.0}, "top-p 0.0"),
        ({"top_p": 1.1}, "top-p 1.1"),
        ({"top_p": math.nan}, "top-p nan"),
    ],
    ids=str,
)
def test_impossible_sampling_is_refused(options: dict[str, Any], message: str) -> None:
    """GEN-06, GEN-07."""
    with pytest.raises(Refused, match=message):
        Sampling(**options)


def test_a_top_k_of_the_whole_vocabulary_is_none() -> None:
    """GEN-06: vocabulary of 65."""
    model = tiny()
    free = tokens_of(model, [5], Sampling(1.0, None))
    for top_k in (0, 65, 200, 10**12):
        assert tokens_of(model, [5], Sampling(1.0, top_k)) == free
    assert tokens_of(model, [5], Sampling(1.0, None, 1.0)) == free
    assert tokens_of(model, [5], Sampling(1.0, 1)) == tokens_of(model, [5])
    assert tokens_of(model, [5], Sampling(1.0, 2)) != free


def drawn(logits: list[float], sampling: Sampling, n: int = 4000) -> torch.Tensor:
    """Share of each token in `n` choices."""
    generator = seeded(7, CPU)
    choices = torch.tensor([choose(torch.tensor(logits), sampling, generator) for _ in range(n)])
    return torch.bincount(choices, minlength=len(logits)) / n


LOGITS = [math.log(p) for p in (0.1, 0.4, 0.3, 0.2)]


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(1.0, None), [0.1, 0.4, 0.3, 0.2]),
        (Sampling(0.5, None), [1 / 30, 16 / 30, 9 / 30, 4 / 30]),
        (Sampling(1.0, 2), [0, 4 / 7, 3 / 7, 0]),
        (Sampling(1.0, None, 0.69), [0, 4 / 7, 3 / 7, 0]),
        (Sampling(1.0, None, 0.71), [0, 4 / 9, 3 / 9, 2 / 9]),
        (Sampling(1.0, None, 0.01), [0, 1, 0, 0]),
        (Sampling(1.0, 3, 0.7), [0, 4 / 7, 3 / 7, 0]),
        (Sampling(0.0), [0, 1, 0, 0]),
    ],
    ids=str,
)
def test_tokens_come_as_often_as_they_should(sampling: Sampling, expected: list[float]) -> None:
    shares = drawn(LOGITS, sampling)
    torch.testing.assert_close(
        shares, torch.tensor(expected, dtype=torch.float32), rtol=0, atol=0.03
    )
    assert not shares[torch.tensor(expected) == 0].any()


def test_ids_beyond_the_tokenizer_are_never_chosen() -> None:
    """Neither padded rows of the head nor ids that the profile has and the tokenizer has not."""
    model = tiny(padded_vocab_size=128)
    with torch.no_grad():
        model.wte.weight[40:] *= 100
    for sampling in (GREEDY, Sampling(5.0, None), Sampling(5.0, 50, 0.99)):
        assert max(tokens_of(model, [1], sampling)) < 65
        assert max(tokens_of(model, [1], sampling, vocab_size=40)) < 40


def test_one_seed_is_one_text() -> None:
    model = tiny()
    assert tokens_of(model, [5], Sampling(), seed=3) == tokens_of(model, [5], Sampling(), seed=3)
    assert tokens_of(model, [5], Sampling(), seed=3) != tokens_of(model, [5], Sampling(), seed=4)


# text -------------------------------------------------------------------------------------------


def test_characters_come_whole() -> None:
    """GEN-09: an emoji of several tokens comes once, when it is complete."""
    gpt2 = load_tokenizer("gpt2")
    ids = [int(i) for i in gpt2.encode("a👩b")]
    assert len(ids) > 3, "the emoji is no single token"
    assert list(gpt2.pieces(ids)) == ["a", "👩", "b"]


@given(st.text(st.sampled_from("aß€👩\n"), max_size=20), st.integers(0, 3))
def test_pieces_are_the_whole_text_also_where_it_is_cut(text: str, cut: int) -> None:
    tokenizer = Bytes()
    ids = [int(i) for i in tokenizer.encode(text)]
    ids = ids[: max(0, len(ids) - cut)]
    pieces = list(tokenizer.pieces(ids))
    assert "".join(pieces) == tokenizer.decode(ids)
    assert all(pieces)
    assert "\ufffd" not in "".join(pieces[:-1])


@given(st.lists(st.integers(0, 255), max_size=30))
def test_bytes_that_are_no_text_are_replaced_as_a_whole_decode_would(ids: list[int]) -> None:
    assert "".join(Bytes().pieces(ids)) == Bytes().decode(ids)


def test_an_empty_prompt_starts_where_documents_do() -> None:
    """GEN-04: from the end token, else a newline, else id 0."""
    assert prompt_ids(load_tokenizer("gpt2"), "") == [50256]
    assert prompt_ids(Bytes(), "") == [10]
    assert prompt_ids(Characters("\t\nab"), "") == [1]
    assert prompt_ids(Characters("ab"), "") == [0]


def test_a_sample_is_the_prompt_and_what_follows() -> None:
    tokenizer = Characters("".join(chr(ord("0") + i) for i in range(65)))
    model = tiny()

    def text(prompt: str) -> str:
        return sample_text(
            model,
            tokenizer,
            prompt=prompt,
            max_new_tokens=30,
            sampling=GREEDY,
            generator=seeded(1, CPU),
            forward_scope=nullcontext,
        )

    assert text("123") == "123" + tokenizer.decode(tokens_of(model, [1, 2, 3], n=30))
    assert len(text("")) == 30
