"""The learning rate of each step: the share of the peak, by hand, at steps that tell."""

from __future__ import annotations

import math
from typing import Any

import pytest

from gptfast.optim import lr_factor
from gptfast.profile import TrainConfig

QUARTER = 0.25 + 0.75 * (1 + math.cos(math.pi / 4)) / 2
"""Of a cosine from 1 to 0.25, a quarter of the way."""


def factors(at: list[int], **changes: Any) -> list[float]:
    train = TrainConfig.model_validate(
        {
            "steps": 10,
            "warmup_steps": 2,
            "learning_rate": 1.0,
            "min_lr": 0.25,
            "decay_fraction": 0.4,
            **changes,
        }
    )
    return [lr_factor(train, step) for step in at]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", {1: 0.5, 2: 1.0, 3: 1.0, 10: 1.0, 11: 1.0}),
        ("cosine", {1: 0.5, 2: 1.0, 4: QUARTER, 6: 0.625, 10: 0.25, 11: 0.25}),
        ("wsd", {1: 0.5, 2: 1.0, 6: 1.0, 7: 0.8125, 8: 0.625, 9: 0.4375, 10: 0.25, 11: 0.25}),
    ],
)
def test_each_schedule_warms_up_stays_and_falls_as_it_says(
    schedule: str, expected: dict[int, float]
) -> None:
    found = factors(list(expected), schedule=schedule)
    assert found == pytest.approx(list(expected.values()), abs=1e-12)


def test_without_a_warm_up_the_first_step_is_on_the_way_already() -> None:
    assert factors([1, 2], steps=4, warmup_steps=0, schedule="cosine") == pytest.approx(
        [QUARTER, 0.625], abs=1e-12
    )
    assert factors([1, 6], warmup_steps=0, schedule="wsd") == [1.0, 1.0]


def test_wsd_decays_from_the_end_of_a_warm_up_that_outlasts_the_stable_part() -> None:
    assert factors([7, 8, 9, 10], warmup_steps=8, schedule="wsd") == [0.875, 1.0, 0.625, 0.25]


def test_wsd_decays_in_one_step_at_least() -> None:
    assert factors([9, 10], decay_fraction=0.01, schedule="wsd") == [1.0, 0.25]


def test_the_last_step_has_a_tenth_of_the_peak_unless_told_otherwise() -> None:
    for schedule in ("cosine", "wsd"):
        assert factors([10], min_lr=None, schedule=schedule) == pytest.approx([0.1])
