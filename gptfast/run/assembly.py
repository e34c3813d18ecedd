"""From a profile to the parts of a run, in the order that the contract promises."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gptfast.data.batches import StoreWindows, WindowSource
from gptfast.data.store import Store
from gptfast.data.windows import WindowOrder
from gptfast.device.memory import build_model, with_at_most
from gptfast.device.randomness import random_state_kept, set_random_state
from gptfast.model import GPT
from gptfast.optim import PlainStepper, build_adamw, load_optimizer, remember_peaks
from gptfast.plugin import Evaluated, Machine, Parts, Profile, Source, Stepper
from gptfast.run.checkpoint import Checkpoint
from gptfast.run.kit import Kit


@dataclass
class Progress:
    """How far a run is; everything in it goes into the checkpoint.

    Attributes:
        step: optimizer steps done.
        committed: updates applied; the schedule counts these.
        best_loss, best_step: lowest validation loss so far and where.
        val_loss: the last validation loss.
        evaluates: whether the step has its evaluation still before it.
    """

    step: int = 0
    committed: int = 0
    best_loss: float = math.inf
    best_step: int | None = None
    val_loss: float | None = None
    evaluates: bool = False

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> Progress:
        """As a checkpoint holds it; one of gptfast 0.1.0 holds `val_step` too."""
        return cls(**{name: value for name, value in saved.items() if name != "val_step"})

    def take(self, event: Evaluated) -> None:
        """Remember an evaluation of this step."""
        self.evaluates = False
        self.val_loss = event.loss
        if event.best:
            self.best_loss, self.best_step = event.loss, event.step


@dataclass(frozen=True)
class Assembly:
    """The parts of a run, built and resumed.

    Attributes:
        profile: after every `configure`.
        model: after every `wrap_model`; what the loop calls.
        owned_stepper: whether a plugin made the stepper.
    """

    profile: Profile
    raw_model: GPT
    model: nn.Module
    optimizer: Optimizer
    stepper: Stepper
    owned_stepper: bool
    windows: StoreWindows
    source: Source
    progress: Progress


@contextmanager
def assembled(
    asked: Profile,
    *,
    kit: Kit,
    checkpoint: Checkpoint | None,
    fits: int | None,
) -> Iterator[Assembly]:
    """Build a run; on leaving everything is taken down in reverse, random state included.

    Args:
        checkpoint: the point to go on from; None: step 0.
        fits: most windows in a forward pass; None: as the profile says.

    Raises:
        Refused: the checkpoint is damaged, or of another model or optimizer.
        GptfastError: a hook failed.
    """
    hooks, machine = kit.hooks, kit.machine
    with ExitStack() as stack:
        stack.enter_context(random_state_kept(machine.device))
        stack.enter_context(hooks)
        profile = with_at_most(hooks.configure(with_at_most(asked, fits)), fits)
        hooks.setup(profile, machine)
        torch.manual_seed(profile.train.seed)
        raw_model = build_model(profile.model, machine.device)
        if checkpoint is not None:
            checkpoint.load_model(raw_model)
        model = hooks.wrap_model(raw_model)
        model.train()
        optimizer = hooks.build_optimizer(model, profile) or build_adamw(model, profile.train)
        remember_peaks(optimizer)
        stepper = hooks.build_stepper()
        windows = _windows(profile, kit.store, machine)
        source = hooks.wrap_source(WindowSource(windows))
        stack.callback(source.close)
        progress = Progress()
        if checkpoint is not None:
            state = checkpoint.load_trainer()
            progress = Progress.of(state["progress"])
            load_optimizer(optimizer, state["optimizer"], source=str(checkpoint.folder))
            missing = hooks.load_state(state["plugins"])
            if missing:
                names = ", ".join(missing)
                kit.listener.note(
                    f"{checkpoint.folder.name} has no state of {names}: they start afresh"
                )
            source.seek(progress.step + 1)
            set_random_state(state["random"], machine.device)
        hooks.ready(Parts(profile, machine, raw_model, model, optimizer, source))
        yield Assembly(
            profile,
            raw_model,
            model,
            optimizer,
            stepper or PlainStepper(),
            stepper is not None,
            windows,
            source,
            progress,
        )


def _windows(profile: Profile, store: Store, machine: Machine) -> StoreWindows:
    order = WindowOrder(
        seed=profile.train.seed,
        split="train",
        n_tokens=store.n_tokens("train"),
        block_size=profile.model.block_size,
    )
    return StoreWindows(store, order, profile.train.batch_size, machine.rank, machine.world)
