"""How the plugins' hooks are called: folds, owners, scopes, observers, and the way down."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plugin_helpers import enabled, rig_of
from torch import nn
from torch.optim import Optimizer

from gptfast.contract.process import differences, process_state
from gptfast.device.machine import find_machine
from gptfast.errors import GptfastError, Refused
from gptfast.host.hooks import Hooks
from gptfast.optim import PlainStepper, set_rates
from gptfast.plugin import (
    Context,
    Evaluated,
    Options,
    Parts,
    Plugin,
    Profile,
    Stepped,
    Stepper,
    Want,
)
from gptfast.run.folder import Run

CPU = find_machine("cpu")


class Notebook:
    """What happened, in order."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, line: str) -> None:
        self.lines.append(line)


class Named(Plugin):
    """Writes down each call; raises where it is told to."""

    class Options(Options):
        label: str
        raises: str = ""

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.notes = NOTES

    def say(self, hook: str) -> None:
        self.notes(f"{self.options.label}.{hook}")
        if hook == self.options.raises:
            raise ValueError(f"{self.options.label} at {hook}")

    def setup(self, context: Context) -> None:
        context.undo(lambda: self.say("undo"))
        self.say("setup")

    def teardown(self) -> None:
        self.say("teardown")

    @contextmanager
    def micro_scope(self, last: bool) -> Iterator[None]:
        self.say(f"enter {last}")
        try:
            yield
        finally:
            self.say("leave")

    @contextmanager
    def eval_scope(self) -> Iterator[None]:
        self.say("enter eval")
        yield
        self.say("leave eval")


NOTES = Notebook()


@pytest.fixture(autouse=True)
def fresh_notes() -> None:
    NOTES.lines.clear()


def named(*labels: str, **raises: str) -> Hooks:
    return Hooks(
        [enabled(label, Named, label=label, raises=raises.get(label, "")) for label in labels],
        note=NOTES,
    )


def test_everything_is_taken_down_in_reverse_and_once() -> None:
    hooks = named("a", "b")
    with hooks:
        hooks.setup(Profile(), CPU)
    with hooks:
        pass
    assert NOTES.lines == [
        "a.setup",
        "b.setup",
        "b.teardown",
        "b.undo",
        "a.teardown",
        "a.undo",
    ]


def test_a_failed_setup_takes_down_what_had_begun_its_own_half_too() -> None:
    hooks = named("a", "b", "c", b="setup")
    said = r"plugin b \(tests 1.0\) failed in setup: .*b at setup"
    with pytest.raises(GptfastError, match=said), hooks:
        hooks.setup(Profile(), CPU)
    assert NOTES.lines[2:] == ["b.teardown", "b.undo", "a.teardown", "a.undo"]


def test_the_first_error_is_the_one_reported_and_the_others_are_noted() -> None:
    hooks = named("a", "b", a="teardown", b="undo")
    hooks.setup(Profile(), CPU)
    with pytest.raises(KeyError, match="the run's own"), hooks:
        raise KeyError("the run's own")
    assert NOTES.lines[2:] == [
        "b.teardown",
        "b.undo",
        "while stopping: plugin b (tests 1.0) failed in setup's undo: ValueError: b at undo: "
        "report it to its authors or use --without b",
        "a.teardown",
        "while stopping: plugin a (tests 1.0) failed in teardown: ValueError: a at teardown: "
        "report it to its authors or use --without a",
        "a.undo",
    ]


class Hangs(Plugin):
    """Hangs a function on the model, which fails after the hook that did so."""

    def ready(self, parts: Parts) -> None:
        def refuses(module: nn.Module, args: Any) -> None:
            raise ValueError("odd numbers")

        parts.raw_model.register_forward_pre_hook(refuses)


def test_what_a_plugin_hung_on_the_model_fails_in_its_name() -> None:
    said = r"plugin hangs \(tests 1.0\) failed in refuses: ValueError: odd numbers"
    with pytest.raises(GptfastError, match=said), rig_of(hangs=Hangs) as rig:
        rig.train(rig.profile())


