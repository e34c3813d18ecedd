"""Byte-pair encoding by tiktoken, and the patterns that cut a text into words for it."""

from __future__ import annotations

import base64
import itertools
from binascii import a2b_base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import tiktoken
from numpy.typing import NDArray

from gptfast.tokenizers.text import Ids, whole_characters

END_OF_TEXT = "<|endoftext|>"

PATTERNS = {
    "gpt2": (
        r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
    ),
    "cl100k_base": (
        r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"""
        r"""| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"""
    ),
    "o200k_base": (
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"""
        r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)?"""
        r"""|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"""
        r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)?"""
        r"""|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
    ),
}
"""By the encoding that it belongs to, in tiktoken's spelling.

Source: tiktoken_ext/openai_public.py of tiktoken 0.14.0
"""


class Bpe:
    """Byte-pair encoding: the words of a text, each merged from bytes in the order of the ranks."""

    needs_whole_documents = False

    def __init__(
        self,
        name: str,
        *,
        pattern: str,
        ranks: Mapping[bytes, int],
        special_tokens: Mapping[str, int],
        separator: str | None = END_OF_TEXT,
    ) -> None:
        """
        Args:
            pattern: cuts a text into words; tiktoken's kind of regular expression.
            ranks: the id of each token, all 256 single bytes among them; gaps are allowed.
            special_tokens: the id of each marker, none of which comes out of a text.
            separator: the marker that stands between documents; None: there is none.
        """
        self.name = name
        self.pattern = pattern
        self.ranks = dict(ranks)
        self.special_tokens = dict(special_tokens)
        self.separator = separator
        self.eot_id = None if separator is None else self.special_tokens[separator]
        self._encoding = tiktoken.Encoding(
            name,
            pat_str=pattern,
            mergeable_ranks=self.ranks,
            special_tokens=self.special_tokens,
        )
        self.vocab_size = self._encoding.n_vocab

    def encode(self, text: str) -> Ids:
        try:
            return self._encode(text)
        except UnicodeEncodeError:
            return self._encode(without_surrogates(text))

    def _encode(self, text: str) -> Ids:
        return self._encoding.encode_to_numpy(text, disallowed_special=())

    def decode(self, ids: Sequence[int]) -> str:
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Ids in a gap or above the vocabulary mean nothing; an untrained model may choose one."""
        return self._encoding.decode_bytes([int(i) for i in ids if i in self._ids_in_use])

    @cached_property
    def _ids_in_use(self) -> frozenset[int]:
        return frozenset(self.ranks.values()) | frozenset(self.special_tokens.values())

    def pieces(self, ids: Iterable[int]) -> Iterator[str]:
        return whole_characters(self.decode_bytes([i]) for i in ids)

    def token_bytes(self) -> NDArray[np.int64]:
        lengths = np.zeros(self.vocab_size, dtype=np.int64)
        for token, rank in self.ranks.items():
            lengths[rank] = len(token)
        return lengths

    def definition(self) -> dict[str, Any]:
        tokens = [""] * (max(self.ranks.values()) + 1)
        for token, rank in self.ranks.items():
            tokens[rank] = base64.b64encode(token).decode()
        definition: dict[str, Any] = {
            "kind": "bpe",
            "name": self.name,
            "pattern": self.pattern,
            "special_tokens": self.special_tokens,
            "ranks": " ".join(tokens),  # in the order of the ids, and nothing where there is a gap
        }
        if self.separator != END_OF_TEXT:
            definition["separator"] = self.separator
        return definition

    @classmethod
    def from_definition(cls, definition: Mapping[str, Any]) -> Bpe:
        tokens = definition["ranks"].split(" ")
        return cls(
            definition["name"],
            pattern=definition["pattern"],
            ranks={a2b_base64(token): rank for rank, token in enumerate(tokens) if token},
            special_tokens=definition["special_tokens"],
            separator=definition.get("separator", END_OF_TEXT),
        )


def unreachable(ranks: Mapping[bytes, int]) -> bytes | None:
    """A token that merging never makes in one last step from two others; None: there is none."""
    for token in ranks:
        if len(token) > 2 and len(before_last_merge(token, ranks)) != 2:
            return token
    return None


def before_last_merge(token: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, ...]:
    """What the merges of lower ranks make of the bytes of a token: two, if it can be reached."""
    parts = [token[n : n + 1] for n in range(len(token))]
    own = ranks[token]
    while len(parts) > 1:
        pairs = [ranks.get(a + b, own) for a, b in itertools.pairwise(parts)]
        lowest = min(pairs)
        if lowest >= own:
            break
        at = pairs.index(lowest)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return tuple(parts)


def without_surrogates(text: str) -> str:
    """Lone surrogates, from arguments that were not UTF-8, become U+FFFD: as in tiktoken."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def printable_bytes() -> dict[str, int]:
    """The byte that each character stands for in GPT-2's encoder.json and in a tokenizer.json.

    Source: `bytes_to_unicode` of https://github.com/openai/gpt-2/blob/master/src/encoder.py
    """
    printable = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}
