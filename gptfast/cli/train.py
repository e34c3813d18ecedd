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

MOST_SHOWN = 20
"""Differences; `--json` gives all."""


def _profile_of_run(options: dict[str, Any]) -> Path | None:
    """A resumed run goes on with the profile of its last session."""
    from gptfast.run.folder import run_folder

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
@click.option(
    "--verify-resume",
    is_flag=True,
    help="Train a few steps straight and stopped, compare them bit for bit, keep nothing.",
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
    verify_resume: bool,
    device: str,
    plain: bool,
    as_json: bool,
) -> None:
    """Train a model as a profile says."""
    from gptfast.console.live import training
    from gptfast.run.session import train

    if verify_resume:
        if run or resume or stop_at:
            raise click.UsageError(
                "--verify-resume keeps no run: leave --run, --resume and --stop-at out"
            )
        _verify_resume(app, loaded, device=device, asked=asked, as_json=as_json)
        return
    place = app.place()
    with training(app.console, plain=plain or as_json, silent=place.rank > 0) as listener:
        finished = train(
            loaded,
            run=run,
            resume=resume,
            stop_at=stop_at,
            device=device,
            place=place,
            asked=asked,
            command=("gptfast", *app.arguments),
            folder=app.folder,
            cache=app.cache_dir,
            listener=listener,
        )
    if as_json and place.rank == 0:
        app.console.json(finished)


def _verify_resume(
    app: App, loaded: Loaded, *, device: str, asked: tuple[str, ...], as_json: bool
) -> None:
    from gptfast.errors import GptfastError
    from gptfast.run.verify_resume import verify_resume

    result = verify_resume(
        loaded,
        device=device,
        asked=asked,
        folder=app.folder,
        cache=app.cache_dir,
        note=app.console.note,
    )
    if as_json:
        app.console.json({**vars(result), "equal": result.equal})
    for difference in () if as_json else result.differences[:MOST_SHOWN]:
        by = "" if difference.by is None else f" by {difference.by:.3g}"
        why = "" if difference.repeats else ", and so do two runs without a stop"
        app.console.line(f"{difference.what} differs{by}{why}")
    number, said = len(result.differences), f"profile {result.profile}: stopped at step "
    said += f"{result.stopped_at} of {result.steps} and resumed"
    if not result.equal:
        raise GptfastError(
            f"{said}, {number} of {result.compared} tensors and values differ from the run without "
            "a stop: see which above, or all with --json"
        )
    if not as_json:
        app.console.line(
            f"{said}, the run equals the one without a stop bit for bit "
            f"({result.compared - number} tensors and values)"
        )
