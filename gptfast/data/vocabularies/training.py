"""A byte-level BPE of any size, learnt from a text by the trainer of the package `tokenizers`.

The trainer keeps every word that it has seen, so that its memory grows with the text: it is given
`SAMPLE` characters at most, taken evenly from all of the text and always the same ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from gptfast.data.vocabularies.bpe import END_OF_TEXT, PATTERNS, Bpe, printable_bytes
from gptfast.errors import Refused

PREFIX = "bpe:"
LEAST = 257
"""Ids of the smallest one: 256 bytes and the separator."""
SAMPLE = 100_000_000
"""Characters that the trainer is given at most."""

_PIECE = 1 << 16
_WORD = 128
"""Characters of a word that the trainer looks at as one: merging takes time with its square."""
_SEEN_TWICE = 2


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


def train_bpe(n_ids: int, texts: Iterable[str], *, n_chars: int) -> Bpe:
    """A BPE of `n_ids` ids, the last of which is the separator.

    Args:
        n_ids: from `LEAST` on.
        texts: what to learn from; `n_chars` characters in all.

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
    tokenizer.train_from_iterator(sample(texts, share=SAMPLE / max(n_chars, 1)), trainer)
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


def sample(texts: Iterable[str], *, share: float) -> Iterator[str]:
    """About `share` of the characters of `texts`, spread evenly; all of them from 1 on."""
    seen = taken = 0
    for text in texts:
        for at in range(0, len(text), _PIECE):
            piece = text[at : at + _PIECE]
            seen += len(piece)
            if taken + len(piece) <= share * seen:
                taken += len(piece)
                yield piece
