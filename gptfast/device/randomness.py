"""The global random generators: read, set, kept. A run leaves them as it found them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def random_state(device: torch.device) -> dict[str, Any]:
    """State of every global generator: torch's on the CPU and the device, numpy's, Python's."""
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": {
            **numpy_state,
            "state": {
                "key": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
                "pos": int(numpy_state["state"]["pos"]),
            },
        },
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    elif device.type == "mps":
        state["mps"] = torch.mps.get_rng_state()
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Put back what `random_state` gave; a device that it does not know keeps its own."""
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    numpy_state = state["numpy"]
    inner = numpy_state["state"]
    np.random.set_state(
        {**numpy_state, "state": {**inner, "key": inner["key"].numpy().astype(np.uint32)}}
    )
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
    elif device.type == "mps" and "mps" in state:
        torch.mps.set_rng_state(state["mps"])


def rewinds(device: torch.device) -> Callable[[], None]:
    """A call that puts torch's generators back to where they are now.

    Numpy's and Python's are left out: taking their state costs 20 times as much, and each step
    does it.
    """
    cpu = torch.get_rng_state()
    if device.type == "cuda":
        own = torch.cuda.get_rng_state(device)
    elif device.type == "mps":
        own = torch.mps.get_rng_state()

    def rewind() -> None:
        torch.set_rng_state(cpu)
        if device.type == "cuda":
            torch.cuda.set_rng_state(own, device)
        elif device.type == "mps":
            torch.mps.set_rng_state(own)

    return rewind


@contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Every global generator is back as found afterwards."""
    before = random_state(device)
    try:
        yield
    finally:
        set_random_state(before, device)
