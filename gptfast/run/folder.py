"""A run's folder: `profile.toml`, `metrics.jsonl`, `checkpoints/`, pointers `latest` and `best`.

A little over 400 lines: what the folder holds, who may write there and how it is found by name are
one set of rules.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from gptfast.errors import GptfastError, Refused
from gptfast.files import replace_text, stands
from gptfast.profile import nearest
from gptfast.report import Course
from gptfast.run.checkpoint import Checkpoint

STEP_NAME = re.compile(r"step-(\d{6,})")
UNFINISHED = re.compile(r"\.(step-\d{6,})\.(tmp|old|gone)")
UNFINISHED_TEXT = re.compile(r"\.(latest|best|profile\.toml|metrics\.jsonl)\.tmp")


@dataclass(frozen=True)
class Resumable:
    """Where a run goes on.

    Attributes:
        checkpoint: the newest one that loads.
        damaged: step of each newer one, with the reason why it does not.
    """

    checkpoint: Checkpoint
    damaged: dict[int, str]


@dataclass(frozen=True)
class Summary:
    """A run in one row.

    Attributes:
        step: steps done, as far as it is known from the log or a checkpoint.
        steps: of the whole run; None: it has no checkpoint that says so.
        written: when it last wrote, ISO 8601 in local time.
        fault: why its newest checkpoint cannot be read.
    """

    name: str
    folder: str
    profile: str | None
    step: int
    steps: int | None
    val_loss: float | None
    best_val_loss: float | None
    written: str
    n_bytes: int
    fault: str | None


class Run:
    """One training's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoints = folder / "checkpoints"
        self._metrics = folder / "metrics.jsonl"

    @classmethod
    def create(cls, folder: Path, *, profile_toml: str) -> Run:
        """A new run.

        Raises:
            Refused: the folder holds a run already, is a file, or cannot be written.
        """
        run = cls(folder)
        if run.steps():
            raise Refused(
                f"{folder} holds a run already (newest checkpoint: step {run.steps()[-1]}): "
                "continue it with --resume or choose another name with --run"
            )
        try:
            run.checkpoints.mkdir(parents=True, exist_ok=True)
            run._tidy()
            replace_text(folder / "profile.toml", profile_toml)
            run._metrics.write_text("", encoding="utf-8")
        except OSError as error:
            raise Refused(
                f"{folder}: cannot keep a run here ({error.strerror}): choose another with --run"
            ) from error
        return run

    @classmethod
    def resumed(cls, folder: Path) -> Run:
        """A run to go on with; what a killed save left behind is cleared away."""
        run = cls(folder)
        if run.checkpoints.is_dir():
            run._tidy()
        if not run.steps():
            raise Refused(f"{folder}: no checkpoint to resume from: start it without --resume")
        return run

    def keep_profile(self, profile_toml: str) -> None:
        """The profile that the next session goes on with.

        Raises:
            GptfastError: the disk is full or not writable.
        """
        with _saying_how_to_go_on(self.folder / "profile.toml"):
            replace_text(self.folder / "profile.toml", profile_toml)

    def _tidy(self) -> None:
        for path in self.checkpoints.iterdir():
            match = UNFINISHED.fullmatch(path.name)
            if match is None:
                continue
            if match[2] == "old" and not path.with_name(match[1]).exists():
                path.rename(path.with_name(match[1]))  # killed between two renames
            else:
                shutil.rmtree(path)
        for path in self.folder.iterdir():
            if UNFINISHED_TEXT.fullmatch(path.name):
                path.unlink()

    @property
    def has_begun(self) -> bool:
        """Whether a run is kept here: it has its log or, where that was lost, a checkpoint."""
        return stands(self._metrics) or bool(self.steps())

    @property
    def written(self) -> float:
        """When it was last written to, in seconds since 1970."""
        return (self._metrics if self._metrics.is_file() else self.folder).stat().st_mtime

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, rising."""
        if not (stands(self.checkpoints) and self.checkpoints.is_dir()):
            return []
        matches = (STEP_NAME.fullmatch(path.name) for path in self.checkpoints.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def checkpoint_folder(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:06d}"

    def latest(self) -> Checkpoint:
        """The newest complete checkpoint."""
        return Checkpoint.open(self.checkpoint_folder(self.steps()[-1]))

    def newest_intact(self) -> Resumable:
        """The newest checkpoint that loads, and why newer ones do not.

        Raises:
            Refused: none does, or a newer one may not be read.
        """
        damaged: dict[int, str] = {}
        for step in reversed(self.steps()):
            try:
                checkpoint = Checkpoint.open(self.checkpoint_folder(step))
                checkpoint.check()
            except Refused as error:
                if isinstance(error.__cause__, PermissionError):
                    raise  # nothing says that it is damaged
                damaged[step] = str(error)
            else:
                return Resumable(checkpoint, damaged)
        newest = next(iter(damaged.values()))
        raise Refused(
            f"{self.folder}: none of its {len(damaged)} checkpoints loads: start a new run; "
            f"the newest: {newest}"
        )

    def set_aside(self, step: int) -> Path:
        """Keep a damaged checkpoint under a name that nobody takes for a good one."""
        folder = self.checkpoint_folder(step)
        aside = folder.with_name(f"{folder.name}.damaged")
        shutil.rmtree(aside, ignore_errors=True)
        return folder.rename(aside)

    def point(self, pointer: str, step: int | None) -> None:
        """Have `latest` or `best` name the checkpoint of `step`; None: there is none.

        Raises:
            GptfastError: the disk is full or not writable.
        """
        if step is None:
            (self.folder / pointer).unlink(missing_ok=True)
            return
        with _saying_how_to_go_on(self.folder / pointer):
            replace_text(self.folder / pointer, f"{self.checkpoint_folder(step).name}\n")

    def rotate(self, *, keep: int, best: int | None) -> None:
        """Delete all checkpoints but the newest `keep` and the best."""
        for step in self.steps()[:-keep]:
            if step != best:
                folder = self.checkpoint_folder(step)
                # Renamed first: one that a kill leaves half-deleted is nobody's checkpoint.
                shutil.rmtree(folder.rename(folder.with_name(f".{folder.name}.gone")))

    def log(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append records to `metrics.jsonl`.

        Raises:
            GptfastError: the disk is full or not writable.
        """
        lines = "".join(json.dumps(record) + "\n" for record in records)
        with _saying_how_to_go_on(self._metrics), self._metrics.open("a", encoding="utf-8") as file:
            file.write(lines)

    def metrics(self) -> list[dict[str, Any]]:
        """All records so far; a line that a kill or a crash cut short is left out."""
        if not self._metrics.exists():
            return []
        records = []
        for line in self._metrics.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and record.keys() >= {"kind", "step"}:
                records.append(record)
        return records

    def summary(self) -> Summary:
        """What `runs list` says."""
        meta: dict[str, Any] = {}
        fault = None
        try:
            if self.steps():
                meta = self.latest().meta
        except Refused as error:
            fault = str(error)
        records = self.metrics()
        losses = [record["loss"] for record in records if record["kind"] == "eval"]
        profile = meta.get("profile", {})
        return Summary(
            name=self.folder.name,
            folder=str(self.folder),
            profile=profile.get("name"),
            step=max([0, *self.steps(), *(record["step"] for record in records)]),
            steps=profile["train"].get("steps") if profile else None,
            val_loss=losses[-1] if losses else None,
            best_val_loss=min(losses, default=None),
            written=_when(self.written),
            n_bytes=_n_bytes(self.folder),
            fault=fault,
        )

    def describe(self) -> dict[str, Any]:
        """All that it takes to repeat the run, and what is there of it.

        Raises:
            Refused: it has no checkpoint, or the newest cannot be read.
        """
        if not self.steps():
            raise Refused(f"{self.folder}: has no checkpoint yet: train it with --run")
        meta = self.latest().meta
        profile, data = meta["profile"], meta["data"]
        logged = self._logged_steps()
        took_s = {record["step"]: record["step_ms"] / 1e3 for record in logged}
        pointers: dict[int, list[str]] = {step: [] for step in self.steps()}
        for pointer in ("latest", "best"):
            path = self.folder / pointer
            match = STEP_NAME.fullmatch(path.read_text("utf-8").strip()) if path.exists() else None
            if match and int(match[1]) in pointers:
                pointers[int(match[1])].append(pointer)
        return {
            **vars(self.summary()),
            "seed": profile["train"].get("seed"),
            "skipped_steps": sum(not r["committed"] for r in logged),
            "micro_batch": meta.get("fits") or profile["train"].get("micro_batch"),
            "data": {
                "path": data["path"],
                "source": data.get("source"),
                "sha256": data["fingerprint"],
            },
            "plugins": {
                name: {**package, "options": profile["plugins"].get(name, {})}
                for name, package in meta["plugins"].items()
            },
            "machine": meta.get("machine"),
            "versions": meta.get("versions", {}),
            "sessions": [
                {**session, "first_step_s": took_s.get(session["after_step"] + 1)}
                for session in meta.get("sessions", [])
            ],
            "checkpoints": [
                {
                    "step": step,
                    "folder": str(self.checkpoint_folder(step)),
                    "n_bytes": _n_bytes(self.checkpoint_folder(step)),
                    "pointers": named,
                }
                for step, named in pointers.items()
            ],
        }

    def _logged_steps(self) -> list[dict[str, Any]]:
        return [record for record in self.metrics() if record["kind"] == "step"]

    def course(self) -> Course:
        """Losses, speed and the plugins' numbers over the steps."""
        records = self.metrics()
        steps = self._logged_steps()
        metrics: dict[str, list[tuple[int, float]]] = {}
        for record in steps:
            for name, value in record.items():
                if "." in name and value is not None:  # the core's own names have no dot
                    metrics.setdefault(name, []).append((record["step"], value))
        return Course(
            name=self.folder.name,
            train=[(record["step"], record["loss"]) for record in steps],
            val=[(r["step"], r["loss"]) for r in records if r["kind"] == "eval"],
            tokens_per_s=[(r["step"], r["tokens"] / r["step_ms"] * 1e3) for r in steps],
            metrics=metrics,
        )

    def back_to(self, step: int, *, best: int | None) -> None:
        """Forget what came after a step, which a resumed run will do again.

        Args:
            best: of the steps up to there; its checkpoint went where a later one was better.

        Raises:
            GptfastError: the disk is full or not writable.
        """
        kept = [record for record in self.metrics() if record["step"] <= step]
        with _saying_how_to_go_on(self._metrics):
            replace_text(self._metrics, "".join(json.dumps(record) + "\n" for record in kept))
        self.point("latest", step)
        self.point("best", best if best in self.steps() else None)


