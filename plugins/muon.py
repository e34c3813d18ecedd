"""Muon for the hidden matrices, AdamW for the rest.

What: the momentum of each matrix inside the blocks is replaced by the nearest orthogonal matrix
    (five Newton-Schulz iterations), so that every direction learns equally fast.
    Embeddings, head, biases and norms stay with AdamW.
When it helps: fewer steps to the same loss on language models.
Costs: per matrix and step about `ns_steps` * 6 * rows * columns * min(rows, columns) FLOPs on top,
    a few percent of a step with large batches and much more with small ones, and many small
    launches on small models. Saves one of AdamW's two moments. torch.optim.Muon iterates in
    bfloat16, which a CPU without units for it multiplies several times slower than float32; there
    the iteration is done in float32, on the Gram matrices of all matrices at once.
Numerics: recipe: it changes what is learnt.

The learning rate has AdamW's scale with `adjust_lr_fn = "match_rms_adamw"`, so that the profile's
own rate is a fair start. `c_attn` holds queries, keys and values and is orthogonalised as one.

Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; Liu et al.
2025, "Muon is scalable for LLM training"; torch.optim.Muon.
"""

from __future__ import annotations

import math
from functools import reduce
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from pydantic import Field

from gptfast.plugin import (
    Claim,
    Machine,
    Options,
    Plugin,
    Profile,
    Stage,
    Support,
    decay_groups,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

NamedParameters = list[tuple[str, "Tensor"]]


def split_parameters(model: nn.Module) -> tuple[NamedParameters, NamedParameters]:
    """(hidden matrices, everything else), each parameter once.

    Hidden is a matrix that maps activations to activations: neither an embedding nor the head.
    """
    from torch import nn

    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    hidden: NamedParameters = []
    rest: NamedParameters = []
    for name, parameter in model.named_parameters():
        is_hidden = (
            parameter.dim() == 2
            and id(parameter) not in tables
            and not name.endswith("lm_head.weight")
        )
        (hidden if is_hidden else rest).append((name, parameter))
    return hidden, rest


def orthogonalised(
    updates: Sequence[Tensor],
    ns_coefficients: tuple[float, float, float],
    ns_steps: int,
    eps: float,
) -> list[Tensor]:
    """The Newton-Schulz iteration of torch.optim.Muon, of many matrices at once in their own dtype.

    It multiplies x by a polynomial p of its Gram matrix g = x x^T, and g by p^2, again and again.
    These are small, square and commute: here they are multiplied among themselves, for all matrices
    whose smaller side is equal in one product, and x only by what comes out.

    Args:
        updates: each (rows, columns). In less than float32 errors would grow too much.
        ns_coefficients: a, b and c of p(g) = a + b g + c g^2.
        eps: the least norm to divide by.

    Returns:
        Each (rows, columns), with all singular values near 1.
    """
    import torch

    a, b, c = ns_coefficients
    norms = [norm.clamp_(min=eps) for norm in torch._foreach_norm(tuple(updates))]
    unit = torch._foreach_div(tuple(updates), norms)
    wide = [x.T if x.size(0) > x.size(1) else x for x in unit]
    for side in {x.size(0) for x in wide}:
        which = [i for i, x in enumerate(wide) if x.size(0) == side]
        gram = torch.stack([wide[i] @ wide[i].T for i in which])
        factors: list[Tensor] = []
        for _ in range(ns_steps):
            if factors:
                gram = factors[-1] @ gram @ factors[-1]
            factors.append(torch.baddbmm(gram, gram, gram, beta=b, alpha=c))
            factors[-1].diagonal(dim1=-2, dim2=-1).add_(a)
        product = reduce(torch.matmul, factors)
        for i, q in zip(which, product, strict=True):
            wide[i] = q @ wide[i]
    return [x.T if u.size(0) > u.size(1) else x for u, x in zip(updates, wide, strict=True)]


def gram_muon() -> type[torch.optim.Muon]:
    """torch.optim.Muon, settings and state included, whose step takes all matrices at once.

    The class is made here, and not above, because listing the plugins must not import torch.
    """
    import torch

    class GramMuon(torch.optim.Muon):
        @torch.no_grad()
        def step(self) -> None:  # type: ignore[override]  # no closure: no loop here has one
            for group in self.param_groups:
                self._step(group, [p for p in group["params"] if p.grad is not None])

        def _step(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
            momentum, lr = group["momentum"], float(group["lr"])
            gradients = [p.grad for p in parameters if p.grad is not None]
            kept = [self._kept(p) for p in parameters]
            torch._foreach_lerp_(kept, gradients, 1 - momentum)
            ahead = torch._foreach_lerp(gradients, kept, momentum) if group["nesterov"] else kept
            updates = orthogonalised(
                ahead, group["ns_coefficients"], group["ns_steps"], group["eps"]
            )
            torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
            for parameter, update in zip(parameters, updates, strict=True):
                scale = rate_scale(parameter.shape, group["adjust_lr_fn"])
                parameter.add_(update, alpha=-lr * scale)

        def _kept(self, parameter: Tensor) -> Tensor:
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            momentum: Tensor = state["momentum_buffer"]
            return momentum

    return GramMuon


def rate_scale(shape: Sequence[int], adjust_lr_fn: str | None) -> float:
    """By how much torch.optim.Muon multiplies the learning rate of a matrix."""
    rows, columns = shape
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))


