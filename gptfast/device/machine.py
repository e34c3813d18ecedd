"""The device under the run: which one, how fast it multiplies, how much memory it uses."""

from __future__ import annotations

import platform
import sys
import time
from pathlib import Path

import torch

from gptfast.device.place import ALONE, Place
from gptfast.errors import Refused
from gptfast.plugin import Machine


def find_machine(device: str = "auto", *, place: Place = ALONE) -> Machine:
    """The machine for `--device`: cuda, then mps, then cpu for "auto".

    Of several processes each gets the GPU of its number, unless `device` names one.

    Raises:
        Refused: torch sees no such device.
    """
    available = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if device == "auto":
        device = next(kind for kind, there in available.items() if there)
    kind, _, index = device.partition(":")
    if not available.get(kind, False):
        there = ", ".join(kind for kind, is_there in available.items() if is_there)
        raise Refused(
            f"--device {device}: torch {torch.__version__} sees no such device: use auto or {there}"
        )
    if kind == "cuda":
        chosen = torch.device("cuda", int(index or place.local_rank))
        name = torch.cuda.get_device_name(chosen)
        return Machine(chosen, name, place.rank, place.world)
    name = _cpu_name() if kind == "cpu" else "Apple GPU"
    return Machine(torch.device(kind), name, place.rank, place.world)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def peak_dtype(device: torch.device) -> torch.dtype:
    """In which a device multiplies fastest: bfloat16, float16 before Ampere, float32 on a CPU."""
    if device.type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.is_bf16_supported(False) else torch.float16


def measure_matmul_peak(
    device: torch.device, dtype: torch.dtype, *, seconds: float = 0.25
) -> float:
    """FLOP/s of the fastest large matmul seen within `seconds` after one warm-up.

    Measured, not looked up: a table of cards is wrong for the card that is not in it.
    """
    size = 8192 if device.type == "cuda" else 1024
    a = torch.randn(size, size, device=device, dtype=dtype)
    b = torch.randn(size, size, device=device, dtype=dtype)
    out = torch.empty(size, size, device=device, dtype=dtype)
    torch.mm(a, b, out=out)
    synchronize(device)
    best = float("inf")
    end = time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        torch.mm(a, b, out=out)
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def peak_memory_bytes(device: torch.device) -> int | None:
    """Most memory used so far: of the device's allocator, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    if sys.platform == "win32":
        return None
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
