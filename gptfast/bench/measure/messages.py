"""What a worker answers, as plain records that pass through JSON unchanged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import TypeAdapter

T = TypeVar("T")


@dataclass(frozen=True)
class MachineFacts:
    """Where the rungs run."""

    device: str
    """ "cuda:0", "mps" or "cpu"."""
    name: str
    """As its driver calls it."""
    platform: str
    cpu_count: int
    threads: int
    """Of torch within one operator."""
    interop_threads: int
    python: str
    torch: str
    numpy: str
    cuda: str | None
    """The CUDA release that torch was built for."""
    peak_flops: float
    """Measured matmul peak, per second: the best that was seen."""
    peak_dtype: str
    """In which it was measured."""
    usable_cpus: int
    """Those that this process may run on."""
    uuid: str | None
    """Of the GPU, as its driver knows it."""

    @property
    def where(self) -> str:
        """Device and threads, in words."""
        return f"{self.device}, {self.threads} {'thread' if self.threads == 1 else 'threads'}"


@dataclass(frozen=True)
class Built:
    """A rung's trainer stands, at step 0."""

    seconds: float
    """Building it took; importing torch and the plugins' probes are not in it."""
    plugins: list[str]
    """Those on, in the order in which they run."""
    detail: str
    """How the rung's own plugin runs here, in its words."""
    flops_per_token: int


@dataclass(frozen=True)
class Footprint:
    """Memory of a rung, where its weights are."""

    rest_bytes: int
    """Held between laps."""
    peak_bytes: int
    """Most that was held within a lap."""
    free_bytes: int | None
    """What was left for others after the lap; None: the system does not say."""


@dataclass(frozen=True)
class Lap:
    """Steps done in a row.

    Attributes:
        steps: on the clock.
        seconds: of these, the device synchronised at both ends.
        tokens: target tokens of these.
        losses: of every step, also of those before the clock.
        compiled: graphs compiled, also before the clock.
        data_wait_ms: mean wait for the windows of a step on the clock.
        memory_bytes: peak of the device's allocator in these steps, or of the process so far.
        n_micro: micro-batches in a step.
        notes: what plugins had to say since the last lap.
        foreign_cpus: mean number of cores that other programs kept busy in these steps, those of
            a virtual machine's neighbours included; None: the system does not say.
        footprint: the memory that the rung takes.
    """

    steps: int
    seconds: float
    tokens: int
    losses: list[float]
    compiled: int
    data_wait_ms: float
    memory_bytes: int | None
    n_micro: int
    notes: list[str]
    foreign_cpus: float | None
    footprint: Footprint

    @property
    def step_ms(self) -> float:
        return self.seconds / self.steps * 1e3


@dataclass(frozen=True)
class Phases:
    """Where the time of a step goes, in ms."""

    data_ms: float
    """Waiting for the windows."""
    forward_ms: float
    backward_ms: float
    optimizer_ms: float
    """From the end of the last backward pass to the update: unscaling, clipping, stepping."""
    rest_ms: float
    """Hooks, copies to the device, book-keeping."""
    backward_in_forward: bool = False
    """Whether loss and gradients were found in one go, which is in `forward_ms`."""

    @property
    def parts_ms(self) -> tuple[float, float, float, float, float]:
        """All five, in their order."""
        return (
            *(self.data_ms, self.forward_ms, self.backward_ms),
            *(self.optimizer_ms, self.rest_ms),
        )

    @property
    def step_ms(self) -> float:
        return sum(self.parts_ms)


@dataclass(frozen=True)
class Operator:
    """What one kernel of the device, or one operator on a CPU, takes of a step."""

    name: str
    ms: float
    """Within it alone, without what it calls, per step."""
    calls: float
    """Per step."""


class RungFailed(Exception):
    """A rung that cannot run here, with the reason in one line.

    Args:
        out_of_memory: whether it may be for lack of memory, which others may have taken.
    """

    def __init__(self, reason: str, *, out_of_memory: bool = False) -> None:
        super().__init__(reason)
        self.out_of_memory = out_of_memory


def parse(kind: type[T], answer: Any) -> T:
    """The record of an answer.

    Raises:
        ValidationError: the answer is not of that kind.
    """
    return TypeAdapter(kind).validate_python(answer)
