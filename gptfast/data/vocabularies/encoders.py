"""Who encodes a corpus: the tokenizer itself, or gigatoken, several times faster with the same ids.

gigatoken keeps the ids of words that it has seen, and cuts a text into words by code of its own
instead of a regular expression, which is why a sample of what it encodes is compared.
"""

from __future__ import annotations

import base64
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from gptfast.data.vocabularies.text import Ids
from gptfast.errors import Refused

if TYPE_CHECKING:
    from gptfast.data.tokenizer import Tokenizer
    from gptfast.data.vocabularies.bpe import Bpe

Choice = Literal["auto", "tiktoken", "gigatoken"]

_SCHEMES = {"gpt2": "gpt2", "cl100k_base": "gpt4", "o200k_base": "o200k"}
"""What gigatoken calls the patterns of `bpe.PATTERNS`."""


class Encoder(Protocol):
    """Gives the ids of a tokenizer; threads may call it at once."""

    @property
    def name(self) -> str: ...

    def encode(self, text: str) -> Ids:
        """(tokens,) uint32."""

    def differs_at(self, text: str) -> int | None:
        """The first character at which it gives other ids than the tokenizer; None: nowhere."""


def encoder_for(tokenizer: Tokenizer, choice: Choice = "auto") -> Encoder:
    """Who encodes for `tokenizer`.

    Raises:
        Refused: gigatoken was chosen and is not installed, or does not know such a tokenizer.
    """
    if choice == "tiktoken":
        return Own(tokenizer)
    obstacle = _obstacle(tokenizer)
    if obstacle is None:
        from gptfast.data.vocabularies.bpe import Bpe

        assert isinstance(tokenizer, Bpe)
        return Gigatoken(tokenizer)
    if choice == "gigatoken":
        raise Refused(f"--encoder gigatoken: {obstacle}")
    return Own(tokenizer)


def _obstacle(tokenizer: Tokenizer) -> str | None:
    """Why gigatoken cannot do it, and what to do; None: it can."""
    from gptfast.data.vocabularies.bpe import PATTERNS, Bpe

    if not isinstance(tokenizer, Bpe):
        return f"it does not know the tokenizer {tokenizer.name}: leave --encoder out"
    if tokenizer.pattern not in {PATTERNS[name] for name in _SCHEMES}:
        return f"it does not know the pattern of {tokenizer.name}: leave --encoder out"
    if max(tokenizer.ranks.values()) >= len(tokenizer.ranks):
        return f"it takes no vocabulary with gaps, as {tokenizer.name} has: leave --encoder out"
    try:
        import gigatoken  # noqa: F401  # only whether it can be
    except ImportError:
        return "the package is not installed: pip install 'gptfast[gigatoken]'"
    return None


class Own:
    """The tokenizer itself; tiktoken lets other threads run meanwhile."""

    name = "tiktoken"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.encode = tokenizer.encode

    def differs_at(self, text: str) -> int | None:
        return None


class Gigatoken:
    """gigatoken with the vocabulary of a `Bpe`."""

    name = "gigatoken"

    def __init__(self, bpe: Bpe) -> None:
        from gigatoken.gigatoken_rs import BPETokenizer

        from gptfast.data.vocabularies.bpe import PATTERNS

        scheme = next(_SCHEMES[name] for name in _SCHEMES if PATTERNS[name] == bpe.pattern)
        self._bpe = bpe
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "ranks.tiktoken")
            path.write_bytes(
                b"".join(
                    b"%s %d\n" % (base64.b64encode(token), rank)
                    for token, rank in sorted(bpe.ranks.items(), key=lambda item: item[1])
                )
            )
            # Without special tokens: it would see them in the text.
            self._backend = BPETokenizer.from_tiktoken(path, scheme, {})

    def encode(self, text: str) -> Ids:
        try:
            content = text.encode()
        except UnicodeEncodeError:
            return self._bpe.encode(text)
        return self._backend.encode(content)

    def differs_at(self, text: str) -> int | None:
        expected, found = self._bpe.encode(text), self.encode(text)
        if np.array_equal(expected, found):
            return None
        n = min(len(expected), len(found))
        differing = np.flatnonzero(expected[:n] != found[:n])
        before = expected[: differing[0] if len(differing) else n]
        return len(self._bpe.decode_bytes(before.tolist()).decode("utf-8", "ignore"))
