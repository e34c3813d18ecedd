"""`gptfast bench`: parse, measure, keep, show."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gptfast.cli.app import App
from gptfast.cli.options import device_option, json_option, profile_options
from gptfast.errors import Refused

if TYPE_CHECKING:
    from gptfast.config import Loaded

TEMPORARY = ".bench.json.tmp"
"""Beside bench.json while it is written."""


@click.command()
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
    "--out",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Keep bench.json there.  [default: bench/PROFILE, numbered where it is taken]",
)
@device_option
@json_option
@click.pass_obj
def command(
    app: App,
    *,
    loaded: Loaded,
    asked: tuple[str, ...],
    steps: int,
    rounds: int,
    out: Path | None,
    device: str,
    as_json: bool,
) -> None:
    """Measure what each plugin of a profile brings on this machine.

    The baseline first, then each plugin added in the order in which the profile lists them, each
    in a process of its own. A plugin that cannot run here is a row with its reason; the exit code
    is 1 only where not even the baseline runs.
    """
    from gptfast.bench.ladder import bench
    from gptfast.bench.record import Protocol
    from gptfast.bench.table import remarks, table, title
    from gptfast.checkpoint import replace_text
    from gptfast.runs import free_name

    parent = app.folder / "bench"
    folder = app.folder / out if out else parent / free_name(loaded.profile.name, parent=parent)
    made = _make(folder)
    try:
        result = bench(
            loaded,
            device=device,
            protocol=Protocol(steps=steps, rounds=rounds),
            tell=app.console.note,
        )
        replace_text(folder / "bench.json", result.to_json())
    except BaseException:
        (folder / TEMPORARY).unlink(missing_ok=True)
        with suppress(OSError):  # somebody else's result is in one of them by now
            for path in made:
                path.rmdir()
        raise
    for warning in result.warnings:
        app.console.warn(warning)
    if as_json:
        app.console.json(result.to_dict())
        return
    columns, rows = table(result, width=app.console.width if app.console.is_terminal else None)
    app.console.table(title(result), columns, rows)
    for line in remarks(result):
        app.console.line(line)
    app.console.line(f"kept in {folder / 'bench.json'}")


def _make(folder: Path) -> list[Path]:
    """Have the folder there and writable; returns what had to be made, innermost first.

    Raises:
        Refused: it cannot be, or holds a result already.
    """
    if (folder / "bench.json").exists():
        raise Refused(f"{folder}: holds a bench.json already: choose another folder with --out")
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / TEMPORARY
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise Refused(
            f"{folder}: cannot keep a result here ({error.strerror}): choose another with --out"
        ) from error
    return made
