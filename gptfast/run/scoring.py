"""What a run makes of its model along the way: the loss over a split, and a sample."""

from __future__ import annotations

import torch

from gptfast.data.store import Store
from gptfast.host.hooks import Hooks
from gptfast.plugin import Machine
from gptfast.run.assembly import Assembly
from gptfast.run.evaluate import Score, evaluate
from gptfast.run.state import State


class Scorer:
    """Evaluates and samples the model of a run as it is; both end at once after a signal."""

    def __init__(
        self, built: Assembly, *, hooks: Hooks, machine: Machine, store: Store, state: State
    ) -> None:
        self.model = built.model
        self.hooks = hooks
        self._built = built
        self._machine = machine
        self._store = store
        self._state = state
        self.has_val = "val" in store.splits and store.n_tokens("val") > 1
        # A foreign file of bare ids has no tokenizer to show a text with.
        self.has_text = store.tokenizer_name is not None

    def score(self, split: str, *, windows: int, max_targets: int | None = None) -> Score | None:
        """The loss over a split; None: a signal ended it.

        Args:
            windows: in one forward pass.
            max_targets: tokens to score; None: all of the split.
        """
        return evaluate(
            self.model,
            self._store,
            split,
            block_size=self._built.profile.model.block_size,
            batch_size=windows,
            device=self._machine.device,
            forward_scope=self.hooks.forward_scope,
            max_targets=max_targets,
            should_stop=lambda: self._state.interrupted,
        )

    def sample(self) -> str | None:
        """A text that the model writes, the same for the same step; None: a signal ended it."""
        from gptfast.run.generate import Sampling, sample_text

        train = self._built.profile.train
        generator = torch.Generator(self._machine.device)
        generator.manual_seed(train.seed + self._built.progress.step)
        with self.hooks.eval_scope():
            text = sample_text(
                self._built.raw_model,
                self._store.tokenizer(),
                prompt="",
                max_new_tokens=train.sample_tokens,
                sampling=Sampling(),
                generator=generator,
                forward_scope=self.hooks.forward_scope,
                should_stop=lambda: self._state.interrupted,
            )
        return None if self._state.interrupted else text
