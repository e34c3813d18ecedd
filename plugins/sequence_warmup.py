"""Short windows first, whole windows later.

What: the first steps see `start` tokens of each window, then twice as many, and so on until the
whole block; each stage lasts equally many of the first `steps`. Lengths double, so that a compiler
meets few of them.
Helps: early on, when the model predicts from the last few tokens anyway: attention over short
windows costs little, and steps are shorter.
Costs: the rest of each window is not seen in that epoch; learnt positions beyond the present length
learn later. A compiler compiles each length.
No help where windows are short already.
Claim: recipe. A function of the step alone, so that nothing need be kept for resuming.
Source: Li et al. 2021, The Stability-Efficiency Dilemma: Investigating Sequence Length Warmup.
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


class ShorterWindows:
    """`gptfast.plugin.Source` that hands on the beginning of each window."""

    def __init__(self, inner: Source, options: SequenceWarmupOptions) -> None:
        self.inner = inner
        self.windows = inner.windows
        self.step = inner.step
        self._options = options

    def next(self) -> Batch:
        batch = self.inner.next()
        self.step += 1
        whole = batch.tokens.size(1) - 1
        length = doubling(
            batch.step, start=self._options.start, whole=whole, steps=self._options.steps
        )
        return batch if length == whole else replace(batch, tokens=batch.tokens[:, : length + 1])

    def seek(self, step: int) -> None:
        self.inner.seek(step)
        self.step = step

    def close(self) -> None:
        self.inner.close()


class SequenceWarmupOptions(Options):
    start: Annotated[int, Field(ge=1)] = 8
    """Target tokens of each window in the first step; below `model.block_size`."""
    steps: Annotated[int, Field(ge=1)] = 100
    """Steps until windows are whole."""


class SequenceWarmup(Plugin):
    summary = "Short windows first, whole windows later"
    stage = Stage.OUTER
    claim = Claim.RECIPE
    Options = SequenceWarmupOptions
    options: SequenceWarmupOptions

    def setup(self, context: Context) -> None:
        block_size = context.profile.model.block_size
        if self.options.start >= block_size:
            raise Refused(
                f"plugins.sequence-warmup.start = {self.options.start} is not below "
                f"model.block_size = {block_size}: lower it or use --without sequence-warmup"
            )

        self._whole = block_size

    def wrap_source(self, source: Source) -> Source:
        return ShorterWindows(source, self.options)

    def step(self, event: Stepped) -> Want:
        self._step = event.step
        return Want.NOTHING

    def metrics(self) -> Mapping[str, float]:
        start, steps = self.options.start, self.options.steps
        return {"block_size": doubling(self._step, start=start, whole=self._whole, steps=steps)}
