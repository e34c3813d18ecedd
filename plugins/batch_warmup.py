"""Steps of few windows first, of all windows later.

What: the first steps see `start` of their windows, then twice as many, and so on until the whole
batch; each stage lasts equally many of the first `steps`. The sizes double, so that a compiler
meets few of them.
Helps: early on, when every window teaches the same and a small batch's gradient is good enough:
more updates for the same tokens.
Costs: windows left out of a step are not seen in that epoch. On a GPU a small batch may not fill
the device, so that a small step takes nearly as long as a whole one. A compiler compiles each
size.
Claim: recipe. A function of the step alone, so that nothing need be kept for resuming.
Source: McCandlish et al. 2018, An Empirical Model of Large-Batch Training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated

from pydantic import Field

from gptfast.plugin import (
    Batch,
    Claim,
    Context,
    Options,
    Plugin,
    Refused,
    Source,
    Stage,
    Stepped,
    Want,
    doubling,
)


class FewerWindows:
    """`gptfast.plugin.Source` that hands on the first windows of each step."""

    def __init__(self, inner: Source, options: BatchWarmupOptions, world: int) -> None:
        self.inner = inner
        self.windows = inner.windows
        self.step = inner.step
        self._options = options
        self._world = world

    def next(self) -> Batch:
        batch = self.inner.next()
        self.step += 1
        mine = len(batch.starts)
        all_windows = doubling(
            batch.step,
            start=self._options.start,
            whole=mine * self._world,
            steps=self._options.steps,
        )
        n = -(-all_windows // self._world)
        return (
            batch if n >= mine else replace(batch, starts=batch.starts[:n], tokens=batch.tokens[:n])
        )

    def seek(self, step: int) -> None:
        self.inner.seek(step)
        self.step = step

    def close(self) -> None:
        self.inner.close()


class BatchWarmupOptions(Options):
    start: Annotated[int, Field(ge=1)] = 1
    """Windows of the first step, over all processes; below `train.batch_size`."""
    steps: Annotated[int, Field(ge=1)] = 100
    """Steps until the batch is whole."""


class BatchWarmup(Plugin):
    summary = "Steps of few windows first, of all windows later"
    stage = Stage.OUTER
    claim = Claim.RECIPE
    Options = BatchWarmupOptions
    options: BatchWarmupOptions

    def setup(self, context: Context) -> None:
        size = context.profile.train.batch_size
        if self.options.start >= size:
            raise Refused(
                f"plugins.batch-warmup.start = {self.options.start} is not below train.batch_size "
                f"= {size}: lower it or use --without batch-warmup"
            )
        self._world = context.machine.world
        self._whole = size

    def wrap_source(self, source: Source) -> Source:
        return FewerWindows(source, self.options, self._world)

    def step(self, event: Stepped) -> Want:
        self._step = event.step
        return Want.NOTHING

    def metrics(self) -> Mapping[str, float]:
        start, steps = self.options.start, self.options.steps
        return {"windows": doubling(self._step, start=start, whole=self._whole, steps=steps)}
