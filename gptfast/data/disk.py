"""The disk that a data file is made on: its room, its errors, its certainty."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from gptfast.errors import GptfastError, Refused


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
    standing = next(folder for folder in target.parents if folder.exists())
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


def sync_folder(folder: Path) -> None:
    """Have a new name itself survive a power cut, where the system can."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
