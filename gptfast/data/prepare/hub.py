"""Data sets of the Hugging Face hub, or a folder of one: `hf:NAME[@REVISION][:CONFIG[:SPLIT]]`.

`prepare` reads a source twice, and a stream from far away takes hours each time. So its rows are
kept as they come: JSON lines in zstd frames, and after each frame the place in the stream, so that
one that broke off or was killed goes on there. Of a data set of the hub that file stays in the
cache, by the commit that was current; a folder of this machine is quick to read again, and its
rows lie in a file without a name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from gptfast.data.prepare.fetch import TELL_S, only_one
from gptfast.errors import GptfastError, Refused

PREFIX = "hf:"
KEY = "text"
"""Of the text in the rows that are kept."""
_FRAME = 1 << 22
"""Bytes of rows in a zstd frame, at least: what a kill can cost."""
_ANSWER_S = 20.0


@dataclass(frozen=True)
class DataSet:
    """A split of a data set."""

    label: str
    """As the command line has it."""
    name: str
    """On the hub, or a folder here."""
    revision: str | None
    config: str | None
    split: str

    @property
    def is_local(self) -> bool:
        return Path(self.name).is_dir()


def parse(source: str) -> DataSet:
    """What a source that begins with `hf:` means.

    Raises:
        Refused: it names nothing.
    """
    rest = source.removeprefix(PREFIX)
    if rest and Path(rest).is_dir():  # whatever it is called
        return DataSet(source, rest, None, None, "train")
    name, *more = rest.split(":")
    name, _, revision = name.partition("@")
    if not name or len(more) > 2:
        raise Refused(
            f"{source}: names no data set: write hf:NAME[@REVISION][:CONFIG[:SPLIT]], as in "
            "hf:HuggingFaceFW/fineweb-edu:sample-10BT:train"
        )
    config, split = [*more, "", ""][:2]
    return DataSet(source, name, revision or None, config or None, split or "train")


def keep_here(data_set: DataSet, file: IO[bytes], *, column: str, max_chars: int | None) -> None:
    """Write the rows of a data set of this machine to a file.

    Args:
        column: which has the text.
        max_chars: how much text is enough.

    Raises:
        Refused: no such data set, split or column; the extra is not installed.
        GptfastError: it cannot be read.
        OSError: the file cannot be written.
    """
    for frame in _frames(_Stream(data_set, column), 0, max_chars):
        file.write(frame.packed)


def keep_in_cache(
    data_set: DataSet,
    cache_dir: Path,
    *,
    column: str,
    max_chars: int | None,
    note: Callable[[str], None],
) -> tuple[Path, str]:
    """Fetch the rows of a data set of the hub, unless they are there: the file, and the commit.

    Raises:
        Refused: no such data set, revision, split or column; the extra is not installed.
        GptfastError: the hub cannot be reached, the file cannot be written.
    """
    commit = _commit(data_set)
    fixed = dataclasses.replace(data_set, revision=commit)
    wanted = json.dumps([fixed.name, commit, fixed.config, fixed.split, column, max_chars])
    name = f"{fixed.name.replace('/', '--')}-{hashlib.sha256(wanted.encode()).hexdigest()[:12]}"
    path = cache_dir / "hub" / f"{name}.jsonl.zst"
    if path.exists():
        return path, commit
    with only_one(path):
        if not path.exists():
            try:
                _fetch(_Stream(fixed, column), path, max_chars=max_chars, note=note)
            except OSError as error:
                raise GptfastError(
                    f"{path}: cannot be written ({error.strerror}): free space, or set "
                    "GPTFAST_CACHE to a folder elsewhere"
                ) from error
    return path, commit


def _fetch(
    stream: _Stream, path: Path, *, max_chars: int | None, note: Callable[[str], None]
) -> None:
    """Get what an earlier call did not, whole frames at a time."""
    partial, kept = (path.with_name(f"{path.name}{end}") for end in (".partial", ".place.json"))
    place: dict[str, Any] = {"n_bytes": 0, "n_chars": 0, "stream": None}
    note(f"fetching {stream.label}")
    if kept.exists():
        place = json.loads(kept.read_text())
        stream.go_to(place["stream"])
        note(f"{stream.label}: {place['n_chars']:,} characters of it are here already")
    told = time.monotonic()
    with partial.open("ab") as file:
        file.truncate(place["n_bytes"])
        for frame in _frames(stream, place["n_chars"], max_chars):
            file.write(frame.packed)
            file.flush()
            os.fsync(file.fileno())
            place = {"n_bytes": file.tell(), "n_chars": frame.n_chars, "stream": frame.place}
            beside = kept.with_suffix(".new")
            beside.write_text(json.dumps(place))
            beside.replace(kept)
            if time.monotonic() - told >= TELL_S:
                told = time.monotonic()
                note(f"{stream.label}: {frame.n_chars:,} characters")
    partial.replace(path)
    kept.unlink(missing_ok=True)


@dataclass(frozen=True)
class _Frame:
    """Some rows."""

    packed: bytes
    n_chars: int
    """Of text, up to the end of this frame."""
    place: Any
    """Behind its last row."""


def _frames(stream: _Stream, n_chars: int, max_chars: int | None) -> Iterator[_Frame]:
    """`n_chars`: how much text there is already."""
    import zstandard

    packer = zstandard.ZstdCompressor()
    rows: list[bytes] = []
    n_waiting = 0
    if max_chars is not None and n_chars >= max_chars:
        return
    for value in stream:
        # What is no text is refused with the number of its row where the rows are read.
        text: object = value if value is None or isinstance(value, str) else []
        rows.append(json.dumps({KEY: text}).encode() + b"\n")
        n_waiting += len(rows[-1])
        n_chars += len(value) if isinstance(value, str) else 0
        if max_chars is not None and n_chars >= max_chars:
            break
        if n_waiting >= _FRAME:
            yield _Frame(packer.compress(b"".join(rows)), n_chars, stream.place())
            rows, n_waiting = [], 0
    if rows:
        yield _Frame(packer.compress(b"".join(rows)), n_chars, stream.place())


class _Stream:
    """The texts of a data set, in its order."""

    def __init__(self, data_set: DataSet, column: str) -> None:
        self.label = data_set.label
        self._column = column
        with _plain_errors(self.label):
            rows = _load(data_set)
            names = rows.column_names
        if names is None:  # it looks at the first row for them
            with _plain_errors(self.label):
                names = list(next(iter(rows), {column: None}))
        if column not in names:
            raise Refused(
                f"{self.label}: has no column {column}, it has {', '.join(names)}: name the "
                "column of the text with --text-key"
            )
        self._rows = rows.select_columns([column])

    def place(self) -> Any:
        """Where it stands, as JSON has it."""
        return self._rows.state_dict()

    def go_to(self, place: Any) -> None:
        self._rows.load_state_dict(place)

    def __iter__(self) -> Iterator[Any]:
        with _plain_errors(self.label):
            for row in self._rows:
                yield row[self._column]


def _load(data_set: DataSet) -> Any:
    import datasets

    return datasets.load_dataset(
        str(Path(data_set.name).absolute()) if data_set.is_local else data_set.name,
        data_set.config,
        split=data_set.split,
        revision=data_set.revision,
        streaming=True,
    )


def _commit(data_set: DataSet) -> str:
    """The commit that a revision means now."""
    revision = data_set.revision
    if revision is not None and re.fullmatch("[0-9a-f]{40}", revision):
        return revision
    with _plain_errors(data_set.label):
        import huggingface_hub

        info = huggingface_hub.HfApi().dataset_info(
            data_set.name, revision=revision, timeout=_ANSWER_S
        )
    assert info.sha is not None, "the hub keeps data sets in git"
    return info.sha


@contextlib.contextmanager
def _plain_errors(label: str) -> Iterator[None]:
    """What the libraries say, in one line, and once."""
    try:
        import datasets
        import zstandard  # noqa: F401  # the rows are kept with it
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
    except ImportError as error:
        raise Refused(
            f"{label}: is a data set, which needs the package {error.name}, and it is not "
            "installed: pip install 'gptfast[hf]'"
        ) from None
    loggers = datasets.utils.logging
    verbosity, had_bars = loggers.get_verbosity(), datasets.is_progress_bar_enabled()
    loggers.set_verbosity(loggers.CRITICAL)
    datasets.disable_progress_bars()
    try:
        yield
    except (
        ValueError,  # no such configuration or split
        FileNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    ) as error:
        raise Refused(
            f"{label}: cannot be read ({_one_line(error)}): check its name and files"
        ) from error
    except Exception as error:  # every format and transport has errors of its own
        raise GptfastError(
            f"{label}: cannot be read ({_one_line(error)}): check the network and the name; the "
            "same command goes on where it stopped"
        ) from error
    finally:
        loggers.set_verbosity(verbosity)
        if had_bars:
            datasets.enable_progress_bars()


def _one_line(error: Exception) -> str:
    return textwrap.shorten(f"{type(error).__name__}: {error}", 200, placeholder=" ...")
