"""nanoGPT's `meta.pkl`, which holds the vocabulary of its `train.bin`, read without running it.

A pickle is a program: one that names a class or function can do anything while it is loaded. A
table of characters needs none of that, so a file with any instruction beyond those for dicts,
lists, tuples, strings and whole numbers is refused before the first of them is followed.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import reprlib
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from gptfast.errors import Refused
from gptfast.tokenizers.text import MOST_IDS

META = "meta.pkl"
PROTOCOL = 4
"""What nanoGPT's own `pickle.dump` writes on Python 3.8 to 3.13; a later Python reads it too."""

_LARGEST = 1 << 25
"""Bytes; all 1.1 million characters of Unicode take less."""
_MOST_TUPLES = 1 << 16
"""More than the merges of any table; three times as many, one in the other, take the process down
when they are hashed as a key."""
_PLAIN = frozenset(
    {
        *("PROTO", "FRAME", "STOP", "MARK"),
        *("MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "GET", "BINGET", "LONG_BINGET"),
        *("EMPTY_DICT", "DICT", "SETITEM", "SETITEMS"),
        *("EMPTY_LIST", "LIST", "APPEND", "APPENDS"),
        *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
        *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE"),
        *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1"),
        *("NONE", "NEWTRUE", "NEWFALSE"),
    }
)
"""Instructions that make plain values, by their names in `pickletools`."""
_DAMAGE = (
    pickle.UnpicklingError,
    ValueError,
    TypeError,
    AttributeError,
    IndexError,
    EOFError,
)
"""What a pickle of plain instructions that make no sense together raises."""


@dataclass(frozen=True)
class Meta:
    """What `meta.pkl` says about the ids."""

    vocab_size: int | None
    alphabet: str | None
    """The character of each id; None: its tokens are not single characters."""


def read_meta(path: Path) -> Meta:
    """The vocabulary in a `meta.pkl`.

    Raises:
        Refused: it cannot be read, would run something, or holds no vocabulary.
    """
    try:
        size = path.stat().st_size
        content = path.read_bytes() if size <= _LARGEST else b""
    except OSError as error:
        raise Refused(f"{path}: cannot be read ({error.strerror})") from error
    if size > _LARGEST:
        raise Refused(f"{path}: has {size:,} bytes, more than any table of characters: {_AWAY}")
    meta = _unpickled(content, path)
    if not isinstance(meta, dict):
        raise Refused(f"{path}: holds a {type(meta).__name__}, not a dict: {_AWAY}")
    letters = _letters(meta.get("itos"))
    vocab_size = meta.get("vocab_size", letters and len(letters))
    if type(vocab_size) is not int or not 1 <= vocab_size <= MOST_IDS:
        raise Refused(f"{path}: has no vocab_size that is a number of ids: {_AWAY}")
    whole = letters is not None and len(letters) == vocab_size
    return Meta(vocab_size, "".join(letters) if letters and whole else None)


def written_meta(vocab_size: int, alphabet: str | None) -> bytes:
    """A `meta.pkl` as nanoGPT's `data/shakespeare_char/prepare.py` makes it.

    Args:
        alphabet: the character of each id; None: only the size is told, which nanoGPT's train.py
            takes and its sample.py does not.
    """
    meta: dict[str, Any] = {"vocab_size": vocab_size}
    if alphabet is not None:
        meta["itos"] = dict(enumerate(alphabet))
        meta["stoi"] = {character: i for i, character in enumerate(alphabet)}
    return pickle.dumps(meta, protocol=PROTOCOL)


_AWAY = "make it again with nanoGPT's prepare.py, or move it away and set model.vocab_size"


class _Plain(pickle.Unpickler):
    """Would refuse, were the list of instructions ever wrong."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"{module}.{name} is asked for")


def _unpickled(content: bytes, path: Path) -> object:
    n_tuples = 0
    try:
        for instruction, value, _ in pickletools.genops(content):
            if instruction.name not in _PLAIN:
                said = "" if value is None else f" {reprlib.repr(value)}"
                raise Refused(
                    f"{path}: is more than a table of characters, loading it could run code "
                    f"({instruction.name}{said}), so it is not loaded: {_AWAY}"
                )
            # The place in a table that is made as large as the number says.
            if "PUT" in instruction.name and isinstance(value, int) and value > len(content):
                raise ValueError(f"{instruction.name} {value}")
            n_tuples += "TUPLE" in instruction.name
            if n_tuples > _MOST_TUPLES:
                raise ValueError(f"more than {_MOST_TUPLES:,} tuples")
        return _Plain(io.BytesIO(content)).load()
    except _DAMAGE as error:
        raise Refused(f"{path}: is damaged or no pickle ({error}): {_AWAY}") from error


def _letters(itos: object) -> list[str] | None:
    """The characters that ids 0, 1, ... stand for, where all are distinct single characters."""
    if isinstance(itos, Mapping):
        if set(itos) != set(range(len(itos))):
            return None
        itos = [itos[i] for i in range(len(itos))]
    if not isinstance(itos, Sequence) or isinstance(itos, str):
        return None
    letters = [letter for letter in itos if isinstance(letter, str) and _is_letter(letter)]
    return letters if len(set(letters)) == len(itos) else None


def _is_letter(text: str) -> bool:
    """One character that text in UTF-8 can have."""
    return len(text) == 1 and unicodedata.category(text) != "Cs"