class Idle(Plugin):
    """Does nothing."""


def test_of_several_plugins_in_a_module_the_one_is_named_whose_class_has_the_code() -> None:
    said = r"plugin hangs \(tests 1.0\) failed in refuses: ValueError: odd numbers"
    for others in ({"a": Idle}, {"z": Idle}):
        with pytest.raises(GptfastError, match=said), rig_of(hangs=Hangs, **others) as rig:
            rig.train(rig.profile())


class CallsOurs(Plugin):
    """Hangs a function on the model that calls the core wrongly."""

    def ready(self, parts: Parts) -> None:
        def calls(module: nn.Module, args: Any) -> None:
            set_rates(module, 1.0)  # the fault

        parts.raw_model.register_forward_pre_hook(calls)


def test_an_error_in_the_core_is_blamed_on_no_plugin() -> None:
    with pytest.raises(AttributeError), rig_of(calls_ours=CallsOurs) as rig:
        rig.train(rig.profile())


def test_an_error_while_stopping_is_reported_where_it_is_the_first() -> None:
    hooks = named("a", "b", a="teardown", b="teardown")
    with pytest.raises(GptfastError, match="plugin b "), hooks:
        hooks.setup(Profile(), CPU)
    assert NOTES.lines[-1] == "a.undo"


def test_scopes_are_left_in_reverse_on_error_too() -> None:
    hooks = named("a", "b")
    with pytest.raises(RuntimeError, match="inside"), hooks.micro_scope(last=True):
        raise RuntimeError("inside")
    assert NOTES.lines == ["a.enter True", "b.enter True", "b.leave", "a.leave"]


def test_a_scope_that_cannot_be_entered_leaves_the_outer_ones() -> None:
    hooks = named("a", "b", b="enter False")
    said = r"plugin b .* failed in micro_scope"
    with pytest.raises(GptfastError, match=said), hooks.micro_scope(last=False):
        raise AssertionError("never reached")
    assert NOTES.lines == ["a.enter False", "b.enter False", "a.leave"]


class Switches(Plugin):
    """Uses each way that a context offers to change something."""

    def setup(self, context: Context) -> None:
        context.setattr(torch.backends.cudnn, "benchmark", not torch.backends.cudnn.benchmark)
        context.enter(torch.autocast("cpu"))
        torch.set_default_dtype(torch.float64)
        context.undo(lambda: torch.set_default_dtype(torch.float32))
        threads = torch.get_num_threads()
        context.undo(lambda: torch.set_num_threads(threads))
        torch.set_num_threads(threads + 1)


def test_a_context_undoes_all_that_was_done_through_it() -> None:
    before = process_state(CPU)
    hooks = Hooks([enabled("switches", Switches)], note=NOTES)
    with hooks:
        hooks.setup(Profile(), CPU)
        assert len(differences(before, process_state(CPU))) == 4
    assert differences(before, process_state(CPU)) == []


class Rate(Plugin):
    class Options(Options):
        times: float = 1.0
        plus: float = 0.0

    def configure(self, profile: Profile) -> Profile:
        rate = profile.train.learning_rate * self.options.times + self.options.plus
        return profile.replace({"train.learning_rate": rate})


def test_transforms_are_folded_in_order() -> None:
    twice, more = enabled("twice", Rate, times=2.0), enabled("more", Rate, plus=0.5)
    profile = Profile.model_validate({"train": {"learning_rate": 0.25}})
    for chain, rate in (([twice, more], 1.0), ([more, twice], 1.5)):
        assert Hooks(chain, note=NOTES).configure(profile).train.learning_rate == rate


class Owner(Plugin):
    def build_stepper(self) -> Stepper | None:
        return PlainStepper()

    def build_optimizer(self, model: nn.Module, profile: Profile) -> Optimizer | None:
        return torch.optim.SGD(model.parameters(), lr=1.0)

    def recover(self, error: BaseException, profile: Profile) -> Profile | None:
        return profile


