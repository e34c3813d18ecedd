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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from gptfast import __version__
from gptfast.data.layout import SPLITS
from gptfast.data.prepare.corpus import Survey
from gptfast.data.prepare.encoding import Encoded, encode, training_text
from gptfast.data.prepare.formats import STRICT, Reading
from gptfast.data.prepare.progress import (
    Job,
    Unfinished,
    at_work,
    difference,
    find_unfinished,
    job_of,
)
from gptfast.data.prepare.selection import ALL, Chosen, Selection, Share, choose
from gptfast.data.prepare.sources import Surroundings, find, short_name
from gptfast.data.prepare.writer import Draft
from gptfast.data.store import Store
from gptfast.errors import Refused, counted
from gptfast.files import check_room
from gptfast.tokenizers.encoders import Choice, Encoder, encoder_for
from gptfast.tokenizers.tokenizer import (
    Tokenizer,
    file_label,
    is_made_from_corpus,
    load_tokenizer,
    made_from_corpus,
)

Progress = Callable[[int, int, int], None]
"""Called with bytes of text done, bytes in all, and tokens so far."""
Note = Callable[[str], None]
"""Called with a line for the user."""

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
    """What was taken of each source of a mix; (): it is none."""
    fingerprint: str
    """`Store.fingerprint`."""
    seconds: float


def default_out(sources: Sequence[str | Path], tokenizer: str) -> Path:
    """Where the data file goes if nobody says: `data/NAME-TOKENIZER.h5` in the current folder."""
    return Path("data", f"{short_name(str(sources[0]))}-{file_label(tokenizer)}.h5")


@dataclass(frozen=True)
class PrepareOptions:
    """How texts become a data file."""

    tokenizer: str | Tokenizer = "gpt2"
    """A name, or one already built."""
    val_fraction: float = 0.1
    """The share for validation, in [0, 1); 0: no validation split."""
    reading: Reading = STRICT
    """Where the text of a row is, and what to do with what cannot be read."""
    selection: Selection = ALL
    """How much of which text; its weights are those of the sources."""
    pattern: str | None = None
    """Which files of a folder are read; None: those that are known by their ending."""
    workers: int | None = None
    """Threads that encode; None: one for each core."""
    encoder: Choice = "auto"
    """With "auto" gigatoken, where it is installed, knows the tokenizer and has enough to do; the
    ids are the same."""
    force: bool = False
    """Whether to replace an existing file."""
    resume: bool = False
    """Whether to go on where a `prepare` of the same texts with the same options was stopped."""
    cache_dir: Path | None = None
    """Where downloads are kept; only a corpus known by name needs it."""


@dataclass(frozen=True)
class _Work:
    """What there is to do."""

    out: Path
    description: str
    """The texts, in words."""
    chosen: Chosen
    tokenizer: Tokenizer
    encoder: Encoder
    options: PrepareOptions

    def job(self) -> Job:
        """What the ids depend on; asked for only where a progress file is kept, since to hash a
        vocabulary takes a while.
        """
        reading, selection = self.options.reading, self.options.selection
        typed = {
            "SOURCE": self.description,
            "--val-fraction": self.options.val_fraction,
            "--text-key": reading.text_key,
            "--errors": reading.errors,
            "--on-bad-row": reading.on_bad_row,
            "--format": reading.kind,
            "--mix": selection.weights,
            "--dedupe": selection.dedupe,
            "--max-chars": selection.max_chars,
        }
        return job_of(
            self.chosen.surveys, self.chosen.plan, tokenizer=self.tokenizer, options=typed
        )


DEFAULTS = PrepareOptions()


def prepare(
    sources: Sequence[str | Path],
    options: PrepareOptions = DEFAULTS,
    *,
    out: Path | None = None,
    progress: Progress = lambda done, total, tokens: None,
    note: Note = lambda line: None,
    tell: Note = lambda line: None,
) -> Prepared:
    """Encode texts into one data file.

    Args:
        sources: what `gptfast.data.prepare.sources.find` takes.
        out: None: `default_out`.
        note: told in one line what the user should know.
        tell: told in one line what is fetched.

    Raises:
        Refused: before any work: no text in it, not readable, the target exists, a bad option, no
            room for it, or not what was begun and is to be resumed.
        GptfastError: the tokenizer failed, a file changed meanwhile, the disk is full.
    """
    begin = time.monotonic()
    name = options.tokenizer if isinstance(options.tokenizer, str) else options.tokenizer.name
    out = (out or default_out(sources, name)).absolute()
    with _planned(sources, options, out, note=note, tell=tell) as work:
        draft = _encoded(work, progress=progress, note=note)
    return _report(work, draft, begin=begin)


