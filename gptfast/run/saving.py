"""The checkpoints that a run writes: when asked, and of its last whole step after an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gptfast.device.randomness import random_state
from gptfast.errors import GptfastError
from gptfast.run.assembly import Assembly
from gptfast.run.checkpoint import save_checkpoint
from gptfast.run.folder import Run
from gptfast.run.kit import Kit
from gptfast.run.state import Moment, State


class Saver:
    """Writes the checkpoints of a run, where the run is kept.

    Args:
        provenance: what it takes to repeat the run; goes into each checkpoint.
    """

    def __init__(
        self,
        built: Assembly,
        *,
        kit: Kit,
        state: State,
        provenance: Mapping[str, Any],
    ) -> None:
        self.run = kit.run
        self._built = built
        self._kit = kit
        self._state = state
        self._provenance = provenance

    def save(self) -> None:
        """Write a checkpoint of this step, and delete those that the profile does not keep.

        Raises:
            GptfastError: it cannot be written; the older ones are still there.
        """
        if self.run is None:
            return
        with self._state.during(Moment.WRITING):
            self._write(self.run)
            keep = self._built.profile.train.keep_checkpoints
            self.run.rotate(keep=keep, best=self._built.progress.best_step)

    def save_after_error(self, flush: Callable[[], None]) -> None:
        """Save the last finished step, where that is safe and has not been tried.

        Evaluations and samples, which may swap weights, only begin once the step is saved. Older
        checkpoints stay: what failed may have spoilt more than it said.

        Args:
            flush: writes the log, and raises where a loss in it is not finite.
        """
        step, state = self._built.progress.step, self._state
        if self.run is None or state.tried_step == step or not state.last_step_is_whole():
            return
        try:
            with state.during(Moment.WRITING):
                flush()
                self._write(self.run)
        except (GptfastError, OSError, RuntimeError) as error:
            self._kit.listener.note(
                f"step {step} could not be saved after the error below: {error}"
            )

    def _write(self, run: Run) -> None:
        built, state = self._built, self._state
        step = state.tried_step = built.progress.step
        checkpoint = save_checkpoint(
            run.checkpoint_folder(step),
            model=built.raw_model.state_dict(),
            trainer={
                "progress": vars(built.progress),
                "optimizer": built.optimizer.state_dict(),
                "random": random_state(self._kit.machine.device),
                "plugins": self._kit.hooks.state(),
            },
            tokenizer=self._kit.store.tokenizer_definition,
            meta={"step": step, "fits": state.fits, **self._provenance},
        )
        state.saved_step = step
        run.point("latest", step)
        self._kit.listener.saved(step, str(checkpoint.folder))
