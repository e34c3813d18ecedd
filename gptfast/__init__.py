"""Train GPT-2-class language models as fast as the machine allows, and prove it.

Importing this package imports no torch: the command line must answer `--help` at once.
"""

__version__ = "0.1.0"
