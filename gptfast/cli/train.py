"""`gptfast train`: parse, call the trainer, show."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gptfast.cli.app import App
from gptfast.cli.options import device_option, json_option, profile_options

if TYPE_CHECKING:
    from gptfast.config import Loaded


def _profile_of_run(options: dict[str, Any]) -> Path | None:
    """A resumed run goes on with the profile that it was started with."""
    from gptfast.runs import run_folder

    if not (options["resume"] and options["run"]):
        return None
    app: App = click.get_current_context().obj
    saved = run_folder(options["run"], parent=app.folder / "runs") / "profile.toml"
    return saved if saved.exists() else None


@click.command()
@functools.partial(profile_options, default_config=_profile_of_run)
@click.option("--run", metavar="NAME", help="Keep the run in runs/NAME.")
@click.option("--resume", is_flag=True, help="Continue the run from its latest checkpoint.")
@click.option(
    "--stop-at",
    type=click.IntRange(min=1),
    metavar="STEP",
    help="Save and stop after this step; --resume goes on.",
)
@device_option
@click.option("--plain", is_flag=True, help="Plain lines also on a terminal.")
@json_option
@click.pass_obj
def command(
    app: App,
    *,
    loaded: Loaded,
    asked: tuple[str, ...],
    run: str | None,
    resume: bool,
    stop_at: int | None,
    device: str,
    plain: bool,
    as_json: bool,
) -> None:
    """Train a model as a profile says."""
    from gptfast.session import train

    with app.console.training(plain=plain or as_json) as listener:
        finished = train(
            loaded,
            run=run,
            resume=resume,
            stop_at=stop_at,
            device=device,
            asked=asked,
            command=("gptfast", *app.arguments),
            folder=app.folder,
            cache=app.cache_dir,
            listener=listener,
        )
    if as_json:
        app.console.json(finished)
