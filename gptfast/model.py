"""The reference GPT, whole. Attention is written out; a plugin makes it fast.

With the defaults of `ModelConfig` this is GPT-2 to the letter (Radford et al. 2019, "Language
Models are Unsupervised Multitask Learners"): pre-norm, learned positions, tanh GELU, tied head,
residual projections initialised at 0.02 / sqrt(2 * n_layer). Each modern part is a switch.

Shapes: B windows, T new tokens, S tokens attended to (cached and new), C width, V vocabulary rows,
H query heads, G key/value heads, D head size, F hidden width of the MLP, N tokens flattened.
"""

from __future__ import annotations

import math
from typing import Any, Protocol, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptfast.profile import ModelConfig

IGNORE = -100
"""Target of a position that is not scored."""


class TokenLoss(Protocol):
    """From the last hidden state to the summed loss; a plugin may put its own in its place."""

    def __call__(
        self,
        x_BTC: Tensor,
        head_VC: Tensor,
        targets_BT: Tensor,
        *,
        vocab_size: int,
        softcap: float | None,
    ) -> Tensor: ...


class Attend(Protocol):
    """From queries, keys and values to what each token has gathered; a plugin may put its own in
    its place, together with the model's `mask_of`, whose result it takes."""

    def __call__(
        self, q_BHTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, *, mask_TS: Any, dropout: float
    ) -> Tensor: ...


