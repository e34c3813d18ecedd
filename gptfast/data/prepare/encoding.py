"""From documents to ids, on threads, in an order that depends on the text and the plan alone."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from gptfast.data.layout import SPLITS
from gptfast.data.prepare.corpus import Chunks, Survey, utf8_size
from gptfast.data.prepare.formats import Piece, Reading, Tally, read_pieces
from gptfast.data.prepare.plan import Part, Plan
from gptfast.data.prepare.sources import Source
from gptfast.errors import GptfastError
from gptfast.tokenizers.encoders import Encoder
from gptfast.tokenizers.tokenizer import Tokenizer

_BATCH = 1 << 18
"""Characters that a thread gets at a time, at least."""
_LONG = 1 << 18
"""Characters of a row, from which on it is cut as other texts are."""
_SAMPLE = 1 << 10
"""Characters of them that are compared with tiktoken where another encodes: at its speed, more
would take longer than to encode them all."""
_SAMPLE_OF_ONE = 64
"""Characters of each source, where a batch has many."""

A = TypeVar("A")
B = TypeVar("B")


@dataclass(frozen=True)
class Chunk:
    """A stretch of text that can be encoded by itself."""

    source: Source
    document: int
    """Its number among those with text, from 0."""
    split: str
    text: str
    begins: bool
    """Whether the document's text in this split begins with it."""
    ends: bool
    """Whether a separator may follow: the document ends, or another text comes next."""


@dataclass(frozen=True)
class Encoded:
    """The ids of chunks that follow each other in a split, and of the separators after them."""

    split: str
    ids: NDArray[np.uint32]
    documents: list[int]
    """Which of `ids` begin a document."""
    n_bytes: int
    """Of the text, in UTF-8."""
    n_chunks: int


def encode(
    surveys: Sequence[Survey],
    plan: Plan,
    *,
    tokenizer: Tokenizer,
    encoder: Encoder,
    reading: Reading,
    workers: int,
    skip: int = 0,
) -> Iterator[Encoded]:
    """The ids of all text that is taken: all training text in its order, then all other.

    Args:
        encoder: gives the ids of `tokenizer`.
        workers: threads.
        skip: how many chunks to pass over.

    Raises:
        GptfastError: the tokenizer failed, the encoder gives other ids, a file has changed since it
            was surveyed.
    """
    n_documents = sum(len(s.sizes) for s in surveys)
    separator = tokenizer.eot_id if plan.has_documents else None

    def encode_batch(batch: Sequence[Chunk]) -> Encoded:
        _check_sample(batch, encoder, n_documents=n_documents)
        return _encoded(batch, encoder, separator=separator, n_documents=n_documents)

    whole = tokenizer.needs_whole_documents
    chunks = _chunks(surveys, plan, splits=SPLITS, reading=reading, whole=whole)
    batches = _batches(itertools.islice(chunks, skip, None))
    # The encoders let other threads run meanwhile: this one reads, and the caller writes.
    yield from _map_in_order(encode_batch, batches, workers=workers)


def training_text(surveys: Sequence[Survey], plan: Plan, *, reading: Reading) -> Iterator[str]:
    """The text of the training split, in pieces.

    Raises:
        GptfastError: a file has changed since it was surveyed.
    """
    chunks = _chunks(surveys, plan, splits=("train",), reading=reading, whole=False)
    return (chunk.text for chunk in chunks)


def _encoded(
    batch: Sequence[Chunk], encoder: Encoder, *, separator: int | None, n_documents: int
) -> Encoded:
    parts: list[NDArray[np.uint32]] = []
    documents: list[int] = []
    n_tokens = n_bytes = 0
    for chunk in batch:
        if chunk.begins:
            documents.append(n_tokens)
        parts.append(_call(encoder.encode, chunk.text, place=(chunk, n_documents), by=encoder.name))
        n_tokens += len(parts[-1])
        if chunk.ends and separator is not None:
            parts.append(np.array([separator], dtype=np.uint32))
            n_tokens += 1
        n_bytes += utf8_size(chunk.text)
    ids = np.concatenate(parts) if len(parts) > 1 else parts[0]
    return Encoded(batch[0].split, ids, documents, n_bytes, len(batch))


