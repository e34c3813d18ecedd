"""Python's garbage collector looks only at what is new, and only between two steps.

What: once the run is built, everything that stands is left out of collections (`gc.freeze`), and
the automatic ones are off; every `interval` steps one is made by hand, between two steps.
Helps: on a GPU whose steps are a few milliseconds. Python launches kernels ahead of it, and a full
collection walks over every object that torch has made, some hundred thousand, in the middle of
that: a pause of tens of milliseconds now and then.
Costs: what refers to itself lives until the next collection by hand. A step of the trainer makes
none of it; a plugin might.
No help where a step takes long. `bench` holds its own collector still while it measures, for every
rung alike, so its ladder shows about 1.00: the pauses show in the longest steps of a real run.
Claim: exact, equal bits.
Source: https://docs.python.org/3/library/gc.html#gc.freeze
"""

from __future__ import annotations

import gc
from typing import Annotated

from pydantic import Field

from gptfast.plugin import Claim, Context, Options, Parts, Plugin, Stage, Stepped, Want


class GcFreezeOptions(Options):
    interval: Annotated[int, Field(ge=1)] = 1000
    """Steps between two collections."""


class GcFreeze(Plugin):
    summary = "Python's garbage collector pauses between steps, never in one"
    stage = Stage.OUTER
    claim = Claim.EXACT
    Options = GcFreezeOptions
    options: GcFreezeOptions

    def setup(self, context: Context) -> None:
        if gc.isenabled():
            context.undo(gc.enable)
        if gc.get_freeze_count() == 0:  # else somebody else's would be given free, too
            context.undo(gc.unfreeze)

    def ready(self, parts: Parts) -> None:
        gc.collect()
        gc.freeze()
        gc.disable()

    def step(self, event: Stepped) -> Want:
        if event.step % self.options.interval == 0:
            gc.collect()
        return Want.NOTHING
