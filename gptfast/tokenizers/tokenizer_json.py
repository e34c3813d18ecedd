"""`tokenizer.json` files of Hugging Face.

Byte-level BPE with a pattern that is known (GPT-2, Llama 3, GPT-4o and their like) becomes a `Bpe`:
tiktoken gives the same ids, faster, and the package `tokenizers` is not needed. All others go
through `tokenizers`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gptfast.errors import Refused
from gptfast.tokenizers.bpe import PATTERNS, Bpe, before_last_merge, printable_bytes
from gptfast.tokenizers.hugging_face import HuggingFace
from gptfast.tokenizers.text import MOST_IDS

FILE = "tokenizer.json"

_SPELLINGS = {
    *PATTERNS.values(),
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
"""Patterns that both regular expression engines read alike and whose texts may be cut up: those of
`bpe`, their longer spellings (GPT-2, Llama 3) and Qwen's, a number of which is one digit."""

_SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
"""What ends a document, where nothing beside the file says so; the first that it has."""


def read_tokenizer_json(path: Path) -> Bpe | HuggingFace:
    """The tokenizer of a `tokenizer.json`, or of the folder of a model that has one.

    The separator is the `eos_token` of `tokenizer_config.json` beside it, else the first of
    `_SEPARATORS` among its added tokens.

    Raises:
        Refused: it cannot be read or is damaged; the package that it needs is not installed.
    """
    path = path / FILE if path.is_dir() else path
    content = _json(path)
    name = path.absolute().parent.name if path.name == FILE else path.stem
    try:
        markers = {token["content"]: token["id"] for token in content["added_tokens"]}
        _check_ids(markers, content["model"].get("vocab"))
        separator = _separator(path.with_name("tokenizer_config.json"), markers)
        bpe = _as_bpe(name, content, separator)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Refused(
            f"{path}: does not describe a tokenizer ({type(error).__name__}: {error}): name a "
            "tokenizer.json of Hugging Face, or a .tiktoken file"
        ) from error
    if bpe is not None:
        return bpe
    try:
        return HuggingFace(name, content=content, separator=separator)
    except ValueError as error:
        raise Refused(f"{path}: {error}: fetch the file again") from error


def _check_ids(markers: Mapping[str, Any], vocab: Any) -> None:
    """Of a vocabulary with scores instead of ids a list is all there is."""
    numbered = [*markers.items(), *(vocab.items() if isinstance(vocab, dict) else ())]
    for token, number in numbered:
        if not 0 <= number < MOST_IDS:
            raise ValueError(f"the id {number} of {token!r} is not in [0, {MOST_IDS})")


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise Refused(f"{path}: cannot be read ({error.strerror}): name another file") from error
    except ValueError as error:
        raise Refused(f"{path}: is not JSON ({error}): fetch the file again") from error


def _separator(config: Path, markers: Iterable[str]) -> str | None:
    if config.is_file():
        named = _json(config).get("eos_token")
        named = named["content"] if isinstance(named, dict) else named
        if named in markers:
            return str(named)
    return next((marker for marker in _SEPARATORS if marker in markers), None)


def _as_bpe(name: str, content: Mapping[str, Any], separator: str | None) -> Bpe | None:
    """The same tokenizer as tiktoken knows them; None: it is of another kind.

    tiktoken merges two tokens wherever both together are one, the lowest id first. So does a list
    of merges which makes every longer token, in the order of the ids, and each from what the merges
    before it leave of its bytes.
    """
    model, added = content["model"], content["added_tokens"]
    pattern = _pattern(content)
    plain = (
        model.get("type", "BPE") == "BPE"
        and content.get("normalizer") is None
        and not any(model.get(key) for key in _CHANGES)
        and all(token["special"] for token in added)
    )
    if pattern is None or not plain:
        return None
    special_tokens = {token["content"]: token["id"] for token in added}
    byte_of = printable_bytes()
    words = {word: i for word, i in model["vocab"].items() if word not in special_tokens}
    if not all(byte_of.keys() >= set(word) for word in words):
        return None
    ranks = {bytes(byte_of[c] for c in word): i for word, i in words.items()}
    merges = [tuple(bytes(byte_of[c] for c in part) for part in _pair(m)) for m in model["merges"]]
    merged = [ranks.get(b"".join(pair), -1) for pair in merges]
    known = set(merges)
    longer = [token for token in ranks if len(token) > 1]
    if (
        merged != sorted(merged)
        or len(ranks) - len(longer) != 256
        or not all(before_last_merge(token, ranks) in known for token in longer)
    ):
        return None
    return Bpe(
        name, pattern=pattern, ranks=ranks, special_tokens=special_tokens, separator=separator
    )


_CHANGES = ("dropout", "byte_fallback", "continuing_subword_prefix", "end_of_word_suffix")
"""Options of a BPE model that tiktoken does not have."""


def _pair(merge: str | list[str]) -> list[str]:
    return merge.split(" ") if isinstance(merge, str) else merge


def _pattern(content: Mapping[str, Any]) -> str | None:
    """The pattern of a byte-level tokenizer, if it is a known one."""
    steps = content.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", [steps])
    if (content.get("decoder") or {}).get("type") != "ByteLevel" or not steps:
        return None
    *before, last = steps
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space", True):
        return None
    if not before:
        return PATTERNS["gpt2"] if last.get("use_regex", True) else None
    if len(before) > 1 or last.get("use_regex", True) or before[0].get("type") != "Split":
        return None
    split = before[0]
    pattern = split["pattern"].get("Regex")
    whole = split.get("behavior") == "Isolated" and not split.get("invert")
    return str(pattern) if whole and pattern in _SPELLINGS else None