class Abstains(Plugin):
    def build_stepper(self) -> Stepper | None:
        return None


def test_two_owners_clash_and_both_are_named() -> None:
    one = Hooks([enabled("abstains", Abstains), enabled("one", Owner)], note=NOTES)
    assert isinstance(one.build_stepper(), PlainStepper)
    two = Hooks([enabled("one", Owner), enabled("two", Owner)], note=NOTES)
    calls = {
        "build_stepper": two.build_stepper,
        "build_optimizer": lambda: two.build_optimizer(nn.Linear(1, 1), Profile()),
        "recover": lambda: two.recover(RuntimeError(), Profile()),
    }
    for hook, call in calls.items():
        with pytest.raises(Refused, match=rf"one and two both do {hook}.*--without two"):
            call()


def test_two_owners_clash_before_the_first_step() -> None:
    with rig_of(one=Owner, two=Owner) as rig, pytest.raises(Refused, match="one and two both"):
        rig.train(rig.profile())


class Wants(Plugin):
    class Options(Options):
        want: int
        raises: bool = False

    def step(self, event: Stepped) -> Want:
        if self.options.raises:
            raise OSError("no more room")
        return Want(self.options.want)

    def evaluated(self, event: Evaluated) -> Want:
        return Want(self.options.want)


def test_observers_answers_are_joined_whatever_their_order() -> None:
    event = Stepped(1, 2, torch.tensor(1.0), torch.tensor(1.0), 0.1, 4, committed=True)
    scored = Evaluated(1, 1.0, 4, best=True, seconds=0.1)
    save = enabled("save", Wants, want=Want.SAVE.value)
    stop = enabled("stop", Wants, want=Want.STOP.value)
    for chain in ([save, stop], [stop, save]):
        hooks = Hooks(chain, note=NOTES)
        assert hooks.step(event) == Want.SAVE | Want.STOP
        assert hooks.evaluated(scored) == Want.SAVE | Want.STOP
    failing = Hooks([enabled("fails", Wants, want=0, raises=True)], note=NOTES)
    with pytest.raises(GptfastError, match=r"plugin fails .* failed in step: OSError: no more"):
        failing.step(event)


class Fails(Plugin):
    """Each observing hook fails, and those that end a run."""

    class Options(Options):
        label: str

    def before_step(self, event: Any) -> Want:
        NOTES(self.options.label)
        raise OSError(f"{self.options.label} has no more room")

    step = evaluated = before_step

    def setup(self, context: Context) -> None:
        context.undo(lambda: self.before_step(None))

    def teardown(self) -> None:
        self.before_step(None)


@pytest.mark.parametrize("order", ["ab", "ba"])
@pytest.mark.parametrize("hook", ["before_step", "step", "evaluated"])
def test_of_two_failing_observers_both_hear_and_the_first_is_raised(hook: str, order: str) -> None:
    hooks = Hooks([enabled(label, Fails, label=label) for label in order], note=NOTES)
    said = rf"plugin {order[0]} \(tests 1.0\) failed in {hook}: OSError: {order[0]} has no more"
    with pytest.raises(GptfastError, match=said):
        getattr(hooks, hook)(None)
    assert NOTES.lines == list(order)


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_of_two_failing_teardowns_the_first_is_raised_and_the_others_are_noted(order: str) -> None:
    hooks = Hooks([enabled(label, Fails, label=label) for label in order], note=NOTES)
    first, second = reversed(order)
    with pytest.raises(GptfastError, match=rf"plugin {first} \(.*\) failed in teardown"), hooks:
        hooks.setup(Profile(), CPU)
    noted = [line.partition(" (")[0] for line in NOTES.lines if len(line) > 1]
    assert noted == [f"while stopping: plugin {name}" for name in (first, second, second)]
    assert [line for line in NOTES.lines if len(line) == 1] == [first, first, second, second]


