"""Exponential moving average of the weights, with which the run evaluates and samples.

What: average = d * average + (1 - d) * weights after every update, where d rises from 0.18 to
    `decay` as min(decay, (1 + n) / (10 + n)) in update n, so that the start is soon forgotten.
    Evaluations and samples see the average; training goes on with the weights as they are.
When it helps: the average has the loss of a run with a lower learning rate, before the rate is low.
    Little is left of that at the end of a schedule that decays to nearly 0.
Costs: one more copy of the weights, and one pass over both per step (one launch per group of
    tensors on a GPU); an evaluation exchanges the two, twice.
Numerics: recipe: training keeps its bits, the losses reported are those of the average.

A checkpoint's `model.safetensors` holds the training's weights, its `trainer.pt` the average, which
`eval` and `generate` take too.

Source: Polyak and Juditsky 1992; torch.optim.swa_utils.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from gptfast.plugin import Claim, Options, Plugin, Stage, Stepped, Want

if TYPE_CHECKING:
    from torch import Tensor, nn


def decay_at(update: int, decay: float) -> float:
    """The decay of an update, which counts from 1."""
    return min(decay, (1 + update) / (10 + update))


def update_average(average: Sequence[Tensor], weights: Sequence[Tensor], *, decay: float) -> None:
    """average = decay * average + (1 - decay) * weights, in place; waits for nothing."""
    from torch.optim.swa_utils import get_ema_multi_avg_fn

    update = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    update(list(average), list(weights), None)


def exchange(first: Sequence[Tensor], second: Sequence[Tensor]) -> None:
    """Swap contents tensor by tensor, bit for bit, with room for the largest of them.

    Contents and not storage, since compiled graphs and optimizers hold on to the storage.
    """
    import torch

    with torch.no_grad():
        for one, other in zip(first, second, strict=True):
            kept = one.clone()
            one.copy_(other)
            other.copy_(kept)


class EMAOptions(Options):
    decay: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.999
    """Share of the average kept in each step, once warmed up."""


class EMA(Plugin):
    summary = "Evaluates and samples with a moving average of the weights"
    stage = Stage.OUTER
    claim = Claim.RECIPE
    Options = EMAOptions
    options: EMAOptions

    def wrap_model(self, model: nn.Module) -> nn.Module:
        self._weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._average = {name: p.detach().clone() for name, p in self._weights.items()}
        self._updates = 0
        return model

    def step(self, event: Stepped) -> Want:
        if event.committed:
            self._updates += 1
            update_average(
                list(self._average.values()),
                list(self._weights.values()),
                decay=decay_at(self._updates, self.options.decay),
            )
        return Want.NOTHING

    @contextmanager
    def eval_scope(self) -> Iterator[None]:
        pair = list(self._weights.values()), list(self._average.values())
        exchange(*pair)
        try:
            yield
        finally:
            exchange(*pair)

    def metrics(self) -> Mapping[str, float]:
        return {"decay": decay_at(self._updates, self.options.decay)}

    def state(self) -> dict[str, Any]:
        return {"average": self._average, "updates": self._updates}

    def load_state(self, state: dict[str, Any]) -> None:
        self._updates = state["updates"]
        for name, average in self._average.items():
            average.copy_(state["average"][name])
