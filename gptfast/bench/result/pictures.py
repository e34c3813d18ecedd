"""The result as bars: what each picture and the terminal show of a rung."""

from __future__ import annotations

from collections.abc import Iterator

from gptfast.bench.measure.messages import Phases
from gptfast.bench.result.record import Bench, Rung
from gptfast.console.ladder import FORMATS, Bar, picture

PHASES = ("data", "forward", "backward", "optimizer", "rest")


def bars(bench: Bench) -> list[Bar]:
    """A bar for each rung; beside it the milliseconds and what it is over the baseline."""
    return [Bar(rung.name, rung.step_ms, _said(rung)) for rung in bench.rungs]


def _said(rung: Rung) -> str:
    if not rung.ran:
        return "cannot run here"
    said = [f"{rung.step_ms:,.1f} ms"]
    if (over := rung.over_baseline) is not None:
        said.append(f"{'' if over.significant else '~'}{over.times:.2f}x")
    if rung.verdict is not None and rung.verdict.verdict == "broken":
        said.append("claim broken")
    return ", ".join(said)


def stacked_bars(bench: Bench) -> list[Bar]:
    """A bar of five parts for each rung that was divided up."""
    return [
        Bar(rung.name, phases.step_ms, _said_of(phases), phases.parts_ms)
        for rung in bench.rungs
        if rung.breakdown is not None and (phases := rung.breakdown.phases)
    ]


def _said_of(phases: Phases) -> str:
    joint = ", backward in forward" if phases.backward_in_forward else ""
    return f"{phases.step_ms:,.1f} ms{joint}"


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
