"""What a run tells: plain records, and the listener that the trainer hands them to.

Numbers are host numbers: the trainer reads the device once per log interval and fills them in.
Imports no torch, so that the console can be tried on records alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from gptfast.plugin import Evaluated


@dataclass(frozen=True)
class PluginLine:
    """A plugin that is on."""

    name: str
    claim: str
    """ "exact", "rounding" or "recipe"."""
    detail: str = ""
    """How it runs here, in words: the chosen dtype, backend, number of workers."""


@dataclass(frozen=True)
class RunInfo:
    """A run that is about to begin or to go on."""

    name: str | None
    """The run's name; None: nothing is kept."""
    folder: str | None
    profile: str
    device: str
    """The device as its driver calls it."""
    params: int
    flops_per_token: int
    """Forward and backward, of one token."""
    peak_flops: float | None
    """Measured matmul peak of this device, per second. None: not measured."""
    steps: int
    start_step: int
    """Steps already done; 0 for a new run."""
    batch_size: int
    n_micro: int
    """Micro-batches in a step."""
    block_size: int
    vocab_size: int
    plugins: tuple[PluginLine, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()
    """Name and reason of each plugin left off."""


@dataclass(frozen=True)
class Logged:
    """One log interval."""

    step: int
    steps: int
    loss: float
    """Mean over the interval's target tokens, in nats."""
    learning_rate: float
    grad_norm: float
    """Before clipping, at the last step of the interval."""
    step_ms: float
    """Mean wall time of a step; a session's first, in which plugins compile, counts only alone."""
    tokens_per_s: float
    peak_share: float | None
    """Model flops per second over the measured matmul peak, 0 to 1. None: no peak measured."""
    data_wait_ms: float
    """Mean time per step spent waiting for windows."""
    memory_bytes: int | None
    """Peak device memory, or of the process on a CPU. None: unknown."""
    skipped_steps: int
    """Updates that the stepper skipped since the start."""
    epoch: float
    """Passes over the training split so far."""
    plugin_metrics: Mapping[str, float] = field(default_factory=dict)
    """What plugins say of themselves at the interval's last step, as PLUGIN.NAME."""


EvalRecord = Evaluated


@dataclass(frozen=True)
class Finished:
    """How a run ended."""

    steps: int
    """Optimizer steps done, over all resumes."""
    seconds: float
    """How long this session took."""
    loss: float
    """Training loss of the last log interval."""
    val_loss: float | None
    best_val_loss: float | None
    stopped_by: str | None
    """What ended it before its last step: a signal, a plugin, `--stop-at`. None: it is complete."""
    folder: str | None
    first_step_s: float | None = None
    """How long this session's first step took, compiling included. None: there was none."""


@dataclass(frozen=True)
class Course:
    """A run over its steps, as its log has it: (step, value) in order of the steps."""

    name: str
    train: list[tuple[int, float]]
    """Training loss, in nats."""
    val: list[tuple[int, float]]
    """Validation loss, in nats."""
    tokens_per_s: list[tuple[int, float]]
    metrics: Mapping[str, list[tuple[int, float]]] = field(default_factory=dict)
    """The plugins' numbers, by PLUGIN.NAME; what is not finite is left out."""


class Listener(Protocol):
    """Whoever watches a run. The trainer calls it between steps, from one thread."""

    def started(self, info: RunInfo) -> None:
        """Once, when everything is built and resumed."""

    def note(self, line: str) -> None:
        """Something the user should know, in one line: a choice made, a feature left off."""

    def logged(self, record: Logged) -> None:
        """After each log interval."""

    def evaluated(self, record: EvalRecord) -> None:
        """After each evaluation."""

    def saved(self, step: int, path: str) -> None:
        """After each checkpoint is complete under its final name."""

    def sampled(self, step: int, text: str) -> None:
        """After each sample of the model's text."""

    def finished(self, record: Finished) -> None:
        """Once, at the end; not after an error."""


class Silent:
    """A listener that does nothing, for tests and `bench`."""

    def started(self, info: RunInfo) -> None: ...
    def note(self, line: str) -> None: ...
    def logged(self, record: Logged) -> None: ...
    def evaluated(self, record: EvalRecord) -> None: ...
    def saved(self, step: int, path: str) -> None: ...
    def sampled(self, step: int, text: str) -> None: ...
    def finished(self, record: Finished) -> None: ...
