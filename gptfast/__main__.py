"""`python -m gptfast`: the same as the command `gptfast`."""

import sys

from gptfast.cli import main

# Behind the guard, because a spawned worker process imports this module again.
if __name__ == "__main__":
    sys.exit(main())
