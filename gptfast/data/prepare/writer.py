"""Writes the HDF5 file of a corpus, which `layout` describes. Complete or absent.

Ids are written once. While their number still grows they lie in the unfinished file, each split
from the start of a page on; at the end HDF5 lays its datasets over them, as it does where they are
allocated early, never filled and aligned to the page. It writes what else there is to say, and the
file, whole and on the disk, gets its name.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gptfast.data.layout import FORMAT, FORMAT_VERSION, SPLITS
from gptfast.data.prepare.progress import (
    Job,
    Point,
    ProgressFile,
    SplitPoint,
    Unfinished,
    partial_path,
    progress_path,
    sweep,
)
from gptfast.errors import Refused
from gptfast.files import sync, writing

if TYPE_CHECKING:
    import h5py

    from gptfast.tokenizers.tokenizer import Tokenizer

_PAGE = 4096
_HEADERS = 2 * _PAGE
"""Bytes before a split, which HDF5 takes for what describes it."""
_COPY = 1 << 22
_SLACK = 1 << 17
"""Bytes that HDF5 needs besides the data."""


def id_dtype(vocab_size: int) -> np.dtype[Any]:
    """What ids are stored as."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


@dataclass
class _Growing:
    """A split whose number of ids is not yet known."""

    n_tokens: int = 0
    n_bytes: int = 0
    max_id: int = 0
    documents: array[int] = field(default_factory=lambda: array("q"))
    n_noted: int = 0
    """Documents that the progress file knows of."""
    digest: Any = field(default_factory=hashlib.sha256)


