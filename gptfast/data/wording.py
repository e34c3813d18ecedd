"""How counts are told."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """`1 token`, `1,024 tokens`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"
