"""The result as tables of text, with as many columns as fit, and what is to be said below them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from gptfast.bench.overhead import ALLOWED, ALLOWED_HOOKS_US, Overhead
from gptfast.bench.result.compare import Comparison
from gptfast.bench.result.published import Ladder, published
from gptfast.bench.result.record import LADDER, Bench, Ratio, Rung
from gptfast.bench.result.statistics import FEWEST_ROUNDS

MIB = 2**20
GAP = 3
"""Blanks that a table puts between two columns, at most."""

INSIGNIFICANT = (
    "~ no significant difference: the 95 % interval holds 1, or is of fewer than "
    f"{FEWEST_ROUNDS} rounds"
)
LONGEST_NAME = 60
"""Of an operator; bench.json has it whole."""

Rows = list[list[str | None]]
Table = tuple[list[str], Rows]
"""Titles of the columns, and the rows."""


@dataclass(frozen=True)
class Column:
    title: str
    cell: Callable[[Rung], str | None]
    """None is shown as `-`."""
    rank: int
    """The column of the highest rank goes first where there is no room."""


def ratio_cell(ratio: Ratio | None) -> str | None:
    """`1.20 [1.09, 1.29]`; `~` before it where the difference is not significant."""
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
    Column("x baseline", lambda r: ratio_cell(r.over_baseline), 2),
    Column("x before", lambda r: ratio_cell(r.over_before), 4),
    Column("tokens/s", lambda r: _number(r.tokens_per_s, ",.0f"), 5),
    Column("of peak", lambda r: _share(r.peak_share), 8),
    Column("wait ms", lambda r: _number(r.data_wait_ms, ".2f"), 11),
    Column("MiB", lambda r: _number(r.memory_bytes and r.memory_bytes / MIB, ",.0f"), 6),
    Column("compile s", lambda r: _number(r.warmup.compile_s if r.warmup else None, ".1f"), 7),
    Column("pays after", lambda r: _number(r.pays_back_steps, ",d"), 9),
    Column("drift", lambda r: _number(r.drift.largest if r.drift else None, ".1e"), 10),
    Column("claim", _claim, 3),
)


def table(bench: Bench, *, width: int | None) -> Table:
    """A row for each rung; None for `width`: every column."""
    columns = _shown(bench, width)
    titles = [column.title for column in columns]
    if bench.kind != LADDER:
        titles = ["x full" if title == "x before" else title for title in titles]
    return titles, [[column.cell(rung) for column in columns] for rung in bench.rungs]


def left_out(bench: Bench, *, width: int | None) -> list[str]:
    """Titles of the columns for which there is no room."""
    shown = _shown(bench, width)
    return [column.title for column in COLUMNS if column not in shown]


def _shown(bench: Bench, width: int | None) -> list[Column]:
    columns = list(COLUMNS)
    while width is not None and len(columns) > 1 and _width(columns, bench.rungs) > width:
        columns.remove(max(columns, key=lambda column: column.rank))
    return columns


def _width(columns: Sequence[Column], rungs: Sequence[Rung]) -> int:
    return sum(
        max(len(text) for text in [column.title, *(column.cell(rung) or "-" for rung in rungs)])
        + GAP
        for column in columns
    )


def title(bench: Bench) -> str:
    machine = bench.machine
    return (
        f"profile {bench.profile['name']} on {machine.name} ({machine.where}, torch "
        f"{machine.torch}): {bench.protocol.rounds} rounds of {bench.protocol.steps} steps"
    )


def remarks(bench: Bench) -> Iterator[str]:
    """What the table is too narrow for, a line each."""
    if any(r.over_before and not r.over_before.significant for r in bench.rungs):
        yield INSIGNIFICANT
    if bench.kind != LADDER:
        yield "x full below 1: the profile is slower without that plugin, so there it pays"
    machine = bench.machine
    yield (
        f"of peak: of {machine.peak_flops / 1e9:,.0f} GFLOP/s, matmul in {machine.peak_dtype}, the "
        f"best of {len(bench.peaks_flops)} looks"
    )
    if bench.control is not None:
        yield (
            f"the baseline measured twice: x {ratio_cell(bench.control.over_baseline)}, its losses "
            f"differ by up to {bench.control.drift.largest:.1e}"
        )
    for rung in bench.rungs:
        if not rung.ran:
            yield f"{rung.name} cannot run here: {rung.reason}"
        elif rung.verdict is not None and rung.verdict.verdict == "broken":
            assert rung.drift_before is not None, "a verdict is one on a drift"
            yield (
                f"{rung.name} broke its claim, {rung.verdict.claim}: the loss differs from that of "
                f"{rung.before} by up to {rung.drift_before.largest:.1e} within "
                f"{rung.drift_before.steps} steps, {rung.verdict.allowed:.1e} is allowed"
            )
        for note in rung.notes or ():
            yield f"{rung.name}: {note}"


def breakdown_table(bench: Bench) -> Table:
    """Where the time of a step goes, in ms, a row for each rung that was divided up."""
    rows: Rows = []
    for rung in bench.rungs:
        if rung.breakdown is not None:
            phases = rung.breakdown.phases
            rows.append([rung.name, *(f"{ms:,.2f}" for ms in (*phases.parts_ms, phases.step_ms))])
    return ["ms in", "data", "forward", "backward", "optimizer", "rest", "step"], rows


def breakdown_remarks(bench: Bench) -> Iterator[str]:
    """How to read the table of phases, a line each."""
    joint = [
        rung.name
        for rung in bench.rungs
        if rung.breakdown is not None and rung.breakdown.phases.backward_in_forward
    ]
    if joint:
        yield (
            f"{', '.join(joint)}: loss and gradients are found in one go there, so the backward "
            "pass is in forward"
        )


def operators_table(rung: Rung) -> Table:
    """The largest kernels or operators of a rung."""
    assert rung.breakdown is not None, "the caller asks for rungs that were divided up"
    total = rung.breakdown.phases.step_ms
    rows: Rows = [
        [_shortened(one.name), f"{one.ms:,.3f}", f"{one.ms / total:.1%}", f"{one.calls:,.1f}"]
        for one in rung.breakdown.operators
    ]
    return [f"{rung.name}: largest operators", "ms/step", "of a step", "calls"], rows


def _shortened(name: str) -> str:
    """Kernels are named by all their template arguments, compiled graphs by hashes."""
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 3]}..."


def published_table(bench: Bench) -> Table | None:
    """The measured ratios with those of published ladders beside them; None: they share no rung."""
    ladders = published_beside(bench)
    if not ladders:
        return None
    rows: Rows = []
    on: list[str] = []
    for rung in bench.rungs[1:]:
        on.append(rung.plugin or "")
        theirs = [ladder.times(on) for ladder in ladders]
        if any(theirs):
            ours = rung.over_baseline
            cells = [None if times is None else f"{times:.2f}" for times in theirs]
            rows.append([rung.name, f"{ours.times:.2f}" if ours else "cannot run", *cells])
    return ["x baseline", "here", *(f"theirs: {ladder.name}" for ladder in ladders)], rows


def published_beside(bench: Bench) -> list[Ladder]:
    """The published ladders that say something of a rung of this one."""
    plugins = [rung.plugin or "" for rung in bench.rungs[1:]]
    return [
        ladder
        for ladder in published().ladders
        if bench.kind == LADDER
        and any(ladder.times(plugins[: upto + 1]) for upto in range(len(plugins)))
    ]


def published_sources(bench: Bench) -> Iterator[str]:
    """Whose figures they are, a line each."""
    for ladder in published_beside(bench):
        ends = f"{ladder.baseline_ms:g} -> {ladder.rungs[-1].ms:g} ms"
        plugins = ", ".join(plugin for rung in ladder.rungs for plugin in rung.plugins)
        yield (
            f"{ladder.name}: not measured here; {ladder.machine}, {ends} with {plugins}. "
            f"{ladder.source}"
        )


def overhead_lines(found: Overhead) -> Iterator[str]:
    """What the machinery costs, a line each."""
    machine, slower = found.machine, found.slower
    extra_us = found.share * found.bare_ms * 1e3
    yield (
        f"profile {found.profile['name']} without plugins on {machine.name} ({machine.where}): "
        f"{found.protocol.rounds} rounds of {found.protocol.steps} "
        "steps each, by turns"
    )
    yield f"bare loop {found.bare_ms:,.3f} ms/step, trainer {found.trainer_ms:,.3f} ms/step"
    yield (
        f"the trainer takes {found.share:+.2%} [{slower.low - 1:+.2%}, {slower.high - 1:+.2%}] "
        f"of the bare loop's time, about {extra_us:+.0f} us a step; {ALLOWED:.0%} allowed: "
        f"{_kept(slower)}"
    )
    kept = "kept" if found.hooks_us <= ALLOWED_HOOKS_US else "broken"
    yield (
        f"hooks that no plugin has: {found.hooks_us:.2f} us a step; {ALLOWED_HOOKS_US:g} us "
        f"allowed: {kept}"
    )
    yield f"losses differ by up to {found.drift.largest:.1e} within {found.drift.steps} steps"


def _kept(slower: Ratio) -> str:
    """Whether the trainer costs no more than allowed, as far as the interval tells."""
    if slower.low > 1 + ALLOWED:
        return "broken"
    if slower.high > 1 + ALLOWED:
        return f"not certain, since the interval holds {ALLOWED:.0%}"
    return "kept"


def comparison_table(found: Comparison) -> Table:
    """Both sides, a row for each rung of either."""
    rows: Rows = [
        [
            pair.name,
            _time(pair.a_ms, pair.a_reason),
            _time(pair.b_ms, pair.b_reason),
            ratio_cell(pair.b_over_a),
            ratio_cell(pair.gain_over_gain),
        ]
        for pair in found.pairs
    ]
    return ["rung", "A ms/step", "B ms/step", "B is x as fast", "B's gain over A's"], rows


def _time(ms: float | None, reason: str | None) -> str | None:
    return "cannot run" if reason is not None else _number(ms, ",.2f")


def comparison_remarks(found: Comparison) -> Iterator[str]:
    """How to read the table, a line each."""
    yield INSIGNIFICANT
    yield (
        "the two were not measured by turns: what changed in between is in the ratios; intervals "
        f"are widened by {found.drift:.1%}, the larger drift of the two baselines"
    )
    for pair in found.pairs:
        if pair.a_reason == pair.b_reason and pair.a_reason is not None:
            yield f"{pair.name} cannot run in A and B: {pair.a_reason}"
            continue
        for side, reason in (("A", pair.a_reason), ("B", pair.b_reason)):
            if reason is not None:
                yield f"{pair.name} cannot run in {side}: {reason}"
    for side, lacking in (
        ("A", [pair.name for pair in found.pairs if pair.a_ms is None and pair.a_reason is None]),
        ("B", [pair.name for pair in found.pairs if pair.b_ms is None and pair.b_reason is None]),
    ):
        if lacking:
            yield f"not measured in {side}: {', '.join(lacking)}"
