"""What is in a data file: its facts, and stretches of it as text. Nothing here reads it whole."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gptfast.data.foreign import files_of
from gptfast.data.layout import OWN
from gptfast.data.store import Store
from gptfast.errors import Refused

if TYPE_CHECKING:
    from gptfast.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True)
class TokenizerFacts:
    name: str
    vocab_size: int
    separator: int | None
    """The id between documents; None: it has none."""


@dataclass(frozen=True)
class SplitFacts:
    """A split; None is what a foreign file does not say."""

    name: str
    n_tokens: int
    n_documents: int | None
    n_bytes: int | None
    dtype: str
    max_id: int | None
    sha256: str | None


@dataclass(frozen=True)
class Stretch:
    """Tokens that follow each other."""

    split: str
    document: int | None
    """Its number in the split, from 0; None: the split is one stream, or does not say."""
    start: int
    """First token in the split."""
    n_tokens: int
    cut: bool
    """Whether the document goes on."""
    text: str | None
    """None: no tokenizer is known."""
    ids: list[int]

    def __str__(self) -> str:
        """The text, or the ids where no tokenizer is known."""
        return " ".join(map(str, self.ids)) if self.text is None else self.text


@dataclass(frozen=True)
class Description:
    """What a data file says about itself."""

    path: Path
    format: str
    n_files: int
    n_file_bytes: int
    vocab_size: int | None
    tokenizer: TokenizerFacts | None
    splits: list[SplitFacts]
    attributes: dict[str, str | int | float]
    """What else is written on the file: the version that made it, the options."""
    source: str | None
    sources: list[dict[str, Any]]
    """For each text its name, counts and SHA-256."""
    fingerprint: str
    """As runs name their data."""
    head: Stretch


def describe(store: Store, *, head_tokens: int, tokenizer: Tokenizer | None) -> Description:
    """The facts of a data file and how it begins.

    Args:
        tokenizer: as `text_tokenizer` gave it.
    """
    layout = store.layout
    own = layout.kind == OWN
    files = list(files_of(layout))
    first = store.splits[0]
    documents = {name: store.documents(name) for name in store.splits}
    return Description(
        path=store.path,
        format=layout.kind,
        n_files=len(files),
        n_file_bytes=sum(path.stat().st_size for path in files),
        vocab_size=layout.vocab_size,
        tokenizer=None
        if tokenizer is None
        else TokenizerFacts(tokenizer.name, tokenizer.vocab_size, tokenizer.eot_id),
        splits=[
            SplitFacts(
                name=name,
                n_tokens=split.n_tokens,
                n_documents=len(documents[name]) if own else None,
                n_bytes=split.n_bytes,
                dtype=split.dtype.name,
                max_id=split.max_id,
                sha256=split.sha256,
            )
            for name, split in layout.splits.items()
        ],
        attributes=store.attributes(),
        source=layout.source,
        sources=store.sources(),
        fingerprint=store.fingerprint,
        head=_stretch(
            store, first, 0, 0, documents=documents[first], n=head_tokens, tokenizer=tokenizer
        ),
    )


def sample(
    store: Store, split: str, *, n: int, seed: int, n_tokens: int, tokenizer: Tokenizer | None
) -> list[Stretch]:
    """The beginnings of `n` random documents, in their order; of one stream, random stretches.

    Args:
        seed: the same gives the same.
        n_tokens: of each, at most.
        tokenizer: as `text_tokenizer` gave it.

    Raises:
        Refused: there is no such split.
    """
    documents = store.documents(split)
    draw = random.Random(seed)
    if len(documents) > 1:
        numbers = sorted(draw.sample(range(len(documents)), min(n, len(documents))))
        places = [(number, int(documents[number])) for number in numbers]
    else:
        last = max(store.n_tokens(split) - n_tokens, 0)
        places = [(0, start) for start in sorted(draw.randint(0, last) for _ in range(n))]
    return [
        _stretch(store, split, number, start, documents=documents, n=n_tokens, tokenizer=tokenizer)
        for number, start in places
    ]


def text_tokenizer(store: Store, asked: str | None) -> Tokenizer | None:
    """The file's own tokenizer; of bare ids the one `asked` for; None: none is known.

    Raises:
        Refused: `asked` is another than the file's own.
    """
    from gptfast.tokenizers.tokenizer import load_tokenizer

    own = store.tokenizer_name
    if own is None:
        return None if asked is None else load_tokenizer(asked)
    if asked not in (None, own):
        raise Refused(
            f"--tokenizer {asked}: {store.path} was made with {own}, whose ids mean other text: "
            "leave --tokenizer out"
        )
    return store.tokenizer()


def decode(ids: NDArray[np.integer[Any]], tokenizer: Tokenizer, *, where: Path) -> str:
    """Their text.

    Raises:
        Refused: an id is none of the tokenizer's.
    """
    if len(ids) and int(ids.max()) >= tokenizer.vocab_size:
        raise Refused(
            f"{where}: holds the id {ids.max()}, and the tokenizer {tokenizer.name} has "
            f"{tokenizer.vocab_size} ids: name the one that made the file"
        )
    return tokenizer.decode(ids.tolist())


def _stretch(
    store: Store,
    split: str,
    document: int,
    start: int,
    *,
    documents: NDArray[np.int64],
    n: int,
    tokenizer: Tokenizer | None,
) -> Stretch:
    """From `start` to the end of its document, `n` tokens at most; the separator is not shown."""
    tokens = store.tokens(split)
    end = int(documents[document + 1]) if document + 1 < len(documents) else store.n_tokens(split)
    if (
        tokenizer is not None
        and end - 1 > start
        and int(tokens[end - 1 : end][0]) == tokenizer.eot_id
    ):
        end -= 1
    ids = tokens[start : min(start + n, end)]
    return Stretch(
        split=split,
        document=document if len(documents) > 1 else None,
        start=start,
        n_tokens=len(ids),
        cut=start + n < end,
        text=None if tokenizer is None else decode(ids, tokenizer, where=store.path),
        ids=ids.tolist(),
    )
