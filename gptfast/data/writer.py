"""Writes the HDF5 file of a corpus, which `layout` describes. Complete or absent.

Ids are gathered in files without a name, which vanish with the process however it ends; the
HDF5 file is made beside its place and renamed once it is whole and on the disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gptfast.data.layout import FORMAT, FORMAT_VERSION, SPLITS
from gptfast.errors import GptfastError

if TYPE_CHECKING:
    import h5py

    from gptfast.data.tokenizer import Tokenizer

_COPY = 1 << 22
_SLACK = 1 << 16
"""Bytes that HDF5 needs besides the data."""


class Spool:
    """The ids of a split while their number is not yet known, on the disk of the target."""

    def __init__(self, target: Path, *, vocab_size: int) -> None:
        self.dtype = np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
        self.n_tokens = 0
        self.n_bytes = 0
        """UTF-8 bytes of the text that the ids stand for."""
        self.max_id = 0
        self.documents = array("q")
        """First token of each document."""
        self._vocab_size = vocab_size
        self._digest = hashlib.sha256()
        self._target = target
        with _writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=target.parent)  # noqa: SIM115  # see __exit__

    def __enter__(self) -> Spool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # What a full disk did not take is tried again here, and must not hide the first error.
        with contextlib.suppress(OSError):
            self._file.close()

    def append(self, ids: NDArray[np.uint32], *, n_bytes: int) -> None:
        if len(ids):
            self.max_id = max(self.max_id, int(ids.max()))
            assert self.max_id < self._vocab_size, "a tokenizer keeps to its vocabulary"
        stored = ids.astype(self.dtype)
        self._digest.update(stored.data)
        with _writing(self._target):
            self._file.write(stored.data)
        self.n_tokens += len(ids)
        self.n_bytes += n_bytes

    @property
    def n_bytes_stored(self) -> int:
        return self.n_tokens * self.dtype.itemsize + 8 * len(self.documents)

    def sha256(self) -> str:
        return self._digest.hexdigest()

    def pieces(self) -> Iterator[NDArray[Any]]:
        """All ids, a few at a time."""
        self._file.seek(0)
        while content := self._file.read(_COPY * self.dtype.itemsize):
            yield np.frombuffer(content, dtype=self.dtype)


def write_store(
    path: Path,
    *,
    splits: Mapping[str, Spool],
    tokenizer: Tokenizer,
    source: str,
    documents: Sequence[Mapping[str, Any]],
    attributes: Mapping[str, str | int | float],
) -> None:
    """Make the data file `path`, or leave what was there.

    Args:
        splits: "train" and "val".
        source: what the text is and where it came from, in words.
        documents: for each, its label, bytes, characters and SHA-256.
        attributes: what else the file should say about itself.

    Raises:
        GptfastError: it cannot be written.
    """
    import h5py

    definition, sources = _json(tokenizer.definition()), _json(list(documents))
    beside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with _writing(path):
        _sweep(path)
        _try_room(
            path.parent,
            sum(split.n_bytes_stored for split in splits.values()) + definition.size + sources.size,
        )
        try:
            with h5py.File(beside, "w") as file:
                for name in SPLITS:
                    _write_split(file, name, splits[name])
                file.create_dataset("tokenizer", data=definition, compression="gzip")
                file.create_dataset("sources", data=sources, compression="gzip")
                file.attrs.update(
                    {
                        FORMAT: FORMAT_VERSION,
                        "tokenizer": tokenizer.name,
                        "vocab_size": tokenizer.vocab_size,
                        "source": source,
                        **attributes,
                    }
                )
            with beside.open("rb+") as written:
                os.fsync(written.fileno())
            beside.replace(path)
            _sync_folder(path.parent)
        finally:
            beside.unlink(missing_ok=True)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """A full disk and its like, in one line."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # h5py: RuntimeError where closing fails
        reason = getattr(error, "strerror", None) or str(error)
        raise GptfastError(
            f"{path}: cannot be written ({reason}): free space or choose another --out"
        ) from error


def _write_split(file: h5py.File, name: str, spool: Spool) -> None:
    dataset = file.create_dataset(name, shape=(spool.n_tokens,), dtype=spool.dtype)
    at = 0
    for ids in spool.pieces():
        dataset[at : at + len(ids)] = ids
        at += len(ids)
    dataset.attrs["sha256"] = spool.sha256()
    dataset.attrs["bytes"] = spool.n_bytes
    dataset.attrs["max_id"] = spool.max_id
    file.create_dataset(f"{name}_documents", data=np.array(spool.documents, dtype=np.int64))


def _json(value: object) -> NDArray[np.uint8]:
    """As bytes for a dataset: an attribute holds 64 KiB at most, and a vocabulary is larger."""
    return np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)


def _try_room(folder: Path, n_bytes: int) -> None:
    """Find out with a plain file whether there is room: HDF5 takes the process down if not."""
    block = bytes(1 << 20)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        for _ in range(0, n_bytes + _SLACK, len(block)):
            left = memoryview(block)
            while left:
                left = left[file.write(left) :]


def _sweep(path: Path) -> None:
    """Remove what a killed `prepare` for the same file left."""
    for stale in path.parent.glob(f".{_literal(path.name)}.*.partial"):
        if not _is_running(int(stale.name.split(".")[-2])):
            stale.unlink(missing_ok=True)


def _literal(name: str) -> str:
    """`name` as a pattern that matches itself alone."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _sync_folder(folder: Path) -> None:
    """Have the new name itself survive a power cut, where the system can."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
