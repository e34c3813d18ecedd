"""Attention by torch's fused kernels, which never write the T x T scores to memory.

What: the model calls `scaled_dot_product_attention`; torch picks a kernel, or `backend` names one.
torch's own kernel of kind "flash" is FlashAttention 2. Where a package with FlashAttention 3 (for
Hopper) or 4 (Hopper, Blackwell) is installed, `implementation` puts that in its place.
Helps: everywhere, the more the longer the context: memory of attention grows with T, not T * T.
Costs: nothing. "flash" and "cudnn" on CUDA take half precision only: use them with `amp`. With
dropout, other random numbers are drawn than by attention written out, and FlashAttention 3 and 4,
which know no dropout, are left alone.
Claim: rounding, within 0.5 % of the baseline's loss: the softmax is summed block by block.

A build of FlashAttention without code for the card at hand loads, and ends the process at its first
launch (https://github.com/karpathy/nanochat/issues/820). So it is tried in a process of its own.
Source: Dao et al. 2022, FlashAttention;
https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html
https://docs.pytorch.org/docs/stable/generated/torch.nn.attention.activate_flash_attention_impl.html
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from gptfast.plugin import (
    Claim,
    Context,
    Machine,
    Options,
    Plugin,
    Profile,
    Refused,
    Stage,
    Support,
    Tries,
)

if TYPE_CHECKING:
    import torch

Backend = Literal["auto", "flash", "efficient", "cudnn", "math"]
HALF_ONLY = ("flash", "cudnn")
"""Backends that on CUDA take no float32."""

Implementation = Literal["FA3", "FA4"]
PACKAGES: dict[Implementation, str] = {"FA3": "flash_attn_interface", "FA4": "flash_attn/cute"}
"""Where each is looked for, as torch does."""
CARDS: dict[int, tuple[Implementation, ...]] = {9: ("FA3", "FA4"), 10: ("FA4",)}
"""What a card of a major compute capability can run, the one to prefer first."""
PATIENCE_S = 120
"""A trial of FA4 compiles its kernels first."""
TRIAL = """
import sys
import torch
from torch.nn.attention import SDPBackend, activate_flash_attention_impl, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

def attend(kernel):
    heads = torch.linspace(-1, 1, 2 * 128 * 64, device=sys.argv[2]).reshape(1, 2, 128, 64)
    heads = heads.bfloat16().requires_grad_()
    with sdpa_kernel(kernel):
        out = scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    out.float().square().sum().backward()
    return out, heads.grad

expected = attend(SDPBackend.MATH)
activate_flash_attention_impl(sys.argv[1])
found = attend(SDPBackend.FLASH_ATTENTION)
torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
"""
"""Forward and backward pass of an implementation, compared with attention written out."""


def is_installed(implementation: Implementation) -> bool:
    """Whether its package is there; nothing of it is imported."""
    package, _, part = PACKAGES[implementation].partition("/")
    spec = find_spec(package)
    if spec is None or not part:
        return spec is not None
    return any((Path(place) / part).is_dir() for place in spec.submodule_search_locations or ())


def fault(implementation: Implementation, device: str) -> str | None:
    """Why it does not work on a device, in one line; None: it does."""
    try:
        tried = subprocess.run(
            [sys.executable, "-c", TRIAL, implementation, device],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {PATIENCE_S} s"
    if tried.returncode == 0:
        return None
    said = tried.stderr.strip().splitlines()
    return said[-1] if said else f"it ended with code {tried.returncode}"


def use(implementation: Implementation, context: Context) -> None:
    """Have torch's flash kernel be this one until the run ends."""
    from torch.nn import attention

    before = attention.current_flash_attention_impl()

    def put_back() -> None:
        attention.restore_flash_attention_impl()
        if before is not None:
            attention.activate_flash_attention_impl(before)

    context.undo(put_back)
    attention.activate_flash_attention_impl(implementation)


