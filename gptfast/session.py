"""From a loaded profile to a running trainer: machine, data, plugins, folder, signals.

`train` is what the command calls; `bench` and the tests use its parts.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

from gptfast import registry
from gptfast.checkpoint import Checkpoint
from gptfast.config import Loaded
from gptfast.data.store import Store
from gptfast.errors import Refused, Stopped
from gptfast.hooks import Hooks
from gptfast.machine import find_machine, measure_matmul_peak, peak_dtype
from gptfast.model import count_parameters, flops_per_token
from gptfast.plugin import Profile
from gptfast.report import Finished, Listener, PluginLine, RunInfo
from gptfast.runs import Run, free_name, git_commit, newest_name, only_writer, run_folder
from gptfast.trainer import Trainer

GPT2_VOCABULARY = 50_257
"""What a foreign file of bare ids is taken for where the profile does not say."""


def train(
    loaded: Loaded,
    *,
    run: str | None = None,
    resume: bool = False,
    stop_at: int | None = None,
    device: str = "auto",
    asked: Sequence[str] = (),
    command: Sequence[str] = (),
    folder: Path,
    listener: Listener,
) -> Finished:
    """Train as the profile says, in `runs/NAME/` of `folder`.

    Args:
        run: name of the run, or a path; None: the profile's name, numbered where it is taken.
        resume: go on from the newest checkpoint of the run.
        stop_at: stop after this step, as if interrupted there.
        asked: plugins that must be supported here, whatever the profile says.
        command: the command line, kept with the run.

    Raises:
        Refused: before anything was done: profile, data, plugins or folder do not allow the run.
        Stopped: SIGINT or SIGTERM; the last finished step is saved.
        GptfastError: the run failed; what was saved before stands.
    """
    start = time.perf_counter()
    runs = folder / "runs"
    machine = find_machine(device)
    with ExitStack() as stack:
        store = stack.enter_context(Store.open(Path(loaded.profile.data.path)))
        profile = with_vocabulary(loaded.profile, store)
        selection = registry.select(
            registry.plan(profile, origins=loaded.origins),
            machine,
            unsupported=profile.unsupported_plugins,
            asked=asked,
        )
        name = run or (newest_name if resume else free_name)(profile.name, parent=runs)
        place = run_folder(name, parent=runs)
        stack.enter_context(only_writer(place))
        checkpoint = None
        if resume:
            kept = Run.resumed(place)
            resumable = kept.newest_intact()
            checkpoint = resumable.checkpoint
            changes = check_resume(checkpoint, profile, store)
            for step, reason in resumable.damaged.items():
                aside = kept.set_aside(step)
                listener.note(
                    f"{reason}; resumed from step {checkpoint.step}, the newest that loads "
                    f"({aside.name} is out of the way)"
                )
            for change in changes:
                listener.note(f"resumed with {change}")
        else:
            kept = Run.create(place, profile_toml=profile.to_toml())
        for warning in [*registry.shadowed(registry.discover()), *doubts(profile)]:
            listener.note(warning)
        peak = measure_matmul_peak(machine.device, peak_dtype(machine.device))
        trainer = Trainer(
            profile,
            hooks=Hooks(selection.enabled, note=listener.note),
            machine=machine,
            store=store,
            run=kept,
            checkpoint=checkpoint,
            listener=listener,
            peak_flops=peak,
            sessions=[
                *(checkpoint.meta.get("sessions", []) if checkpoint else []),
                {
                    "after_step": checkpoint.step if checkpoint else 0,
                    "started": datetime.now().isoformat(" ", timespec="seconds"),
                    "command": list(command),
                    "git_commit": git_commit(folder),
                },
            ],
        )
        with signals_stop(trainer) as caught, trainer:
            listener.started(run_info(trainer, selection, kept, peak))
            trainer.run(stop_at)
            progress = trainer.progress
            incomplete = progress.step < profile.train.steps
            finished = Finished(
                steps=progress.step,
                seconds=time.perf_counter() - start,
                loss=trainer.journal.loss,
                val_loss=progress.val_loss,
                best_val_loss=None if progress.best_step is None else progress.best_loss,
                stopped_by=(trainer.stop_reason or "--stop-at") if incomplete else None,
                folder=str(kept.folder),
            )
        listener.finished(finished)
        if caught:
            raise Stopped(
                f"{signal.Signals(caught[0]).name} after step {progress.step}, which is saved: "
                f"go on with gptfast train --resume --run {name}",
                signum=caught[0],
            )
    return finished


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


def doubts(profile: Profile) -> list[str]:
    """What a profile says that is possible and probably not meant."""
    train = profile.train
    if train.warmup_steps > train.steps:
        return [
            f"train.warmup_steps = {train.warmup_steps} is above train.steps = {train.steps}: "
            "the learning rate never reaches its peak"
        ]
    return []


def check_resume(checkpoint: Checkpoint, profile: Profile, store: Store) -> list[str]:
    """What of the training has changed since the checkpoint, as `key old -> new`.

    Raises:
        Refused: the model's shape or the data has changed.
    """
    saved = checkpoint.meta["profile"]
    shape = _differences(saved["model"], profile.model.model_dump(), "model", ignore=("preset",))
    if shape:
        raise Refused(
            f"{checkpoint.folder}: cannot resume with another model: {', '.join(shape)}: "
            "put it back or start a new run"
        )
    if checkpoint.meta["data"]["fingerprint"] != store.fingerprint:
        raise Refused(
            f"{checkpoint.folder}: cannot resume on other data: {checkpoint.meta['data']['path']} "
            f"-> {store.path}: put it back or start a new run"
        )
    return _differences(saved["train"], profile.train.model_dump(), "train")


def run_info(
    trainer: Trainer, selection: registry.Selection, run: Run | None, peak: float | None
) -> RunInfo:
    """What a listener is told at the start."""
    profile = trainer.profile
    assert profile.model.vocab_size is not None
    params = count_parameters(trainer.raw_model)
    order = trainer.source.windows
    n_tokens = trainer.store.n_tokens("train")
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
        train_tokens=n_tokens,
        epoch_steps=max(1, (n_tokens - 1) // order.block_size // profile.train.batch_size),
        plugins=tuple(
            PluginLine(e.name, e.plugin.claim.value, e.detail) for e in selection.enabled
        ),
        skipped=tuple((s.name, s.reason) for s in selection.skipped),
    )


@contextmanager
def signals_stop(trainer: Trainer) -> Iterator[list[int]]:
    """SIGINT and SIGTERM let the step finish, save and stop; the same one again stops at once.

    While a checkpoint is being written a second one waits for it, and a third stops at once.
    Yields the signals caught so far. Handlers are as found afterwards. Outside the main thread,
    where Python allows no handlers, it does nothing.
    """
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return

    def handle(signum: int, frame: FrameType | None) -> None:
        times = caught.count(signum)  # a cluster's SIGTERM may follow a SIGINT: not a second one
        if times > 1 or (times == 1 and not trainer.saving):
            raise KeyboardInterrupt
        caught.append(signum)
        trainer.interrupt(signal.Signals(signum).name)

    before = {signum: signal.signal(signum, handle) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _differences(
    old: dict[str, Any], new: dict[str, Any], table: str, *, ignore: Sequence[str] = ()
) -> list[str]:
    return [
        f"{table}.{key} {old.get(key)} -> {value}"
        for key, value in new.items()
        if key not in ignore and old.get(key) != value
    ]
