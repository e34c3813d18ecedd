"""What a recipe brings: time and tokens until the validation loss reaches a goal, for some seeds.

A profile without its recipes stands beside the same with each of them, and whole other profiles.
All train from one seed on the same windows, by turns of some steps; after each turn the validation
loss is measured, off the clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from statistics import median

import gptfast
from gptfast.bench.ladder import Bound, bound, without
from gptfast.bench.measure.attempt import Attempt
from gptfast.bench.measure.sitting import Tell, told
from gptfast.bench.race.record import Point, Row, Run, ToLoss, spread
from gptfast.bench.result.record import Protocol
from gptfast.bench.result.rows import busy, crowded
from gptfast.config import Loaded
from gptfast.errors import GptfastError, Refused
from gptfast.host import registry
from gptfast.host.registry import Enabled
from gptfast.plugin import Claim, Profile

PLAIN = "without recipes"
TURNS = 40
"""Evaluations in a whole run, where nobody says otherwise."""


@dataclass(frozen=True)
class Goal:
    """What is to be reached, and how that is found out."""

    loss: float
    """On `val`, in nats."""
    seeds: int = 3
    """How many, from the profile's own."""
    most_steps: int | None = None
    """After which a run has not reached it. None: the profile's steps."""
    every: int | None = None
    """Steps between evaluations. None: a fortieth of the profile's steps."""


@dataclass(frozen=True)
class Contender:
    """Who runs for the goal."""

    name: str
    profile: Profile
    on: Sequence[Enabled]
    most_steps: int
    """After which it has not reached the goal."""
    reason: str | None = None
    """Why it cannot run here."""


