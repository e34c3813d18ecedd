"""The result as bars: what each picture and the terminal show of a rung."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple

from gptfast.bench.record import Bench, Rung
from gptfast.console.ladder import FORMATS, Bar, picture

PHASES = ("data", "forward", "backward", "optimizer", "rest")


def bars(bench: Bench) -> list[Bar]:
    """A bar for each rung; beside it the milliseconds and what it is over the baseline."""
    return [Bar(rung.name, rung.step_ms, _said(rung)) for rung in bench.rungs]


def _said(rung: Rung) -> str:
    if not rung.ran:
        return "cannot run here"
    over = f", {rung.over_baseline.times:.2f}x" if rung.over_baseline else ""
    return f"{rung.step_ms:,.1f} ms{over}"


def stacked_bars(bench: Bench) -> list[Bar]:
    """A bar of five parts for each rung that was divided up."""
    return [
        Bar(rung.name, phases.step_ms, f"{phases.step_ms:,.1f} ms", astuple(phases))
        for rung in bench.rungs
        if rung.breakdown is not None and (phases := rung.breakdown.phases)
    ]


def pictures(bench: Bench) -> Iterator[tuple[str, bytes]]:
    """Name and content of each picture.

    Raises:
        Refused: matplotlib is not installed.
    """
    about = f"{bench.profile['name']} on {bench.machine.name}, torch {bench.machine.torch}"
    for suffix in FORMATS:
        yield (
            f"ladder{suffix}",
            picture(bars(bench), title=f"A step with each rung: {about}", suffix=suffix),
        )
        stacked = stacked_bars(bench)
        if stacked:
            title = f"Where a step's time goes: {about}"
            drawn = picture(stacked, title=title, suffix=suffix, phases=PHASES)
            yield f"breakdown{suffix}", drawn
