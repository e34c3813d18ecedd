"""What a data file says about itself, checked once so that reading can trust it.

Layout: 1-D datasets `train` and `val`, contiguous, so that they can be memory-mapped where they
lie in the file; uint16 where the vocabulary fits into 65,536 ids, else uint32; as attributes, the
SHA-256 of the ids, the bytes of their text and the largest id. Beside them `train_documents` and
`val_documents` (int64 starts), `tokenizer` (its whole definition as JSON, so that the file needs
nothing else), `sources` (JSON) and attributes of the file: format, tokenizer's name, source.

A foreign HDF5 file with a 1-D dataset of integers named `tokens`, or `train` and `val`, is read
too; `foreign` reads what is not HDF5.
"""

from __future__ import annotations

import errno
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gptfast.errors import GptfastError, Refused

if TYPE_CHECKING:
    import h5py

FORMAT = "gptfast_format"
"""The attribute that tells our files, with the version of their layout."""
FORMAT_VERSION = 1
READ_ATTRIBUTES = (FORMAT, "tokenizer", "vocab_size", "source")
"""Attributes of our files that `Layout` has."""
OWN = "gptfast"
HDF5 = "HDF5"
SPLITS = ("train", "val")
DAMAGE = (OSError, KeyError, RuntimeError, ValueError, TypeError)
"""What h5py raises where an HDF5 file that could be opened is damaged: see the test that flips
bits."""
_PIECE = 1 << 22
"""Tokens looked at or copied at a time."""
_CHUNK_CACHE = 32 << 20
"""Bytes that HDF5 may keep unpacked of a foreign file in compressed chunks."""


class Tokens(Protocol):
    """A split's ids on disk: a memory map where they are contiguous, else an HDF5 dataset."""

    @property
    def dtype(self) -> np.dtype[Any]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice) -> NDArray[Any]: ...


@dataclass(frozen=True)
class Part:
    """Ids of a split that lie in one file."""

    path: Path
    n_tokens: int
    dtype: np.dtype[Any]
    offset: int | None
    """Byte in the file at which the ids lie in one piece; None: in chunks, or compressed."""
    identity: tuple[int, ...]
    dataset: str | None = None
    """Its name in the HDF5 file; None: the file is no HDF5."""


@dataclass(frozen=True)
class Split:
    """What a file says about one split."""

    label: str
    """As messages call it."""
    parts: tuple[Part, ...]
    """In the order of the ids; all of one dtype. More than one: shards."""
    n_bytes: int | None = None
    """UTF-8 bytes of its text; None: a foreign file, which does not say."""
    max_id: int | None = None
    """Largest id; None: a foreign file, which does not say."""
    sha256: str | None = None
    """Of the ids as stored; None: a foreign file, which does not say."""

    @property
    def n_tokens(self) -> int:
        return sum(part.n_tokens for part in self.parts)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.parts[0].dtype


@dataclass(frozen=True)
class Layout:
    kind: str
    """Whose format it is: OWN, HDF5, or another program's name."""
    splits: dict[str, Split]
    vocab_size: int | None = None
    """None: a foreign file, which does not say."""
    tokenizer_name: str | None = None
    """None: a foreign file, which does not say."""
    tokenizer: Mapping[str, Any] | None = None
    """Its definition, where another file than the HDF5 file holds it."""
    source: str | None = None


def hdf5_layout(path: Path) -> Layout:
    """What an HDF5 file says about itself.

    Raises:
        Refused: there is no such file, it is damaged, or it holds no 1-D integer tokens.
        GptfastError: another program holds the file's lock.
    """
    with open_hdf5(path) as file:
        try:
            return _own_layout(file, path) if FORMAT in file.attrs else _foreign_layout(file, path)
        except DAMAGE as error:
            raise Refused(f"{path}: is damaged ({error.args[0]}): {_again(path)}") from error


def _own_layout(file: h5py.File, path: Path) -> Layout:
    attributes = file.attrs
    version = int(attributes[FORMAT])
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
                label=name,
                parts=(_hdf5_part(dataset, name, path),),
                n_bytes=int(dataset.attrs["bytes"]),
                max_id=int(dataset.attrs["max_id"]),
                sha256=str(dataset.attrs["sha256"]),
            )
    return Layout(
        kind=OWN,
        splits=splits,
        vocab_size=int(attributes["vocab_size"]),
        tokenizer_name=str(attributes["tokenizer"]),
        source=str(attributes["source"]),
    )


