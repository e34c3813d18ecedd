"""What every command is given, and the only place that reads the environment."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gptfast.console import Console, Look
from gptfast.device.place import Place


@dataclass
class App:
    """The surroundings of one invocation; a command takes it by `@click.pass_obj`."""

    console: Console
    cache_dir: Path
    """Where downloads are kept. It need not exist yet."""
    folder: Path
    """Base of relative paths on the command line."""
    arguments: tuple[str, ...] = ()
    """The command line, without the program's name."""
    environ: Mapping[str, str] = field(default_factory=dict)
    debug: bool = False
    """Show the traceback of an error."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> App:
        """The surroundings as environment, streams and current folder say."""
        folder = Path.cwd()
        return cls(
            console=Console(sys.stdout, sys.stderr, _look(environ, folder)),
            cache_dir=_cache_dir(environ),
            folder=folder,
            environ=environ,
        )

    def place(self) -> Place:
        """Which of a run's processes this one is.

        Raises:
            Refused: the environment names an impossible one.
        """
        return Place.from_environment(self.environ)


def _look(environ: Mapping[str, str], folder: Path) -> Look:
    columns = environ.get("COLUMNS", "")
    return Look(
        dumb=environ.get("TERM") == "dumb",
        no_color=bool(environ.get("NO_COLOR")),
        force_color=environ.get("FORCE_COLOR", "0") not in ("", "0"),
        width=int(columns) if columns.isdecimal() and int(columns) > 0 else None,
        folder=folder,
    )


def _cache_dir(environ: Mapping[str, str]) -> Path:
    if environ.get("GPTFAST_CACHE"):
        return Path(environ["GPTFAST_CACHE"])
    if environ.get("XDG_CACHE_HOME"):
        return Path(environ["XDG_CACHE_HOME"], "gptfast")
    return Path.home() / ".cache" / "gptfast"
