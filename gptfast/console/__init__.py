"""Everything a person sees. The only package that writes to the terminal."""

from gptfast.console.console import Console, Look

__all__ = ["Console", "Look"]
