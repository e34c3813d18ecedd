"""`python -m gptfast`: the same as the command `gptfast`."""

import os
import sys


def main() -> int:
    """The command, from its first moment on: Ctrl-C while it is still being imported, too."""
    try:
        from gptfast.cli import main as command

        return command()
    except KeyboardInterrupt:
        os.write(2, b"gptfast: error: stopped by SIGINT\n")  # rich may not be there yet
        return 130


# Behind the guard, because a spawned worker process imports this module again.
if __name__ == "__main__":
    sys.exit(main())
