"""What a run makes of its model along the way: the loss over a split, and a sample."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from gptfast.device.memory import repeated_with_less
from gptfast.plugin import Evaluated, Want
from gptfast.run.assembly import Assembly
from gptfast.run.checkpoint import Checkpoint
from gptfast.run.evaluate import Score, evaluate
from gptfast.run.folder import Run
from gptfast.run.kit import Kit
from gptfast.run.saving import Saver
from gptfast.run.state import State


class Scorer:
    """Evaluates and samples the model of a run as it is; both end at once after a signal.

    Args:
        less: as `gptfast.device.memory.repeated_with_less` takes it.
    """

    def __init__(
        self,
        built: Assembly,
        *,
        kit: Kit,
        state: State,
        saver: Saver,
        less: Callable[[BaseException], Callable[[], None] | None],
    ) -> None:
        self.model = built.model
        self.hooks = kit.hooks
        self._built = built
        self._kit = kit
        self._state = state
        self._saver = saver
        self._less = less
        store = kit.store
        self.has_val = "val" in store.splits and store.n_tokens("val") > 1
        # A foreign file of bare ids has no tokenizer to show a text with.
        self.has_text = store.tokenizer_name is not None

    def score(self, split: str, *, max_targets: int | None = None) -> Score | None:
        """The loss of the model as it is over a split; None: a signal ended it.

        Args:
            max_targets: tokens to score; None: all of the split.
        """
        profile = self._state.profile
        return evaluate(
            self.model,
            self._kit.store,
            split,
            block_size=profile.model.block_size,
            batch_size=profile.train.windows_per_micro,
            device=self._kit.machine.device,
            forward_scope=self.hooks.forward_scope,
            max_targets=max_targets,
            should_stop=lambda: self._state.interrupted,
        )

    def evaluate(self) -> Score | None:
        """Score `val`, tell everybody, remember the best. None: a signal ended it."""
        start = time.perf_counter()
        max_targets = self._state.profile.train.eval_tokens
        with self.hooks.eval_scope():
            score = repeated_with_less(
                lambda: self.score("val", max_targets=max_targets),
                less=self._less,
                device=self._kit.machine.device,
            )
        if score is None:
            return None
        progress = self._built.progress
        best, seconds = score.loss < progress.best_loss, time.perf_counter() - start
        event = Evaluated(progress.step, score.loss, score.tokens, best, seconds)
        if self._kit.run is not None:
            self._kit.run.log([{"kind": "eval", **vars(event)}])
        self._kit.listener.evaluated(event)
        self._take(event)
        return score

    def evaluate_resumed(self, checkpoint: Checkpoint | None) -> None:
        """Do what the checkpoint resumed from was saved before: the evaluation of its step.

        Where the log has its result, the observers hear that again and nothing is computed.
        """
        progress = self._built.progress
        if not progress.evaluates:
            return
        run = self._kit.run
        if run is None and checkpoint is not None:  # another process keeps it
            run = Run(checkpoint.folder.parent.parent)
        logged = run.metrics() if run is not None else []
        known = [r for r in logged if r["kind"] == "eval" and r["step"] == progress.step]
        if known:
            record = {key: value for key, value in known[-1].items() if key != "kind"}
            self._take(Evaluated(**record))
        else:
            self.evaluate()

    def _take(self, event: Evaluated) -> None:
        """Remember an evaluation and have the observers hear of it."""
        self._built.progress.take(event)
        if self._kit.run is not None and event.best:
            self._kit.run.point("best", event.step)
        want = self.hooks.evaluated(event)
        self._state.heed(want)
        if Want.SAVE in want:
            self._saver.save()

    def sample(self) -> None:
        """Show a text that the model writes, the same for the same step."""
        from gptfast.run.generate import Sampling, sample_text

        train, step = self._state.profile.train, self._built.progress.step
        generator = torch.Generator(self._kit.machine.device)
        generator.manual_seed(train.seed + step)
        with self.hooks.eval_scope():
            text = sample_text(
                self._built.raw_model,
                self._kit.store.tokenizer(),
                prompt="",
                max_new_tokens=train.sample_tokens,
                sampling=Sampling(),
                generator=generator,
                forward_scope=self.hooks.forward_scope,
                should_stop=lambda: self._state.interrupted,
            )
        if not self._state.interrupted:
            self._kit.listener.sampled(step, text)
