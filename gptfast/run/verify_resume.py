"""`gptfast train --verify-resume`: does a run of this profile, here, resume as if never stopped?

The profile is trained for a few steps without a stop and again with one, each time built anew. All
that the two last checkpoints hold is compared bit for bit. What differs is looked at in a second
run without a stop: where that differs as well, it is the device or a clock and not the resuming.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptfast.config import Loaded
from gptfast.errors import Refused
from gptfast.host.hooks import Hooks
from gptfast.plugin import Profile
from gptfast.run.checkpoint import Checkpoint
from gptfast.run.folder import Run
from gptfast.run.session import Setting, opened
from gptfast.run.trainer import Trainer

STEPS = 6
STOP = 3
"""With an evaluation, whose checkpoint is saved before it."""


@dataclass(frozen=True)
class Difference:
    """Something that is not equal bit for bit.

    Attributes:
        what: where it is, as in "model wte.weight" or "plugins ema.state.updates".
        by: largest absolute difference of two tensors or numbers; None: they cannot be subtracted.
        repeats: whether two runs without a stop are equal in it, so that resuming is to blame.
    """

    what: str
    by: float | None
    repeats: bool

    @property
    def excused(self) -> bool:
        """What only a plugin counts, as by a clock, and what no two runs agree in."""
        return self.what.startswith("plugins ") and not self.repeats


@dataclass(frozen=True)
class ResumeCheck:
    """The result of `verify_resume`."""

    profile: str
    device: str
    steps: int
    stopped_at: int
    compared: int
    """Tensors and values."""
    differences: list[Difference]

    @property
    def equal(self) -> bool:
        """Bit for bit; only what a plugin counts may differ, where two whole runs differ in it."""
        return all(difference.excused for difference in self.differences)


def verify_resume(
    loaded: Loaded,
    *,
    device: str,
    asked: tuple[str, ...],
    folder: Path,
    cache: Path | None,
    note: Callable[[str], None],
) -> ResumeCheck:
    """Train a few steps of a profile, straight and stopped; nothing is left behind.

    Args:
        folder: where to keep the checkpoints meanwhile.
        note: told what the plugins have to say, and what was found to fit.

    Raises:
        Refused: before anything was done; a run of one step cannot be stopped.
        GptfastError: the training failed.
    """
    with opened(loaded, device=device, asked=asked, cache=cache) as setting:
        steps = min(STEPS, setting.profile.train.steps)
        stop = steps // 2
        if stop == 0:
            raise Refused("--verify-resume: train.steps = 1 cannot be stopped on the way: use more")
        fits = setting.fits(note=note)
        with tempfile.TemporaryDirectory(prefix=".verify-resume-", dir=folder) as name:
            rehearsal = _Rehearsal(setting, fits, stop, Path(name), note)
            straight = rehearsal.train("straight", [steps])
            stopped = rehearsal.train("stopped", [stop, steps])
            found = compare(straight, stopped, again=lambda: rehearsal.train("again", [steps]))
        return ResumeCheck(
            profile=setting.profile.name,
            device=setting.machine.name,
            steps=steps,
            stopped_at=stop,
            compared=len(straight),
            differences=found,
        )


class _Rehearsal:
    """Runs of one profile in a folder that goes away."""

    def __init__(
        self,
        setting: Setting,
        fits: int | None,
        stop: int,
        folder: Path,
        note: Callable[[str], None],
    ) -> None:
        self._setting = setting
        self._fits = fits
        self._folder = folder
        self._note = note
        self._profile = _shortened(setting.profile, stop)

    def train(self, name: str, stops: list[int]) -> dict[str, Any]:
        """All that the last checkpoint holds, and the losses, after stopping at each of `stops`."""
        run = Run.create(self._folder / name, profile_toml=self._profile.to_toml())
        checkpoint: Checkpoint | None = None
        for stop in stops:
            with Trainer(
                self._profile,
                hooks=Hooks(self._setting.select().enabled, note=self._note),
                machine=self._setting.machine,
                store=self._setting.store,
                run=run,
                checkpoint=checkpoint,
                fits=self._fits,
            ) as trainer:
                # Said once is enough.
                self._note = lambda line: None
                trainer.run(stop)
            checkpoint = run.latest()
        assert checkpoint is not None
        return everything_in(run, checkpoint)


def _shortened(profile: Profile, stop: int) -> Profile:
    """The profile with one short evaluation where the run stops, and the schedule as it is."""
    batch = profile.train.windows_per_micro * profile.model.block_size
    return profile.replace(
        {
            "train.eval_interval": stop,
            "train.eval_tokens": min(batch, profile.train.eval_tokens or batch),
            "train.save_interval": 0,
            "train.sample_tokens": 0,
            "train.log_interval": 1,
            "train.keep_checkpoints": 1,
        }
    )


def everything_in(run: Run, checkpoint: Checkpoint) -> dict[str, Any]:
    """Every tensor and value of a checkpoint, and the loss of each step, by its name."""
    losses = {f"of step {r['step']}": r["loss"] for r in run.metrics() if r["kind"] == "step"}
    tables = {"loss": losses, "model": checkpoint.tensors(), **checkpoint.load_trainer()}
    return {f"{table} {name}": leaf for table in tables for name, leaf in _leaves(tables[table])}


def _leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        branches = [(str(key), value) for key, value in tree.items()]
    elif isinstance(tree, list | tuple):
        branches = [(str(number), value) for number, value in enumerate(tree)]
    else:
        yield name, tree
        return
    for key, value in branches:
        yield from _leaves(value, f"{name}.{key}" if name else key)


def compare(
    straight: Mapping[str, Any],
    stopped: Mapping[str, Any],
    *,
    again: Callable[[], Mapping[str, Any]],
) -> list[Difference]:
    """What a stopped run has not as the straight one has it.

    Args:
        straight, stopped: as `everything_in` gives them.
        again: makes a second straight run; called only where something differs.
    """
    differing = differences(straight, stopped)
    unrepeated = differences(straight, again()) if differing else {}
    return [Difference(what, by, repeats=what not in unrepeated) for what, by in differing.items()]


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, float | None]:
    """What is not equal bit for bit, and by how much at most; None: it cannot be subtracted."""
    return {
        what: _distance(one.get(what), other.get(what))
        for what in sorted(one.keys() | other.keys())
        if not _equal(one.get(what), other.get(what))
    }


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def _distance(one: Any, other: Any) -> float | None:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape:
            return None
        return float((one.double() - other.double()).abs().max())
    if isinstance(one, int | float) and isinstance(other, int | float):
        return abs(one - other)
    return None
