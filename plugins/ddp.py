"""Data parallelism: several processes, a device each, share out the windows of every step.

What: torch's DistributedDataParallel averages the gradients of all processes while the backward
pass still runs; micro-batches before a step's last wait with it. All see the same loss, the mean
over the windows of all. Before each next step they tell each other whether one was asked to stop,
so that all stop after the same step. Exit code 130 or 143 is that of each that a signal reached;
where none did it is 0.
Helps: with several GPUs; on CPUs across machines. A step's windows are the same however many
processes share them, and a run can be resumed with another number.
Costs: a copy of weights and optimizer for each process, and the gradients' way between devices.
Each evaluates the whole of what is evaluated: that is simple and keeps their decisions equal. With
dropout all drop the same units, of other windows: one random state is what a checkpoint holds.
No help in one process: torchrun starts them, `torchrun --nproc-per-node 2 -m -- gptfast train ...`;
without `--` it takes `--run` for a shortened option of its own.
Claim: exact but for the order of sums.
Source: Li et al. 2020, PyTorch Distributed; https://docs.pytorch.org/docs/stable/ddp.html
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import MethodType
from typing import TYPE_CHECKING, Any

from gptfast.plugin import Claim, Context, Machine, Plugin, Stage, Support

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.nn.parallel import DistributedDataParallel

BACKENDS = "cpu:gloo,cuda:nccl"
"""Tensors of a host go by gloo, so that agreeing to stop waits for no GPU."""


def buffers_option() -> str:
    """What torch calls the copying of buffers before each forward pass; ours never change."""
    from inspect import signature

    from torch.nn.parallel import DistributedDataParallel

    now = "forward_sync_buffers"  # from torch 2.13 on
    return now if now in signature(DistributedDataParallel).parameters else "broadcast_buffers"


def join_gradients(model: nn.Module, machine: Machine) -> DistributedDataParallel:
    """Have `model(tokens, targets)` average its gradients over all processes, in place.

    The parallel module stands beside the model and not around it: names of parameters stay.
    """
    import torch
    from torch import distributed, nn
    from torch.nn.parallel import DistributedDataParallel

    plain = model.forward.__func__ if isinstance(model.forward, MethodType) else type(model).forward

    class Alone(nn.Module):
        """The model as one process has it."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Any:
            return plain(self.model, tokens_BT, targets_BT)

    no_copies: dict[str, Any] = {buffers_option(): False}
    together = DistributedDataParallel(
        Alone(),
        device_ids=[machine.device] if machine.kind == "cuda" else None,
        **no_copies,
        gradient_as_bucket_view=True,
    )

    def forward(
        self: nn.Module, tokens_BT: Tensor, targets_BT: Tensor | None = None, **rest: Any
    ) -> Any:
        if targets_BT is None or not torch.is_grad_enabled():
            return plain(self, tokens_BT, *([] if targets_BT is None else [targets_BT]), **rest)
        loss = together(tokens_BT, targets_BT)
        mean = loss.detach() / machine.world
        distributed.all_reduce(mean)
        # The value of all, the gradient of this one: DDP averages gradients by itself.
        return loss + (mean - loss.detach())

    model.forward = MethodType(forward, model)
    return together


class Ddp(Plugin):
    summary = "Several processes, a device each, share out the windows of a step"
    stage = Stage.SHARD
    claim = Claim.EXACT
    tolerance = 1e-5
    conflicts = ("batch-threads",)

    _machine: Machine
    _together: DistributedDataParallel

    def supports(self, machine: Machine) -> Support:
        from torch import distributed

        if not distributed.is_available():
            return Support.no("this torch was built without torch.distributed")
        if machine.world < 2:
            return Support.no(
                "there is one process: "
                "torchrun --nproc-per-node 2 -m -- gptfast train ... starts two"
            )
        return Support.yes(f"{machine.world} processes")

    def setup(self, context: Context) -> None:
        from torch import distributed

        self._machine = context.machine
        distributed.init_process_group(BACKENDS if self._machine.kind == "cuda" else "gloo")
        context.undo(distributed.destroy_process_group)

    def wrap_model(self, model: nn.Module) -> nn.Module:
        self._together = join_gradients(model, self._machine)
        return model

    def micro_scope(self, last: bool) -> AbstractContextManager[object]:
        return nullcontext() if last else self._together.no_sync()

    def agree(self, stop: bool) -> bool | None:
        import torch
        from torch import distributed

        asked = torch.tensor(int(stop))
        distributed.all_reduce(asked, op=distributed.ReduceOp.MAX)
        return bool(asked.item())
