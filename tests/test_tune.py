"""`gptfast tune`: what is tried, what is taken and why, in how much time, and what is written."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from bench_helpers import CONDITIONS, FACTS, PROTOCOL, FakeMachine, FakeWorker, gauge, there
from plugin_helpers import found

from gptfast import config
from gptfast.bench.ladder import Bound
from gptfast.bench.measure.messages import Built, Lap, RungFailed
from gptfast.bench.result.record import Protocol, Ratio
from gptfast.bench.tune import tune as tune_module
from gptfast.bench.tune import tuned
from gptfast.bench.tune.decide import decide
from gptfast.bench.tune.moves import BEFORE, MICRO_BATCH, moves, tries
from gptfast.bench.tune.tune import THE_PROFILE, search, tune
from gptfast.bench.tune.tuned import Trial, Tuned
from gptfast.cli import main
from gptfast.config import Loaded
from gptfast.contract.tiny import tiny_profile, write_tiny_store
from gptfast.errors import GptfastError, Refused
from gptfast.host import registry
from gptfast.plugin import Claim, Options, Plugin, Profile, Tries


class Speeding(Plugin):
    claim = Claim.EXACT
    tries = Tries()


class KnobOptions(Options):
    size: int = 1
    """How large."""


class Knob(Plugin):
    claim = Claim.EXACT
    tries = Tries(size=(1, 2, 4))
    Options = KnobOptions


class Recipe(Plugin):
    claim = Claim.RECIPE
    tries = Tries()


class Watching(Plugin):
    claim = Claim.EXACT


class Half(Plugin):
    """`FakeWorker` gives what is called half other losses."""

    claim = Claim.ROUNDING
    tolerance = 1e-3
    tries = Tries()


class Needing(Watching):
    requires = ("dragging",)


KNOWN = found(
    dragging=Speeding,
    idle=Speeding,
    wings=Speeding,
    knob=Knob,
    recipe=Recipe,
    other_recipe=Recipe,
    watching=Watching,
)


def pace(profile: Profile) -> float:
    """Seconds of a step."""
    on = profile.plugins
    seconds = 0.05 / (2 if "wings" in on else 1) * (1.5 if "dragging" in on else 1)
    seconds /= {1: 1.0, 2: 1.1, 4: 1.2}[on["knob"].get("size", 1)] if "knob" in on else 0.9
    seconds /= 1.5 if "recipe" in on or "other-recipe" in on else 1
    return seconds * {4: 1.0, 2: 0.9, 1: 1.4}[profile.train.windows_per_micro]


@dataclass
class Workshop(FakeMachine):
    """A made-up machine whose steps take what the profile says, and a clock that counts them."""

    pace: Callable[[Profile], float] = pace
    set_up_s: float = 10.0
    slower: float = 1.0
    """How many times what the one before took each set-up takes."""
    compiles: str = ""
    """The plugin with which setting up takes 100 s more."""
    hangs: str = ""
    """The rung that never answers its first step."""
    now: float = 0.0
    most_windows: int = 4
    profiles: list[Profile] = field(default_factory=list)
    """All that were built."""

    @contextmanager
    def start(self, name: str) -> Iterator[FakeWorker]:
        worker = Bench(self, name)
        self.workers.append(worker)
        yield worker
        worker.close()


@dataclass
class Bench(FakeWorker):
    def build(self, profile: Profile, **rest: Any) -> Built:
        assert isinstance(self.machine, Workshop)
        self.machine.profiles.append(profile)
        self.mine = profile
        compiling_s = 100.0 if self.machine.compiles in profile.plugins else 0.0
        self._spend(self.machine.set_up_s + compiling_s, rest["patience_s"])
        self.machine.set_up_s *= self.machine.slower
        if profile.train.windows_per_micro > self.machine.most_windows:
            raise RungFailed("out of memory: no more", out_of_memory=True)
        return super().build(profile, **rest)

    def advance(self, steps: int, *, lead_in: int, patience_s: float) -> Lap:
        machine = self.machine
        assert isinstance(machine, Workshop)
        if self.name == machine.hangs:
            self._spend(1e9, patience_s)
        noise = 1 + 0.004 * (machine.tick % 3)
        machine.step_s = lambda on, tick: machine.pace(self.mine) * noise
        lap = super().advance(steps, lead_in=lead_in, patience_s=patience_s)
        self._spend((steps + lead_in) * machine.pace(self.mine), patience_s)
        return lap

    def _spend(self, seconds: float, patience_s: float) -> None:
        assert isinstance(self.machine, Workshop)
        self.machine.now += min(seconds, patience_s)
        if seconds > patience_s:
            raise RungFailed(f"no answer for {patience_s:.0f} s")


def look_for(
    machine: Workshop,
    plugins: dict[str, dict[str, Any]],
    *,
    known: Profile | None = None,
    minutes: float = 60,
    installed: Any = KNOWN,
    unsupported: dict[str, str] | None = None,
    told: list[str] | None = None,
) -> Tuned:
    there = Bound(
        profile=tiny_profile(plugins),
        facts=FACTS,
        protocol=PROTOCOL,
        start=machine.start,
        tell=(told if told is not None else []).append,
        look=lambda: CONDITIONS,
        gauge=gauge(),
        unsupported=unsupported or {},
    )
    result = search(
        there,
        found=installed,
        known=known,
        minutes=minutes,
        began=machine.now,
        clock=lambda: machine.now,
    )
    assert not any(worker.standing for worker in machine.workers), "it left a process"
    return result


def trials(result: Tuned) -> dict[str, tuple[bool, str]]:
    return {trial.what: (trial.taken, trial.why) for trial in result.trials}


# the search ------------------------------------------------------------------------------


def test_what_pays_is_taken_and_what_does_not_is_left_out() -> None:
    machine = Workshop()
    start: dict[str, dict[str, Any]] = {
        "dragging": {},
        "idle": {},
        "knob": {},
        "recipe": {},
        "watching": {},
    }
    result = look_for(machine, start)
    assert result.profile["plugins"] == {
        "knob": {"size": 4},
        "recipe": {},
        "watching": {},
        "wings": {},
    }
    assert result.profile["train"]["micro_batch"] == 2
    said = trials(result)
    assert said["without dragging"] == (True, "faster")
    assert said["without idle"] == (True, "not slower")
    assert said["without knob"] == (False, "slower")
    assert said["train.micro_batch = 2"] == (True, "faster")
    assert said["train.micro_batch = 1"] == (False, "slower")
    assert said["with wings"] == (True, "faster")
    assert result.untried == []
    assert not any("recipe" in what or "watching" in what for what in said)
    assert all({"recipe", "watching"} <= set(built.plugins) for built in machine.profiles)
    assert not any("other-recipe" in built.plugins for built in machine.profiles)
    # dragging 1.5, wings 2, knob 1.2 and micro-batches 1 / 0.9 times as fast.
    assert result.over_start is not None
    assert result.over_start.times == pytest.approx(1.5 * 2 * 1.2 / 0.9, rel=0.01)
    assert result.step_ms == pytest.approx(50 / 1.5 / 2 / 1.2 * 0.9, rel=0.01)


def test_what_does_not_run_here_goes_without_being_measured() -> None:
    machine = Workshop()
    result = look_for(machine, {"dragging": {}, "knob": {}}, unsupported={"dragging": "no units"})
    assert trials(result)["without dragging"] == (True, "cannot run here: no units")
    assert "with dragging" not in trials(result)
    assert not any("dragging" in built.plugins for built in machine.profiles)


def test_a_faster_plugin_that_breaks_its_claim_is_not_taken() -> None:
    machine = Workshop(pace=lambda p: 0.01 if "half" in p.plugins else 0.05)
    result = look_for(machine, {}, installed=found(half=Half))
    taken, why = trials(result)["with half"]
    assert not taken
    assert "1.0e-03 is allowed" in why
    assert result.profile["plugins"] == {}
    # Left out it may be, whatever its claim.
    known = found(half=Half, knob=Knob)
    left = look_for(Workshop(), {"half": {}, "knob": {}}, installed=known)
    assert list(left.profile["plugins"]) == ["knob"]


def test_a_search_that_finds_nothing_says_so() -> None:
    start: dict[str, dict[str, Any]] = {"knob": {}}
    machine = Workshop(
        pace=lambda p: 0.05 if (p.plugins, p.train.windows_per_micro) == (start, 4) else 0.07
    )
    cases: list[dict[str, str]] = [{}, {"dragging": "no units"}]
    for unsupported in cases:
        asked = {**start, **{name: {} for name in unsupported}}
        result = look_for(machine, asked, unsupported=unsupported)
        assert result.profile["plugins"] == start
        (said,) = tuned.remarks(result)
        assert said.endswith("ms/step: nothing that was tried beats profile contract as it is")
        assert "~" not in said


def test_what_others_need_stays_with_them() -> None:
    known = found(dragging=Speeding, needing=Needing)
    result = look_for(Workshop(), {"dragging": {}, "needing": {}}, installed=known)
    assert list(result.profile["plugins"]) == ["dragging", "needing"]


def test_it_begins_with_what_fits_into_memory() -> None:
    machine = Workshop(most_windows=2)
    result = look_for(machine, {"knob": {}})
    assert trials(result)["train.micro_batch = 4"][1].startswith("cannot run here: out of memory")
    assert result.profile["train"]["micro_batch"] == 2


def test_a_profile_that_does_not_run_is_an_error() -> None:
    machine = Workshop(fails={THE_PROFILE: ("build", "no compiler")})
    with pytest.raises(GptfastError, match="no compiler"):
        look_for(machine, {"knob": {}})


@pytest.mark.parametrize("minutes", [0.8, 2, 5])
def test_it_ends_within_its_minutes_and_says_what_is_untried(minutes: float) -> None:
    machine = Workshop()
    result = look_for(machine, {"dragging": {}, "knob": {}}, minutes=minutes)
    assert machine.now <= 60 * minutes
    assert result.seconds == machine.now
    assert {"with wings", "knob.size = 4"} <= {*result.untried, *trials(result)}
    assert bool(result.untried) is (minutes < 5)
    assert not set(result.untried) & set(trials(result))
    # What it has found by then was measured beside the start.
    assert result.over_start is not None or minutes < 1


@pytest.mark.parametrize("minutes", [1.2, 1.4, 1.6, 1.8, 2.0])
def test_the_last_sitting_has_its_time_where_starting_takes_longer_by_then(minutes: float) -> None:
    result = look_for(Workshop(slower=1.05), {"dragging": {}, "knob": {}}, minutes=minutes)
    assert trials(result)["without dragging"] == (True, "faster")
    assert result.untried
    assert result.over_start is not None


def test_what_makes_a_start_slow_is_left_out_although_it_could_not_begin_so_again() -> None:
    machine = Workshop(compiles="dragging")
    result = look_for(machine, {"dragging": {}, "knob": {}}, minutes=5)
    assert machine.now <= 300
    assert trials(result)["without dragging"] == (True, "faster")
    assert result.over_start is not None


def test_a_rung_that_never_answers_costs_no_more_than_the_time() -> None:
    machine = Workshop(hangs="without dragging")
    result = look_for(machine, {"dragging": {}, "knob": {}}, minutes=3)
    assert machine.now <= 180
    assert result.untried[0] == "without dragging"
    assert result.profile["plugins"] == {"dragging": {}, "knob": {}}


def test_a_first_step_may_take_all_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    patience: list[float] = []

    @contextmanager
    def no_machine(loaded: Loaded, *, protocol: Protocol, **_: Any) -> Iterator[Bound]:
        patience.append(protocol.patience_s)
        yield there(FakeMachine(), protocol=protocol)

    monkeypatch.setattr(tune_module, "bound", no_machine)
    monkeypatch.setattr(
        tune_module, "search", lambda there, **_: patience.append(there.protocol.patience_s)
    )
    tune(Loaded(tiny_profile({}), {}), minutes=1, tell=pytest.fail)
    assert patience == [30.0, Protocol.patience_s]


def test_too_few_minutes_are_said() -> None:
    with pytest.raises(GptfastError, match=r"0.2 minutes are over before"):
        look_for(Workshop(), {"knob": {}}, minutes=0.2)


def test_many_small_losses_are_taken_back_together() -> None:
    """Each of them is less than can be told apart."""
    names = [f"p{n}" for n in range(6)]
    small = found(**dict.fromkeys(names, Speeding))
    machine = Workshop(pace=lambda p: 0.05 * 1.003 ** (6 - len(p.plugins)))
    result = look_for(machine, {name: {} for name in names}, installed=small)
    assert list(result.profile["plugins"]) == names
    given_up = "at first it was (not slower); at the end all changes together were slower than the"
    assert {t for what, t in trials(result).items() if "micro" not in what} == {
        (False, f"{given_up} {THE_PROFILE}")
    }


# once more -------------------------------------------------------------------------------


def profile_of(result: Tuned) -> Profile:
    return Profile.model_validate(result.profile)


def test_tuned_again_it_is_what_was_found_before() -> None:
    start: dict[str, dict[str, Any]] = {"dragging": {}, "knob": {}}
    first = profile_of(look_for(Workshop(), start))
    machine = Workshop()
    second = look_for(machine, start, known=first)
    assert profile_of(second).plugins == first.plugins
    assert trials(second)[BEFORE] == (True, "faster")
    # Also where there is no time but for that.
    machine = Workshop()
    third = look_for(machine, start, known=first, minutes=1.2)
    assert profile_of(third).plugins == first.plugins
    assert third.untried


def test_one_before_that_changed_nothing_is_not_measured_twice() -> None:
    start: dict[str, dict[str, Any]] = {"dragging": {}}
    machine = Workshop()
    result = look_for(machine, start, known=tiny_profile(start))
    assert BEFORE not in trials(result)
    assert result.over_known is None
    assert [worker.name for worker in machine.workers].count(THE_PROFILE) == 2
    assert BEFORE not in [worker.name for worker in machine.workers]


def test_a_result_slower_than_the_one_before_gives_way_to_it() -> None:
    """The one before is slow when it is tried, and fast when all meet at the end."""
    best = tiny_profile({"wings": {}}).replace({"train.micro_batch": 2})
    machine = Workshop()

    def changing(profile: Profile) -> float:
        if (profile.plugins, profile.train.micro_batch) != (best.plugins, 2):
            return 0.05
        return 0.06 if machine.now < 60 else 0.02

    machine.pace = changing
    result = look_for(machine, {"dragging": {}}, known=best)
    assert trials(result)[BEFORE] == (False, "slower")
    assert profile_of(result).plugins == {"wings": {}}
    assert profile_of(result).train.micro_batch == 2
    assert any(why.endswith(f"slower than the {BEFORE}") for _, why in trials(result).values())


def test_what_was_found_for_other_training_takes_no_part() -> None:
    other = tiny_profile({"wings": {}}).replace({"train.batch_size": 8})
    result = look_for(Workshop(), {"knob": {}}, known=other)
    assert BEFORE not in trials(result)
    assert any("trains something else" in line for line in result.warnings)


@pytest.mark.parametrize(
    ("times", "low", "high", "leaves_out", "taken"),
    [
        (1.05, 1.01, 1.09, False, True),
        (1.05, 0.99, 1.09, False, False),
        (1.0, 0.98, 1.02, True, True),
        (0.98, 0.95, 1.01, True, False),
        (0.97, 0.96, 0.99, True, False),
    ],
)
def test_the_interval_decides(
    times: float, low: float, high: float, leaves_out: bool, taken: bool
) -> None:
    over = Ratio(times, low, high, significant=not low <= 1 <= high)
    assert decide(over, leaves_out=leaves_out)[0] is taken
    assert decide(over, leaves_out=leaves_out, broken="it differs") == (False, "it differs")


class ChoosyOptions(Options):
    size: int
    """Somebody has to say it."""


class Choosy(Plugin):
    claim = Claim.EXACT
    tries = Tries(size=(1, 2))
    Options = ChoosyOptions


def test_what_cannot_be_as_it_comes_is_not_switched_on() -> None:
    off, on = tiny_profile({}), tiny_profile({"choosy": {"size": 1}})
    tried = [
        [
            move.what
            for move in moves(p, {"choosy": Choosy})
            if move.key != MICRO_BATCH and move.apply(p)
        ]
        for p in (off, on)
    ]
    assert tried == [[], ["without choosy", "choosy.size = 2"]]


@pytest.mark.parametrize("name", registry.discover())
def test_what_a_plugin_declares_worth_trying_are_options_of_it(name: str) -> None:
    plugin = registry.discover()[name].load()
    may = tries(plugin)
    for option, values in (may.values if may else {}).items():
        assert option in plugin.Options.model_fields
        for value in values:
            assert getattr(plugin.Options.model_validate({option: value}), option) == value


# what is written -------------------------------------------------------------------------

OTHERS = """# mine
[profiles.mine]
extends = "fast"   # of course
"""
CHANGED = {"train.micro_batch": 6}
LEFT = {"compile": {"mode": "max-autotune"}, "flash": {}, "prefetch": {}}


def result_for(loaded: Loaded, changes: dict[str, Any]) -> Tuned:
    result = look_for(Workshop(), {"dragging": {}, "knob": {}})
    return replace(
        result,
        start=loaded.profile.model_dump(mode="json"),
        profile=loaded.profile.replace(changes).model_dump(mode="json"),
        untried=["with wings"],
    )


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_the_profile_is_added_and_written_anew_and_the_rest_stays(
    tmp_path: Path, newline: str
) -> None:
    path = tmp_path / "gptfast.toml"
    before = OTHERS.replace("\n", newline).encode()
    path.write_bytes(before)
    loaded = config.load("mine", folder=tmp_path)
    for windows in (6, 4):
        changes = {"train.micro_batch": windows, "plugins": LEFT}
        result = result_for(loaded, changes)
        tuned.keep(path, result, name="tuned", folder=tmp_path)
        assert path.read_bytes().startswith(before)
        text = path.read_text()
        assert text.count("\n[profiles.tuned]\n") == 1
        assert b"\n" in path.read_bytes()
        assert path.read_bytes().count(b"\r\n") == (text.count("\n") if newline == "\r\n" else 0)
        read = config.load("tuned", folder=tmp_path).profile
        assert read.train == loaded.profile.train.model_copy(update={"micro_batch": windows})
        assert read.model == loaded.profile.model
        assert read.plugins == {**LEFT}
    for said in ("a fake", "torch 2", "with wings", "without dragging: x ", "[1.", "faster"):
        assert said in text
    after = path.read_bytes() + newline.encode() + b"# the end"
    path.write_bytes(after)
    tuned.keep(path, result, name="tuned", folder=tmp_path)
    assert path.read_bytes() == after
    assert [file.name for file in tmp_path.iterdir()] == ["gptfast.toml"]


def test_each_line_of_a_profile_tuned_again_says_why(tmp_path: Path) -> None:
    """What was not tuned, but given, needs no reason."""
    loaded = config.load(
        "fast", folder=tmp_path, without=["compile"], overrides=["train.batch_size=8"]
    )
    on = {n: o for n, o in loaded.profile.plugins.items() if n not in ("flash", "loader")}
    again = [
        Trial(BEFORE, "plugins", True, "not slower"),
        Trial("without flash", "plugins.flash", True, "faster", Ratio(1.2, 1.1, 1.3, True)),
    ]
    found = result_for(loaded, {"plugins": on, "train.micro_batch": 8})
    result = replace(found, trials=again)
    path = tmp_path / "gptfast.toml"
    tuned.keep(path, result, name="tuned", folder=tmp_path)
    lines = path.read_text().splitlines()
    assert "loader = false  # profile tuned before: not slower" in lines
    assert "flash = false  # faster without it" in lines
    assert "compile = false" in lines
    assert not any(line.startswith("micro_batch") for line in lines)


def test_a_file_that_cannot_name_the_profile_gets_it_whole(tmp_path: Path) -> None:
    (tmp_path / "gptfast.toml").write_text(OTHERS)
    loaded = config.load("mine", folder=tmp_path, overrides=["train.learning_rate=0.5"])
    path = tmp_path / "alone.toml"
    tuned.keep(path, result_for(loaded, CHANGED), name="best-1", folder=tmp_path)
    assert "extends" not in path.read_text()
    read = config.load("best-1", config=path, folder=tmp_path).profile
    assert read.model_dump(exclude={"name"}) == loaded.profile.replace(CHANGED).model_dump(
        exclude={"name"}
    )


def test_a_profile_of_that_name_that_is_not_tunes_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "gptfast.toml"
    path.write_text('[profiles.tuned]\nextends = "char"\n')
    with pytest.raises(Refused, match=r"has a \[profiles.tuned\] that is not tune's"):
        tuned.check_place(path, "tuned")
    tuned.check_place(path, "tuned-2")
    with pytest.raises(Refused, match="use letters"):
        tuned.check_place(path, "a b")
    with pytest.raises(Refused, match="there is no folder"):
        tuned.check_place(tmp_path / "x" / "a.toml", "tuned")


def test_the_command_writes_shows_and_finds_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[dict[str, Any]] = []

    def search_nothing(loaded: Loaded, **kwargs: Any) -> Tuned:
        asked.append(kwargs)
        return result_for(loaded, {"plugins": {"flash": {}}})

    monkeypatch.setattr(tune_module, "tune", search_nothing)
    monkeypatch.chdir(tmp_path)
    before = time.monotonic()
    assert main(["tune", "--profile", "char", "--without", "fused-adamw", "--minutes", "3"]) == 0
    shown = capsys.readouterr().out
    assert "without dragging" in shown
    assert "left untried" in shown
    assert "gptfast train --profile tuned" in shown
    assert main(["tune", "--profile", "char", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["profile"]["plugins"] == {"flash": {}}
    assert document["trials"][0]["what"] == "without dragging"
    assert (asked[0]["minutes"], asked[0]["without"], asked[0]["known"]) == (
        *(3.0, ("fused-adamw",), None),
    )
    assert asked[1]["known"].plugins == {"flash": {}}
    first, second = (one["began"] for one in asked)
    assert before < first < second < time.monotonic()
    assert main(["config", "show", "--profile", "tuned"]) == 0
    (tmp_path / "gptfast.toml").write_text("[profiles.tuned]\n")
    assert main(["tune", "--profile", "char"]) == 2
    assert len(asked) == 2


def test_what_is_shipped_is_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a checkout the file of the folder is the one that everybody gets."""
    here = tmp_path / "gptfast.toml"
    here.write_bytes(config.shipped_config().read_bytes())
    before = here.read_bytes()
    monkeypatch.setattr(config, "shipped_config", lambda: here)
    monkeypatch.setattr(
        tune_module, "tune", lambda loaded, **_: result_for(loaded, {"plugins": {"flash": {}}})
    )
    monkeypatch.chdir(tmp_path)
    assert main(["tune", "--profile", "char"]) == 0
    assert here.read_bytes() == before
    shown = capsys.readouterr().out
    assert "gptfast train --config tuned.toml --profile tuned" in shown
    assert main(["config", "show", "--config", "tuned.toml", "--profile", "tuned"]) == 0
    assert main(["tune", "--profile", "char", "--out", "a b.toml"]) == 0
    assert "gptfast train --config 'a b.toml' --profile tuned" in capsys.readouterr().out


