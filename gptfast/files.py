"""What is written to a disk: whole or not at all, certain to be there, and room for it."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from gptfast.errors import GptfastError, Refused


def replace_folder(new: Path, folder: Path) -> None:
    """Rename `new` to `folder`; one that stands there already is moved aside first."""
    aside = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    if folder.exists():
        folder.rename(aside)
    new.rename(folder)
    sync(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)


def replace_text(path: Path, text: str) -> None:
    """Give `path` a new content: the old one or the whole new one is there at any moment."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        sync(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def stands(path: Path) -> bool:
    """Whether there is such a file or folder; from Python 3.14 on `Path.exists` also says no where
    it may not look.

    Raises:
        Refused: a folder above may not be looked into.
    """
    try:
        path.stat()
    except PermissionError as error:
        raise Refused(
            f"{path}: cannot be read ({error.strerror}): change its rights or those of the folders "
            "above it"
        ) from error
    except (OSError, ValueError):
        return False
    return True


def sync(path: Path) -> None:
    """Have the system write a file, or on POSIX a folder's entries, to the disk."""
    if path.is_dir() and os.name == "nt":  # Windows cannot open a folder
        return
    descriptor = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def standing_folder(path: Path) -> Path:
    """The nearest folder above `path` that exists already: its disk is the one that is written."""
    return next(folder for folder in path.absolute().parents if folder.exists())


def check_room(
    target: Path,
    n_bytes: int,
    *,
    at_most: int = 0,
    note: Callable[[str], None] = lambda line: None,
) -> None:
    """Compare the room on the disk of `target` with what is needed.

    Args:
        n_bytes: that are needed in any case.
        at_most: that may be needed.
        note: told if these are not there.

    Raises:
        Refused: not even `n_bytes` are there.
    """
    standing = standing_folder(target)
    free = shutil.disk_usage(standing).free
    if free < n_bytes:
        most = f", perhaps {at_most:,}" if at_most else ""
        raise Refused(
            f"{target}: needs {n_bytes:,} bytes{most}, and {standing} has {free:,} left: free "
            "space or choose another --out"
        )
    if free < at_most:
        note(
            f"{target}: may need {at_most:,} bytes, and {standing} has {free:,} left: should it "
            "fill up, free space and go on with --resume"
        )


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """A full disk and its like, in one line."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # h5py: RuntimeError where closing fails
        reason = getattr(error, "strerror", None) or str(error)
        raise GptfastError(
            f"{path}: cannot be written ({reason}): free space or choose another --out"
        ) from error
