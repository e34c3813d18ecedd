"""In what state the machine is: load, clocks, temperatures, as far as it says."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
QUERY = (
    "driver_version",
    "clocks.sm",
    "clocks.max.sm",
    "temperature.gpu",
    "power.draw",
    "utilization.gpu",
)
"""Fields of nvidia-smi."""
PATIENCE_S = 10.0
GPU_SAMPLE_S = 2.0
"""Safely longer than the last moments over which nvidia-smi says how busy a GPU was."""

Run = Callable[[Sequence[str]], str]
"""Runs a program and gives what it prints."""


@dataclass(frozen=True)
class Gpu:
    """A GPU's state; None: its driver does not say."""

    driver: str
    clock_mhz: float | None
    max_clock_mhz: float | None
    temperature_c: float | None
    power_w: float | None
    busy_percent: float | None
    """Share of the last moments in which it computed, for anybody."""


@dataclass(frozen=True)
class Conditions:
    """A machine's state at one moment; None: the system does not say."""

    load_average: float
    """Over one minute."""
    cpu_mhz: float | None
    """Mean clock of the cores."""
    cpu_max_mhz: float | None
    cpu_temperature_c: float | None
    """Of the hottest sensor."""
    governor: str | None
    """Policy by which Linux chooses the clock."""
    gpu: Gpu | None


def conditions(uuid: str | None) -> Conditions:
    """The machine's state now.

    Args:
        uuid: of the GPU to ask about; None: of none.
    """
    clock = _ask(psutil, "cpu_freq")
    sensors = _ask(psutil, "sensors_temperatures") or {}
    temperatures = [reading.current for chip in sensors.values() for reading in chip]
    return Conditions(
        load_average=psutil.getloadavg()[0],
        cpu_mhz=clock.current if clock else None,
        # A virtual machine that is not told gives 0.
        cpu_max_mhz=(clock.max or None) if clock else None,
        cpu_temperature_c=max(temperatures, default=None),
        governor=GOVERNOR.read_text(encoding="ascii").strip() if GOVERNOR.exists() else None,
        gpu=gpu_state(uuid) if uuid is not None else None,
    )


def _ask(module: Any, name: str) -> Any:
    """psutil has no function for what a system never says, and fails on some that rarely do."""
    with suppress(AttributeError, NotImplementedError, OSError):
        return getattr(module, name)()
    return None


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    return done.stdout


def gpu_state(uuid: str, *, run: Run = _run) -> Gpu | None:
    """What nvidia-smi, which comes with the driver, says of a GPU; None: there is no such program.

    Source: nvidia-smi --help-query-gpu.
    """
    asked = ["nvidia-smi", f"--id={uuid}", f"--query-gpu={','.join(QUERY)}"]
    try:
        said = run([*asked, "--format=csv,noheader,nounits"])
    except (OSError, subprocess.SubprocessError):
        return None
    driver, *numbers = [cell.strip() for cell in said.splitlines()[0].split(",")]
    return Gpu(driver, *map(_number, numbers))


def _number(cell: str) -> float | None:
    """`[N/A]` and `[Not Supported]` are no numbers."""
    try:
        return float(cell)
    except ValueError:
        return None


class CpuUse:
    """Counts what other programs compute from here on, all cores together."""

    def __init__(self) -> None:
        self._all, self._ours = _busy_s(), _our_s()

    def foreign_s(self) -> float:
        """CPU seconds of others since the beginning, what a virtual machine lost included."""
        return max(0.0, (_busy_s() - self._all) - (_our_s() - self._ours))


def _busy_s() -> float:
    times = psutil.cpu_times()
    # A guest's time is in that of its host's user already.
    idle = ("idle", "iowait", "guest", "guest_nice")
    return float(sum(times) - sum(getattr(times, name, 0.0) for name in idle))


def _our_s() -> float:
    """Of this process and those that it started, such as the workers of a loader."""
    mine = psutil.Process()
    used = mine.cpu_times()
    seconds = used.user + used.system + used.children_user + used.children_system
    for child in mine.children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # ended since it was listed
            used = child.cpu_times()
            seconds += used.user + used.system
    return float(seconds)
