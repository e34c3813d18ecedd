"""What belongs to the whole process: switches, random state, threads, children.

The contract check reads it before and after a run; a run leaves it as it was.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gptfast.device.randomness import random_state
from gptfast.errors import STOP_SIGNALS
from gptfast.plugin import Machine


def process_state(machine: Machine) -> dict[str, Any]:
    """Every process-wide switch that a plugin may be tempted to turn, by name."""
    backends: Any = torch.backends  # torch leaves parts of it untyped
    cuda, cudnn = backends.cuda, backends.cudnn
    state: dict[str, Any] = {
        "torch.get_default_dtype()": torch.get_default_dtype(),
        "torch.get_default_device()": torch.get_default_device(),
        "torch.get_num_threads()": torch.get_num_threads(),
        "torch.is_grad_enabled()": torch.is_grad_enabled(),
        "torch.is_inference_mode_enabled()": torch.is_inference_mode_enabled(),
        "torch.is_anomaly_enabled()": torch.is_anomaly_enabled(),
        "torch.get_deterministic_debug_mode()": torch.get_deterministic_debug_mode(),
        "torch.backends.cudnn.enabled": cudnn.enabled,
        "torch.backends.cudnn.benchmark": cudnn.benchmark,
        "torch.backends.cudnn.benchmark_limit": cudnn.benchmark_limit,
        "torch.backends.cudnn.deterministic": cudnn.deterministic,
        "reduced fp16 sums": cuda.matmul.allow_fp16_reduced_precision_reduction,
        "reduced bf16 sums": cuda.matmul.allow_bf16_reduced_precision_reduction,
        "flash attention": cuda.flash_sdp_enabled(),
        "memory-efficient attention": cuda.mem_efficient_sdp_enabled(),
        "math attention": cuda.math_sdp_enabled(),
        "cudnn attention": cuda.cudnn_sdp_enabled(),
        "flash implementation": torch.nn.attention.current_flash_attention_impl(),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "generators": generators(machine),
        "environment": _environment(),
        "current folder": Path.cwd(),
    }
    # One API of the two that torch has for TF32: reading the older one after a switch of the newer
    # raises. "none" means what stands above it, which is "ieee" unless changed.
    for name, owner in {
        "torch.backends": backends,
        "torch.backends.cuda.matmul": cuda.matmul,
        "torch.backends.cudnn.conv": cudnn.conv,
        "torch.backends.cudnn.rnn": cudnn.rnn,
        "torch.backends.mkldnn.matmul": backends.mkldnn.matmul,
    }.items():
        precision = owner.fp32_precision
        state[f"{name}.fp32_precision"] = "ieee" if precision == "none" else precision
    for kind in {"cpu", machine.kind}:
        state[f"autocast on {kind}"] = torch.is_autocast_enabled(kind)
        state[f"autocast dtype on {kind}"] = torch.get_autocast_dtype(kind)
    for number in STOP_SIGNALS:
        state[f"handler of {number.name}"] = signal.getsignal(number)
    return state


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """`name old -> new` of each entry that is not as it was."""
    return [
        f"{name} {_shown(before[name])} -> {_shown(after[name])}"
        for name in before
        if after[name] != before[name]
    ]


def generators(machine: Machine) -> str:
    """Every global generator's state, as text that compares."""
    state = random_state(machine.device)
    tensors = [state["torch"], state["numpy"]["state"]["key"]]
    tensors += [state[kind] for kind in ("cuda", "mps") if kind in state]
    position = state["numpy"]["state"]["pos"]
    return repr([*(tensor.tolist() for tensor in tensors), position, random.getstate()])


def _environment() -> dict[str, str]:
    """The environment, without what torch's compiler sets for itself when it is imported."""
    return {key: text for key, text in os.environ.items() if "TORCHINDUCTOR" not in key}


def running_helpers() -> set[str]:
    """Threads and child processes that this process runs."""
    threads = {f"thread {t.name} ({t.ident})" for t in threading.enumerate()}
    return threads | {f"process {p.name} ({p.pid})" for p in multiprocessing.active_children()}


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
