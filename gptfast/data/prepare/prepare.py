"""From text to a data file: what `gptfast prepare` does.

Each source is read twice: once to check and to count it, so that bad input is refused before any
work, and once to encode it. Memory does not grow with the text, only by 16 bytes for each of its
documents.

One plain text is one stream: the last characters, from int(n * (1 - val_fraction)) on, are the
validation split, and no separator is added. Several files and the rows of a file are documents:
whole ones from the end are the validation split, as near to its share as they allow, and a
separator follows each that is not empty. The bytes and chars tokenizers have no separator; there
documents join directly, and only the document starts in the data file tell them apart.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gptfast import __version__
from gptfast.data.layout import SPLITS
from gptfast.data.prepare.corpus import Survey
from gptfast.data.prepare.encoding import Encoded, encode, training_text
from gptfast.data.prepare.formats import STRICT, Reading
from gptfast.data.prepare.job import Job, difference, job_of
from gptfast.data.prepare.progress import Unfinished, at_work, find_unfinished
from gptfast.data.prepare.selection import ALL, Chosen, Selection, Share, choose
from gptfast.data.prepare.sources import Surroundings, find, short_name
from gptfast.data.prepare.writer import Draft
from gptfast.data.store import Store
from gptfast.errors import Refused, counted
from gptfast.files import check_room
from gptfast.tokenizers.encoders import Choice, encoder_for
from gptfast.tokenizers.tokenizer import (
    Tokenizer,
    file_label,
    is_made_from_corpus,
    load_tokenizer,
    made_from_corpus,
)

Progress = Callable[[int, int, int], None]
"""Called with bytes of text done, bytes in all, and tokens so far."""

_BYTES_OF_A_TOKEN = 5
"""Hardly any text has more of them, on average."""
_WHOLE = 1 << 21
"""Characters of the longest document that is encoded whole; each takes some 200 bytes of memory."""


@dataclass(frozen=True)
class SplitCount:
    """What went into a split."""

    n_tokens: int
    n_bytes: int
    n_documents: int


@dataclass(frozen=True)
class Prepared:
    """A finished data file."""

    path: Path
    source: str
    tokenizer: str
    vocab_size: int
    encoder: str
    """Who made the ids: gigatoken, tiktoken, or the tokenizer itself by its name."""
    train: SplitCount
    val: SplitCount
    n_documents: int
    """Documents of which text is in it; one that the split cuts in two counts once."""
    n_empty: int
    """Documents without."""
    n_null: int
    """Rows whose text is null."""
    n_bad_rows: int
    """Rows left out because they have no text."""
    n_replaced: int
    """Bytes that were not UTF-8."""
    n_wide: int
    """Files decoded from UTF-16 or UTF-32."""
    n_copies: int
    """Documents left out as copies of earlier ones."""
    n_left_out: int
    """Characters left out because of the proportions of a mix, or of a limit."""
    shares: tuple[Share, ...]
    """Of a mix."""
    fingerprint: str
    """`Store.fingerprint`."""
    seconds: float


def default_out(sources: Sequence[str | Path], tokenizer: str) -> Path:
    """Where the data file goes if nobody says: `data/NAME-TOKENIZER.h5` in the current folder."""
    return Path("data", f"{short_name(str(sources[0]))}-{file_label(tokenizer)}.h5")


def prepare(
    sources: Sequence[str | Path],
    *,
    out: Path | None = None,
    tokenizer: str | Tokenizer = "gpt2",
    val_fraction: float = 0.1,
    reading: Reading = STRICT,
    selection: Selection = ALL,
    pattern: str | None = None,
    workers: int | None = None,
    encoder: Choice = "auto",
    force: bool = False,
    resume: bool = False,
    cache_dir: Path | None = None,
    progress: Progress = lambda done, total, tokens: None,
    note: Callable[[str], None] = lambda line: None,
    tell: Callable[[str], None] = lambda line: None,
) -> Prepared:
    """Encode texts into one data file.

    Args:
        sources: what `gptfast.data.prepare.sources.find` takes.
        out: None: `default_out`.
        tokenizer: a name, or one already built.
        val_fraction: in [0, 1); 0: no validation split.
        reading: where the text of a row is, and what to do with what cannot be read.
        selection: how much of which text; its weights are those of `sources`.
        pattern: which files of a folder are read; None: those that are known by their ending.
        workers: threads that encode; None: one for each core.
        encoder: "auto": gigatoken where it is installed, knows the tokenizer and has enough to do.
            The ids are the same.
        force: replace an existing file.
        resume: go on where a `prepare` of the same texts with the same options was stopped.
        cache_dir: where downloads are kept; only a corpus known by name needs it.
        note: told in one line what the user should know.
        tell: told in one line what is fetched.

    Raises:
        Refused: before any work: no text in it, not readable, the target exists, a bad option, no
            room for it, or not what was begun and is to be resumed.
        GptfastError: the tokenizer failed, a file changed meanwhile, the disk is full.
    """
    begin = time.monotonic()
    name = tokenizer if isinstance(tokenizer, str) else tokenizer.name
    out = (out or default_out(sources, name)).absolute()
    scratch = check_target(out, force=force)
    if resume and (pid := at_work(out)) is not None:
        raise Refused(f"{out}: process {pid} is at work on it: wait for it, or stop it first")
    if not 0 <= val_fraction < 1:
        raise Refused(f"--val-fraction {val_fraction} is not in [0, 1): use 0.1, or 0 for no split")
    if isinstance(tokenizer, str) and not is_made_from_corpus(tokenizer):
        tokenizer = load_tokenizer(tokenizer)

    with ExitStack() as stack:
        corpus = stack.enter_context(
            find(
                sources,
                Surroundings(cache_dir, scratch, note, tell),
                pattern=pattern,
                reading=reading,
                limits=selection.limits(len(sources)),
            )
        )
        if out.resolve() in {source.identity for source in corpus.sources}:
            raise Refused(f"{out}: is one of the texts: choose another --out")
        alphabet: set[str] | None = set() if tokenizer == "chars" else None
        chosen = choose(
            corpus,
            selection,
            val_fraction=val_fraction,
            reading=reading,
            alphabet=alphabet,
            note=note,
        )
        surveys, planned = chosen.surveys, chosen.plan
        if isinstance(tokenizer, str):
            tokenizer = made_from_corpus(
                tokenizer,
                alphabet=alphabet or (),
                texts=training_text(surveys, planned, reading=reading),
            )
        _check_documents(surveys, tokenizer)
        n_bytes = sum(s.n_bytes for s in surveys)
        encodes = encoder_for(tokenizer, encoder, n_bytes=n_bytes)
        options = {
            "SOURCE": corpus.description,
            "--val-fraction": val_fraction,
            "--text-key": reading.text_key,
            "--errors": reading.errors,
            "--on-bad-row": reading.on_bad_row,
            "--format": reading.kind,
            "--mix": selection.weights,
            "--dedupe": selection.dedupe,
            "--max-chars": selection.max_chars,
        }
        # Called for texts that take a while: a vocabulary has its weight.
        job = partial(job_of, surveys, planned, tokenizer=tokenizer, options=options)
        unfinished = _unfinished(out, resume=resume, note=note)
        _check_same(unfinished, job)
        draft = Draft(out, vocab_size=tokenizer.vocab_size, job=job, unfinished=unfinished)
        _check_room(draft, chosen, unfinished, note)
        stack.callback(_tell_kept, draft, note)  # called when the draft has been left
        stack.push(draft)
        draft.open()
        encoded = encode(
            surveys,
            planned,
            tokenizer=tokenizer,
            encoder=encodes,
            reading=reading,
            workers=workers or os.cpu_count() or 1,
            skip=draft.n_chunks,
        )
        _fill(draft, encoded, total=_n_bytes(chosen), progress=progress)
        draft.finish(
            tokenizer=tokenizer,
            source=corpus.description,
            documents=_described(chosen),
            attributes={"gptfast_version": __version__, "val_fraction": val_fraction},
        )

    with Store.open(out) as store:
        return Prepared(
            path=out,
            source=corpus.description,
            tokenizer=tokenizer.name,
            vocab_size=tokenizer.vocab_size,
            encoder=encodes.name,
            train=_counted(draft, "train"),
            val=_counted(draft, "val"),
            n_documents=sum(part.n_documents for part in planned.parts),
            n_empty=sum(s.n_empty for s in surveys),
            n_null=sum(s.tally.n_null for s in surveys),
            n_bad_rows=sum(s.tally.n_bad_rows for s in surveys),
            n_replaced=sum(s.tally.n_replaced for s in surveys),
            n_wide=sum(s.tally.n_wide for s in surveys),
            n_copies=chosen.n_copies,
            n_left_out=chosen.n_left_out,
            shares=chosen.shares,
            fingerprint=store.fingerprint,
            seconds=time.monotonic() - begin,
        )


def check_target(out: Path, *, force: bool) -> Path:
    """The folder that stands already, on the way to the target or at its end."""
    if out.is_dir():
        raise Refused(f"{out}: is a folder: name a file in it, as in --out {out / 'corpus.h5'}")
    if out.exists() and not force:
        raise Refused(f"{out}: exists already: use --force to replace it, or another --out")
    standing = next(folder for folder in out.parents if folder.exists())
    if not standing.is_dir():
        raise Refused(f"{out}: {standing} is a file, not a folder: choose another --out")
    if not os.access(standing, os.W_OK):
        raise Refused(f"{out}: {standing} cannot be written to: choose another --out")
    return standing


def _check_documents(surveys: Sequence[Survey], tokenizer: Tokenizer) -> None:
    if not tokenizer.needs_whole_documents:
        return
    for surveyed in surveys:
        longest = max(surveyed.sizes, default=0)
        if longest > _WHOLE:
            raise Refused(
                f"{surveyed.source.label}: has a document of {longest:,} characters, and "
                f"{tokenizer.name} must see each document whole, of at most {_WHOLE:,}: make "
                "documents of its parts, or use a byte-level tokenizer"
            )


def _unfinished(out: Path, *, resume: bool, note: Callable[[str], None]) -> Unfinished | None:
    """What to go on with."""
    found = find_unfinished(out)
    if found is not None and not resume:
        note(
            f"{out}: what a prepare that was stopped left, {counted(found.n_tokens, 'token')}, "
            "goes now: with --resume it would have gone on with them"
        )
    if found is None and resume:
        note(f"{out}: there is nothing to resume, it begins anew")
    return found if resume else None


def _check_same(unfinished: Unfinished | None, job: Callable[[], Job]) -> None:
    if unfinished is not None and (change := difference(unfinished.job, job())) is not None:
        raise Refused(
            f"--resume: {change}, so the tokens would not be the same: prepare as before, or leave "
            "--resume out to begin anew"
        )


def _check_room(
    draft: Draft, chosen: Chosen, unfinished: Unfinished | None, note: Callable[[str], None]
) -> None:
    """A token stands for a byte at least; a document may have a separator and has its start."""
    parts = chosen.plan.parts
    n_documents = sum(part.n_documents for part in parts)
    n_bytes = sum(
        min(s.n_bytes, 4 * part.n_chars) for s, part in zip(chosen.surveys, parts, strict=True)
    )
    there = 0 if unfinished is None else unfinished.n_tokens
    size = draft.dtype.itemsize
    check_room(
        draft.target,
        (n_bytes // _BYTES_OF_A_TOKEN + n_documents - there) * size + 8 * n_documents,
        at_most=(n_bytes + n_documents - there) * size + 8 * n_documents,
        note=note,
    )


def _fill(draft: Draft, encoded: Iterable[Encoded], *, total: int, progress: Progress) -> None:
    done = sum(draft.n_bytes(split) for split in SPLITS)
    tokens = sum(draft.n_tokens(split) for split in SPLITS)
    for found in encoded:
        draft.append(
            found.split,
            found.ids,
            documents=found.documents,
            n_bytes=found.n_bytes,
            n_chunks=found.n_chunks,
        )
        done += found.n_bytes
        tokens += len(found.ids)
        progress(done, total, tokens)
    progress(total, total, tokens)


def _tell_kept(draft: Draft, note: Callable[[str], None]) -> None:
    if draft.is_kept:
        note("what is done is kept: the same command with --resume goes on with it")


def _counted(draft: Draft, split: str) -> SplitCount:
    return SplitCount(draft.n_tokens(split), draft.n_bytes(split), draft.n_documents(split))


def _n_bytes(chosen: Chosen) -> int:
    """About how much text, in UTF-8, is taken."""
    return sum(
        s.n_bytes * part.n_chars // max(1, sum(s.sizes))
        for s, part in zip(chosen.surveys, chosen.plan.parts, strict=True)
    )


def _described(chosen: Chosen) -> list[dict[str, object]]:
    """Each text, as the data file remembers it."""
    mix = [
        {"mix": {"source": share.name, "weight": share.weight}}
        for share in chosen.shares
        for _ in range(share.n_texts)
    ]
    return [
        {
            "name": s.source.label,
            "bytes": s.n_file_bytes,
            "characters": sum(s.sizes),
            "documents": len(s.sizes),
            "taken_characters": part.n_chars,
            "taken_documents": part.n_documents,
            "replaced_bytes": s.tally.n_replaced,
            "sha256": s.sha256,
            **in_mix,
        }
        for s, part, in_mix in zip(
            chosen.surveys, chosen.plan.parts, mix or [{}] * len(chosen.surveys), strict=True
        )
    ]
