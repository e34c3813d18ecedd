"""What every test is given, and what no test may leave behind."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from gptfast.errors import STOP_SIGNALS


def pytest_configure(config: pytest.Config) -> None:
    """A suite begun in the background of a script inherits an ignored SIGINT, and would hand it on
    to the commands that the tests interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


TALLIES = ("kills survived", "faults injected", "resumes compared")


@pytest.fixture
def tally(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """`tally(what, number=1)`: count what a test has just seen survived, injected or compared."""

    def tally(what: str, number: int = 1) -> None:
        assert what in TALLIES
        record_property(what, number)

    return tally


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line of what the passed tests did; properties of tests travel from xdist's workers."""
    passed = terminalreporter.stats.get("passed", [])
    done = [pair for report in passed for pair in report.user_properties]
    totals = {what: sum(n for name, n in done if name == what) for what in TALLIES}
    if any(totals.values()):
        line = ", ".join(f"{what} {number}" for what, number in totals.items())
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def inputs() -> Path:
    """The folder of hard inputs."""
    return Path(__file__).parent / "inputs"


@pytest.fixture(autouse=True, scope="session")
def imports_set_aside() -> Iterator[None]:
    """What the imports left, torch's above all, is not gone through by each collection."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="session")
def one_look_at_the_peak() -> Iterator[None]:
    """Each training looks for a quarter of a second how fast this machine multiplies; of those in
    this process the first does, and its answer serves the others."""
    from gptfast.run import session

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "measure_matmul_peak", cache(session.measure_matmul_peak))
        yield


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tiny tensors: more threads only wait for each other, and one adds in the same order always.

    For the module that says `pytestmark = pytest.mark.usefixtures("one_thread")`.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def at_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The workers of a bench are in this process, and the current folder is empty."""
    from bench_helpers import AtHand

    from gptfast.bench import ladder

    monkeypatch.setattr(ladder, "WorkerProcess", AtHand)
    monkeypatch.chdir(tmp_path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@dataclass(frozen=True)
class Switch:
    """One thing that belongs to the whole process."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves the process changed, and put back what it changed."""
    switches = _process_switches()
    if "torch" in sys.modules:
        switches += _torch_switches()
    before = [switch.read() for switch in switches]
    yield
    changed = []
    for switch, was in zip(switches, before, strict=True):
        now = switch.read()
        if now != was:
            changed.append(f"{switch.name}: {_difference(was, now)}")
            switch.write(was)
    assert not changed, f"left behind by this test: {'; '.join(changed)}"


def _difference(was: Any, now: Any) -> str:
    if not isinstance(was, dict):
        return f"{was!r} -> {now!r}"
    keys = sorted(key for key in was.keys() | now.keys() if was.get(key) != now.get(key))
    return ", ".join(f"{key} = {was.get(key)!r} -> {now.get(key)!r}" for key in keys)


def _process_switches() -> list[Switch]:
    return [
        Switch("current folder", Path.cwd, os.chdir),
        Switch("environment", _environment, _restore_environment),
        *(
            Switch(f"handler of {number.name}", _handler(number), _handle(number))
            for number in STOP_SIGNALS
        ),
    ]


FOREIGN_VARIABLES = (
    "PYTEST_CURRENT_TEST",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
)
"""Set by pytest, and by torch when its compiler is imported or at work."""


def _environment() -> dict[str, str]:
    return {key: text for key, text in os.environ.items() if key not in FOREIGN_VARIABLES}


def _restore_environment(was: dict[str, str]) -> None:
    for key in _environment().keys() - was.keys():
        del os.environ[key]
    os.environ.update(was)


def _handler(number: signal.Signals) -> Callable[[], Any]:
    return lambda: signal.getsignal(number)


def _handle(number: signal.Signals) -> Callable[[Any], object]:
    return lambda handler: signal.signal(number, handler)


def _torch_switches() -> list[Switch]:
    import torch
    from torch import backends

    return [
        _attribute("backends", backends, "fp32_precision"),
        _precision("backends.cuda.matmul", backends.cuda.matmul),
        _precision("backends.mkldnn.matmul", backends.mkldnn.matmul),
        _attribute("backends.cudnn.conv", backends.cudnn.conv, "fp32_precision"),
        _attribute("backends.cudnn", backends.cudnn, "benchmark"),
        _attribute("backends.cudnn", backends.cudnn, "deterministic"),
        Switch("default dtype", torch.get_default_dtype, torch.set_default_dtype),
        Switch("threads", torch.get_num_threads, torch.set_num_threads),
        Switch(
            "deterministic algorithms",
            torch.are_deterministic_algorithms_enabled,
            torch.use_deterministic_algorithms,
        ),
        Switch("gradients", torch.is_grad_enabled, torch.set_grad_enabled),
        Switch("flash attention", backends.cuda.flash_sdp_enabled, backends.cuda.enable_flash_sdp),
        Switch("math attention", backends.cuda.math_sdp_enabled, backends.cuda.enable_math_sdp),
        Switch(
            "memory-efficient attention",
            backends.cuda.mem_efficient_sdp_enabled,
            backends.cuda.enable_mem_efficient_sdp,
        ),
    ]


def _attribute(label: str, owner: Any, name: str) -> Switch:
    return Switch(
        f"{label}.{name}", lambda: getattr(owner, name), lambda was: setattr(owner, name, was)
    )


def _precision(label: str, owner: Any) -> Switch:
    """float32 matmul precision; "none" means what is above it, which is "ieee" unless changed."""

    def read() -> str:
        return "ieee" if owner.fp32_precision == "none" else str(owner.fp32_precision)

    return Switch(
        f"{label}.fp32_precision", read, lambda was: setattr(owner, "fp32_precision", was)
    )
