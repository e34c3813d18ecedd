"""From a loaded profile to a running trainer: machine, data, plugins, folder, signals.

`train` is what the command calls; `bench` and the tests use its parts.

A little over 400 lines: what a run must satisfy before it begins or goes on is read in one place.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from gptfast.config import Loaded
from gptfast.data.store import Store
from gptfast.device.machine import find_machine, measure_matmul_peak, peak_dtype
from gptfast.device.place import ALONE, Place
from gptfast.errors import GptfastError, Refused, Stopped
from gptfast.host import registry
from gptfast.host.hooks import Hooks
from gptfast.host.payback import known_payback
from gptfast.model import count_parameters, flops_per_token
from gptfast.plugin import Machine, Profile, Support
from gptfast.report import Finished, Listener, PluginLine, RunInfo
from gptfast.run.checkpoint import Checkpoint
from gptfast.run.fit import windows_that_fit
from gptfast.run.folder import Resumable, Run, free_name, newest_name, only_writer, run_folder
from gptfast.run.provenance import git_commit, versions
from gptfast.run.signals import GRACE_S, GRACE_TOGETHER_S, signals_stop
from gptfast.run.trainer import Trainer

GPT2_VOCABULARY = 50_257
"""What a foreign file of bare ids is taken for where the profile does not say."""


@dataclass(frozen=True)
class Setting:
    """What a run is made of, before it has a folder.

    Attributes:
        profile: with the vocabulary filled in.
        origins: of each value of the profile.
        asked: plugins that must be supported here, whatever the profile says.
        checkpoint: what is to be resumed.
        cache: folder in which what was found out about this machine is kept; None: nowhere.
    """

    profile: Profile
    origins: Mapping[str, str]
    machine: Machine
    store: Store
    asked: Sequence[str]
    checkpoint: Checkpoint | None = None
    cache: Path | None = None

    def select(self) -> registry.Selection:
        """The plugins, made anew: an instance serves one run.

        Raises:
            Refused: one is unknown, wrongly set, in conflict, or not supported here.
        """
        return registry.select(
            registry.plan(self.profile, origins=self.origins),
            self.machine,
            unsupported=self.profile.unsupported_plugins,
            asked=self.asked,
            pays=self._pays,
        )

    def _pays(self, one: registry.Enabled) -> Support | None:
        """Whether a plugin is worth its start in this run. A resumed one keeps what it had: with
        or without, the numbers are rounded in another way."""
        options = self.profile.plugins[one.name]
        known = None
        if self.cache is not None:
            known = known_payback(
                one.name, options, self.profile, on=self.machine.name, at=self.cache
            )
        answer = one.plugin.pays(self.profile.train.steps, known)
        if answer is None or self.checkpoint is None:
            return answer
        ran = one.name in self.checkpoint.meta["plugins"]
        return Support.yes() if ran else Support.no("the run began without it")

    def fits(self, *, note: Callable[[str], None]) -> int | None:
        """Most windows in a forward pass, found by trying. None: the profile says how many."""
        if self.profile.train.micro_batch != "auto":
            return None
        return windows_that_fit(
            self.profile,
            machine=self.machine,
            store=self.store,
            make_plugins=lambda: self.select().enabled,
            cache=self.cache,
            note=note,
        )


@contextmanager
def opened(
    loaded: Loaded,
    *,
    device: str,
    place: Place = ALONE,
    asked: Sequence[str],
    checkpoint: Checkpoint | None = None,
    cache: Path | None = None,
) -> Iterator[Setting]:
    """Look at the plugins' names and options, find the machine and open the data.

    Args:
        place: which of a run's processes this one is.
        checkpoint: what is to be resumed, which must have been trained on these data.
        cache: folder in which what was found out about this machine is kept; None: nowhere.

    Raises:
        Refused: a plugin is unknown, broken, wrongly set or in conflict, there is no such device,
            the data cannot be read or are others, or the batch cannot be shared out.
    """
    # Before the data, which may be missing: what was mistyped is said first.
    registry.plan(loaded.profile, origins=loaded.origins)
    machine = find_machine(device, place=place)
    check_shares(loaded.profile, place)
    with Store.open(Path(loaded.profile.data.path)) as store:
        store.hold()
        if checkpoint is not None:
            check_data(checkpoint, store)
        profile = with_vocabulary(loaded.profile, store)
        yield Setting(profile, loaded.origins, machine, store, asked, checkpoint, cache)


def train(
    loaded: Loaded,
    *,
    run: str | None = None,
    resume: bool = False,
    stop_at: int | None = None,
    device: str = "auto",
    place: Place = ALONE,
    asked: Sequence[str] = (),
    command: Sequence[str] = (),
    folder: Path,
    cache: Path | None = None,
    listener: Listener,
) -> Finished:
    """Train as the profile says, in `runs/NAME/` of `folder`.

    Args:
        run: name of the run, or a path; None: the profile's name, numbered where it is taken.
        resume: go on from the newest checkpoint of the run.
        stop_at: stop after this step, as if interrupted there.
        place: which of the run's processes this one is. The first keeps the run.
        asked: plugins that must be supported here, whatever the profile says.
        command: the command line, kept with the run.
        cache: folder in which what was found out about this machine is kept; None: nowhere.

    Raises:
        Refused: before anything was done: profile, data, plugins or folder do not allow the run.
        Stopped: a signal asked for it; the last finished step is saved.
        GptfastError: the run failed; what was saved before stands.
    """
    start = time.perf_counter()
    runs = folder / "runs"
    with ExitStack() as stack:
        profile_name = loaded.profile.name
        name = run or (newest_name if resume else free_name)(profile_name, parent=runs)
        keeper = place.rank == 0
        at = run_folder(name, parent=runs)
        if keeper:
            stack.enter_context(only_writer(at))
        found = Run.resumed(at).newest_intact() if resume else None
        checkpoint = found.checkpoint if found else None
        setting = stack.enter_context(
            opened(
                loaded,
                device=device,
                place=place,
                asked=asked,
                checkpoint=checkpoint,
                cache=cache,
            )
        )
        profile, machine, store = setting.profile, setting.machine, setting.store
        selection = setting.select()
        hooks = Hooks(selection.enabled, note=listener.note)
        if machine.world > 1 and not hooks.can_agree:
            raise Refused(
                f"{machine.world} processes and no plugin that joins them: use --plugin ddp, or "
                "start one process"
            )
        kept = None
        changes: list[str] = []
        if keeper and found:
            kept = Run(at)
            changes = _resume(kept, found, setting, note=listener.note)
        elif keeper:
            kept = Run.create(at, profile_toml=profile.to_toml())
        for warning in [*registry.shadowed(registry.discover()), *doubts(profile)]:
            listener.note(warning)
        if "val" not in store.splits:
            listener.note(f"{store.path} has no validation split: evaluation is off")
        fits = _kept_fit(checkpoint, profile) if checkpoint else None
        if fits is None:
            fits = setting.fits(note=listener.note)
        peak = measure_matmul_peak(machine.device, peak_dtype(machine.device))
        trainer = Trainer(
            profile,
            hooks=hooks,
            machine=machine,
            store=store,
            run=kept,
            checkpoint=checkpoint,
            listener=listener,
            peak_flops=peak,
            fits=fits,
            sessions=_sessions(checkpoint, command, git_commit(folder), changes),
        )
        grace_s = GRACE_S if machine.world == 1 else GRACE_TOGETHER_S
        with signals_stop(trainer.state, grace_s=grace_s) as caught:
            try:
                with trainer:
                    if kept and found:  # not before: by now every process has read the old one
                        kept.keep_profile(profile.to_toml())
                    listener.started(run_info(trainer, selection, kept, peak))
                    trainer.run(stop_at)
            except KeyboardInterrupt:
                if caught:
                    raise _stopped(trainer, caught[0], name) from None
                raise
            except GptfastError:
                if caught:  # taking the run down failed, which does not undo the save
                    listener.note(str(_stopped(trainer, caught[0], name)))
                raise
        finished = _finished(trainer, at, seconds=time.perf_counter() - start)
        listener.finished(finished)
        if caught:
            raise _stopped(trainer, caught[0], name)
    return finished


def _resume(
    run: Run, found: Resumable, setting: Setting, *, note: Callable[[str], None]
) -> list[str]:
    """Say and give back what has changed, and set damaged checkpoints aside."""
    changes = check_resume(found.checkpoint, setting)
    for step, reason in found.damaged.items():
        aside = run.set_aside(step)
        note(
            f"{reason}; resumed from step {found.checkpoint.step}, the newest that loads "
            f"({aside.name} is out of the way)"
        )
    for change in changes:
        note(f"resumed with {change}")
    return changes


def _sessions(
    checkpoint: Checkpoint | None,
    command: Sequence[str],
    commit: str | None,
    changes: Sequence[str],
) -> list[dict[str, Any]]:
    """How the run was started and each time resumed, this time included."""
    before = checkpoint.meta.get("sessions", []) if checkpoint else []
    now = {
        "after_step": checkpoint.step if checkpoint else 0,
        "started": datetime.now().isoformat(" ", timespec="seconds"),
        "command": list(command),
        "git_commit": commit,
        "changes": list(changes),
    }
    return [*before, now]


def _finished(trainer: Trainer, folder: Path, *, seconds: float) -> Finished:
    progress = trainer.progress
    incomplete = progress.step < trainer.profile.train.steps
    return Finished(
        steps=progress.step,
        seconds=seconds,
        loss=trainer.log.loss,
        val_loss=progress.val_loss,
        best_val_loss=None if progress.best_step is None else progress.best_loss,
        stopped_by=(trainer.state.stop_reason or "--stop-at") if incomplete else None,
        folder=str(folder),
        first_step_s=trainer.log.first_step_s,
    )


def _stopped(trainer: Trainer, signum: int, name: str) -> Stopped:
    """What to tell after a signal: which step is saved, and how to go on."""
    saved, again = trainer.state.saved_step, f"gptfast train --resume --run {name}"
    if trainer.kit.run is None:
        said = f"after step {trainer.progress.step}, which the first of the processes saves"
    elif saved is None:
        said = "before a first step was finished; nothing was saved: start again"
    elif saved < trainer.profile.train.steps:
        said = f"after step {saved}, which is saved: go on with {again}"
    elif trainer.progress.evaluates:
        said = f"in the evaluation after the last step, {saved}, which is saved: {again} makes it"
    else:
        said = f"after the last step, {saved}, which is saved: the run is complete"
    return Stopped(f"{signal.Signals(signum).name} {said}", signum=signum)


def with_vocabulary(profile: Profile, store: Store) -> Profile:
    """The profile with the vocabulary of the data filled in.

    Raises:
        Refused: the profile says another vocabulary than the data, or the data holds an id that
            is none of it.
    """
    asked, stored = profile.model.vocab_size, store.vocab_size
    if asked is not None and stored is not None and asked < stored:
        raise Refused(
            f"{store.path}: its vocabulary has {stored} ids, model.vocab_size is {asked}: "
            "leave model.vocab_size out"
        )
    vocabulary = asked or stored or GPT2_VOCABULARY
    store.check_ids(vocabulary)
    return profile.replace({"model.vocab_size": vocabulary})


def check_shares(profile: Profile, place: Place) -> None:
    """Raises Refused where several processes cannot share out the windows of a step."""
    size, world = profile.train.batch_size, place.world
    if size % world:
        below, above = size // world * world, (size // world + 1) * world
        nearest = f"{below} or {above}" if below else f"{above}"
        raise Refused(
            f"train.batch_size = {size} cannot be shared out among {world} processes: use {nearest}"
        )
    if world > 1 and profile.train.micro_batch == "auto":
        raise Refused(
            'train.micro_batch = "auto" tries what fits in one process alone, and there are '
            f"{world}: give a number"
        )


def doubts(profile: Profile) -> list[str]:
    """What a profile says that is possible and probably not meant."""
    train = profile.train
    if train.warmup_steps > train.steps:
        return [
            f"train.warmup_steps = {train.warmup_steps} is above train.steps = {train.steps}: "
            "the learning rate never reaches its peak"
        ]
    return []


def _kept_fit(checkpoint: Checkpoint, profile: Profile) -> int | None:
    """What the run found to fit, unless the profile asks for something else now."""
    asked_before = checkpoint.meta["profile"]["train"].get("micro_batch")
    fits: int | None = checkpoint.meta.get("fits")
    return fits if asked_before == profile.train.micro_batch else None


def check_data(checkpoint: Checkpoint, store: Store) -> None:
    """Raises Refused where a checkpoint was trained on other data."""
    data = checkpoint.meta["data"]
    if data.get("tokenizer", store.tokenizer_name) != store.tokenizer_name:
        _refuse(checkpoint, "tokenizer", f"{data['tokenizer']} -> {store.tokenizer_name}")
    if data["fingerprint"] != store.fingerprint:
        _refuse(checkpoint, "data", f"{data['path']} -> {store.path}")


def check_resume(checkpoint: Checkpoint, setting: Setting) -> list[str]:
    """What has changed since the checkpoint and may, as `key old -> new`.

    Raises:
        Refused: the model's shape has changed.
    """
    meta, profile = checkpoint.meta, setting.profile
    saved = meta["profile"]
    shape = _differences(saved["model"], profile.model.model_dump(), "model.", ignore=("preset",))
    if shape:
        _refuse(checkpoint, "model", ", ".join(shape))
    return [
        *_differences({"path": meta["data"]["path"]}, {"path": str(setting.store.path)}, "data."),
        *_differences(saved["train"], profile.train.model_dump(), "train."),
        *_plugin_differences(saved["plugins"], profile.plugins),
        *_differences(meta.get("versions", {}), versions(), "version of "),
        *_differences({"machine": meta.get("machine")}, {"machine": setting.machine.name}, ""),
    ]


def _refuse(checkpoint: Checkpoint, what: str, change: str) -> NoReturn:
    raise Refused(
        f"{checkpoint.folder}: cannot resume with another {what}: {change}: put it back or start a "
        "new run"
    )


def _plugin_differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    switched = [
        f"plugins.{name} {'on -> off' if name in old else 'off -> on'}"
        for name in sorted(old.keys() ^ new.keys())
    ]
    changed = [
        f"plugins.{name}.{key} {old[name].get(key)} -> {new[name].get(key)}"
        for name in sorted(old.keys() & new.keys())
        for key in sorted(old[name].keys() | new[name].keys())
        if old[name].get(key) != new[name].get(key)
    ]
    return switched + changed


def run_info(
    trainer: Trainer, selection: registry.Selection, run: Run | None, peak: float | None
) -> RunInfo:
    """What a listener is told at the start."""
    profile = trainer.profile
    assert profile.model.vocab_size is not None
    params = count_parameters(trainer.raw_model)
    order = trainer.source.windows
    return RunInfo(
        name=run.folder.name if run else None,
        folder=str(run.folder) if run else None,
        profile=profile.name,
        device=trainer.machine.name,
        params=params,
        flops_per_token=flops_per_token(profile.model, params),
        peak_flops=peak,
        steps=profile.train.steps,
        start_step=trainer.progress.step,
        batch_size=profile.train.batch_size,
        n_micro=profile.train.n_micro,
        block_size=order.block_size,
        vocab_size=profile.model.vocab_size,
        plugins=tuple(
            PluginLine(e.name, e.plugin.claim.value, e.detail) for e in selection.enabled
        ),
        skipped=tuple((s.name, s.reason) for s in selection.skipped),
    )


def _differences(
    old: dict[str, Any], new: dict[str, Any], table: str, *, ignore: Sequence[str] = ()
) -> list[str]:
    return [
        f"{table}{key} {old.get(key)} -> {value}"
        for key, value in new.items()
        if key not in ignore and old.get(key) != value
    ]
