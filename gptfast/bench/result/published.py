"""Ladders that others published, as ratios to stand beside the measured ones."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DATA = Path(__file__).with_name("published.toml")


class Step(BaseModel):
    """A rung of theirs: the plugins that it adds, and what a step took then."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    plugins: list[str]
    ms: float


class Ladder(BaseModel):
    """Somebody else's ladder, on another machine."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str
    machine: str
    source: str
    """Where the figures are from."""
    baseline_ms: float
    rungs: list[Step]

    def times(self, on: Sequence[str]) -> float | None:
        """How many times as fast as their baseline theirs was with the rung whose plugins, and
        those of all before it, are among `on`, the last of which is one of the rung's; None: they
        say nothing of that.

        Example: a rung that adds three plugins at once is said of the last of the three.
        """
        theirs: set[str] = set()
        for rung in self.rungs:
            theirs |= set(rung.plugins)
            if theirs <= set(on) and on[-1] in rung.plugins:
                return self.baseline_ms / rung.ms
        return None


class Published(BaseModel):
    """The whole file."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    order: list[str]
    """In which a ladder of ours adds the plugins; any others come after these."""
    ladders: list[Ladder]


@cache
def published() -> Published:
    """The ladders as they are kept beside this file."""
    return Published.model_validate(tomllib.loads(DATA.read_text(encoding="utf-8")))
