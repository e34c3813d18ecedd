"""The only loop there is. `train`, `bench`, `eval` and the tests call it.

It knows no optimization by name: what makes it fast hangs on the hooks. It owns what no plugin
may: the token-weighted micro-batch loop, clipping between unscale and step, the schedule, the
checkpoint, and the order save -> evaluate -> sample -> stop.

What ends a run, by what it is doing (`gptfast.run.state.Moment`):

| moment              | signal       | again        | a hook fails  | not finite | no memory       |
|---------------------|--------------|--------------|---------------|------------|-----------------|
| between steps       | saves, stops | is cut       | saves, raises | -          | saves, raises   |
| gradients           | saves, stops | is cut       | saves, raises | raises     | halves, goes on |
| update              | saves, stops | saves, stops | raises        | -          | raises          |
| log and save        | saves, stops | saves, stops | raises        | raises     | raises          |
| evaluate and sample | saves, stops | is cut       | saves, raises | goes on    | halves, goes on |

- Saves: the last whole step is in a checkpoint. Where it only raises, the newest checkpoint is the
  one from before: half an update, or weights that are no good, are not written. An observer that
  fails comes after the update: that step is whole, and saved. An evaluation begins when its step is
  saved, and a signal ends it at once.
- Again: the same signal a second time, or `signals.GRACE_S` later still not stopped. Is cut: the
  step begun is left.
- Halves: half the micro-batch, with the same windows and random numbers.
- A loss that is not finite is found before the update where looking costs no wait, else when the
  log is written.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from gptfast.data.store import Store
from gptfast.device.memory import is_out_of_memory, out_of_memory, repeated_with_less
from gptfast.device.randomness import rewinds
from gptfast.errors import GptfastError
from gptfast.host.hooks import Hooks
from gptfast.optim import clip_gradients, lr_factor, set_rates
from gptfast.plugin import (
    Batch,
    Machine,
    Profile,
    Stepped,
    Update,
    Want,
)
from gptfast.report import Listener, Silent
from gptfast.run.assembly import Progress, assembled
from gptfast.run.checkpoint import Checkpoint
from gptfast.run.folder import Run
from gptfast.run.kit import Kit
from gptfast.run.metrics import MetricsLog, NotFinite
from gptfast.run.need import less
from gptfast.run.provenance import provenance
from gptfast.run.saving import Saver
from gptfast.run.scoring import Scorer
from gptfast.run.state import Moment, State


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
        fits: most windows in a forward pass that memory has room for; None: not known to be few.
    """

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
        fits: int | None = None,
    ) -> None:
        self.asked_profile = profile
        self.hooks = hooks
        self.machine = machine
        self.kit = Kit(hooks, machine, store, run, listener or Silent())
        self.state = State(profile, fits)
        self.progress = Progress()
        self._checkpoint = checkpoint
        self._peak_flops = peak_flops
        self._sessions = sessions

    @property
    def profile(self) -> Profile:
        """What is trained now: after every `configure`, with the micro-batch that fits."""
        return self.state.profile

    def __enter__(self) -> Trainer:
        kit, state, run, resumed = self.kit, self.state, self.kit.run, self._checkpoint
        with ExitStack() as stack:
            built = stack.enter_context(
                assembled(self.asked_profile, kit=kit, checkpoint=resumed, fits=state.fits)
            )
            state.profile, self.progress = built.profile, built.progress
            self.raw_model, self.model = built.raw_model, built.model
            self.optimizer, self.stepper = built.optimizer, built.stepper
            self.source = built.source
            # Walking through the modules takes longer than the rest of a step's bookkeeping.
            self._parameters = list(built.model.parameters())
            # A plugin's stepper may leave such an update out by itself, as fp16's does.
            waits = self.machine.runs_ahead and self.profile.train.finite_check == "auto"
            self._looks_first = not (built.owned_stepper or waits)
            if resumed is not None and run is not None:
                run.back_to(self.progress.step, best=self.progress.best_step)
                state.saved_step = self.progress.step
            state.tried_step = self.progress.step
            self.log = MetricsLog(built, kit=kit, peak_flops=self._peak_flops)
            origin = provenance(
                self.asked_profile,
                configured=self.profile,
                kit=kit,
                sessions=self._sessions,
            )
            self.saver = Saver(built, kit=kit, state=state, provenance=origin)
            self._less = partial(less, built=built, kit=kit, state=state)
            self.scorer = Scorer(built, kit=kit, state=state, saver=self.saver, less=self._less)
            self._leave = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self.state.during(Moment.WRITING):
            self._leave.__exit__(kind, error, traceback)

    def run(self, until: int | None = None) -> None:
        """Train up to step `until` (None: all of the profile's), or until something stops it.

        Raises:
            GptfastError: something failed; the last finished step is saved where that is safe.
        """
        steps = self.profile.train.steps
        until = steps if until is None else min(until, steps)
        try:
            self.scorer.evaluate_resumed(self._checkpoint)
            self.log.begin()
            while self.progress.step < until and not self._ended:
                self._after(self.one_step(), last=self.progress.step == until)
            self.log.flush()
        except NotFinite:
            raise
        except (Exception, KeyboardInterrupt) as error:
            self.saver.save_after_error(partial(self.log.flush, asks_plugins=False))
            if self.state.interrupted and (self.state.saved_step or 0) == self.progress.step:
                # A signal reaches compilers and workers too, and their end is no error then.
                raise KeyboardInterrupt from error
            if is_out_of_memory(error) and not isinstance(error, GptfastError):
                where = f"{self.machine.name}, after step {self.progress.step}"
                raise out_of_memory(self.profile, where=where) from error
            raise
        if self.state.stop_reason is not None and self.state.tried_step != self.progress.step:
            # A signal that came when it was already decided what to do after the step.
            self.saver.save()

    def one_step(self) -> Want:
        """Fetch the windows of a step, update the weights, tell the observers."""
        waited = time.perf_counter()
        batch = self.source.next()
        self.log.waited += time.perf_counter() - waited
        self.state.begin(rewinds(self.machine.device))
        loss = repeated_with_less(
            lambda: self._gradients(batch), less=self._less, device=self.machine.device
        )
        self.stepper.unscale(self.optimizer)
        norm = clip_gradients(
            self._parameters, self.profile.train.grad_clip, looks=not self.machine.runs_ahead
        )
        update = Update(self.progress.step + 1, loss, norm)
        if self._looks_first:
            self.log.check(update)
        want = self.hooks.before_step(update)
        factor = lr_factor(self.profile.train, self.progress.committed + 1)
        set_rates(self.optimizer, factor)
        self.state.commit()
        committed = False
        if Want.SKIP in want:
            self.stepper.skip(self.optimizer)
        else:
            committed = self.stepper.step(self.optimizer)
        self.optimizer.zero_grad(set_to_none=True)
        self.progress.step += 1
        self.progress.committed += committed
        self.progress.evaluates = False
        event = Stepped(
            step=update.step,
            steps=self.profile.train.steps,
            loss=update.loss,
            grad_norm=update.grad_norm,
            learning_rate=self.profile.train.learning_rate * factor,
            tokens=batch.tokens[:, 1:].numel(),
            committed=committed,
        )
        self.log.add(event)
        return want | self._observed(event)

    def _observed(self, event: Stepped) -> Want:
        try:
            want = self.hooks.step(event)
        except GptfastError:
            self.state.end()  # those behind the failing plugin have seen the step too
            raise
        self.state.end()
        return want

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

    def _after(self, want: Want, *, last: bool) -> None:
        """Log, then save -> evaluate -> sample -> stop: a failing evaluation loses nothing."""
        train, step = self.profile.train, self.progress.step
        self.state.heed(want)
        stopped = self._agreed_to_stop()
        ends = step == train.steps or (stopped and not self.state.interrupted)
        evaluates = self.scorer.has_val and (
            ends or due(train.eval_interval, step) or Want.EVAL in want
        )
        self.progress.evaluates = evaluates
        samples = (
            self.scorer.has_text
            and train.sample_tokens > 0
            and (ends or due(train.sample_interval, step))
        )
        asked = Want.SAVE in want or due(train.save_interval, step)
        saves = asked or last or stopped or evaluates or samples
        if saves or due(train.log_interval, step):
            # Also because a loss that is not finite must stop the run before it replaces a good
            # checkpoint.
            with self.state.during(Moment.WRITING):
                self.log.flush()
        with self.log.paused():
            if saves:
                self.saver.save()
            with self.state.during(Moment.SCORING):
                if evaluates and self.scorer.evaluate() is None:
                    return
                if samples:
                    self.scorer.sample()

    def _agreed_to_stop(self) -> bool:
        """Whether the run stops here; of several processes all do where one is to."""
        self.state.agreed = self.state.stop_reason is not None
        if self.hooks.can_agree and self.hooks.agree(self.state.agreed):
            if self.state.stop_reason is None:
                self.state.interrupt("another process")
            self.state.agreed = True
        return self.state.agreed

    @property
    def _ended(self) -> bool:
        """One process of several goes on until all know that it stops."""
        return self.state.agreed if self.hooks.can_agree else self.state.stop_reason is not None


def due(interval: int, step: int) -> bool:
    """Whether something done every `interval` steps is done after `step`; 0: never."""
    return interval > 0 and step % interval == 0
