"""`gptfast bench --to-loss`: who runs, what is on the clock, and what is said of those who never
get there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from bench_helpers import GIB, FakeMachine, FakeWorker, there
from plugin_helpers import enabled

from gptfast.bench.ladder import Bound
from gptfast.bench.measure.messages import Built, Lap
from gptfast.bench.race.race import (
    PLAIN,
    Contender,
    Goal,
    contenders,
    race,
    to_loss,
    whole,
)
from gptfast.bench.race.record import Row, ToLoss, spread
from gptfast.bench.race.table import remarks, table
from gptfast.bench.result.record import Protocol
from gptfast.cli import main
from gptfast.config import Loaded
from gptfast.contract.tiny import tiny_profile, write_tiny_store
from gptfast.errors import GptfastError, Refused
from gptfast.plugin import Plugin, Profile

EVERY = 10
TOKENS = 25_000
"""Of a step of `FakeWorker`."""
FASTER, DEAR = enabled("faster", Plugin), enabled("dear", Plugin)


@dataclass
class Track(FakeMachine):
    """A made-up machine on which `faster` learns twice as much in a step, and `dear` makes a step
    three times as long; another seed learns a little less."""

    seeds: list[int] = field(default_factory=list)
    scored: list[str] = field(default_factory=list)

    @contextmanager
    def start(self, name: str) -> Iterator[FakeWorker]:
        worker = Racer(self, name)
        self.workers.append(worker)
        yield worker
        worker.close()


@dataclass
class Racer(FakeWorker):
    def build(self, profile: Profile, **rest: Any) -> Built:
        assert isinstance(self.machine, Track)
        self.seed = profile.train.seed
        self.machine.seeds.append(self.seed)
        return super().build(profile, **rest)

    def advance(self, steps: int, *, lead_in: int, patience_s: float) -> Lap:
        compiles = self.laps == 0
        lap = super().advance(steps, lead_in=lead_in, patience_s=patience_s)
        return replace(lap, seconds=lap.seconds + 7.0 * compiles)

    def score(self, max_targets: int | None, *, patience_s: float) -> float:
        assert isinstance(self.machine, Track)
        assert self.standing
        self.machine.scored.append(self.name)
        learnt = self.done * (2 if "faster" in self.plugins else 1)
        return 4.0 - 0.04 * learnt + 0.05 * (self.seed % 7)


def step_s(plugins: list[str], tick: int) -> float:
    return 0.3 if "dear" in plugins else 0.1


def on_track(machine: Track) -> Bound:
    protocol = Protocol(steps=EVERY, lead_in=0, warmup_cap=EVERY)
    return there(machine, FASTER, DEAR, protocol=protocol)


def run(machine: Track, *, goal: float = 2.0, most: int = 100, **changes: Any) -> ToLoss:
    bound = on_track(machine)
    runners = [
        Contender(PLAIN, bound.profile, [], most),
        Contender("+ faster", bound.profile, [FASTER], most),
        Contender("+ dear", bound.profile, [FASTER, DEAR], most),
    ]
    result = race(bound, runners, goal=goal, seeds=[7, 8, 9], every=EVERY, **changes)
    assert not any(worker.standing for worker in machine.workers), "it left a process"
    return result


def test_steps_tokens_and_time_are_those_of_training_alone() -> None:
    machine = Track(step_s=step_s)
    plain, faster, dear = run(machine).rows
    # 4 - 0.04 n + 0.05 seed reaches 2 at 50, 51.25 and 52.5 steps; seen every 10.
    assert [r.reached.step for r in plain.runs if r.reached] == [50, 60, 60]
    assert [r.reached.step for r in faster.runs if r.reached] == [30, 30, 30]
    assert plain.steps is not None
    assert (plain.steps.median, plain.steps.low, plain.steps.high, plain.steps.n) == (60, 50, 60, 3)
    assert plain.tokens is not None
    assert plain.tokens.median == 60 * TOKENS
    assert plain.train_s is not None
    assert plain.train_s.median == pytest.approx(60 * 0.1)
    assert all(r.startup_s == pytest.approx(1.5 + 7.0) for r in plain.runs)
    assert [point.step for point in plain.runs[0].points] == [10, 20, 30, 40, 50]
    assert faster.times_faster is not None
    assert faster.times_faster.low == pytest.approx(50 / 30)
    assert faster.times_faster.high == pytest.approx(60 / 30)
    assert dear.times_faster is not None
    assert dear.times_faster.median == pytest.approx(60 * 0.1 / (30 * 0.3))
    assert dear.times_fewer_tokens is not None
    assert dear.times_fewer_tokens.median == pytest.approx(2.0)
    assert sorted(machine.seeds) == [7, 7, 7, 8, 8, 8, 9, 9, 9]


def test_runs_go_by_turns_up_and_down() -> None:
    machine = Track(step_s=step_s)
    run(machine)
    names = [name.partition(",")[0] for name in machine.scored[:9]]
    a, b, c = PLAIN, "+ faster", "+ dear"
    assert names == [a, b, c, c, b, a, a, b, c]
    assert names[-1] == c
    assert machine.scored[9].startswith(a), "who is there waits for nobody and runs no further"


def test_who_never_gets_there_is_said_so() -> None:
    result = run(Track(step_s=step_s), most=45)
    plain, faster, _ = result.rows
    assert [r.reached for r in plain.runs] == [None] * 3
    assert [r.points[-1].step for r in plain.runs] == [45] * 3
    assert (plain.steps, faster.times_faster) == (None, None)
    assert faster.steps is not None
    _, cells = table(result)
    assert cells[0][1] == "0 of 3"
    assert cells[1][1] == "3 of 3"
    said = list(remarks(result))
    assert f"{PLAIN}: never reached within 45 steps from seed 7, 8, 9" in said
    assert f"+ faster: no ratio, since {PLAIN} never reached it from the same seed" in said


def test_a_contender_that_fails_is_a_row_and_the_first_is_an_error() -> None:
    result = run(Track(step_s=step_s, fails={"+ dear, seed 8": (7, "lost its way")}))
    row = result.rows[2]
    assert (row.ran, row.reason, len(row.runs)) == (False, "lost its way", 1)
    assert table(result)[1][2][1] == "cannot run"
    assert "+ dear cannot run here: lost its way" in remarks(result)
    with pytest.raises(GptfastError, match=f"{PLAIN} cannot run: no"):
        run(Track(step_s=step_s, fails={f"{PLAIN}, seed 7": ("build", "no")}))


def test_those_that_do_not_fit_together_run_one_after_the_other() -> None:
    machine = Track(step_s=step_s, memory=2 * GIB)
    plain, faster, dear = run(machine).rows
    assert len(machine.workers) > 9, "those that did not fit began again"
    assert [len(row.runs) for row in (plain, faster, dear)] == [3, 3, 3]
    assert faster.times_faster is not None
    assert faster.times_faster.low == pytest.approx(50 / 30)


def test_a_loss_that_is_no_number_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Racer, "score", lambda self, n, patience_s: float("nan"))
    with pytest.raises(GptfastError, match="validation loss is nan after step 10"):
        run(Track(step_s=step_s))


def test_a_goal_reached_at_once_is_a_warning() -> None:
    result = run(Track(step_s=step_s), goal=3.9)
    assert len([line for line in result.warnings if "first evaluation" in line]) == 3


def test_words_promise_no_more_than_the_seeds_show() -> None:
    result = run(Track(step_s=step_s))
    said = list(remarks(result))
    assert f"+ faster: faster than {PLAIN} from every one of 3 seeds" in said
    assert f"+ dear: slower than {PLAIN} from every one of 3 seeds" in said

    def words(*times: float) -> str:
        row: Row = replace(result.rows[1], times_faster=spread(times))
        return list(remarks(replace(result, rows=[result.rows[0], row])))[-1]

    assert "from some of 2 seeds and not from others" in words(0.9, 1.2)
    assert "no evidence" in words(1.5)
    assert spread([]) is None


def test_others_that_compute_meanwhile_are_flagged() -> None:
    assert run(Track(step_s=step_s, foreign_cpus=0.3)).warnings == []
    (warning,) = run(Track(step_s=step_s, foreign_cpus=1.5)).warnings
    assert "other programs kept 1.5 of 4 cores busy" in warning


# who runs ----------------------------------------------------------------------------------


def on(**plugins: dict[str, Any]) -> Bound:
    names = {name.replace("_", "-"): options for name, options in plugins.items()}
    return replace(there(FakeMachine()), profile=tiny_profile(names))


def names_of(found: list[Contender]) -> dict[str, list[str]]:
    return {one.name: [enabled.name for enabled in one.on] for one in found}


def test_each_recipe_runs_against_the_profile_without_any() -> None:
    bound = on(vocab_pad={}, ema={}, spike_guard={})
    found = names_of(list(contenders(bound, most_steps=None)))
    assert found == {
        PLAIN: ["vocab-pad"],
        "+ ema": ["vocab-pad", "ema"],
        "+ spike-guard": ["vocab-pad", "spike-guard"],
        "all of contract": ["vocab-pad", "ema", "spike-guard"],
    }
    first = next(contenders(bound, most_steps=None))
    assert first.most_steps == bound.profile.train.steps
    unsupported = replace(bound, unsupported={"ema": "not here", "vocab-pad": "nor this"})
    found_here = list(contenders(unsupported, most_steps=4))
    assert names_of(found_here)["+ spike-guard"] == ["spike-guard"]
    assert [one.reason for one in found_here] == [None, "not here", None, None]
    assert whole(unsupported, most_steps=99).most_steps == bound.profile.train.steps
    assert names_of([whole(unsupported, most_steps=2)]) == {"profile contract": ["spike-guard"]}


def test_what_cannot_be_compared_is_refused() -> None:
    plain = Loaded(tiny_profile({}), {})
    other = Loaded(plain.profile.replace({"data.path": "other.h5"}), {})
    tell: Any = print
    with pytest.raises(Refused, match="has no recipe to judge"):
        to_loss(plain, goal=Goal(2.0), tell=tell)
    with pytest.raises(Refused, match=r"--max-steps 99 is above train.steps = 6"):
        to_loss(plain, goal=Goal(2.0, most_steps=99), tell=tell)
    with pytest.raises(Refused, match=r"losses on other data cannot be compared"):
        to_loss(plain, goal=Goal(2.0), against=[other], tell=tell)


@pytest.mark.parametrize(
    "options",
    [
        ["--to-loss", "2", "--control"],
        *(["--to-loss", number, "--plugin", "ema"] for number in ("nan", "inf", "0")),
        *(["--seeds", "2"], ["--against", "char"]),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "--profile", "char", *options]) == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("at_hand")
def test_a_run_as_short_as_its_warm_up_is_evaluated_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_tiny_store(tmp_path / "tiny.h5")
    profile = tiny_profile({"batch-warmup": {"start": 1, "steps": 4}}).replace(
        {"data.path": str(tmp_path / "tiny.h5"), "train.steps": 6}
    )
    (tmp_path / "race.toml").write_text(profile.to_toml())
    options = ["--to-loss", "1e-6", "--seeds", "1", "--max-steps", "6", "--every", "6"]
    assert main(["bench", "--config", "race.toml", *options, "--device", "cpu"]) == 0
    out = capsys.readouterr()
    assert f"{PLAIN}: never reached within 6 steps" in out.out + out.err


@pytest.mark.usefixtures("at_hand")
def test_a_race_of_real_trainings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The windows of a seed are the same for all; batch-warmup sees fewer of them."""
    write_tiny_store(tmp_path / "tiny.h5")
    profile = tiny_profile({"batch-warmup": {"start": 1, "steps": 4}}).replace(
        {"data.path": str(tmp_path / "tiny.h5"), "train.steps": 18, "train.learning_rate": 1e-3}
    )
    (tmp_path / "race.toml").write_text(profile.to_toml())
    options = ["--to-loss", "1e-6", "--seeds", "1", "--every", "6", "--json", "--out", "kept"]
    assert main(["bench", "--config", "race.toml", *options, "--device", "cpu"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((tmp_path / "kept" / "to-loss.json").read_text())
    plain, warm = found["rows"]
    assert [row["name"] for row in found["rows"]] == [PLAIN, "+ batch-warmup"]
    points = plain["runs"][0]["points"]
    assert [point["step"] for point in points] == [6, 12, 18]
    assert [point["tokens"] for point in points] == [6 * 64, 12 * 64, 18 * 64]
    assert warm["runs"][0]["points"][0]["tokens"] < 6 * 64
    losses = [point["loss"] for point in points]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] < 4.2
    assert plain["runs"][0]["reached"] is None
