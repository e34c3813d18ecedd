"""From text to a data file: what `gptfast prepare` does.

Each source is read twice: once to check and to count it, so that bad input is refused before any
work, and once to encode it. Memory does not grow with the text, only by 16 bytes for each of its
documents.

One plain text is one stream: the last characters, from int(n * (1 - val_fraction)) on, are the
validation split, and no separator is added. Several files and the rows of a file are documents:
whole ones from the end are the validation split, as near to its share as they allow, and a
separator follows each that is not empty. The bytes and chars tokenizers have no separator; there
documents join directly, and only the document starts in the data file tell them apart.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from gptfast import __version__
from gptfast.data.corpus import Chunks, Survey, survey
from gptfast.data.formats import STRICT, Piece, Reading, Tally, read_pieces
from gptfast.data.layout import SPLITS
from gptfast.data.sources import Source, find, short_name
from gptfast.data.store import Store
from gptfast.data.tokenizer import Tokenizer, load_tokenizer
from gptfast.data.writer import Spool, write_store
from gptfast.errors import GptfastError, Refused

Progress = Callable[[int, int, int], None]
"""Called with bytes of text done, bytes in all, and tokens so far."""

_BATCH = 1 << 17
"""Characters that a thread gets at a time, at least."""

A = TypeVar("A")
B = TypeVar("B")


@dataclass(frozen=True)
class SplitCount:
    """What went into a split."""

    n_tokens: int
    n_bytes: int
    n_documents: int


@dataclass(frozen=True)
class Prepared:
    """A finished data file."""

    path: Path
    source: str
    tokenizer: str
    vocab_size: int
    train: SplitCount
    val: SplitCount
    n_documents: int
    """Documents with text; one that the split cuts in two counts once."""
    n_empty: int
    """Documents without."""
    n_null: int
    """Rows whose text is null."""
    n_bad_rows: int
    """Rows left out because they have no text."""
    n_replaced: int
    """Bytes that were not UTF-8."""
    fingerprint: str
    """`Store.fingerprint`."""
    seconds: float


@dataclass(frozen=True)
class _Border:
    """Where training ends: in which document, before which of its characters."""

    document: int
    """Its number among those with text, from 0."""
    char: int

    def n_train(self, document: int) -> int:
        """How many characters of a document are for training, at most."""
        if document == self.document:
            return self.char
        return sys.maxsize if document < self.document else 0


@dataclass(frozen=True)
class _Chunk:
    """A stretch of text that can be encoded by itself."""

    source: Source
    document: int
    """Its number among those with text, from 0."""
    split: str
    text: str
    begins: bool
    """Whether the document's text in this split begins with it."""
    ends: bool
    """Whether the document ends with it."""


@dataclass(frozen=True)
class _Encoded:
    ids: NDArray[np.uint32]
    n_bytes: int
    """Of the text, in UTF-8."""


def default_out(sources: Sequence[str | Path], tokenizer: str) -> Path:
    """Where the data file goes if nobody says: `data/NAME-TOKENIZER.h5` in the current folder."""
    return Path("data", f"{short_name(str(sources[0]))}-{tokenizer}.h5")


