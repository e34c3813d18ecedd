"""The result as a table of text, with as many columns as fit, and what is to be said below it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from gptfast.bench.record import Bench, Ratio, Rung

MIB = 2**20
GAP = 3
"""Blanks that a table puts between two columns, at most."""


@dataclass(frozen=True)
class Column:
    title: str
    cell: Callable[[Rung], str | None]
    """None is shown as `-`."""
    rank: int
    """The column of the highest rank goes first where there is no room."""


def _ratio(ratio: Ratio | None) -> str | None:
    if ratio is None:
        return None
    mark = "" if ratio.significant else "~"
    return f"{mark}{ratio.times:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"


def _share(share: float | None) -> str | None:
    return None if share is None else f"{share:.1%}"


def _number(value: float | None, form: str) -> str | None:
    return None if value is None else format(value, form)


def _claim(rung: Rung) -> str | None:
    if not rung.ran:
        return "cannot run"
    return None if rung.verdict is None else rung.verdict.verdict


COLUMNS = (
    Column("rung", lambda r: r.name, 0),
    Column("ms/step", lambda r: _number(r.step_ms, ",.2f"), 1),
    Column("x baseline", lambda r: _ratio(r.over_baseline), 2),
    Column("x before", lambda r: _ratio(r.over_before), 4),
    Column("tokens/s", lambda r: _number(r.tokens_per_s, ",.0f"), 5),
    Column("of peak", lambda r: _share(r.peak_share), 8),
    Column("wait ms", lambda r: _number(r.data_wait_ms, ".2f"), 11),
    Column("MiB", lambda r: _number(r.memory_bytes and r.memory_bytes / MIB, ",.0f"), 6),
    Column("compile s", lambda r: _number(r.warmup.compile_s if r.warmup else None, ".1f"), 7),
    Column("pays after", lambda r: _number(r.pays_back_steps, ",d"), 9),
    Column("drift", lambda r: _number(r.drift.largest if r.drift else None, ".1e"), 10),
    Column("claim", _claim, 3),
)


def table(bench: Bench, *, width: int | None) -> tuple[list[str], list[list[str | None]]]:
    """Titles and rows; None for `width`: every column."""
    columns = list(COLUMNS)
    while width is not None and len(columns) > 1 and _width(columns, bench.rungs) > width:
        columns.remove(max(columns, key=lambda column: column.rank))
    return (
        [column.title for column in columns],
        [[column.cell(rung) for column in columns] for rung in bench.rungs],
    )


def _width(columns: Sequence[Column], rungs: Sequence[Rung]) -> int:
    return sum(
        max(len(text) for text in [column.title, *(column.cell(rung) or "-" for rung in rungs)])
        + GAP
        for column in columns
    )


def title(bench: Bench) -> str:
    machine = bench.machine
    return (
        f"profile {bench.profile['name']} on {machine.name} ({machine.device}, {machine.threads} "
        f"threads, torch {machine.torch}): {bench.protocol.rounds} rounds of "
        f"{bench.protocol.steps} steps"
    )


def remarks(bench: Bench) -> Iterator[str]:
    """What the table is too narrow for, a line each."""
    if any(r.over_before and not r.over_before.significant for r in bench.rungs):
        yield "~ no significant difference: the 95 % interval holds 1"
    for rung in bench.rungs:
        if not rung.ran:
            yield f"{rung.name} cannot run here: {rung.reason}"
        elif rung.verdict is not None and rung.verdict.verdict == "broken":
            assert rung.drift_before is not None
            yield (
                f"{rung.name} broke its claim, {rung.verdict.claim}: the loss differs from that of "
                f"{rung.before} by up to {rung.drift_before.largest:.1e} within "
                f"{rung.drift_before.steps} steps, {rung.verdict.allowed:.1e} is allowed"
            )
        for note in rung.notes or ():
            yield f"{rung.name}: {note}"
