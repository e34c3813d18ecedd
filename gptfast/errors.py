"""The errors a user can cause. Everything else is a bug and keeps its traceback.

A message is one line that says where, what was found, what is allowed, what to do.
"""

from __future__ import annotations


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
