"""`gptfast bench`: parse, measure, keep, show."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gptfast.cli.app import App
from gptfast.cli.options import POSITIVE, device_option, json_option, profile_options
from gptfast.errors import GptfastError, Refused

if TYPE_CHECKING:
    from gptfast.bench.race.race import Goal
    from gptfast.bench.result.record import Bench, Protocol
    from gptfast.config import Loaded

SEEDS = 3
BENCH, TO_LOSS = "bench.json", "to-loss.json"
"""What a result is kept as."""
TRACES = "traces"
UNFINISHED = ".unfinished"
"""Inside the folder of a result until it is complete."""


@click.group(invoke_without_command=True)
@profile_options
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    metavar="N",
    help="Steps in a round, on the clock.",
)
@click.option(
    "--rounds",
    type=click.IntRange(min=2),
    default=10,
    show_default=True,
    metavar="N",
    help="Rounds of each rung, by turns with the others.",
)
@click.option(
    "--leave-one-out", is_flag=True, help="The whole profile, then without each plugin in turn."
)
@click.option(
    "--breakdown", is_flag=True, help="Also where the time goes, with a trace for Perfetto."
)
@click.option("--control", is_flag=True, help="Measure the baseline twice. Always on a GPU.")
@click.option(
    "--overhead", is_flag=True, help="Instead: the trainer without plugins against a bare loop."
)
@click.option(
    "--to-loss",
    "goal",
    type=POSITIVE,
    metavar="X",
    help="Instead: how soon each recipe reaches this validation loss.",
)
@click.option(
    "--seeds", type=click.IntRange(min=1), metavar="N", help="Of --to-loss.  [default: 3]"
)
@click.option(
    "--max-steps",
    type=click.IntRange(min=1),
    metavar="N",
    help="Of --to-loss: steps after which it is not reached.  [default: train.steps]",
)
@click.option(
    "--every",
    type=click.IntRange(min=6),
    metavar="N",
    help="Of --to-loss: steps between two evaluations.  [default: a fortieth of train.steps]",
)
@click.option(
    "--against",
    metavar="NAME",
    multiple=True,
    help="Of --to-loss: another profile that takes part as a whole; may be repeated.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Keep the result there.  [default: bench/PROFILE, numbered where it is taken]",
)
@device_option
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    *,
    loaded: Loaded,
    asked: tuple[str, ...],
    steps: int,
    rounds: int,
    leave_one_out: bool,
    breakdown: bool,
    control: bool,
    overhead: bool,
    goal: float | None,
    seeds: int | None,
    max_steps: int | None,
    every: int | None,
    against: tuple[str, ...],
    out: Path | None,
    device: str,
    as_json: bool,
) -> None:
    """Measure what each plugin of a profile brings on this machine.

    The baseline first, then each plugin added in turn, each in a process of its own. A plugin that
    cannot run here is a row with its reason; the exit code is 1 only where not even the baseline
    runs. The result is kept as bench.json, with pictures where matplotlib is installed.

    Recipes change what is learnt, so their rung says little: --to-loss judges them, by the time and
    the tokens until the validation loss is reached, from several seeds.
    """
    from gptfast.bench.race.race import Goal
    from gptfast.bench.result.record import LADDER, LEAVE_ONE_OUT, Protocol
    from gptfast.config import load

    app: App = ctx.obj
    if goal is not None:
        if overhead or leave_one_out or breakdown or control:
            raise Refused(
                "--to-loss goes without --overhead, --leave-one-out, --breakdown and --control"
            )
        asked_for = Goal(goal, seeds=seeds or SEEDS, most_steps=max_steps, every=every)
        others = [
            load(name, config=ctx.params["config"], folder=app.folder)
            for name in dict.fromkeys(against)
        ]
        with _folder(app, loaded, out) as folder:
            _to_loss(app, loaded, asked_for, others, device=device, folder=folder, as_json=as_json)
        return
    if seeds or max_steps or every or against:
        raise Refused("--seeds, --max-steps, --every and --against belong to --to-loss X")
    protocol = Protocol(steps=steps, rounds=rounds, control=control)
    if overhead:
        if leave_one_out or breakdown or control or out:
            raise Refused(
                "--overhead goes alone: leave out --leave-one-out, --breakdown, --control and --out"
            )
        _overhead(app, loaded, protocol, device=device, as_json=as_json)
        return
    with _folder(app, loaded, out) as folder:
        result = _measure(
            app,
            loaded,
            protocol,
            kind=LEAVE_ONE_OUT if leave_one_out else LADDER,
            device=device,
            folder=folder,
            breakdown=breakdown,
        )
        for warning in result.warnings:
            app.console.warn(warning)
        # Before it is kept: what was measured is not lost to a full disk.
        if as_json:
            app.console.json(result.to_dict())
        else:
            _show(app, result)
        _keep(folder, [(BENCH, result.to_json().encode()), *_pictures(app, result)])
    _keep_paybacks(app, loaded, result)
    if as_json:
        return
    if breakdown:
        traces = app.console.path(str(folder / TRACES))
        app.console.line(f"traces for https://ui.perfetto.dev in {traces}")
    app.console.line(f"kept in {folder / BENCH}")


def _measure(
    app: App,
    loaded: Loaded,
    protocol: Protocol,
    *,
    kind: str,
    device: str,
    folder: Path,
    breakdown: bool,
) -> Bench:
    """Measure; traces are among what is not finished yet."""
    from gptfast.bench.ladder import bench

    traces = folder / UNFINISHED / TRACES
    if breakdown:
        traces.mkdir()
    return bench(
        loaded,
        kind=kind,
        device=device,
        protocol=protocol,
        traces=traces if breakdown else None,
        tell=app.console.note,
    )


def _keep(folder: Path, files: Iterable[tuple[str, bytes]]) -> None:
    """Write the files of a result beside the traces, then all of them to where they belong.

    Raises:
        GptfastError: they cannot be written.
    """
    from gptfast.files import sync

    unfinished = folder / UNFINISHED
    try:
        for name, content in files:
            (unfinished / name).write_bytes(content)
            sync(unfinished / name)
        # Where the figures are, all else is.
        for path in sorted(unfinished.iterdir(), key=lambda path: path.suffix == ".json"):
            path.replace(folder / path.name)
    except OSError as error:
        raise GptfastError(
            f"{folder}: the result cannot be kept ({error.strerror}), so it is only what was "
            "shown: make room, or choose another folder with --out"
        ) from error


def _keep_paybacks(app: App, loaded: Loaded, result: Bench) -> None:
    """For trainings here, which leave out what does not pay in a run of their length."""
    from gptfast.bench.result.statistics import FEWEST_ROUNDS
    from gptfast.host.payback import keep_payback
    from gptfast.plugin import Payback

    if result.protocol.rounds < FEWEST_ROUNDS:
        return  # what a short look could not tell is no reason for trainings to leave a plugin out
    profile, on = loaded.profile, result.machine.name
    try:
        for rung in result.rungs:
            if rung.ran and rung.plugin is not None:
                payback = Payback(rung.pays_back_steps)
                options = profile.plugins[rung.plugin]
                keep_payback(payback, rung.plugin, options, profile, on=on, at=app.cache_dir)
    except OSError as error:
        app.console.note(
            f"{app.cache_dir}: what pays here cannot be kept ({error.strerror}): trainings go by "
            "the plugins' own rules"
        )


def _pictures(app: App, result: Bench) -> list[tuple[str, bytes]]:
    from gptfast.bench.result.pictures import pictures

    try:
        return list(pictures(result))
    except Refused as missing:  # the figures are what was asked for
        app.console.note(str(missing))
        return []


def _show(app: App, result: Bench) -> None:
    from gptfast.bench.result.pictures import bars
    from gptfast.bench.result.table import (
        breakdown_remarks,
        breakdown_table,
        left_out,
        operators_table,
        published_sources,
        published_table,
        remarks,
        table,
        title,
    )
    from gptfast.console.ladder import in_terminal

    console = app.console
    width = console.width if console.is_terminal else None
    console.table(title(result), *table(result, width=width))
    for line in in_terminal(bars(result), width=console.width, ascii_only=console.ascii_only):
        console.show(line)
    if hidden := left_out(result, width=width):
        console.line(f"no room for {', '.join(hidden)}: a wider terminal shows them")
    for remark in remarks(result):
        console.line(remark)
    theirs = published_table(result)
    if theirs is not None:
        console.table("Beside published ladders", *theirs)
        for source in published_sources(result):
            console.line(source)
    divided = [rung for rung in result.rungs if rung.breakdown is not None]
    if divided:
        console.table("Where the time of a step goes", *breakdown_table(result))
        for remark in breakdown_remarks(result):
            console.line(remark)
        for rung in divided:
            console.table("", *operators_table(rung))


def _overhead(app: App, loaded: Loaded, protocol: Protocol, *, device: str, as_json: bool) -> None:
    from gptfast.bench.ladder import overhead
    from gptfast.bench.result.table import overhead_lines

    found = overhead(loaded, device=device, protocol=protocol, tell=app.console.note)
    for warning in found.warnings:
        app.console.warn(warning)
    if as_json:
        app.console.json(found)
        return
    for line in overhead_lines(found):
        app.console.line(line)


def _to_loss(
    app: App,
    loaded: Loaded,
    goal: Goal,
    against: list[Loaded],
    *,
    device: str,
    folder: Path,
    as_json: bool,
) -> None:
    from gptfast.bench.race import table
    from gptfast.bench.race.race import to_loss

    console = app.console
    found = to_loss(loaded, goal=goal, against=against, device=device, tell=console.note)
    for warning in found.warnings:
        console.warn(warning)
    if as_json:
        console.json(found.to_dict())
    else:
        console.table(table.title(found), *table.table(found))
        for remark in table.remarks(found):
            console.line(remark)
    document = json.dumps(found.to_dict(), indent=1, allow_nan=False) + "\n"
    _keep(folder, [(TO_LOSS, document.encode())])
    if not as_json:
        console.line(f"kept in {folder / TO_LOSS}")


@command.command()
@click.argument("a", type=click.Path(path_type=Path), metavar="A.json")
@click.argument("b", type=click.Path(path_type=Path), metavar="B.json")
@json_option
@click.pass_obj
def compare(app: App, *, a: Path, b: Path, as_json: bool) -> None:
    """Compare two results: two machines, two versions, two profiles.

    A folder stands for the bench.json in it. Above 1, B is faster.
    """
    from gptfast.bench.result.compare import compare as compared
    from gptfast.bench.result.record import read
    from gptfast.bench.result.table import comparison_remarks, comparison_table

    found = compared(read(app.folder / a), read(app.folder / b))
    if as_json:
        app.console.json(found)
        return
    for warning in found.warnings:
        app.console.warn(warning)
    if found.differences:
        app.console.table("", ["differs", "A", "B"], found.differences)
    app.console.table("", *comparison_table(found))
    for line in comparison_remarks(found):
        app.console.line(line)


@contextmanager
def _folder(app: App, loaded: Loaded, out: Path | None) -> Iterator[Path]:
    """The folder of a result, with UNFINISHED in it; what was made of it goes after an error.

    Raises:
        Refused: it cannot be, or holds a result already.
    """
    from gptfast.run.folder import free_name

    parent = app.folder / "bench"
    folder = app.folder / out if out else parent / free_name(loaded.profile.name, parent=parent)
    for kept in (BENCH, TO_LOSS):
        if (folder / kept).exists():
            raise Refused(f"{folder}: holds a {kept} already: choose another folder with --out")
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    shutil.rmtree(folder / UNFINISHED, ignore_errors=True)  # of one that was killed
    try:
        (folder / UNFINISHED).mkdir(parents=True)
    except OSError as error:
        raise Refused(
            f"{folder}: cannot keep a result here ({error.strerror}): choose another with --out"
        ) from error
    try:
        yield folder
        shutil.rmtree(folder / UNFINISHED)
    except BaseException:  # a signal too leaves nothing half made
        shutil.rmtree(folder / UNFINISHED)
        with suppress(OSError):  # somebody else's result is in one of them by now
            for path in made:
                path.rmdir()
        raise
