"""`gptfast plugins`: list, explain, order, check and begin the optimizations."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gptfast.cli.app import App
from gptfast.cli.fields import fields
from gptfast.cli.options import json_option, profile_options

if TYPE_CHECKING:
    from gptfast.config import Loaded
    from gptfast.host.registry import Found
    from gptfast.plugin import Plugin


@click.group(invoke_without_command=True)
@click.pass_context
def command(ctx: click.Context) -> None:
    """List, explain and check the optimizations.

    Without a command: list.
    """
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_)


@command.command(name="list")
@json_option
@click.pass_obj
def list_(app: App, *, as_json: bool = False) -> None:
    """List what is installed, the broken ones too."""
    from gptfast.host.registry import discover, shadowed

    found = discover()
    rows = [_listed(one) for one in found.values()]
    for warning in shadowed(found):
        app.console.warn(warning)
    if as_json:
        app.console.json(rows)
        return
    app.console.table(
        "",
        ["plugin", "stage", "claim", "package", "what it does"],
        [
            (
                row["name"],
                row["stage"],
                row["claim"],
                row["package"],
                f"broken: {row['broken']}" if row["broken"] else row["summary"],
            )
            for row in rows
        ],
    )


@command.command()
@click.argument("name")
@json_option
@click.pass_obj
def show(app: App, *, name: str, as_json: bool) -> None:
    """Explain one plugin: what it does, its options, its claim, its hooks."""
    from gptfast.host.registry import discover

    one = _named(name, discover())
    plugin = one.load()
    options = list(fields(plugin.Options))
    facts = {
        "package": f"{one.package} {one.version}",
        "stage": plugin.stage.name.lower(),
        "claim": plugin.claim.value,
        "tolerance": plugin.tolerance,
        "requires": list(plugin.requires),
        "conflicts": list(plugin.conflicts),
        "hooks": _hooks(plugin),
    }
    doc = inspect.getdoc(sys.modules[plugin.__module__]) or ""
    if as_json:
        app.console.json(
            {
                "name": name,
                "summary": plugin.summary,
                **facts,
                "doc": doc,
                "options": [one._asdict() for one in options],
            }
        )
        return
    app.console.line(f"{name}: {plugin.summary}")
    app.console.line()
    for line in doc.splitlines():
        app.console.line(line)
    app.console.line()
    app.console.table(
        "", ["", ""], [(key, _joined(value)) for key, value in facts.items() if value != []]
    )
    if options:
        app.console.line()
        app.console.table("", ["option", "type", "default", "help"], options)


@command.command()
@profile_options
@json_option
@click.pass_obj
def order(app: App, *, loaded: Loaded, asked: tuple[str, ...], as_json: bool) -> None:
    """Show in which order a profile's plugins run, and why."""
    from gptfast.host.registry import plan, reasons

    planned = plan(loaded.profile, origins=loaded.origins)
    rows = [
        {
            "name": enabled.name,
            "stage": enabled.plugin.stage.name.lower(),
            "package": enabled.package,
            "why": why,
        }
        for enabled, why in zip(planned, reasons(planned), strict=True)
    ]
    if as_json:
        app.console.json(rows)
        return
    app.console.table(
        f"profile {loaded.profile.name}",
        ["", "plugin", "why"],
        [(number, row["name"], row["why"]) for number, row in enumerate(rows, start=1)],
    )


@command.command()
@click.argument("name")
@profile_options
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda", "mps"]),
    default="cpu",
    show_default=True,
    help="Where to train; only a CPU can be asked for equal bits.",
)
@json_option
@click.pass_obj
def check(
    app: App, *, name: str, loaded: Loaded, asked: tuple[str, ...], device: str, as_json: bool
) -> None:
    """Train a tiny model with a plugin and check all that it promises.

    Its options are the profile's; --set plugins.NAME.OPTION=VALUE changes one.
    """
    from gptfast.contract.check import broken, check_plugin
    from gptfast.device.machine import find_machine
    from gptfast.errors import GptfastError
    from gptfast.host.registry import discover

    found = discover()
    _named(name, found)
    options = loaded.profile.plugins.get(name, {})
    promises = check_plugin(name, options, machine=find_machine(device), found=found)
    if as_json:
        app.console.json(promises)
    else:
        app.console.table(
            f"plugin {name}",
            ["promise", "", ""],
            [(promise.name, promise.verdict.value, promise.detail) for promise in promises],
        )
    faults = broken(promises)
    if faults:
        raise GptfastError(
            f"plugin {name} breaks {len(faults)} of {len(promises)} promises: "
            f"{', '.join(fault.name for fault in faults)}"
        )


@command.command()
@click.argument("name")
@click.option(
    "--out",
    metavar="FOLDER",
    type=click.Path(path_type=Path),
    help="Where to write it.  [default: gptfast-NAME here]",
)
@click.pass_obj
def new(app: App, *, name: str, out: Path | None) -> None:
    """Write a package for a plugin of your own: it installs and passes its test as it is.

    Prints the two commands that do both.
    """
    from gptfast.contract.skeleton import first_commands, write_skeleton
    from gptfast.errors import Refused
    from gptfast.host.registry import discover

    taken = discover().get(name)
    if taken is not None:
        raise Refused(f"plugin {name}: package {taken.package} has that name: choose another")
    folder = app.folder / (out or f"gptfast-{name}")
    write_skeleton(name, folder)
    app.console.line(f"{out or folder.name} is written; install it and run its test:")
    for command_line in first_commands(str(out or folder.name)):
        app.console.line(f"    {command_line}")


def _named(name: str, found: Mapping[str, Found]) -> Found:
    from gptfast.errors import Refused
    from gptfast.profile import nearest

    if name not in found:
        raise Refused(f"plugin {name} is not installed: {nearest(name, found)}")
    return found[name]


def _listed(one: Found) -> dict[str, str | None]:
    """One row of the list; a plugin that cannot be imported has a reason and no more."""
    from gptfast.errors import Refused

    row: dict[str, str | None] = {
        "name": one.name,
        "stage": None,
        "claim": None,
        "package": f"{one.package} {one.version}",
        "summary": None,
        "broken": None,
    }
    try:
        plugin = one.load()
    except Refused as fault:
        return {**row, "broken": str(fault)}
    return {
        **row,
        "stage": plugin.stage.name.lower(),
        "claim": plugin.claim.value,
        "summary": plugin.summary,
    }


def _hooks(plugin: type[Plugin]) -> list[str]:
    """The hooks it overrides, in the order in which a run calls them."""
    from gptfast.plugin import Plugin

    return [
        hook
        for hook, default in vars(Plugin).items()
        if inspect.isfunction(default)
        and not hook.startswith("_")
        and getattr(plugin, hook) is not default
    ]


def _joined(value: object) -> object:
    return ", ".join(value) if isinstance(value, list) else value
