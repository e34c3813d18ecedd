"""Every shipped plugin and every pair keeps the contract; the check itself sees what is broken."""

from __future__ import annotations

import itertools
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from plugin_helpers import found
from torch import nn

from gptfast.contract.check import (
    Promise,
    Verdict,
    assert_keeps_contract,
    broken,
    check_pair,
    check_plugin,
)
from gptfast.errors import Refused
from gptfast.host.registry import OURS, discover
from gptfast.plugin import (
    Claim,
    Context,
    Options,
    Parts,
    Plugin,
    Profile,
    Stepped,
    Want,
)

pytestmark = pytest.mark.usefixtures("one_thread")
ROWS: dict[str, dict[str, Any]] = {
    "accumulate": {"micro_batch": 2},
    "activation-checkpointing": {},
    "adamw-8bit": {"compiled": False},
    "amp": {"dtype": "bf16"},
    "batch-threads": {"threads": 2},
    "batch-warmup": {"steps": 2},
    "chunked-loss": {"chunk_tokens": 24},
    "compile": {"backend": "eager"},
    "cudnn-benchmark": {},
    "ddp": {},
    "ema": {},
    "eval-cadence": {},
    "flash": {},
    "flex": {"window": 5, "separator": 3},
    "fp8": {},
    "fused-adamw": {},
    "gc-freeze": {"interval": 2},
    "liger": {},
    "loader": {"workers": 0},
    "momentum-warmup": {"steps": 3},
    "muon": {},
    "prefetch": {},
    "resident": {},
    "sequence-warmup": {"steps": 2},
    "spike-guard": {"least": 2, "z": 0.5},
    "tf32": {},
    "vocab-pad": {},
}
"""Options of each shipped plugin that make it do its work on a tiny model on a CPU."""

MORE_ROWS: list[tuple[str, dict[str, Any]]] = [
    ("loader", {"workers": 1}),
    ("flash", {"backend": "math"}),
]
"""Checked alone, not in pairs: the same plugin in another way."""


def test_every_built_in_has_a_row() -> None:
    built_in = {name for name, one in discover().items() if one.package == OURS}
    assert set(ROWS) == built_in


def skip_unless_checked(promises: list[Promise]) -> None:
    for promise in promises:
        if promise.name == "trains" and promise.verdict is Verdict.NOT_CHECKED:
            pytest.skip(promise.detail)


def resumes_in(promises: list[Promise]) -> int:
    return sum("resume" in p.name and p.verdict is Verdict.KEPT for p in promises)


@pytest.mark.parametrize(
    ("name", "options"),
    [*ROWS.items(), *MORE_ROWS],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_shipped_plugin_keeps_its_promises(
    name: str, options: dict[str, Any], tally: Callable[..., None]
) -> None:
    promises = check_plugin(name, options)
    assert broken(promises) == []
    tally("resumes compared", resumes_in(promises))
    skip_unless_checked(promises)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ROWS)
def test_a_shipped_plugin_keeps_its_promises_on_a_gpu(name: str) -> None:
    from gptfast.device.machine import find_machine

    promises = check_plugin(name, ROWS[name], machine=find_machine("cuda"))
    assert broken(promises) == []
    skip_unless_checked(promises)


WITH_GRADIENT = ("activation-checkpointing", "amp", "batch-threads", "chunked-loss")
"""Beside these the compiled backward pass matters; beside the others only that the graph is
captured, which takes half as long."""


def options(name: str, *, beside: str) -> dict[str, Any]:
    """Of a plugin in a pair."""
    if name != "compile":
        return ROWS[name]
    if beside in WITH_GRADIENT:
        return {"backend": "aot_eager"}
    return {"backend": "eager", "joint": False}


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(ROWS, 2)))
def test_a_pair_trains_resumes_and_commutes_or_declares_a_conflict(
    first: str, second: str, tally: Callable[..., None]
) -> None:
    pair = (first, options(first, beside=second)), (second, options(second, beside=first))
    promises = check_pair(*pair)
    assert broken(promises) == []
    tally("resumes compared", resumes_in(promises))
    skip_unless_checked(promises)


