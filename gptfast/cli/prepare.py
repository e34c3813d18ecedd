"""`gptfast prepare`: from text to a file of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from gptfast.cli.app import App
from gptfast.cli.options import json_option

if TYPE_CHECKING:
    from gptfast.console import Console
    from gptfast.data.prepare import Prepared


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
    help="Bytes that are not UTF-8: refuse the file, or put U+FFFD for each.",
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
    pattern: str | None,
    workers: int | None,
    encoder: Literal["auto", "tiktoken", "gigatoken"],
    force: bool,
    resume: bool,
    as_json: bool,
) -> None:
    """Turn text into a file of tokens.

    SOURCE is shakespeare, a file, a folder, a glob, or - for standard input. Files named .jsonl,
    .ndjson or .parquet hold rows, all others plain text; text and JSON lines may be packed with
    gzip or zstd. In a folder, these and .txt and .md are read. Several files, and rows, become
    documents with a separator after each; one text is one stream.
    """
    from gptfast.data.formats import Reading
    from gptfast.data.prepare import prepare

    with app.console.prepare_progress(None) as progress:
        prepared = prepare(
            sources,
            out=out,
            tokenizer=tokenizer,
            val_fraction=val_fraction,
            reading=Reading(errors=errors, text_key=text_key, on_bad_row=on_bad_row),
            pattern=pattern,
            workers=workers,
            encoder=encoder,
            force=force,
            resume=resume,
            cache_dir=app.cache_dir,
            progress=progress,
            note=app.console.warn,
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
        f"{shown}: {prepared.train.n_tokens + prepared.val.n_tokens:,} tokens of "
        f"{prepared.tokenizer} ({prepared.vocab_size:,} ids){by}, {prepared.n_documents:,} "
        f"document{'s' * (prepared.n_documents != 1)}, {prepared.seconds:.1f} s"
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
    if prepared.n_replaced:
        console.warn(f"replaced {prepared.n_replaced:,} bytes that were not UTF-8 by U+FFFD")
    if prepared.n_bad_rows:
        console.warn(f"skipped {prepared.n_bad_rows:,} bad row{'s' * (prepared.n_bad_rows != 1)}")
    left_out = [
        f"{count:,} {kind}"
        for count, kind in ((prepared.n_null, "null"), (prepared.n_empty, "empty"))
        if count
    ]
    if left_out:
        console.note(f"documents left out: {' + '.join(left_out)}")
