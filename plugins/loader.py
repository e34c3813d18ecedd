"""Worker processes that read the coming steps: torch's DataLoader over an IterableDataset.

What: worker w of W reads steps w + 1, w + 1 + W, ...; the loop gets all steps in order, each once,
    whatever W is. Which windows a step sees is a pure function of the step, so no worker draws a
    random number and none can repeat another's windows. On CUDA windows arrive in pinned memory.
When it helps: when reading is slow, as from compressed chunks or a network disk. Windows of a file
    made by `gptfast prepare` are memory-mapped and read in microseconds: `prefetch` or `resident`
    then do more for less.
Costs: the start of the processes (long under "spawn"), a torch in the memory of each, a copy of
    each step through a pipe. The processes live as long as the run, or until it seeks.
Numerics: exact, equal bits.

Windows travel by value through a pipe, not as tensors in shared memory, so /dev/shm may be small:
only the locks of the queues lie there. Workers do not see the signals that stop a run: the loop
finishes its step, saves and then ends them.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from gptfast.plugin import (
    Batch,
    Claim,
    Context,
    GptfastError,
    Options,
    Plugin,
    Source,
    Stage,
    Tries,
    Windows,
)

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor
    from torch.utils.data import IterableDataset

STOP_SIGNALS = tuple(
    signal.Signals[name]
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGXCPU")
    if name in signal.Signals.__members__
)


@dataclass(frozen=True)
class Sent:
    """A step's windows on their way from a worker to the loop.

    Attributes:
        tokens: (B, block_size + 1) int64; an array, which is sent by value, or pinned a tensor.
    """

    step: int
    starts: np.ndarray[Any, np.dtype[np.int64]]
    tokens: np.ndarray[Any, np.dtype[np.int64]] | Tensor

    def pin_memory(self) -> Sent:
        """Called by DataLoader's pinning thread. Source: torch.utils.data, "Memory Pinning"."""
        import torch

        return replace(self, tokens=torch.as_tensor(self.tokens).pin_memory())

    def batch(self) -> Batch:
        import torch

        return Batch(self.step, self.starts, torch.as_tensor(self.tokens))


def steps_dataset(windows: Windows, first: int) -> IterableDataset[Sent | GptfastError]:
    """The steps from `first` on, without end; in a worker, that worker's share of them.

    The class is made here, and not above, because listing the plugins must not import torch; how it
    is pickled lets a worker make it again.
    """
    from torch.utils.data import IterableDataset, get_worker_info

    class Steps(IterableDataset[Sent | GptfastError]):
        def __iter__(self) -> Iterator[Sent | GptfastError]:
            worker = get_worker_info()
            mine, of = (worker.id, worker.num_workers) if worker else (0, 1)
            for step in itertools.count(first + mine, of):
                try:
                    batch = windows.read(step)
                except GptfastError as error:
                    # As a value: raised, it would reach the user inside a worker's traceback.
                    yield error
                    return
                yield Sent(step, batch.starts, batch.tokens.numpy())

        def __reduce__(self) -> tuple[Any, ...]:
            return steps_dataset, (windows, first)

    return Steps()


def ignore_stop_signals(worker: int) -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def starting_processes() -> Iterator[None]:
    """Start DataLoader's workers inside.

    The signals that stop a run are blocked meanwhile, which the workers inherit, so that none of
    them dies of one before it can ignore it; here a signal only waits.

    DataLoader leaves a SIGCHLD handler in the main thread that raises wherever the loop happens to
    be when a worker dies; it is put back, and the death is found when the worker's step is due.
    """
    if sys.platform == "win32":  # neither masks nor SIGCHLD
        yield
        return
    child_handler = signal.getsignal(signal.SIGCHLD) or signal.SIG_DFL
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, child_handler)


def try_locks(workers: int, method: str | None) -> None:
    """Make as many locks as DataLoader will, which half made cannot clean up behind itself.

    Raises:
        OSError: shared memory has no room for them.
    """
    context = multiprocessing.get_context(method)
    made = [context.Event(), *(context.Queue() for _ in range(workers + 1))]
    del made


