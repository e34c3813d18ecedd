"""The contract check: what every plugin must keep, found out by training a tiny model.

Our tests, `gptfast plugins check` and the tests of a stranger's package call the same functions:

    from gptfast.contract.check import assert_keeps_contract

    def test_contract() -> None:
        assert_keeps_contract("my-plugin", {"some_option": 2})

Each promise is a line of its own, kept or broken. It runs on the CPU, where equal bits can be asked
for, unless it is given another machine. A little over 400 lines, so that every promise is read in
one place; the tiny run is in `tiny`, the resumed one in `resume`, what belongs to the whole process
in `process`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError

from gptfast.contract.names import mistaken_hooks
from gptfast.contract.process import differences, generators, process_state, running_helpers
from gptfast.contract.resume import resumes
from gptfast.contract.tiny import (
    STEPS,
    STOP,
    Broken,
    FailsInSetup,
    Interrupts,
    Looks,
    Outcome,
    Planned,
    Rig,
    build_rig,
    copied,
    ours,
    require_equal_tensors,
)
from gptfast.errors import GptfastError, Refused
from gptfast.host import registry
from gptfast.host.registry import Enabled, Found
from gptfast.model import GPT
from gptfast.plugin import Claim, Machine, Parts, Plugin, Profile
from gptfast.profile import nearest
from gptfast.run.checkpoint import strip_wrappers

GRACE_S = 2.0
"""How long a thread or a process may take to end once the run is over."""


class Verdict(Enum):
    KEPT = "kept"
    BROKEN = "broken"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True)
class Promise:
    """One promise and whether it was kept."""

    name: str
    verdict: Verdict
    detail: str = ""
    """What was measured, or what broke it, or why it could not be checked here."""


def check_plugin(
    name: str,
    options: Mapping[str, Any] | None = None,
    *,
    machine: Machine | None = None,
    found: Mapping[str, Found] | None = None,
) -> list[Promise]:
    """Check everything that one plugin promises; what it requires is on beside it.

    Args:
        machine: where to train; None: on the CPU.
        found: the plugins to choose from; None: the installed ones.

    Raises:
        Refused: there is no such plugin, it is broken, or an option is wrong.
    """
    found = registry.discover() if found is None else found
    required = _required(name, found)
    with build_rig({**required, name: options or {}}, machine=machine, found=found) as rig:
        return _Single(rig, name, rig.profile(required)).promises()


def check_pair(
    first: tuple[str, Mapping[str, Any]],
    second: tuple[str, Mapping[str, Any]],
    *,
    machine: Machine | None = None,
    found: Mapping[str, Found] | None = None,
) -> list[Promise]:
    """Check that two plugins, each (name, options), train, resume and commute, or declare a
    conflict.

    Raises:
        Refused: there is no such plugin, it is broken, or an option is wrong.
    """
    found = registry.discover() if found is None else found
    pair = {name: dict(options) for name, options in (first, second)}
    required = {k: v for name in pair for k, v in _required(name, found).items() if k not in pair}
    with build_rig({**required, **pair}, machine=machine, found=found) as rig:
        return _Pair(rig).promises()


def broken(promises: Sequence[Promise]) -> list[Promise]:
    return [promise for promise in promises if promise.verdict is Verdict.BROKEN]


def assert_keeps_contract(
    name: str,
    options: Mapping[str, Any] | None = None,
    *,
    machine: Machine | None = None,
    found: Mapping[str, Found] | None = None,
) -> None:
    """For a test: AssertionError with one line for each broken promise."""
    faults = broken(check_plugin(name, options, machine=machine, found=found))
    assert not faults, "\n".join(f"{name}: {fault.name}: {fault.detail}" for fault in faults)


def _required(name: str, found: Mapping[str, Found]) -> dict[str, dict[str, Any]]:
    """What a plugin requires, directly or not, with default options."""
    if name not in found:
        raise Refused(f"plugin {name} is not installed: {nearest(name, found)}")
    required: dict[str, dict[str, Any]] = {}
    open_names = list(found[name].load().requires)
    while open_names:
        other = open_names.pop()
        if other not in required and other != name and other in found:
            required[other] = {}
            open_names += found[other].load().requires
    return required


# the promises ----------------------------------------------------------------------------------


class _NotChecked(Exception):
    """A promise cannot be checked here; says why."""


def _promise(name: str, check: Callable[[], str]) -> Promise:
    try:
        return Promise(name, Verdict.KEPT, check())
    except _NotChecked as reason:
        return Promise(name, Verdict.NOT_CHECKED, str(reason))
    except (Broken, GptfastError) as fault:
        return Promise(name, Verdict.BROKEN, str(fault))
    # Whatever else foreign code raises is a promise broken, too.
    except Exception as error:
        return Promise(name, Verdict.BROKEN, f"{type(error).__name__}: {error}")


class _Single:
    """The promises of one plugin."""

    def __init__(self, rig: Rig, name: str, baseline: Profile) -> None:
        self.rig = rig
        self.name = name
        self.baseline = baseline
        self.profile = rig.profile()
        planned = {enabled.name: enabled for enabled in rig.plan(self.profile)}
        self.plugin = planned[name].plugin

    @cached_property
    def first(self) -> Outcome:
        """The first run with it."""
        return self.rig.train(self.profile)

    def promises(self) -> list[Promise]:
        always = [
            _promise("names of hooks", self.names_of_hooks),
            _promise("options", self.options),
            _promise("configure", self.configure),
        ]
        unsupported = self.rig.unsupported(self.profile)
        if unsupported:
            reason = "; ".join(f"{name}: {why}" for name, why in unsupported.items())
            return [*always, Promise("trains", Verdict.NOT_CHECKED, f"unsupported here: {reason}")]
        return [
            *always,
            # First: a switch that one run leaves turned is as the next run finds it.
            _promise("clean end", self.clean_end),
            _promise("trains", self.trains),
            _promise("claim", self.claim),
            _promise("parameter names", self.parameter_names),
            _promise("evaluation", self.evaluation),
            _promise("resume", lambda: resumes(self.rig)),
            _promise("clean after a failed setup", self.clean_after_failed_setup),
            _promise("clean after Ctrl-C", self.clean_after_interrupt),
            _promise("teardown", self.teardown_once),
            _promise("no device sync", self.no_device_sync),
        ]

    def names_of_hooks(self) -> str:
        """No method is named nearly as a hook is: it would never be called."""
        mistaken = mistaken_hooks(type(self.plugin))
        if mistaken:
            pairs = ", ".join(f"{name} (did you mean {hook}?)" for name, hook in mistaken.items())
            raise Broken(
                f"nobody calls {pairs}: give it the hook's name, or one that begins with _ if it "
                "is your own"
            )
        return ""

    def options(self) -> str:
        """An option that it does not have is refused, not ignored."""
        unknown = "no_such_option"
        try:
            type(self.plugin).Options.model_validate({unknown: 1})
        except ValidationError as error:
            if any(fault["loc"] == (unknown,) for fault in error.errors()):
                return ""
            raise
        raise Broken("an unknown option is accepted: derive Options from gptfast.plugin.Options")

    def configure(self) -> str:
        """It is pure: the same answer twice, and the profile it was given is as before."""
        before = self.profile.model_dump()
        answers = [self.plugin.configure(self.profile) for _ in range(2)]
        if answers[0] != answers[1] or self.profile.model_dump() != before:
            raise Broken("configure is not pure: it must return a new profile and keep no count")
        return ""

    def trains(self) -> str:
        losses = self.first.losses
        if len(losses) != STEPS or not np.isfinite(losses).all():
            raise Broken(f"losses of {STEPS} steps: {losses}")
        return f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {STEPS} steps"

    def claim(self) -> str:
        claim, tolerance = self.plugin.claim, self.plugin.tolerance
        if claim is Claim.RECIPE:
            first, last = self.first.losses[0], self.first.losses[-1]
            if not last < first:
                raise Broken(f"recipe: the loss does not fall: {first:.4f} -> {last:.4f}")
            return f"recipe: loss {first:.3f} -> {last:.3f}"
        without = self.rig.train(self.baseline)
        difference = self.rig.difference(self.first.losses, without.losses)
        if tolerance == 0:
            self.rig.require_equal(self.first, without, what="with and without it")
            return f"{claim.value}: equal to the baseline"
        if not difference <= tolerance:
            raise Broken(f"{claim.value}: losses differ by {difference:.1e}, over {tolerance:.1e}")
        return f"{claim.value}: largest difference {difference:.1e}, allowed {tolerance:.1e}"

    def parameter_names(self) -> str:
        """`wrap_model` keeps the parameters themselves and their names."""
        seen: list[Parts] = []
        trainer, _ = self.rig.trainer(self.profile, extra=[ours(Looks(seen))])
        with trainer:
            parts = seen[0]
            expected = [name for name, _ in GPT(parts.profile.model).named_parameters()]
            raw = dict(parts.raw_model.named_parameters())
            wrapped = {strip_wrappers(n): p for n, p in parts.model.named_parameters()}
        for model, names in (("raw", list(raw)), ("wrapped", list(wrapped))):
            if names != expected:
                changed = sorted(set(names) ^ set(expected)) or names
                raise Broken(f"the {model} model's parameter names change: {changed[:3]}")
        if any(raw[name] is not wrapped[name] for name in expected):
            raise Broken("wrap_model replaces parameters: the saved ones would not be trained")
        return f"{len(expected)} parameters"

    def evaluation(self) -> str:
        """An evaluation leaves weights, mode and random state as found."""
        trainer, recorder = self.rig.trainer(self.rig.profile(train__eval_interval=0))
        with trainer:
            trainer.run(STOP)
            before = copied(trainer.raw_model)
            modes = [module.training for module in trainer.model.modules()]
            random_before = generators(self.rig.machine)
            trainer.scorer.evaluate()
            require_equal_tensors(copied(trainer.raw_model), before, what="after an evaluation")
            if [module.training for module in trainer.model.modules()] != modes:
                raise Broken("an evaluation leaves modules in another mode")
            if generators(self.rig.machine) != random_before:
                raise Broken("an evaluation moves the random state")
            return f"loss {recorder.evaluations[-1].loss:.3f}"

    def clean_end(self) -> str:
        with _switches_as_found(self.rig.machine):
            _ = self.first
        return ""

    def clean_after_failed_setup(self) -> str:
        with _switches_as_found(self.rig.machine), _helpers_gone():
            _expect_failure(lambda: self.rig.train(self.profile, extra=[ours(FailsInSetup())]))
        return ""

    def clean_after_interrupt(self) -> str:
        with _switches_as_found(self.rig.machine), _helpers_gone():
            try:
                self.rig.train(self.profile, extra=[ours(Interrupts())])
            except KeyboardInterrupt:
                return ""
        raise Broken("Ctrl-C is swallowed")

    def teardown_once(self) -> str:
        """Teardown runs once, and no thread or process is left."""
        counted: list[str] = []
        trainer, _ = self.rig.trainer(self.profile)
        for enabled in trainer.hooks.enabled:
            _count_teardown(enabled, counted)
        # Not of the first run: torch starts threads of its own in that, and keeps them.
        with _helpers_gone(), trainer:
            trainer.run(1)
        if counted.count(self.name) != 1:
            raise Broken(f"teardown ran {counted.count(self.name)} times")
        return ""

    def no_device_sync(self) -> str:
        """No hook waits for the device in a step."""
        if self.rig.machine.kind != "cuda":
            raise _NotChecked("needs a CUDA device")
        if type(self.plugin).before_step is not Plugin.before_step:
            raise _NotChecked("before_step decides about the update by numbers that it must read")
        profile = self.rig.profile(train__log_interval=STEPS, train__eval_interval=0)
        trainer, _ = self.rig.trainer(profile)
        with trainer:
            trainer.one_step()
            trainer.one_step()
            torch.cuda.set_sync_debug_mode("error")
            try:
                trainer.one_step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return ""


class _Pair:
    """The promises of two plugins together."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig

    def promises(self) -> list[Promise]:
        on = self.rig.plugins
        declared = [(a, b) for a in on for b in self.rig.found[a].load().conflicts if b in on]
        if declared:
            return [_promise("conflict", lambda: self.refused(declared[0]))]
        unsupported = self.rig.unsupported(self.rig.profile())
        if unsupported:
            reason = "; ".join(f"{name}: {why}" for name, why in unsupported.items())
            return [Promise("trains", Verdict.NOT_CHECKED, f"unsupported here: {reason}")]
        return [
            _promise("trains and resumes", lambda: resumes(self.rig)),
            _promise("commutes", self.commutes),
        ]

    def refused(self, declared: tuple[str, str]) -> str:
        """A declared conflict is refused before any work, naming both."""
        try:
            self.rig.plan(self.rig.profile())
        except Refused as refusal:
            if all(name in str(refusal) for name in declared):
                return str(refusal)
            raise
        raise Broken(f"{' and '.join(declared)} conflict and are not refused")

    def commutes(self) -> str:
        """Either order in the profile gives the same run."""
        turned = dict(reversed(list(self.rig.plugins.items())))
        orders = [
            [enabled.name for enabled in self.rig.plan(self.rig.profile(plugins))]
            for plugins in (self.rig.plugins, turned)
        ]
        if orders[0] == orders[1]:
            return "the order is fixed"
        one, other = (self.rig.train(self.rig.profile(p)) for p in (self.rig.plugins, turned))
        self.rig.require_equal(one, other, what="in the other order")
        return "equal in both orders"