# the check itself ------------------------------------------------------------------------------


class Good(Plugin):
    claim = Claim.EXACT


class CountsInConfigure(Plugin):
    claim = Claim.EXACT

    def configure(self, profile: Profile) -> Profile:
        self.calls = getattr(self, "calls", 0) + 1
        return profile.replace({"train.seed": self.calls})


class TakesAnyOption(Plugin):
    claim = Claim.EXACT

    class Options(Options):
        model_config = {"extra": "ignore"}  # noqa: RUF012  # what pydantic asks for


class OtherNumbers(Plugin):
    claim = Claim.EXACT

    def configure(self, profile: Profile) -> Profile:
        return profile.replace({"train.learning_rate": profile.train.learning_rate * (1 + 1e-6)})


class CoarseRounding(OtherNumbers):
    claim = Claim.ROUNDING
    tolerance = 1e-12


class NotLearning(Plugin):
    """A learning rate so small that the batches, not the steps, decide the loss."""

    def configure(self, profile: Profile) -> Profile:
        return profile.replace({"train.learning_rate": 10.0})


class Renames(Plugin):
    claim = Claim.EXACT

    def wrap_model(self, model: nn.Module) -> nn.Module:
        class Outer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = model

            def forward(self, *args: Any, **kwargs: Any) -> Any:
                return self.inner(*args, **kwargs)

        return Outer()


class MovesRandomStateInEval(Plugin):
    claim = Claim.EXACT

    @contextmanager
    def eval_scope(self) -> Iterator[None]:
        yield
        random.random()


class KeepsSwappedWeights(Plugin):
    @contextmanager
    def eval_scope(self) -> Iterator[None]:
        with torch.no_grad():
            next(self.model.parameters()).mul_(0.5)
        yield

    def ready(self, parts: Parts) -> None:
        self.model = parts.raw_model


class LeavesEvalMode(Plugin):
    @contextmanager
    def eval_scope(self) -> Iterator[None]:
        yield
        self.model.h[0].eval()

    def ready(self, parts: Parts) -> None:
        self.model = parts.model


class Forgets(Plugin):
    """Its learning rate depends on a count that no checkpoint keeps."""

    def ready(self, parts: Parts) -> None:
        self.steps = 0
        self.optimizer = parts.optimizer

    def step(self, event: Stepped) -> Want:
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["initial_lr"] = 1e-2 / self.steps
        return Want.NOTHING


class LeavesSwitch(Plugin):
    claim = Claim.EXACT

    def setup(self, context: Context) -> None:
        torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark


class UndoesOnlyInTheEnd(Plugin):
    """Undoes its switch in the last step, so that Ctrl-C before it leaves it on."""

    claim = Claim.EXACT

    def ready(self, parts: Parts) -> None:
        torch.backends.cudnn.benchmark = True

    def step(self, event: Stepped) -> Want:
        if event.step == event.steps:
            torch.backends.cudnn.benchmark = False
        return Want.NOTHING


class LeavesEnvironment(Plugin):
    claim = Claim.EXACT

    def setup(self, context: Context) -> None:
        os.environ["LEFT_BY_A_PLUGIN"] = "1"


class LeavesThread(Plugin):
    claim = Claim.EXACT

    def setup(self, context: Context) -> None:
        threading.Thread(target=STOP_THREADS.wait, daemon=True).start()


STOP_THREADS = threading.Event()


class Raises(Plugin):
    def step(self, event: Stepped) -> Want:
        raise ZeroDivisionError("on purpose")


BROKEN_PLUGINS: list[tuple[type[Plugin], set[str]]] = [
    (CountsInConfigure, {"configure", "claim"}),
    (TakesAnyOption, {"options"}),
    (OtherNumbers, {"claim"}),
    (CoarseRounding, {"claim"}),
    (NotLearning, {"claim"}),
    (Renames, {"parameter names"}),
    (MovesRandomStateInEval, {"evaluation", "resume"}),
    (KeepsSwappedWeights, {"evaluation", "resume"}),
    (LeavesEvalMode, {"evaluation", "resume"}),
    (Forgets, {"resume"}),
    (LeavesSwitch, {"clean end", "clean after a failed setup", "clean after Ctrl-C"}),
    (UndoesOnlyInTheEnd, {"clean after Ctrl-C"}),
    (LeavesEnvironment, {"clean end"}),
    (LeavesThread, {"clean after a failed setup", "clean after Ctrl-C", "teardown"}),
]


