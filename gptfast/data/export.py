"""Data files written for other programs: nanoGPT, and llm.c with modded-nanogpt.

Their files have ids alone. The separators between documents stay in them, as these programs have
it; where documents begin is not said.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

from gptfast.data.foreign import GPT2, HEADER_INTS, LLAMA3, Vocabulary
from gptfast.data.nanogpt_meta import META, written_meta
from gptfast.data.prepare.progress import partial_path, sweep
from gptfast.data.store import Store
from gptfast.errors import GptfastError, Refused
from gptfast.files import sync

Format = Literal["nanogpt", "llm.c"]
Progress = Callable[[int, int, int], None]
"""Called with bytes written, bytes in all, and tokens written."""

SHARD_TOKENS = 10**8
"""What llm.c and modded-nanogpt cut their own data into."""
_MOST_SHARD_TOKENS = 2**31 - 1
"""The header counts in an int32."""
_PIECE = 1 << 22
"""Tokens copied at a time."""


@dataclass(frozen=True)
class File:
    """A token file to be written."""

    name: str
    split: str
    start: int
    """First token in the split."""
    n_tokens: int
    dtype: np.dtype[Any]
    header: bytes

    @property
    def n_bytes(self) -> int:
        return len(self.header) + self.n_tokens * self.dtype.itemsize


@dataclass(frozen=True)
class Exported:
    """Token files that were written."""

    folder: Path
    format: Format
    files: list[str]
    """Their names, that of the vocabulary too."""
    n_tokens: int
    n_bytes: int
    notes: list[str]
    """What the other program will miss, a line each."""


def export(
    store: Store,
    folder: Path,
    *,
    format: Format,
    name: str,
    shard_tokens: int = SHARD_TOKENS,
    force: bool = False,
    progress: Progress = lambda done, total, tokens: None,
) -> Exported:
    """Write the ids as another program reads them. All files appear once all are whole.

    Args:
        folder: where to; made if it is not there.
        format: "nanogpt": `train.bin`, `val.bin`, and `meta.pkl` where the vocabulary is not
            GPT-2's. "llm.c": `NAME_train.bin`, or numbered shards where a split needs several.
        name: of llm.c's files.
        shard_tokens: tokens in a shard of llm.c, at most; they are cut as equal as possible.
        force: replace files that are there.

    Raises:
        Refused: the ids do not fit the format, files are in the way, the disk has no room.
        GptfastError: it cannot be written.
    """
    meta, notes = None, _missing_splits(store)
    if format == "nanogpt":
        limit, files = 1 << 16, _nanogpt_files(store)
        meta = _meta(store, notes)
    else:
        vocabulary = _vocabulary(store)
        limit, files = vocabulary.n_ids, _llm_c_files(store, vocabulary, name, shard_tokens)
    for split in store.layout.splits.values():
        _check_fits(store, split.max_id, limit=limit)
    names = [file.name for file in files] + ([] if meta is None else [META])
    in_the_way = _in_the_way(folder, format, name)
    if in_the_way and not force:
        raise Refused(
            f"{in_the_way[0]}: is there already: use --force to replace it, or another --out"
        )
    n_bytes = sum(file.n_bytes for file in files)
    _check_room(folder, n_bytes)
    with _written_together(folder, names) as partials:
        done = tokens = 0
        for file in files:
            with partials[file.name].open("wb") as out:
                out.write(file.header)
                for piece in _pieces(store, file, limit):
                    out.write(piece.data)
                    done, tokens = done + piece.nbytes, tokens + len(piece)
                    progress(done, n_bytes, tokens)
                _sync(out)
        if meta is not None:
            with partials[META].open("wb") as out:
                out.write(meta)
                _sync(out)
    for path in in_the_way:
        if path.name not in names:
            path.unlink()
    return Exported(folder, format, names, sum(f.n_tokens for f in files), n_bytes, notes)


# what goes into which file -------------------------------------------------------------------


def _nanogpt_files(store: Store) -> list[File]:
    dtype = np.dtype("<u2")
    return [File(f"{s}.bin", s, 0, store.n_tokens(s), dtype, b"") for s in store.splits]


def _llm_c_files(store: Store, vocabulary: Vocabulary, name: str, shard_tokens: int) -> list[File]:
    """Validation has the first numbers, as in their own data."""
    cuts = {s: _cut(store.n_tokens(s), shard_tokens) for s in reversed(store.splits)}
    numbered = any(len(sizes) > 1 for sizes in cuts.values())
    files: list[File] = []
    for split, sizes in cuts.items():
        start = 0
        for size in sizes:
            number = f"_{len(files):06d}" if numbered else ""
            header = np.zeros(HEADER_INTS, dtype="<i4")
            header[:3] = vocabulary.magic, vocabulary.version, size
            files.append(
                File(
                    f"{name}_{split}{number}.bin",
                    split,
                    start,
                    size,
                    vocabulary.dtype,
                    header.tobytes(),
                )
            )
            start += size
    return files


def _cut(n_tokens: int, most: int) -> list[int]:
    """As few sizes up to `most` as it takes, equal but for one: llm.c refuses a short shard."""
    n_shards = -(-n_tokens // min(most, _MOST_SHARD_TOKENS))
    size, more = divmod(n_tokens, n_shards)
    return [size + (number < more) for number in range(n_shards)]


def _vocabulary(store: Store) -> Vocabulary:
    """Which of llm.c's the ids are of; bare ids are taken for GPT-2's, as it takes them."""
    if _is_gpt2(store) or (store.tokenizer_name is None and store.vocab_size is None):
        return GPT2
    if store.vocab_size == LLAMA3.n_ids:
        return LLAMA3
    ids = "" if store.tokenizer_name is None else f" of {store.tokenizer_name}"
    raise Refused(
        f"{store.path}: has {store.vocab_size:,} ids{ids}, and llm.c knows those of GPT-2 and of "
        f"Llama 3 ({LLAMA3.n_ids:,}) alone: prepare with --tokenizer gpt2, or use --format nanogpt"
    )


def _is_gpt2(store: Store) -> bool:
    """By the whole definition: a vocabulary of one's own may go by that name."""
    from gptfast.tokenizers.tokenizer import load_tokenizer

    assert GPT2.tokenizer is not None
    return (
        store.tokenizer_name == GPT2.tokenizer
        and store.tokenizer_definition == load_tokenizer(GPT2.tokenizer).definition()
    )


