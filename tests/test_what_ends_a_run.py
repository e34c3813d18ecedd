"""The table in the trainer's docstring, row by row: what ends a run in each of its moments."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from plugin_helpers import enabled, rig_of
from torch import Tensor, nn
from torch.optim import Optimizer

from gptfast.contract.tiny import Rig
from gptfast.errors import GptfastError
from gptfast.optim import PlainStepper
from gptfast.plugin import Batch, Plugin, Source, Stepped, Stepper, Want, Windows
from gptfast.run import trainer as trainer_module
from gptfast.run.folder import Run
from gptfast.run.metrics import NotFinite
from gptfast.run.signals import signals_stop
from gptfast.run.state import Moment

STEPS = 8
SAVED_BEFORE, STRUCK_AFTER, EVALUATED = 3, 4, 6
"""Steps: of the older checkpoint; done when it strikes in a step; saved and evaluated."""

CAUSES = ("signal", "again", "a hook fails", "not finite", "no memory")


def table() -> dict[tuple[str, str], str]:
    """What the docstring says, by moment and cause."""
    assert trainer_module.__doc__ is not None
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in trainer_module.__doc__.splitlines()
        if line.startswith("| ")
    ]
    assert rows[0][1:] == list(CAUSES)
    assert [row[0] for row in rows[1:]] == [moment.value for moment in Moment]
    return {
        (row[0], cause): cell
        for row in rows[1:]
        for cause, cell in zip(CAUSES, row[1:], strict=True)
    }


class StrikeOptions(Plugin.Options):
    moment: str
    cause: str


class Strikes(Plugin):
    """Does to the run, once, what ends it: in step 5, or in the save or evaluation of step 6."""

    Options = StrikeOptions

    def __init__(self, options: StrikeOptions) -> None:
        super().__init__(options)
        self.options: StrikeOptions = options
        self.done = 0
        self.struck = False
        self.scoring = False

    def strike(self, moment: Moment) -> bool:
        """Whether this is the moment; for a loss the caller spoils it."""
        late = moment in (Moment.WRITING, Moment.SCORING)
        if (
            self.struck
            or moment.value != self.options.moment
            or self.done != (EVALUATED if late else STRUCK_AFTER)
        ):
            return False
        self.struck = True
        match self.options.cause:
            case "signal" | "again":
                for _ in range(1 + (self.options.cause == "again")):
                    os.kill(os.getpid(), signal.SIGINT)
            case "a hook fails":
                raise RuntimeError("on purpose")
            case "no memory":
                raise torch.OutOfMemoryError("on purpose")
        return True

    def wrap_source(self, source: Source) -> Source:
        return StrikingSource(source, self)

    def wrap_model(self, model: nn.Module) -> nn.Module:
        forward = model.forward

        def spoilt(*args: Any, **kwargs: Any) -> Tensor:
            moment = Moment.SCORING if self.scoring else Moment.GRADIENTS
            struck = self.strike(moment)
            loss: Tensor = forward(*args, **kwargs)
            late = self.options.moment == Moment.WRITING.value and self.done == STRUCK_AFTER
            spoils = self.options.cause == "not finite" and (struck or late)
            return loss * math.nan if spoils else loss

        model.forward = spoilt  # type: ignore[method-assign]  # in place: names stay
        return model

    def build_stepper(self) -> Stepper | None:
        # With its own stepper the trainer looks for what is not finite when it logs.
        own = self.options.moment in (Moment.UPDATE.value, Moment.WRITING.value)
        return StrikingStepper(self) if own else None

    @contextmanager
    def eval_scope(self) -> Iterator[None]:
        self.scoring = True
        yield
        self.scoring = False

    def step(self, event: Stepped) -> Want:
        self.done = event.step
        return Want.NOTHING

    def micro_scope(self, last: bool) -> AbstractContextManager[object]:
        return nullcontext()

    def state(self) -> dict[str, Any]:
        if self.options.cause != "not finite":
            self.strike(Moment.WRITING)
        return {}


class StrikingSource:
    def __init__(self, source: Source, owner: Strikes) -> None:
        self._source = source
        self._owner = owner

    @property
    def windows(self) -> Windows:
        return self._source.windows

    def next(self) -> Batch:
        self._owner.strike(Moment.BETWEEN)
        return self._source.next()

    def seek(self, step: int) -> None:
        self._source.seek(step)

    def close(self) -> None:
        self._source.close()


class StrikingStepper(PlainStepper):
    def __init__(self, owner: Strikes) -> None:
        self._owner = owner

    def step(self, optimizer: Optimizer) -> bool:
        self._owner.strike(Moment.UPDATE)
        return super().step(optimizer)


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with rig_of() as rig:
        yield rig


@pytest.mark.parametrize(
    ("moment", "cause"), [pair for pair, cell in table().items() if cell != "-"]
)
def test_a_run_ends_as_the_table_says(
    rig: Rig, tmp_path: Path, tally: Any, moment: str, cause: str
) -> None:
    outcome = table()[moment, cause]
    in_a_step = moment not in (Moment.WRITING.value, Moment.SCORING.value)
    profile = rig.profile(
        train__steps=STEPS,
        train__save_interval=SAVED_BEFORE,
        train__eval_interval=EVALUATED,
        train__finite_check="update",
    )
    run = Run.create(tmp_path / "run", profile_toml=profile.to_toml())
    strikes = enabled("strikes", Strikes, moment=moment, cause=cause)
    trainer, _ = rig.trainer(profile, run=run, extra=[strikes])
    raised: BaseException | None = None
    with trainer, signals_stop(trainer.state):
        try:
            trainer.run()
        except (Exception, KeyboardInterrupt) as error:
            raised = error
    tally("faults injected")
    newest = run.latest().step
    match outcome:
        case "saves, stops":
            assert raised is None
            assert trainer.state.stop_reason == "SIGINT"
            assert newest == (STRUCK_AFTER + 1 if in_a_step else EVALUATED)
        case "is cut":
            assert isinstance(raised, KeyboardInterrupt)
            assert newest == (STRUCK_AFTER if in_a_step else EVALUATED)
        case "saves, raises":
            assert isinstance(raised, GptfastError | RuntimeError)
            assert newest == (STRUCK_AFTER if in_a_step else EVALUATED)
        case "raises":
            assert isinstance(raised, GptfastError | RuntimeError)
            assert isinstance(raised, NotFinite) == (cause == "not finite")
            assert newest == SAVED_BEFORE
        case "halves, goes on":
            assert raised is None
            assert (newest, trainer.state.fits) == (STEPS, profile.train.batch_size // 2)
        case "goes on":
            assert raised is None
            assert (newest, trainer.state.fits) == (STEPS, None)
        case _:
            pytest.fail(f"the table has a word without a check: {outcome}")
