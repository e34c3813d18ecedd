"""Muon for the hidden matrices, AdamW for the rest.

What: the momentum of each matrix inside the blocks is replaced by the nearest orthogonal matrix
    (five Newton-Schulz iterations), so that every direction learns equally fast.
    Embeddings, head, biases and norms stay with AdamW.
When it helps: fewer steps to the same loss on language models.
Costs: per matrix and step about `ns_steps` * 6 * rows * columns * min(rows, columns) FLOPs on top,
    a few percent of a step with large batches and much more with small ones, and many small
    launches on small models. Saves one of AdamW's two moments. torch.optim.Muon iterates in
    bfloat16, which a CPU without units for it multiplies several times slower than float32; there
    the iteration is done in float32.
Numerics: recipe: it changes what is learnt.

The learning rate has AdamW's scale with `adjust_lr_fn = "match_rms_adamw"`, so that the profile's
own rate is a fair start. `c_attn` holds queries, keys and values and is orthogonalised as one.

Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; Liu et al.
2025, "Muon is scalable for LLM training"; torch.optim.Muon.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from pydantic import Field

from gptfast.plugin import (
    Claim,
    Context,
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
    update: Tensor, ns_coefficients: tuple[float, float, float], ns_steps: int, eps: float
) -> Tensor:
    """The Newton-Schulz iteration of torch.optim.Muon, in `update`'s own dtype.

    Args:
        update: (rows, columns).
        ns_coefficients: of the quintic a x + b x^3 + c x^5 that each iteration applies.
        eps: the least norm to divide by.

    Returns:
        (rows, columns), with all singular values near 1.
    """
    import torch

    a, b, c = ns_coefficients
    tall = update.size(0) > update.size(1)
    x = update.T if tall else update
    x = x / x.norm().clamp(min=eps)
    for _ in range(ns_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


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
        return Support.yes(f"iterates in {self._iterates_in(machine)}")

    def setup(self, context: Context) -> None:
        from torch.optim import _muon

        if self._iterates_in(context.machine) == "float32":
            # torch 2.13 has no option for it, so its private function is replaced. A release that
            # names it otherwise fails here, naming this plugin.
            context.setattr(_muon, "_zeropower_via_newtonschulz", orthogonalised)

    def _iterates_in(self, machine: Machine) -> str:
        if self.options.iterate_in != "auto":
            return self.options.iterate_in
        return "float32" if machine.kind == "cpu" else "bfloat16"

    def build_optimizer(self, model: nn.Module, profile: Profile) -> Optimizer:
        import torch

        options, train = self.options, profile.train
        hidden, rest = split_parameters(model)
        muon = torch.optim.Muon(
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
