"""How far a `prepare` has come, so that another can go on where it was killed.

Beside the target lies the unfinished file, `.NAME.PID.partial`, and from its first few seconds on
the progress file, `.NAME.PID.journal`: lines of JSON, the first with the job, each other a point up
to which all ids are safely on the disk. Both names carry the process, so that the leavings of a
dead one are known.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import psutil

from gptfast import __version__
from gptfast.data.layout import SPLITS
from gptfast.files import sync

if TYPE_CHECKING:
    from gptfast.data.prepare.corpus import Survey
    from gptfast.data.prepare.plan import Plan
    from gptfast.tokenizers.tokenizer import Tokenizer

Job = Mapping[str, Any]
"""All that the ids of a data file and their order depend on, by name, as JSON has it."""

_ENCODERS = ("tiktoken", "gigatoken", "tokenizers")
_EVERY_S = 5.0
"""Between two points: what a kill can cost."""
_CLOCKS_S = 2.0
"""That the clocks of processes and of files may differ by."""
_PARTIAL = ".partial"
_PROGRESS = ".journal"


def job_of(
    surveys: Sequence[Survey],
    plan: Plan,
    *,
    tokenizer: Tokenizer,
    options: Mapping[str, object],
) -> Job:
    """What to compare when a `prepare` is gone on with.

    Args:
        options: those of the command, as they are typed; what else they decide is in the plan.
    """
    definition = json.dumps(tokenizer.definition()).encode()
    splits = hashlib.sha256()
    for part in plan.parts:
        splits.update(repr((part.train_end, part.end, part.n_chars)).encode())
        splits.update(part.copies.tobytes())
    job = {
        "gptfast": __version__,
        **{package: _version(package) for package in _ENCODERS},
        **options,
        "--tokenizer": f"{tokenizer.name} {hashlib.sha256(definition).hexdigest()}",
        **{f"SHA-256 of {s.source.label}": s.sha256 for s in surveys},
        "SHA-256 of the splits": splits.hexdigest(),
    }
    return cast("Job", json.loads(json.dumps(job)))  # tuples become lists, as in a progress file


def difference(before: Job, now: Job) -> str | None:
    """What differs between two jobs, in words; None: nothing."""
    for name in [*before, *now]:
        if before.get(name) != now.get(name):
            was, is_ = (job.get(name, "nothing") for job in (before, now))
            return f"{name} was {was} and is {is_}"
    return None


@dataclass
class SplitPoint:
    """What is on the disk of a split."""

    n_tokens: int = 0
    n_bytes: int = 0
    """UTF-8 bytes of the text that the ids stand for."""
    sha256: str = ""
    """Of the ids as stored."""
    documents: array[int] = field(default_factory=lambda: array("q"))
    """First token of each document; in a line of the file only those since the line before."""


@dataclass
class Point:
    """A place in the stream of chunks, and what came of those before it."""

    n_chunks: int
    splits: dict[str, SplitPoint]


@dataclass(frozen=True)
class Unfinished:
    """What a dead `prepare` left, to go on with."""

    partial: Path
    progress: Path
    job: Job
    point: Point
    n_whole_bytes: int
    """Length of the progress file's whole lines: a power cut may have cut the last one."""

    def take_over(self, target: Path) -> None:
        """Have it carry the name of this process."""
        os.truncate(self.progress, self.n_whole_bytes)
        for path, name in ((self.partial, partial_path), (self.progress, progress_path)):
            path.touch()  # ours from now on, though its next ids may take a while
            path.rename(name(target))

    @property
    def n_tokens(self) -> int:
        return sum(split.n_tokens for split in self.point.splits.values())


def partial_path(target: Path) -> Path:
    """Where this process makes the file that will be `target`."""
    return target.with_name(f".{target.name}.{os.getpid()}{_PARTIAL}")


def progress_path(target: Path) -> Path:
    return partial_path(target).with_suffix(_PROGRESS)


