"""The errors a user can cause. Everything else is a bug and keeps its traceback.

A message is one line that says where, what was found, what is allowed, what to do.
"""

from __future__ import annotations

import signal

STOP_SIGNALS = tuple(
    signal.Signals[name]
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGXCPU")
    if name in signal.Signals.__members__
)
"""What asks a command to stop, as far as this system has it.

A terminal that goes away sends SIGHUP, a batch system SIGUSR1 or SIGXCPU before its limit.
"""


def stop_signals() -> list[signal.Signals]:
    """Those that stop this process, but for what it was told to ignore, as nohup does SIGHUP."""
    asked = (signal.SIGINT, signal.SIGTERM)
    return [n for n in STOP_SIGNALS if n in asked or signal.getsignal(n) is not signal.SIG_IGN]


class GptfastError(Exception):
    """Something failed while the command was at work. Exit code 1."""

    exit_code = 1


class Refused(GptfastError):
    """The command was refused before any work: usage, profile or input. Exit code 2."""

    exit_code = 2


class Stopped(GptfastError):
    """A signal stopped the command after it had saved what it had. Exit code 128 + signal."""

    def __init__(self, message: str, *, signum: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signum


def counted(number: int, noun: str) -> str:
    """`1 token`, `1,024 tokens`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"
