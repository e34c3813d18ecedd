"""A corpus on disk, read: counts, tokenizer, windows. `writer` makes one, `layout` describes it,
`foreign` finds out what other programs left.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import io
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from gptfast.data.foreign import layout_of
from gptfast.data.layout import (
    DAMAGE,
    OWN,
    READ_ATTRIBUTES,
    SPLITS,
    Layout,
    Part,
    Split,
    Tokens,
    identity,
    open_hdf5,
    pieces,
    prepare_command,
)
from gptfast.errors import GptfastError, Refused

if TYPE_CHECKING:
    import h5py

    from gptfast.tokenizers.tokenizer import Tokenizer

__all__ = ["SPLITS", "Store", "Tokens"]

_SAMPLE = 1 << 16


class Store:
    """A corpus on disk. Cheap to open, to pickle and to fork: each process opens its own handle.

    Use it as a context manager, or call `close`.
    """

    def __init__(self, path: Path, layout: Layout) -> None:
        self.path = path
        self.layout = layout
        """What the files said when this store was opened."""
        self._raw: dict[Path, io.BufferedReader] = {}
        self._hdf5: dict[Path, h5py.File] = {}
        self._owner_pid: int | None = None
        self._inherited: list[object] = []
        self._held_definition: dict[str, Any] | None = None

    @classmethod
    def open(cls, path: str | Path) -> Store:
        """Check the file and read what it says about itself.

        Args:
            path: ours or a foreign file, or a folder of token files; see `gptfast.data.foreign`.

        Raises:
            Refused: there is no such file, it is damaged, or it holds no 1-D integer tokens.
            GptfastError: another program holds the file's lock.
        """
        path = Path(path).absolute()
        return cls(path, layout_of(path))

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close this process's handles; a later read opens them again."""
        self._disown()
        for file in [*self._raw.values(), *self._hdf5.values()]:
            file.close()
        self._raw, self._hdf5 = {}, {}

    def __reduce__(self) -> tuple[object, ...]:
        return Store, (self.path, self.layout)

    # what the file says --------------------------------------------------------------------

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that hold tokens, "train" first."""
        return tuple(self.layout.splits)

    def n_tokens(self, split: str) -> int:
        return self._split(split).n_tokens

    @property
    def vocab_size(self) -> int | None:
        """Ids of the vocabulary; None: a foreign file, which does not say."""
        return self.layout.vocab_size

    @property
    def tokenizer_name(self) -> str | None:
        return self.layout.tokenizer_name

    @property
    def source(self) -> str | None:
        """What the text is and where it came from; None: a foreign file."""
        return self.layout.source

    def hold(self) -> None:
        """Open all that a run reads: a file that takes this one's name later is not read then.

        Worker processes open it for themselves when they start, and refuse another file.
        """
        for split in self.splits:
            self.tokens(split)
        self._held_definition = self._read_definition()

    @property
    def tokenizer_definition(self) -> dict[str, Any] | None:
        """All that it takes to build the tokenizer anew; None: a foreign file of bare ids."""
        return self._held_definition or self._read_definition()

    def _read_definition(self) -> dict[str, Any] | None:
        if self.tokenizer_name is None:
            return None
        if self.layout.kind == OWN:
            with self._read_hdf5("tokenizer") as file:
                return cast("dict[str, Any]", json.loads(file["tokenizer"][:].tobytes()))
        if self.layout.tokenizer is not None:
            return dict(self.layout.tokenizer)
        from gptfast.tokenizers.tokenizer import load_tokenizer

        return load_tokenizer(self.tokenizer_name).definition()

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the file.

        Raises:
            Refused: a foreign file, which has none.
        """
        from gptfast.tokenizers.tokenizer import from_definition

        definition = self.tokenizer_definition
        if definition is None:
            raise Refused(
                f"{self.path}: holds ids but no tokenizer, so its text cannot be shown: gptfast "
                "data import with --tokenizer makes a file that has one"
            )
        return from_definition(definition)

    def documents(self, split: str) -> NDArray[np.int64]:
        """(documents,) int64: first token of each document of the split; [0]: a foreign file."""
        if self.layout.kind != OWN:
            return np.zeros(1, dtype=np.int64)
        name = f"{self._split(split).label}_documents"
        with self._read_hdf5(name) as file:
            return cast("NDArray[np.int64]", file[name][:])

    def sources(self) -> list[dict[str, Any]]:
        """Of each text its name, bytes, characters, documents and SHA-256; []: a foreign file."""
        if self.layout.kind != OWN:
            return []
        with self._read_hdf5("sources") as file:
            return cast("list[dict[str, Any]]", json.loads(file["sources"][:].tobytes()))

    def attributes(self) -> dict[str, str | int | float]:
        """What is written on the file beside what `layout` has; {}: a foreign file."""
        if self.layout.kind != OWN:
            return {}
        with self._read_hdf5("attributes") as file:
            found = {
                name: value.item() if isinstance(value, np.generic) else value
                for name, value in file.attrs.items()
                if name not in READ_ATTRIBUTES
            }
            return cast("dict[str, str | int | float]", found)

    def n_bytes(self, split: str) -> int | None:
        """UTF-8 bytes of the split's text, separators not counted; None: a foreign file."""
        return self._split(split).n_bytes

    def bytes_of(self, split: str, n_tokens: int) -> int | None:
        """UTF-8 bytes that the first `n_tokens` stand for; None: a foreign file of bare ids."""
        if self.tokenizer_name is None:
            return None
        if n_tokens == self.n_tokens(split) and self.n_bytes(split) is not None:
            return self.n_bytes(split)
        lengths = self.tokenizer().token_bytes()
        return sum(int(lengths[ids].sum()) for ids in pieces(self.tokens(split), n_tokens))

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the ids; of a foreign file, of parts spread evenly over them."""
        digest = hashlib.sha256()
        for name, split in self.layout.splits.items():
            digest.update(f"{name} {split.n_tokens} {split.dtype.str} ".encode())
            digest.update((split.sha256 or _sampled_sha256(self.tokens(name))).encode())
        return digest.hexdigest()

    # tokens --------------------------------------------------------------------------------

    def tokens(self, split: str) -> Tokens:
        """All ids of a split, none of them read yet."""
        found = self._split(split)
        if len(found.parts) > 1:
            return Shards(found.parts)
        (part,) = found.parts
        self._disown()
        if part.offset is None:
            if part.path not in self._hdf5:
                self._hdf5[part.path] = open_hdf5(part.path)
                _check_same(part, identity(part.path))
            return cast("Tokens", self._hdf5[part.path][part.dataset])
        if part.path not in self._raw:
            self._raw[part.path] = part.path.open("rb")
            _check_same(part, identity(part.path))
        # A new map each time: pages once touched would count as this process's memory for ever.
        return np.memmap(
            self._raw[part.path],
            dtype=part.dtype,
            mode="r",
            offset=part.offset,
            shape=(part.n_tokens,),
        )

    def read(self, split: str, starts: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """Windows in the order asked for; starts may repeat and run backwards.

        Args:
            starts: (B,) int64, each in [0, n_tokens - length].

        Returns:
            (B, length) int64 ids.
        """
        tokens = self.tokens(split)
        if isinstance(tokens, np.memmap):
            tokens = tokens.view(np.ndarray)  # slices of which cost half
        windows = np.empty((len(starts), length), dtype=np.int64)
        for row, start in enumerate(starts.tolist()):
            windows[row] = tokens[start : start + length]
        return windows

    def check_ids(self, vocab_size: int) -> None:
        """Make sure that every id is below `vocab_size`.

        Raises:
            Refused: one is not.
        """
        for name, split in self.layout.splits.items():
            if split.max_id is not None and split.max_id < vocab_size:
                continue
            at = 0
            for ids in pieces(self.tokens(name), split.n_tokens):
                if int(ids.max()) >= vocab_size:
                    first = int(np.argmax(ids >= vocab_size))
                    raise Refused(
                        f"{self.path}: id {ids[first]} >= {vocab_size}, the model's vocabulary, "
                        f"at token {at + first} of {split.label}: set model.vocab_size to what "
                        "the data needs, or prepare the data with the model's tokenizer"
                    )
                at += len(ids)

    @contextlib.contextmanager
    def _read_hdf5(self, name: str) -> Iterator[h5py.File]:
        """The file, to take something by that name out of it."""
        with open_hdf5(self.path) as file:
            try:
                yield file
            except DAMAGE as error:
                raise Refused(
                    f"{self.path}: its {name} cannot be read ({error}): gptfast data verify tells "
                    "what else is damaged"
                ) from error

    def _split(self, name: str) -> Split:
        try:
            return self.layout.splits[name]
        except KeyError:
            own = self.layout.kind == OWN
            raise Refused(
                f"{self.path}: has no split {name}, only {', '.join(self.splits)}: "
                + (f"{prepare_command(self.path)} makes one" if own else "lay its file beside it")
            ) from None

    def _disown(self) -> None:
        """Put handles away that came over a fork: they are the parent's, and so is their lock."""
        if self._owner_pid != os.getpid():
            # Kept, because to drop them would close them and give up the lock.
            self._inherited += [self._raw, self._hdf5]
            self._raw, self._hdf5 = {}, {}
            self._owner_pid = os.getpid()