def _meta(store: Store, notes: list[str]) -> bytes | None:
    """nanoGPT takes ids without a `meta.pkl` for GPT-2's."""
    if _is_gpt2(store) or store.vocab_size is None:
        return None
    definition = store.tokenizer_definition
    if definition is not None and definition["kind"] == "chars":
        return written_meta(store.vocab_size, definition["alphabet"])
    notes.append(
        f"{META} says how many ids there are, and nanoGPT's sample.py wants characters: it cannot "
        "show text of this vocabulary"
    )
    return written_meta(store.vocab_size, None)


def _missing_splits(store: Store) -> list[str]:
    return [
        f"{store.path}: has no split {split}, which these programs want a file of"
        for split in ("train", "val")
        if split not in store.splits
    ]


# ids -----------------------------------------------------------------------------------------


def _check_fits(store: Store, largest: int | None, *, limit: int) -> None:
    if largest is not None and largest >= limit:
        raise Refused(
            f"{store.path}: holds the id {largest}, and this format has room for ids below "
            f"{limit:,}: prepare with a smaller vocabulary, as --tokenizer gpt2"
        )


def _pieces(store: Store, file: File, limit: int) -> Iterator[np.ndarray[Any, np.dtype[Any]]]:
    tokens = store.tokens(file.split)
    for at in range(file.start, file.start + file.n_tokens, _PIECE):
        ids = tokens[at : min(at + _PIECE, file.start + file.n_tokens)]
        _check_fits(store, int(ids.max()), limit=limit)
        yield np.ascontiguousarray(ids, dtype=file.dtype)


# files ---------------------------------------------------------------------------------------


def _in_the_way(folder: Path, format: Format, name: str) -> list[Path]:
    """Files of an earlier export, which would be read together with the new ones."""
    if format == "nanogpt":
        return [path for n in ("train.bin", "val.bin", META) if (path := folder / n).exists()]
    ours = re.compile(re.escape(name) + r"_(train|val)(_\d+)?\.bin")
    beside = folder.iterdir() if folder.is_dir() else ()
    return sorted(path for path in beside if ours.fullmatch(path.name))


def _check_room(folder: Path, n_bytes: int) -> None:
    standing = next(f for f in (folder, *folder.absolute().parents) if f.exists())
    if not standing.is_dir():
        raise Refused(f"{folder}: {standing} is a file, not a folder: choose another --out")
    free = shutil.disk_usage(standing).free
    if free < n_bytes:
        raise Refused(
            f"{folder}: needs {n_bytes:,} bytes, and there are {free:,}: free space or choose "
            "another --out"
        )


@contextlib.contextmanager
def _written_together(folder: Path, names: list[str]) -> Iterator[dict[str, Path]]:
    """Where to write each file; all get their names at the end, or none."""
    partials = {name: partial_path(folder / name) for name in names}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            sweep(folder / name)
        yield partials
        for name, partial in partials.items():
            partial.replace(folder / name)
        sync(folder)
    except OSError as error:
        raise GptfastError(
            f"{folder}: cannot be written ({error.strerror}): free space or choose another --out"
        ) from error
    finally:
        for partial in partials.values():
            partial.unlink(missing_ok=True)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
