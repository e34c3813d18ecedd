"""Plugins of a made-up foreign package, each with one thing wrong or slow for `bench` to see."""

from __future__ import annotations

import itertools
import os
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from gptfast.optim import PlainStepper
from gptfast.plugin import Claim, Machine, Parts, Plugin, Profile, Stepped, Stepper, Support, Want

sys.stdout.write("noise on stdout while it is imported\n")

STEP_S = 0.1


class Paced(Plugin):
    """Makes every step last 100 ms, the first 3 s more, talks meanwhile and fails at the end."""

    claim = Claim.EXACT

    def setup(self, context: Any) -> None:
        context.note("paces")

    def micro_scope(self, last: bool) -> AbstractContextManager[object]:
        self.start = time.perf_counter()
        return nullcontext()

    def step(self, event: Stepped) -> Want:
        sys.stdout.write('{"failed": "noise that looks like an answer"}\n')
        sys.stdout.flush()
        if event.step == 1:
            time.sleep(3.0)
        time.sleep(max(0.0, self.start + STEP_S - time.perf_counter()))
        return Want.NOTHING

    def teardown(self) -> None:
        raise RuntimeError("no last words")


class EverySecond(PlainStepper):
    def __init__(self) -> None:
        self.calls = 0

    def backward(self, loss: torch.Tensor) -> None:
        self.calls += 1
        if self.calls % 2:
            super().backward(loss)


class Half(Plugin):
    """Fast, because it skips every second backward pass."""

    claim = Claim.ROUNDING
    tolerance = 1e-3

    def build_stepper(self) -> Stepper:
        return EverySecond()


class Hungry(Plugin):
    """Runs out of memory at step 4."""

    claim = Claim.EXACT

    def step(self, event: Stepped) -> Want:
        if event.step == 4:
            raise MemoryError("17 TiB")
        return Want.NOTHING


class Dying(Plugin):
    """Takes the process with it at step 2."""

    claim = Claim.EXACT

    def step(self, event: Stepped) -> Want:
        if event.step == 2:
            os.write(2, b"segmentation fault or so\n")
            os._exit(7)
        return Want.NOTHING


class Hanging(Plugin):
    """Never ends its second step, nor does its child."""

    claim = Claim.EXACT

    def step(self, event: Stepped) -> Want:
        if event.step == 2:
            child = os.fork()
            if child:
                Path("child.pid").write_text(str(child))
            time.sleep(1000)
        return Want.NOTHING


class Elsewhere(Plugin):
    """Not for this machine."""

    claim = Claim.EXACT

    def supports(self, machine: Machine) -> Support:
        return Support.no("needs a quantum computer")


class Shrinking(Plugin):
    """Fails its second step, and knows that half the micro-batch would do."""

    claim = Claim.EXACT

    def ready(self, parts: Parts) -> None:
        calls = itertools.count(1)

        def fail_in_the_second(model: torch.nn.Module, arguments: Any) -> None:
            if next(calls) == 2:
                raise RuntimeError("too much at once")

        parts.model.register_forward_pre_hook(fail_in_the_second)

    def recover(self, error: BaseException, profile: Profile) -> Profile | None:
        return profile.replace({"train.micro_batch": 2})
