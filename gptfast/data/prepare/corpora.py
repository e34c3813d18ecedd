"""Corpora that are known by name: a table of addresses, which `fetch` keeps in the cache.

The files are those of a commit, so that a name stands for the same text everywhere. Each is
fetched when it is read, and stays: a corpus of which only the beginning is wanted costs no more.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gptfast.data.prepare.fetch import Partial, check_room, fetch, size_of
from gptfast.files import standing_folder

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SHAKESPEARE = "shakespeare"
"""Tiny Shakespeare, which has several places to come from: a module of its own obtains it."""

TABLE = Path(__file__).with_name("corpora.toml")


@dataclass(frozen=True)
class KnownCorpus:
    """Files at an address."""

    name: str
    title: str
    page: str
    """Where people read about it, its licence too."""
    folder: str
    """Address of the folder that has the files."""
    files: tuple[str, ...]
    sha256: Mapping[str, str] = field(default_factory=dict)
    """Of the files where it is known."""

    def place(self, file: str, cache_dir: Path) -> Path:
        """Where a file is kept: another one for another address."""
        commit = hashlib.sha256(self.folder.encode()).hexdigest()[:12]
        return cache_dir / "corpora" / f"{self.name}-{commit}" / file

    def obtain(self, file: str, *, cache_dir: Path, note: Callable[[str], None]) -> None:
        """Have a file in its place.

        Raises:
            GptfastError: it cannot be fetched.
        """
        place = self.place(file, cache_dir)
        fetch(f"{self.folder}/{file}", place, sha256=self.sha256.get(file), note=note)

    def check_room(self, cache_dir: Path) -> None:
        """
        Raises:
            GptfastError: what is still to be fetched of all files does not fit on the disk.
        """
        missing = [file for file in self.files if not self.place(file, cache_dir).exists()]
        if missing:
            n_bytes = sum(
                size_of(f"{self.folder}/{file}") - Partial(self.place(file, cache_dir)).n_bytes
                for file in missing
            )
            standing = standing_folder(self.place(self.files[0], cache_dir))
            check_room(standing, n_bytes, what=self.name)


def known() -> dict[str, KnownCorpus]:
    """The table, by name."""
    entries = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    return {
        name: KnownCorpus(name, **{**entry, "files": tuple(entry["files"])})
        for name, entry in entries.items()
    }


def known_names() -> tuple[str, ...]:
    """Corpora that are known by name."""
    return (SHAKESPEARE, *known())
