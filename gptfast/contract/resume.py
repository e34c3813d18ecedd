"""A tiny run that was stopped and resumed, against one that was not: the promise of the check.

What `gptfast train --verify-resume` compares is compared here, by the same code.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from gptfast.contract.tiny import STEPS, STOP, Broken, Outcome, Rig
from gptfast.host.registry import Enabled
from gptfast.plugin import Plugin, Profile
from gptfast.run.checkpoint import Checkpoint
from gptfast.run.folder import Run
from gptfast.run.verify_resume import Difference, compare, everything_in

MOST_NAMED = 3
"""Differences that a broken promise names."""
AT_EACH_STEP = {"train.eval_interval": 1, "train.save_interval": 1, "train.keep_checkpoints": STEPS}


def resumes(rig: Rig) -> str:
    """Stopped and resumed equals uninterrupted, with dropout, micro-batches and a new epoch.

    Where the state of a plugin says nothing at the usual stop, the run is stopped a second time
    where it does.

    Raises:
        Broken: it is not equal, or a state goes one way only.
    """
    profile = rig.profile(model__dropout=0.1, train__micro_batch=2)
    with tempfile.TemporaryDirectory(dir=rig.folder) as folder:
        usual = _train(rig, profile, Path(folder, "straight"))
        stopped = _train(rig, profile, Path(folder, "stopped"), until=STOP)
        states = _states(stopped.run.latest())
        compared = _require_resumed(rig, usual, stopped)
        silent = {
            enabled.name
            for enabled in rig.plan(profile)
            if type(enabled.plugin).state is not Plugin.state
            and not _says_any(states[enabled.name])
        }
        stops = {STOP}
        if silent:
            closely = profile.replace(AT_EACH_STEP)
            straight = _train(rig, closely, Path(folder, "closely"))
            stops |= _steps_that_say(silent, straight.run)
            for stop in sorted(stops - {STOP}):
                stopped = _train(rig, closely, Path(folder, f"stopped-{stop}"), until=stop)
                _require_resumed(rig, straight, stopped)
    steps = " and ".join(map(str, sorted(stops)))
    return f"{compared} tensors and values equal after stopping at step {steps} of {STEPS}"


@dataclass(frozen=True)
class _Trained:
    profile: Profile
    run: Run
    outcome: Outcome

    def everything(self) -> dict[str, Any]:
        return everything_in(self.run, self.run.latest())


def _train(rig: Rig, profile: Profile, folder: Path, *, until: int | None = None) -> _Trained:
    run = Run.create(folder, profile_toml=profile.to_toml())
    outcome = rig.train(profile, run=run, until=until)
    if len(outcome.losses) != (until or STEPS) or not all(map(math.isfinite, outcome.losses)):
        raise Broken(f"losses of {until or STEPS} steps: {outcome.losses}")
    return _Trained(profile, run, outcome)


def _require_resumed(rig: Rig, straight: _Trained, stopped: _Trained) -> int:
    """Resume the stopped run; returns how many tensors and values are equal to the straight one."""
    saved = stopped.run.latest()
    _require_both_ways(rig.plan(stopped.profile), _states(saved))
    resumed = rig.train(stopped.profile, run=stopped.run, checkpoint=saved)
    expected = straight.everything()
    what = "resumed and uninterrupted"
    if rig.machine.kind == "cpu":
        again = stopped.run.folder.with_name(f"{stopped.run.folder.name}-again")
        found = compare(
            expected,
            everything_in(stopped.run, stopped.run.latest()),
            again=lambda: _train(rig, stopped.profile, again).everything(),
        )
        faults = _faults(found)
        if faults:
            named = ", ".join(
                fault.what if fault.by is None else f"{fault.what} by {fault.by:.3g}"
                for fault in faults[:MOST_NAMED]
            )
            raise Broken(
                f"{what}, after a stop at step {saved.step}: {len(faults)} of {len(expected)} "
                f"tensors and values differ: {named}"
            )
    losses = stopped.outcome.losses + resumed.losses
    whole = Outcome(losses, resumed.weights, resumed.val_loss)
    rig.require_equal(whole, straight.outcome, what=what)
    return len(expected)


def _faults(found: Sequence[Difference]) -> list[Difference]:
    """The differences that the stop is to blame for.

    A plugin that keeps time in its state decides by it, perhaps when to evaluate: no two runs need
    agree in all of its state, nor in what is known of evaluations.
    """
    timed = {_table(difference) for difference in found if difference.excused}
    if timed:
        timed.add("progress")
    return [difference for difference in found if _table(difference) not in timed]


def _table(difference: Difference) -> str:
    """`plugins NAME`, or the first word of what differs."""
    table, _, name = difference.what.partition(" ")
    return f"{table} {name.partition('.')[0]}" if table == "plugins" else table


def _require_both_ways(plugins: Sequence[Enabled], states: Mapping[str, Any]) -> None:
    """Who saves a state takes it back, and the other way round."""
    for enabled in plugins:
        kind = type(enabled.plugin)
        gives, takes = kind.state is not Plugin.state, kind.load_state is not Plugin.load_state
        if takes and not gives:
            raise Broken(f"{enabled.name} has load_state and no state: write state, too")
        if gives and not takes and states[enabled.name]:
            raise Broken(f"{enabled.name} has state and no load_state: write load_state, too")


def _states(checkpoint: Checkpoint) -> dict[str, Any]:
    """The state of each plugin in a checkpoint."""
    saved = checkpoint.load_trainer()["plugins"]
    return {name: one["state"] for name, one in saved.items()}


def _steps_that_say(silent: set[str], run: Run) -> set[int]:
    """For each of the plugins, the step nearest to the usual stop at which its state says any."""
    nearest = sorted(range(1, STEPS), key=lambda step: abs(step - STOP))
    states = {step: _states(Checkpoint.open(run.checkpoint_folder(step))) for step in nearest}
    saying = (
        next((step for step in nearest if _says_any(states[step][name])), STOP) for name in silent
    )
    return set(saying)


def _says_any(state: object) -> bool:
    """Whether a state holds more than zeros, empty texts and None: what a new plugin may hold."""
    if isinstance(state, Mapping):
        return any(map(_says_any, state.values()))
    if isinstance(state, list | tuple):
        return any(map(_says_any, state))
    if isinstance(state, Tensor):
        return bool(state.any())
    return bool(state)
