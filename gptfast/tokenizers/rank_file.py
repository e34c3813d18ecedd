"""`.tiktoken` files: a token in base64 and its id on each line, and nothing else.

Such a file says neither how a text is cut into words nor which markers there are. Both are known
for OpenAI's own files by their names; any other file is cut as GPT-2 does unless another pattern is
named, and gets <|endoftext|> as its last id.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path

from gptfast.errors import Refused
from gptfast.profile import nearest
from gptfast.tokenizers.bpe import END_OF_TEXT, PATTERNS, Bpe
from gptfast.tokenizers.text import MOST_IDS

SUFFIX = ".tiktoken"

_KNOWN = {
    "r50k_base": ("gpt2", {END_OF_TEXT: 50256}),
    "p50k_base": ("gpt2", {END_OF_TEXT: 50256}),
    "cl100k_base": (
        "cl100k_base",
        {
            END_OF_TEXT: 100257,
            "<|fim_prefix|>": 100258,
            "<|fim_middle|>": 100259,
            "<|fim_suffix|>": 100260,
            "<|endofprompt|>": 100276,
        },
    ),
    "o200k_base": ("o200k_base", {END_OF_TEXT: 199999, "<|endofprompt|>": 200018}),
}
"""Source: tiktoken_ext/openai_public.py of tiktoken 0.14.0"""


def read_rank_file(path: Path, *, pattern: str | None = None) -> Bpe:
    """The tokenizer of a `.tiktoken` file.

    Args:
        pattern: whose way of cutting a text into words, a key of `PATTERNS`; None: see above.

    Raises:
        Refused: it cannot be read, is damaged, lacks a byte, or the pattern is not known.
    """
    if pattern not in (None, *PATTERNS):
        raise Refused(f"{path}:{pattern}: no such pattern: {nearest(str(pattern), PATTERNS)}")
    ranks = _ranks(path)
    usual, special_tokens = _KNOWN.get(path.stem, ("gpt2", {}))
    if not special_tokens:
        end = ranks.pop(END_OF_TEXT.encode(), None)
        special_tokens = {END_OF_TEXT: max(ranks.values()) + 1 if end is None else end}
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise Refused(
            f"{path}: has no token for byte 0x{missing[0]:02x} ({len(missing)} bytes are missing), "
            "so it cannot encode every text: use a byte-level vocabulary, which has all 256"
        )
    taken = {rank: token for token, rank in ranks.items()}
    for marker, number in special_tokens.items():
        if number in taken:
            raise Refused(
                f"{path}: id {number} belongs to {taken[number]!r}, but by its name {path.stem} to "
                f"the marker {marker}: fetch the file again, or give it another name"
            )
    return Bpe(
        path.stem,
        pattern=PATTERNS[pattern or usual],
        ranks=ranks,
        special_tokens=special_tokens,
    )


def _ranks(path: Path) -> dict[bytes, int]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise Refused(f"{path}: cannot be read ({error.strerror}): name another file") from error
    ranks: dict[bytes, int] = {}
    ids: set[int] = set()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
            ids.add(int(rank))
        except (ValueError, binascii.Error):
            raise Refused(
                f"{path}: line {number}: is not a token in base64 and its id, but "
                f"{line[:40].decode('utf-8', 'replace')!r}: fetch the file again"
            ) from None
        if not 0 <= int(rank) < MOST_IDS:
            raise Refused(
                f"{path}: line {number}: gives the id {int(rank)}, which must be in [0, "
                f"{MOST_IDS}): fetch the file again"
            )
        if len(ranks) != len(ids):
            raise Refused(
                f"{path}: line {number}: gives a token or an id that stands above already: fetch "
                "the file again"
            )
    if not ranks:
        raise Refused(f"{path}: is empty, a vocabulary has at least 256 tokens: fetch it again")
    return ranks
