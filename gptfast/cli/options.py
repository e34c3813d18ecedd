"""Options that several commands share."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import click

Function = Callable[..., Any]


class _Positive(click.FloatRange):
    """A finite number above 0; nan lies within every range."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


POSITIVE = _Positive(min=0, min_open=True)

_PROFILE_OPTIONS = (
    click.option("--profile", metavar="NAME", help="Profile; see gptfast config list."),
    click.option(
        "--config",
        metavar="FILE",
        type=click.Path(path_type=Path),
        help="Profiles that win over the shipped ones.  [default: gptfast.toml here, if any]",
    ),
    click.option(
        "--set",
        "overrides",
        metavar="KEY=VALUE",
        multiple=True,
        help="Change a value, as in train.steps=100; may be repeated.",
    ),
    click.option(
        "--plugin",
        "asked",
        metavar="NAME",
        multiple=True,
        help="Switch a plugin on; may be repeated.",
    ),
    click.option(
        "--without", metavar="NAME", multiple=True, help="Switch a plugin off; may be repeated."
    ),
)


def profile_options(
    function: Function, *, default_config: Callable[[dict[str, Any]], Path | None] | None = None
) -> Function:
    """Options that choose a profile. Every command that takes a profile takes all of them.

    The function gets `loaded` (`gptfast.config.Loaded`, resolved and validated) and `asked`
    (tuple of str, the plugins named by `--plugin`); that of a group is left alone where one of its
    commands is called. Where neither a profile nor a file is named,
    `default_config` may find the file in the command's other options.
    """

    @functools.wraps(function)
    def with_profile(
        *args: Any,
        profile: str | None,
        config: Path | None,
        overrides: tuple[str, ...],
        asked: tuple[str, ...],
        without: tuple[str, ...],
        **kwargs: Any,
    ) -> Any:
        from gptfast.config import load

        context = click.get_current_context()
        if context.invoked_subcommand is not None:
            return None
        may_be_off: Collection[str] = ()
        if profile is None and config is None and default_config is not None:
            config = default_config(kwargs)
            if config is not None and without:  # said again with the command line of before
                from gptfast.host.registry import discover

                may_be_off = discover()
        loaded = load(
            profile,
            config=config,
            overrides=overrides,
            plugins=asked,
            without=without,
            folder=context.obj.folder,
            may_be_off=may_be_off,
        )
        return function(*args, loaded=loaded, asked=asked, **kwargs)

    chosen: Function = with_profile
    for option in reversed(_PROFILE_OPTIONS):
        chosen = option(chosen)
    return chosen


def device_option(function: Function) -> Function:
    """`--device`, given as `device`: "auto", "cpu", "cuda" or "mps"."""
    return click.option(
        "--device",
        type=click.Choice(["auto", "cpu", "cuda", "mps"]),
        default="auto",
        show_default=True,
        help="Where to compute; auto: cuda, then mps, then cpu.",
    )(function)


def json_option(function: Function) -> Function:
    """`--json`, given as `as_json`. With it, stdout takes `console.json` and nothing else."""

    def keep_stdout(ctx: click.Context, param: click.Parameter, value: bool) -> bool:
        if value:
            ctx.with_resource(ctx.obj.console.json_alone())
        return value

    return click.option(
        "--json",
        "as_json",
        is_flag=True,
        callback=keep_stdout,
        help="Print the result as JSON; all else goes to stderr.",
    )(function)
