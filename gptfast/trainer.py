"""The only loop there is. `train`, `bench`, `eval` and the tests call it.

It knows no optimization by name: what makes it fast hangs on the hooks. It owns what no plugin
may: the token-weighted micro-batch loop, clipping between unscale and step, the schedule, the
checkpoint, and the order save -> evaluate -> sample -> stop.

Longer than other files because building, looping, saving and resuming are one order of events,
which is easier to check in one place than in four.

Over 400 lines: building, stepping, saving and resuming share one state, and a run is followed best
in one file.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import gptfast
from gptfast.checkpoint import Checkpoint, save_checkpoint
from gptfast.data.batches import StoreWindows, WindowSource
from gptfast.data.store import Store
from gptfast.data.windows import WindowOrder
from gptfast.errors import GptfastError, Refused
from gptfast.evaluate import Score, evaluate
from gptfast.hooks import Hooks
from gptfast.journal import Journal, NotFinite
from gptfast.model import GPT, count_parameters, flops_per_token
from gptfast.optim import PlainStepper, build_adamw, lr_factor, set_lr, with_own_options
from gptfast.plugin import Batch, Evaluated, Machine, Parts, Profile, Source, Stepped, Stepper, Want
from gptfast.randomness import random_state, random_state_kept, set_random_state
from gptfast.report import Listener, Silent
from gptfast.runs import Run


@dataclass
class Progress:
    """How far a run is; everything in it goes into the checkpoint.

    Attributes:
        step: optimizer steps done.
        committed: updates applied; the schedule counts these.
        best_loss, best_step: lowest validation loss so far and where.
        val_loss, val_step: the last validation loss and where.
    """

    step: int = 0
    committed: int = 0
    best_loss: float = math.inf
    best_step: int | None = None
    val_loss: float | None = None
    val_step: int | None = None


class Trainer:
    """A run: built on entering the context, advanced by `run`, taken down on leaving.

    Args:
        profile: with the vocabulary filled in.
        hooks: the enabled plugins.
        machine: where it runs.
        store: the tokens.
        run: the folder to keep it in; None keeps nothing.
        checkpoint: the point to go on from; None starts at step 0.
        listener: told what happens.
        peak_flops: measured matmul peak, for the share of it that a step reaches.
        sessions: how this run was started and resumed; stored in each checkpoint.
    """

    raw_model: GPT
    model: nn.Module
    optimizer: Optimizer
    stepper: Stepper
    source: Source

    def __init__(
        self,
        profile: Profile,
        *,
        hooks: Hooks,
        machine: Machine,
        store: Store,
        run: Run | None = None,
        checkpoint: Checkpoint | None = None,
        listener: Listener | None = None,
        peak_flops: float | None = None,
        sessions: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.asked_profile = profile
        self.profile = profile
        self.hooks = hooks
        self.machine = machine
        self.store = store
        self.kept_in = run
        self.listener: Listener = listener or Silent()
        self.progress = Progress()
        self.stop_reason: str | None = None
        """What ends the run before its last step."""
        self.saving = False
        """Whether a checkpoint is being written."""
        self._interrupted = False
        self._updating = False
        self._checkpoint = checkpoint
        self._peak_flops = peak_flops
        self._sessions = list(sessions)
        self._has_val = "val" in store.splits and store.n_tokens("val") > 1
        # A foreign file of bare ids has no tokenizer to show a text with.
        self._has_text = store.tokenizer_name is not None

    # building and taking down ------------------------------------------------------------

    def __enter__(self) -> Trainer:
        device = self.machine.device
        with ExitStack() as stack:
            stack.enter_context(random_state_kept(device))
            stack.enter_context(self.hooks)
            self.profile = profile = self.hooks.configure(self.asked_profile)
            self.hooks.setup(profile, self.machine)
            torch.manual_seed(profile.train.seed)
            self.raw_model = GPT(profile.model).to(device)
            if self._checkpoint is not None:
                self._checkpoint.load_model(self.raw_model)
            self.model = self.hooks.wrap_model(self.raw_model)
            self.model.train()
            self.optimizer = self.hooks.build_optimizer(self.model, profile) or build_adamw(
                self.model, profile.train
            )
            for group in self.optimizer.param_groups:
                group.setdefault("initial_lr", float(group["lr"]))
            self.stepper = self.hooks.build_stepper() or PlainStepper()
            windows = self._windows(profile)
            self.source = self.hooks.wrap_source(WindowSource(windows))
            stack.callback(self.source.close)
            if self._checkpoint is not None:
                self._resume(self._checkpoint)
            self.hooks.ready(
                Parts(
                    profile, self.machine, self.raw_model, self.model, self.optimizer, self.source
                )
            )
            self.journal = Journal(
                windows,
                machine=self.machine,
                run=self.kept_in,
                listener=self.listener,
                flops_per_token=flops_per_token(profile.model, count_parameters(self.raw_model)),
                peak_flops=self._peak_flops,
                skipped_steps=self.progress.step - self.progress.committed,
            )
            self._saved_step = self.progress.step
            self._leave = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._leave.__exit__(kind, error, traceback)

    def _windows(self, profile: Profile) -> StoreWindows:
        return StoreWindows(
            self.store,
            WindowOrder(
                seed=profile.train.seed,
                split="train",
                n_tokens=self.store.n_tokens("train"),
                block_size=profile.model.block_size,
            ),
            profile.train.batch_size,
            self.machine.rank,
            self.machine.world,
        )

    # the loop ----------------------------------------------------------------------------

    def run(self, until: int | None = None) -> None:
        """Train up to step `until` (None: all of the profile's), or until something stops it."""
        steps = self.profile.train.steps
        until = steps if until is None else min(until, steps)
        try:
            while self.progress.step < until and self.stop_reason is None:
                self._after(self.one_step(), last=self.progress.step == until)
            self.journal.flush()
        except NotFinite:
            raise
        except Exception:
            self._save_after_error()
            raise
        if self.stop_reason is not None and self._saved_step != self.progress.step:
            # A signal that came when it was already decided what to do after the step.
            self.save()

    def interrupt(self, reason: str) -> None:
        """Have the run save and stop after the step, or in the evaluation, that it is in.

        Safe in a signal handler.
        """
        self.stop_reason = reason
        self._interrupted = True

    def one_step(self) -> Want:
        """Fetch the windows of a step, update the weights, tell the observers."""
        waited = time.perf_counter()
        batch = self.source.next()
        self.journal.waited += time.perf_counter() - waited
        loss = self._gradients_with_recovery(batch)
        self.stepper.unscale(self.optimizer)
        grad_norm = self._clip()
        factor = lr_factor(self.profile.train, self.progress.committed + 1)
        for group in self.optimizer.param_groups:
            set_lr(group, group["initial_lr"] * factor)
        self._updating = True
        committed = self.stepper.step(self.optimizer)
        self.optimizer.zero_grad(set_to_none=True)
        self.progress.step += 1
        self.progress.committed += committed
        self._updating = False
        event = Stepped(
            step=self.progress.step,
            steps=self.profile.train.steps,
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=self.profile.train.learning_rate * factor,
            tokens=batch.tokens[:, 1:].numel(),
            committed=committed,
        )
        self.journal.add(event)
        return self.hooks.step(event)

    def _gradients_with_recovery(self, batch: Batch) -> Tensor:
        """Gradients of one step; after an error that a plugin knows a way out of, once more with
        the same windows and the same random numbers. Nothing has been committed yet."""
        if not self.hooks.can_recover:
            return self._gradients(batch)
        before = random_state(self.machine.device)
        while True:
            try:
                return self._gradients(batch)
            except (RuntimeError, MemoryError) as error:
                changed = self.hooks.recover(error, self.profile)
                if changed is None:
                    raise
                self.profile = changed
            self.optimizer.zero_grad(set_to_none=True)
            set_random_state(before, self.machine.device)

    def _gradients(self, batch: Batch) -> Tensor:
        """Add the gradient of the step's mean loss to the parameters; returns that loss."""
        tokens = batch.tokens.to(self.machine.device, non_blocking=True)
        n_targets = tokens[:, 1:].numel()
        parts = torch.split(tokens, self.profile.train.windows_per_micro)
        total = torch.zeros((), device=self.machine.device)
        for i, part in enumerate(parts, start=1):
            with self.hooks.micro_scope(last=i == len(parts)):
                with self.hooks.forward_scope():
                    loss = self.model(part[:, :-1], part[:, 1:]) / n_targets
                self.stepper.backward(loss)
            total += loss.detach()
        return total

    def _clip(self) -> Tensor:
        """Norm of the gradient; the gradient is scaled down to at most `grad_clip`."""
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        if self.profile.train.grad_clip == 0:
            return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        return nn.utils.clip_grad_norm_(parameters, self.profile.train.grad_clip)

    # after a step ------------------------------------------------------------------------

    def _after(self, want: Want, *, last: bool) -> None:
        """Log, then save -> evaluate -> sample -> stop: a failing evaluation loses nothing."""
        train, step = self.profile.train, self.progress.step
        self._note_stop(want)
        stopped = self.stop_reason is not None
        ends = step == train.steps or (stopped and not self._interrupted)
        evaluates = self._has_val and (ends or due(train.eval_interval, step) or Want.EVAL in want)
        samples = (
            self._has_text
            and train.sample_tokens > 0
            and (ends or due(train.sample_interval, step))
        )
        asked = Want.SAVE in want or due(train.save_interval, step)
        saves = asked or last or stopped or evaluates or samples
        if saves or due(train.log_interval, step):
            # Also because a loss that is not finite must stop the run before it replaces a good
            # checkpoint.
            self.journal.flush()
        with self.journal.paused():
            if saves:
                self.save()
            if evaluates and self.evaluate() is None:
                return
            if samples:
                self._sample()

    def _note_stop(self, want: Want) -> None:
        if Want.STOP in want and self.stop_reason is None:
            self.stop_reason = "a plugin"

    def save(self) -> None:
        """Write a checkpoint of this step, where the run is kept."""
        if self.kept_in is None:
            return
        self.saving = True
        try:
            self._write_checkpoint(self.kept_in)
            keep = self.profile.train.keep_checkpoints
            self.kept_in.rotate(keep=keep, best=self.progress.best_step)
        finally:
            self.saving = False

    def _save_after_error(self) -> None:
        """Save the last finished step, where that is safe and has not been tried.

        Weights, optimizer and progress change between the call of the stepper and the count of
        its step: an error in there may leave half an update, and nothing is saved. Before it, in
        the forward and backward pass of the next step, they are those of the last one; random
        numbers may have been drawn, so that dropout goes on with others. After it all observers
        have seen the step, also those behind a failing one. Evaluations and samples, which may
        swap weights, only begin once the step is saved. A loss that is not finite is found by the
        flush. Older checkpoints stay: what failed may have spoilt more than it said.
        """
        step = self.progress.step
        if self.kept_in is None or self._updating or self._saved_step == step:
            return
        try:
            self.journal.flush()
            self.saving = True
            self._write_checkpoint(self.kept_in)
        except (GptfastError, OSError, RuntimeError) as error:
            self.listener.note(f"step {step} could not be saved after the error below: {error}")
        finally:
            self.saving = False

    def _write_checkpoint(self, run: Run) -> None:
        step, model = self.progress.step, self.raw_model
        self._saved_step = step  # at least tried: a full disk is not tried again
        checkpoint = save_checkpoint(
            run.checkpoint_folder(step),
            model=model.state_dict(),
            trainer={
                "progress": vars(self.progress),
                "optimizer": self.optimizer.state_dict(),
                "random": random_state(self.machine.device),
                "plugins": self.hooks.state(),
            },
            tokenizer=self.store.tokenizer_definition,
            meta={
                "step": step,
                "profile": self.asked_profile.model_dump(),
                "model": self.profile.model.model_dump(),
                "plugins": {
                    e.name: {"package": e.package, "version": e.version} for e in self.hooks.enabled
                },
                "data": {
                    "path": str(self.store.path),
                    "fingerprint": self.store.fingerprint,
                    "source": self.store.source,
                },
                "machine": self.machine.name,
                "sessions": self._sessions,
                "versions": {
                    "gptfast": gptfast.__version__,
                    "python": platform.python_version(),
                    "torch": torch.__version__,
                    "numpy": np.__version__,
                },
            },
        )
        run.point("latest", step)
        self.listener.saved(step, str(checkpoint.folder))

    def evaluate(self) -> Score | None:
        """Score `val`, tell everybody, remember the best. None: stopped in the middle."""
        start = time.perf_counter()
        with self.hooks.eval_scope():
            score = self.score("val", max_targets=self.profile.train.eval_tokens)
        if score is None:
            return None
        progress, step = self.progress, self.progress.step
        best = score.loss < progress.best_loss
        progress.val_loss, progress.val_step = score.loss, step
        if best:
            progress.best_loss, progress.best_step = score.loss, step
        seconds = time.perf_counter() - start
        event = Evaluated(step, score.loss, score.tokens, best, seconds)
        if self.kept_in is not None:
            self.kept_in.log([{"kind": "eval", **vars(event)}])
            if best:
                self.kept_in.point("best", step)
        self.listener.evaluated(event)
        self._note_stop(self.hooks.evaluated(event))
        return score

    def score(self, split: str, *, max_targets: int | None = None) -> Score | None:
        """The loss of the model as it is over a split."""
        return evaluate(
            self.model,
            self.store,
            split,
            block_size=self.profile.model.block_size,
            batch_size=self.profile.train.windows_per_micro,
            device=self.machine.device,
            forward_scope=self.hooks.forward_scope,
            max_targets=max_targets,
            should_stop=lambda: self._interrupted,
        )

    def _sample(self) -> None:
        from gptfast.generate import Sampling, sample_text

        generator = torch.Generator(self.machine.device)
        generator.manual_seed(self.profile.train.seed + self.progress.step)
        with self.hooks.eval_scope():
            text = sample_text(
                self.raw_model,
                self.store.tokenizer(),
                prompt="",
                max_new_tokens=self.profile.train.sample_tokens,
                sampling=Sampling(),
                generator=generator,
                forward_scope=self.hooks.forward_scope,
                should_stop=lambda: self._interrupted,
            )
        if not self._interrupted:
            self.listener.sampled(self.progress.step, text)

    # resuming ----------------------------------------------------------------------------

    def _resume(self, checkpoint: Checkpoint) -> None:
        state = checkpoint.load_trainer()
        self.progress = progress = Progress(**state["progress"])
        if self.kept_in is not None:
            # A checkpoint is saved before its evaluation: the log knows the result.
            self.kept_in.forget_after(progress.step)
            for record in self.kept_in.metrics():
                if record["kind"] == "eval":
                    progress.val_loss, progress.val_step = record["loss"], record["step"]
                    if record["best"]:
                        progress.best_loss, progress.best_step = record["loss"], record["step"]
            # They may name a step that is to be done again.
            self.kept_in.point("latest", progress.step)
            self.kept_in.point("best", progress.best_step)
        try:
            self.optimizer.load_state_dict(
                with_own_options(state["optimizer"], self.optimizer.state_dict())
            )
        except (KeyError, ValueError) as error:
            raise Refused(
                f"{checkpoint.folder}: its optimizer has other parameters than this run's "
                f"({error}): resume with the optimizer plugins it was trained with"
            ) from error
        missing = self.hooks.load_state(state["plugins"])
        if missing:
            self.listener.note(
                f"{checkpoint.folder.name} has no state of {', '.join(missing)}: they start afresh"
            )
        self.source.seek(progress.step + 1)
        set_random_state(state["random"], self.machine.device)


def due(interval: int, step: int) -> bool:
    """Whether something done every `interval` steps is done after `step`; 0: never."""
    return interval > 0 and step % interval == 0
