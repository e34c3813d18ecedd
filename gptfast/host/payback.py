"""After how many steps a plugin's start has paid on this machine: kept where `bench` measured it.

A training reads it before it asks its plugins whether they pay in a run of its length.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gptfast import __version__
from gptfast.host.answers import Answer
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
    answer = Answer(at / FOLDER, _asked(name, options, profile, on))
    answer.keep({"after_steps": payback.after_steps})


def known_payback(
    name: str, options: Mapping[str, Any], profile: Profile, *, on: str, at: Path
) -> Payback | None:
    """What was kept last. None: nothing was, or it is damaged."""
    known = Answer(at / FOLDER, _asked(name, options, profile, on)).known()
    steps = known.get("after_steps")
    return Payback(steps) if known and (steps is None or isinstance(steps, int)) else None


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