@pytest.mark.parametrize(
    ("plugin", "promises"), BROKEN_PLUGINS, ids=[plugin.__name__ for plugin, _ in BROKEN_PLUGINS]
)
def test_the_check_finds_what_is_broken_and_nothing_else(
    plugin: type[Plugin], promises: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setenv("LEFT_BY_A_PLUGIN", "")
    STOP_THREADS.clear()
    checked = check_plugin("one", found=found(one=plugin))
    STOP_THREADS.set()
    torch.backends.cudnn.benchmark = False
    assert {promise.name for promise in broken(checked)} == promises


def test_a_good_plugin_breaks_nothing_and_a_raising_one_is_named() -> None:
    assert broken(check_plugin("one", found=found(one=Good))) == []
    faults = broken(check_plugin("one", found=found(one=Raises)))
    assert "trains" in {fault.name for fault in faults}
    assert all("ZeroDivisionError: on purpose" in fault.detail for fault in faults)
    with pytest.raises(AssertionError, match=r"one: trains: .*on purpose"):
        assert_keeps_contract("one", found=found(one=Raises))


class MisnamesHooks(Plugin):
    claim = Claim.EXACT

    def evaluate(self) -> None: ...
    def setupp(self) -> None: ...
    def statd(self) -> None: ...
    def on_step(self) -> None: ...
    def observe(self) -> None: ...
    def _step(self) -> None: ...
    def ready(self, parts: Parts) -> None: ...


class InheritsMisnamed(MisnamesHooks):
    """A base class of its authors' own is read too."""


@pytest.mark.parametrize("plugin", [MisnamesHooks, InheritsMisnamed])
def test_a_method_named_nearly_as_a_hook_is_reported_with_the_hook(plugin: type[Plugin]) -> None:
    (fault,) = broken(check_plugin("one", found=found(one=plugin)))
    assert fault.name == "names of hooks"
    assert fault.detail == (
        "nobody calls evaluate (did you mean evaluated?), on_step (did you mean step?), "
        "setupp (did you mean setup?), statd (did you mean state?): give it the hook's name, or "
        "one that begins with _ if it is your own"
    )


class OnlyGives(Plugin):
    claim = Claim.EXACT

    def state(self) -> dict[str, Any]:
        return {"count": 1}


class OnlyTakes(Plugin):
    claim = Claim.EXACT

    def load_state(self, state: dict[str, Any]) -> None: ...


class GivesNothing(Plugin):
    claim = Claim.EXACT

    def state(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize(
    ("plugin", "said"),
    [
        (OnlyGives, ["one has state and no load_state: write load_state, too"]),
        (OnlyTakes, ["one has load_state and no state: write state, too"]),
        (GivesNothing, []),
    ],
)
def test_a_state_that_goes_one_way_only_breaks_the_resume(
    plugin: type[Plugin], said: list[str]
) -> None:
    faults = broken(check_plugin("one", found=found(one=plugin)))
    assert [(fault.name, fault.detail) for fault in faults] == [("resume", line) for line in said]


class LastStep(Plugin):
    """Does something in the last step of a resumed run alone; a new optimizer has no moments."""

    def ready(self, parts: Parts) -> None:
        self.parts = parts
        self.resumed = bool(parts.optimizer.state)

    def step(self, event: Stepped) -> Want:
        if self.resumed and event.step == event.steps:
            self.spoil()
        return Want.NOTHING

    def spoil(self) -> None: ...


class SpoilsWeights(LastStep):
    def spoil(self) -> None:
        with torch.no_grad():
            self.parts.raw_model.wpe.weight[0, 0] += 1.0


class SpoilsOptimizer(LastStep):
    def spoil(self) -> None:
        weight = next(iter(self.parts.optimizer.state))
        self.parts.optimizer.state[weight]["exp_avg_sq"].view(-1)[0] += 1.0


class SpoilsRandom(LastStep):
    def spoil(self) -> None:
        torch.rand(1)


class SpoilsLosses(LastStep):
    """The loss that is told is another, its gradient the same."""

    def wrap_model(self, model: nn.Module) -> nn.Module:
        def more(module: nn.Module, args: Any, loss: torch.Tensor) -> torch.Tensor:
            return loss + 1.0 if module.training and self.resumed else loss

        model.register_forward_hook(more)
        return model


class SpoilsItsCount(Plugin):
    """Counts anew after a stop: nothing else shows it."""

    count = 0

    def step(self, event: Stepped) -> Want:
        self.count += 1
        return Want.NOTHING

    def state(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state(self, state: dict[str, Any]) -> None: ...


class CountsLate(SpoilsItsCount):
    """Says nothing at the usual stop, where forgetting it loses nothing."""

    def step(self, event: Stepped) -> Want:
        self.count += event.step == 5
        return Want.NOTHING


class KeepsTime(SpoilsItsCount):
    """No two runs agree in its state, and no stop is to blame."""

    def state(self) -> dict[str, Any]:
        return {"drawn": int.from_bytes(os.urandom(8), "little")}


@pytest.mark.parametrize(
    ("plugin", "table", "step"),
    [
        (SpoilsWeights, "model wpe.weight", 3),
        (SpoilsOptimizer, "optimizer state.0.exp_avg_sq", 3),
        (SpoilsRandom, "random torch", 3),
        (SpoilsLosses, "loss of step", 3),
        (SpoilsItsCount, "plugins one.state.count", 3),
        (CountsLate, "plugins one.state.count", 5),
    ],
)
def test_a_stop_that_loses_one_thing_alone_breaks_the_resume(
    plugin: type[Plugin], table: str, step: int
) -> None:
    (fault,) = broken(check_plugin("one", found=found(one=plugin)))
    assert fault.name == "resume"
    said, _, named = fault.detail.rpartition("differ: ")
    assert f"after a stop at step {step}" in said
    assert all(one.startswith(table) for one in named.split(", ")), named


def test_a_state_that_no_two_runs_agree_in_is_no_fault_of_the_stop() -> None:
    assert broken(check_plugin("one", found=found(one=KeepsTime))) == []


def test_the_stop_is_where_a_state_says_something() -> None:
    promises = {p.name: p for p in check_plugin("ema", ROWS["ema"])}
    assert "after stopping at step 3 of 6" in promises["resume"].detail


class HalvesRate(Plugin):
    def configure(self, profile: Profile) -> Profile:
        return profile.replace({"train.learning_rate": profile.train.learning_rate / 2})


class SetsRate(Plugin):
    def configure(self, profile: Profile) -> Profile:
        return profile.replace({"train.learning_rate": 3e-3})


class AgainstHalves(Plugin):
    conflicts = ("halves",)


def test_a_pair_that_does_not_commute_is_found() -> None:
    known = found(halves=HalvesRate, sets=SetsRate, good=Good, against=AgainstHalves)
    faults = broken(check_pair(("halves", {}), ("sets", {}), found=known))
    assert [fault.name for fault in faults] == ["commutes"]
    assert broken(check_pair(("halves", {}), ("good", {}), found=known)) == []
    (conflict,) = check_pair(("halves", {}), ("against", {}), found=known)
    assert (conflict.name, conflict.verdict) == ("conflict", Verdict.KEPT)
    with pytest.raises(Refused, match="not installed"):
        check_pair(("halves", {}), ("absent", {}), found=known)


class NeedsGood(Plugin):
    claim = Claim.EXACT
    requires = ("good",)


def test_what_a_plugin_requires_is_on_beside_it() -> None:
    assert_keeps_contract("needs", found=found(needs=NeedsGood, good=Good))
