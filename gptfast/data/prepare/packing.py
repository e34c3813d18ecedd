"""The bytes of a file, a block at a time, unpacked where they are packed.

What a file is, its first bytes tell, never its name: gzip and zstd are unpacked, every member and
frame of them; what is neither text nor read here is refused by name.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterator
from typing import BinaryIO, Protocol

from gptfast.errors import Refused

BLOCK = 1 << 18
"""Bytes read at a time: enough to be worth a thread, few enough to give every thread some."""
PACKED_SUFFIXES = (".gz", ".zst")
"""What names of packed files end with."""
PARQUET = b"PAR1"
"""What a parquet file begins with."""

_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_OTHERS = {
    _GZIP: "gzip",
    _ZSTD: "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"PK\x03\x04": "zip",
    PARQUET: "parquet",
    b"\x89HDF": "HDF5",
    b"%PDF": "PDF",
}
"""What is refused inside of a packed file, or as text; the first two: packed twice."""
_TAR = slice(257, 262)
_SIP = 1 << 10
"""Packed bytes unpacked at a time: four bytes of zstd can stand for 128 KiB."""


class Input:
    """An open file, which is hashed while it is read."""

    def __init__(
        self, label: str, file: BinaryIO, *, ending: str | None = None, text_key: str | None = None
    ) -> None:
        self.label = label
        """As messages call it."""
        self.ending = ending
        """Of its format; None: its name tells."""
        self.text_key = text_key
        """Where the text of a row is, if the file is known to have it there."""
        self.file = file
        """For who must read it out of order."""
        self.n_bytes = 0
        self._digest = hashlib.sha256()

    def blocks(self) -> Iterator[bytes]:
        """The file from its beginning, once; afterwards its size and hash are known."""
        self.file.seek(0)
        while block := self.file.read(BLOCK):
            self._digest.update(block)
            self.n_bytes += len(block)
            yield block

    def begins_with(self, mark: bytes) -> bool:
        self.file.seek(0)
        return self.file.read(len(mark)) == mark

    def sha256(self) -> str:
        """Of the file as it lies on the disk."""
        return self._digest.hexdigest()


def unpacked(file: Input) -> Iterator[bytes]:
    """The file's contents, in blocks of the same size but the last.

    Raises:
        Refused: cut short or damaged; not text; the package that unpacks it is not installed.
    """
    if file.begins_with(_GZIP):
        members = _members(file, "gzip", lambda: zlib.decompressobj(wbits=31), zlib.error)
        contents = _in_blocks(members)
    elif file.begins_with(_ZSTD):
        contents = _in_blocks(_zstd_frames(file))
    else:
        contents = file.blocks()
    for number, block in enumerate(contents):
        if number == 0:
            _check_kind(block, file.label)
        yield block


class _Member(Protocol):
    """What unpacks one member of an archive, as zlib and zstandard have it."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, packed: bytes, /) -> bytes: ...


def _zstd_frames(file: Input) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError:
        raise Refused(
            f"{file.label}: is zstd data, which the package zstandard unpacks, and it is not "
            "installed: pip install 'gptfast[zst]'"
        ) from None
    unpacker = zstandard.ZstdDecompressor()
    return _members(file, "zstd", unpacker.decompressobj, zstandard.ZstdError)


def _members(
    file: Input, kind: str, new_member: Callable[[], _Member], damage: type[Exception]
) -> Iterator[bytes]:
    """What all members hold, one after the other."""
    member: _Member | None = None
    for packed in _sips(file.blocks()):
        while packed:
            if member is None:
                # Some programs fill up with zeros after a member.
                packed = packed.lstrip(b"\0")
                if not packed:
                    break
                member = new_member()
            try:
                yield member.decompress(packed)
            except damage as error:
                raise Refused(
                    f"{file.label}: is damaged {kind} data ({error}): fetch or pack it again"
                ) from None
            packed = member.unused_data
            if member.eof:
                member = None
    if member is not None:
        raise Refused(
            f"{file.label}: is cut short, the end of its {kind} data is missing: fetch or pack it "
            "again"
        )


def _sips(blocks: Iterator[bytes]) -> Iterator[bytes]:
    for block in blocks:
        for at in range(0, len(block), _SIP):
            yield block[at : at + _SIP]


def _in_blocks(parts: Iterator[bytes]) -> Iterator[bytes]:
    """The same bytes in blocks of one size; only the last is smaller."""
    block = bytearray()
    for part in parts:
        block += part
        while len(block) >= BLOCK:
            yield bytes(block[:BLOCK])
            del block[:BLOCK]
    if block:
        yield bytes(block)


def _check_kind(head: bytes, label: str) -> None:
    kinds = [kind for mark, kind in _OTHERS.items() if head.startswith(mark)]
    if head[_TAR] == b"ustar":
        kinds.append("tar")
    if kinds:
        raise Refused(
            f"{label}: holds {kinds[0]} data, where only text is read: unpack or convert it"
        )