class Joined:
    """Several optimizers behind the interface of one, as far as a training loop uses it."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = tuple(optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups themselves: what is set in them takes effect."""
        return [group for one in self.optimizers for group in one.param_groups]

    @property
    def state(self) -> dict[Tensor, Any]:
        return {key: value for one in self.optimizers for key, value in one.state.items()}

    def zero_grad(self, set_to_none: bool = True) -> None:
        for one in self.optimizers:
            one.zero_grad(set_to_none=set_to_none)

    def step(self) -> None:
        for one in self.optimizers:
            one.step()

    def state_dict(self) -> dict[str, Any]:
        return {"optimizers": [one.state_dict() for one in self.optimizers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for one, its_own in zip(self.optimizers, state["optimizers"], strict=True):
            one.load_state_dict(its_own)


class MuonOptions(Options):
    lr: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] | None = None
    """Peak learning rate of the hidden matrices. None: train.learning_rate."""
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95
    """Share of the momentum kept in each step."""
    nesterov: bool = True
    """Look ahead: add the momentum to the gradient before orthogonalising."""
    weight_decay: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] | None = None
    """Decay of the hidden matrices. None: train.weight_decay."""
    ns_steps: Annotated[int, Field(ge=1, lt=100)] = 5
    """Newton-Schulz iterations."""
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "match_rms_adamw"
    """How the rate follows a matrix's shape: updates as large as AdamW's, or as Jordan's code."""
    fused: bool = False
    """Fused AdamW for the rest."""
    iterate_in: Literal["auto", "bfloat16", "float32"] = "auto"
    """Dtype of the Newton-Schulz iterations; auto: float32 on a CPU, else bfloat16."""


class Muon(Plugin):
    summary = "Muon for hidden matrices, AdamW for the rest"
    stage = Stage.OUTER
    claim = Claim.RECIPE
    conflicts = ("fused-adamw",)
    Options = MuonOptions
    options: MuonOptions

    def supports(self, machine: Machine) -> Support:
        """A step of both optimizers on a small tensor each."""
        import torch

        parameter = torch.nn.Parameter(torch.ones(2, 2, device=machine.device))
        parameter.grad = torch.ones_like(parameter)
        try:
            torch.optim.Muon([parameter]).step()  # type: ignore[no-untyped-call]  # torch's gap
            torch.optim.AdamW([parameter], fused=self.options.fused).step()
        except RuntimeError as error:
            return Support.no(str(error).splitlines()[0])
        return Support.yes(f"iterates in {self._iterates_in(machine.kind)}")

    def _iterates_in(self, kind: str) -> str:
        if self.options.iterate_in != "auto":
            return self.options.iterate_in
        return "float32" if kind == "cpu" else "bfloat16"

    def build_optimizer(self, model: nn.Module, profile: Profile) -> Optimizer:
        import torch

        options, train = self.options, profile.train
        hidden, rest = split_parameters(model)
        in_float32 = self._iterates_in(hidden[0][1].device.type) == "float32"
        kind = gram_muon() if in_float32 else torch.optim.Muon
        muon = kind(
            [parameter for _, parameter in hidden],
            lr=options.lr or train.learning_rate,
            weight_decay=(
                train.weight_decay if options.weight_decay is None else options.weight_decay
            ),
            momentum=options.momentum,
            nesterov=options.nesterov,
            ns_steps=options.ns_steps,
            adjust_lr_fn=options.adjust_lr_fn,
        )
        adamw = torch.optim.AdamW(
            decay_groups(rest, train.weight_decay),
            lr=train.learning_rate,
            betas=(train.beta1, train.beta2),
            fused=options.fused,
        )
        return cast("Optimizer", Joined((muon, adamw)))
