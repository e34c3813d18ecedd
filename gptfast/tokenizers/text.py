"""What every kind of tokenizer shares: arrays of ids, and text that comes in whole characters."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.uint32]

MOST_IDS = 1 << 24
"""More than any vocabulary has: an id beyond is damage, and tables of all ids are in memory."""


def whole_characters(parts: Iterable[bytes]) -> Iterator[str]:
    """The text of UTF-8 `parts` as they come; part of a character waits for the rest of it."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for part in parts:
        text = decoder.decode(part)
        if text:
            yield text
    rest = decoder.decode(b"", final=True)
    if rest:
        yield rest