class LoaderSource:
    """`gptfast.plugin.Source` over a DataLoader; its workers start with the first step."""

    def __init__(self, inner: Source, *, options: LoaderOptions, pin_memory: bool) -> None:
        self.inner = inner
        self.windows = inner.windows
        self.step = inner.step
        self._options = options
        self._pin_memory = pin_memory
        self._coming: Iterator[Sent | GptfastError] | None = None

    def next(self) -> Batch:
        """Raises GptfastError: a worker ended, or cannot be started or read."""
        if self._coming is None:
            self._coming = self._start()
        lost = None
        try:
            sent = next(self._coming)
        except RuntimeError as error:
            if "DataLoader worker" not in str(error) or "Traceback" in str(error):
                raise
            lost = str(error).splitlines()[0]
        if lost is not None:
            # Outside of `except`: the traceback would keep the iterator, and with it the workers.
            self._coming = None
            raise GptfastError(
                f"plugin loader: {lost} before step {self.step} was read, killed perhaps for want "
                "of memory: go on with --resume, with fewer plugins.loader.workers than "
                f"{self._options.workers}, or 0"
            )
        if isinstance(sent, GptfastError):
            raise sent
        assert sent.step == self.step, f"step {sent.step} came in place of {self.step}"
        self.step += 1
        return sent.batch()

    def seek(self, step: int) -> None:
        self._coming = None
        self.step = step

    def close(self) -> None:
        self._coming = None
        self.inner.close()

    def _start(self) -> Iterator[Sent | GptfastError]:
        import torch
        from torch.utils.data import DataLoader

        workers, method = self._options.workers, self._options.start_method
        try:
            if workers:
                try_locks(workers, method)
            with warnings.catch_warnings(), starting_processes():
                # More workers than cores: the plugin has said it in its own words.
                warnings.filterwarnings("ignore", message="This DataLoader will create")
                return iter(
                    DataLoader(
                        steps_dataset(self.windows, self.step),
                        batch_size=None,  # the dataset yields whole steps
                        num_workers=workers,
                        prefetch_factor=self._options.prefetch_factor if workers else None,
                        pin_memory=self._pin_memory,
                        worker_init_fn=ignore_stop_signals,
                        multiprocessing_context=method if workers else None,
                        # Its own: DataLoader draws a seed, and the training's generator must
                        # not move.
                        generator=torch.Generator(),
                    )
                )
        except OSError as error:
            raise GptfastError(
                f"plugins.loader.workers = {workers}: so many processes and their locks in shared "
                f"memory (/dev/shm) cannot be had ({error.strerror}): enlarge it, as by docker run "
                "--shm-size, or set plugins.loader.workers = 0"
            ) from error


class LoaderOptions(Options):
    workers: Annotated[int, Field(ge=0)] = 2
    """Processes that read; 0 reads in the loop."""
    prefetch_factor: Annotated[int, Field(ge=1)] = 2
    """Steps that each worker reads ahead."""
    start_method: Literal["fork", "spawn", "forkserver"] | None = None
    """How Python starts the workers. None: as it does on this system."""


class Loader(Plugin):
    summary = "Worker processes read the coming steps (torch DataLoader)"
    # Surgery on the source: it makes another, around which plugins of later stages work.
    stage = Stage.SURGERY
    claim = Claim.EXACT
    tries = Tries(workers=(0, 1, 2, 4))
    Options = LoaderOptions
    options: LoaderOptions

    def setup(self, context: Context) -> None:
        self._pin_memory = context.machine.kind == "cuda"
        workers, cores = self.options.workers, os.cpu_count() or 1
        if workers > cores:
            context.note(
                f"plugins.loader.workers = {workers} are more than the {cores} cores here: they "
                "take time from each other"
            )

    def wrap_source(self, source: Source) -> Source:
        if not (self.options.workers or self._pin_memory):
            return source  # DataLoader would read in the loop too, and take longer to hand over
        return LoaderSource(source, options=self.options, pin_memory=self._pin_memory)
