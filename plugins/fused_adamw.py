"""AdamW in one kernel for all tensors: torch's fused implementation.

What: the baseline's AdamW with the same groups (decay on matrices only) and `fused=True`, which
    updates every tensor of a group in one launch instead of a dozen launches for each.
When it helps: on a GPU, most where the model is small and the launches are what takes the time; on
    a CPU it passes over memory once.
Costs: nothing.
Numerics: rounding. The same formula, its operations contracted in other ways.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gptfast.plugin import Claim, Machine, Plugin, Profile, Stage, Support, Tries, decay_groups

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer


def fused_adamw(
    model: nn.Module, *, lr: float, betas: tuple[float, float], weight_decay: float
) -> Optimizer:
    """AdamW over a model's parameters, decaying matrices only.

    Source: torch.optim.AdamW.
    """
    import torch

    groups = decay_groups(model.named_parameters(), weight_decay)
    return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=True)


def launch(device: torch.device) -> None:
    """One fused step of one small tensor.

    Raises:
        RuntimeError: this device has no fused AdamW.
    """
    import torch

    parameter = torch.nn.Parameter(torch.ones(2, 2, device=device))
    parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW([parameter], fused=True).step()


class FusedAdamW(Plugin):
    summary = "AdamW in one kernel for all tensors"
    stage = Stage.OUTER
    claim = Claim.ROUNDING
    tolerance = 1e-5
    tries = Tries()

    def supports(self, machine: Machine) -> Support:
        try:
            launch(machine.device)
        except RuntimeError as error:
            return Support.no(f"torch has no fused AdamW for it: {str(error).splitlines()[0]}")
        return Support.yes()

    def build_optimizer(self, model: nn.Module, profile: Profile) -> Optimizer:
        train = profile.train
        return fused_adamw(
            model,
            lr=train.learning_rate,
            betas=(train.beta1, train.beta2),
            weight_decay=train.weight_decay,
        )