def prepare(
    sources: Sequence[str | Path],
    *,
    out: Path | None = None,
    tokenizer: str | Tokenizer = "gpt2",
    val_fraction: float = 0.1,
    reading: Reading = STRICT,
    pattern: str | None = None,
    workers: int | None = None,
    force: bool = False,
    cache_dir: Path | None = None,
    progress: Progress = lambda done, total, tokens: None,
    note: Callable[[str], None] = lambda line: None,
) -> Prepared:
    """Encode texts into one data file.

    Args:
        sources: what `gptfast.data.sources.find` takes.
        out: None: `default_out`.
        tokenizer: a name, or one already built.
        val_fraction: in [0, 1); 0: no validation split.
        reading: where the text of a row is, and what to do with what cannot be read.
        pattern: which files of a folder are read; None: those that are known by their ending.
        workers: threads that encode; None: one for each core.
        force: replace an existing file.
        cache_dir: where downloads are kept; only a corpus known by name needs it.
        note: told in one line what the user should know.

    Raises:
        Refused: before any work: no text in it, not readable, the target exists, a bad option.
        GptfastError: the tokenizer failed, a file changed meanwhile, the disk is full.
    """
    begin = time.monotonic()
    name = tokenizer if isinstance(tokenizer, str) else tokenizer.name
    out = (out or default_out(sources, name)).absolute()
    scratch = _check_target(out, force=force)
    if not 0 <= val_fraction < 1:
        raise Refused(f"--val-fraction {val_fraction} is not in [0, 1): use 0.1, or 0 for no split")
    if isinstance(tokenizer, str) and tokenizer != "chars":
        tokenizer = load_tokenizer(tokenizer)

    with ExitStack() as stack:
        corpus = stack.enter_context(
            find(sources, pattern=pattern, cache_dir=cache_dir, scratch=scratch, note=note)
        )
        if out.resolve() in {source.identity for source in corpus.sources}:
            raise Refused(f"{out}: is one of the texts: choose another --out")
        alphabet: set[str] | None = set() if tokenizer == "chars" else None
        surveys = [survey(source, reading, alphabet=alphabet) for source in corpus.sources]
        _check_text(surveys, corpus.description)
        if isinstance(tokenizer, str):
            tokenizer = load_tokenizer(tokenizer, alphabet="".join(alphabet or ()))
        spools = {
            split: stack.enter_context(Spool(out, vocab_size=tokenizer.vocab_size))
            for split in SPLITS
        }
        _encode(
            surveys,
            spools,
            tokenizer=tokenizer,
            border=_border(surveys, val_fraction),
            reading=reading,
            workers=workers or os.cpu_count() or 1,
            progress=progress,
        )
        write_store(
            out,
            splits=spools,
            tokenizer=tokenizer,
            source=corpus.description,
            documents=[_described(s) for s in surveys],
            attributes={"gptfast_version": __version__, "val_fraction": val_fraction},
        )

    train, val = (
        SplitCount(spools[s].n_tokens, spools[s].n_bytes, len(spools[s].documents)) for s in SPLITS
    )
    with Store.open(out) as store:
        return Prepared(
            path=out,
            source=corpus.description,
            tokenizer=tokenizer.name,
            vocab_size=tokenizer.vocab_size,
            train=train,
            val=val,
            n_documents=sum(len(s.sizes) for s in surveys),
            n_empty=sum(s.n_empty for s in surveys),
            n_null=sum(s.tally.n_null for s in surveys),
            n_bad_rows=sum(s.tally.n_bad_rows for s in surveys),
            n_replaced=sum(s.tally.n_replaced for s in surveys),
            fingerprint=store.fingerprint,
            seconds=time.monotonic() - begin,
        )


def _check_target(out: Path, *, force: bool) -> Path:
    """The folder that stands already, on the way to the target or at its end."""
    if out.is_dir():
        raise Refused(f"{out}: is a folder: name a file in it, as in --out {out / 'corpus.h5'}")
    if out.exists() and not force:
        raise Refused(f"{out}: exists already: use --force to replace it, or another --out")
    standing = next(folder for folder in out.parents if folder.exists())
    if not standing.is_dir():
        raise Refused(f"{out}: {standing} is a file, not a folder: choose another --out")
    if not os.access(standing, os.W_OK):
        raise Refused(f"{out}: {standing} cannot be written to: choose another --out")
    return standing


def _check_text(surveys: Sequence[Survey], description: str) -> None:
    if not any(s.sizes for s in surveys):
        n_bad_rows = sum(s.tally.n_bad_rows for s in surveys)
        skipped = f" ({n_bad_rows} bad rows are left out)" if n_bad_rows else ""
        raise Refused(f"{description}: 0 tokens, no text in it{skipped}: name a longer text")


def _border(surveys: Sequence[Survey], val_fraction: float) -> _Border:
    n_documents = sum(len(s.sizes) for s in surveys)
    n_train = (1 - val_fraction) * sum(sum(s.sizes) for s in surveys)
    if n_documents == 1:
        return _Border(0, max(1, int(n_train)))
    if val_fraction == 0:
        return _Border(n_documents, 0)
    ends = itertools.accumulate(itertools.chain.from_iterable(s.sizes for s in surveys))
    inner = enumerate(itertools.islice(ends, n_documents - 1), 1)
    document, _ = min(inner, key=lambda border: abs(border[1] - n_train))
    return _Border(document, 0)


