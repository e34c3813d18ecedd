"""After how many steps a plugin's start has paid on this machine: kept where `bench` measured it.

A training reads it before it asks its plugins whether they pay in a run of its length.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gptfast import __version__
from gptfast.checkpoint import replace_text
from gptfast.plugin import Payback, Profile

FOLDER = "payback"


def keep_payback(
    payback: Payback, name: str, options: Mapping[str, Any], profile: Profile, *, on: str, at: Path
) -> None:
    """Keep what was found of the plugin `name`, in place of what was found before.

    Args:
        options: the plugin's table in the profile.
        on: the machine's name.
        at: folder of what was found out about this machine.

    Raises:
        OSError: the folder cannot be written.
    """
    asked = _asked(name, options, profile, on)
    file = _file(at, asked)
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_text(file, json.dumps({"after_steps": payback.after_steps, "asked": asked}, indent=1))


def known_payback(
    name: str, options: Mapping[str, Any], profile: Profile, *, on: str, at: Path
) -> Payback | None:
    """What was kept last. None: nothing was, or it is damaged."""
    asked = _asked(name, options, profile, on)
    try:
        kept = json.loads(_file(at, asked).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(kept, dict) or kept.get("asked") != asked:
        return None
    steps = kept.get("after_steps")
    return Payback(steps) if steps is None or isinstance(steps, int) else None


def _asked(name: str, options: Mapping[str, Any], profile: Profile, on: str) -> dict[str, Any]:
    """All that the answer depends on, but for the other plugins, which change it little."""
    train = profile.train
    return {
        "plugin": name,
        "options": dict(options),
        "machine": on,
        "threads": torch.get_num_threads(),
        "gptfast": __version__,
        "torch": torch.__version__,
        # `bench` has the profile as it stands in the file, before the data told the vocabulary.
        "model": profile.model.model_dump(mode="json", exclude={"vocab_size"}),
        "batch": [train.batch_size, train.micro_batch],
    }


def _file(folder: Path, asked: dict[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
    return folder / FOLDER / f"{digest[:16]}.json"
