"""`gptfast runs`: what was trained here, how each run can be repeated, and how runs compare."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click

from gptfast.cli.app import App
from gptfast.cli.options import json_option


@click.group(invoke_without_command=True)
@click.pass_context
def command(ctx: click.Context) -> None:
    """List, describe and plot trainings.

    Without a command: list.
    """
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_)


@command.command(name="list")
@json_option
@click.pass_obj
def list_(app: App, *, as_json: bool = False) -> None:
    """List the runs in runs/, the one written to last first."""
    from gptfast.console.text import size
    from gptfast.run.folder import known_runs

    parent = app.folder / "runs"
    found = [run.summary() for run in known_runs(parent)]
    if as_json:
        app.console.json(found)
        return
    if not found:
        app.console.note(f"no run under {app.console.path(str(parent))}: gptfast train makes one")
        return
    app.console.table(
        "",
        ["run", "profile", "steps", "of", "val loss", "best", "written", "size"],
        [
            (
                one.name,
                one.profile,
                one.step,
                one.steps,
                _loss(one.val_loss),
                _loss(one.best_val_loss),
                one.written,
                size(one.n_bytes),
            )
            for one in found
        ],
    )
    for one in found:
        if one.fault is not None:
            app.console.warn(one.fault)


@command.command()
@click.argument("name", metavar="RUN")
@json_option
@click.pass_obj
def show(app: App, *, name: str, as_json: bool) -> None:
    """Describe a run: all that it takes to repeat it."""
    from gptfast.run.folder import find_run

    facts = find_run(name, parent=app.folder / "runs").describe()
    if as_json:
        app.console.json(facts)
        return
    for label, value in _lines(app, facts):
        app.console.line(f"{label:<14} {value}")


def _lines(app: App, facts: dict[str, Any]) -> list[tuple[str, str]]:
    from gptfast.console.text import size

    data = facts["data"]
    lines = [
        ("run", app.console.path(facts["folder"])),
        ("profile", f"{facts['profile']}, seed {facts['seed']}"),
        ("steps", f"{facts['step']} of {facts['steps']}, {facts['skipped_steps']} skipped"),
        ("micro-batch", f"{facts['micro_batch'] or 'the whole batch'}"),
        ("val loss", f"{_loss(facts['val_loss'])}, best {_loss(facts['best_val_loss'])}"),
        ("data", f"{app.console.path(data['path'])}, SHA-256 of its ids {data['sha256']}"),
        ("source", str(data["source"] or "unknown")),
        ("machine", str(facts["machine"])),
        ("versions", ", ".join(f"{name} {said}" for name, said in facts["versions"].items())),
    ]
    for name, plugin in facts["plugins"].items():
        options = ", ".join(f"{key} = {value}" for key, value in plugin["options"].items())
        said = f"{name} ({plugin['package']} {plugin['version']})"
        lines.append(("plugin", f"{said}: {options}" if options else said))
    for session in facts["sessions"]:
        first_s = session["first_step_s"]
        first = "" if first_s is None else f", first step {first_s:.1f} s"
        changes = "".join(f", {change}" for change in session.get("changes", ()))  # 0.1.0 kept none
        lines.append(
            (
                f"from step {session['after_step'] + 1}",
                f"{session['started']}  {shlex.join(session['command'])}  "
                f"(git {session['git_commit'] or 'unknown'}){first}{changes}",
            )
        )
    for one in facts["checkpoints"]:
        pointers = "".join(f", {pointer}" for pointer in one["pointers"])
        where = app.console.path(one["folder"])
        lines.append(("checkpoint", f"{where}, {size(one['n_bytes'])}{pointers}"))
    return lines


@command.command()
@click.argument("names", metavar="RUN...", nargs=-1, required=True)
@click.option(
    "--out",
    "files",
    type=click.Path(path_type=Path),
    metavar="FILE.png|FILE.svg",
    multiple=True,
    help="Write one picture of all runs; may be repeated.  [default: plot in the terminal]",
)
@click.option(
    "--metric",
    metavar="PLUGIN.NAME",
    help="Plot a number that a plugin logs, as spike-guard.skipped, instead.",
)
@click.pass_obj
def plot(app: App, *, names: tuple[str, ...], files: tuple[Path, ...], metric: str | None) -> None:
    """Plot loss and speed of runs over their steps."""
    from gptfast.console.plot import in_terminal, write
    from gptfast.errors import Refused
    from gptfast.run.folder import find_run

    courses = [find_run(name, parent=app.folder / "runs").course() for name in names]
    for course in courses:
        if metric is not None and metric not in course.metrics:
            has = ", ".join(course.metrics) or "none"
            raise Refused(f"--metric {metric}: not logged by run {course.name}: name one of {has}")
    for file in files:
        write(app.folder / file, courses, metric=metric)
        app.console.line(f"wrote {app.console.path(str(app.folder / file))}")
    if not files:
        console = app.console
        for part in in_terminal(
            courses, width=console.width, ascii_only=console.ascii_only, metric=metric
        ):
            console.show(part)


def _loss(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.4f}"
