"""A thread that reads the coming steps and copies them to the device while the device computes.

What: reads up to `depth` steps ahead of the loop. On CUDA it puts them into pinned memory and
    copies them on a stream of its own; the loop's stream waits for the copy of its step, the host
    does not.
When it helps: when the loop waits for windows (`data_wait_ms` in the log), or on CUDA where copies
    from pageable memory hold the host up.
Costs: a thread, and `depth` steps of windows on host and device (a few MB). Python's lock lets the
    thread run only while the loop is inside torch.
Numerics: exact, equal bits.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from gptfast.plugin import Batch, Claim, Context, Options, Plugin, Source, Stage, Tries

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


@dataclass(frozen=True)
class Copied:
    """A step on its way to the device; `done` is recorded behind the copy, if there is one."""

    batch: Batch
    done: torch.cuda.Event | None = None

    def ready(self) -> Batch:
        """The step, safe to use on the current stream."""
        if self.done is not None:
            import torch

            stream = torch.cuda.current_stream(self.batch.tokens.device)
            stream.wait_event(self.done)
            # The tokens were allocated on the copying stream: their memory may be used again only
            # when this stream is through with them. Source: torch.Tensor.record_stream.
            self.batch.tokens.record_stream(stream)
        return self.batch


def sender(device: torch.device) -> Callable[[Batch], Copied]:
    """What starts to copy a step to a CUDA device and returns at once; elsewhere it copies nothing.

    Source: torch documentation, "CUDA semantics", on pinned memory and streams.
    """
    if device.type != "cuda":
        return Copied
    import torch

    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def send(batch: Batch) -> Copied:
        with torch.cuda.stream(stream):
            tokens = batch.tokens.pin_memory().to(device, non_blocking=True)
            return Copied(replace(batch, tokens=tokens), stream.record_event())

    return send


class PrefetchSource:
    """`gptfast.plugin.Source` whose steps a thread reads ahead; it starts with the first one.

    Args:
        depth: steps read and not yet asked for, at most.
        device: where the steps go; only a CUDA device has streams to copy on.
    """

    def __init__(self, inner: Source, *, depth: int, device: torch.device) -> None:
        self.inner = inner
        self.windows = inner.windows
        self.step = inner.step
        self._depth = depth
        self._device = device
        self._reader: Reader | None = None

    def next(self) -> Batch:
        if self._reader is None:
            self._reader = Reader(self.inner, depth=self._depth, device=self._device)
        batch = self._reader.next()
        self.step += 1
        return batch

    def seek(self, step: int) -> None:
        self._stop()
        self.inner.seek(step)
        self.step = step

    def close(self) -> None:
        self._stop()
        self.inner.close()

    def _stop(self) -> None:
        if self._reader is not None:
            self._reader.stop()
            self._reader = None


class Reader:
    """The thread and what it has read. An error takes its turn: it is raised at its own step."""

    def __init__(self, source: Source, *, depth: int, device: torch.device) -> None:
        self._source = source
        self._device = device
        self._free = threading.Semaphore(depth)
        self._read: queue.SimpleQueue[Copied | BaseException] = queue.SimpleQueue()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="gptfast prefetch", daemon=True)
        self._thread.start()

    def next(self) -> Batch:
        read = self._read.get()
        if isinstance(read, BaseException):
            self._read.put(read)  # every later step fails as well
            raise read
        self._free.release()
        return read.ready()

    def stop(self) -> None:
        """Returns when the thread has ended, at the latest after the read that it is in."""
        self._stopping = True
        self._free.release()
        self._thread.join()

    def _run(self) -> None:
        try:
            send = sender(self._device)
            while self._free.acquire() and not self._stopping:
                self._read.put(send(self._source.next()))
        # Whatever it is, the loop waits for it and raises it.
        except BaseException as error:
            self._read.put(error)


class PrefetchOptions(Options):
    depth: Annotated[int, Field(ge=1)] = 2
    """Steps read ahead of the loop."""


class Prefetch(Plugin):
    summary = "A thread reads the coming steps and copies them to the device"
    stage = Stage.OUTER
    claim = Claim.EXACT
    tries = Tries()
    Options = PrefetchOptions
    options: PrefetchOptions

    def setup(self, context: Context) -> None:
        self._device = context.machine.device

    def wrap_source(self, source: Source) -> Source:
        return PrefetchSource(source, depth=self.options.depth, device=self._device)
