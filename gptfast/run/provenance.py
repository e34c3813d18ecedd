"""Where a run comes from: what its checkpoints say so that it can be repeated."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gptfast import __version__
from gptfast.plugin import Profile
from gptfast.run.kit import Kit


def provenance(
    asked: Profile,
    *,
    configured: Profile,
    kit: Kit,
    sessions: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Profile, plugins, data, machine, versions and sessions, for `meta.json`.

    Args:
        asked: before any `configure`.
        sessions: how the run was started and each time resumed.
    """
    store = kit.store
    return {
        "profile": asked.model_dump(),
        "model": configured.model.model_dump(),
        "plugins": {
            e.name: {"package": e.package, "version": e.version} for e in kit.hooks.enabled
        },
        "data": {
            "path": str(store.path),
            "fingerprint": store.fingerprint,
            "source": store.source,
            "tokenizer": store.tokenizer_name,
        },
        "machine": kit.machine.name,
        "sessions": list(sessions),
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """The versions of what can change a bit."""
    return {
        "gptfast": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def git_commit(folder: Path) -> str | None:
    """The commit that `folder` is at, `-dirty` where files differ. None: no repository, no git."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
