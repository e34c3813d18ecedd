"""Which rungs stand at the same time.

Rungs that take turns can be compared pair by pair, so as many as possible stand together, each in
its own process with its own model. On a small card they do not all fit. Then those that stand do
their rounds and go, but for the two that the next rung is compared with, which stay and do theirs
again beside it. A rung that still does not fit stands beside one of them, at last alone: only what
does not fit alone is out of memory.

Parking tensors on the host between rounds would keep all together, and would measure something
else: graphs that were recorded with their addresses would be recorded anew, and a stranger's plugin
may hold memory that nobody else knows of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from statistics import median

from gptfast.bench.measure.attempt import Attempt, Start
from gptfast.bench.result.record import Protocol
from gptfast.errors import GptfastError
from gptfast.plugin import Profile

Tell = Callable[[str], None]
"""Told in one line what is happening."""
Farewell = Callable[[Attempt], None]
"""Called of a rung that did its rounds, while it still stands."""


class Sitting:
    """The rungs that stand, and their rounds.

    The first that is seated is the one that all are compared with: without it nothing is measured.

    Args:
        workers: ends the processes.
        start: starts the process of a rung.
        divides: whether the time of steps is divided up too.
        farewell: what is to be done with a rung before it goes.
        between: what is to be done before each round.
    """

    def __init__(
        self,
        profile: Profile,
        *,
        device: str,
        protocol: Protocol,
        workers: ExitStack,
        start: Start,
        tell: Tell,
        divides: bool = False,
        farewell: Farewell = lambda attempt: None,
        between: Callable[[], None] = lambda: None,
    ) -> None:
        self.standing: list[Attempt] = []
        self._profile = profile
        self._device = device
        self._protocol = protocol
        self._workers = workers
        self._start = start
        self._tell = tell
        self._divides = divides
        self._farewell = farewell
        self._between = between
        self._first: Attempt | None = None
        self._round = 0
        """Number of the next one, counted over everybody."""
        self._owed: list[Attempt] = []
        """Those that have had no rounds beside the ones that stand now."""
        self._crowded_out: list[Attempt] = []
        """Those that ran out of memory in their rounds, beside others."""

    def seat(self, attempt: Attempt, *, beside: Sequence[Attempt] = ()) -> None:
        """Stand a rung: beside all others if possible, or beside those named, at last alone.

        Raises:
            GptfastError: it is the first and cannot run here.
        """
        if set(self.standing) - set(beside) and not self._another_fits():
            self._make_room(beside)
        self._set_up(attempt)
        while attempt.out_of_memory and self.standing:
            self._make_room(beside)
            self._set_up(attempt)
        self._tell(told(attempt))
        self._first = self._first or attempt
        self._check(attempt)
        if attempt.failure is None:
            self.standing.append(attempt)
            self._owed.append(attempt)

    def alone(self, attempt: Attempt) -> float | None:
        """Milliseconds of a step of a rung that stands, in a few rounds that do not count.

        None: it stands no more, or failed.

        Raises:
            GptfastError: it is the first, has no rounds yet, and failed.
        """
        if attempt not in self.standing:
            return None
        laps = attempt.laps(self._protocol.control_rounds)
        if attempt.failure is not None:
            self._lose(attempt)
            return None
        return median(lap.step_ms for lap in laps)

    def finish(self) -> None:
        """The last rounds; those that were crowded out of theirs do them in smaller company.

        Raises:
            GptfastError: the first one cannot run here.
        """
        self._take_turns()
        while self._crowded_out:
            attempt = self._crowded_out.pop()
            beside = [one for one in self.standing if one is attempt.other]
            self._make_room(beside)
            self.seat(attempt, beside=beside)
            self._take_turns()

    def follow(self, protocol: Protocol) -> None:
        """Go on by another protocol, with all that stand."""
        self._protocol = protocol
        for attempt in self.standing:
            attempt.follow(protocol)

    def dismiss(self, going: Sequence[Attempt] | None = None) -> None:
        """Farewell to those of `going` that stand; None: to all."""
        self._dismiss([one for one in self.standing if going is None or one in going])

    def _set_up(self, attempt: Attempt) -> None:
        worker = self._workers.enter_context(self._start(attempt.name))
        attempt.set_up(worker, self._profile, device=self._device)

    def _another_fits(self) -> bool:
        """Whether one more like the last fits, and the hungriest can still do its steps then."""
        footprints = [attempt.last_lap.footprint for attempt in self.standing]
        last = footprints[-1]
        if last.free_bytes is None:
            return True
        hungriest = max(one.peak_bytes - one.rest_bytes for one in footprints)
        return last.free_bytes >= last.rest_bytes + hungriest

    def _make_room(self, beside: Sequence[Attempt]) -> None:
        """All go that the next one is not compared with, or else the first that it is."""
        self._take_turns()
        going = [one for one in self.standing if one not in beside] or self.standing[:1]
        if going:
            names = ", ".join(one.name for one in going)
            self._tell(f"memory holds no more at the same time: {names} made room")
            self._dismiss(going)

    def _take_turns(self) -> None:
        """All rounds of those that stand, where any of them has had none in this company."""
        owed, self._owed = [one for one in self._owed if one in self.standing], []
        if not owed:
            return
        self._tell(_plan(self.standing, self._protocol))
        first, self._round = self._round, self._round + self._protocol.rounds
        for number in range(first, self._round):
            self._between()
            for attempt in self._by_turns(number):
                attempt.turn(number)
        for number in range(self._protocol.breakdown_rounds if self._divides else 0):
            for attempt in self._by_turns(number):
                attempt.divide()

    def _by_turns(self, number: int) -> Iterator[Attempt]:
        """Everybody once: up the ladder and the next time down, so that a machine that slows within
        a round favours no rung."""
        for attempt in self.standing[:: -1 if number % 2 else 1]:
            yield attempt
            if attempt.failure is not None:
                self._lose(attempt)

    def _lose(self, attempt: Attempt) -> None:
        """It failed in its rounds. What it did before stands, if that was all of them."""
        company = len(self.standing) > 1
        self.standing.remove(attempt)
        if attempt.ran:
            self._tell(f"{attempt.name} ends after its rounds: {attempt.failure}")
        elif attempt.out_of_memory and company:
            self._crowded_out.append(attempt)
            self._tell(f"{attempt.name} is to repeat its rounds beside fewer: {attempt.failure}")
        else:
            self._tell(told(attempt))
            self._check(attempt)

    def _check(self, attempt: Attempt) -> None:
        if attempt is self._first and attempt.failure is not None:
            raise GptfastError(
                f"not even the {attempt.name} runs here: {attempt.failure}: nothing was measured; "
                "try the profile with gptfast train first, or a smaller batch"
            )

    def _dismiss(self, going: Sequence[Attempt]) -> None:
        for attempt in going:
            if attempt.ran:
                self._farewell(attempt)
            attempt.close()
            self.standing.remove(attempt)


def told(attempt: Attempt) -> str:
    """What became of setting a rung up, in one line."""
    if attempt.failure is not None:
        return f"{attempt.name} cannot run here: {attempt.failure}"
    warmup = attempt.warmup
    return (
        f"{attempt.name}: {attempt.step_s * 1e3:.1f} ms/step after a warm-up of {warmup.steps} "
        f"steps, {warmup.compile_s:.1f} s in it for compiling and first calls"
    )


def _plan(standing: Sequence[Attempt], protocol: Protocol) -> str:
    steps = protocol.rounds * (protocol.lead_in + protocol.steps)
    seconds = steps * sum(attempt.step_s for attempt in standing)
    return (
        f"measuring {len(standing)} rungs by turns, {protocol.rounds} rounds of {protocol.steps} "
        f"steps each: about {seconds:.0f} s"
    )
