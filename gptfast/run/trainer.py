"""The only loop there is. `train`, `bench`, `eval` and the tests call it.

It knows no optimization by name: what makes it fast hangs on the hooks. It owns what no plugin
may: the token-weighted micro-batch loop, clipping between unscale and step, the schedule, the
checkpoint, and the order save -> evaluate -> sample -> stop.

What ends a run, by what it is doing (`gptfast.run.state.Moment`):

| moment              | signal          | error in a hook | loss not finite | out of memory |
|---------------------|-----------------|-----------------|-----------------|---------------|
| between steps       | saved, stops    | saved, raised   | raised          | saved, raised |
| forward and backward| saved, stops    | saved, raised   | raised          | half, again   |
| update              | waits           | raised          | raised          | raised        |
| log and save        | waits           | raised          | raised          | raised        |
| evaluate and sample | cut, stops      | raised          | raised          | half, again   |

- saved: the last whole step is in a checkpoint before the run ends. Where it only says raised, the
  newest checkpoint is the one from before: half an update, or weights that are no good, are not
  written; an evaluation begins only when its step is saved. An observer that fails in the update
  comes after it: that step is whole, and saved.
- stops: after the step that it is in. The same signal again, or `signals.GRACE_S` without an end,
  leaves a step, an evaluation or a sample where it is; an update and a save are waited for.
- half, again: with half the micro-batch, the same windows and the same random numbers.
- a loss that is not finite is found before the update where looking costs no wait, else when the
  log is written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gptfast.data.store import Store
from gptfast.device.memory import is_out_of_memory, out_of_memory, repeated_with_less, with_less
from gptfast.device.randomness import rewinds
from gptfast.errors import GptfastError
from gptfast.host.hooks import Hooks
from gptfast.model import GPT, count_parameters, flops_per_token
from gptfast.optim import lr_factor, set_rates
from gptfast.plugin import (
    Batch,
    Evaluated,
    Machine,
    Profile,
    Source,
    Stepped,
    Stepper,
    Update,
    Want,
)
from gptfast.report import Listener, Silent
from gptfast.run.assembly import Progress, assembled
from gptfast.run.checkpoint import Checkpoint
from gptfast.run.evaluate import Score
from gptfast.run.folder import Run
from gptfast.run.metrics import Journal, NotFinite
from gptfast.run.provenance import provenance
from gptfast.run.saving import Saver
from gptfast.run.scoring import Scorer
from gptfast.run.state import Moment, State

T = TypeVar("T")


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
        fits: int | None = None,
    ) -> None:
        self.asked_profile = profile
        self.profile = profile
        self.hooks = hooks
        self.machine = machine
        self.store = store
        self.kept_in = run
        self.listener: Listener = listener or Silent()
        self.progress = Progress()
        self.state = State(fits=fits)
        self._checkpoint = checkpoint
        self._peak_flops = peak_flops
        self._sessions = sessions

    # building and taking down ------------------------------------------------------------

    def __enter__(self) -> Trainer:
        with ExitStack() as stack:
            built = stack.enter_context(
                assembled(
                    self.asked_profile,
                    hooks=self.hooks,
                    machine=self.machine,
                    store=self.store,
                    checkpoint=self._checkpoint,
                    fits=self.state.fits,
                    note=self.listener.note,
                )
            )
            self.profile, self.progress = built.profile, built.progress
            self.raw_model, self.model = built.raw_model, built.model
            self.optimizer, self.stepper = built.optimizer, built.stepper
            self.source = built.source
            # Walking through the modules takes longer than the rest of a step's bookkeeping.
            self._parameters = list(built.model.parameters())
            # A plugin's stepper may leave such an update out by itself, as fp16's does.
            waits = self.machine.runs_ahead and self.profile.train.finite_check == "auto"
            self._looks_first = not (built.owned_stepper or waits)
            if self._checkpoint is not None and self.kept_in is not None:
                self.kept_in.back_to(self.progress.step, best=self.progress.best_step)
                self.state.saved_step = self.progress.step
            self.state.tried_step = self.progress.step
            self.journal = Journal(
                built.windows,
                machine=self.machine,
                run=self.kept_in,
                listener=self.listener,
                flops_per_token=flops_per_token(
                    self.profile.model, count_parameters(self.raw_model)
                ),
                peak_flops=self._peak_flops,
                skipped_steps=self.progress.step - self.progress.committed,
                plugin_metrics=self.hooks.metrics,
            )
            self.saver = Saver(
                self.kept_in,
                built=built,
                hooks=self.hooks,
                machine=self.machine,
                store=self.store,
                state=self.state,
                listener=self.listener,
                provenance=provenance(
                    self.asked_profile,
                    configured=self.profile,
                    enabled=self.hooks.enabled,
                    store=self.store,
                    machine=self.machine,
                    sessions=self._sessions,
                ),
            )
            self.scorer = Scorer(
                built,
                hooks=self.hooks,
                machine=self.machine,
                store=self.store,
                state=self.state,
            )
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

    # the loop ----------------------------------------------------------------------------

    def run(self, until: int | None = None) -> None:
        """Train up to step `until` (None: all of the profile's), or until something stops it.

        Raises:
            GptfastError: something failed; the last finished step is saved where that is safe.
        """
        steps = self.profile.train.steps
        until = steps if until is None else min(until, steps)
        try:
            self._evaluate_resumed()
            self.journal.begin()
            while self.progress.step < until and not self._ended:
                self._after(self.one_step(), last=self.progress.step == until)
            self.journal.flush()
        except NotFinite:
            raise
        except (Exception, KeyboardInterrupt) as error:
            self.saver.save_after_error(partial(self.journal.flush, asks_plugins=False))
            if self.state.interrupted and (self.state.saved_step or 0) == self.progress.step:
                # A signal reaches compilers and workers too, and their end is no error then.
                raise KeyboardInterrupt from error
            if is_out_of_memory(error) and not isinstance(error, GptfastError):
                where = f"{self.machine.name}, after step {self.progress.step}"
                raise out_of_memory(self.profile, where=where) from error
            raise
        if self.stop_reason is not None and self.state.tried_step != self.progress.step:
            # A signal that came when it was already decided what to do after the step.
            self.save()

    def interrupt(self, reason: str) -> None:
        """Have the run save and stop after the step, or in the evaluation, that it is in.

        Safe in a signal handler.
        """
        self.state.stop_reason = reason
        self.state.interrupted = True

    @property
    def can_be_cut(self) -> bool:
        """Whether KeyboardInterrupt, raised right here, loses nothing but the step begun."""
        return self.state.can_be_cut

    @property
    def stop_reason(self) -> str | None:
        """What ends the run before its last step."""
        return self.state.stop_reason

    def one_step(self) -> Want:
        """Fetch the windows of a step, update the weights, tell the observers."""
        waited = time.perf_counter()
        batch = self.source.next()
        self.journal.waited += time.perf_counter() - waited
        self.state.begin(rewinds(self.machine.device))
        loss = repeated_with_less(
            lambda: self._gradients(batch), less=self._with_less, device=self.machine.device
        )
        self.stepper.unscale(self.optimizer)
        update = Update(self.progress.step + 1, loss, self._clip())
        if self._looks_first:
            self.journal.check(update)
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
        self.journal.add(event)
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

    def _clip(self) -> Tensor:
        """Norm of the gradient; the gradient is scaled down to at most `grad_clip`."""
        parameters = [p for p in self._parameters if p.grad is not None]
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        most = self.profile.train.grad_clip
        # To look costs less than to scale by 1, but on a device it would wait. NaN is scaled too.
        fits = not self.machine.runs_ahead and bool(norm + 1e-6 <= most)
        if most > 0 and not fits:
            nn.utils.clip_grads_with_norm_(parameters, most, norm)
        return norm

    # too little memory -------------------------------------------------------------------

    def _with_less(self, error: BaseException) -> Callable[[], None] | None:
        """What goes on with a smaller micro-batch; None: there is none that helps."""
        changed = self.hooks.recover(error, self.profile)
        # One of several processes cannot repeat a step in which all take part.
        if changed is None and self.machine.world == 1:
            changed = with_less(self.profile, error)
        return None if changed is None else partial(self._go_on_with, changed)

    def _go_on_with(self, changed: Profile) -> None:
        before, now = self.profile.train.windows_per_micro, changed.train.windows_per_micro
        self.profile, self.state.fits = changed, now
        self.listener.note(
            f"after step {self.progress.step}: {before} windows in a forward pass failed; goes on "
            f"with {now} at a time and the same windows in a step"
        )
        self.optimizer.zero_grad(set_to_none=True)

    # after a step ------------------------------------------------------------------------

    def _after(self, want: Want, *, last: bool) -> None:
        """Log, then save -> evaluate -> sample -> stop: a failing evaluation loses nothing."""
        train, step = self.profile.train, self.progress.step
        self._note_stop(want)
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
                self.journal.flush()
        with self.journal.paused():
            if saves:
                self.save()
            with self.state.during(Moment.SCORING):
                if evaluates and self.evaluate() is None:
                    return
                if samples and (text := self.scorer.sample()) is not None:
                    self.listener.sampled(step, text)

    def _note_stop(self, want: Want) -> None:
        if Want.STOP in want and self.stop_reason is None:
            self.state.stop_reason = "a plugin"

    def _agreed_to_stop(self) -> bool:
        """Whether the run stops here; of several processes all do where one is to."""
        self.state.agreed = self.stop_reason is not None
        if self.hooks.can_agree and self.hooks.agree(self.state.agreed):
            if self.stop_reason is None:
                self.interrupt("another process")
            self.state.agreed = True
        return self.state.agreed

    @property
    def _ended(self) -> bool:
        """One process of several goes on until all know that it stops."""
        return self.state.agreed if self.hooks.can_agree else self.stop_reason is not None

    def save(self) -> None:
        """Write a checkpoint of this step, where the run is kept."""
        self.saver.save()

    def evaluate(self) -> Score | None:
        """Score `val`, tell everybody, remember the best. None: stopped in the middle."""
        start = time.perf_counter()
        max_targets = self.profile.train.eval_tokens
        with self.hooks.eval_scope():
            score = repeated_with_less(
                lambda: self.score("val", max_targets=max_targets),
                less=self._with_less,
                device=self.machine.device,
            )
        if score is None:
            return None
        step, best = self.progress.step, score.loss < self.progress.best_loss
        seconds = time.perf_counter() - start
        event = Evaluated(step, score.loss, score.tokens, best, seconds)
        if self.kept_in is not None:
            self.kept_in.log([{"kind": "eval", **vars(event)}])
        self.listener.evaluated(event)
        self._evaluated(event)
        return score

    def _evaluated(self, event: Evaluated) -> None:
        """Remember an evaluation and have the observers hear of it."""
        self.progress.take(event)
        if self.kept_in is not None and event.best:
            self.kept_in.point("best", event.step)
        want = self.hooks.evaluated(event)
        self._note_stop(want)
        if Want.SAVE in want:
            self.save()

    def _evaluate_resumed(self) -> None:
        """Do what the checkpoint resumed from was saved before: the evaluation of its step.

        Where the log has its result, the observers hear that again and nothing is computed.
        """
        progress = self.progress
        if not progress.evaluates:
            return
        run = self.kept_in
        if run is None and self._checkpoint is not None:  # another process keeps it
            run = Run(self._checkpoint.folder.parent.parent)
        logged = run.metrics() if run is not None else []
        known = [r for r in logged if r["kind"] == "eval" and r["step"] == progress.step]
        if known:
            record = {key: value for key, value in known[-1].items() if key != "kind"}
            self._evaluated(Evaluated(**record))
        else:
            self.evaluate()

    def score(self, split: str, *, max_targets: int | None = None) -> Score | None:
        """The loss of the model as it is over a split."""
        windows = self.profile.train.windows_per_micro
        return self.scorer.score(split, windows=windows, max_targets=max_targets)


def due(interval: int, step: int) -> bool:
    """Whether something done every `interval` steps is done after `step`; 0: never."""
    return interval > 0 and step % interval == 0
