"""From text to a data file: what `gptfast prepare` does.

Each document is read twice: once to check and to count it, so that bad input is refused before any
work, and once to encode it. Memory stays the same however long the text is.

One plain text is one stream: the last characters, from int(n * (1 - val_fraction)) on, are the
validation split, and no separator is added. Several files are documents: whole ones from the end
are the validation split, as near to its share as they allow, and a separator follows each that is
not empty. The bytes and chars tokenizers have no separator; there documents join directly, and
only the document starts in the data file tell them apart.
"""

from __future__ import annotations

import hashlib
import os
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
from gptfast.data.corpus import Chunks, OnInvalid, Survey, read_pieces, survey
from gptfast.data.layout import SPLITS
from gptfast.data.sources import Document, find, short_name
from gptfast.data.store import Store
from gptfast.data.tokenizer import Tokenizer, load_tokenizer
from gptfast.data.writer import Spool, write_store
from gptfast.errors import GptfastError, Refused

Progress = Callable[[int, int, int], None]
"""Called with bytes of text done, bytes in all, and tokens so far."""

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
    n_replaced: int
    """Bytes that were not UTF-8."""
    fingerprint: str
    """`Store.fingerprint`."""
    seconds: float


@dataclass(frozen=True)
class _Surveyed:
    document: Document
    found: Survey


@dataclass(frozen=True)
class _Chunk:
    """A stretch of text that can be encoded by itself."""

    number: int
    """Of its document, from 0."""
    split: str
    text: str
    first: bool
    """Of its document in its split."""
    last: bool
    raw_done: int
    """Bytes read so far, over all documents."""


def default_out(sources: Sequence[str | Path], tokenizer: str) -> Path:
    """Where the data file goes if nobody says: `data/NAME-TOKENIZER.h5` in the current folder."""
    return Path("data", f"{short_name(str(sources[0]))}-{tokenizer}.h5")


