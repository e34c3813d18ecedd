"""A run's folder: `profile.toml`, `metrics.jsonl`, `checkpoints/`, pointers `latest` and `best`."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptfast.checkpoint import Checkpoint, replace_text
from gptfast.errors import GptfastError, Refused

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

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, rising."""
        if not self.checkpoints.is_dir():
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
            Refused: none does.
        """
        damaged: dict[int, str] = {}
        for step in reversed(self.steps()):
            try:
                checkpoint = Checkpoint.open(self.checkpoint_folder(step))
                checkpoint.check()
            except Refused as error:
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
        """Have `latest` or `best` name the checkpoint of `step`; None: there is none."""
        if step is None:
            (self.folder / pointer).unlink(missing_ok=True)
            return
        replace_text(self.folder / pointer, f"{self.checkpoint_folder(step).name}\n")

    def rotate(self, *, keep: int, best: int | None) -> None:
        """Delete all checkpoints but the newest `keep` and the best."""
        for step in self.steps()[:-keep]:
            if step != best:
                folder = self.checkpoint_folder(step)
                # Renamed first: one that a kill leaves half-deleted is nobody's checkpoint.
                shutil.rmtree(folder.rename(folder.with_name(f".{folder.name}.gone")))

    def log(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append records to `metrics.jsonl`."""
        lines = "".join(json.dumps(record) + "\n" for record in records)
        try:
            with self._metrics.open("a", encoding="utf-8") as file:
                file.write(lines)
        except OSError as error:
            raise GptfastError(
                f"{self._metrics}: cannot add {len(lines):,} bytes ({error.strerror}): free disk "
                "space and continue with --resume"
            ) from error

    def metrics(self) -> list[dict[str, Any]]:
        """All records so far; a line that a kill cut short is left out."""
        records = []
        for line in self._metrics.read_text(encoding="utf-8").splitlines():
            try:
                records.append(json.loads(line))
            except ValueError:
                continue
        return records

    def forget_after(self, step: int) -> None:
        """Drop the records of steps that a resumed run will do again."""
        kept = [record for record in self.metrics() if record["step"] <= step]
        replace_text(self._metrics, "".join(json.dumps(record) + "\n" for record in kept))


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
    folders = [
        folder
        for folder in (parent.iterdir() if parent.is_dir() else ())
        if pattern.fullmatch(folder.name) and Run(folder).steps()
    ]
    if not folders:
        raise Refused(
            f"{parent}: no run of profile {profile} to resume: start one without --resume "
            "or name it with --run"
        )
    return max(folders, key=lambda folder: (folder / "metrics.jsonl").stat().st_mtime).name


def find_checkpoint(name: str, *, parent: Path) -> Checkpoint:
    """The checkpoint that RUN_OR_CHECKPOINT means: of a run, its newest.

    Raises:
        Refused: there is no such run or checkpoint.
    """
    for folder in (Path(name), parent / name):
        if (folder / "meta.json").exists():
            return Checkpoint.open(folder)
        if Run(folder).steps():
            return Run(folder).latest()
    known = sorted(path.name for path in parent.iterdir()) if parent.is_dir() else []
    runs = f"runs here: {', '.join(known)}" if known else f"there is no run under {parent}"
    raise Refused(f"{name}: neither a run nor a checkpoint folder: {runs}")


def _numbered(profile: str, number: int) -> str:
    return profile if number == 1 else f"{profile}-{number}"
