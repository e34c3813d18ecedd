"""The signals that ask a run to stop end it without losing a finished step."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from gptfast.errors import stop_signals
from gptfast.run.state import State

GRACE_S = 3.0
"""What a step, a compilation or an evaluation may still take after the first signal."""
GRACE_TOGETHER_S = 25.0
"""The same where several processes train: one waits for what the others are in, too."""
AGAIN_S = 0.2


@contextmanager
def signals_stop(state: State, *, grace_s: float = GRACE_S) -> Iterator[list[int]]:
    """The signals that ask a command to stop let the step finish; the run is saved and stops.

    The same one again, or `grace_s` without an end, raises KeyboardInterrupt where the run is: the
    step begun is left and the last finished one saved. An update, a save and the taking down are
    waited for all the same; only a third signal cuts those.

    Yields the signals caught so far. Handlers are as found afterwards. Outside the main thread,
    where Python allows no handlers, it does nothing.
    """
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return

    def handle(signum: int, frame: FrameType | None) -> None:
        times = caught.count(signum)  # a cluster's SIGTERM may follow a SIGINT: not a second one
        if times > 1 or (times == 1 and state.can_be_cut):
            _alarm(0.0)
            raise KeyboardInterrupt
        caught.append(signum)
        state.interrupt(signal.Signals(signum).name)
        _alarm(grace_s)

    def overdue(signum: int, frame: FrameType | None) -> None:
        if state.can_be_cut:
            _alarm(0.0)
            raise KeyboardInterrupt

    handlers = dict.fromkeys(stop_signals(), handle)
    if sys.platform != "win32":  # which has no alarm: there only a second signal cuts a step
        handlers[signal.SIGALRM] = overdue
    before = {signum: signal.signal(signum, handler) for signum, handler in handlers.items()}
    try:
        yield caught
    finally:
        _alarm(0.0)
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _alarm(seconds: float) -> None:
    """Raise SIGALRM after `seconds`, then again and again; 0: not any more."""
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_S if seconds else 0.0)
