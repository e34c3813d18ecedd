"""Matrix products of the blocks in float8, twice as many a second as in bf16.

What: torchao's `convert_to_float8_training`. Every linear layer of the blocks whose two sides are
multiples of 16 multiplies in float8, forward and backward; scales are found anew for each tensor
("tensorwise", the quickest) or row ("rowwise", finer). Weights, gradients of weights and optimizer
stay float32, and parameters keep their names, so a checkpoint is the same with and without it. The
head stays in bf16: the model multiplies by its weight itself.
Helps: large products on NVIDIA Hopper and newer. Narrow models lose more by scaling than they gain:
GPT-2 small's width of 768 is at the edge, see what `bench` says.
Costs: finding scales and casting, which only `compile` makes cheap. Needs `amp` in bf16.
Claim: rounding, within 5 % of the baseline's loss: 3 bits of mantissa. `emulate` computes the same
rounding on any machine, to see what it does to the loss; it is slow.
Source: Micikevicius et al. 2022, FP8 Formats for Deep Learning;
https://docs.pytorch.org/ao/stable/
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

from gptfast.plugin import (
    Claim,
    Context,
    Machine,
    Options,
    Plugin,
    Stage,
    Support,
    Tries,
    unlogged_warnings,
)

if TYPE_CHECKING:
    from torch import nn

Recipe = Literal["tensorwise", "rowwise"]
FIRST_WITH_FLOAT8 = (9, 0)
"""Compute capability: Hopper."""
MULTIPLE = 16
"""What float8 units ask of both sides of a matrix."""


def fits(module: nn.Module, name: str) -> bool:
    """Whether a layer multiplies in float8."""
    from torch import nn

    return (
        isinstance(module, nn.Linear)
        and name != "lm_head"
        and module.in_features % MULTIPLE == 0
        and module.out_features % MULTIPLE == 0
    )


def to_float8(model: nn.Module, *, recipe: Recipe, emulate: bool = False) -> nn.Module:
    """Have the layers that fit multiply in float8, in place; parameters stay the same objects.

    Source: torchao.float8.convert_to_float8_training.
    """
    from dataclasses import replace

    # On import torchao logs which GPU kernels it lacks.
    with unlogged_warnings():
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
        converted: nn.Module = convert_to_float8_training(
            model, config=config, module_filter_fn=fits
        )
    return converted


class Fp8Options(Options):
    recipe: Recipe = "tensorwise"
    """What shares a scale: a whole tensor (quickest) or each row of it (finer)."""
    emulate: bool = False
    """Round as float8 does without units for it; slow."""


class Fp8(Plugin):
    summary = "Matrix products in float8 on Hopper and newer"
    stage = Stage.SURGERY
    claim = Claim.ROUNDING
    tolerance = 5e-2
    requires = ("amp",)
    tries = Tries(recipe=("tensorwise", "rowwise"))
    Options = Fp8Options
    options: Fp8Options

    def supports(self, machine: Machine) -> Support:
        if find_spec("torchao") is None:
            return Support.no("torchao is not installed: pip install 'gptfast[torchao]'")
        if self.options.emulate:
            return Support.yes("emulated, slow")
        if machine.kind != "cuda":
            return Support.no("float8 needs an NVIDIA GPU: plugins.fp8.emulate = true tries it")
        import torch

        major, minor = torch.cuda.get_device_capability(machine.device)
        if torch.version.hip or (major, minor) < FIRST_WITH_FLOAT8:
            return Support.no(
                f"float8 training needs an NVIDIA GPU of capability 9.0, this is {major}.{minor}"
            )
        try:
            _launch(machine, self.options.recipe)
        except (RuntimeError, ImportError) as error:
            return Support.failed("a trial product in float8", error)
        return Support.yes(self.options.recipe)

    def setup(self, context: Context) -> None:
        if "compile" not in context.profile.plugins:
            context.note("fp8 without compile: casting to float8 takes longer than it saves")

    def wrap_model(self, model: nn.Module) -> nn.Module:
        return to_float8(model, recipe=self.options.recipe, emulate=self.options.emulate)


def _launch(machine: Machine, recipe: Recipe) -> None:
    import torch

    layer = torch.nn.Sequential(torch.nn.Linear(64, 64, device=machine.device))
    with torch.amp.autocast(machine.kind, dtype=torch.bfloat16):
        out = to_float8(layer, recipe=recipe)(torch.ones(64, 64, device=machine.device))
    out.float().sum().backward()
