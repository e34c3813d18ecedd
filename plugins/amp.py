"""Automatic mixed precision: matrix products in half precision, sums and weights in float32.

What: `torch.amp.autocast` around the forward pass. Weights, gradients of weights, optimizer and the
loss stay float32.
Helps: devices with units for it: NVIDIA from Volta (fp16) or Ampere (bf16), CPUs with AMX or
AVX512-BF16, Apple GPUs. Elsewhere bf16 is emulated and slower, so `auto` refuses.
Costs: rounding to 8 (bf16) or 11 (fp16) bits. fp16 has a narrow range, so its loss is scaled up and
the gradients down again; a step whose gradients overflow is skipped, and knowing that waits for
the device once a step. bf16 has float32's range and needs no scaling.
Claim: rounding, within 2 % of the baseline's loss.
Source: Micikevicius et al. 2018, Mixed Precision Training;
https://docs.pytorch.org/docs/stable/amp.html
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal

from gptfast.plugin import Claim, Context, Machine, Options, Plugin, Stage, Stepper, Support, Tries

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.amp.grad_scaler import GradScaler
    from torch.optim import Optimizer

CPU_BF16_UNITS = ("amx_bf16", "avx512_bf16", "bf16")
"""Capabilities of which a CPU needs one to multiply in bf16; the last is ARM's."""


def native_dtype(machine: Machine) -> torch.dtype | None:
    """The half precision that the device's own units multiply in; None: it has no such units."""
    import torch

    if machine.kind == "cuda":
        with torch.cuda.device(machine.device):
            native = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if native else torch.float16
    if machine.kind == "cpu":
        capabilities = torch.cpu.get_capabilities()
        units = any(capabilities.get(unit, False) for unit in CPU_BF16_UNITS)
        return torch.bfloat16 if units else None
    return torch.bfloat16


class ScaledStepper:
    """Scales the loss so that fp16 gradients do not vanish; skips a step that overflowed."""

    def __init__(self, scaler: GradScaler) -> None:
        self.scaler = scaler

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]  # torch's own

    def unscale(self, optimizer: Optimizer) -> None:
        self.scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> bool:
        before = self.scaler.get_scale()
        self.scaler.step(optimizer)
        self.scaler.update()
        # The scale falls exactly when a gradient was not finite. The scaler offers no other
        # answer that also holds for a fused optimizer, which skips inside its kernel.
        return self.scaler.get_scale() >= before

    def skip(self, optimizer: Optimizer) -> None:
        self.scaler.update()


class AmpOptions(Options):
    dtype: Literal["auto", "bf16", "fp16"] = "auto"
    """Half precision to use; auto: bf16 where the device has units for it, else fp16 on CUDA."""


class Amp(Plugin):
    summary = "Matrix products in bf16 or fp16, weights and sums in float32"
    stage = Stage.SURGERY
    claim = Claim.ROUNDING
    tolerance = 2e-2
    tries = Tries(dtype=("auto", "bf16", "fp16"))
    Options = AmpOptions

    _kind: str
    _dtype: torch.dtype
    _scaler: GradScaler | None = None

    def supports(self, machine: Machine) -> Support:
        import torch

        dtype = self._chosen(machine)
        if dtype is None:
            return Support.no(
                "this CPU has no bf16 units, bf16 would be emulated and slow: "
                'set plugins.amp.dtype = "bf16" to use it all the same'
            )
        if dtype is torch.float16 and machine.kind == "cpu":
            return Support.no(
                'fp16 is no training format for a CPU: set plugins.amp.dtype = "bf16"'
            )
        try:
            _launch(machine, dtype)
        except RuntimeError as error:
            return Support.failed(f"a trial product in {_name(dtype)}", error)
        if dtype is torch.float16:
            return Support.yes("fp16 with loss scaling")
        return Support.yes("bf16" if dtype is native_dtype(machine) else "bf16, emulated")

    def setup(self, context: Context) -> None:
        import torch

        machine = context.machine
        self._kind = machine.kind
        dtype = self._chosen(machine)
        assert dtype is not None, "supports said no"
        self._dtype = dtype
        self._scaler = torch.amp.GradScaler(self._kind) if dtype is torch.float16 else None

    def forward_scope(self) -> AbstractContextManager[object]:
        import torch

        return torch.amp.autocast(self._kind, dtype=self._dtype)

    def build_stepper(self) -> Stepper | None:
        return None if self._scaler is None else ScaledStepper(self._scaler)

    def metrics(self) -> Mapping[str, float]:
        return {} if self._scaler is None else {"scale": self._scaler.get_scale()}

    def state(self) -> dict[str, Any]:
        return {} if self._scaler is None else {"scaler": self._scaler.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        # A run may go on in another dtype: what is not needed is left, what is new starts afresh.
        if self._scaler is not None and "scaler" in state:
            self._scaler.load_state_dict(state["scaler"])

    def _chosen(self, machine: Machine) -> torch.dtype | None:
        import torch

        named = {"bf16": torch.bfloat16, "fp16": torch.float16}
        return named.get(self.options.dtype) or native_dtype(machine)


def _launch(machine: Machine, dtype: torch.dtype) -> None:
    import torch

    weight = torch.zeros(16, 16, device=machine.device, requires_grad=True)
    with torch.amp.autocast(machine.kind, dtype=dtype):
        product = torch.nn.functional.linear(weight, weight)
    product.float().sum().backward()  # type: ignore[no-untyped-call]  # torch's own


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