class Draft:
    """A data file in the making: all ids of "train" are appended before those of "val".

    Left by an error that another try may get past (a signal, a full disk) it stays, if the progress
    file knows of it; left by any other it goes.

    Args:
        job: gives what the ids depend on, for the progress file; None: it keeps none.
        unfinished: a draft with the same job to go on with.
    """

    def __init__(
        self,
        target: Path,
        *,
        vocab_size: int,
        job: Callable[[], Job] | None = None,
        unfinished: Unfinished | None = None,
    ) -> None:
        self.dtype = id_dtype(vocab_size)
        self.n_chunks = 0
        """Chunks of text whose ids are here."""
        self.is_kept = False
        """Whether it was left unfinished, to be gone on with."""
        self._vocab_size = vocab_size
        self.target = target
        self._partial = partial_path(target)
        self._splits = {name: _Growing() for name in SPLITS}
        self._progress: ProgressFile | None = None
        if job is not None:
            begun = unfinished is not None
            self._progress = ProgressFile(progress_path(target), job, has_points=begun)
        self._unfinished = unfinished
        self._stack = contextlib.ExitStack()
        self._file: io.FileIO

    def __enter__(self) -> Draft:
        self.open()
        return self

    def open(self) -> None:
        """Begin, or go on. The file has a name from now on: have `__exit__` called whatever comes.

        Raises:
            Refused: what to go on with is damaged.
            GptfastError: it cannot be written.
        """
        unfinished = self._unfinished
        with writing(self.target):
            self.target.parent.mkdir(parents=True, exist_ok=True)
            sweep(self.target, but=unfinished)
            if unfinished is not None:
                unfinished.take_over(self.target)
            # Without a buffer, whose rest would be written again when a full disk is left.
            file = io.FileIO(self._partial, "r+" if unfinished else "w+")
            self._file = self._stack.enter_context(file)
            if unfinished is not None:
                self._go_on(unfinished.point)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._progress.close()
        self._stack.close()
        self.is_kept = self._has_points() and error is not None and _may_pass(error)
        if not self.is_kept:
            self._partial.unlink(missing_ok=True)
            progress_path(self.target).unlink(missing_ok=True)

    def n_tokens(self, split: str) -> int:
        return self._splits[split].n_tokens

    def n_bytes(self, split: str) -> int:
        """UTF-8 bytes of the text that the ids stand for."""
        return self._splits[split].n_bytes

    def n_documents(self, split: str) -> int:
        return len(self._splits[split].documents)

    def append(
        self,
        split: str,
        ids: NDArray[Any],
        *,
        documents: Sequence[int],
        n_bytes: int,
        n_chunks: int = 1,
    ) -> None:
        """Write the ids of the next chunks.

        Args:
            ids: (tokens,) integers.
            documents: which of `ids` begin a document.
            n_bytes: UTF-8 bytes of their text.
        """
        growing = self._splits[split]
        if len(ids):
            growing.max_id = max(growing.max_id, int(ids.max()))
            assert growing.max_id < self._vocab_size, "a tokenizer keeps to its vocabulary"
        stored = ids.astype(self.dtype, copy=False)
        growing.digest.update(stored.data)
        with writing(self.target):
            self._write(self._end(split), stored.data)
            growing.documents.extend(growing.n_tokens + at for at in documents)
            growing.n_tokens += len(ids)
            growing.n_bytes += n_bytes
            self.n_chunks += n_chunks
            if self._progress is not None and self._progress.is_due():
                self._note(self._progress)

    def finish(
        self,
        *,
        tokenizer: Tokenizer,
        source: str,
        documents: Sequence[Mapping[str, Any]],
        attributes: Mapping[str, str | int | float],
    ) -> None:
        """Make the data file of what was appended.

        Args:
            source: what the text is and where it came from, in words.
            documents: for each, its label, bytes, characters and SHA-256.
            attributes: what else the file should say about itself.

        Raises:
            GptfastError: it cannot be written.
        """
        definition, sources = _json(tokenizer.definition()), _json(list(documents))
        with writing(self.target):
            if self._progress is not None and self._has_points():
                self._note(self._progress)
                self._progress.settle()
            self._make_room(definition.nbytes + sources.nbytes)
            with self._hdf5() as file:
                self._lay_datasets(file)
                for name in SPLITS:
                    _describe(file, name, self._splits[name])
                for name, value in (("tokenizer", definition), ("sources", sources)):
                    file.create_dataset(name, data=value, compression="gzip")
                file.attrs.update(
                    {
                        FORMAT: FORMAT_VERSION,
                        "tokenizer": tokenizer.name,
                        "vocab_size": tokenizer.vocab_size,
                        "source": source,
                        **attributes,
                    }
                )
            os.fsync(self._file.fileno())
            self._stack.close()  # some systems give no other name to an open file
            self._partial.replace(self.target)
            sync(self.target.parent)

    # where the ids lie -----------------------------------------------------------------------

    def _begin(self, split: str) -> int:
        """The first byte of a split."""
        return _HEADERS if split == "train" else _up(self._end("train")) + _HEADERS

    def _end(self, split: str) -> int:
        return self._begin(split) + self._splits[split].n_tokens * self.dtype.itemsize

    def _write(self, at: int, content: memoryview) -> None:
        self._file.seek(at)
        left = content.cast("B")
        while left:
            left = left[self._file.write(left) :]

    def _read(self, at: int, n_bytes: int) -> bytes:
        self._file.seek(at)
        return self._file.read(n_bytes)

    def _move(self, source: int, target: int, n_bytes: int) -> None:
        steps = range(0, n_bytes, _COPY)
        # Where the two overlap, nothing may be overwritten before it is read.
        for at in reversed(steps) if target > source else steps:
            content = self._read(source + at, min(_COPY, n_bytes - at))
            self._write(target + at, memoryview(content))

    # going on --------------------------------------------------------------------------------

    def _has_points(self) -> bool:
        return self._progress is not None and self._progress.has_points

    def _note(self, progress: ProgressFile) -> None:
        point = Point(self.n_chunks, {name: _noted(self._splits[name]) for name in SPLITS})
        progress.keep(point, file=self._file.fileno())

    def _go_on(self, point: Point) -> None:
        self.n_chunks = point.n_chunks
        for name in SPLITS:
            noted, growing = point.splits[name], self._splits[name]
            growing.n_tokens, growing.n_bytes = noted.n_tokens, noted.n_bytes
            growing.documents, growing.n_noted = noted.documents, len(noted.documents)
            for at in range(self._begin(name), self._end(name), _COPY):
                content = self._read(at, min(_COPY, self._end(name) - at))
                growing.digest.update(content)
                ids = np.frombuffer(content, dtype=self.dtype)
                growing.max_id = max(growing.max_id, int(ids.max()))
            if growing.digest.hexdigest() != noted.sha256:
                raise Refused(
                    f"{self.target}: what there is of it is damaged: run the command without "
                    "--resume, which begins again"
                )

    # the HDF5 file ---------------------------------------------------------------------------

    def _make_room(self, n_bytes: int) -> None:
        """Write zeros where HDF5 will write: it takes the process down where it cannot."""
        n_bytes += 8 * sum(len(split.documents) for split in self._splits.values()) + _SLACK
        at = self._end("val")
        self._file.truncate(at)
        for start in range(at, at + n_bytes, _COPY):
            self._write(start, memoryview(bytes(min(_COPY, at + n_bytes - start))))

    @contextlib.contextmanager
    def _hdf5(self) -> Iterator[h5py.File]:
        """The unfinished file as an empty HDF5 file, with the ids behind its end."""
        import h5py

        empty = io.BytesIO()
        with h5py.File(empty, "w"):
            pass
        self._write(0, empty.getbuffer())
        access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
        access.set_alignment(1, _PAGE)
        opened = h5py.h5f.open(os.fsencode(self._partial), h5py.h5f.ACC_RDWR, access)
        with h5py.File(opened) as file:
            yield file

    def _lay_datasets(self, file: h5py.File) -> None:
        """Have `train` and `val` lie where their ids do, or the ids where HDF5 wants them."""
        moves = []
        for name in SPLITS:
            n_tokens = self._splits[name].n_tokens
            at = _allocate(file, name, n_tokens, self.dtype)
            if at is not None and at != self._begin(name):
                moves.append((self._begin(name), at, n_tokens * self.dtype.itemsize))
        # Those that move up from the last on, then those that move down from the first on.
        for source, target, n_bytes in sorted(moves, reverse=True):
            if target > source:
                self._move(source, target, n_bytes)
        for source, target, n_bytes in sorted(moves):
            if target < source:
                self._move(source, target, n_bytes)


