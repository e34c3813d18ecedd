"""Text from a model, token by token, with or without a cache of keys and values.

Pure parts: which tokens the model sees (`context_start`), which one follows (`choose`), how ids
become text (`Tokenizer.pieces`). `generate_tokens` joins the first two, `sample_text` all three.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gptfast.errors import GptfastError, Refused
from gptfast.model import GPT, KVCache
from gptfast.run.evaluate import eval_mode

if TYPE_CHECKING:
    from gptfast.tokenizers.tokenizer import Tokenizer

GREEDY_BELOW = 1e-5
"""Temperatures below this are 0: divided by them, logits leave the range of float32."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token each time.
        top_k: only the `top_k` likeliest tokens; None, 0 or the whole vocabulary: all of them.
        top_p: only the fewest likeliest tokens whose probabilities reach `top_p`; None: all.
            After `top_k`. Source: Holtzman et al. 2019, nucleus sampling.
    """

    temperature: float = 0.8
    top_k: int | None = 200
    top_p: float | None = None

    def __post_init__(self) -> None:
        """Raises Refused where a value is impossible."""
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise Refused(
                f"temperature {self.temperature} must be a finite number from 0 on: "
                "use 0 for the likeliest token, about 0.8 for variety"
            )
        if self.top_k is not None and self.top_k < 0:
            raise Refused(f"top-k {self.top_k} must be 0 (off) or a number of tokens: raise it")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise Refused(f"top-p {self.top_p} must be above 0 and at most 1: use about 0.95")


def context_start(n_tokens: int, block_size: int) -> int:
    """Index of the first of `n_tokens` that the model sees when it predicts the next one.

    All of them while they fit; where they do not, the older half of a full context is dropped and
    the rest goes on growing. Dropping one token a time would move every position, and with it
    every cached key, at each step; so the cache is rebuilt once in `block_size / 2` tokens.

    Example: with a block of 4, contexts end up 1, 2, 3, 4, 3, 4, 3, 4, ... tokens long.
    """
    dropped = max(1, block_size // 2)
    return dropped * -(-max(0, n_tokens - block_size) // dropped)


def choose(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """The next token.

    Args:
        logits_V: (V,) finite, on the device of `generator`.
    """
    if sampling.temperature < GREEDY_BELOW:
        return int(logits_V.argmax())
    vocabulary = len(logits_V)
    top_k = min(sampling.top_k or vocabulary, vocabulary)
    top_p = 1.0 if sampling.top_p is None else sampling.top_p
    scaled_V = logits_V.float() / sampling.temperature
    if top_k == vocabulary and top_p == 1.0:
        return int(torch.multinomial(scaled_V.softmax(0), 1, generator=generator))
    scaled_K, ids_K = scaled_V.topk(top_k)
    likelihood_K = scaled_K.softmax(0)
    if top_p < 1.0:
        likelier_K = likelihood_K.cumsum(0) - likelihood_K
        likelihood_K = likelihood_K.masked_fill(likelier_K >= top_p, 0.0)
    return int(ids_K[torch.multinomial(likelihood_K, 1, generator=generator)])


def generate_tokens(
    model: GPT,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    generator: torch.Generator,
    forward_scope: Callable[[], AbstractContextManager[object]],
    cached: bool = True,
    vocab_size: int | None = None,
    source: str = "the model",
) -> Iterator[int]:
    """`max_new_tokens` ids that continue `prompt`, each as soon as it is known.

    The model is called without its compiled wrapper, because each length would compile anew. Its
    mode is as found between two tokens.

    Args:
        model: the GPT itself.
        prompt: ids, at least one; the last `block_size` of them are used.
        generator: on the model's device.
        forward_scope: entered around each forward pass, as in training.
        cached: keep keys and values; without, each token computes its whole context anew. Both
            give the same tokens: see `context_start`.
        vocab_size: ids from here on are never sampled; None: the model's vocabulary.
        source: what an error calls the model.

    Raises:
        Refused: `max_new_tokens` is negative.
        GptfastError: while iterating, where logits are not finite.
    """
    if max_new_tokens < 0:
        raise Refused(f"max-new-tokens {max_new_tokens} must be 0 or more: raise it")
    return _generate(
        model,
        list(prompt[-model.config.block_size :]),
        max_new_tokens,
        choose_next=lambda logits_V: choose(logits_V[:vocab_size], sampling, generator),
        forward_scope=forward_scope,
        cache=KVCache.of(model) if cached else None,
        source=source,
    )


def _generate(
    model: GPT,
    ids: list[int],
    max_new_tokens: int,
    *,
    choose_next: Callable[[Tensor], int],
    forward_scope: Callable[[], AbstractContextManager[object]],
    cache: KVCache | None,
    source: str,
) -> Iterator[int]:
    start = 0
    for n_new in range(max_new_tokens):
        before, start = start, context_start(len(ids), model.config.block_size)
        if cache is not None and start != before:
            cache.length = 0
        unseen = ids[start + (cache.length if cache is not None else 0) :]
        # Left before the yield: whoever takes the token must not find our mode or our scope.
        with eval_mode(model), forward_scope():
            tokens_BT = torch.tensor([unseen], device=model.wte.weight.device)
            logits_V = model.next_logits(tokens_BT, cache)[0]
        if not torch.isfinite(logits_V).all():
            raise GptfastError(
                f"{source}: non-finite logits for new token {n_new + 1}: its weights are damaged, "
                "use an older checkpoint"
            )
        ids.append(choose_next(logits_V))
        yield ids[-1]


def seeded(seed: int, device: torch.device) -> torch.Generator:
    """A generator on `device` that has drawn nothing yet."""
    return torch.Generator(device).manual_seed(seed)


def prompt_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """The ids of `prompt`. An empty one starts where documents do: from the tokenizer's end token,
    else from a newline, else (characters without one) from id 0.

    Raises:
        Refused: a character that the tokenizer does not know.
    """
    if prompt:
        return [int(i) for i in tokenizer.encode(prompt)]
    if tokenizer.eot_id is not None:
        return [tokenizer.eot_id]
    try:
        return [int(i) for i in tokenizer.encode("\n")]
    except Refused:
        return [0]


def sample_text(
    model: GPT,
    tokenizer: Tokenizer,
    *,
    prompt: str,
    max_new_tokens: int,
    sampling: Sampling,
    generator: torch.Generator,
    forward_scope: Callable[[], AbstractContextManager[object]],
    should_stop: Callable[[], bool] = lambda: False,
) -> str:
    """`prompt` and its continuation; see `generate_tokens`.

    `should_stop` is asked after each token; True ends the text there.
    """
    tokens = generate_tokens(
        model,
        prompt_ids(tokenizer, prompt),
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        generator=generator,
        forward_scope=forward_scope,
        vocab_size=tokenizer.vocab_size,
    )
    with eval_mode(model):  # once for all tokens
        wanted = itertools.takewhile(lambda _: not should_stop(), tokens)
        return prompt + "".join(tokenizer.pieces(wanted))
