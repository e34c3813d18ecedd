"""momentum-warmup, batch-warmup, sequence-warmup: functions of the step, seen by the loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gptfast_plugins.batch_warmup import BatchWarmup
from gptfast_plugins.momentum_warmup import MomentumWarmup, momentum_at
from gptfast_plugins.muon import Muon
from gptfast_plugins.sequence_warmup import SequenceWarmup
from plugin_helpers import found

from gptfast.contract.tiny import Rig, build_rig
from gptfast.errors import Refused
from gptfast.helpers import doubling
from gptfast.host.registry import Enabled
from gptfast.plugin import Options, Parts, Plugin, Stepped, Want

KNOWN = found(
    batch_warmup=BatchWarmup,
    momentum_warmup=MomentumWarmup,
    muon=Muon,
    sequence_warmup=SequenceWarmup,
)


class Watch(Plugin):
    """Remembers what each step was made of."""

    def __init__(self) -> None:
        super().__init__(Options())
        self.tokens: list[int] = []
        self.momenta: list[list[float]] = []

    def ready(self, parts: Parts) -> None:
        self._groups = parts.optimizer.param_groups
        self._remember()

    def step(self, event: Stepped) -> Want:
        self.tokens.append(event.tokens)
        self._remember()
        return Want.NOTHING

    def _remember(self) -> None:
        self.momenta.append(
            [g["momentum"] if "momentum" in g else g["betas"][0] for g in self._groups]
        )


def watched(plugins: dict[str, dict[str, Any]], steps: int = 8, **changes: Any) -> Watch:
    watch = Watch()
    with build_rig({}, machine=None, found=KNOWN) as rig:
        profile = rig.profile(plugins, **{"train.steps": steps, **changes})
        with trainer_with(rig, profile, watch) as trainer:
            for _ in range(steps):
                trainer.one_step()
    return watch


def trainer_with(rig: Rig, profile: Any, watch: Watch) -> Any:
    from gptfast.host.hooks import Hooks
    from gptfast.run.trainer import Trainer

    enabled = [*rig.plan(profile), Enabled("watch", watch, "tests", "1.0")]
    return Trainer(
        profile,
        hooks=Hooks(enabled, note=lambda line: None),
        machine=rig.machine,
        store=rig.store,
    )


@pytest.mark.parametrize(
    ("start", "whole", "steps", "sizes"),
    [
        (1, 8, 6, [1, 1, 2, 2, 4, 4, 8, 8, 8]),
        (3, 10, 4, [3, 3, 6, 6, 10, 10]),
        (5, 8, 3, [5, 5, 5, 8]),
        (1, 8, 1, [1, 8, 8]),
    ],
)
def test_sizes_double_in_equal_stages(start: int, whole: int, steps: int, sizes: list[int]) -> None:
    seen = [doubling(s, start=start, whole=whole, steps=steps) for s in range(1, len(sizes) + 1)]
    assert seen == sizes


def test_a_batch_grows_window_by_window_and_the_loss_is_the_mean_over_what_is_seen() -> None:
    watch = watched({"batch-warmup": {"start": 1, "steps": 4}}, **{"train.batch_size": 4})
    whole = watched({}, **{"train.batch_size": 4}).tokens[0]
    assert watch.tokens == [whole * n // 4 for n in (1, 1, 2, 2, 4, 4, 4, 4)]


def test_windows_grow_token_by_token() -> None:
    whole = watched({}).tokens[0]
    watch = watched({"sequence-warmup": {"start": 4, "steps": 4}}, **{"model.block_size": 16})
    assert [n * 16 // watch.tokens[-1] for n in watch.tokens] == [4, 4, 8, 8, 16, 16, 16, 16]
    assert watch.tokens[-1] % 16 == 0
    assert whole > 0


@pytest.mark.parametrize(
    ("plugins", "ends"),
    [
        ({"muon": {"momentum": 0.95}}, {0.95, 0.9}),
        ({}, {0.9}),
    ],
)
def test_momentum_rises_to_the_optimizers_own(plugins: dict[str, Any], ends: set[float]) -> None:
    watch = watched({**plugins, "momentum-warmup": {"start": 0.5, "steps": 4}}, steps=6)
    for number, end in enumerate(watch.momenta[-1]):
        assert end in ends
        rising = [momenta[number] for momenta in watch.momenta]
        assert rising == pytest.approx(
            [momentum_at(s, start=0.5, end=end, steps=4) for s in range(1, 8)]
        )
        assert rising[0] == 0.5
        assert rising[4:] == [end] * 3


def test_a_momentum_below_the_start_stays() -> None:
    watch = watched({"muon": {"momentum": 0.6}, "momentum-warmup": {"start": 0.8, "steps": 3}})
    assert {momenta[0] for momenta in watch.momenta} == {0.6}


@pytest.mark.parametrize(
    ("plugins", "said"),
    [
        ({"batch-warmup": {"start": 99}}, "plugins.batch-warmup.start = 99 is not below"),
        ({"sequence-warmup": {"start": 9999}}, "plugins.sequence-warmup.start = 9999 is not below"),
    ],
)
def test_a_start_that_is_no_start_is_refused(plugins: dict[str, Any], said: str) -> None:
    with pytest.raises(Refused, match=said):
        watched(plugins)


def test_an_optimizer_without_momentum_is_refused() -> None:
    optimizer = torch.optim.Adagrad([torch.zeros(1, requires_grad=True)])
    plugin = MomentumWarmup(MomentumWarmup.Options())
    with build_rig({}, machine=None, found=KNOWN) as rig:
        trainer = trainer_with(rig, rig.profile({}), Watch())
        with trainer:
            parts = Parts(
                trainer.profile,
                rig.machine,
                trainer.raw_model,
                trainer.model,
                optimizer,
                trainer.source,
            )
            with pytest.raises(Refused, match="Adagrad has no momentum"):
                plugin.ready(parts)
