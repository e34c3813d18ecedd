"""cuDNN times its algorithms once for each shape and keeps the fastest.

What: `torch.backends.cudnn.benchmark = True`.
Helps: convolutions of fixed shape. A GPT has none, so the honest expectation is no difference: it
is here because it is often recommended, and `bench` shows what it brings.
Costs: some milliseconds at the first call of each shape; the choice may differ between runs.
Claim: rounding, within 1e-3 of the baseline's loss: another algorithm adds in another order.
Source: https://docs.pytorch.org/docs/stable/backends.html#torch.backends.cudnn.torch.backends.cudnn.benchmark
"""

from __future__ import annotations

from typing import Any

from gptfast.plugin import Claim, Context, Machine, Plugin, Stage, Support, Tries


class CudnnBenchmark(Plugin):
    summary = "cuDNN picks the fastest algorithm for each shape by trying"
    stage = Stage.SURGERY
    claim = Claim.ROUNDING
    tolerance = 1e-3
    tries = Tries()

    def supports(self, machine: Machine) -> Support:
        if machine.kind != "cuda":
            return Support.no("cuDNN is a library for NVIDIA GPUs")
        import torch

        cudnn: Any = torch.backends.cudnn  # torch leaves it untyped
        if not cudnn.is_available():
            return Support.no("this build of torch has no cuDNN")
        return Support.yes(f"cuDNN {cudnn.version()}")

    def setup(self, context: Context) -> None:
        from torch.backends import cudnn

        context.setattr(cudnn, "benchmark", True)
