"""What `gptfast prepare` can be given: a known name, files, folders, globs, standard input, hf:.

`find` turns them into the sources of a corpus, in an order that is the same on every machine.
"""

from __future__ import annotations

import contextlib
import glob
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from gptfast.data.foreign import is_token_file
from gptfast.data.prepare import corpora, hub, shakespeare
from gptfast.data.prepare.corpora import SHAKESPEARE
from gptfast.data.prepare.formats import FORMATS, Reading, bare_name, require_parquet
from gptfast.data.prepare.packing import Input
from gptfast.errors import GptfastError, Refused
from gptfast.files import stands

STANDARD_INPUT = "-"


def _nothing() -> None:
    """What is already there."""


@dataclass(frozen=True)
class Source:
    """A file that can be read more than once."""

    label: str
    """As messages and the data file call it: what was typed, not where it was found."""
    place: Path | int
    """Its path; a number: an open file without a name."""
    ending: str | None = None
    """Of its format; None: its name tells."""
    text_key: str | None = None
    """Where the text of a row is, if that is known."""
    obtain: Callable[[], None] = _nothing
    """Has the file in its place."""

    @property
    def identity(self) -> Path | int:
        """The same for all names of a file."""
        return self.place.resolve() if isinstance(self.place, Path) else self.place

    @contextlib.contextmanager
    def open(self) -> Iterator[Input]:
        """The file, for reading.

        Raises:
            Refused: it may not be read.
            GptfastError: it cannot be had or read, now or while it is open.
        """
        self.obtain()
        try:
            with open(self.place, "rb", closefd=isinstance(self.place, Path)) as file:
                yield Input(self.label, file, ending=self.ending, text_key=self.text_key)
        except PermissionError as error:
            raise Refused(_not_allowed(self.label, error)) from error
        except OSError as error:
            raise GptfastError(f"{self.label}: cannot be read ({error.strerror})") from error


@dataclass(frozen=True)
class Found:
    """What one name stands for."""

    name: str
    description: str
    sources: tuple[Source, ...]
    n_elsewhere: int = 0
    """Files that an earlier name stands for too."""


@dataclass(frozen=True)
class Corpus:
    """Sources in order."""

    found: tuple[Found, ...]
    """A file found by two names is with the first."""

    @property
    def description(self) -> str:
        return ", ".join(found.description for found in self.found)

    @property
    def sources(self) -> tuple[Source, ...]:
        return tuple(source for found in self.found for source in found.sources)


@dataclass(frozen=True)
class Surroundings:
    """Where things are kept, and who is told."""

    cache_dir: Path | None
    """Of downloads; only a corpus that is not on this machine needs it."""
    scratch: Path
    """Folder on whose disk a stream is kept meanwhile, in a file without a name."""
    note: Callable[[str], None]
    """Told in one line what the user should know."""
    tell: Callable[[str], None]
    """Told in one line what is fetched."""


@contextlib.contextmanager
def find(
    names: Sequence[str | Path],
    around: Surroundings,
    *,
    pattern: str | None,
    reading: Reading,
    limits: Sequence[float],
) -> Iterator[Corpus]:
    """What `names` stand for; a file found twice counts once.

    Args:
        names: each a known name, a file, a folder (its files that are known by their ending, those
            of its folders too), a glob, "-" for standard input, or a data set of `hub`. A known
            name wins over a file of that name.
        pattern: which files of a folder to take instead, whatever their ending; `**` is known.
        limits: how many characters of each name will be read at most; infinite: all.

    Raises:
        Refused: nothing there.
        GptfastError: a corpus cannot be had, a stream cannot be kept.
    """
    if pattern is not None and not any(Path(name).is_dir() for name in names):
        raise Refused(f"--glob {pattern}: it picks files of a folder, and no folder is named")
    table = corpora.known()
    with contextlib.ExitStack() as stack:
        all_found: list[Found] = []
        taken: set[Path | int] = set()
        for name, limit in dict(zip(map(str, names), limits, strict=True)).items():
            max_chars = None if math.isinf(limit) else math.ceil(limit)
            if name == SHAKESPEARE or name in table:
                _note_a_file_called(name, around.note)
            if name == SHAKESPEARE:
                found = _shakespeare(around)
            elif name in table:
                found = _known_corpus(table[name], around, whole=max_chars is None)
            elif name == STANDARD_INPUT:
                found = stack.enter_context(_standard_input(around, reading))
            elif name.startswith(hub.PREFIX):
                found = stack.enter_context(_data_set(name, around, reading.text_key, max_chars))
            else:
                found = Found(name, name, tuple(_files(name, pattern, known=[SHAKESPEARE, *table])))
            sources = {source.identity: source for source in found.sources}
            new = [source for identity, source in sources.items() if identity not in taken]
            taken.update(sources)
            n_elsewhere = len(sources) - len(new)
            all_found.append(Found(name, found.description, tuple(new), n_elsewhere))
        yield Corpus(tuple(all_found))