def _foreign_layout(file: h5py.File, path: Path) -> Layout:
    names = {"train": "tokens"} if "tokens" in file else {s: s for s in SPLITS if s in file}
    if "train" not in names:
        holds = ", ".join(sorted(file)) or "nothing"
        raise Refused(f"{path}: has no dataset train or tokens, it holds {holds}: {_again(path)}")
    splits = {}
    for split, name in names.items():
        _check_foreign(file[name], f"{path}: {name}", _again(path))
        splits[split] = Split(name, (_hdf5_part(file[name], name, path),))
    return Layout(HDF5, splits)


def _hdf5_part(dataset: Any, name: str, path: Path) -> Part:
    return Part(
        path=path,
        n_tokens=len(dataset),
        dtype=dataset.dtype,
        offset=dataset.id.get_offset(),
        identity=identity(path),
        dataset=name,
    )


def _check_foreign(dataset: Any, where: str, again: str) -> None:
    """Refuse what is not a 1-D dataset of integers from 0 up; nothing is cast quietly."""
    shape = getattr(dataset, "shape", None)
    if shape is None or len(shape) != 1:
        raise Refused(f"{where} has shape {shape}, which must be one-dimensional: {again}")
    if dataset.dtype.kind not in "iu":
        raise Refused(f"{where} is {dataset.dtype}, which must be integers: {again}")
    if not len(dataset):
        raise Refused(f"{where} is empty, 0 tokens: {again}")
    if dataset.dtype.kind == "i":
        at = 0
        for ids in pieces(dataset, len(dataset)):
            if int(ids.min()) < 0:
                first = int(np.argmax(ids < 0))
                raise Refused(
                    f"{where} ({dataset.dtype}) has the negative id {ids[first]} at index "
                    f"{at + first}: {again}"
                )
            at += len(ids)


def open_hdf5(path: Path) -> h5py.File:
    """Open for reading with HDF5's own lock, which many readers share.

    Raises:
        Refused: not there, or not a whole HDF5 file.
        GptfastError: locked by a writer.
    """
    import h5py

    try:
        return h5py.File(path, "r", rdcc_nbytes=_CHUNK_CACHE)
    except OSError as error:
        raise _not_opened(path, error) from error


def _not_opened(path: Path, error: OSError) -> GptfastError:
    text = str(error)
    if "unable to lock file" in text or error.errno == errno.EAGAIN:
        return GptfastError(
            f"{path}: another program holds its lock to write it (HDF5: unable to lock file): "
            "wait until it is done; on a disk without locks set HDF5_USE_FILE_LOCKING=FALSE"
        )
    if isinstance(error, FileNotFoundError):
        return Refused(f"{path}: no such file: make it with {prepare_command(path)}")
    if isinstance(error, PermissionError):
        return Refused(f"{path}: cannot be read (Permission denied): change its rights")
    if path.stat().st_size == 0:
        cause = "is empty, 0 bytes"
    elif "truncated file" in text:
        cause = "is cut short, the end of the HDF5 file is missing"
    elif "signature not found" in text:
        cause = "is not an HDF5 file"
    else:
        cause = f"cannot be read as HDF5 ({text})"
    return Refused(f"{path}: {cause}: {_again(path)}")


def _again(path: Path) -> str:
    first = "run gptfast prepare again" if _is_hdf5_name(path) else "prepare it first"
    return f"{first}: {prepare_command(path)}"


def _is_hdf5_name(path: Path) -> bool:
    return path.suffix.lower() in (".h5", ".hdf5")


def prepare_command(path: Path) -> str:
    """The command that makes the data file `path`, as far as its name NAME-TOKENIZER.h5 tells."""
    if not _is_hdf5_name(path):
        return f"gptfast prepare {shlex.quote(str(path))}"
    from gptfast.data.prepare.corpora import known_names
    from gptfast.tokenizers.tokenizer import TOKENIZERS

    names = known_names()
    name, _, tokenizer = path.stem.rpartition("-")
    if tokenizer not in TOKENIZERS:
        return f"gptfast prepare SOURCE --out {shlex.quote(str(path))}"
    words = ["gptfast prepare", name if name in names else "SOURCE"]
    if tokenizer != TOKENIZERS[0]:
        words += ["--tokenizer", tokenizer]
    if path != Path.cwd() / "data" / path.name or name not in names:
        words += ["--out", shlex.quote(str(path))]
    if path.exists():
        words.append("--force")
    return " ".join(words)


def identity(path: Path) -> tuple[int, ...]:
    """What tells this very file from one put into its place."""
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def pieces(tokens: Tokens, n_tokens: int) -> Iterator[NDArray[Any]]:
    for at in range(0, n_tokens, _PIECE):
        yield tokens[at : min(at + _PIECE, n_tokens)]