class KVCache:
    """Keys and values of the tokens already seen, for every layer.

    Attributes:
        k, v: (n_layer, B, G, block_size, D).
        ids: (B, block_size) int64, the tokens themselves.
        length: tokens stored; the next call of the model appends behind them.
    """

    def __init__(
        self, config: ModelConfig, batch_size: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        shape = (config.n_layer, batch_size, config.kv_heads, config.block_size, config.head_size)
        self.k = torch.zeros(shape, device=device, dtype=dtype)
        self.v = torch.zeros(shape, device=device, dtype=dtype)
        self.ids = torch.zeros(batch_size, config.block_size, device=device, dtype=torch.int64)
        self.length = 0

    @classmethod
    def of(cls, model: GPT, batch_size: int = 1) -> KVCache:
        """An empty cache on the device and in the dtype of `model`."""
        weight = model.wte.weight
        return cls(model.config, batch_size, device=weight.device, dtype=weight.dtype)

    def extend(self, layer: int, k_BGTD: Tensor, v_BGTD: Tensor) -> tuple[Tensor, Tensor]:
        """Append to one layer; returns all keys and values so far, (B, G, S, D) each."""
        end = self.length + k_BGTD.size(2)
        self.k[layer, :, :, self.length : end] = k_BGTD
        self.v[layer, :, :, self.length : end] = v_BGTD
        return self.k[layer, :, :, :end], self.v[layer, :, :, :end]

    def extend_ids(self, tokens_BT: Tensor, *, before: int) -> Tensor:
        """Append tokens; returns them behind up to `before` that came earlier, (B, T + before)."""
        end = self.length + tokens_BT.size(1)
        self.ids[:, self.length : end] = tokens_BT
        return self.ids[:, max(0, self.length - before) : end]


def head_logits(x_NC: Tensor, head_VC: Tensor, *, vocab_size: int, softcap: float | None) -> Tensor:
    """Logits of the real vocabulary, (..., vocab_size); padded rows of the head are cut off."""
    logits_NV = F.linear(x_NC, head_VC)[..., :vocab_size]
    return logits_NV if softcap is None else softcap * torch.tanh(logits_NV / softcap)


def token_loss(
    x_BTC: Tensor, head_VC: Tensor, targets_BT: Tensor, *, vocab_size: int, softcap: float | None
) -> Tensor:
    """Cross-entropy in float32 summed over the scored tokens, in nats; scalar."""
    logits_BTV = head_logits(x_BTC, head_VC, vocab_size=vocab_size, softcap=softcap)
    return F.cross_entropy(
        logits_BTV.flatten(0, 1).float(),
        targets_BT.flatten(),
        ignore_index=IGNORE,
        reduction="sum",
    )


def rope_tables(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """cos and sin, (block_size, D/2) each. Source: Su et al. 2021, RoFormer."""
    frequencies = config.rope_base ** (-torch.arange(0, config.head_size, 2) / config.head_size)
    angles = torch.outer(torch.arange(config.block_size), frequencies)
    return angles.cos(), angles.sin()


def rotate(x_BHTD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Turn each pair (i, i + D/2) of the last dimension by its position's angle."""
    first, second = x_BHTD.chunk(2, dim=-1)
    cos_TD, sin_TD = cos_TD.to(x_BHTD.dtype), sin_TD.to(x_BHTD.dtype)
    return torch.cat((first * cos_TD - second * sin_TD, second * cos_TD + first * sin_TD), dim=-1)


class NgramEmbedding(nn.Module):
    """A vector for the pairs, triples, ... of tokens that end at each token, summed.

    What the last few tokens tell is learnt here within the first steps, before attention finds
    where to look. N-grams share the rows of one table by their hashes, so it is as small as wanted.
    Source: Pagnoni et al. 2024, "Byte Latent Transformer: Patches Scale Better Than Tokens", 3.2.1.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.longest = config.max_ngram
        self.table = nn.Embedding(config.ngram_rows, config.n_embd)

    def forward(self, tokens_BS: Tensor, T: int) -> Tensor:
        """(B, T, C) for the last T of S tokens; those before them only complete the n-grams."""
        ids_BSN = ngram_ids(tokens_BS, longest=self.longest, rows=self.table.num_embeddings)
        out: Tensor = self.table(ids_BSN[:, -T:]).sum(dim=-2)
        return out


def ngram_ids(tokens_BS: Tensor, *, longest: int, rows: int) -> Tensor:
    """Row of each n-gram that ends at a token, (B, S, longest - 1) int64, pairs first.

    A polynomial hash from the last token backwards; what lies before the first one counts as 0 and
    id i as i + 1, so that a beginning has rows of its own.
    Source: Park, Miller and Stockmeyer 1993 (multiplier and modulus of the "minimal standard").
    """
    digits_BS = tokens_BS + 1
    hash_BS, ids = digits_BS, []
    for back in range(1, longest):
        earlier_BS = F.pad(digits_BS, (back, 0))[:, : digits_BS.size(1)]
        hash_BS = (hash_BS * 48_271 + earlier_BS) % (2**31 - 1)
        ids.append(hash_BS % rows)
    return torch.stack(ids, dim=-1)


class Attention(nn.Module):
    """Causal self-attention, with grouped key/value heads where the profile says so."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        self.layer = layer
        heads = config.n_head + 2 * config.kv_heads
        self.c_attn = nn.Linear(config.n_embd, heads * config.head_size, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.attend: Attend = sdpa_attention if config.attention == "sdpa" else plain_attention

    def forward(
        self,
        x_BTC: Tensor,
        *,
        rope: tuple[Tensor, Tensor] | None,
        mask_TS: Any,
        cache: KVCache | None,
    ) -> Tensor:
        config, G = self.config, self.config.kv_heads
        B, T, C = x_BTC.shape
        heads_BTD = self.c_attn(x_BTC).view(B, T, -1, config.head_size).transpose(1, 2)
        if config.qk_norm or rope is not None:
            # Queries and keys at once: half as many operations, all of them small.
            qk_BTD, v_BGTD = heads_BTD.split([config.n_head + G, G], dim=1)
            if config.qk_norm:
                qk_BTD = F.rms_norm(qk_BTD, (config.head_size,))
            if rope is not None:
                qk_BTD = rotate(qk_BTD, *rope)
            q_BHTD, k_BGTD = qk_BTD.split([config.n_head, G], dim=1)
        else:
            q_BHTD, k_BGTD, v_BGTD = heads_BTD.split([config.n_head, G, G], dim=1)
        if cache is not None:
            k_BGTD, v_BGTD = cache.extend(self.layer, k_BGTD, v_BGTD)
        y_BHTD = self.attend(
            q_BHTD,
            k_BGTD,
            v_BGTD,
            mask_TS=mask_TS,
            dropout=config.dropout if self.training else 0.0,
        )
        y_BTC = y_BHTD.transpose(1, 2).reshape(B, T, C)
        out: Tensor = self.resid_dropout(self.c_proj(y_BTC))
        return out


def plain_attention(
    q_BHTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, *, mask_TS: Tensor, dropout: float
) -> Tensor:
    """softmax(q k^T / sqrt(D)) v, written out. `mask_TS` is True where attention is allowed."""
    group = q_BHTD.size(1) // k_BGSD.size(1)
    if group > 1:
        k_BGSD = k_BGSD.repeat_interleave(group, dim=1)
        v_BGSD = v_BGSD.repeat_interleave(group, dim=1)
    scores_BHTS = q_BHTD @ k_BGSD.transpose(-2, -1) / math.sqrt(q_BHTD.size(-1))
    if len(mask_TS) > 1:  # a single new token may see everything
        scores_BHTS = scores_BHTS.masked_fill(~mask_TS, -math.inf)
    return F.dropout(scores_BHTS.softmax(dim=-1), dropout) @ v_BGSD


def sdpa_attention(
    q_BHTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, *, mask_TS: Tensor, dropout: float
) -> Tensor:
    """The same through torch's fused kernels, which take a mask or `is_causal`, never both.

    `is_causal` aligns to the upper left, so it is right only while nothing is cached; a single
    new token may see everything and needs no mask.
    Source: torch.nn.functional.scaled_dot_product_attention.
    """
    T, S = mask_TS.shape
    return F.scaled_dot_product_attention(
        q_BHTD,
        k_BGSD,
        v_BGSD,
        attn_mask=mask_TS if 1 < T < S else None,
        is_causal=1 < T == S,
        dropout_p=dropout,
        enable_gqa=q_BHTD.size(1) != k_BGSD.size(1),
    )


class MLP(nn.Module):
    """GELU (Hendrycks and Gimpel 2016), squared ReLU (So et al. 2021, Primer) or SwiGLU (Shazeer
    2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = config.activation
        gated = config.activation == "swiglu"
        # Two thirds of 4C, so that the gate costs no parameters; rounded up to whole cache lines.
        hidden = -(-8 * config.n_embd // 3 // 64) * 64 if gated else 4 * config.n_embd
        self.c_fc = nn.Linear(config.n_embd, hidden * (1 + gated), bias=config.bias)
        self.c_proj = nn.Linear(hidden, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_BTF = self.c_fc(x_BTC)
        if self.activation == "gelu":
            x_BTF = F.gelu(x_BTF, approximate="tanh")
        elif self.activation == "gelu-erf":
            x_BTF = F.gelu(x_BTF)
        elif self.activation == "relu2":
            x_BTF = F.relu(x_BTF).square()
        else:
            gate_BTF, x_BTF = x_BTF.chunk(2, dim=-1)
            x_BTF = F.silu(gate_BTF) * x_BTF
        out: Tensor = self.dropout(self.c_proj(x_BTF))
        return out


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.ln_1 = build_norm(config)
        self.attn = Attention(config, layer)
        self.ln_2 = build_norm(config)
        self.mlp = MLP(config)

    def forward(
        self,
        x_BTC: Tensor,
        *,
        rope: tuple[Tensor, Tensor] | None,
        mask_TS: Any,
        cache: KVCache | None,
    ) -> Tensor:
        x_BTC = x_BTC + self.attn(self.ln_1(x_BTC), rope=rope, mask_TS=mask_TS, cache=cache)
        out: Tensor = x_BTC + self.mlp(self.ln_2(x_BTC))
        return out


def build_norm(config: ModelConfig) -> nn.Module:
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.n_embd, eps=1e-5)
    return nn.LayerNorm(config.n_embd, eps=1e-5, bias=config.bias)


class GPT(nn.Module):
    """A decoder-only transformer. `config.vocab_size` must be known.

    The parameters carry the names of the published GPT-2 (`wte`, `wpe`, `h.0.attn.c_attn`, ...).
    A tied head is the embedding itself, not a second entry, so it is counted and saved once.
    """

    mask: Tensor
    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        rows, width = config.vocab_rows, config.n_embd
        # Not torch's own initialisation, which would draw a random number for each padded row, too.
        # Nor the device "meta", on which it takes 3 s: it imports the compiler.
        self.wte = nn.Embedding.from_pretrained(  # type: ignore[no-untyped-call]  # in torch
            torch.empty(rows, width), freeze=False
        )
        if config.position == "learned":
            self.wpe = nn.Embedding(config.block_size, width)
        if config.ngram_rows:
            self.wne = NgramEmbedding(config)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.ln_f = build_norm(config)
        if not config.tied_head:
            self.lm_head = nn.Linear(width, rows, bias=False, device="meta")
            self.lm_head.to_empty(device=self.wte.weight.device)
        mask = torch.ones(config.block_size, config.block_size, dtype=torch.bool).tril()
        self.register_buffer("mask", mask, persistent=False)
        if config.position == "rope":
            cos, sin = rope_tables(config)
            self.register_buffer("rope_cos", cos, persistent=False)
            self.register_buffer("rope_sin", sin, persistent=False)
        self.token_loss: TokenLoss = token_loss
        self._initialise()

    @torch.no_grad()
    def _initialise(self) -> None:
        """GPT-2's initialisation. Rows beyond the vocabulary are zero and draw no random number,
        so that a padded model starts where the unpadded one does."""
        config = self.config
        projection_std = (
            0.0 if config.zero_init_projections else 0.02 / math.sqrt(2 * config.n_layer)
        )
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif name.endswith("c_proj.weight"):
                parameter.normal_(std=projection_std)
            elif name in ("wte.weight", "lm_head.weight"):
                head = name == "lm_head.weight" and config.zero_init_projections
                parameter.zero_()
                parameter[: config.vocab_size].normal_(std=0.0 if head else 0.02)
            elif parameter.dim() == 2:
                parameter.normal_(std=0.02)

    @property
    def head_VC(self) -> Tensor:
        return self.wte.weight if self.config.tied_head else self.lm_head.weight

    def mask_of(self, tokens_BT: Tensor, cache: KVCache | None = None) -> Any:
        """What the attention of every block is told: (T, S), True where a token may look."""
        T = tokens_BT.size(1)
        start = cache.length if cache is not None else 0
        return self.mask[start : start + T, : start + T]

    def hidden(self, tokens_BT: Tensor, cache: KVCache | None = None) -> Tensor:
        """Hidden state behind the final norm, (B, T, C); appends to `cache` where there is one."""
        T = tokens_BT.size(1)
        start = cache.length if cache is not None else 0
        x_BTC = self.wte(tokens_BT)
        if self.config.ngram_rows:
            before = self.config.max_ngram - 1
            seen_BS = tokens_BT if cache is None else cache.extend_ids(tokens_BT, before=before)
            x_BTC = x_BTC + self.wne(seen_BS, T)
        rope = None
        if self.config.position == "learned":
            x_BTC = x_BTC + self.wpe.weight[start : start + T]
        else:
            rope = (self.rope_cos[start : start + T], self.rope_sin[start : start + T])
        x_BTC = self.drop(x_BTC)
        mask_TS = self.mask_of(tokens_BT, cache)
        for block in self.h:
            x_BTC = block(x_BTC, rope=rope, mask_TS=mask_TS, cache=cache)
        if cache is not None:
            cache.length += T
        out: Tensor = self.ln_f(x_BTC)
        return out

    @overload
    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor: ...
    @overload
    def forward(self, tokens_BT: Tensor, *, cache: KVCache | None = None) -> Tensor: ...
    def forward(
        self, tokens_BT: Tensor, targets_BT: Tensor | None = None, *, cache: KVCache | None = None
    ) -> Tensor:
        """The summed loss of `targets_BT`, or without targets the logits of the next token.

        Args:
            tokens_BT: (B, T) int64, T at most block_size less what `cache` holds.
            targets_BT: (B, T) int64; IGNORE where a position is not scored.
            cache: extended by these tokens.

        Returns:
            Scalar float32 sum in nats over the scored tokens; or logits (B, T, vocab_size).
        """
        config = self.config
        assert config.vocab_size is not None
        x_BTC = self.hidden(tokens_BT, cache)
        if targets_BT is None:
            return head_logits(
                x_BTC, self.head_VC, vocab_size=config.vocab_size, softcap=config.logit_softcap
            )
        return self.token_loss(
            x_BTC,
            self.head_VC,
            targets_BT,
            vocab_size=config.vocab_size,
            softcap=config.logit_softcap,
        )

    def next_logits(self, tokens_BT: Tensor, cache: KVCache | None = None) -> Tensor:
        """Logits of the token that follows the last one, (B, vocab_size), as `forward` has them.

        Generation needs no others, and the head is a large part of a small model's work.
        """
        assert self.config.vocab_size is not None
        return head_logits(
            self.hidden(tokens_BT, cache)[:, -1],
            self.head_VC,
            vocab_size=self.config.vocab_size,
            softcap=self.config.logit_softcap,
        )


def count_parameters(model: nn.Module) -> int:
    """Every parameter once: 124,439,808 at GPT-2 small."""
    return sum(parameter.numel() for parameter in model.parameters())


def flops_per_token(config: ModelConfig, parameters: int) -> int:
    """Training FLOPs of one token: 6 N + 12 L C T, forward and backward.

    N counts every parameter, embeddings too: 859.9e6 at GPT-2 small. Not the table of n-grams,
    which is only looked up.
    Source: Chowdhery et al. 2022, PaLM, appendix B.
    """
    parameters -= config.ngram_rows * config.n_embd
    return 6 * parameters + 12 * config.n_layer * config.n_embd * config.block_size
