"""The cores share out the windows, a thread each, instead of sharing out every operation.

What: each thread takes its part of a micro-batch through forward and backward with one core to
itself, and the gradients are added at the end: data parallelism inside of one process.
Helps: a CPU that is not all the run's own. Threads that share out an operation meet at its end, and
wait for the one whose core is taken, some thousand times a step; these meet once a micro-batch.
With a busy program on one of two cores `char` took 57 ms a step with it and 116 without. Where the
cores are free it brings nothing that could be told from noise (37 and 36 ms).
Costs: the gradients once more for each thread, and smaller matrix products.
No help on a GPU, with one core, or with one window a micro-batch. With dropout it stays off:
threads would draw its random numbers in any order.
Claim: exact but for the order of sums: the gradients of the parts are added in one fixed order.
Source: https://docs.pytorch.org/docs/stable/notes/cpu_threading_torchscript_inference.html
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from gptfast.plugin import (
    Claim,
    Context,
    Machine,
    Options,
    Plugin,
    Stage,
    Support,
    Tries,
    with_gradients,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

LossOf = Callable[["Tensor", "Tensor"], "Tensor"]
"""From (b, T) tokens and (b, T) targets to their summed loss."""


class Team:
    """Threads that score parts of a batch, each with one core to itself.

    Args:
        pool: all threads but the caller's.
        parameters: those whose gradients are wanted.
    """

    def __init__(self, pool: ThreadPoolExecutor, n: int, parameters: Sequence[nn.Parameter]):
        self._pool = pool
        self._n = n
        self._parameters = parameters

    def loss(self, loss_of: LossOf, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """The summed loss of the batch; its gradients, where they are recorded, are known by then.

        Returns:
            Scalar float32, as `loss_of` has it.
        """
        import torch

        recorded = torch.is_grad_enabled()
        modes = thread_modes()

        def score(part: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
            with modes():
                loss = loss_of(*part)
                found = torch.autograd.grad(loss, self._parameters) if recorded else ()
                return loss.detach(), found

        tokens, targets = tokens_BT.chunk(self._n), targets_BT.chunk(self._n)
        first, *others = zip(tokens, targets, strict=True)
        underway = [self._pool.submit(score, part) for part in others]
        try:
            total, gradients = score(first)
        finally:
            wait(underway)
        # In the order of the parts, so that the sums are the same each time.
        for loss, found in (future.result() for future in underway):
            total += loss
            if recorded:
                torch._foreach_add_(gradients, found)
        if not recorded:
            return total
        return with_gradients(total, gradients, self._parameters)


def thread_modes() -> Callable[[], Any]:
    """The caller's modes that torch keeps for each thread: whether gradients, whether autocast."""
    import torch

    recorded = torch.is_grad_enabled()
    autocast, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    @contextmanager
    def modes() -> Iterator[None]:
        with torch.set_grad_enabled(recorded), torch.autocast("cpu", dtype, enabled=autocast):
            yield

    return modes


@contextmanager
def one_core() -> Iterator[None]:
    """Operations of this thread, and of threads that begin in here, do not share themselves out."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def share_loss(model: nn.Module, team: Team) -> None:
    """Have `team` compute `model(tokens, targets)`, in place; without targets nothing changes."""
    plain = model.forward.__func__ if isinstance(model.forward, MethodType) else type(model).forward

    def forward(
        self: nn.Module, tokens_BT: Tensor, targets_BT: Tensor | None = None, **rest: Any
    ) -> Any:
        if targets_BT is None:
            return plain(self, tokens_BT, **rest)
        return team.loss(partial(plain, self), tokens_BT, targets_BT)

    # A bound method, so that a deep copy of the model gets one bound to the copy.
    model.forward = MethodType(forward, model)


class BatchThreadsOptions(Options):
    threads: Annotated[int, Field(ge=2)] | None = None
    """Parts of a batch, each with a thread. None: as many as torch uses threads."""


class BatchThreads(Plugin):
    summary = "Cores share out the windows instead of each operation"
    stage = Stage.SHARD
    claim = Claim.EXACT
    tolerance = 1e-5
    tries = Tries()
    Options = BatchThreadsOptions
    options: BatchThreadsOptions

    _pool: ThreadPoolExecutor | None = None

    def supports(self, machine: Machine) -> Support:
        if machine.kind != "cpu":
            return Support.no("it is for CPUs: a GPU shares out every operation well")
        if self._threads() < 2:
            return Support.no("torch uses one thread here: there is nothing to share out")
        return Support.yes(f"{self._threads()} threads")

    def setup(self, context: Context) -> None:
        if context.profile.model.dropout > 0:
            context.note("batch-threads is off: threads would draw dropout in any order")
            return
        self._n = self._threads()
        context.enter(one_core())
        self._pool = context.enter(ThreadPoolExecutor(self._n - 1, initializer=one_thread))

    def wrap_model(self, model: nn.Module) -> nn.Module:
        if self._pool is not None:
            wanted = [p for p in model.parameters() if p.requires_grad]
            share_loss(model, Team(self._pool, self._n, wanted))
        return model

    def _threads(self) -> int:
        import torch

        return self.options.threads or torch.get_num_threads()


def one_thread() -> None:
    import torch

    torch.set_num_threads(1)
