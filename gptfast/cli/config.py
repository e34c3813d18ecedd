"""`gptfast config`: the profiles, where each value of one comes from, and what each key does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gptfast.cli.app import App
from gptfast.cli.fields import fields
from gptfast.cli.options import json_option, profile_options

if TYPE_CHECKING:
    from gptfast.config import Loaded


@click.group()
def command() -> None:
    """Show profiles and where each value comes from."""


@command.command()
@profile_options
@json_option
@click.pass_obj
def show(app: App, *, loaded: Loaded, asked: tuple[str, ...], as_json: bool) -> None:
    """Show every value of a profile and where it comes from."""
    values = list(_with_origins(loaded))
    if as_json:
        app.console.json(
            {
                "profile": loaded.profile.name,
                "values": {
                    key: {"value": value, "origin": origin} for key, value, origin in values
                },
            }
        )
        return
    app.console.table(
        f"profile {loaded.profile.name}",
        ["key", "value", "from"],
        [(key, _shown(value), origin) for key, value, origin in values],
    )


@command.command(name="list")
@click.option(
    "--config", metavar="FILE", type=click.Path(path_type=Path), help="Look in this file too."
)
@json_option
@click.pass_obj
def list_(app: App, *, config: Path | None, as_json: bool) -> None:
    """List the names of the profiles known here."""
    from gptfast.config import names

    known = names(config=config, folder=app.folder)
    if as_json:
        app.console.json(known)
        return
    for name in known:
        app.console.line(name)


@command.command()
@json_option
@click.pass_obj
def keys(app: App, *, as_json: bool) -> None:
    """List every key of a profile: what it takes and what it does.

    The options of a plugin: `gptfast plugins show NAME`.
    """
    from gptfast.profile import DataConfig, ModelConfig, Profile, Table, TrainConfig

    tables: dict[str, type[Table]] = {
        "model": ModelConfig,
        "data": DataConfig,
        "train": TrainConfig,
    }
    known = [
        one._replace(name=f"{table}.{one.name}")
        for table, config in tables.items()
        for one in fields(config)
    ]
    known += [one for one in fields(Profile) if one.name == "unsupported_plugins"]
    if as_json:
        app.console.json([one._asdict() for one in known])
        return
    app.console.table("", ["key", "type", "default", "help"], known)


def _with_origins(loaded: Loaded) -> Iterator[tuple[str, Any, str]]:
    """Dotted key, value and origin of every value, in the profile's order."""
    from gptfast.profile import PRESETS

    profile = loaded.profile
    preset = profile.model.preset
    for key, value in _flat(profile.model_dump(exclude={"name"})):
        origin = loaded.origins.get(key, "default")
        if preset is not None and origin == "default" and key[len("model.") :] in PRESETS[preset]:
            origin = f'preset "{preset}"'
        yield key, value, origin


def _flat(tree: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{at}{key}.")
        elif at or key != "plugins":
            yield f"{at}{key}", value


def _shown(value: object) -> str:
    """As a profile would write it; a plugin without options is `true`, a value not set `-`."""
    if value is None:
        return "-"
    if isinstance(value, Mapping):
        return "true"
    return str(value).lower() if isinstance(value, bool) else str(value)
