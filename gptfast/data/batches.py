"""The plain way from a store to the windows of each step: read when asked, in this thread."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from gptfast.data.store import Store
from gptfast.data.windows import WindowOrder
from gptfast.plugin import Batch


@dataclass(frozen=True)
class StoreWindows:
    """The windows of a store's training split for one rank; `gptfast.plugin.Windows`."""

    store: Store
    order: WindowOrder
    batch_size: int
    """Windows in one step over all ranks."""
    rank: int = 0
    world: int = 1

    @property
    def tokens(self) -> np.ndarray:
        return np.asarray(self.store.tokens(self.order.split))

    @property
    def block_size(self) -> int:
        return self.order.block_size

    def starts(self, step: int) -> np.ndarray:
        return self.order.starts(step, batch_size=self.batch_size, rank=self.rank, world=self.world)

    def read(self, step: int) -> Batch:
        starts = self.starts(step)
        tokens = self.store.read(self.order.split, starts, self.block_size + 1)
        return Batch(step, starts, torch.from_numpy(tokens))


@dataclass
class WindowSource:
    """Reads each step's windows when the loop asks for them; `gptfast.plugin.Source`."""

    windows: StoreWindows
    step: int = field(default=1)

    def next(self) -> Batch:
        batch = self.windows.read(self.step)
        self.step += 1
        return batch

    def seek(self, step: int) -> None:
        self.step = step

    def close(self) -> None:
        self.windows.store.close()
