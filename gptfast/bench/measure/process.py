"""The parent's end of a worker: start it, ask it, and end it with all that it started."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from gptfast.bench.measure.messages import (
    Built,
    Lap,
    MachineFacts,
    Operator,
    Phases,
    RungFailed,
    parse,
)
from gptfast.errors import GptfastError, Refused
from gptfast.profile import Profile

POLL_S = 0.5
FAREWELL_S = 5.0
"""How long a worker may take over its plugins' last words."""


class WorkerProcess:
    """One worker, in a process group of its own. A context: leaving it ends the group.

    Args:
        scratch: an existing folder for its compile caches and what it prints.
    """

    def __init__(self, scratch: Path) -> None:
        self._log = scratch / "stderr.txt"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "gptfast.bench.measure.worker", str(scratch)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                encoding="utf-8",
                # Ctrl-C is for the parent alone, and the group is what it kills.
                start_new_session=True,
            )
        self._closed = False
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(farewell_s=FAREWELL_S if error is None else 0.0)

    # what it can be asked ------------------------------------------------------------------

    def machine(self, profile: Profile, *, device: str, patience_s: float) -> MachineFacts:
        """Check device and data, measure the matmul peak.

        Raises:
            GptfastError: the run that the profile asks for is impossible here; Refused before work.
        """
        request = {"do": "machine", "profile": profile.model_dump(mode="json"), "device": device}
        return parse(MachineFacts, self._ask_first(request, patience_s))

    def peak(self, *, device: str, patience_s: float) -> float:
        """The matmul peak as it is now, in FLOP/s.

        Raises:
            RungFailed: as of `advance`.
        """
        answer = self._must(self._ask({"do": "peak", "device": device}, patience_s))
        return parse(float, answer["flops"])

    def supports(self, profile: Profile, *, device: str, patience_s: float) -> dict[str, str]:
        """The plugins of the profile that this machine does not support, with the reasons.

        Raises:
            GptfastError: the question could not be answered.
        """
        request = {"do": "supports", "profile": profile.model_dump(mode="json"), "device": device}
        return parse(dict[str, str], self._ask_first(request, patience_s)["skipped"])

    def build(
        self, profile: Profile, *, device: str, plugin: str | None, bare: bool, patience_s: float
    ) -> Built:
        """Build the rung's trainer; `plugin` is the one that it adds.

        Args:
            bare: the hand-written loop instead of the trainer.

        Raises:
            RungFailed: it cannot be built here.
        """
        request = {
            "do": "build",
            "profile": profile.model_dump(mode="json"),
            "device": device,
            "plugin": plugin,
            "bare": bare,
        }
        return parse(Built, self._must(self._ask(request, patience_s)))

    def advance(self, steps: int, *, lead_in: int, patience_s: float) -> Lap:
        """`lead_in` steps before the clock, then `steps` on it.

        Raises:
            RungFailed: an error, the end of the process, or no answer within `patience_s`.
        """
        request = {"do": "advance", "steps": steps, "lead_in": lead_in}
        return parse(Lap, self._must(self._ask(request, patience_s)))

    def score(self, max_targets: int | None, *, patience_s: float) -> float:
        """The loss over the first `max_targets` targets of `val` (None: all), in nats.

        Raises:
            RungFailed: as of `advance`.
        """
        request = {"do": "score", "max_targets": max_targets}
        return parse(float, self._must(self._ask(request, patience_s))["loss"])

    def divide(self, steps: int, *, patience_s: float) -> Phases:
        """Do `steps` steps and see where their time goes.

        Raises:
            RungFailed: as of `advance`.
        """
        request = {"do": "divide", "steps": steps}
        return parse(Phases, self._must(self._ask(request, patience_s)))

    def profile(self, steps: int, *, trace: Path, patience_s: float) -> list[Operator]:
        """The largest operators of `steps` steps; `trace` is to be written.

        Raises:
            RungFailed: as of `advance`.
        """
        request = {"do": "profile", "steps": steps, "trace": str(trace)}
        return parse(list[Operator], self._must(self._ask(request, patience_s))["operators"])

    def hooks_us(self, *, patience_s: float) -> float:
        """What the hooks of a step cost without a plugin.

        Raises:
            RungFailed: as of `advance`.
        """
        answer = self._must(self._ask({"do": "hooks"}, patience_s))
        return parse(float, answer["microseconds"])

    def close(self, *, farewell_s: float = FAREWELL_S) -> str | None:
        """End the process: in its own time within `farewell_s`, then with its whole group.

        A second call does nothing.

        Returns:
            What failed in its last words; None: nothing did, or it had to be ended.
        """
        if self._closed:
            return None
        self._closed = True
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has gone already, with a request unread
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(farewell_s)
        failed = (self._process.poll() or 0) > 0
        _kill_group(self._process)
        self._process.wait()
        return self._obituary() if failed else None

    # the pipes -----------------------------------------------------------------------------

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)

    def _ask(self, request: dict[str, Any], patience_s: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._lost() from error
        give_up = time.monotonic() + patience_s
        ended = False
        while True:
            try:
                answer: dict[str, Any] = json.loads(self._answers.get(timeout=POLL_S))
                return answer
            except queue.Empty:
                # Once more after the end, for an answer that was still in the pipe.
                if ended:
                    raise self._lost() from None
                ended = self._process.poll() is not None
                if time.monotonic() > give_up:
                    raise RungFailed(f"no answer for {patience_s:.0f} s") from None

    def _ask_first(self, request: dict[str, Any], patience_s: float) -> dict[str, Any]:
        """Before any rung: a failure is that of the command.

        Raises:
            GptfastError: the run that the profile asks for is impossible here; Refused before work.
        """
        try:
            answer = self._ask(request, patience_s)
        except RungFailed as failure:
            raise GptfastError(f"the machine was asked what runs here: {failure}") from failure
        if "failed" in answer:
            raise (Refused if answer["exit_code"] == 2 else GptfastError)(answer["failed"])
        return answer

    def _must(self, answer: dict[str, Any]) -> dict[str, Any]:
        if "failed" in answer:
            raise RungFailed(answer["failed"], out_of_memory=answer["out_of_memory"])
        return answer

    def _lost(self) -> RungFailed:
        # Nobody but Linux kills so without having been asked: when the host has no memory left.
        killed = sys.platform != "win32" and self._process.wait() == -signal.SIGKILL
        return RungFailed(self._obituary(), out_of_memory=killed)

    def _obituary(self) -> str:
        """How the process ended, with the last line that it printed."""
        code = self._process.wait()
        how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "nothing printed")
        return f"its process ended with {how}: {last}"


def _kill_group(process: subprocess.Popen[str]) -> None:
    if sys.platform == "win32":
        process.kill()
        return
    with suppress(ProcessLookupError):  # nobody of the group is left
        os.killpg(process.pid, signal.SIGKILL)
