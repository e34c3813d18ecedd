"""What `gptfast prepare` can be given: a known name, text files, folders, globs.

`find` turns them into the documents of a corpus, in an order that is the same on every machine.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gptfast.data import shakespeare
from gptfast.errors import Refused

NAMES = ("shakespeare",)
"""Corpora that are known by name."""
TEXT_SUFFIXES = (".txt", ".md")
"""What is read out of a folder. A file that is named itself may have any other."""
_OTHER_FORMATS = (".gz", ".zst", ".bz2", ".xz", ".zip", ".jsonl", ".ndjson", ".parquet", ".h5")


@dataclass(frozen=True)
class Document:
    """A text file."""

    path: Path
    label: str
    """As messages and the data file call it: what was typed, not where it was found."""


@dataclass(frozen=True)
class Corpus:
    """Documents in order."""

    description: str
    documents: tuple[Document, ...]


def find(
    sources: Sequence[str | Path], *, cache_dir: Path | None, note: Callable[[str], None]
) -> Corpus:
    """The documents that `sources` stand for; one found twice counts once.

    Args:
        sources: each a known name, a file, a folder (its .txt and .md files, those of its
            folders too) or a glob. A known name wins over a file of that name.
        cache_dir: where downloads are kept; only a known name needs it.
        note: told in one line what the user should know.

    Raises:
        Refused: nothing there, or not plain text.
        GptfastError: a named corpus cannot be had.
    """
    descriptions: list[str] = []
    documents: dict[Path, Document] = {}
    for source in map(str, sources):
        if source in NAMES:
            assert cache_dir is not None, "a corpus known by name is kept in the cache"
            if Path(source).exists():
                note(f"{source} is the corpus of that name: write ./{source} for the file here")
            edition = shakespeare.obtain(cache_dir=cache_dir, note=note)
            found = [Document(edition.path, source)]
            descriptions.append(edition.description)
        else:
            found = list(_files(source))
            descriptions.append(source)
        for document in found:
            documents.setdefault(document.path.resolve(), document)
    return Corpus(", ".join(descriptions), tuple(documents.values()))


def short_name(source: str) -> str:
    """The name of a source for the data file: a file's without its ending, a folder's."""
    path = Path(source)
    if glob.has_magic(source) and not path.exists():
        while glob.has_magic(str(path)):
            path = path.parent
    path = path.resolve()
    return path.name if path.is_dir() else path.stem


def _files(source: str) -> Iterator[Document]:
    path = Path(source)
    if path.is_dir():
        found = sorted(_texts_in(path), key=lambda p: p.relative_to(path).parts)
        if not found:
            raise Refused(
                f"{source}: no {' or '.join(TEXT_SUFFIXES)} file in this folder or below it: name "
                "the files themselves, as in folder/*.text"
            )
        yield from (Document(file, str(file)) for file in found)
    elif path.exists():
        _check_plain(path)
        yield Document(path, source)
    elif glob.has_magic(source):
        # Path.glob takes no absolute pattern.
        matches = sorted(map(Path, glob.glob(source, recursive=True)))  # noqa: PTH207
        files = [match for match in matches if not match.is_dir()]
        if not files:
            raise Refused(f"{source}: no file matches: check the pattern")
        for file in files:
            _check_plain(file)
            yield Document(file, str(file))
    else:
        raise Refused(
            f"{source}: no such file or folder ({path.absolute()}), and not a known name: known: "
            f"{', '.join(NAMES)}"
        )


def _texts_in(folder: Path) -> Iterator[Path]:
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            if Path(name).suffix.lower() in TEXT_SUFFIXES and not name.startswith("."):
                yield Path(root, name)


def _check_plain(path: Path) -> None:
    if not path.is_file():
        raise Refused(f"{path}: is neither a file nor a folder: save the text as a file")
    if path.suffix.lower() in _OTHER_FORMATS:
        raise Refused(
            f"{path}: {path.suffix} files are not read, only plain text: unpack or convert it"
        )
