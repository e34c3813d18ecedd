"""A byte-level BPE of any size, learnt from a text by the trainer of the package `tokenizers`.

The trainer keeps every word that it has seen, and so is given pieces of the text, evenly spread
over it and always the same, as many as there is memory for: all of it up to 50 MB, and of more as
much as has 3 MB of different words. That is 50 MB of most code and prose, and 3 MB of a text in
which no word comes twice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator

from gptfast.errors import Refused
from gptfast.tokenizers.bpe import END_OF_TEXT, PATTERNS, Bpe, printable_bytes

PREFIX = "bpe:"
LEAST = 257
"""Ids of the smallest one: 256 bytes and the separator."""
SAMPLE = 50_000_000
"""Bytes of text that the trainer is given at most."""
DIFFERENT = 3_000_000
"""Bytes of different words among them at most: some 110 bytes of memory each."""

_PIECE = 1 << 16
_WORD = 128
"""Characters of a word that the trainer looks at as one: merging takes time with its square."""
_SEEN_TWICE = 2
_WORDS = re.compile(r"\w+|\W+")


def trained_size(name: str) -> int | None:
    """N of "bpe:N"; None: another tokenizer.

    Raises:
        Refused: N is not a number of ids that there can be.
    """
    if not name.startswith(PREFIX):
        return None
    number = name.removeprefix(PREFIX)
    if not (number.isascii() and number.isdigit() and int(number) >= LEAST):
        raise Refused(
            f"--tokenizer {name}: is not {PREFIX}N with a number of ids from {LEAST} on (256 bytes "
            f"and the separator): use for example {PREFIX}8192"
        )
    return int(number)


def train_bpe(n_ids: int, texts: Iterable[str]) -> Bpe:
    """A BPE of `n_ids` ids, the last of which is the separator.

    Args:
        n_ids: from `LEAST` on.
        texts: what to learn from.

    Raises:
        Refused: the text does not have as many pairs to merge; the package is not installed.
    """
    try:
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    except ImportError:
        raise Refused(
            f"--tokenizer {PREFIX}{n_ids} needs the package tokenizers, which is not installed: "
            "pip install 'gptfast[tokenizers]'"
        ) from None
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            pre_tokenizers.FixedLength(_WORD),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=n_ids - 1,
        min_frequency=_SEEN_TWICE,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((piece.decode() for piece in sample(texts)), trainer)
    words = json.loads(tokenizer.to_str())["model"]["vocab"]
    if len(words) + 1 < n_ids:
        raise Refused(
            f"--tokenizer {PREFIX}{n_ids}: the text has only enough for {len(words) + 1} ids (no "
            f"other pair comes twice): use {PREFIX}{len(words) + 1} or less, or a longer text"
        )
    byte_of = printable_bytes()
    return Bpe(
        f"{PREFIX}{n_ids}",
        pattern=PATTERNS["gpt2"],
        ranks={bytes(byte_of[c] for c in word): i for word, i in words.items()},
        special_tokens={END_OF_TEXT: n_ids - 1},
    )


def sample(texts: Iterable[str]) -> list[bytes]:
    """Pieces of `texts` in UTF-8, each as far from the next: all, every other, every fourth, ..."""
    taken = _Pieces()
    distance = 1
    for number, text in enumerate(_pieces(texts)):
        if number % distance == 0:
            taken.add(text.encode("utf-8", "replace"))
        while taken.are_too_much:
            taken = taken.every_other()
            distance *= 2
    return taken.all


class _Pieces:
    def __init__(self) -> None:
        self.all: list[bytes] = []
        self._n_bytes = self._n_different = 0
        self._words: set[str] = set()

    def add(self, piece: bytes) -> None:
        self.all.append(piece)
        self._n_bytes += len(piece)
        new = set(_WORDS.findall(piece.decode())) - self._words
        self._words |= new
        self._n_different += sum(len(word.encode()) for word in new)

    @property
    def are_too_much(self) -> bool:
        too_much = self._n_bytes > SAMPLE or self._n_different > DIFFERENT
        return too_much and len(self.all) > 1

    def every_other(self) -> _Pieces:
        half = _Pieces()
        for piece in self.all[::2]:
            half.add(piece)
        return half


def _pieces(texts: Iterable[str]) -> Iterator[str]:
    """The same text in pieces of about one size."""
    held: list[str] = []
    n_chars = 0
    for text in texts:
        for at in range(0, len(text), _PIECE):
            held.append(text[at : at + _PIECE])
            n_chars += len(held[-1])
            if n_chars >= _PIECE:
                yield "\n".join(held)
                held, n_chars = [], 0
    if held:
        yield "\n".join(held)
