"""Token files of other programs, read where they lie.

- nanoGPT: `train.bin` and `val.bin` in a folder, uint16 ids and nothing else; `meta.pkl` beside
  them has the vocabulary of characters. Without it the ids are of an unknown vocabulary.
- llm.c and modded-nanogpt: 256 int32 of header (magic, version, tokens), then uint16 ids of GPT-2
  or uint32 ids of Llama 3; one file or numbered shards: `NAME_train_000001.bin`.
- train-llm-from-scratch: HDF5 with `tokens`, int32; `NAME_train.h5` with `NAME_dev.h5` beside it.

A folder stands for all its files. A file stands for itself and for the other split beside it.

Source: nanoGPT data/*/prepare.py; llm.c dev/data/data_common.py, llmc/dataloader.h; modded-nanogpt
data/fineweb.py; train-llm-from-scratch scripts/data_preprocess.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from gptfast.data.layout import HDF5, SPLITS, Layout, Part, Split, hdf5_layout, identity
from gptfast.data.nanogpt_meta import META, Meta, read_meta
from gptfast.errors import Refused
from gptfast.files import stands

NANOGPT = "nanoGPT"
LLM_C = "llm.c"
HEADER_INTS = 256
HEADER_BYTES = 4 * HEADER_INTS


@dataclass(frozen=True)
class Vocabulary:
    """One of those that llm.c's token files know."""

    name: str
    magic: int
    version: int
    dtype: np.dtype[np.unsignedinteger]
    n_ids: int
    tokenizer: str | None
    """Which of ours it is; None: none."""


GPT2 = Vocabulary("GPT-2", 20240520, 1, np.dtype("<u2"), 50257, "gpt2")
LLAMA3 = Vocabulary("Llama 3", 20240801, 7, np.dtype("<u4"), 128256, None)
VOCABULARIES = {vocabulary.magic: vocabulary for vocabulary in (GPT2, LLAMA3)}

_OTHER_MAGICS = {
    20240326: "weights of a model",
    20240327: "a model's state for tests",
    20240328: "a tokenizer",
    20240522: "questions of an evaluation",
    20240527: "the state of an optimizer",
    20240803: "weights of a model",
}
"""What else llm.c writes into `.bin` files."""
_RAW = ("train.bin", "val.bin")
"""Without a header the name is all that tells a token file; nanoGPT has these two."""
_NAME = re.compile(r"(?:(?P<corpus>.+)_)?(?P<split>train|val)(?:_(?P<shard>\d+))?\.bin")
_HDF5_NAME = re.compile(r"(?P<corpus>.+)_(?P<split>train|val|dev)(?P<suffix>\.h5|\.hdf5)")
_BESIDE = {"train": ("val", "dev"), "val": ("train",), "dev": ("train",)}


def layout_of(path: Path) -> Layout:
    """What a data file, ours or another program's, or a folder of token files says about itself.

    Raises:
        Refused: not there, damaged, or not of a known format.
        GptfastError: another program holds the file's lock.
    """
    if path.is_dir():
        return _bin_layout(_in_folder(path))
    if path.suffix == ".bin":
        return _bin_layout(_with_the_other_split(path))
    layout = hdf5_layout(path)
    return _with_hdf5_beside(layout, path) if layout.kind == HDF5 else layout


# which files ---------------------------------------------------------------------------------


def _in_folder(folder: Path) -> dict[str, list[Path]]:
    """The token files of each split, shards in order."""
    corpora = _corpora(folder)
    if not corpora:
        raise Refused(
            f"{folder}: is a folder without token files (train.bin, NAME_train.bin, "
            "NAME_train_000001.bin): name the data file in it, or gptfast prepare texts"
        )
    if len(corpora) > 1:
        names = ", ".join(sorted(name or "train.bin" for name in corpora))
        raise Refused(
            f"{folder}: holds the token files of {len(corpora)} corpora ({names}): name a file of "
            "the one that is meant"
        )
    return next(iter(corpora.values()))


def _with_the_other_split(path: Path) -> dict[str, list[Path]]:
    if not stands(path):
        raise Refused(f"{path}: no such file: name a token file, or the folder of them")
    named = _NAME.fullmatch(path.name)
    if named is None:
        return {"train": [path]}
    beside = _corpora(path.parent)[named["corpus"]]
    return {**beside, named["split"]: [path]}


def _corpora(folder: Path) -> dict[str | None, dict[str, list[Path]]]:
    found: dict[str | None, dict[str, list[Path]]] = {}
    numbered = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    matches = [(match, path) for match, path in numbered if match is not None]
    for match, path in sorted(matches, key=lambda m: (int(m[0]["shard"] or -1), m[1].name)):
        found.setdefault(match["corpus"], {}).setdefault(match["split"], []).append(path)
    return found


def _with_hdf5_beside(layout: Layout, path: Path) -> Layout:
    """A file with one dataset `tokens` holds one split; its name tells which."""
    named = _HDF5_NAME.fullmatch(path.name)
    if named is None or tuple(layout.splits) != ("train",):
        return layout
    splits = {_split(named["split"]): layout.splits["train"]}
    for other in _BESIDE[named["split"]]:
        beside = path.with_name(f"{named['corpus']}_{other}{named['suffix']}")
        found = hdf5_layout(beside) if beside.exists() else None
        if found is not None and found.kind == HDF5:
            splits.setdefault(_split(other), found.splits["train"])
    return replace(layout, splits=_in_order(splits))