def known_runs(parent: Path) -> list[Run]:
    """The runs in a folder, the one written to last first."""
    folders = sorted(parent.iterdir()) if parent.is_dir() else []
    runs = [run for run in map(Run, folders) if run.has_begun]
    return sorted(runs, key=lambda run: run.written, reverse=True)


def find_run(name: str, *, parent: Path) -> Run:
    """The run of this name, or at this path.

    Raises:
        Refused: there is none.
    """
    run = Run(run_folder(name, parent=parent))
    if not run.has_begun:
        raise Refused(
            f"{name}: no run: {nearest(name, [r.folder.name for r in known_runs(parent)])}"
        )
    return run


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Keep every other process from writing the run in `folder`, which is made where it is not.

    A folder made here goes again where the run is refused before its first step.

    Raises:
        Refused: another process writes it, or it cannot be written.
    """
    made_here = [path for path in (folder, folder.parent) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / "lock")
        lock.acquire(timeout=0)
    except Timeout as error:
        raise Refused(
            f"{folder}: another process trains this run: wait for it or choose another name "
            "with --run"
        ) from error
    except OSError as error:
        raise Refused(
            f"{folder}: cannot keep a run here ({error.strerror}): choose another with --run"
        ) from error
    try:
        yield
    except Refused:
        lock.release()
        if folder in made_here and not Run(folder).steps():
            shutil.rmtree(folder)
            if folder.parent in made_here:
                with contextlib.suppress(OSError):  # another run may have begun there
                    folder.parent.rmdir()
        raise
    finally:
        lock.release()


def run_folder(name: str, *, parent: Path) -> Path:
    """`runs/NAME`, or NAME itself where it is a path."""
    is_path = os.sep in name or (os.altsep is not None and os.altsep in name)
    return Path(name) if is_path else parent / name


def free_name(profile: str, *, parent: Path) -> str:
    """PROFILE, else the first free of PROFILE-2, PROFILE-3, ..."""
    number = 1
    while (parent / _numbered(profile, number)).exists():
        number += 1
    return _numbered(profile, number)


def newest_name(profile: str, *, parent: Path) -> str:
    """The run of this profile that was written to last.

    Raises:
        Refused: there is none.
    """
    pattern = re.compile(re.escape(profile) + r"(-\d+)?")
    for run in known_runs(parent):
        if pattern.fullmatch(run.folder.name) and run.steps():
            return run.folder.name
    raise Refused(
        f"{parent}: no run of profile {profile} to resume: start one without --resume "
        "or name it with --run"
    )


def find_checkpoint(name: str, *, parent: Path) -> Checkpoint:
    """The checkpoint that RUN_OR_CHECKPOINT means: of a run, its newest.

    Raises:
        Refused: there is no such run or checkpoint.
    """
    for folder in (Path(name), parent / name):
        if stands(folder / "meta.json"):
            return Checkpoint.open(folder)
        if Run(folder).steps():
            return Run(folder).latest()
    known = sorted(path.name for path in parent.iterdir()) if parent.is_dir() else []
    runs = f"runs here: {', '.join(known)}" if known else f"there is no run under {parent}"
    raise Refused(f"{name}: neither a run nor a checkpoint folder: {runs}")


@contextmanager
def _saying_how_to_go_on(path: Path) -> Iterator[None]:
    """A small file that a full disk has no room for stops a run as a large one does."""
    try:
        yield
    except OSError as error:
        raise GptfastError(
            f"{path}: cannot be written ({error.strerror}): free disk space and continue with "
            "--resume"
        ) from error


def _n_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).isoformat(" ", timespec="seconds")


def _numbered(profile: str, number: int) -> str:
    return profile if number == 1 else f"{profile}-{number}"