class Shards:
    """The ids of several files as one split, read when asked, each file opened for as long.

    There may be more of them than files that a process may keep open.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        self._ends = list(itertools.accumulate(part.n_tokens for part in parts))
        self.dtype = parts[0].dtype

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, asked: slice) -> NDArray[Any]:
        start, stop, _ = asked.indices(len(self))
        stop = max(start, stop)
        found = []
        for part, end in self._parts_from(start):
            begin = end - part.n_tokens
            if begin >= stop:
                break
            first = max(start - begin, 0)
            found.append(_read_part(part, first, min(stop - begin, part.n_tokens) - first))
        return found[0] if len(found) == 1 else np.concatenate([np.empty(0, self.dtype), *found])

    def __array__(self, dtype: np.dtype[Any] | None = None, copy: bool | None = None) -> Any:
        return self[:].astype(dtype or self.dtype, copy=False)

    def _parts_from(self, start: int) -> Iterator[tuple[Part, int]]:
        first = bisect.bisect_right(self._ends, start)
        return zip(self._parts[first:], self._ends[first:], strict=True)


def _read_part(part: Part, first: int, n_tokens: int) -> NDArray[Any]:
    assert part.offset is not None, "shards are no HDF5 files"
    try:
        with part.path.open("rb", buffering=0) as file:
            _check_same(part, identity(part.path))
            offset = part.offset + first * part.dtype.itemsize
            return np.fromfile(file, part.dtype, n_tokens, offset=offset)
    except OSError as error:
        raise GptfastError(f"{part.path}: cannot be read ({error.strerror})") from error


def _check_same(part: Part, found: tuple[int, ...]) -> None:
    if found != part.identity:
        raise GptfastError(
            f"{part.path}: has been replaced since this run opened it: start the run again"
        )


def _sampled_sha256(tokens: Tokens) -> str:
    """SHA-256 of up to 64 parts spread evenly over the ids."""
    n_tokens = len(tokens)
    digest = hashlib.sha256()
    for at in np.unique(np.linspace(0, max(n_tokens - _SAMPLE, 0), 64, dtype=np.int64)).tolist():
        digest.update(tokens[at : at + _SAMPLE].tobytes())
    return digest.hexdigest()
