"""What `gptfast prepare` can be given: a known name, files, folders, globs, standard input.

`find` turns them into the sources of a corpus, in an order that is the same on every machine.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from gptfast.data import shakespeare
from gptfast.data.foreign import is_token_file
from gptfast.data.formats import FORMATS, bare_name
from gptfast.data.packing import Input
from gptfast.errors import GptfastError, Refused

NAMES = ("shakespeare",)
"""Corpora that are known by name."""
STANDARD_INPUT = "-"


@dataclass(frozen=True)
class Source:
    """A file that can be read more than once."""

    label: str
    """As messages and the data file call it: what was typed, not where it was found."""
    place: Path | int
    """Its path; a number: an open file without a name."""

    @property
    def identity(self) -> Path | int:
        """The same for all names of a file."""
        return self.place.resolve() if isinstance(self.place, Path) else self.place

    @contextlib.contextmanager
    def open(self) -> Iterator[Input]:
        """The file, for reading.

        Raises:
            GptfastError: it cannot be read, now or while it is open.
        """
        try:
            with open(self.place, "rb", closefd=isinstance(self.place, Path)) as file:
                yield Input(self.label, file)
        except OSError as error:
            raise GptfastError(f"{self.label}: cannot be read ({error.strerror})") from error


@dataclass(frozen=True)
class Corpus:
    """Sources in order."""

    description: str
    sources: tuple[Source, ...]


@contextlib.contextmanager
def find(
    names: Sequence[str | Path],
    *,
    pattern: str | None,
    cache_dir: Path | None,
    scratch: Path,
    note: Callable[[str], None],
) -> Iterator[Corpus]:
    """What `names` stand for; a file found twice counts once.

    Args:
        names: each a known name, a file, a folder (its files that are known by their ending, those
            of its folders too), a glob, or "-" for standard input. A known name wins over a file
            of that name.
        pattern: which files of a folder to take instead, whatever their ending; `**` is known.
        cache_dir: where downloads are kept; only a known name needs it.
        scratch: folder on whose disk standard input is kept meanwhile, in a file without a name.
        note: told in one line what the user should know.

    Raises:
        Refused: nothing there.
        GptfastError: a named corpus cannot be had, standard input cannot be kept.
    """
    if pattern is not None and not any(Path(name).is_dir() for name in names):
        raise Refused(f"--glob {pattern}: it picks files of a folder, and no folder is named")
    descriptions: list[str] = []
    sources: dict[Path | int, Source] = {}
    with contextlib.ExitStack() as stack:
        for name in dict.fromkeys(map(str, names)):
            if name in NAMES:
                edition = _edition(name, cache_dir=cache_dir, note=note)
                description, found = edition.description, [Source(name, edition.path)]
            elif name == STANDARD_INPUT:
                source = stack.enter_context(_standard_input(scratch))
                description, found = source.label, [source]
            else:
                description, found = name, list(_files(name, pattern))
            descriptions.append(description)
            for source in found:
                sources.setdefault(source.identity, source)
        yield Corpus(", ".join(descriptions), tuple(sources.values()))


def short_name(source: str) -> str:
    """The name of a source for the data file: a file's without its endings, a folder's."""
    if source == STANDARD_INPUT:
        return "stdin"
    path = Path(source)
    if glob.has_magic(source) and not path.exists():
        while glob.has_magic(str(path)):
            path = path.parent
    path = path.resolve()
    return path.name if path.is_dir() else bare_name(path.name).stem


def _edition(
    name: str, *, cache_dir: Path | None, note: Callable[[str], None]
) -> shakespeare.Edition:
    assert cache_dir is not None, "a corpus known by name is kept in the cache"
    if Path(name).exists():
        note(f"{name} is the corpus of that name: write ./{name} for the file here")
    return shakespeare.obtain(cache_dir=cache_dir, note=note)


@contextlib.contextmanager
def _standard_input(scratch: Path) -> Iterator[Source]:
    """What comes in, kept: text is read twice."""
    with contextlib.ExitStack() as stack:
        try:
            copy = tempfile.TemporaryFile(dir=scratch)  # noqa: SIM115  # closed by the stack
            stack.callback(_close, copy)
            with os.fdopen(0, "rb", closefd=False) as stdin:
                shutil.copyfileobj(stdin, copy)
            copy.flush()
        except OSError as error:
            raise GptfastError(
                f"standard input: cannot be kept in {scratch} ({error.strerror}): free space, or "
                "choose another --out"
            ) from error
        yield Source("standard input", copy.fileno())


def _close(file: IO[bytes]) -> None:
    # What a full disk did not take is tried again here, and must not hide the first error.
    with contextlib.suppress(OSError):
        file.close()


def _files(source: str, pattern: str | None) -> Iterator[Source]:
    path = Path(source)
    if path.is_dir():
        if pattern is None:
            _check_no_tokens_in(path, source)
        found = sorted(_texts_in(path, pattern), key=lambda p: p.relative_to(path).parts)
        if not found:
            raise Refused(f"{source}: {_nothing_in_a_folder(pattern)}")
        yield from (Source(str(file), file) for file in found)
    elif path.exists():
        yield _named(path, source)
    elif glob.has_magic(source):
        # Path.glob takes no absolute pattern.
        matches = sorted(map(Path, glob.glob(source, recursive=True)))  # noqa: PTH207
        files = [match for match in matches if not match.is_dir()]
        if not files:
            raise Refused(f"{source}: no file matches: check the pattern")
        yield from (_named(file, str(file)) for file in files)
    else:
        raise Refused(
            f"{source}: no such file or folder ({path.absolute()}), and not a known name: known: "
            f"{', '.join(NAMES)}"
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
    try:
        for path in folder.rglob("*" if pattern is None else pattern):
            hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
            known = pattern is not None or bare_name(path.name).suffix.lower() in FORMATS
            if known and not hidden and path.is_file():
                yield path
    except (ValueError, NotImplementedError) as error:
        raise Refused(
            f"--glob {pattern}: is no pattern for files of a folder ({error}): use one like *.py "
            "or src/**/*.py"
        ) from None


def _nothing_in_a_folder(pattern: str | None) -> str:
    if pattern is not None:
        return f"no file in this folder or below it matches --glob {pattern}: check the pattern"
    return (
        f"no file in this folder or below it ends with {', '.join(FORMATS)} (or these with .gz or "
        ".zst): pick others with --glob, as in --glob '*.py'"
    )
