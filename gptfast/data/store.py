"""The HDF5 file of a corpus, read. `writer` makes one.

Layout: 1-D datasets `train` and `val`, contiguous, so that they can be memory-mapped where they
lie in the file; uint16 where the vocabulary fits into 65,536 ids, else uint32. Beside them
`train_documents` and `val_documents` (int64 starts), `tokenizer` (its whole definition as JSON, so
that the file needs nothing else); attributes say what the text was and how it was split.

A foreign file with a 1-D dataset `tokens` of integers is read too, as a train split alone.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from gptfast.errors import GptfastError, Refused

if TYPE_CHECKING:
    import h5py

    from gptfast.data.tokenizer import Tokenizer

FORMAT_VERSION = 1
SPLITS = ("train", "val")
_PIECE = 1 << 22
"""Tokens looked at or copied at a time."""
_SAMPLE = 1 << 16
_CHUNK_CACHE = 32 << 20
"""Bytes that HDF5 may keep unpacked of a foreign file in compressed chunks."""


class Tokens(Protocol):
    """A split's ids on disk: a memory map where they are contiguous, else an HDF5 dataset."""

    @property
    def dtype(self) -> np.dtype[Any]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice) -> NDArray[Any]: ...


@dataclass(frozen=True)
class Split:
    """What a file says about one split."""

    dataset: str
    n_tokens: int
    dtype: np.dtype[Any]
    offset: int | None
    """Byte in the file at which the ids lie in one piece; None: in chunks, or compressed."""
    n_bytes: int | None
    """UTF-8 bytes of its text; None: a foreign file, which does not say."""
    max_id: int | None
    """Largest id; None: a foreign file, which does not say."""
    sha256: str | None
    """Of the ids as stored; None: a foreign file, which does not say."""


@dataclass(frozen=True)
class _Layout:
    splits: dict[str, Split]
    vocab_size: int | None
    tokenizer_name: str | None
    source: str | None
    identity: tuple[int, ...]


