"""Gradient accumulation: a step's windows go through the model a few at a time.

What: splits the windows of a step into micro-batches, whose gradients add up before the one update.
When it helps: when a step's windows do not fit into memory at once. Activations shrink with the
    micro-batch; weights, gradients and optimizer state do not.
Costs: more and smaller kernel launches; nothing where one micro-batch already fills the device.
Numerics: exact. Every micro-batch is weighted by its tokens, so the sum is the gradient of the
    step's mean loss and only the order of float32 sums differs: gradients by about 1e-7, which
    AdamW magnifies where a gradient is near zero. With dropout the masks are drawn micro-batch by
    micro-batch, so other units drop out. Schedules, logs and evaluations count steps, not
    micro-batches.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from gptfast.plugin import Claim, Options, Plugin, Profile, Refused, Stage, Tries

Count = Annotated[int, Field(ge=1)]


def divisors_near(whole: int, wanted: int) -> list[int]:
    """Up to three divisors of `whole`, those nearest to `wanted`, in rising order."""
    divisors = [d for d in range(1, whole + 1) if whole % d == 0]
    return sorted(sorted(divisors, key=lambda d: abs(d - wanted))[:3])


class AccumulateOptions(Options):
    micro_batch: Count | None = None
    """Windows in one forward pass; divides train.batch_size. Give this or `steps`."""
    steps: Count | None = None
    """Micro-batches in one optimizer step; divides train.batch_size. Give this or `micro_batch`."""

    @model_validator(mode="after")
    def _one_of_two(self) -> AccumulateOptions:
        if (self.micro_batch is None) == (self.steps is None):
            raise ValueError(
                f"micro_batch = {self.micro_batch} and steps = {self.steps}: give exactly one of "
                "them, as in { micro_batch = 4 }"
            )
        return self


class Accumulate(Plugin):
    summary = "Gradient accumulation: a step's windows a few at a time"
    stage = Stage.OUTER
    claim = Claim.EXACT
    tolerance = 1e-5
    tries = Tries(steps=(1, 2, 4, 8))
    Options = AccumulateOptions
    options: AccumulateOptions

    def configure(self, profile: Profile) -> Profile:
        batch_size = profile.train.batch_size
        name = "steps" if self.options.micro_batch is None else "micro_batch"
        wanted = self.options.micro_batch or self.options.steps
        assert wanted is not None
        if batch_size % wanted:
            near = ", ".join(str(d) for d in divisors_near(batch_size, wanted))
            raise Refused(
                f"profile {profile.name} plugins.accumulate.{name} = {wanted} does not divide "
                f"train.batch_size = {batch_size}: use {near}"
            )
        micro_batch = self.options.micro_batch or batch_size // wanted
        return profile.replace({"train.micro_batch": micro_batch})