def short_name(source: str) -> str:
    """The name of a source for the data file: a file's without its endings, a folder's."""
    if source == STANDARD_INPUT:
        return "stdin"
    if source.startswith(hub.PREFIX):
        return Path(hub.parse(source).name).name
    path = Path(source)
    if glob.has_magic(source) and not path.exists():
        while glob.has_magic(str(path)):
            path = path.parent
    path = path.resolve()
    return path.name if path.is_dir() else bare_name(path.name).stem


def _note_a_file_called(name: str, note: Callable[[str], None]) -> None:
    if Path(name).exists():
        note(f"{name} is the corpus of that name: write ./{name} for the file here")


def _shakespeare(around: Surroundings) -> Found:
    edition = shakespeare.obtain(cache_dir=_cache_dir(around), note=around.note)
    return Found(SHAKESPEARE, edition.description, (Source(SHAKESPEARE, edition.path),))


def _known_corpus(corpus: corpora.KnownCorpus, around: Surroundings, *, whole: bool) -> Found:
    """Its files are fetched when they are read."""
    require_parquet(corpus.name)
    cache_dir = _cache_dir(around)
    if whole:
        corpus.check_room(cache_dir)
    sources = (
        Source(
            f"{corpus.name}/{file}",
            corpus.place(file, cache_dir),
            text_key="text",
            obtain=partial(corpus.obtain, file, cache_dir=cache_dir, note=around.tell),
        )
        for file in corpus.files
    )
    return Found(corpus.name, f"{corpus.title}, {corpus.folder}", tuple(sources))


@contextlib.contextmanager
def _data_set(
    name: str, around: Surroundings, column: str, max_chars: int | None
) -> Iterator[Found]:
    data_set = hub.parse(name)
    if data_set.is_local:
        fill = partial(hub.keep_here, data_set, column=column, max_chars=max_chars)
        with _kept(name, around.scratch, fill) as copy:
            source = Source(name, copy.fileno(), ending=".jsonl", text_key=hub.KEY)
            yield Found(name, name, (source,))
    else:
        path, commit = hub.keep_in_cache(
            data_set, _cache_dir(around), column=column, max_chars=max_chars, note=around.tell
        )
        source = Source(name, path, ending=".jsonl", text_key=hub.KEY)
        yield Found(name, f"{name} at commit {commit}", (source,))


@contextlib.contextmanager
def _standard_input(around: Surroundings, reading: Reading) -> Iterator[Found]:
    label = "standard input"
    with _kept(label, around.scratch, _fill_from_standard_input) as copy:
        if reading.kind == "auto" and _begins_as_json_lines(copy):
            around.note(f"{label} begins as JSON lines do and is read as text: --format jsonl?")
        yield Found(STANDARD_INPUT, label, (Source(label, copy.fileno()),))


def _fill_from_standard_input(copy: IO[bytes]) -> None:
    with os.fdopen(0, "rb", closefd=False) as stdin:
        shutil.copyfileobj(stdin, copy)


def _begins_as_json_lines(file: IO[bytes]) -> bool:
    file.seek(0)
    try:
        return isinstance(json.loads(file.readline(1 << 20)), dict)
    except (ValueError, RecursionError):
        return False


@contextlib.contextmanager
def _kept(label: str, scratch: Path, fill: Callable[[IO[bytes]], None]) -> Iterator[IO[bytes]]:
    """A file without a name for what comes in: text is read twice."""
    with contextlib.ExitStack() as stack:
        try:
            copy = tempfile.TemporaryFile(dir=scratch)  # noqa: SIM115  # closed by the stack
            stack.callback(_close, copy)
            fill(copy)
            copy.flush()
        except OSError as error:
            raise GptfastError(
                f"{label}: cannot be kept in {scratch} ({error.strerror}): free space, or "
                "choose another --out"
            ) from error
        yield copy