def to_loss(
    loaded: Loaded,
    *,
    goal: Goal,
    against: Sequence[Loaded] = (),
    device: str = "auto",
    tell: Tell,
) -> ToLoss:
    """Measure what each recipe of a profile brings.

    Args:
        against: other profiles that run too, each as a whole.

    Raises:
        Refused: there is nothing to compare, or profile, data or device allow no run.
        GptfastError: not even the profile without its recipes runs.
    """
    steps, most_steps = loaded.profile.train.steps, goal.most_steps
    if most_steps is not None and most_steps > steps:
        raise Refused(
            f"--max-steps {most_steps} is above train.steps = {steps}, where the schedule ends: "
            f"lower it, or make the run longer with --set train.steps={most_steps}"
        )
    limits = [most_steps or steps, *(other.profile.train.steps for other in against)]
    every = min(goal.every or max(2 * Protocol.warmup_window, steps // TURNS), *limits)
    protocol = Protocol(steps=every, lead_in=0, warmup_cap=min(Protocol.warmup_cap, every))
    others = []
    for other in against:
        _check_comparable(loaded.profile, other.profile)
        with _bound(other, protocol, device, tell) as there:
            others.append(whole(there, most_steps=most_steps))
    planned = registry.plan(loaded.profile, origins=loaded.origins)
    if not others and not any(_is_recipe(one) for one in planned):
        raise Refused(
            f"profile {loaded.profile.name} has no recipe to judge: name one with --plugin, or "
            "another profile with --against"
        )
    with _bound(loaded, protocol, device, tell) as there:
        runners = [*contenders(there, most_steps=most_steps), *others]
        own = loaded.profile.train.seed
        seeds = range(own, own + goal.seeds)
        return race(there, runners, goal=goal.loss, seeds=seeds, every=every)


def _bound(
    loaded: Loaded, protocol: Protocol, device: str, tell: Tell
) -> AbstractContextManager[Bound]:
    return bound(loaded, device=device, protocol=protocol, unsupported=True, tell=tell)


def _check_comparable(profile: Profile, other: Profile) -> None:
    if profile.data != other.data:
        raise Refused(
            f"--against {other.name}: its data are {other.data.path}, those of {profile.name} "
            f"{profile.data.path}: losses on other data cannot be compared"
        )


def _is_recipe(enabled: Enabled) -> bool:
    return enabled.plugin.claim is Claim.RECIPE


# who runs --------------------------------------------------------------------------------


def contenders(there: Bound, *, most_steps: int | None) -> Iterator[Contender]:
    """The profile without its recipes, with each of them, and, where it has several, with all."""
    planned = registry.plan(there.profile)
    able = [one for one in planned if one.name not in there.unsupported]
    recipes = [one for one in planned if _is_recipe(one)]
    plain = able
    for recipe in recipes:
        plain = without(recipe, plain)
    limit = most_steps or there.profile.train.steps
    yield Contender(PLAIN, there.profile, plain, limit)
    for recipe in recipes:
        needed = _needed(recipe, planned)
        on = [one for one in able if one in plain or one in needed]
        reason = next((there.unsupported[e.name] for e in needed if e not in able), None)
        yield Contender(f"+ {recipe.name}", there.profile, on, limit, reason)
    if len(recipes) > 1:
        yield Contender(f"all of {there.profile.name}", there.profile, able, limit)


def whole(there: Bound, *, most_steps: int | None) -> Contender:
    """A profile as it stands, without what does not run here."""
    profile = there.profile
    on = [one for one in registry.plan(profile) if one.name not in there.unsupported]
    steps = profile.train.steps
    return Contender(f"profile {profile.name}", profile, on, min(most_steps or steps, steps))


def _needed(enabled: Enabled, plugins: Sequence[Enabled]) -> list[Enabled]:
    """A plugin and all that it requires."""
    names = {enabled.name}
    while more := {r for e in plugins if e.name in names for r in e.plugin.requires} - names:
        names |= more
    return [one for one in plugins if one.name in names]


# the race --------------------------------------------------------------------------------


def race(
    there: Bound,
    contenders: Sequence[Contender],
    *,
    goal: float,
    seeds: Iterable[int],
    every: int,
) -> ToLoss:
    """Every contender from every seed. The first is the one that all are compared with.

    Raises:
        GptfastError: the first cannot run.
    """
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    before = there.look()
    seeds = list(seeds)
    failures = {one.name: one.reason for one in contenders if one.reason is not None}
    runs: dict[str, list[Run]] = {one.name: [] for one in contenders}
    for seed in seeds:
        waiting = [[one for one in contenders if one.name not in failures]]
        while waiting:
            company = waiting.pop(0)
            for runner in _run_by_turns(there, company, goal=goal, seed=seed, every=every):
                name, failure = runner.contender.name, runner.attempt.failure
                if failure is None:
                    runs[name].append(runner.result())
                elif runner.attempt.out_of_memory and len(company) > 1:
                    there.tell(f"{name} is to run alone: {failure}")
                    waiting.append([runner.contender])
                else:
                    failures[name] = failure
        if contenders[0].name in failures:
            raise GptfastError(
                f"{contenders[0].name} cannot run: {failures[contenders[0].name]}: nothing was "
                "measured"
            )
    after = there.look()
    rows = [_row(one, runs[one.name], failures.get(one.name)) for one in contenders]
    rows = [_compared(row, rows[0]) for row in rows]
    cores = there.facts.cpu_count
    return ToLoss(
        gptfast=gptfast.__version__,
        started=started,
        machine=there.facts,
        before=before,
        after=after,
        profile=there.profile.model_dump(mode="json"),
        goal=goal,
        seeds=seeds,
        every=every,
        rows=rows,
        warnings=[
            *busy(before, cores),
            *crowded(_foreign_cpus(rows), cores, there.protocol),
            *_warnings(rows),
        ],
    )


def _run_by_turns(
    there: Bound, company: Sequence[Contender], *, goal: float, seed: int, every: int
) -> list[_Runner]:
    """From one seed until each has reached the goal or its last step, or failed."""
    runners = [_Runner(one, there, goal=goal, seed=seed, every=every) for one in company]
    with ExitStack() as workers:
        for runner in runners:
            runner.set_up(workers)
        order = 1
        while running := [runner for runner in runners if runner.runs]:
            for runner in running[::order]:
                runner.turn()
            order = -order  # up and down again: a machine that slows favours nobody
    return runners


class _Runner:
    """One contender from one seed, turn by turn."""

    def __init__(
        self, contender: Contender, there: Bound, *, goal: float, seed: int, every: int
    ) -> None:
        self.contender = contender
        self.points: list[Point] = []
        self.attempt = Attempt(
            f"{contender.name}, seed {seed}",
            contender.on,
            there.protocol,
            changes={"train.seed": seed},
        )
        self._there = there
        self._goal = goal
        self._seed = seed
        self._every = every
        self._eval_tokens = there.profile.train.eval_tokens
        self._train_s = 0.0
        self._foreign_cpus: list[float] = []
        self._late_compiles = 0

    @property
    def runs(self) -> bool:
        """Whether it is still under way."""
        if self.attempt.failure is not None:
            return False
        # A warm-up may have been as long as the run, which is yet to be evaluated.
        under_way = not self.points or self._step < self.contender.most_steps
        return self.reached is None and under_way

    @property
    def reached(self) -> Point | None:
        last = self.points[-1] if self.points else None
        return last if last is not None and last.loss <= self._goal else None

    @property
    def _step(self) -> int:
        return len(self.attempt.losses)

    def set_up(self, workers: ExitStack) -> None:
        worker = workers.enter_context(self._there.start(self.attempt.name))
        attempt = self.attempt
        attempt.set_up(worker, self.contender.profile, device=self._there.facts.device)
        self._there.tell(told(attempt))
        if attempt.failure is None:
            self._train_s = attempt.step_s * self._step

    def turn(self) -> None:
        """Steps up to the next evaluation, and that."""
        attempt = self.attempt
        first_turn = not self.points
        goes = self._every - self._step % self._every
        if first_turn and self._step == self._every:
            goes = 0  # the warm-up was as long as a turn
        goes = min(goes, self.contender.most_steps - self._step)
        if goes > 0:
            lap = attempt.go(goes)
            if lap is None:
                return
            self._train_s += lap.seconds
            if lap.foreign_cpus is not None:
                self._foreign_cpus.append(lap.foreign_cpus)
            self._late_compiles += lap.compiled
        loss = attempt.score(self._eval_tokens)
        if loss is None:
            return
        if not math.isfinite(loss):
            attempt.fail(f"its validation loss is {loss} after step {self._step}")
            return
        self.points.append(Point(self._step, attempt.tokens, self._train_s, loss))
        if not self.runs:
            self._there.tell(self._told())
            attempt.close()

    def result(self) -> Run:
        warmup = self.attempt.warmup
        return Run(
            seed=self._seed,
            startup_s=warmup.build_s + warmup.compile_s,
            points=self.points,
            reached=self.reached,
            foreign_cpus=median(self._foreign_cpus) if self._foreign_cpus else None,
            late_compiles=self._late_compiles,
        )

    def _told(self) -> str:
        last, name = self.points[-1], self.attempt.name
        if self.reached is None:
            return f"{name}: not reached within {last.step} steps, loss {last.loss:.4f}"
        return f"{name}: loss {last.loss:.4f} after {last.step} steps, {last.train_s:.1f} s"


# what came of it -------------------------------------------------------------------------


def _row(contender: Contender, runs: list[Run], failure: str | None) -> Row:
    reached = [run.reached for run in runs if run.reached is not None]
    return Row(
        name=contender.name,
        plugins=[one.name for one in contender.on],
        ran=failure is None,
        reason=failure,
        most_steps=contender.most_steps,
        runs=runs,
        steps=spread([point.step for point in reached]),
        tokens=spread([point.tokens for point in reached]),
        train_s=spread([point.train_s for point in reached]),
    )


def _compared(row: Row, first: Row) -> Row:
    """With its runs beside those of the first contender from the same seed."""
    if row is first:
        return row
    theirs = {run.seed: run.reached for run in first.runs}
    pairs = [
        (them, run.reached)
        for run in row.runs
        if run.reached is not None and (them := theirs.get(run.seed)) is not None
    ]
    return replace(
        row,
        times_faster=spread([them.train_s / us.train_s for them, us in pairs]),
        times_fewer_tokens=spread([them.tokens / us.tokens for them, us in pairs]),
    )


def _foreign_cpus(rows: Sequence[Row]) -> float | None:
    """Cores that others kept busy in the worst of all runs."""
    seen = [run.foreign_cpus for row in rows for run in row.runs if run.foreign_cpus is not None]
    return max(seen, default=None)


def _warnings(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        late = sum(run.late_compiles for run in row.runs)
        if late:
            yield f"{row.name} compiled {late} graphs after its warm-up: their time is on the clock"
        at_once = [run.seed for run in row.runs if run.reached and len(run.points) == 1]
        if at_once:
            yield (
                f"{row.name} had reached the loss at the first evaluation (seed "
                f"{', '.join(map(str, at_once))}): lower --to-loss or --every"
            )