def _check_sample(batch: Sequence[Chunk], encoder: Encoder, *, n_documents: int) -> None:
    """Have the beginning of each source in the batch encoded twice."""
    firsts = {chunk.source.label: chunk for chunk in reversed(batch)}
    n_chars = max(_SAMPLE // len(firsts), _SAMPLE_OF_ONE)
    for chunk in firsts.values():
        sample, place = chunk.text[:n_chars], (chunk, n_documents)
        at = _call(encoder.differs_at, sample, place=place, by=encoder.name)
        if at is not None:
            raise GptfastError(
                f"{_named(place)}: {encoder.name} gives other ids than tiktoken for "
                f"{sample[max(0, at - 20) : at + 20]!r}: use --encoder tiktoken"
            )


def _call(function: Callable[[str], A], text: str, *, place: tuple[Chunk, int], by: str) -> A:
    """Have an encoder's failure name the text that it failed at."""
    try:
        return function(text)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in Rust is no Exception
        raise GptfastError(
            f"{_named(place)}: the tokenizer {by} failed ({type(error).__name__}: {error})"
        ) from error


def _named(place: tuple[Chunk, int]) -> str:
    chunk, n_documents = place
    return f"{chunk.source.label}: document {chunk.document + 1} of {n_documents}"


def _chunks(
    surveys: Sequence[Survey],
    plan: Plan,
    *,
    splits: Sequence[str],
    reading: Reading,
    whole: bool,
) -> Iterator[Chunk]:
    """The text of `splits`, one after the other, in chunks of one document and one split each.

    Args:
        whole: whether a document is cut by the splits alone.
    """
    first_of = list(itertools.accumulate((len(s.sizes) for s in surveys), initial=0))
    reads = [(n, split) for split in splits for n, part in enumerate(plan.parts) if part.has(split)]
    for n, its_splits in itertools.groupby(reads, key=lambda read: read[0]):
        wanted = {split for _, split in its_splits}
        chunks = _chunks_of(
            surveys[n],
            plan.parts[n],
            first_of[n],
            reading=reading,
            cut_ends=plan.is_mix,
            whole=whole,
        )
        yield from (chunk for chunk in chunks if chunk.split in wanted)


def _chunks_of(
    surveyed: Survey, part: Part, first: int, *, reading: Reading, cut_ends: bool, whole: bool
) -> Iterator[Chunk]:
    """All text of a source that is taken; its first document has the number `first`."""
    source = surveyed.source
    new = partial(_Document, source, cut_ends=cut_ends, whole=whole)
    number = 0
    with source.open() as file:
        document = new(first, limits=part.limits(0))
        for piece in read_pieces(file, reading, Tally()):
            yield from document.feed(piece)
            if piece.ends:
                number += document.n_chars > 0
                document = new(first + number, limits=part.limits(number))
        if file.sha256() != surveyed.sha256:
            raise GptfastError(
                f"{source.label}: has changed while it was read: run the command again"
            )


class _Document:
    """A document on its way into chunks: those for training, then those for validation."""

    def __init__(
        self,
        source: Source,
        number: int,
        *,
        limits: tuple[int, int],
        cut_ends: bool,
        whole: bool,
    ) -> None:
        self.n_chars = 0
        self._source = source
        self._number = number
        self._n_train, self._n_taken = limits
        self._cut_ends = cut_ends
        self._whole = whole
        self._chunks = Chunks()
        self._split = "train"
        self._begins = True

    def feed(self, piece: Piece) -> Iterator[Chunk]:
        n_train = max(0, self._n_train - self.n_chars)
        n_taken = max(0, self._n_taken - self.n_chars)
        self.n_chars += len(piece.text)
        for split, part in (("train", piece.text[:n_train]), ("val", piece.text[n_train:n_taken])):
            if part and split != self._split:
                yield from self._rest(ends=self._cut_ends)
                self._split, self._begins = split, True
            # A row is encoded whole too: most are short.
            if self._whole or (piece.ends and len(part) <= _LONG):
                self._chunks.hold(part)
            else:
                for at in range(0, len(part), _LONG):
                    yield from map(self._chunk, self._chunks.feed(part[at : at + _LONG]))
        if piece.ends:
            yield from self._rest(ends=True)

    def _rest(self, *, ends: bool) -> Iterator[Chunk]:
        for text in self._chunks.rest():
            yield self._chunk(text, ends=ends)

    def _chunk(self, text: str, *, ends: bool = False) -> Chunk:
        begins, self._begins = self._begins, False
        return Chunk(self._source, self._number, self._split, text, begins, ends)


def _batches(chunks: Iterable[Chunk]) -> Iterator[list[Chunk]]:
    """Chunks of a split by the handful: a thread for each short row would cost more than it."""
    for _, its_chunks in itertools.groupby(chunks, key=lambda chunk: chunk.split):
        batch: list[Chunk] = []
        n_chars = 0
        for chunk in its_chunks:
            batch.append(chunk)
            n_chars += len(chunk.text)
            if n_chars >= _BATCH:
                yield batch
                batch, n_chars = [], 0
        if batch:
            yield batch


def _map_in_order(function: Callable[[A], B], items: Iterable[A], *, workers: int) -> Iterator[B]:
    """The result of each item, in order, with few items underway at a time."""
    pool = ThreadPoolExecutor(workers)
    underway: deque[Future[B]] = deque()
    try:
        for item in items:
            underway.append(pool.submit(function, item))
            if len(underway) > 2 * workers:
                yield underway.popleft().result()
        for future in underway:
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)
