"""The race to a loss as a table, and what is to be said below it."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from gptfast.bench.race.record import Row, Spread, ToLoss
from gptfast.bench.result.table import Rows, Table


def title(found: ToLoss) -> str:
    machine = found.machine
    return (
        f"profile {found.profile['name']} until a validation loss of {found.goal:g} on "
        f"{machine.name} ({machine.where}, torch {machine.torch}), "
        f"{len(found.seeds)} seeds"
    )


def table(found: ToLoss) -> Table:
    """A row for each contender; figures are medians with the range over the seeds."""
    rows: Rows = []
    for row in found.rows:
        lowest = [run.lowest for run in row.runs]
        rows.append(
            [
                row.name,
                _reached(row, len(found.seeds)),
                _cell(row.steps, ",.0f"),
                _cell(row.tokens, ",.0f"),
                _cell(row.train_s, ",.1f"),
                _cell(row.times_faster, ".2f"),
                _cell(row.times_fewer_tokens, ".2f"),
                f"{median(run.startup_s for run in row.runs):.1f}" if row.runs else None,
                f"{median(lowest):.4f}" if lowest else None,
            ]
        )
    return [
        *("", "reached", "steps", "tokens", "train s", "x as fast", "x fewer tokens"),
        *("start-up s", "lowest loss"),
    ], rows


def remarks(found: ToLoss) -> Iterator[str]:
    """How to read the table, a line each."""
    yield (
        f"evaluated every {found.every} steps, off the clock; train s is training alone, start-up "
        "s building and compiling; medians [lowest, highest], over the seeds that reached it"
    )
    first = found.rows[0].name
    for row in found.rows:
        if not row.ran:
            yield f"{row.name} cannot run here: {row.reason}"
            continue
        missed = [run.seed for run in row.runs if run.reached is None]
        if missed:
            yield (
                f"{row.name}: never reached within {row.most_steps} steps from seed "
                f"{', '.join(map(str, missed))}"
            )
        if row.times_faster is not None:
            yield f"{row.name}: {_verdict(row.times_faster, first)}"
        elif row.steps is not None and row.name != first:
            yield f"{row.name}: no ratio, since {first} never reached it from the same seed"


def _verdict(times: Spread, first: str) -> str:
    """In words; the seeds are few, so no interval is promised."""
    if times.n == 1:
        return f"one seed only is no evidence against {first}"
    if times.low > 1:
        return f"faster than {first} from every one of {times.n} seeds"
    if times.high < 1:
        return f"slower than {first} from every one of {times.n} seeds"
    return f"faster than {first} from some of {times.n} seeds and not from others"


def _reached(row: Row, n_seeds: int) -> str:
    if not row.ran:
        return "cannot run"
    n = sum(run.reached is not None for run in row.runs)
    return f"{n} of {n_seeds}"


def _cell(spread: Spread | None, form: str) -> str | None:
    if spread is None:
        return None
    middle, low, high = (format(x, form) for x in (spread.median, spread.low, spread.high))
    return middle if spread.n == 1 else f"{middle} [{low}, {high}]"
