"""Texts, data files and stand-in tokenizers for the tests of `gptfast.data`."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from numpy.typing import NDArray

from gptfast.data.prepare.prepare import Prepared, PrepareOptions, prepare
from gptfast.data.store import Store

INPUTS = Path(__file__).parent / "inputs"
TEXT = INPUTS / "text"
HDF5 = INPUTS / "hdf5"


def tiny_shakespeare(folder: Path) -> Path:
    """The original, unpacked into `folder`."""
    path = folder / "tinyshakespeare.txt"
    path.write_bytes(gzip.decompress((INPUTS / "tinyshakespeare.txt.gz").read_bytes()))
    return path


def prepared(folder: Path, *sources: Path | str, **options: Any) -> tuple[Prepared, Store]:
    """A data file in `folder`, through the real functions; `options` are those of `prepare` too."""
    told = {name: options.pop(name) for name in ("progress", "note", "tell") if name in options}
    result = prepare(sources, PrepareOptions(**options), out=folder / "corpus.h5", **told)
    return result, Store.open(result.path)


@dataclass(frozen=True)
class Spent:
    """What a process of its own took to prepare a text in bytes."""

    n_tokens: int
    peak_kb: int
    """Most memory at a time."""
    written: int
    """Bytes written, to files and pipes."""


SPENDS = """
import json
import sys
from pathlib import Path
from gptfast.data.prepare.prepare import PrepareOptions, prepare

text, out, proc = *map(Path, sys.argv[1:]), Path("/proc/self")
options = PrepareOptions(tokenizer="bytes", force=True, workers=2)
made = prepare([text], options, out=out)
spent = {
    "n_tokens": made.train.n_tokens + made.val.n_tokens,
    "peak_kb": int((proc / "status").read_text().split("VmHWM:")[1].split()[0]),
    "written": int((proc / "io").read_text().split("wchar:")[1].split()[0]),
}
print(json.dumps(spent))
"""
needs_proc = pytest.mark.skipif(
    not Path("/proc/self/io").exists(), reason="needs /proc to count what a process takes"
)


def spent(text: Path, out: Path) -> Spent:
    """Prepare `text` into `out`; for a test that `needs_proc`."""
    ran = subprocess.run(
        [sys.executable, "-c", SPENDS, text, out], capture_output=True, text=True, check=True
    )
    return Spent(**json.loads(ran.stdout))


def stored_ids(store: Store) -> list[int]:
    """All ids of the file, train before val."""
    return [i for split in store.splits for i in store.tokens(split)[:].tolist()]


def write_foreign(path: Path, ids: Sequence[int] | NDArray[Any], **options: Any) -> Path:
    with h5py.File(path, "w") as file:
        file.create_dataset("tokens", data=np.asarray(ids), **options)
    return path


class WordTokenizer:
    """Ids spelt out in the text: `70000 5` is [70000, 5]. It fails as it is told to."""

    name = "words"
    eot_id: int | None = None
    needs_whole_documents = False

    def __init__(self, vocab_size: int, *, failure: BaseException | None = None) -> None:
        self.vocab_size = vocab_size
        self._failure = failure

    def encode(self, text: str) -> NDArray[np.uint32]:
        if "fail" in text and self._failure is not None:
            raise self._failure
        return np.array([int(word) for word in text.split()], dtype=np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return self.decode(ids).encode()

    def pieces(self, ids: Iterable[int]) -> Iterator[str]:
        return (self.decode([i]) for i in ids)

    def token_bytes(self) -> NDArray[np.int64]:
        return np.ones(self.vocab_size, dtype=np.int64)

    def definition(self) -> dict[str, Any]:
        return {"kind": "words", "name": self.name}


def command(
    *args: object, folder: Path, stdin: bytes = b"", **environ: str
) -> subprocess.CompletedProcess[bytes]:
    """`gptfast prepare` in a process of its own, in `folder`."""
    return subprocess.run(
        [sys.executable, "-m", "gptfast", "prepare", *map(str, args)],
        cwd=folder,
        input=stdin,
        capture_output=True,
        env={**os.environ, **environ},
        timeout=120,
    )


def only(folder: Path, *names: str) -> bool:
    """Whether `folder` holds just these, hidden ones counted."""
    return sorted(path.name for path in folder.iterdir()) == sorted(names)
