"""Text to ids and back, by the name of a tokenizer, a file, or its definition in a data file.

Markers such as <|endoftext|> inside a text are ordinary text to every tokenizer here: only
`prepare` sets a separator, by its id.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gptfast.errors import Refused
from gptfast.profile import nearest
from gptfast.tokenizers.plain import Bytes, Characters
from gptfast.tokenizers.text import Ids

__all__ = [
    "TOKENIZERS",
    "Bytes",
    "Characters",
    "Tokenizer",
    "file_label",
    "from_definition",
    "is_made_from_corpus",
    "load_tokenizer",
    "made_from_corpus",
]

TOKENIZERS = ("gpt2", "cl100k_base", "o200k_base", "bytes", "chars")
"""By name; the first is the default."""


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

    @property
    def needs_whole_documents(self) -> bool:
        """Whether a text cut as `corpus` cuts it could get other ids."""

    def encode(self, text: str) -> Ids:
        """(tokens,) uint32. Markers of special tokens are ordinary text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text; bytes that end in the middle of a character become U+FFFD."""

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """UTF-8 bytes, of which a single token may hold part of a character."""

    def pieces(self, ids: Iterable[int]) -> Iterator[str]:
        """The text of `ids` as they come, in whole characters; joined, what `decode` gives."""

    def token_bytes(self) -> NDArray[np.int64]:
        """(vocab_size,) int64: UTF-8 bytes that each id stands for; 0 for special tokens."""

    def definition(self) -> dict[str, Any]:
        """All that `from_definition` needs to build it anew, as JSON values."""


def load_tokenizer(name: str) -> Tokenizer:
    """A tokenizer by its name or file.

    Args:
        name: of `TOKENIZERS`; FILE.tiktoken, also with ":" and the name of a pattern after it; a
            tokenizer.json of Hugging Face or the folder with it.

    Raises:
        Refused: it is not known, the file is no tokenizer, or it is made from a corpus.
        GptfastError: its vocabulary is not on this machine and cannot be fetched.
    """
    if name == "gpt2":
        from gptfast.tokenizers.named import gpt2

        return gpt2()
    if name in ("cl100k_base", "o200k_base"):
        from gptfast.tokenizers.named import fetched

        return fetched(name)
    if name == "bytes":
        return Bytes()
    if is_made_from_corpus(name):
        raise Refused(
            f"--tokenizer {name} is made from the text that is prepared: the data file and the "
            "checkpoints of its runs carry it"
        )
    return _from_file(name)


def _from_file(name: str) -> Tokenizer:
    from gptfast.tokenizers import rank_file, tokenizer_json

    path, pattern = _path_and_pattern(name)
    if not (path.exists() or path.suffix in (rank_file.SUFFIX, ".json")):
        raise Refused(
            f"--tokenizer {name} is not known: {nearest(name, TOKENIZERS)}, bpe:N, or a .tiktoken "
            "or tokenizer.json file"
        )
    if path.suffix == rank_file.SUFFIX:
        return rank_file.read_rank_file(path, pattern=pattern)
    return tokenizer_json.read_tokenizer_json(path)


def _path_and_pattern(name: str) -> tuple[Path, str | None]:
    path, colon, pattern = name.rpartition(":")
    if colon and path.endswith(".tiktoken"):
        return Path(path), pattern
    return Path(name), None


def is_made_from_corpus(name: str) -> bool:
    """Whether the tokenizer of this name depends on the text.

    Raises:
        Refused: bpe:N with an impossible N.
    """
    from gptfast.tokenizers.training import trained_size

    return name == "chars" or trained_size(name) is not None


def made_from_corpus(name: str, *, alphabet: Iterable[str], texts: Iterable[str]) -> Tokenizer:
    """The tokenizer of a corpus: "chars" or "bpe:N".

    Args:
        alphabet: the characters of the corpus; "chars" alone needs them.
        texts: what to learn from; "bpe:N" alone reads it.

    Raises:
        Refused: the text is too short for as many ids, or a package is missing.
    """
    from gptfast.tokenizers.training import train_bpe, trained_size

    n_ids = trained_size(name)
    if n_ids is None:
        return Characters("".join(sorted(set(alphabet))))
    return train_bpe(n_ids, texts)


def file_label(name: str) -> str:
    """A tokenizer's name as part of a file's: "bpe-8192"; of a file, as the tokenizer is called."""
    if name in TOKENIZERS or is_made_from_corpus(name):
        return name.replace(":", "-")
    path, _ = _path_and_pattern(name)
    return path.absolute().parent.name if path.name == "tokenizer.json" else path.stem


def from_definition(definition: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that `definition()` described.

    Raises:
        Refused: a kind that this version does not know; a package that it needs is missing.
    """
    kind = definition["kind"]
    if kind == "bpe":
        from gptfast.tokenizers.bpe import Bpe

        return Bpe.from_definition(definition)
    if kind == "bytes":
        return Bytes()
    if kind == "chars":
        return Characters(definition["alphabet"])
    if kind == "tokenizer.json":
        from gptfast.tokenizers.hugging_face import HuggingFace

        return HuggingFace.from_definition(definition)
    raise Refused(
        f"tokenizer of kind {kind} is not known, only bpe, bytes, chars, tokenizer.json: update "
        "gptfast"
    )
