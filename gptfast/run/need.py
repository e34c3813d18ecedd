"""What a run does where memory runs out: it goes on with fewer windows at a time."""

from __future__ import annotations

from collections.abc import Callable

from gptfast.device.memory import with_less
from gptfast.run.assembly import Assembly
from gptfast.run.kit import Kit
from gptfast.run.state import State


def less(
    error: BaseException, *, built: Assembly, kit: Kit, state: State
) -> Callable[[], None] | None:
    """What makes the run go on with a smaller micro-batch; None: none helps against this error."""
    changed = kit.hooks.recover(error, state.profile)
    # One of several processes cannot repeat a step in which all take part.
    if changed is None and kit.machine.world == 1:
        changed = with_less(state.profile, error)
    if changed is None:
        return None
    before, now = state.profile.train.windows_per_micro, changed.train.windows_per_micro
    smaller = changed

    def go_on() -> None:
        state.profile, state.fits = smaller, now
        kit.listener.note(
            f"after step {built.progress.step}: {before} windows in a forward pass failed; goes "
            f"on with {now} at a time and the same windows in a step"
        )
        built.optimizer.zero_grad(set_to_none=True)

    return go_on
