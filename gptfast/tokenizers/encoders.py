"""Who encodes a corpus: the tokenizer itself, or gigatoken, many times faster with the same ids.

gigatoken cuts a text into words by code of its own instead of a regular expression, and keeps the
ids of the words that it has seen. Hence what surrounds it here: samples of what it encodes are
compared with tiktoken, texts with the newest letters, which it alone knows, are left to tiktoken,
and it starts anew where it has kept too much.
"""

from __future__ import annotations

import base64
import queue
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import psutil

from gptfast.errors import Refused
from gptfast.tokenizers.text import Ids

if TYPE_CHECKING:
    from gptfast.tokenizers.bpe import Bpe
    from gptfast.tokenizers.tokenizer import Tokenizer

Choice = Literal["auto", "tiktoken", "gigatoken"]

_PAYS = 1 << 23
"""Bytes of text from which on gigatoken is taken unasked: making it ready takes half a second."""
_SCHEMES = {"gpt2": "gpt2", "cl100k_base": "gpt4", "o200k_base": "o200k"}
"""What gigatoken calls the patterns of `bpe.PATTERNS`."""
_ALL_REACHED = ("gpt2",)
"""Vocabularies whose every token merges make, so that a second need not be spent on looking."""
_BACKENDS = 4
"""Threads that encode at once: more would wait for those that read and write."""
_ROOM = 200 << 20
"""Bytes by which the process may grow until a backend that has encoded `_WORTH` is dropped."""
_WORTH = 1 << 23
_LONGEST = 1 << 24
"""Bytes of a text that it is given at once: how much it keeps can only be seen in between."""

_NEW_LETTERS = {
    b"\xe0": (b"\xe0\xa2\x8f", b"\xe0\xb1\x9c", b"\xe0\xb3\x9c"),
    b"\xe1": (b"\xe1\xab",),
    b"\xea": (b"\xea\x9f",),
    b"\xf0": tuple(b"\xf0%c" % byte for byte in b"\x90\x91\x96\x98\x9e\xab\xac\xb2\xb3"),
}
"""What begins the UTF-8 of each letter, mark and digit that Unicode 17 added, by its first byte,
which alone is looked for much faster: gigatoken 0.10 knows them, tiktoken 0.14 does not. All other
characters are the same to both."""


class Encoder(Protocol):
    """Gives the ids of a tokenizer; threads may call it at once."""

    @property
    def name(self) -> str: ...

    def encode(self, text: str) -> Ids:
        """(tokens,) uint32."""

    def differs_at(self, text: str) -> int | None:
        """The first character at which it gives other ids than the tokenizer; None: nowhere."""


def encoder_for(tokenizer: Tokenizer, choice: Choice = "auto", *, n_bytes: int) -> Encoder:
    """Who encodes a corpus of `n_bytes` for `tokenizer`.

    Raises:
        Refused: gigatoken was chosen and is not installed, or does not know such a tokenizer.
    """
    from gptfast.tokenizers.bpe import Bpe

    if choice == "gigatoken" or (choice == "auto" and n_bytes >= _PAYS):
        obstacle = _obstacle(tokenizer)
        if obstacle is None:
            assert isinstance(tokenizer, Bpe)
            return Gigatoken(tokenizer)
        if choice == "gigatoken":
            raise Refused(f"--encoder gigatoken: {obstacle}")
    return Own(tokenizer)


def _obstacle(tokenizer: Tokenizer) -> str | None:
    """Why gigatoken cannot do it, and what to do; None: it can."""
    from gptfast.tokenizers.bpe import PATTERNS, Bpe, unreachable

    if not isinstance(tokenizer, Bpe):
        return f"it does not know the tokenizer {tokenizer.name}: leave --encoder out"
    if tokenizer.pattern not in {PATTERNS[name] for name in _SCHEMES}:
        return f"it does not know the pattern of {tokenizer.name}: leave --encoder out"
    try:
        import gigatoken  # noqa: F401  # only whether it can be
    except ImportError:
        return "the package is not installed: pip install 'gptfast[gigatoken]'"
    if max(tokenizer.ranks.values()) >= len(tokenizer.ranks):
        return f"it takes no vocabulary with gaps, as {tokenizer.name} has: leave --encoder out"
    odd = None if tokenizer.name in _ALL_REACHED else unreachable(tokenizer.ranks)
    if odd is not None:
        return f"it takes no vocabulary with a token as {odd!r}, which no merge makes: leave it out"
    return None


