"""`gptfast tune`: parse, search, write the profile, show."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gptfast.cli.app import App
from gptfast.cli.options import POSITIVE, device_option, json_option, profile_options

if TYPE_CHECKING:
    from gptfast.config import Loaded
    from gptfast.plugin import Profile

TUNED = "tuned.toml"


@click.command()
@profile_options
@click.option(
    "--minutes",
    type=POSITIVE,
    default=10.0,
    show_default=True,
    metavar="M",
    help="Ends within so many minutes and says what is left untried.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the profile into this file; the rest of it stays.  [default: --config, else "
    "gptfast.toml here; tuned.toml in a checkout of gptfast]",
)
@click.option(
    "--name", default="tuned", show_default=True, metavar="NAME", help="Name of the new profile."
)
@device_option
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    *,
    loaded: Loaded,
    asked: tuple[str, ...],
    minutes: float,
    out: Path | None,
    name: str,
    device: str,
    as_json: bool,
) -> None:
    """Search the fastest form of a profile on this machine.

    Plugins are left out and switched on, their options, precision and micro-batches changed, one at
    a time, measured by turns with the best so far; recipes stay as they are. The new profile says
    what was tried, what was kept and why. Tuned again, what was found before takes part.
    """
    began = time.monotonic()  # importing torch is in the minutes too
    from gptfast.bench.tune import tuned
    from gptfast.bench.tune.tune import tune

    app: App = ctx.obj
    console = app.console
    path = app.folder / (out or ctx.params["config"] or _usual(app.folder))
    tuned.check_place(path, name)
    found = tune(
        loaded,
        minutes=minutes,
        device=device,
        known=_known(app, path, name),
        without=ctx.params["without"],
        began=began,
        tell=console.note,
    )
    for warning in found.warnings:
        console.warn(warning)
    # Before it is written: ten minutes of measuring are not lost to a full disk.
    if as_json:
        console.json(found.to_dict())
    else:
        console.table(f"profile {found.start['name']} on {found.machine.name}", *tuned.table(found))
        for remark in tuned.remarks(found):
            console.line(remark)
    tuned.keep(path, found, name=name, folder=app.folder)
    console.line(f"written to {path}: {_command(path, name, folder=app.folder)}")


def _usual(folder: Path) -> Path:
    """The file of a folder. In a checkout that is the shipped one, which is for every machine."""
    from gptfast.config import CONFIG_NAME, shipped_config

    own = folder / CONFIG_NAME
    return folder / TUNED if own.exists() and own.samefile(shipped_config()) else own


def _command(path: Path, name: str, *, folder: Path) -> str:
    """What trains by the new profile."""
    from gptfast.config import CONFIG_NAME

    if path == folder / CONFIG_NAME:
        return f"gptfast train --profile {name}"
    where = path.relative_to(folder) if path.is_relative_to(folder) else path
    return f"gptfast train --config {shlex.quote(str(where))} --profile {name}"


def _known(app: App, path: Path, name: str) -> Profile | None:
    """What an earlier search wrote there, as far as it can still be read."""
    from gptfast.bench.tune.tuned import has_earlier
    from gptfast.config import load
    from gptfast.errors import Refused

    if not has_earlier(path, name):
        return None
    try:
        return load(name, config=path, folder=app.folder).profile
    except Refused as broken:
        app.console.note(f"the profile tuned before takes no part: {broken}")
        return None