def attention_backend(backend: Backend) -> AbstractContextManager[object]:
    """Inside, `scaled_dot_product_attention` uses this kernel or fails; "auto": torch's choice."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if backend == "auto":
        return nullcontext()
    kernels = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "math": SDPBackend.MATH,
    }
    scope: AbstractContextManager[object] = sdpa_kernel(kernels[backend])
    return scope


class FlashOptions(Options):
    backend: Backend = "auto"
    """Kernel of torch's attention: flash, efficient, cudnn or math; auto: torch's choice."""
    implementation: Literal["auto", "default", "FA3", "FA4"] = "auto"
    """FlashAttention 3 or 4 as the flash kernel; auto: where installed and working on this card."""


class Flash(Plugin):
    summary = "Fused attention: no T x T matrix in memory"
    stage = Stage.SURGERY
    claim = Claim.ROUNDING
    tolerance = 5e-3
    tries = Tries(backend=("auto", "flash", "efficient", "cudnn", "math"))
    Options = FlashOptions

    _implementation: Implementation | None = None
    """That which `supports` has found to work here."""

    def supports(self, machine: Machine) -> Support:
        import warnings

        import torch

        backend = self.options.backend
        half_only = machine.kind == "cuda" and backend in HALF_ONLY
        dtype = torch.float16 if half_only else torch.float32
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns of each kernel that it passes over
                _launch(machine, backend, dtype)
        except RuntimeError as error:
            return Support.failed(f'a trial of backend = "{backend}"', error, instead='use "auto"')
        return self._find_implementation(machine, "in half precision" if half_only else "")

    def _find_implementation(self, machine: Machine, how: str) -> Support:
        asked = self.options.implementation
        if asked == "default" or (asked == "auto" and machine.kind != "cuda"):
            return Support.yes(how)
        faults = []
        for implementation in runnable(machine) if asked == "auto" else (asked,):
            if asked == "auto" and not is_installed(implementation):
                continue
            why = reason_against(implementation, machine)
            if why is None:
                self._implementation = implementation
                return Support.yes(implementation)
            faults.append(f"{implementation}: {why}")
        if asked != "auto":
            return Support.no(f'{faults[0]}: set plugins.flash.implementation = "auto"')
        return Support.yes("; ".join(["torch's own kernels", *faults]) if faults else how)

    def configure(self, profile: Profile) -> Profile:
        return profile.replace({"model.attention": "sdpa"})

    def setup(self, context: Context) -> None:
        backend = self.options.backend
        if (
            context.machine.kind == "cuda"
            and backend in HALF_ONLY
            and "amp" not in context.profile.plugins
        ):
            raise Refused(
                f'plugins.flash.backend = "{backend}" takes half precision only: switch amp on or '
                'use "auto"'
            )
        if self._implementation is None:
            return
        dropout = context.profile.model.dropout
        if dropout > 0:
            context.note(
                f"flash leaves {self._implementation} alone: it knows no dropout "
                f"(model.dropout = {dropout})"
            )
        else:
            use(self._implementation, context)

    def forward_scope(self) -> AbstractContextManager[object]:
        return attention_backend(self.options.backend)


def runnable(machine: Machine) -> tuple[Implementation, ...]:
    """What torch would let this card run."""
    import torch

    if machine.kind != "cuda" or torch.version.hip:
        return ()
    return CARDS.get(torch.cuda.get_device_capability(machine.device)[0], ())


def reason_against(implementation: Implementation, machine: Machine) -> str | None:
    """Why an implementation is not used here; None: it can be."""
    if implementation not in runnable(machine):
        return f"{machine.name} cannot run it"
    if not is_installed(implementation):
        return f"{PACKAGES[implementation].replace('/', '.')} is not installed"
    return fault(implementation, str(machine.device))


def _launch(machine: Machine, backend: Backend, dtype: torch.dtype) -> None:
    import torch

    heads = torch.zeros(1, 1, 64, 64, device=machine.device, dtype=dtype, requires_grad=True)
    with attention_backend(backend):
        out = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    out.sum().backward()  # type: ignore[no-untyped-call]  # torch's own
