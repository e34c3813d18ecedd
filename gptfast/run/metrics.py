"""What the loop takes down of each step; the device is read once for all, when a log is due."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from gptfast.device.machine import peak_memory_bytes, synchronize
from gptfast.errors import GptfastError
from gptfast.model import count_parameters, flops_per_token
from gptfast.plugin import Stepped, Update
from gptfast.report import Logged
from gptfast.run.assembly import Assembly
from gptfast.run.kit import Kit


class NotFinite(GptfastError):
    """A loss or a gradient is not finite: what is in memory is no good any more."""


class MetricsLog:
    """Collects steps; `flush` reads them, writes `metrics.jsonl` and tells the listener.

    Args:
        peak_flops: measured matmul peak, for the share of it that the steps reach.
    """

    def __init__(self, built: Assembly, *, kit: Kit, peak_flops: float | None) -> None:
        self.waited = 0.0
        """Seconds spent waiting for windows since the last flush."""
        self.loss = math.nan
        """Mean over the steps of the last flush."""
        self._windows = built.windows
        self._machine = kit.machine
        self._run = kit.run
        self._listener = kit.listener
        self._plugin_metrics = kit.hooks.metrics
        self._flops_per_token = flops_per_token(
            built.profile.model, count_parameters(built.raw_model)
        )
        self._peak_flops = peak_flops
        self._skipped_steps = built.progress.step - built.progress.committed
        self.first_step_s: float | None = None
        """Seconds of this session's first step: compiling and first calls are in it."""
        self._untold_first_s: float | None = None
        self._steps: list[Stepped] = []
        self._start = time.perf_counter()

    def begin(self) -> None:
        """Steps follow: what was built before them is not their time."""
        if not self._steps:
            self._start = time.perf_counter()

    def check(self, update: Update) -> None:
        """Raises NotFinite where loss or gradient is not finite. Waits for the device."""
        self._check(update.step, update.loss.item(), update.grad_norm.item(), applied=False)

    def add(self, step: Stepped) -> None:
        self._steps.append(step)
        if self.first_step_s is None:
            # Waited for once in a session, so that compiling is no part of the steps that follow.
            synchronize(self._machine.device)
            now = time.perf_counter()
            self.first_step_s = self._untold_first_s = now - self._start
            self._start = now

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside does not count as time of the steps."""
        paused = time.perf_counter()
        yield
        self._start += time.perf_counter() - paused

    def flush(self, *, asks_plugins: bool = True) -> None:
        """Log the steps since the last time.

        Args:
            asks_plugins: for their metrics; not where an error is to be survived.

        Raises:
            NotFinite: a loss or an applied gradient is not finite; nothing is logged.
            GptfastError: a plugin's metrics are none; the steps are logged without them.
        """
        steps, self._steps = self._steps, []
        if not steps:
            return
        losses = torch.stack([step.loss for step in steps]).tolist()
        norms = torch.stack([step.grad_norm for step in steps]).tolist()
        synchronize(self._machine.device)
        now = time.perf_counter()
        seconds, self._start = now - self._start, now
        for step, loss, norm in zip(steps, losses, norms, strict=True):
            # What a stepper left out did no harm; a loss that is not finite will not recover.
            self._check(step.step, loss, norm if step.committed else 0.0, applied=step.committed)
        self.loss = sum(losses) / len(losses)
        self._skipped_steps += sum(not step.committed for step in steps)
        durations = self._durations(len(steps), seconds)
        failure: GptfastError | None = None
        values: Mapping[str, float] = {}
        try:
            values = self._plugin_metrics() if asks_plugins else {}
        except GptfastError as error:
            # The steps are done, and a checkpoint made now holds them: their log must not lack.
            failure = error
        if self._run is not None:
            records: list[dict[str, Any]] = [
                {
                    "kind": "step",
                    "step": step.step,
                    "loss": loss,
                    "grad_norm": _or_null(norm),
                    "learning_rate": step.learning_rate,
                    "tokens": step.tokens,
                    "committed": step.committed,
                    "step_ms": step_s * 1e3,
                }
                for step, loss, norm, step_s in zip(steps, losses, norms, durations, strict=True)
            ]
            # Read once for all, they are true of the last step alone.
            records[-1] |= {name: _or_null(value) for name, value in values.items()}
            self._run.log(records)
        self._listener.logged(self._record(steps, norms[-1], durations, values))
        self.waited = 0.0
        if failure is not None:
            raise failure

    def _durations(self, n_steps: int, seconds: float) -> list[float]:
        """Seconds of each step: the first of a session has its own, the others share `seconds`."""
        first_s, self._untold_first_s = self._untold_first_s, None
        if first_s is None:
            return [seconds / n_steps] * n_steps
        others = n_steps - 1
        return [first_s, *[seconds / max(1, others)] * others]

    def _record(
        self,
        steps: list[Stepped],
        grad_norm: float,
        durations: list[float],
        plugin_metrics: Mapping[str, float],
    ) -> Logged:
        last, step_s = steps[-1], durations[-1]
        # All but the first of a session, unless that is the only one, took the same.
        alike = [step.tokens for step, s in zip(steps, durations, strict=True) if s == step_s]
        tokens_per_s = sum(alike) / (len(alike) * step_s)
        return Logged(
            step=last.step,
            steps=last.steps,
            loss=self.loss,
            learning_rate=last.learning_rate,
            grad_norm=grad_norm,
            step_ms=step_s * 1e3,
            tokens_per_s=tokens_per_s * self._machine.world,
            peak_share=(
                tokens_per_s * self._flops_per_token / self._peak_flops
                if self._peak_flops is not None
                else None
            ),
            data_wait_ms=self.waited / len(steps) * 1e3,
            memory_bytes=peak_memory_bytes(self._machine.device),
            skipped_steps=self._skipped_steps,
            epoch=self._windows.order.epoch(last.step, self._windows.batch_size),
            plugin_metrics=plugin_metrics,
        )

    def _check(self, step: int, loss: float, norm: float, *, applied: bool) -> None:
        if math.isfinite(loss) and math.isfinite(norm):
            return
        starts = self._windows.starts(step).tolist()
        kept: list[int] = []
        if self._run is not None:
            kept = self._run.steps()
            self._run.log([{"kind": "not_finite", "step": step, "starts": starts}])
        shown = ", ".join(map(str, starts[:8])) + (" ..." if len(starts) > 8 else "")
        good = f"step {kept[-1]} is the newest checkpoint" if kept else "no checkpoint was kept"
        raise NotFinite(
            f"step {step}: loss {loss}, gradient norm {norm} (windows starting at tokens {shown}), "
            f"{'applied and not saved' if applied else 'not applied'}; {good}: lower "
            "train.learning_rate or set train.grad_clip and use --resume"
        )


def _or_null(value: float) -> float | None:
    """JSON has no word for what is not finite."""
    return value if math.isfinite(value) else None