@contextmanager
def _planned(
    sources: Sequence[str | Path], options: PrepareOptions, out: Path, *, note: Note, tell: Note
) -> Iterator[_Work]:
    """Check and count all texts; they can be read again until it is left."""
    scratch = check_target(out, force=options.force)
    if options.resume and (pid := at_work(out)) is not None:
        raise Refused(f"{out}: process {pid} is at work on it: wait for it, or stop it first")
    if not 0 <= options.val_fraction < 1:
        raise Refused(
            f"--val-fraction {options.val_fraction} is not in [0, 1): use 0.1, or 0 for no split"
        )
    tokenizer = options.tokenizer
    if isinstance(tokenizer, str) and not is_made_from_corpus(tokenizer):
        tokenizer = load_tokenizer(tokenizer)
    with find(
        sources,
        Surroundings(options.cache_dir, scratch, note, tell),
        pattern=options.pattern,
        reading=options.reading,
        limits=options.selection.limits(len(sources)),
    ) as corpus:
        if out.resolve() in {source.identity for source in corpus.sources}:
            raise Refused(f"{out}: is one of the texts: choose another --out")
        alphabet: set[str] | None = set() if tokenizer == "chars" else None
        chosen = choose(
            corpus,
            options.selection,
            val_fraction=options.val_fraction,
            reading=options.reading,
            alphabet=alphabet,
            note=note,
        )
        if isinstance(tokenizer, str):
            tokenizer = made_from_corpus(
                tokenizer,
                alphabet=alphabet or (),
                texts=training_text(chosen.surveys, chosen.plan, reading=options.reading),
            )
        _check_documents(chosen.surveys, tokenizer)
        n_bytes = sum(s.n_bytes for s in chosen.surveys)
        encoder = encoder_for(tokenizer, options.encoder, n_bytes=n_bytes)
        yield _Work(out, corpus.description, chosen, tokenizer, encoder, options)


def _encoded(work: _Work, *, progress: Progress, note: Note) -> Draft:
    """Make the data file, from the beginning or from where another was stopped."""
    chosen, options = work.chosen, work.options
    unfinished = _unfinished(work.out, resume=options.resume, note=note)
    _check_same(unfinished, work.job)
    draft = Draft(
        work.out, vocab_size=work.tokenizer.vocab_size, job=work.job, unfinished=unfinished
    )
    _check_room(draft, chosen, unfinished, note)
    with ExitStack() as stack:
        stack.callback(_tell_kept, draft, note)  # called when the draft has been left
        # Not entered: what a failing `open` leaves behind must be put away too.
        stack.push(draft)
        draft.open()
        batches = encode(
            chosen.surveys,
            chosen.plan,
            tokenizer=work.tokenizer,
            encoder=work.encoder,
            reading=options.reading,
            workers=options.workers or os.cpu_count() or 1,
            skip=draft.n_chunks,
        )
        _fill(draft, batches, total=_n_bytes(chosen), progress=progress)
        draft.finish(
            tokenizer=work.tokenizer,
            source=work.description,
            documents=_described(chosen),
            attributes={"gptfast_version": __version__, "val_fraction": options.val_fraction},
        )
    return draft


def _report(work: _Work, draft: Draft, *, begin: float) -> Prepared:
    chosen, tallies = work.chosen, [s.tally for s in work.chosen.surveys]
    with Store.open(work.out) as store:
        return Prepared(
            path=work.out,
            source=work.description,
            tokenizer=work.tokenizer.name,
            vocab_size=work.tokenizer.vocab_size,
            encoder=work.encoder.name,
            train=_counted(draft, "train"),
            val=_counted(draft, "val"),
            n_documents=sum(part.n_documents for part in chosen.plan.parts),
            n_empty=sum(s.n_empty for s in chosen.surveys),
            n_null=sum(tally.n_null for tally in tallies),
            n_bad_rows=sum(tally.n_bad_rows for tally in tallies),
            n_replaced=sum(tally.n_replaced for tally in tallies),
            n_wide=sum(tally.n_wide for tally in tallies),
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


def _unfinished(out: Path, *, resume: bool, note: Note) -> Unfinished | None:
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


def _check_room(draft: Draft, chosen: Chosen, unfinished: Unfinished | None, note: Note) -> None:
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


def _tell_kept(draft: Draft, note: Note) -> None:
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
