"""What a run is in the middle of: what a signal may cut, and what is still fit to be saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

from gptfast.plugin import Profile, Want


class Moment(Enum):
    """What a run is doing. `gptfast.run.trainer` has the table of what ends each."""

    BETWEEN = "between steps"
    GRADIENTS = "gradients"
    UPDATE = "update"
    WRITING = "log and save"
    SCORING = "evaluate and sample"


@dataclass
class State:
    """Where a run stands between what it has done and what it has kept.

    Attributes:
        profile: with the micro-batch that memory has room for.
        moment: what it is doing.
        saved_step: the last step that is in a checkpoint.
        tried_step: the last step that was tried to be saved; a full disk is not tried again.
        stop_reason: what ends the run before its last step.
        interrupted: a signal is why: nothing more is evaluated or sampled.
        agreed: all processes know that the run stops here.
        fits: most windows in a forward pass that memory has room for; None: not known to be few.
    """

    profile: Profile
    fits: int | None = None
    moment: Moment = Moment.BETWEEN
    saved_step: int | None = None
    tried_step: int = 0
    stop_reason: str | None = None
    interrupted: bool = False
    agreed: bool = False
    _rewind: Callable[[], None] | None = None

    def begin(self, rewind: Callable[[], None]) -> None:
        """A step begins; `rewind` takes back the random numbers that it draws until its update."""
        self.moment, self._rewind = Moment.GRADIENTS, rewind

    def commit(self) -> None:
        """The update begins: from here to `end` weights and counts do not belong together."""
        self.moment, self._rewind = Moment.UPDATE, None

    def end(self) -> None:
        """The step is done, and everybody has heard of it."""
        self.moment = Moment.BETWEEN

    def heed(self, want: Want) -> None:
        """Note what an observer wants of the run: whether it is to stop."""
        if Want.STOP in want and self.stop_reason is None:
            self.stop_reason = "a plugin"

    @contextmanager
    def during(self, moment: Moment) -> Iterator[None]:
        """Inside, the run does this; afterwards, also after an error, what it did before."""
        before, self.moment = self.moment, moment
        try:
            yield
        finally:
            self.moment = before

    def interrupt(self, reason: str) -> None:
        """Have the run save and stop after the step, or in the evaluation, that it is in.

        Safe in a signal handler.
        """
        self.stop_reason = reason
        self.interrupted = True

    @property
    def can_be_cut(self) -> bool:
        """Whether KeyboardInterrupt, raised right here, loses nothing but the step begun."""
        return self.moment not in (Moment.UPDATE, Moment.WRITING)

    def last_step_is_whole(self) -> bool:
        """Whether the last finished step can be saved; what the next one began is taken back.

        Weights, optimizer, progress and what the observers count change between the call of the
        stepper and the last observer: an error in there may leave half an update. Before it, in the
        forward and backward pass of the next step, they are those of the last one, and the random
        numbers that it has drawn are drawn again. After it all observers have seen the step, also
        those behind a failing one.
        """
        if self.moment is Moment.UPDATE:
            return False
        if self._rewind is not None:
            self._rewind()
        return True