def prepare(
    sources: Sequence[str | Path],
    *,
    out: Path | None = None,
    tokenizer: str | Tokenizer = "gpt2",
    val_fraction: float = 0.1,
    errors: OnInvalid = "strict",
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
        errors: what to do with bytes that are not UTF-8.
        workers: threads that encode; None: one for each core.
        force: replace an existing file.
        cache_dir: where downloads are kept; only a corpus known by name needs it.
        note: told in one line what the user should know.

    Raises:
        Refused: before any work: no text in it, not UTF-8, the target exists, a bad option.
        GptfastError: the tokenizer failed, a file changed meanwhile, the disk is full.
    """
    begin = time.monotonic()
    name = tokenizer if isinstance(tokenizer, str) else tokenizer.name
    out = (out or default_out(sources, name)).absolute()
    _check_target(out, force=force)
    if not 0 <= val_fraction < 1:
        raise Refused(f"--val-fraction {val_fraction} is not in [0, 1): use 0.1, or 0 for no split")
    if isinstance(tokenizer, str) and tokenizer != "chars":
        tokenizer = load_tokenizer(tokenizer)
    corpus = find(sources, cache_dir=cache_dir, note=note)
    if out.resolve() in {document.path.resolve() for document in corpus.documents}:
        raise Refused(f"{out}: is one of the texts: choose another --out")

    alphabet: set[str] | None = set() if tokenizer == "chars" else None
    surveyed = [
        _Surveyed(document, survey(document, errors=errors, alphabet=alphabet))
        for document in corpus.documents
    ]
    documents = [s for s in surveyed if s.found.n_chars]
    if not documents:
        raise Refused(f"{corpus.description}: 0 tokens, there is no text in it: name a longer text")
    if isinstance(tokenizer, str):
        tokenizer = load_tokenizer(tokenizer, alphabet="".join(alphabet or ()))

    with ExitStack() as stack:
        spools = {
            split: stack.enter_context(Spool(out, vocab_size=tokenizer.vocab_size))
            for split in SPLITS
        }
        _encode(
            documents,
            spools,
            tokenizer=tokenizer,
            train_chars=_train_chars([s.found.n_chars for s in documents], val_fraction),
            errors=errors,
            workers=workers or os.cpu_count() or 1,
            progress=progress,
        )
        write_store(
            out,
            splits=spools,
            tokenizer=tokenizer,
            source=corpus.description,
            documents=[_described(s) for s in surveyed],
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
            n_documents=len(documents),
            n_empty=len(surveyed) - len(documents),
            n_replaced=sum(s.found.n_replaced for s in surveyed),
            fingerprint=store.fingerprint,
            seconds=time.monotonic() - begin,
        )


def _check_target(out: Path, *, force: bool) -> None:
    if out.is_dir():
        raise Refused(f"{out}: is a folder: name a file in it, as in --out {out / 'corpus.h5'}")
    if out.exists() and not force:
        raise Refused(f"{out}: exists already: use --force to replace it, or another --out")
    standing = next(folder for folder in out.parents if folder.exists())
    if not standing.is_dir():
        raise Refused(f"{out}: {standing} is a file, not a folder: choose another --out")
    if not os.access(standing, os.W_OK):
        raise Refused(f"{out}: {standing} cannot be written to: choose another --out")


def _train_chars(n_chars: Sequence[int], val_fraction: float) -> list[int]:
    """How many characters of each document are for training; the others are for validation."""
    if len(n_chars) == 1:
        return [max(1, int(n_chars[0] * (1 - val_fraction)))]
    if val_fraction == 0:
        return list(n_chars)
    borders = np.cumsum(n_chars)[:-1]
    n_train = 1 + int(np.argmin(np.abs(borders - (1 - val_fraction) * sum(n_chars))))
    return [*n_chars[:n_train], *[0] * (len(n_chars) - n_train)]


def _encode(
    documents: Sequence[_Surveyed],
    spools: Mapping[str, Spool],
    *,
    tokenizer: Tokenizer,
    train_chars: Sequence[int],
    errors: OnInvalid,
    workers: int,
    progress: Progress,
) -> None:
    """Encode on threads (tiktoken lets go of the interpreter), spool in the order of the text."""
    total = sum(s.found.n_raw for s in documents)
    tokens = 0
    # Between documents only: one stream has no end.
    separator = tokenizer.eot_id if len(documents) > 1 else None

    def encode(chunk: _Chunk) -> tuple[NDArray[np.uint32], int]:
        try:
            ids = tokenizer.encode(chunk.text)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in Rust is no Exception
            raise GptfastError(
                f"{documents[chunk.number].document.label}: document {chunk.number + 1} of "
                f"{len(documents)}: the tokenizer {tokenizer.name} failed "
                f"({type(error).__name__}: {error})"
            ) from error
        return ids, len(chunk.text.encode())

    chunks = _chunks(documents, train_chars=train_chars, errors=errors)
    for chunk, (ids, n_bytes) in _map_in_order(encode, chunks, workers=workers):
        spool = spools[chunk.split]
        if chunk.first:
            spool.documents.append(spool.n_tokens)
        spool.append(ids, n_bytes=n_bytes)
        tokens += len(ids)
        if chunk.last and separator is not None:
            spool.append(np.array([separator], dtype=np.uint32), n_bytes=0)
            tokens += 1
        progress(chunk.raw_done, total, tokens)
    progress(total, total, tokens)


def _chunks(
    documents: Sequence[_Surveyed], *, train_chars: Sequence[int], errors: OnInvalid
) -> Iterator[_Chunk]:
    """All text again, in chunks that belong to one document and one split each."""
    raw_done = 0
    for number, (surveyed, n_train) in enumerate(zip(documents, train_chars, strict=True)):
        digest = hashlib.sha256()
        part = _Part(number, "train")
        n_chars = 0
        for piece in read_pieces(surveyed.document, errors=errors):
            digest.update(piece.raw)
            raw_done += len(piece.raw)
            train = max(0, n_train - n_chars)
            n_chars += len(piece.text)
            yield from part.feed(piece.text[:train], raw_done)
            if n_chars > n_train and part.split == "train":
                yield from part.end(raw_done)
                part = _Part(number, "val")
            yield from part.feed(piece.text[train:], raw_done)
        yield from part.end(raw_done)
        if digest.hexdigest() != surveyed.found.sha256:
            raise GptfastError(
                f"{surveyed.document.label}: has changed while it was read: run the command again"
            )


class _Part:
    """The part of a document that goes into one split."""

    def __init__(self, number: int, split: str) -> None:
        self.split = split
        self._number = number
        self._chunks = Chunks()
        self._first = True

    def feed(self, text: str, raw_done: int) -> Iterator[_Chunk]:
        for chunk in self._chunks.feed(text):
            yield _Chunk(self._number, self.split, chunk, self._first, False, raw_done)
            self._first = False

    def end(self, raw_done: int) -> Iterator[_Chunk]:
        for chunk in self._chunks.rest():
            yield _Chunk(self._number, self.split, chunk, self._first, True, raw_done)


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


def _described(surveyed: _Surveyed) -> dict[str, str | int]:
    found = surveyed.found
    return {
        "name": surveyed.document.label,
        "bytes": found.n_raw,
        "characters": found.n_chars,
        "replaced_bytes": found.n_replaced,
        "sha256": found.sha256,
    }