def _cache_dir(around: Surroundings) -> Path:
    assert around.cache_dir is not None, "what is not on this machine is kept in the cache"
    return around.cache_dir


def _close(file: IO[bytes]) -> None:
    # What a full disk did not take is tried again here, and must not hide the first error.
    with contextlib.suppress(OSError):
        file.close()


def _files(source: str, pattern: str | None, *, known: Sequence[str]) -> Iterator[Source]:
    path = Path(source)
    there = stands(path)
    if there and path.is_dir():
        if pattern is None:
            _check_no_tokens_in(path, source)
        found = sorted(_texts_in(path, pattern), key=lambda p: p.relative_to(path).parts)
        if not found:
            raise Refused(f"{source}: {_nothing_in_a_folder(pattern)}")
        yield from (Source(str(file), file) for file in found)
    elif there:
        yield _named(path, source)
    elif glob.has_magic(source):
        # Path.glob takes no absolute pattern.
        matches = sorted(map(Path, glob.glob(source, recursive=True)))  # noqa: PTH207
        files = [match for match in matches if not match.is_dir()]
        if not files:
            _check_may_list(path)
            raise Refused(f"{source}: no file matches: check the pattern")
        yield from (_named(file, str(file)) for file in files)
    else:
        raise Refused(
            f"{source}: no such file or folder ({path.absolute()}), and not a known name: known: "
            f"{', '.join(known)}"
        )


def _named(path: Path, label: str) -> Source:
    if not path.is_file():
        raise Refused(
            f"{path}: is neither a file nor a folder: save the text as a file, or send it to "
            f"{STANDARD_INPUT}"
        )
    if is_token_file(path):
        raise Refused(
            f"{label}: holds ids, not text: train on it as it is with --set data.path={label}, or "
            f"make a data file of it with gptfast data import {label} --out FILE.h5"
        )
    return Source(label, path)


def _check_no_tokens_in(folder: Path, label: str) -> None:
    for path in sorted(folder.glob("*.bin")):
        if is_token_file(path):
            raise Refused(
                f"{label}: holds files of ids ({path.name}): train on them with --set "
                f"data.path={label}; for the text beside them name its files, or use --glob"
            )


def _texts_in(folder: Path, pattern: str | None) -> Iterator[Path]:
    """Files of a folder and those below it, hidden ones left out."""
    _check_may_look(folder)
    try:
        for path in folder.rglob("*" if pattern is None else pattern):
            hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
            known = pattern is not None or bare_name(path.name).suffix.lower() in FORMATS
            if known and not hidden and path.is_file():
                yield path
    except (ValueError, NotImplementedError) as error:  # the latter: pathlib's, of absolute ones
        raise Refused(
            f"--glob {pattern}: is no pattern for files of a folder ({error}): use one like *.py "
            "or src/**/*.py"
        ) from None


def _check_may_look(folder: Path) -> None:
    """A search passes over folders that it may not look into, and says nothing."""

    def refuse(error: OSError) -> None:
        raise Refused(_not_allowed(error.filename, error)) from error

    for _, folders, _ in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]


def _check_may_list(pattern: Path) -> None:
    """A glob finds nothing in a folder that it may not list, and says nothing."""
    folder = next(path for path in (*pattern.parents, Path()) if not glob.has_magic(str(path)))
    try:
        os.scandir(folder).close()
    except PermissionError as error:
        raise Refused(_not_allowed(str(folder), error)) from error
    except OSError:
        return


def _not_allowed(label: str, error: OSError) -> str:
    return f"{label}: cannot be read ({error.strerror}): change its rights, or move it away"


def _nothing_in_a_folder(pattern: str | None) -> str:
    if pattern is not None:
        return f"no file in this folder or below it matches --glob {pattern}: check the pattern"
    return (
        f"no file in this folder or below it ends with {', '.join(FORMATS)} (or these with .gz or "
        ".zst): pick others with --glob, as in --glob '*.py'"
    )
