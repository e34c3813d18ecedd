"""A run's folder: `profile.toml`, `metrics.jsonl`, `checkpoints/`, pointers `latest` and `best`."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gptfast.checkpoint import Checkpoint, replace_text
from gptfast.errors import Refused

STEP_NAME = re.compile(r"step-(\d{6,})")
UNFINISHED = re.compile(r"\.step-\d{6,}\.(tmp|old)")


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
        if not run.steps():
            raise Refused(f"{folder}: no checkpoint to resume from: start it without --resume")
        for path in run.checkpoints.iterdir():
            if UNFINISHED.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
        return run

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

    def point(self, pointer: str, step: int) -> None:
        """Have `latest` or `best` name the checkpoint of `step`."""
        replace_text(self.folder / pointer, f"{self.checkpoint_folder(step).name}\n")

    def rotate(self, *, keep: int, best: int | None) -> None:
        """Delete all checkpoints but the newest `keep` and the best."""
        for step in self.steps()[:-keep]:
            if step != best:
                shutil.rmtree(self.checkpoint_folder(step))

    def log(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append records to `metrics.jsonl`."""
        lines = "".join(json.dumps(record) + "\n" for record in records)
        with self._metrics.open("a", encoding="utf-8") as file:
            file.write(lines)

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