class Answers(Plugin):
    """Returns from each observing hook what it is told to."""

    class Options(Options):
        answer: bool | str | None

    def before_step(self, event: Any) -> Any:
        return self.options.answer

    step = evaluated = before_step


@pytest.mark.parametrize("answer", [None, True, "stop"])
@pytest.mark.parametrize("hook", ["before_step", "step", "evaluated"])
def test_an_answer_that_is_no_want_is_refused_by_name(hook: str, answer: Any) -> None:
    hooks = Hooks([enabled("odd", Answers, answer=answer)], note=NOTES)
    said = rf"plugin odd \(tests 1.0\): {hook} returned {answer!r}, where a Want .*Want.NOTHING"
    with pytest.raises(GptfastError, match=said):
        getattr(hooks, hook)(None)


class Remembers(Plugin):
    class Options(Options):
        start: int = 0

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.count = options.start

    def state(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_state_goes_under_the_plugins_name_with_package_version_and_options() -> None:
    states = Hooks([enabled("one", Remembers, start=3)], note=NOTES).state()
    assert states == {
        "one": {
            "package": "tests",
            "version": "1.0",
            "options": {"start": 3},
            "state": {"count": 3},
        }
    }
    fresh = enabled("one", Remembers)
    missing = Hooks([fresh, enabled("two", Remembers)], note=NOTES).load_state(states)
    assert missing == ["two"]
    assert fresh.plugin.state() == {"count": 3}


class Holds(Plugin):
    """Has any state that it is told to have."""

    held: Any = None

    def state(self) -> dict[str, Any]:
        return {"held": self.held}


def holding(value: Any) -> Hooks:
    holder = enabled("holds", Holds)
    vars(holder.plugin)["held"] = value
    return Hooks([enabled("one", Remembers), holder], note=NOTES)


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ({1, 2}, r"state()['held'] is of type set"),
        ({"a": [1, (torch, 2)]}, r"state()['held']['a'][1][0] is of type module"),
        (np.float64(1), r"state()['held'] is of type float64"),
        ({"a": {3: Want.SAVE}}, r"state()['held']['a'][3] is of type Want"),
        ([{2.5: 1}], r"state()['held'][0] has a key of type float"),
    ],
)
def test_a_state_that_is_not_plain_is_refused_with_its_place(value: Any, fault: str) -> None:
    said = re.escape(f"plugin holds (tests 1.0): {fault}, which no checkpoint can hold")
    with pytest.raises(GptfastError, match=said + ".*tensors, numbers.*--without holds"):
        holding(value).state()


def test_a_plain_state_of_any_depth_is_taken() -> None:
    parameter = nn.Parameter(torch.ones(1))
    value = {"a": [1, 2.5, True, None, "x", ({3: parameter},)], 4: nn.Linear(1, 1).state_dict()}
    assert holding(value).state()["holds"]["state"] == {"held": value}


class HoldsSet(Plugin):
    def state(self) -> dict[str, Any]:
        return {"seen": {1}}


def test_a_state_that_is_not_plain_writes_no_checkpoint(tmp_path: Path) -> None:
    with rig_of(holds=HoldsSet) as rig:
        profile = rig.profile()
        run = Run.create(tmp_path / "run", profile_toml=profile.to_toml())
        with pytest.raises(
            GptfastError, match=r"plugin holds .*state\(\)\['seen'\] is of type set"
        ):
            rig.train(profile, run=run, until=3)
        assert list((tmp_path / "run").rglob("*.pt")) == []


def test_every_hook_of_the_contract_is_called_by_someone() -> None:
    """A hook that is added to the contract and not called would be a promise nobody keeps."""
    called = {name for name in vars(Hooks) if not name.startswith("_")} | {
        "teardown",
        "supports",
        "pays",
    }
    contract = {
        name
        for name, value in vars(Plugin).items()
        if callable(value) and not name.startswith("_") and name != "Options"
    }
    assert contract <= called
