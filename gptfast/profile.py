"""A profile: everything a run is told, validated once and frozen.

`config` reads one from TOML. Nothing derived is stored in a file: what follows from the data (the
vocabulary) or from the machine is filled in by the run.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gptfast.errors import Refused

Positive = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
PositiveFinite = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class Table(BaseModel):
    """A table of a profile: frozen, strict about kinds, closed to unknown keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )


PRESETS: dict[str, dict[str, int]] = {
    "gpt2": {"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024},
    "gpt2-medium": {"n_layer": 24, "n_head": 16, "n_embd": 1024, "block_size": 1024},
    "gpt2-large": {"n_layer": 36, "n_head": 20, "n_embd": 1280, "block_size": 1024},
    "gpt2-xl": {"n_layer": 48, "n_head": 25, "n_embd": 1600, "block_size": 1024},
    "char-small": {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64},
    "char-base": {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256},
}
"""Shapes by name. A key given beside `preset` wins over the preset's."""


class ModelConfig(Table):
    """The shape of the model and its switchable parts. The defaults are GPT-2 small's."""

    preset: (
        Literal["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "char-small", "char-base"] | None
    ) = None
    """A shape by name; keys given beside it win. None: the keys alone."""
    n_layer: Positive = 12
    """Transformer blocks."""
    n_head: Positive = 12
    """Attention heads; divides n_embd."""
    n_kv_head: Positive | None = None
    """Key/value heads (grouped-query attention); divides n_head. None: as many as n_head."""
    n_embd: Positive = 768
    """Width of the residual stream."""
    block_size: Positive = 1024
    """Context length in tokens."""
    vocab_size: Positive | None = None
    """Ids of the vocabulary. None: what the data says."""
    padded_vocab_size: Positive | None = None
    """Rows of embedding and head. None: vocab_size. Rows beyond it are never predicted."""
    dropout: Fraction = 0.0
    """Dropout probability after embeddings, attention and projections."""
    bias: bool = True
    """Biases in linear layers and LayerNorms."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Normalisation before each sublayer and at the end."""
    position: Literal["learned", "rope"] = "learned"
    """Learned position table (GPT-2) or rotary embedding of queries and keys."""
    rope_base: PositiveFinite = 10_000.0
    """Base of the rotary frequencies."""
    ngram_rows: Annotated[int, Field(ge=0)] = 0
    """Rows of a table of hashed n-grams, whose vectors join the token embedding. 0: none."""
    max_ngram: Annotated[int, Field(ge=2, le=16)] = 4
    """Length of the longest of these n-grams in tokens; the shortest are pairs."""
    activation: Literal["gelu", "gelu-erf", "relu2", "swiglu"] = "gelu"
    """GELU by its tanh formula (GPT-2), GELU itself (within 5e-4 of it, and faster on a CPU),
    squared ReLU, or SwiGLU."""
    qk_norm: bool = False
    """RMS-normalise queries and keys per head before attention."""
    logit_softcap: PositiveFinite | None = None
    """Squash logits to (-cap, cap) by cap * tanh(logits / cap). None: they stay as they are."""
    tied_head: bool = True
    """The output head is the token embedding (GPT-2)."""
    zero_init_projections: bool = False
    """Start the residual projections (and an untied head) at zero instead of the GPT-2 scale."""
    attention: Literal["plain", "sdpa"] = "plain"
    """Attention written out, or torch's scaled_dot_product_attention."""

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("preset") in PRESETS:
            return {**PRESETS[values["preset"]], **values}
        return values

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        if self.n_embd % self.n_head:
            raise ValueError(
                f"n_head = {self.n_head} does not divide n_embd = {self.n_embd}: "
                f"use {_nearest_divisors(self.n_embd, self.n_head)}"
            )
        if self.n_head % self.kv_heads:
            raise ValueError(
                f"n_kv_head = {self.n_kv_head} does not divide n_head = {self.n_head}: "
                f"use {_nearest_divisors(self.n_head, self.kv_heads)}"
            )
        if self.position == "rope" and self.head_size % 2:
            raise ValueError(
                f'position = "rope" needs an even head size, found n_embd / n_head = '
                f"{self.head_size}: change n_head or n_embd"
            )
        if self.padded_vocab_size is not None and self.padded_vocab_size < (self.vocab_size or 1):
            raise ValueError(
                f"padded_vocab_size = {self.padded_vocab_size} is below vocab_size = "
                f"{self.vocab_size}: leave it out or raise it"
            )
        return self

    @property
    def head_size(self) -> int:
        return self.n_embd // self.n_head

    @property
    def kv_heads(self) -> int:
        return self.n_kv_head or self.n_head

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding. The vocabulary must be known."""
        assert self.vocab_size is not None, "the data's vocabulary has not been filled in"
        return self.padded_vocab_size or self.vocab_size


class DataConfig(Table):
    """Where the tokens are."""

    path: str = "data/shakespeare-gpt2.h5"
    """HDF5 file made by `gptfast prepare`; relative to the file that says it."""


class TrainConfig(Table):
    """How to train. Every count is in optimizer steps, never in micro-batches."""

    steps: Positive = 1000
    """Optimizer steps in the run."""
    batch_size: Positive = 12
    """Windows in one step."""
    micro_batch: Positive | Literal["auto"] | None = None
    """Windows in one forward pass; divides batch_size. None: the whole batch. "auto": as many as
    fit into memory, found by trying."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1337
    """Fixes initial weights, order of the windows and dropout."""
    learning_rate: PositiveFinite = 6e-4
    """Peak learning rate."""
    min_lr: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] | None = None
    """Learning rate at the last step. None: a tenth of the peak."""
    schedule: Literal["cosine", "constant", "wsd"] = "cosine"
    """After the warm-up: cosine to min_lr, constant, or stable and then linear to min_lr (wsd)."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of linear warm-up; the peak is reached at the end of this step."""
    decay_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 0.2
    """Last share of the steps in which wsd decays."""
    weight_decay: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.1
    """AdamW's decay, on matrices only."""
    beta1: Fraction = 0.9
    """AdamW's first moment."""
    beta2: Fraction = 0.95
    """AdamW's second moment."""
    grad_clip: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 1.0
    """Largest norm of the gradient; 0 turns clipping off."""
    finite_check: Literal["auto", "update"] = "auto"
    """When a loss or gradient that is not finite stops the run. "update": before it is applied.
    "auto": so too where looking costs no wait (CPU), else with the next log and before any save."""
    eval_interval: Annotated[int, Field(ge=0)] = 250
    """Steps between evaluations; 0: only after the last step."""
    eval_tokens: Positive | None = None
    """Target tokens of `val` that an evaluation scores, always its first ones. None: all."""
    save_interval: Annotated[int, Field(ge=0)] = 500
    """Steps between checkpoints; 0: only after the last step."""
    keep_checkpoints: Positive = 2
    """Newest checkpoints kept; the best one is kept besides."""
    log_interval: Positive = 10
    """Steps between two log records; only these wait for the device."""
    sample_interval: Annotated[int, Field(ge=0)] = 0
    """Steps between printed samples; 0: only after the last step."""
    sample_tokens: Annotated[int, Field(ge=0)] = 0
    """Tokens of a printed sample; 0: none."""

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        if isinstance(self.micro_batch, int) and self.batch_size % self.micro_batch:
            raise ValueError(
                f"micro_batch = {self.micro_batch} does not divide batch_size = "
                f"{self.batch_size}: use {_nearest_divisors(self.batch_size, self.micro_batch)}"
            )
        if self.min_lr is not None and self.min_lr > self.learning_rate:
            raise ValueError(
                f"min_lr = {self.min_lr} is above learning_rate = {self.learning_rate}: lower it"
            )
        return self

    @property
    def windows_per_micro(self) -> int:
        """Windows in one forward pass; while "auto" is not found yet, all of them."""
        return self.micro_batch if isinstance(self.micro_batch, int) else self.batch_size

    @property
    def n_micro(self) -> int:
        """Micro-batches in a step."""
        return self.batch_size // self.windows_per_micro

    @property
    def final_lr(self) -> float:
        return self.learning_rate / 10 if self.min_lr is None else self.min_lr


PluginTable = dict[str, Any]


class Profile(Table):
    """One validated profile: model, data, training, plugins."""

    name: Annotated[str, Field(pattern=r"^[^/\\.][^/\\]*$")] = "default"
    """The name it was found under; runs are named after it."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    plugins: dict[str, PluginTable] = {}
    """Options of each plugin that is on, in the order in which the profile names them."""
    unsupported_plugins: Literal["stop", "skip"] = "stop"
    """What to do with a plugin that this machine does not support."""

    def replace(self, changes: Mapping[str, Any]) -> Profile:
        """A copy with dotted keys changed and everything validated again.

        Example: `profile.replace({"model.attention": "sdpa"})`.

        Raises:
            Refused: a key is unknown or a value impossible.
        """
        tree = self.model_dump(exclude_unset=True)
        for key, value in changes.items():
            put(tree, key, value)
        return validate(tree, origins={}, source="profile")

    def to_toml(self) -> str:
        """The complete profile as a TOML file that `load` reads back to an equal one."""
        return tomli_w.dumps(self.model_dump(exclude_none=True))


def put(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *tables, key = dotted.split(".")
    for table in tables:
        tree = tree.setdefault(table, {})
        if not isinstance(tree, dict):
            raise Refused(f"{dotted}: {table} is a value, not a table")
    tree[key] = value


def validate(tree: Mapping[str, Any], *, origins: Mapping[str, str], source: str) -> Profile:
    try:
        return Profile.model_validate(tree)
    except ValidationError as error:
        raise Refused(faults(error, origins=origins, source=source, model=Profile)) from error


def faults(
    error: ValidationError, *, origins: Mapping[str, str], source: str, model: type[BaseModel]
) -> str:
    """All faults of a table in one line: where, what was found, what is allowed."""
    lines = []
    for fault in error.errors(include_url=False):
        location = [str(part) for part in fault["loc"]]
        dotted = ".".join(location)
        where = origins.get(dotted, source)
        if fault["type"] == "extra_forbidden":
            known = _fields_at(model, location[:-1])
            lines.append(f"{where} unknown key {dotted}: {nearest(location[-1], known)}")
        elif fault["type"] == "value_error":
            rule = str(fault["ctx"]["error"])
            named = next((o for key, o in origins.items() if _named_in(key, dotted, rule)), where)
            lines.append(f"{named} {dotted + '.' if dotted else ''}{rule}")
        else:
            message = fault["msg"].replace("Input should be", "should be")
            if fault["type"] == "model_type":
                message = f"should be a table: write {dotted}.KEY = VALUE"
            lines.append(f"{where} {dotted} = {_as_toml(fault['input'])} {message}")
    return "; ".join(lines)


def _as_toml(value: object) -> str:
    """As a TOML file would have it, where that differs from Python."""
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _named_in(key: str, table: str, rule: str) -> bool:
    """Whether `rule`, a sentence about `table`, opens with the field that `key` sets."""
    return key == f"{table}.{rule.split(' ', 1)[0]}"


def _fields_at(model: type[BaseModel], location: Sequence[str]) -> list[str]:
    for part in location:
        inner = model.model_fields[part].annotation
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return []
        model = inner
    return list(model.model_fields)


def _nearest_divisors(whole: int, wanted: int) -> str:
    divisors = [d for d in range(1, whole + 1) if whole % d == 0]
    divisors.sort(key=lambda d: abs(d - wanted))
    return ", ".join(str(d) for d in sorted(divisors[:3]))


def nearest(word: str, known: Iterable[str]) -> str:
    """`did you mean` for an unknown word: the nearest known one, else all of them."""
    known = sorted(known)
    match = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if match:
        return f"did you mean {match[0]}?"
    return f"choose from {', '.join(known)}" if known else "there is none"