class Own:
    """The tokenizer itself; tiktoken lets other threads run meanwhile."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        from gptfast.tokenizers.bpe import Bpe

        self.name = "tiktoken" if isinstance(tokenizer, Bpe) else tokenizer.name
        self.encode = tokenizer.encode

    def differs_at(self, text: str) -> int | None:
        return None


@dataclass
class _Backend:
    encode: Callable[[bytes], Ids]
    n_bytes: int = 0
    """Encoded so far."""


class Gigatoken:
    """gigatoken with the vocabulary of a `Bpe`."""

    name = "gigatoken"

    def __init__(self, bpe: Bpe) -> None:
        self._bpe = bpe
        self._process = psutil.Process()
        before = self._process.memory_info().rss
        self._ceiling, self._highest = before + _ROOM, before + 2 * _ROOM
        # One for each thread: in the same one a second would wait. The last used comes first, so
        # that few threads make few; None: one not made yet.
        self._backends: queue.LifoQueue[_Backend | None] = queue.LifoQueue()
        for _ in range(_BACKENDS):
            self._backends.put(None)

    def encode(self, text: str) -> Ids:
        try:
            content = text.encode()
        except UnicodeEncodeError:
            return self._bpe.encode(text)
        if len(content) > _LONGEST or _has_new_letters(content):
            return self._bpe.encode(text)
        with self._backend() as backend:
            backend.n_bytes += len(content)
            return backend.encode(content)

    @contextmanager
    def _backend(self) -> Iterator[_Backend]:
        backend = self._backends.get()
        try:
            if backend is None or self._has_kept_too_much(backend):
                backend = None  # gone before the next one is made
                self._make_room()
                backend = _Backend(_loaded(self._bpe))
            yield backend
        finally:
            self._backends.put(backend)

    def _make_room(self) -> None:
        """What did not go with a backend was not its: it does not count against the next one."""
        rest = self._process.memory_info().rss
        self._ceiling = max(self._ceiling, min(rest + _ROOM // 2, self._highest))

    def _has_kept_too_much(self, backend: _Backend) -> bool:
        return backend.n_bytes > _WORTH and self._process.memory_info().rss > self._ceiling

    def differs_at(self, text: str) -> int | None:
        expected, found = self._bpe.encode(text), self.encode(text)
        if np.array_equal(expected, found):
            return None
        n = min(len(expected), len(found))
        differing = np.flatnonzero(expected[:n] != found[:n])
        before = expected[: differing[0] if len(differing) else n]
        return len(self._bpe.decode_bytes(before.tolist()).decode("utf-8", "ignore"))


def _has_new_letters(content: bytes) -> bool:
    return not content.isascii() and any(
        first in content and any(beginning in content for beginning in beginnings)
        for first, beginnings in _NEW_LETTERS.items()
    )


def _loaded(bpe: Bpe) -> Callable[[bytes], Ids]:
    from gigatoken.gigatoken_rs import BPETokenizer, PadTruncate

    from gptfast.tokenizers.bpe import PATTERNS

    scheme = next(_SCHEMES[name] for name in _SCHEMES if PATTERNS[name] == bpe.pattern)
    ranked = sorted(bpe.ranks.items(), key=lambda item: item[1])
    lines = (b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in ranked)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "ranks.tiktoken")
        path.write_bytes(b"".join(lines))
        # Without special tokens: it would see them in the text.
        tokenizer = BPETokenizer.from_tiktoken(path, scheme, {})
    as_it_is = PadTruncate(pad_id=0)

    def encode(content: bytes) -> Ids:
        # A batch of one: of the calls that give an array it alone lets other threads run meanwhile.
        rows, _ = tokenizer.encode_batch_padded([content], as_it_is, parallel=False)
        ids: Ids = rows[0]
        return ids

    return encode
