"""What other packages say unasked."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def unlogged_warnings() -> Iterator[None]:
    """Inside, warnings that are logged go nowhere: what a package lacks, told on import, say."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        yield
    finally:
        logging.disable(before)
