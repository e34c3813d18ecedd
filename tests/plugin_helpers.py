"""Plugins that tests define, found as installed ones are."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import EntryPoint
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from gptfast.contract.tiny import Rig, build_rig
from gptfast.host.registry import GROUP, Enabled, Found
from gptfast.plugin import Plugin

ROOT = Path(__file__).parent.parent


def found(package: str = "tests", **classes: type[Plugin]) -> dict[str, Found]:
    """`a_b=Class` is found as plugin `a-b`, through a real entry point."""
    return {one.name: one for one in (_found(package, *item) for item in classes.items())}


def _found(package: str, name: str, plugin: type[Plugin]) -> Found:
    name = name.replace("_", "-")
    target = f"{plugin.__module__}:{plugin.__qualname__}"
    return Found(name, package, "1.0", EntryPoint(name, target, GROUP))


def enabled(name: str, plugin: type[Plugin], **options: Any) -> Enabled:
    return Enabled(name, plugin(plugin.Options(**options)), "tests", "1.0")


@contextmanager
def rig_of(**classes: type[Plugin]) -> Iterator[Rig]:
    """A tiny run with these plugins on."""
    known = found(**classes)
    with build_rig({name: {} for name in known}, machine=None, found=known) as rig:
        yield rig


def gptfast(*args: str, path: Sequence[Path] = (), **kwargs: Any) -> CompletedProcess[str]:
    """The command line in a process of its own, with `path` in front of the import path."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, [*path, ROOT])),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [sys.executable, "-m", "gptfast", *args],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        **kwargs,
    )