# helpers of the promises -----------------------------------------------------------------------


def _expect_failure(train: Callable[[], object]) -> None:
    try:
        train()
    except GptfastError as error:
        if isinstance(error.__cause__, Planned):
            return
        raise
    raise Broken("a failing setup is swallowed")


def _count_teardown(enabled: Enabled, counted: list[str]) -> None:
    teardown = enabled.plugin.teardown

    def count() -> None:
        counted.append(enabled.name)
        teardown()

    vars(enabled.plugin)["teardown"] = count


@contextmanager
def _switches_as_found(machine: Machine) -> Iterator[None]:
    """Broken where a process-wide switch is another afterwards."""
    before = process_state(machine)
    yield
    changed = differences(before, process_state(machine))
    if changed:
        raise Broken(f"left behind: {'; '.join(changed)}")


@contextmanager
def _helpers_gone() -> Iterator[None]:
    """Broken where a thread or a child process begun inside still runs afterwards."""
    before = running_helpers()
    yield
    # A thread that has been told to end needs a moment to do so.
    end = time.monotonic() + GRACE_S
    while running_helpers() - before and time.monotonic() < end:
        time.sleep(0.01)
    left = sorted(running_helpers() - before)
    if left:
        raise Broken(f"still running: {', '.join(left)}")