def find_unfinished(target: Path) -> Unfinished | None:
    """The newest file for `target` that a dead process left and that can be gone on with."""
    files = [path for path in _leavings(target) if path.suffix == _PROGRESS]
    for progress in sorted(files, key=lambda path: path.stat().st_mtime_ns, reverse=True):
        partial = progress.with_suffix(_PARTIAL)
        lines = list(_whole_lines(progress))
        if len(lines) > 1 and partial.exists():
            job, *said = map(json.loads, lines)
            return Unfinished(partial, progress, job, _last_point(said), sum(map(len, lines)))
    return None


def at_work(target: Path) -> int | None:
    """The number of another process that makes `target`; None: there is none."""
    others = (pid for pid, path in _all_of(target) if pid != os.getpid() and _writes(pid, path))
    return next(others, None)


def sweep(target: Path, *, but: Unfinished | None = None) -> None:
    """Remove what dead processes left of `target`."""
    kept = () if but is None else (but.partial, but.progress)
    for path in _leavings(target):
        if path not in kept:
            path.unlink(missing_ok=True)


class ProgressFile:
    """Keeps points, from time to time and on a thread: a disk takes its time to be sure."""

    def __init__(self, path: Path, job: Callable[[], Job], *, has_points: bool) -> None:
        self.path = path
        self.has_points = has_points
        """Whether there is something to go on from."""
        self._job = job
        self._thread = ThreadPoolExecutor(1)
        self._writing: Future[None] | None = None
        self._last = time.monotonic()

    def is_due(self) -> bool:
        """Whether it is time for the next point, and the last one is kept."""
        if self._writing is not None:
            if not self._writing.done():
                return False
            self.settle()
        return time.monotonic() - self._last >= _EVERY_S

    def keep(self, point: Point, *, file: int) -> None:
        """Have the open `file` and then the point on the disk, soon."""
        self._last = time.monotonic()
        self._writing = self._thread.submit(self._keep, point, file)

    def settle(self) -> None:
        """Wait for the point that is being kept."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def close(self) -> None:
        self._thread.shutdown()

    def _keep(self, point: Point, file: int) -> None:
        os.fsync(file)
        begins = not self.path.exists()
        with self.path.open("ab") as progress:
            if begins:
                progress.write(_line(self._job()))
            progress.write(_line(_spelled(point)))
            progress.flush()
            os.fsync(progress.fileno())
        if begins:
            sync(self.path.parent)
        self.has_points = True


def _line(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _spelled(point: Point) -> dict[str, Any]:
    return {
        "chunks": point.n_chunks,
        **{
            name: [split.n_tokens, split.n_bytes, split.sha256, split.documents.tolist()]
            for name, split in point.splits.items()
        },
    }


def _whole_lines(progress: Path) -> Iterator[bytes]:
    with progress.open("rb") as lines:
        for line in lines:
            if not line.endswith(b"\n"):
                return
            yield line


def _last_point(said: Sequence[dict[str, Any]]) -> Point:
    splits = {name: SplitPoint() for name in SPLITS}
    for line in said:
        for name, split in splits.items():
            split.n_tokens, split.n_bytes, split.sha256, new = line[name]
            split.documents.extend(new)
    return Point(said[-1]["chunks"], splits)


def _leavings(target: Path) -> Iterator[Path]:
    return (path for pid, path in _all_of(target) if pid == os.getpid() or not _writes(pid, path))


def _all_of(target: Path) -> Iterator[tuple[int, Path]]:
    for suffix in (_PARTIAL, _PROGRESS):
        for path in target.parent.glob(f".{glob.escape(target.name)}.*{suffix}"):
            pid = path.name.split(".")[-2]
            if pid.isdigit():
                yield int(pid), path


def _writes(pid: int, path: Path) -> bool:
    """Whether the process still lives: after a reboot, and in a container, another may have its
    number, which began after the file was last written.
    """
    try:
        return bool(psutil.Process(pid).create_time() < path.stat().st_mtime + _CLOCKS_S)
    except (psutil.NoSuchProcess, FileNotFoundError):
        return False


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
