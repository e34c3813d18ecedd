"""Everything a person sees. The only package that writes to the terminal.

- `console` what goes to stdout, what to stderr, and in which dress
- `live` a training as it goes on: the `board` with its `curve`, or plain lines
- `progress` of a `prepare`
- `plot` runs, `ladder` a bench, each as a picture and with characters
- `text` numbers and control characters
"""

from gptfast.console.console import Console, Look

__all__ = ["Console", "Look"]
