"""TensorFloat-32 for float32 matrix products on NVIDIA GPUs.

What: the tensor cores read float32 operands with 10 bits of mantissa instead of 23 and add up in
float32. Nothing is stored in less than float32.
Helps: float32 training on Ampere (compute capability 8.0) and newer, often twice as fast and more;
little beside `amp`, which leaves few float32 products.
Costs: nothing but the rounding.
Claim: rounding, within 1 % of the baseline's loss.

torch has two interfaces to one switch. They must not be mixed: Inductor of torch 2.11 to 2.14
reads the older one while it compiles, which raises once the newer one has been written. So the
older one, which keeps both in step, is the one that is written here.
Source: https://docs.pytorch.org/docs/stable/generated/torch.set_float32_matmul_precision.html
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gptfast.plugin import Claim, Context, Machine, Plugin, Stage, Support, Tries

FIRST_WITH_TF32 = (8, 0)
"""Compute capability."""


@contextmanager
def tf32_matmul() -> Iterator[None]:
    """float32 matrix products may use TF32 inside; every precision switch is as found after."""
    import torch

    backends: Any = torch.backends  # torch leaves parts of it untyped
    before = torch.get_float32_matmul_precision()
    # The older interface writes these two and cannot say "none" (not set), which they start as.
    fine = [
        (backend, backend.fp32_precision)
        for backend in (backends.cuda.matmul, backends.mkldnn.matmul)
    ]
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        for backend, precision in fine:
            backend.fp32_precision = precision


class Tf32(Plugin):
    summary = "Float32 matrix products on tensor cores, with a 10-bit mantissa"
    stage = Stage.SURGERY
    claim = Claim.ROUNDING
    tolerance = 1e-2
    tries = Tries()

    def supports(self, machine: Machine) -> Support:
        if machine.kind != "cuda":
            return Support.no("TF32 is a number format of NVIDIA GPUs")
        import torch

        major, minor = torch.cuda.get_device_capability(machine.device)
        if torch.version.hip or (major, minor) < FIRST_WITH_TF32:
            return Support.no(
                f"TF32 needs an NVIDIA GPU of capability 8.0, this is {major}.{minor}"
            )
        return Support.yes()

    def setup(self, context: Context) -> None:
        context.enter(tf32_matmul())
