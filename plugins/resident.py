"""The whole training split in the memory of the device; each step's windows are gathered there.

What: copies the tokens to the device once, as they are stored (2 bytes each, 4 for vocabularies
    above 65,536 ids); a step then sends only where its windows start.
When it helps: on a GPU whenever the split fits: no reading, no copying of windows, no thread.
    On a CPU it reads the file into memory, which helps on slow disks only.
Costs: device memory (Tiny Shakespeare 0.6 MB, a billion tokens 2 GB) and the time of one copy at
    the start. A split that needs more than `share` of the device's memory is left where it is,
    which is said in one line.
Numerics: exact, equal bits.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from gptfast.plugin import (
    Batch,
    Claim,
    Context,
    Machine,
    Options,
    Plugin,
    Source,
    Stage,
    Support,
    Tries,
    Windows,
)

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

_PIECE = 1 << 24
"""Tokens copied at a time, so that the host never holds the split."""


def to_device(tokens: np.ndarray[Any, np.dtype[np.integer[Any]]], device: torch.device) -> Tensor:
    """(n,) ids of any width, as signed integers of the same bits: torch indexes those alone."""
    import numpy as np
    import torch

    native = tokens.dtype.newbyteorder("=")
    signed = np.dtype(f"i{native.itemsize}")
    dtype = torch.from_numpy(np.empty(0, signed)).dtype
    resident = torch.empty(len(tokens), dtype=dtype, device=device)
    for at in range(0, len(tokens), _PIECE):
        piece = np.array(tokens[at : at + _PIECE], dtype=native).view(signed)
        resident[at : at + len(piece)].copy_(torch.from_numpy(piece))
    return resident


def gather(resident: Tensor, starts: Tensor, length: int) -> Tensor:
    """Windows of `length` tokens, (B, length) int64.

    Args:
        resident: (n,) as `to_device` gave it.
        starts: (B,) int64 on the same device, each in [0, n - length].
    """
    import torch

    offsets = torch.arange(length, device=resident.device)
    ids = resident[starts[:, None] + offsets].long()
    width = 8 * resident.element_size()
    return ids if width == 64 else ids & ((1 << width) - 1)


def memory_bytes(device: torch.device) -> int:
    """All memory of a device, or of the machine for a CPU."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class ResidentSource:
    """`gptfast.plugin.Source` that gathers windows from tokens on the device."""

    def __init__(self, inner: Source, resident: Tensor) -> None:
        self.inner = inner
        self.windows: Windows = inner.windows
        self.step = inner.step
        self._resident = resident

    def next(self) -> Batch:
        import torch

        starts = self.windows.starts(self.step)
        on_host = torch.from_numpy(starts)
        if self._resident.is_cuda:
            on_host = on_host.pin_memory()  # else the copy would hold the host up
        on_device = on_host.to(self._resident.device, non_blocking=True)
        tokens = gather(self._resident, on_device, self.windows.block_size + 1)
        batch = Batch(self.step, starts, tokens)
        self.step += 1
        return batch

    def seek(self, step: int) -> None:
        self.step = step

    def close(self) -> None:
        self.inner.close()


class ResidentOptions(Options):
    share: Annotated[float, Field(gt=0.0, le=1.0)] = 0.25
    """Largest share of the device's memory that the tokens may take."""


class Resident(Plugin):
    summary = "The training tokens stay in device memory"
    # Surgery on the source: it makes another, around which plugins of later stages work.
    stage = Stage.SURGERY
    claim = Claim.EXACT
    tries = Tries()
    conflicts = ("loader", "prefetch")
    Options = ResidentOptions
    options: ResidentOptions

    def supports(self, machine: Machine) -> Support:
        if machine.kind == "cpu" and not hasattr(os, "sysconf"):
            return Support.no("this system does not say how much memory it has")
        return Support.yes()

    def setup(self, context: Context) -> None:
        self._context = context

    def wrap_source(self, source: Source) -> Source:
        device, tokens = self._context.machine.device, source.windows.tokens
        allowed = self.options.share * memory_bytes(device)
        if tokens.nbytes > allowed:
            self._context.note(
                f"resident is off: the training split takes {tokens.nbytes:,} bytes, more than "
                f"plugins.resident.share = {self.options.share} of the device's memory: raise it, "
                "or use prefetch"
            )
            return source
        return ResidentSource(source, to_device(tokens, device))