def _encode(
    surveys: Sequence[Survey],
    spools: Mapping[str, Spool],
    *,
    tokenizer: Tokenizer,
    border: _Border,
    reading: Reading,
    workers: int,
    progress: Progress,
) -> None:
    """Encode on threads (tiktoken lets go of the interpreter), spool in the order of the text."""
    n_documents = sum(len(s.sizes) for s in surveys)
    total = sum(s.n_bytes for s in surveys)
    done = tokens = 0
    # Between documents only: one stream has no end. A row is a document even if it is the only one.
    has_documents = n_documents > 1 or any(s.tally.n_rows for s in surveys)
    separator = tokenizer.eot_id if has_documents else None

    def encode(batch: Sequence[_Chunk]) -> list[_Encoded]:
        return [
            _encoded(chunk, tokenizer, separator=separator, n_documents=n_documents)
            for chunk in batch
        ]

    batches = _batches(_chunks(surveys, border=border, reading=reading))
    for batch, encoded in _map_in_order(encode, batches, workers=workers):
        for chunk, found in zip(batch, encoded, strict=True):
            spool = spools[chunk.split]
            if chunk.begins:
                spool.documents.append(spool.n_tokens)
            spool.append(found.ids, n_bytes=found.n_bytes)
            done += found.n_bytes
            tokens += len(found.ids)
        progress(done, total, tokens)
    progress(total, total, tokens)


def _encoded(
    chunk: _Chunk, tokenizer: Tokenizer, *, separator: int | None, n_documents: int
) -> _Encoded:
    try:
        ids = tokenizer.encode(chunk.text)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in Rust is no Exception
        raise GptfastError(
            f"{chunk.source.label}: document {chunk.document + 1} of {n_documents}: the tokenizer "
            f"{tokenizer.name} failed ({type(error).__name__}: {error})"
        ) from error
    if chunk.ends and separator is not None:
        ids = np.append(ids, np.uint32(separator))
    return _Encoded(ids, len(chunk.text.encode()))


def _chunks(surveys: Sequence[Survey], *, border: _Border, reading: Reading) -> Iterator[_Chunk]:
    """All text again, in chunks that belong to one document and one split each."""
    number = 0
    for surveyed in surveys:
        source = surveyed.source
        with source.open() as file:
            document = _Document(source, number, n_train=border.n_train(number))
            for piece in read_pieces(file, reading, Tally()):
                yield from document.feed(piece)
                if piece.ends:
                    number += document.n_chars > 0
                    document = _Document(source, number, n_train=border.n_train(number))
            if file.sha256() != surveyed.sha256:
                raise GptfastError(
                    f"{source.label}: has changed while it was read: run the command again"
                )


class _Document:
    """A document on its way into chunks: those for training, then those for validation."""

    def __init__(self, source: Source, number: int, *, n_train: int) -> None:
        self.n_chars = 0
        self._source = source
        self._number = number
        self._n_train = n_train
        self._chunks = Chunks()
        self._split = "train"
        self._begins = True

    def feed(self, piece: Piece) -> Iterator[_Chunk]:
        n_train = max(0, self._n_train - self.n_chars)
        self.n_chars += len(piece.text)
        for split, part in (("train", piece.text[:n_train]), ("val", piece.text[n_train:])):
            if part and split != self._split:
                yield from map(self._chunk, self._chunks.rest())
                self._split, self._begins = split, True
            if piece.ends:
                self._chunks.hold(part)  # a row is encoded whole: most are short
            else:
                yield from map(self._chunk, self._chunks.feed(part))
        if piece.ends:
            for text in self._chunks.rest():
                yield self._chunk(text, ends=True)

    def _chunk(self, text: str, *, ends: bool = False) -> _Chunk:
        begins, self._begins = self._begins, False
        return _Chunk(self._source, self._number, self._split, text, begins, ends)


def _batches(chunks: Iterable[_Chunk]) -> Iterator[list[_Chunk]]:
    """Chunks by the handful: a thread for each short row would cost more than to encode it."""
    batch: list[_Chunk] = []
    n_chars = 0
    for chunk in chunks:
        batch.append(chunk)
        n_chars += len(chunk.text)
        if n_chars >= _BATCH:
            yield batch
            batch, n_chars = [], 0
    if batch:
        yield batch


def _map_in_order(
    function: Callable[[A], B], items: Iterable[A], *, workers: int
) -> Iterator[tuple[A, B]]:
    """Each item and its result, in order, with few items underway at a time."""
    pool = ThreadPoolExecutor(workers)
    underway: deque[tuple[A, Future[B]]] = deque()
    try:
        for item in items:
            underway.append((item, pool.submit(function, item)))
            if len(underway) > 2 * workers:
                item, future = underway.popleft()
                yield item, future.result()
        for item, future in underway:
            yield item, future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _described(surveyed: Survey) -> dict[str, str | int]:
    return {
        "name": surveyed.source.label,
        "bytes": surveyed.n_file_bytes,
        "characters": sum(surveyed.sizes),
        "documents": len(surveyed.sizes),
        "replaced_bytes": surveyed.tally.n_replaced,
        "sha256": surveyed.sha256,
    }
