"""Searches the profile whose steps are fastest on this machine, within a number of minutes.

Greedy: the best profile so far stands, and one change at a time stands beside it and is measured by
turns with it, as rungs are. What is left out goes where it brings nothing; what is added or set has
to be faster by its interval. At the end the result meets the profile that the search began from,
and the one that an earlier search found, in one sitting: one that is faster there is kept instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import gptfast
from gptfast.bench.ladder import Bound, bound
from gptfast.bench.measure.attempt import Attempt
from gptfast.bench.measure.deadline import Deadline, OutOfTime
from gptfast.bench.measure.process import FAREWELL_S
from gptfast.bench.measure.sitting import Sitting, Tell
from gptfast.bench.result.record import Drift, Protocol, Ratio
from gptfast.bench.result.rows import busy, crowded, foreign_cpus
from gptfast.bench.result.statistics import drift, ratio
from gptfast.bench.tune.decide import broken_claim, decide, gives_way
from gptfast.bench.tune.moves import (
    BEFORE,
    MICRO_BATCH,
    Move,
    as_before,
    classes_of,
    equal,
    like,
    moves,
    same_task,
)
from gptfast.bench.tune.tuned import Trial, Tuned
from gptfast.config import Loaded
from gptfast.device.memory import micro_batches
from gptfast.errors import GptfastError, Refused
from gptfast.host import registry
from gptfast.host.registry import Found
from gptfast.plugin import Profile

ROUNDS = 8
ROUND_S = 1.0
"""A round has fewer steps where they would take longer."""
CLOSING_S = 10.0
"""Kept for ending the processes, of which one that computes is given a while."""
SLACK = 1.3
"""Rounds may take so many times what the warm-up promises, and a set-up what the last one took."""
THE_PROFILE = "profile as it is"


def tune(
    loaded: Loaded,
    *,
    minutes: float,
    device: str = "auto",
    known: Profile | None = None,
    without: Sequence[str] = (),
    protocol: Protocol | None = None,
    began: float | None = None,
    tell: Tell,
    clock: Callable[[], float] = time.monotonic,
) -> Tuned:
    """Search from a profile for the one whose steps are fastest here.

    Args:
        minutes: after which it ends, whatever is left to try.
        known: what an earlier search found. It takes part where it trains the same.
        without: plugins that are not to be tried.
        began: when the minutes did, on the clock. None: now.
        clock: in seconds.

    Raises:
        Refused: profile, data or device allow no run.
        GptfastError: not even the profile as it is runs here within the minutes.
    """
    began = clock() if began is None else began
    found = registry.discover()
    registry.plan(loaded.profile, found=found, origins=loaded.origins)
    protocol = protocol or Protocol(rounds=ROUNDS)
    # Two questions are asked before there is a deadline: of the machine, and of the plugins.
    hurried = replace(protocol, patience_s=min(protocol.patience_s, minutes * 60 / 2))
    with ExitStack() as standing:
        try:
            there = standing.enter_context(
                bound(loaded, device=device, protocol=hurried, unsupported=True, tell=tell)
            )
        except GptfastError as error:
            if clock() - began < hurried.patience_s:
                raise
            raise GptfastError(
                f"tune: half of {minutes:g} minutes were over before it was known what runs here "
                f"({error}): give more with --minutes"
            ) from error
        return search(
            replace(there, protocol=protocol),
            found={name: one for name, one in found.items() if name not in without},
            known=known,
            minutes=minutes,
            began=began,
            clock=clock,
        )


def search(
    there: Bound,
    *,
    found: Mapping[str, Found],
    known: Profile | None,
    minutes: float,
    began: float,
    clock: Callable[[], float],
) -> Tuned:
    """The search, on a machine that is bound; `began` is when the minutes did.

    Raises:
        GptfastError: not even the profile as it is runs here within the minutes.
    """
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    before = there.look()
    end = began + minutes * 60 - CLOSING_S
    deadline = Deadline(end, clock=clock)
    classes = classes_of(found, there.profile)
    warnings: list[str] = []
    with ExitStack() as workers:
        sitting = Sitting(
            there.profile,
            device=there.facts.device,
            protocol=there.protocol,
            workers=workers,
            start=deadline.hurries(there.start),
            tell=there.tell,
        )
        run = _Search(there, sitting, found=found, deadline=deadline)
        start = run.begin(minutes)
        run.pace()
        guards = {THE_PROFILE: start}
        ways = list(moves(there.profile, classes))
        if known is not None and same_task(known, there.profile, classes):
            like_before = like(start, known)
            if not equal(like_before, start):
                guards[BEFORE] = like_before
                ways.insert(0, as_before(like_before))
        elif known is not None:
            warnings.append(f"the {BEFORE} trains something else and took no part")
        deadline.at = end - run.sitting_s(len(guards))
        run.go_through(ways)
        deadline.at = end
        met = run.meet(guards)
        after = there.look()
        foreign = foreign_cpus(run.best)
    if run.unmet:
        warnings.append("no time was left to measure the result beside what it began from")
    cores = there.facts.cpu_count
    warnings += [*busy(before, cores), *crowded(foreign, cores, run.protocol)]
    return Tuned(
        gptfast=gptfast.__version__,
        started=started,
        minutes=minutes,
        seconds=clock() - began,
        machine=there.facts,
        before=before,
        after=after,
        protocol=run.protocol,
        start=there.profile.model_dump(mode="json"),
        profile=run.profile.model_dump(mode="json"),
        trials=run.trials,
        untried=run.untried,
        step_ms=run.best.step_ms if run.best.rounds else run.best.step_s * 1e3,
        over_start=met.get(THE_PROFILE),
        over_known=met.get(BEFORE),
        drift=run.drift,
        warnings=warnings,
    )


class _Search:
    """The best profile so far, its rung, and what has been tried."""

    best: Attempt
    profile: Profile

    def __init__(
        self, there: Bound, sitting: Sitting, *, found: Mapping[str, Found], deadline: Deadline
    ) -> None:
        self.trials: list[Trial] = []
        self.untried: list[str] = []
        self.unmet = False
        """Whether the result could not be measured beside what the search began from."""
        self.drift: Drift | None = None
        """Of the result's losses from those of what the search began from."""
        self._there = there
        self.protocol = there.protocol
        self._sitting = sitting
        self._found = found
        self._deadline = deadline
        self._set_up_s = 0.0
        """What the last rung took until it was warm."""
        self._fits = there.profile.train.batch_size
        """Most windows in a forward pass that memory holds."""
        self._settled: set[str] = set()
        """Keys of which no more values need be tried."""

    def begin(self, minutes: float) -> Profile:
        """Stand the profile as it is: without what does not run here, in micro-batches that fit.

        Raises:
            GptfastError: it does not run here, or not within the minutes.
        """
        profile = self._there.profile
        for name, reason in self._there.unsupported.items():
            self._note(f"without {name}", f"plugins.{name}", True, f"cannot run here: {reason}")
        on = {n: o for n, o in profile.plugins.items() if n not in self._there.unsupported}
        train = profile.train
        sizes = [n for n in micro_batches(train.batch_size) if n <= train.windows_per_micro]
        for windows in sizes:
            self.profile = profile.replace({"plugins": on, MICRO_BATCH: windows})
            self.best = self._attempt(THE_PROFILE, self.profile, other=None)
            try:
                self._seat(self.best)
            except OutOfTime:
                raise GptfastError(
                    f"tune: {minutes:g} minutes are over before the profile as it is was warm: "
                    "give more with --minutes"
                ) from None
            except GptfastError:
                if not self.best.out_of_memory:
                    raise
            if self.best.failure is None:
                self._fits = windows
                return self.profile
            if not self.best.out_of_memory:
                break
            what = f"{MICRO_BATCH} = {windows}"
            self._note(what, MICRO_BATCH, False, f"cannot run here: {self.best.failure}")
        raise GptfastError(f"tune: the profile does not run here: {self.best.failure}")

    def pace(self) -> None:
        """Have rounds of fewer steps where steps are slow, so that more can be tried."""
        steps = round(ROUND_S / self.best.step_s)
        if steps < self.protocol.steps:
            self.protocol = replace(self.protocol, steps=max(2, steps), lead_in=1)
            self._sitting.follow(self.protocol)

    def go_through(self, ways: list[Move]) -> None:
        """Try each that changes something, as long as there is time."""
        over = False
        for move in ways:
            changed = move.apply(self.profile)
            if changed is None or move.key in self._settled:
                continue
            if changed.train.windows_per_micro > self._fits:
                continue
            # What it takes until it is warm is not known: without a compiler, little.
            over = over or self._deadline.left_s < self._rounds_s([self.best] * 2)
            if not over:
                try:
                    self._try(move, changed)
                except OutOfTime:
                    over = True
            if over:
                self.untried.append(move.what)

    def meet(self, guards: Mapping[str, Profile]) -> dict[str, Ratio]:
        """How many times as fast as each of `guards` the result is, all in one sitting.

        It becomes one of them where it is slower.
        """
        others = {what: p for what, p in guards.items() if not equal(p, self.profile)}
        try:
            return self._met(others) if others else {}
        except OutOfTime:
            self.unmet = True
            return {}

    def sitting_s(self, n: int) -> float:
        """What setting `n` rungs up and measuring them beside the best takes, about."""
        # The one that is being tried when its time is over is seen off first.
        return FAREWELL_S + SLACK * n * self._set_up_s + self._rounds_s([self.best] * (n + 1))

    def _try(self, move: Move, changed: Profile) -> None:
        try:
            attempt = self._attempt(move.what, changed, other=self.best, plugin=move.plugin)
        except Refused as refusal:
            self._note(move.what, move.key, False, f"cannot be: {refusal}")
            return
        self._measure([attempt])
        if not attempt.ran:
            self._note(move.what, move.key, False, f"cannot run here: {attempt.failure}")
            return
        over = ratio(self.best.round_step_ms, attempt.round_step_ms, self.protocol)
        broken = None if move.leaves_out else broken_claim(attempt, self.best, self._there.facts)
        taken, why = decide(over, leaves_out=move.leaves_out, broken=broken)
        self._note(move.what, move.key, taken, why, over=over, step_ms=attempt.step_ms)
        smaller = changed.train.windows_per_micro < self.profile.train.windows_per_micro
        if over.high < 1 and move.key == MICRO_BATCH and smaller:
            self._settled.add(MICRO_BATCH)  # still smaller ones will not be faster
        self._sitting.dismiss([self.best if taken else attempt])
        if taken:
            self.best, self.profile = attempt, changed

    def _measure(self, attempts: list[Attempt]) -> None:
        """Set up beside the best, and do the rounds of all.

        Raises:
            OutOfTime: they are ended, and where it came in the rounds the best is too.
        """
        if self.best not in self._sitting.standing:  # it had to make room
            self._seat(self.best)
            if self.best.failure is not None:
                raise GptfastError(f"{self.best.name} ran and fails now: {self.best.failure}")
        try:
            for attempt in attempts:
                self._seat(attempt, beside=[self.best])
            if self._deadline.left_s < self._rounds_s(self._sitting.standing):
                raise OutOfTime
        except OutOfTime:
            for attempt in attempts:
                attempt.close()
            self._sitting.dismiss(attempts)
            raise
        try:
            self._sitting.finish()
        except OutOfTime:
            self._sitting.dismiss()  # who was in a round still answers to that
            raise

    def _met(self, others: Mapping[str, Profile]) -> dict[str, Ratio]:
        best = self.best
        rivals = {
            what: self._attempt(what, profile, other=best) for what, profile in others.items()
        }
        self._measure(list(rivals.values()))
        if THE_PROFILE in rivals and rivals[THE_PROFILE].ran:
            self.drift = drift(best.losses, rivals[THE_PROFILE].losses)
        protocol = self.protocol
        over = {
            what: ratio(rival.round_step_ms, best.round_step_ms, protocol)
            for what, rival in rivals.items()
            if rival.ran
        }
        slower = [what for what, times in over.items() if gives_way(times, tuned=what == BEFORE)]
        if not slower:
            return over
        better = min(slower, key=lambda what: over[what].times)
        self.trials = [
            t.given_up(better) if t.taken and t.over_best is not None and t.what != better else t
            for t in self.trials
        ]
        self.best, self.profile = rivals[better], others[better]
        return {
            what: ratio(rival.round_step_ms, self.best.round_step_ms, protocol)
            for what, rival in rivals.items()
            if rival.ran and what != better
        }

    def _seat(self, attempt: Attempt, **beside: Any) -> None:
        before = self._deadline.left_s
        self._sitting.seat(attempt, **beside)
        if attempt.failure is None:
            self._set_up_s = before - self._deadline.left_s

    def _attempt(
        self, name: str, profile: Profile, *, other: Attempt | None, plugin: str | None = None
    ) -> Attempt:
        """Raises Refused where the profile's plugins do not go together."""
        on = registry.plan(profile, found=self._found)
        return Attempt(
            name,
            on,
            self.protocol,
            judged=next((one for one in on if one.name == plugin), None),
            other=other,
            changes={"plugins": profile.plugins, MICRO_BATCH: profile.train.micro_batch},
        )

    def _rounds_s(self, standing: list[Attempt]) -> float:
        steps = self.protocol.rounds * (self.protocol.lead_in + self.protocol.steps)
        return SLACK * steps * sum(attempt.step_s for attempt in standing)

    def _note(
        self,
        what: str,
        key: str,
        taken: bool,
        why: str,
        *,
        over: Ratio | None = None,
        step_ms: float | None = None,
    ) -> None:
        trial = Trial(what, key, taken, why, over, step_ms)
        self.trials.append(trial)
        self._there.tell(trial.line())