def test_minutes_that_are_over_before_the_machine_is_known_are_said(tmp_path: Path) -> None:
    write_tiny_store(tmp_path / "tiny.h5")
    profile = tiny_profile({}).replace({"data.path": str(tmp_path / "tiny.h5")})
    with pytest.raises(GptfastError, match=r"half of 0.001 minutes .* give more with --minutes"):
        tune(Loaded(profile, {}), minutes=0.001, device="cpu", tell=lambda line: None)


def test_a_search_in_real_processes(tmp_path: Path) -> None:
    write_tiny_store(tmp_path / "tiny.h5")
    profile = tiny_profile({"fused-adamw": {}}).replace(
        {"data.path": str(tmp_path / "tiny.h5"), "train.batch_size": 1}
    )
    told: list[str] = []
    began = time.monotonic()
    result = tune(
        Loaded(profile, {}),
        minutes=1.5,
        device="cpu",
        without=[name for name in registry.discover() if name != "fused-adamw"],
        protocol=Protocol(steps=3, rounds=6, lead_in=1),
        tell=told.append,
    )
    assert time.monotonic() - began < 95
    first = result.trials[0]
    assert first.what == "without fused-adamw"
    assert first.over_best is not None
    assert first.over_best.paired
    assert first.taken is ("fused-adamw" not in result.profile["plugins"])
    assert result.untried == []
    assert any("rungs by turns" in line for line in told)
