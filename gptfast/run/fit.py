"""`train.micro_batch = "auto"`: the most windows of a forward pass that fit into memory, by trying.

A try is a training of two steps with all plugins. The optimizer makes its state in the first update
and only then is the memory as full as it will be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from gptfast import __version__
from gptfast.data.store import Store
from gptfast.device.machine import synchronize
from gptfast.device.memory import is_out_of_memory, micro_batches, out_of_memory, release_memory
from gptfast.errors import GptfastError
from gptfast.host.answers import Answer
from gptfast.host.hooks import Hooks
from gptfast.host.registry import OURS, Enabled
from gptfast.plugin import Machine, Options, Plugin, Profile
from gptfast.run.trainer import Trainer

STEPS = 2

MakePlugins = Callable[[], Sequence[Enabled]]
"""Makes the plugins anew: an instance serves one run."""


class _DoesNotFit(GptfastError):
    """Out of memory, where no smaller micro-batch is wanted."""


class _TriesOneSize(Plugin):
    """Keeps a try from going on with less."""

    def recover(self, error: BaseException, profile: Profile) -> Profile | None:
        if is_out_of_memory(error):
            raise _DoesNotFit(str(error)) from error
        return None


def windows_that_fit(
    profile: Profile,
    *,
    machine: Machine,
    store: Store,
    make_plugins: MakePlugins,
    cache: Path | None,
    note: Callable[[str], None],
) -> int:
    """The largest micro-batch with which a step of `profile` fits into memory.

    Args:
        cache: folder of answers found before; None: neither read nor written.
        note: told the answer in one line.

    Raises:
        GptfastError: not even one window fits, or the training fails in another way.
    """
    answer = None
    if cache is not None:
        answer = Answer(cache / "micro-batch", _asked(profile, machine, make_plugins()))
    if answer is not None and (known := _known(answer)) is not None:
        note(f'train.micro_batch = "auto": {known} windows at a time, as found before')
        return known
    tried: list[int] = []

    def fits(windows: int) -> bool:
        tried.append(windows)
        return _fits(profile, windows, machine=machine, store=store, plugins=make_plugins())

    found = first_that_fits(micro_batches(profile.train.batch_size), fits)
    if found is None:
        least = profile.replace({"train.micro_batch": 1})
        raise out_of_memory(least, where=f'{machine.name}, train.micro_batch = "auto"')
    note(
        f'train.micro_batch = "auto": {found} windows at a time fit into memory '
        f"(tried {', '.join(map(str, tried))})"
    )
    if answer is not None:
        try:
            answer.keep({"micro_batch": found})
        except OSError as error:
            note(f"{answer.file}: cannot be kept ({error.strerror}): the next run tries anew")
    return found


def first_that_fits(falling: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """The largest number that fits, in few tries: the largest of all, then by bisection."""
    if fits(falling[0]):
        return falling[0]
    low, high = 1, len(falling)
    while low < high:
        middle = (low + high) // 2
        if fits(falling[middle]):
            high = middle
        else:
            low = middle + 1
    return falling[low] if low < len(falling) else None


def _fits(
    profile: Profile, windows: int, *, machine: Machine, store: Store, plugins: Sequence[Enabled]
) -> bool:
    guard = Enabled("auto", _TriesOneSize(Options()), OURS, __version__)
    fitted = True
    try:
        with Trainer(
            profile,
            hooks=Hooks([*plugins, guard], note=lambda line: None),
            machine=machine,
            store=store,
            fits=windows,
        ) as trainer:
            for _ in range(STEPS):
                trainer.one_step()
            synchronize(machine.device)
    except (RuntimeError, MemoryError, GptfastError) as error:
        if not is_out_of_memory(error):
            raise
        fitted = False
    release_memory(machine.device)
    return fitted


# answers found before --------------------------------------------------------------------------


def _asked(profile: Profile, machine: Machine, plugins: Sequence[Enabled]) -> dict[str, Any]:
    """All that the answer depends on."""
    memory = None
    if machine.kind == "cuda":
        memory = torch.cuda.get_device_properties(machine.device).total_memory
    return {
        "machine": machine.name,
        "memory": memory,
        "world": machine.world,
        "gptfast": __version__,
        "torch": torch.__version__,
        "model": profile.model.model_dump(mode="json"),
        "batch_size": profile.train.batch_size,
        "plugins": [
            [e.name, e.package, e.version, e.plugin.options.model_dump(mode="json")]
            for e in plugins
        ],
    }


def _known(answer: Answer) -> int | None:
    """What was found before. None: nothing was, or it is damaged."""
    windows = answer.known().get("micro_batch")
    return windows if windows in micro_batches(answer.asked["batch_size"]) else None
