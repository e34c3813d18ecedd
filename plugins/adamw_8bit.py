"""AdamW whose two moments take 8 bits a number instead of 32.

What: torchao's AdamW8bit. Both moments of each matrix are kept as 8-bit codes with a scale for each
`block_size` numbers, made float32 for the update and coded again. Tensors of fewer than 4,096
numbers, or whose count `block_size` does not divide, keep float32 moments.
Helps: memory: 2 bytes a parameter instead of 8, 0.25 GB instead of 1.0 for GPT-2 small, which is
room for a larger micro-batch.
Costs: coding and decoding in each update, in one compiled kernel for each tensor; compiling them
takes some seconds for each shape at the first step, and torchao looks for the kernel again for each
tensor in each step. Without a compiler, `compiled = false` does the same in plain operations.
Claim: rounding, within 2 % of the baseline's loss: the moments are rounded after every update.
Source: Dettmers et al. 2022, 8-bit Optimizers via Block-wise Quantization;
https://docs.pytorch.org/ao/stable/
"""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, cast

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
    unlogged_warnings,
)

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

CODES = "adamw_8bit"
"""The key of its state, so that no other optimizer takes it for its own."""


class EightBit:
    """torchao's AdamW8bit behind the interface of an optimizer; its state is plain tensors.

    A checkpoint then holds codes and scales, and is read without torchao.

    Args:
        groups: parameter groups, as `decay_groups` gives them.
        compiled: whether updates are compiled kernels.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        block_size: int,
        compiled: bool,
    ) -> None:
        # On import torchao logs which GPU kernels it lacks.
        with unlogged_warnings():
            from torchao.optim import AdamW8bit

            self.inner = AdamW8bit(groups, lr=lr, betas=betas, block_size=block_size)
        self._compiled = compiled

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups themselves: what is set in them takes effect."""
        return cast("list[dict[str, Any]]", self.inner.param_groups)

    @property
    def state(self) -> dict[Tensor, Any]:
        return cast("dict[Tensor, Any]", self.inner.state)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none=set_to_none)

    def step(self) -> None:
        with self._compiling():
            self.inner.step()

    def _compiling(self) -> AbstractContextManager[object]:
        import torch

        return nullcontext() if self._compiled else torch.compiler.set_stance("force_eager")

    def state_dict(self) -> dict[str, Any]:
        whole = self.inner.state_dict()
        state = {
            number: {name: plain(moment) for name, moment in moments.items()}
            for number, moments in whole["state"].items()
        }
        return {CODES: {**whole, "state": state}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        saved = state[CODES]
        moments = {
            number: {name: coded(value, parameters[number]) for name, value in one.items()}
            for number, one in saved["state"].items()
        }
        self.inner.load_state_dict({**saved, "state": moments})


def plain(moment: Any) -> Any:
    """A moment as a checkpoint holds it: codes, scales and what they stand for; others as is."""
    if not hasattr(moment, "codes"):
        return moment
    return {"codes": moment.codes, "scale": moment.scale, "signed": moment.signed}


def coded(saved: Any, parameter: Tensor) -> Tensor:
    """What `plain` was given, on the device of its parameter."""
    if not isinstance(saved, dict):
        return cast("Tensor", saved)
    from torchao.optim.subclass_8bit import OptimState8bit

    codes, scale = saved["codes"], saved["scale"]
    moment = OptimState8bit.zeros(
        codes.shape,
        saved["signed"],
        codes.numel() // scale.numel(),
        parameter.device,
        dtype=parameter.dtype,
    )
    moment.codes.copy_(codes)
    moment.scale.copy_(scale)
    return cast("Tensor", moment)


class AdamW8BitOptions(Options):
    block_size: Annotated[int, Field(ge=32)] = 256
    """Numbers that share one scale."""
    compiled: bool = True
    """Updates as compiled kernels; false: plain operations, slower, no compiler needed."""


class AdamW8Bit(Plugin):
    summary = "AdamW with moments of 8 bits: a quarter of its memory"
    stage = Stage.OUTER
    claim = Claim.ROUNDING
    tolerance = 2e-2
    conflicts = ("fused-adamw", "muon")
    Options = AdamW8BitOptions
    options: AdamW8BitOptions

    def supports(self, machine: Machine) -> Support:
        if find_spec("torchao") is None:
            return Support.no("torchao is not installed: pip install 'gptfast[torchao]'")
        import torch

        parameter = torch.nn.Parameter(torch.ones(64, 64, device=machine.device))
        parameter.grad = torch.ones_like(parameter)
        try:
            with warnings.catch_warnings():
                # torch tells, once, the authors of torchao how to let it keep compiled code.
                warnings.simplefilter("ignore", UserWarning)
                self._optimizer([{"params": [parameter]}], lr=1e-3, betas=(0.9, 0.99)).step()
        except (RuntimeError, OSError, ImportError) as error:
            instead = "try plugins.adamw-8bit.compiled = false" if self.options.compiled else None
            return Support.failed("a trial update", error, instead=instead)
        return Support.yes("compiled" if self.options.compiled else "plain operations")

    def build_optimizer(self, model: nn.Module, profile: Profile) -> Optimizer:
        train = profile.train
        groups = decay_groups(model.named_parameters(), train.weight_decay)
        optimizer = self._optimizer(
            groups, lr=train.learning_rate, betas=(train.beta1, train.beta2)
        )
        return cast("Optimizer", optimizer)

    def _optimizer(
        self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float]
    ) -> EightBit:
        options = self.options
        return EightBit(
            groups,
            lr=lr,
            betas=betas,
            block_size=options.block_size,
            compiled=options.compiled,
        )