def _may_pass(error: BaseException) -> bool:
    """Whether the same command may get further another time: a signal, a disk."""
    return not isinstance(error, Exception) or isinstance(error.__cause__, OSError)


def _up(at: int) -> int:
    """The start of the next page."""
    return -(-at // _PAGE) * _PAGE


def _noted(growing: _Growing) -> SplitPoint:
    new = growing.documents[growing.n_noted :]
    growing.n_noted = len(growing.documents)
    return SplitPoint(growing.n_tokens, growing.n_bytes, growing.digest.hexdigest(), new)


def _allocate(file: h5py.File, name: str, n_tokens: int, dtype: np.dtype[Any]) -> int | None:
    """Make a dataset without writing to it, and say where it lies; None: it is empty."""
    from h5py import h5d, h5p, h5s, h5t

    creation = h5p.create(h5p.DATASET_CREATE)
    creation.set_layout(h5d.CONTIGUOUS)
    creation.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    creation.set_fill_time(h5d.FILL_TIME_NEVER)
    kind, space = h5t.py_create(dtype, logical=True), h5s.create_simple((n_tokens,))
    offset: int | None = h5d.create(file.id, name.encode(), kind, space, creation).get_offset()
    return offset


def _describe(file: h5py.File, name: str, split: _Growing) -> None:
    file[name].attrs["sha256"] = split.digest.hexdigest()
    file[name].attrs["bytes"] = split.n_bytes
    file[name].attrs["max_id"] = split.max_id
    file.create_dataset(f"{name}_documents", data=np.array(split.documents, dtype=np.int64))


def _json(value: object) -> NDArray[np.uint8]:
    """As bytes for a dataset: an attribute holds 64 KiB at most, and a vocabulary is larger."""
    return np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)