def _split(word: str) -> str:
    return "val" if word == "dev" else word


def _in_order(splits: dict[str, Split]) -> dict[str, Split]:
    return {name: splits[name] for name in SPLITS if name in splits}


# what is in them -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Head:
    """What the beginning of a token file says."""

    vocabulary: Vocabulary | None
    """None: it has no header, which says nothing."""
    part: Part


def _bin_layout(files: dict[str, list[Path]]) -> Layout:
    heads = {split: [_read_head(path) for path in paths] for split, paths in files.items()}
    vocabulary = _common_vocabulary([head for its_heads in heads.values() for head in its_heads])
    splits = _in_order(
        {
            split: Split(split, tuple(h.part for h in its_heads))
            for split, its_heads in heads.items()
        }
    )
    if vocabulary is not None:
        return Layout(LLM_C, splits, vocabulary.n_ids, vocabulary.tokenizer)
    meta_path = next(iter(splits.values())).parts[0].path.with_name(META)
    meta = read_meta(meta_path) if meta_path.exists() else Meta(None, None)
    if meta.alphabet is None:
        return Layout(NANOGPT, splits, meta.vocab_size)
    characters = {"kind": "chars", "name": "chars", "alphabet": meta.alphabet}
    return Layout(NANOGPT, splits, meta.vocab_size, "chars", characters)


def _common_vocabulary(heads: Sequence[_Head]) -> Vocabulary | None:
    first = heads[0]
    for head in heads:
        if head.vocabulary is not first.vocabulary:
            raise Refused(
                f"{head.part.path}: is {_called(head.vocabulary)}, but {first.part.path.name} is "
                f"{_called(first.vocabulary)}: keep them in folders of their own"
            )
    return first.vocabulary


def _called(vocabulary: Vocabulary | None) -> str:
    return "without a header" if vocabulary is None else f"of {vocabulary.name}'s vocabulary"


def _read_head(path: Path) -> _Head:
    try:
        known_as = identity(path)
        size = path.stat().st_size
        head = np.fromfile(path, "<i4", 3).tolist()
    except OSError as error:
        raise Refused(f"{path}: cannot be read ({error.strerror})") from error
    if size == 0:
        raise Refused(f"{path}: is empty, 0 tokens: copy it or make it again")
    if head and head[0] in VOCABULARIES:
        vocabulary = VOCABULARIES[head[0]]
        n_tokens = _check_header(path, head, vocabulary, size)
        part = Part(path, n_tokens, vocabulary.dtype, HEADER_BYTES, known_as)
        return _Head(vocabulary, part)
    if head and head[0] in _OTHER_MAGICS:
        raise Refused(
            f"{path}: holds {_OTHER_MAGICS[head[0]]} of llm.c (magic {head[0]}), not tokens: "
            "name a token file"
        )
    if path.name not in _RAW:
        raise Refused(
            f"{path}: begins with {head[0] if head else 'less than a header'}, and a token file "
            f"with {' or '.join(f'{v.magic} ({v.name})' for v in VOCABULARIES.values())}: ids "
            f"without a header, as nanoGPT has them, must be named {' and '.join(_RAW)}"
        )
    if size % 2:
        raise Refused(f"{path}: has {size:,} bytes, no whole number of uint16 ids: copy it again")
    return _Head(None, Part(path, size // 2, np.dtype("<u2"), 0, known_as))


def _check_header(path: Path, head: Sequence[int], vocabulary: Vocabulary, size: int) -> int:
    """How many tokens follow."""
    if size < HEADER_BYTES:
        raise Refused(
            f"{path}: is cut short, {size} of the {HEADER_BYTES} bytes of its header: copy it again"
        )
    _, version, n_tokens = head
    if version != vocabulary.version:
        raise Refused(
            f"{path}: version {version} of the token files of {vocabulary.name}, and only "
            f"{vocabulary.version} is known: make it again with a newer llm.c"
        )
    if n_tokens == 0:
        raise Refused(f"{path}: is empty, 0 tokens: copy it or make it again")
    n_bytes = size - HEADER_BYTES
    if n_bytes != n_tokens * vocabulary.dtype.itemsize:
        raise Refused(
            f"{path}: its header says {n_tokens:,} tokens, but {n_bytes:,} bytes follow instead of "
            f"{n_tokens * vocabulary.dtype.itemsize:,}: it is cut short or damaged, copy it again"
        )
    return n_tokens


def is_token_file(path: Path) -> bool:
    """Whether a file holds ids, by the name that nanoGPT gives it or by its header.

    Raises:
        Refused: it may not be read, so that nothing tells.
    """
    if path.suffix != ".bin" or not path.is_file():
        return False
    try:
        head = np.fromfile(path, "<i4", 1).tolist()
    except OSError as error:
        raise Refused(
            f"{path}: cannot be read ({error.strerror}): change its rights, or move it away"
        ) from error
    return path.name in _RAW or not VOCABULARIES.keys().isdisjoint(head)


def files_of(layout: Layout) -> Iterable[Path]:
    """All files that hold ids, each once."""
    return dict.fromkeys(part.path for split in layout.splits.values() for part in split.parts)
