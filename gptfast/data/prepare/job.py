"""All that the ids of a data file and their order depend on, to tell whether two are the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any, cast

from gptfast import __version__
from gptfast.data.prepare.corpus import Survey
from gptfast.data.prepare.plan import Plan
from gptfast.tokenizers.tokenizer import Tokenizer

Job = Mapping[str, Any]
"""By name, as JSON has it."""

_ENCODERS = ("tiktoken", "gigatoken", "tokenizers")


def job_of(
    surveys: Sequence[Survey],
    plan: Plan,
    *,
    tokenizer: Tokenizer,
    options: Mapping[str, object],
) -> Job:
    """
    Args:
        options: those of the command, as they are typed; what else they decide is in the plan.
    """
    definition = json.dumps(tokenizer.definition()).encode()
    splits = hashlib.sha256()
    for part in plan.parts:
        splits.update(repr((part.train_end, part.end, part.n_chars)).encode())
        splits.update(part.copies.tobytes())
    job = {
        "gptfast": __version__,
        **{package: _version(package) for package in _ENCODERS},
        **options,
        "--tokenizer": f"{tokenizer.name} {hashlib.sha256(definition).hexdigest()}",
        **{f"SHA-256 of {s.source.label}": s.sha256 for s in surveys},
        "SHA-256 of the splits": splits.hexdigest(),
    }
    return cast("Job", json.loads(json.dumps(job)))  # tuples become lists, as in a journal


def difference(before: Job, now: Job) -> str | None:
    """What differs between two jobs, in words; None: nothing."""
    for name in [*before, *now]:
        if before.get(name) != now.get(name):
            was, is_ = (job.get(name, "nothing") for job in (before, now))
            return f"{name} was {was} and is {is_}"
    return None


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
