"""Any tokenizer of Hugging Face, by their package `tokenizers`."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gptfast.errors import Refused
from gptfast.tokenizers.bpe import without_surrogates
from gptfast.tokenizers.text import Ids

if TYPE_CHECKING:
    import tokenizers

_BYTE = re.compile("<0x[0-9A-F]{2}>")
_LARGE = 1 << 18
"""Characters of a text that threads encode one after the other: each takes some 200 bytes."""


class HuggingFace:
    """What a `tokenizer.json` describes, as `tokenizers` runs it.

    No rule says where a text may be cut without changing its ids (many put a mark before the first
    word), so that each document is encoded whole.
    """

    needs_whole_documents = True

    def __init__(self, name: str, *, content: Mapping[str, Any], separator: str | None) -> None:
        """
        Args:
            content: of the `tokenizer.json`.
            separator: the marker that stands between documents; None: there is none.

        Raises:
            ValueError: `content` does not describe a tokenizer.
            Refused: the package `tokenizers` is not installed.
        """
        self.name = name
        self.separator = separator
        self._content = content
        self._tokenizer = _built(content, separator)
        self._large = threading.Lock()
        ids = self._tokenizer.get_vocab()
        self.vocab_size = max(ids.values()) + 1
        self.eot_id = None if separator is None else ids[separator]

    def encode(self, text: str) -> Ids:
        try:
            ids = self._encode(text)
        except UnicodeEncodeError:
            ids = self._encode(without_surrogates(text))
        return np.array(ids, dtype=np.uint32)

    def _encode(self, text: str) -> list[int]:
        if len(text) < _LARGE:
            return self._encode_at_once(text)
        with self._large:
            return self._encode_at_once(text)

    def _encode_at_once(self, text: str) -> list[int]:
        ids = self._ids(text)
        if self.separator is None or self.eot_id not in ids:
            return ids
        # The marker is a word of this vocabulary too, and one in the text must not end a document:
        # each is cut behind its first character. What a normalizer has made one is left out.
        first, rest = re.escape(self.separator[:1]), re.escape(self.separator[1:])
        parts = re.split(f"(?<={first})(?={rest})", text)
        return [i for part in parts for i in self._ids(part) if i != self.eot_id]

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return self.decode(ids).encode()

    def pieces(self, ids: Iterable[int]) -> Iterator[str]:
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=False)
        seen: list[int] = []
        n_chars = 0
        for i in ids:
            seen.append(i)
            piece = stream.step(self._tokenizer, i)
            if piece:
                n_chars += len(piece)
                yield piece
        rest = self.decode(seen)[n_chars:]
        if rest:
            yield rest

    def token_bytes(self) -> NDArray[np.int64]:
        """(vocab_size,) int64: of a token in the middle of a text, where the decoder gives all."""
        lengths = np.zeros(self.vocab_size, dtype=np.int64)
        added = {token["content"]: token["special"] for token in self._content["added_tokens"]}
        steps = _decoder_steps(self._content)
        ahead = self._encode("a")
        n_ahead = len(self.decode_bytes(ahead))
        for token, i in self._tokenizer.get_vocab().items():
            # Part of a character would be decoded to U+FFFD, whatever its length.
            if added.get(token) or i == self.eot_id:
                continue
            if "ByteLevel" in steps and token not in added:
                lengths[i] = len(token)
            elif "ByteFallback" in steps and _BYTE.fullmatch(token):
                lengths[i] = 1
            else:
                lengths[i] = len(self.decode_bytes([*ahead, i])) - n_ahead
        return lengths

    def definition(self) -> dict[str, Any]:
        return {
            "kind": "tokenizer.json",
            "name": self.name,
            "separator": self.separator,
            "content": self._content,
        }

    @classmethod
    def from_definition(cls, definition: Mapping[str, Any]) -> HuggingFace:
        return cls(
            definition["name"], content=definition["content"], separator=definition["separator"]
        )


def _built(content: Mapping[str, Any], separator: str | None) -> tokenizers.Tokenizer:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise Refused(
            "this tokenizer.json needs the package tokenizers, which is not installed: "
            "pip install 'gptfast[tokenizers]'"
        ) from None
    added = [
        {**token, "special": token["special"] or token["content"] == separator}
        for token in content["added_tokens"]
    ]
    # A text is to become its own ids: not cut, not filled up, nothing put before or after it.
    bare = {"truncation": None, "padding": None, "post_processor": None, "added_tokens": added}
    try:
        tokenizer = Tokenizer.from_str(json.dumps({**content, **bare}))
    except Exception as error:  # `tokenizers` raises no narrower kind
        raise ValueError(f"does not describe a tokenizer ({error})") from error
    tokenizer.encode_special_tokens = True  # as ordinary text
    return tokenizer


def _decoder_steps(content: Mapping[str, Any]) -> set[str]:
    decoder = content.get("decoder") or {}
    return {step["type"] for step in decoder.get("decoders", [decoder]) if step}
