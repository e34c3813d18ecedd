"""Running out of memory: how to tell, how to get it back, and how to need less."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

import torch

from gptfast.device.randomness import rewinds
from gptfast.errors import GptfastError
from gptfast.model import GPT, count_parameters
from gptfast.profile import ModelConfig, Profile

T = TypeVar("T")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether it is, or was raised from, a device's or the host's refusal of memory."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(error, RuntimeError) and (
            "can't allocate memory" in str(error) or "out of memory" in str(error)
        ):
            return True
        error = error.__cause__
    return False


def release_memory(device: torch.device) -> None:
    """Give back what nobody holds any more. Not inside `except`, whose error holds its frames."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()


def build_model(config: ModelConfig, device: torch.device) -> GPT:
    """The model with its initial weights, on `device`.

    Raises:
        GptfastError: there is not memory enough for it.
    """
    try:
        return GPT(config).to(device)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        with torch.device("meta"):
            parameters = count_parameters(GPT(config))
        raise GptfastError(
            f"the model's {parameters:,} parameters, {4 * parameters / 1e9:,.1f} GB, do not fit "
            f"into the memory of {device}: lower model.n_layer, model.n_embd or model.ngram_rows"
        ) from error


def micro_batches(batch_size: int) -> list[int]:
    """The micro-batches that make up a batch, the largest first."""
    return [windows for windows in range(batch_size, 0, -1) if batch_size % windows == 0]


def with_at_most(profile: Profile, windows: int | None) -> Profile:
    """The profile with micro-batches of at most `windows`; None: as it is."""
    train = profile.train
    if windows is None or (train.micro_batch != "auto" and train.windows_per_micro <= windows):
        return profile
    fitting = next(n for n in micro_batches(train.batch_size) if n <= windows)
    return profile.replace({"train.micro_batch": fitting})


def with_less(profile: Profile, error: BaseException) -> Profile | None:
    """The profile with half the micro-batch; None where it is 1 or the error asks for else."""
    windows = profile.train.windows_per_micro
    if windows == 1 or not is_out_of_memory(error):
        return None
    return with_at_most(profile, windows // 2)


def repeated_with_less(
    attempt: Callable[[], T],
    *,
    less: Callable[[BaseException], Callable[[], None] | None],
    device: torch.device,
) -> T:
    """What `attempt` gives; where it fails and needing less helps, at once more.

    With the same random numbers; the attempt may have committed nothing.

    Args:
        less: told the error; returns what makes the next attempt need less, None: nothing does.
    """
    rewind = rewinds(device)
    while True:
        try:
            return attempt()
        except (RuntimeError, MemoryError) as error:
            need_less = less(error)
            if need_less is None:
                raise
        # Behind `except`: the error holds the frames, and with them what fills the memory.
        need_less()
        release_memory(device)
        rewind()


def out_of_memory(profile: Profile, *, where: str) -> GptfastError:
    """What to tell the user, in one line."""
    windows = profile.train.windows_per_micro
    one = windows == 1
    return GptfastError(
        f"{where}: out of memory with {'a single window' if one else f'{windows} windows'} of "
        f"{profile.model.block_size} tokens in a forward pass: "
        f"{'use' if one else 'set train.micro_batch = 1, or use'} a smaller model, a smaller "
        "model.block_size or a plugin that saves memory (gptfast plugins)"
    )
