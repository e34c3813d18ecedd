"""Token files of other programs made into a data file of ours, which needs nothing beside it.

The ids are copied as they are. A document ends with its separator, wherever these programs put
it; where they put it first, the first document is a separator alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gptfast import __version__
from gptfast.data.foreign import files_of
from gptfast.data.inspection import text_tokenizer
from gptfast.data.layout import OWN, pieces
from gptfast.data.prepare.prepare import SplitCount, check_target
from gptfast.data.prepare.writer import Draft
from gptfast.data.store import Store
from gptfast.errors import Refused
from gptfast.files import check_room

if TYPE_CHECKING:
    from gptfast.tokenizers.tokenizer import Tokenizer

Progress = Callable[[int, int, int], None]
"""Called with bytes of ids read, bytes in all, and ids copied."""

_BLOCK = 1 << 20


@dataclass(frozen=True)
class Converted:
    """A data file made of ids."""

    path: Path
    source: Path
    format: str
    """Of the source."""
    tokenizer: str
    vocab_size: int
    splits: dict[str, SplitCount]
    fingerprint: str
    """`Store.fingerprint`."""


def convert(
    store: Store,
    out: Path,
    *,
    tokenizer: str | None = None,
    force: bool = False,
    progress: Progress = lambda done, total, ids: None,
) -> Converted:
    """Copy the ids of a foreign file or folder into a data file of ours.

    Args:
        tokenizer: what made the ids, where the files do not say.
        force: replace an existing file.

    Raises:
        Refused: it is ours already, the target exists, no tokenizer is known, or an id is none of
            the tokenizer's.
        GptfastError: it cannot be written.
    """
    if store.layout.kind == OWN:
        raise Refused(f"{store.path}: is a data file of gptfast already: copy it")
    check_target(out, force=force)
    text = text_tokenizer(store, tokenizer)
    if text is None:
        raise Refused(
            f"{store.path}: does not say what made its ids: name it with --tokenizer, as in "
            "--tokenizer gpt2"
        )
    n_ids = sum(split.n_tokens for split in store.layout.splits.values())
    with Draft(out, vocab_size=text.vocab_size) as draft:
        n_bytes = n_ids * draft.dtype.itemsize
        check_room(out, n_bytes)
        for name in store.splits:
            _copy(store, name, draft, text, total=n_bytes, progress=progress)
        draft.finish(
            tokenizer=text,
            source=f"{store.path.name} ({store.layout.kind})",
            documents=[_described(path) for path in files_of(store.layout)],
            attributes={"gptfast_version": __version__},
        )
    with Store.open(out) as made:
        return Converted(
            path=out,
            source=store.path,
            format=store.layout.kind,
            tokenizer=text.name,
            vocab_size=text.vocab_size,
            splits={
                name: SplitCount(draft.n_tokens(name), draft.n_bytes(name), draft.n_documents(name))
                for name in store.splits
            },
            fingerprint=made.fingerprint,
        )


def document_starts(ids: NDArray[Any], *, separator: int | None, begins: bool) -> NDArray[np.int64]:
    """Which of these ids, by their place, begin a document.

    Args:
        ids: (n,) integers, n > 0.
        begins: whether the first of them does.
    """
    return np.flatnonzero(np.append(begins, ids[:-1] == separator))


def _copy(
    store: Store, name: str, draft: Draft, tokenizer: Tokenizer, *, total: int, progress: Progress
) -> None:
    lengths = tokenizer.token_bytes()
    begins = True
    for ids in pieces(store.tokens(name), store.n_tokens(name)):
        if int(ids.max()) >= len(lengths):
            raise Refused(
                f"{store.path}: id {ids.max()} >= {len(lengths)}, the ids of {tokenizer.name}: "
                "name the tokenizer that made them with --tokenizer"
            )
        starts = document_starts(ids, separator=tokenizer.eot_id, begins=begins)
        begins = bool(ids[-1] == tokenizer.eot_id)
        draft.append(name, ids, documents=starts.tolist(), n_bytes=int(lengths[ids].sum()))
        n_ids = sum(draft.n_tokens(split) for split in store.splits)
        progress(n_ids * draft.dtype.itemsize, total, n_ids)


def _described(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return {"name": path.name, "bytes": path.stat().st_size, "sha256": digest.hexdigest()}