class Store:
    """A corpus on disk. Cheap to open, to pickle and to fork: each process opens its own handle.

    Use it as a context manager, or call `close`.
    """

    def __init__(self, path: Path, layout: _Layout) -> None:
        self.path = path
        self._layout = layout
        self._raw: io.BufferedReader | None = None
        self._hdf5: h5py.File | None = None
        self._owner_pid: int | None = None

    @classmethod
    def open(cls, path: str | Path) -> Store:
        """Check the file and read what it says about itself.

        Raises:
            Refused: there is no such file, it is damaged, or it holds no 1-D integer tokens.
            GptfastError: another program holds the file's lock.
        """
        path = Path(path).absolute()
        return cls(path, _read_layout(path))

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close this process's handles; a later read opens them again."""
        # A handle that came over a fork belongs to the parent: forget it, close nothing.
        if self._owner_pid == os.getpid():
            if self._raw is not None:
                self._raw.close()
            if self._hdf5 is not None:
                self._hdf5.close()
        self._raw = self._hdf5 = self._owner_pid = None

    def __reduce__(self) -> tuple[object, ...]:
        return Store, (self.path, self._layout)

    # what the file says --------------------------------------------------------------------

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that hold tokens, "train" first."""
        return tuple(self._layout.splits)

    def n_tokens(self, split: str) -> int:
        return self._split(split).n_tokens

    @property
    def vocab_size(self) -> int | None:
        """Ids of the vocabulary; None: a foreign file, which does not say."""
        return self._layout.vocab_size

    @property
    def tokenizer_name(self) -> str | None:
        return self._layout.tokenizer_name

    @property
    def source(self) -> str | None:
        """What the text is and where it came from; None: a foreign file."""
        return self._layout.source

    @property
    def tokenizer_definition(self) -> dict[str, Any] | None:
        """All that it takes to build the tokenizer anew; None: a foreign file."""
        if self.tokenizer_name is None:
            return None
        with _open_hdf5(self.path) as file:
            return cast("dict[str, Any]", json.loads(file["tokenizer"][:].tobytes()))

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the file.

        Raises:
            Refused: a foreign file, which has none.
        """
        from gptfast.data.tokenizer import from_definition

        definition = self.tokenizer_definition
        if definition is None:
            raise Refused(
                f"{self.path}: holds ids but no tokenizer, so its text cannot be shown: make the "
                "file with gptfast prepare"
            )
        return from_definition(definition)

    def documents(self, split: str) -> NDArray[np.int64]:
        """(documents,) int64: first token of each document of the split."""
        if self.tokenizer_name is None:
            return np.zeros(1, dtype=np.int64)
        with _open_hdf5(self.path) as file:
            return cast("NDArray[np.int64]", file[f"{self._split(split).dataset}_documents"][:])

    def n_bytes(self, split: str) -> int | None:
        """UTF-8 bytes of the split's text, separators not counted; None: a foreign file."""
        return self._split(split).n_bytes

    def bytes_of(self, split: str, n_tokens: int) -> int | None:
        """UTF-8 bytes that the first `n_tokens` stand for; None: a foreign file."""
        if self.tokenizer_name is None:
            return None
        if n_tokens == self.n_tokens(split):
            return self.n_bytes(split)
        lengths = self.tokenizer().token_bytes()
        return sum(int(lengths[ids].sum()) for ids in _pieces(self.tokens(split), n_tokens))

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the ids; of a foreign file, of parts spread evenly over them."""
        digest = hashlib.sha256()
        for name, split in self._layout.splits.items():
            digest.update(f"{name} {split.n_tokens} {split.dtype.str} ".encode())
            digest.update((split.sha256 or _sampled_sha256(self.tokens(name))).encode())
        return digest.hexdigest()

    # tokens --------------------------------------------------------------------------------

    def tokens(self, split: str) -> Tokens:
        """All ids of a split, none of them read yet."""
        found = self._split(split)
        if self._owner_pid != os.getpid():
            self._raw = self._hdf5 = None
        if found.offset is None:
            if self._hdf5 is None:
                self._hdf5 = _open_hdf5(self.path)
                self._opened()
            return cast("Tokens", self._hdf5[found.dataset])
        if self._raw is None:
            self._raw = self.path.open("rb")
            self._opened()
        # A new map each time: pages once touched would count as this process's memory for ever.
        return np.memmap(
            self._raw, dtype=found.dtype, mode="r", offset=found.offset, shape=(found.n_tokens,)
        )

    def read(self, split: str, starts: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """Windows in the order asked for; starts may repeat and run backwards.

        Args:
            starts: (B,) int64, each in [0, n_tokens - length].

        Returns:
            (B, length) int64 ids.
        """
        tokens = self.tokens(split)
        windows = np.empty((len(starts), length), dtype=np.int64)
        for row, start in enumerate(starts.tolist()):
            windows[row] = tokens[start : start + length]
        return windows

    def check_ids(self, vocab_size: int) -> None:
        """Make sure that every id is below `vocab_size`.

        Raises:
            Refused: one is not.
        """
        for name, split in self._layout.splits.items():
            if split.max_id is not None and split.max_id < vocab_size:
                continue
            at = 0
            for ids in _pieces(self.tokens(name), split.n_tokens):
                if int(ids.max()) >= vocab_size:
                    first = int(np.argmax(ids >= vocab_size))
                    raise Refused(
                        f"{self.path}: id {ids[first]} >= {vocab_size}, the model's vocabulary, "
                        f"at token {at + first} of {split.dataset}: set model.vocab_size to what "
                        "the data needs, or prepare the data with the model's tokenizer"
                    )
                at += len(ids)

    def _split(self, name: str) -> Split:
        try:
            return self._layout.splits[name]
        except KeyError:
            raise Refused(
                f"{self.path}: has no split {name}, only {', '.join(self.splits)}: "
                f"{_prepare_command(self.path)} makes one"
            ) from None

    def _opened(self) -> None:
        self._owner_pid = os.getpid()
        if _identity(self.path) != self._layout.identity:
            raise GptfastError(
                f"{self.path}: has been replaced since this run opened it: start the run again"
            )


# reading a file's layout -----------------------------------------------------------------------


def _read_layout(path: Path) -> _Layout:
    with _open_hdf5(path) as file:
        if "format_version" in file.attrs:
            return _own_layout(file, path)
        return _foreign_layout(file, path)


def _own_layout(file: h5py.File, path: Path) -> _Layout:
    attributes = file.attrs
    version = int(attributes["format_version"])
    if version > FORMAT_VERSION:
        raise Refused(
            f"{path}: format {version} is newer than {FORMAT_VERSION}, the newest that this "
            f"gptfast knows: update gptfast, or {_again(path)}"
        )
    splits = {}
    for name in SPLITS:
        dataset = file[name]
        if len(dataset):
            splits[name] = Split(
                dataset=name,
                n_tokens=len(dataset),
                dtype=dataset.dtype,
                offset=dataset.id.get_offset(),
                n_bytes=int(dataset.attrs["bytes"]),
                max_id=int(dataset.attrs["max_id"]),
                sha256=str(dataset.attrs["sha256"]),
            )
    return _Layout(
        splits=splits,
        vocab_size=int(attributes["vocab_size"]),
        tokenizer_name=str(attributes["tokenizer"]),
        source=str(attributes["source"]),
        identity=_identity(path),
    )


def _foreign_layout(file: h5py.File, path: Path) -> _Layout:
    again = _again(path)
    if "tokens" not in file:
        holds = ", ".join(sorted(file)) or "nothing"
        raise Refused(f"{path}: has no dataset train or tokens, it holds {holds}: {again}")
    dataset = file["tokens"]
    shape = getattr(dataset, "shape", None)
    if shape is None or len(shape) != 1:
        raise Refused(f"{path}: tokens has shape {shape}, which must be one-dimensional: {again}")
    if dataset.dtype.kind not in "iu":
        raise Refused(f"{path}: tokens is {dataset.dtype}, which must be integers: {again}")
    if not len(dataset):
        raise Refused(f"{path}: tokens is empty, 0 tokens: {again}")
    if dataset.dtype.kind == "i":
        at = 0
        for ids in _pieces(dataset, len(dataset)):
            if int(ids.min()) < 0:
                first = int(np.argmax(ids < 0))
                raise Refused(
                    f"{path}: tokens ({dataset.dtype}) has the negative id {ids[first]} at index "
                    f"{at + first}: {again}"
                )
            at += len(ids)
    split = Split("tokens", len(dataset), dataset.dtype, dataset.id.get_offset(), None, None, None)
    return _Layout({"train": split}, None, None, None, _identity(path))


def _open_hdf5(path: Path) -> h5py.File:
    """Open for reading with HDF5's own lock, which many readers share.

    Raises:
        Refused: not there, or not a whole HDF5 file.
        GptfastError: locked by a writer.
    """
    import h5py

    try:
        return h5py.File(path, "r", rdcc_nbytes=_CHUNK_CACHE)
    except FileNotFoundError:
        raise Refused(f"{path}: no such file: make it with {_prepare_command(path)}") from None
    except IsADirectoryError:
        raise Refused(f"{path}: is a folder, not an HDF5 file of tokens") from None
    except PermissionError as error:
        raise Refused(f"{path}: cannot be read ({error.strerror}): change its rights") from None
    except OSError as error:
        # HDF5 reports through h5py's text alone; only a lock leaves an errno.
        text = str(error)
        if error.errno in (errno.EAGAIN, errno.EACCES) or "unable to lock file" in text:
            raise GptfastError(
                f"{path}: another program holds its lock to write it (HDF5: unable to lock file): "
                "wait until it is done; on a disk without locks set HDF5_USE_FILE_LOCKING=FALSE"
            ) from error
        if path.is_dir():
            raise Refused(f"{path}: is a folder, not an HDF5 file of tokens") from None
        if "truncated file" in text:
            cause = "is cut short, the end of the HDF5 file is missing"
        elif "signature not found" in text:
            cause = "is empty, 0 bytes" if path.stat().st_size == 0 else "is not an HDF5 file"
        else:
            cause = f"cannot be read as HDF5 ({text})"
        raise Refused(f"{path}: {cause}: {_again(path)}") from None


def _again(path: Path) -> str:
    first = "run gptfast prepare again" if _is_hdf5_name(path) else "prepare it first"
    return f"{first}: {_prepare_command(path)}"


def _is_hdf5_name(path: Path) -> bool:
    return path.suffix.lower() in (".h5", ".hdf5")


def _prepare_command(path: Path) -> str:
    """The command that makes the data file `path`, as far as its name NAME-TOKENIZER.h5 tells."""
    if not _is_hdf5_name(path):
        return f"gptfast prepare {shlex.quote(str(path))}"
    from gptfast.data.sources import NAMES
    from gptfast.data.tokenizer import TOKENIZERS

    name, _, tokenizer = path.stem.rpartition("-")
    if tokenizer not in TOKENIZERS:
        return f"gptfast prepare SOURCE --out {shlex.quote(str(path))}"
    words = ["gptfast prepare", name if name in NAMES else "SOURCE"]
    if tokenizer != TOKENIZERS[0]:
        words += ["--tokenizer", tokenizer]
    if path != Path.cwd() / "data" / path.name or name not in NAMES:
        words += ["--out", shlex.quote(str(path))]
    if path.exists():
        words.append("--force")
    return " ".join(words)


def _identity(path: Path) -> tuple[int, ...]:
    """What tells this very file from one put into its place."""
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _pieces(tokens: Tokens, n_tokens: int) -> Iterator[NDArray[Any]]:
    for at in range(0, n_tokens, _PIECE):
        yield tokens[at : min(at + _PIECE, n_tokens)]


def _sampled_sha256(tokens: Tokens) -> str:
    """SHA-256 of up to 64 parts spread evenly over the ids."""
    n_tokens = len(tokens)
    digest = hashlib.sha256()
    for at in np.unique(np.linspace(0, max(n_tokens - _SAMPLE, 0), 64, dtype=np.int64)).tolist():
        digest.update(tokens[at : at + _SAMPLE].tobytes())
    return digest.hexdigest()
