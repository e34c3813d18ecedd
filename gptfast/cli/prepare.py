"""`gptfast prepare`: from text to a file of tokens."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from gptfast.cli.app import App
from gptfast.cli.options import json_option
from gptfast.errors import counted

if TYPE_CHECKING:
    from gptfast.console import Console
    from gptfast.data.prepare.prepare import Prepared


_SIZES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}


def _size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """A number, also with k, M or G behind it."""
    if value is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kMG]?)", value)
    size = int(float(found[1]) * _SIZES[found[2]]) if found else 0
    if size < 1:
        raise click.BadParameter(f"{value} is no size: write one like 500k, 200M or 1.5G")
    return size


@click.command()
@click.argument("sources", metavar="SOURCE...", nargs=-1, required=True)
@click.option(
    "--out",
    metavar="FILE.h5",
    type=click.Path(path_type=Path),
    help="The file to make.  [default: data/NAME-TOKENIZER.h5]",
)
@click.option(
    "--tokenizer",
    metavar="NAME",
    default="gpt2",
    show_default=True,
    help="gpt2, cl100k_base, o200k_base, bytes, chars, bpe:N (N ids, trained on the text), a "
    ".tiktoken file, or a tokenizer.json of Hugging Face.",
)
@click.option(
    "--val-fraction",
    type=float,
    default=0.1,
    show_default=True,
    help="Share of the text kept for validation, from its end; 0: none.",
)
@click.option(
    "--errors",
    type=click.Choice(["strict", "replace"]),
    default="strict",
    show_default=True,
    help="Bytes that are not UTF-8: refuse the file, or put U+FFFD for each, and decode UTF-16.",
)
@click.option(
    "--text-key",
    metavar="KEY",
    default="text",
    show_default=True,
    help="Where the text is: a key of JSON lines, a column of parquet.",
)
@click.option(
    "--on-bad-row",
    type=click.Choice(["stop", "skip"]),
    default="stop",
    show_default=True,
    help="Rows without such a text: refuse the file, or leave them out and count them.",
)
@click.option(
    "--format",
    "kind",
    type=click.Choice(["auto", "text", "jsonl"]),
    default="auto",
    show_default=True,
    help="What the files hold; auto: as their names end, standard input is text.",
)
@click.option(
    "--mix",
    "is_mix",
    is_flag=True,
    help="Each SOURCE is NAME:WEIGHT, its share of the text, as in --mix a.txt:0.7 b.jsonl:0.3.",
)
@click.option(
    "--dedupe",
    type=click.Choice(["exact", "near"]),
    help="Leave out documents that an earlier one equals, or nearly (MinHash).  [default: none]",
)
@click.option(
    "--max-chars",
    metavar="SIZE",
    callback=_size,
    help="About how much text to take, from the beginning, as in 200M or 1G.  [default: all]",
)
@click.option(
    "--glob",
    "pattern",
    metavar="PATTERN",
    help="Which files of a folder to read, as in '*.py'.  [default: those listed above]",
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    metavar="N",
    help="Threads that encode.  [default: one for each core]",
)
@click.option(
    "--encoder",
    type=click.Choice(["auto", "tiktoken", "gigatoken"]),
    default="auto",
    show_default=True,
    help="Who makes the ids, which are the same; auto: gigatoken for 8 MB and more, if installed.",
)
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
@click.option(
    "--resume",
    is_flag=True,
    help="Go on where the same command was stopped or killed.  [default: begin anew]",
)
@json_option
@click.pass_obj
def command(
    app: App,
    *,
    sources: tuple[str, ...],
    out: Path | None,
    tokenizer: str,
    val_fraction: float,
    errors: Literal["strict", "replace"],
    text_key: str,
    on_bad_row: Literal["stop", "skip"],
    kind: Literal["auto", "text", "jsonl"],
    is_mix: bool,
    dedupe: Literal["exact", "near"] | None,
    max_chars: int | None,
    pattern: str | None,
    workers: int | None,
    encoder: Literal["auto", "tiktoken", "gigatoken"],
    force: bool,
    resume: bool,
    as_json: bool,
) -> None:
    """Turn text into a file of tokens.

    SOURCE is a file, a folder, a glob, - for standard input, a corpus known by name (shakespeare,
    tinystories, fineweb-edu, openwebtext), or hf:NAME[@REVISION][:CONFIG[:SPLIT]] for a data set of
    the Hugging Face hub or a folder of one. Files named .jsonl, .ndjson or .parquet hold rows, all
    others plain text; text and JSON lines may be packed with gzip or zstd. In a folder, these and
    .txt and .md are read. Several files, and rows, become documents with a separator after each;
    one text is one stream.
    """
    from gptfast.data.prepare.formats import Reading
    from gptfast.data.prepare.prepare import PrepareOptions, prepare
    from gptfast.data.prepare.selection import Selection, parse_mix

    weights = None
    if is_mix:
        ingredients = parse_mix(sources)
        sources = tuple(one.name for one in ingredients)
        weights = tuple(one.weight for one in ingredients)

    options = PrepareOptions(
        tokenizer=tokenizer,
        val_fraction=val_fraction,
        reading=Reading(errors=errors, kind=kind, text_key=text_key, on_bad_row=on_bad_row),
        selection=Selection(weights, dedupe, max_chars),
        pattern=pattern,
        workers=workers,
        encoder=encoder,
        force=force,
        resume=resume,
        cache_dir=app.cache_dir,
    )
    with app.console.prepare_progress(None) as progress:
        prepared = prepare(
            sources,
            options,
            out=out,
            progress=progress,
            note=app.console.warn,
            tell=app.console.note,
        )
    if as_json:
        app.console.json(prepared)
    else:
        _show(prepared, app.console, app.folder)


def _show(prepared: Prepared, console: Console, folder: Path) -> None:
    path = prepared.path
    shown = path.relative_to(folder) if path.is_relative_to(folder) else path
    by = " by gigatoken" if prepared.encoder == "gigatoken" else ""
    console.line(
        f"{shown}: {counted(prepared.train.n_tokens + prepared.val.n_tokens, 'token')} of "
        f"{prepared.tokenizer} ({counted(prepared.vocab_size, 'id')}){by}, "
        f"{counted(prepared.n_documents, 'document')}, {prepared.seconds:.1f} s"
    )
    console.line(f"from {prepared.source}")
    console.table(
        "",
        ["split", "documents", "tokens", "bytes of text"],
        [
            (name, f"{count.n_documents:,}", f"{count.n_tokens:,}", f"{count.n_bytes:,}")
            for name, count in (("train", prepared.train), ("val", prepared.val))
        ],
    )
    if prepared.shares:
        console.table(
            "",
            ["source of the mix", "weight", "share", "characters", "left out"],
            [
                (s.name, f"{s.weight:g}", f"{s.share:.2%}", f"{s.n_chars:,}", f"{s.n_left_out:,}")
                for s in prepared.shares
            ],
        )
    if prepared.n_left_out:
        reason = "to keep the proportions" if prepared.shares else "behind --max-chars"
        console.note(f"characters left out {reason}: {prepared.n_left_out:,}")
    if prepared.n_wide:
        console.warn(
            f"decoded {counted(prepared.n_wide, 'file')} from UTF-16 or UTF-32, replaced "
            f"{counted(prepared.n_replaced, 'byte')} by U+FFFD"
        )
    elif prepared.n_replaced:
        console.warn(f"replaced {counted(prepared.n_replaced, 'byte')} not in UTF-8 by U+FFFD")
    if prepared.n_bad_rows:
        console.warn(f"skipped {counted(prepared.n_bad_rows, 'bad row')}")
    left_out = [
        f"{count:,} {kind}"
        for count, kind in (
            (prepared.n_null, "null"),
            (prepared.n_empty, "empty"),
            (prepared.n_copies, "copies"),
        )
        if count
    ]
    if left_out:
        console.note(f"documents left out: {' + '.join(left_out)}")
