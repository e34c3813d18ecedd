"""`gptfast data`: look into data files, check them, and move tokens between programs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gptfast.cli.app import App
from gptfast.cli.options import json_option
from gptfast.errors import counted

if TYPE_CHECKING:
    from collections.abc import Callable

    from gptfast.console import Console
    from gptfast.data.export import Format
    from gptfast.data.inspection import Description, Stretch
    from gptfast.data.verify import Verified

_SHOWN_TOKENS = 64
"""Tokens shown of the beginning of a file: about a paragraph."""
_SHOWN_SOURCES = 20


@click.group()
def command() -> None:
    """Look into data files, check them, move tokens between programs.

    FILE is a data file of gptfast, a foreign HDF5 file with tokens, a token file of nanoGPT
    (train.bin), llm.c or modded-nanogpt, or a folder of these.
    """


def _file_argument(function: Callable[..., Any]) -> Callable[..., Any]:
    return click.argument("file", metavar="FILE", type=click.Path(path_type=Path))(function)


def _tokenizer_option(function: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--tokenizer",
        metavar="NAME",
        help="What made the ids, as for prepare, where the file does not say.",
    )(function)


@command.command()
@_file_argument
@_tokenizer_option
@json_option
@click.pass_obj
def show(app: App, *, file: Path, tokenizer: str | None, as_json: bool) -> None:
    """Describe a data file: counts, tokenizer, sources, how it begins."""
    from gptfast.data.inspection import describe, text_tokenizer
    from gptfast.data.store import Store

    with Store.open(app.folder / file) as store:
        found = describe(
            store, head_tokens=_SHOWN_TOKENS, tokenizer=text_tokenizer(store, tokenizer)
        )
    if as_json:
        app.console.json(found)
    else:
        _show(found, app.console)


def _show(found: Description, console: Console) -> None:
    from gptfast.console.text import size

    files = f"{found.n_files} files, " if found.n_files > 1 else ""
    lines = [
        ("file", f"{console.path(str(found.path))} ({files}{size(found.n_file_bytes)})"),
        ("format", _format(found)),
        ("tokenizer", _tokenizer(found)),
        ("source", found.source or "unknown"),
        ("fingerprint", found.fingerprint),
    ]
    for label, value in lines:
        console.line(f"{label:<12} {value}")
    console.line()
    console.table(
        "",
        ["split", "documents", "tokens", "bytes of text", "type", "largest id", "SHA-256 of ids"],
        [
            (
                split.name,
                _number(split.n_documents),
                _number(split.n_tokens),
                _number(split.n_bytes),
                split.dtype,
                _number(split.max_id),
                split.sha256,
            )
            for split in found.splits
        ],
    )
    if found.sources:
        console.line()
        is_mix = "mix" in found.sources[0]
        console.table(
            "",
            ["source", *["weight"] * is_mix, "documents", "taken", "bytes", "SHA-256"],
            [
                (
                    one["name"],
                    *[f"{one['mix']['source']}: {one['mix']['weight']:g}" for _ in range(is_mix)],
                    _number(one.get("documents")),
                    _number(one.get("taken_documents")),
                    _number(one["bytes"]),
                    one["sha256"],
                )
                for one in found.sources[:_SHOWN_SOURCES]
            ],
        )
    if len(found.sources) > _SHOWN_SOURCES:
        more = counted(len(found.sources) - _SHOWN_SOURCES, "more source")
        console.note(f"{more}: --json has them all")
    console.line()
    console.line(f"{found.head.split} begins:", style="dim")
    console.line(str(found.head))


def _format(found: Description) -> str:
    made = found.attributes.get("gptfast_version")
    options = [
        f"{name.replace('_', ' ')} {value}"
        for name, value in found.attributes.items()
        if name != "gptfast_version"
    ]
    return ", ".join([f"{found.format} {made}" if made else found.format, *options])


def _tokenizer(found: Description) -> str:
    if found.tokenizer is None:
        size = "" if found.vocab_size is None else f", {counted(found.vocab_size, 'id')}"
        return f"unknown{size}"
    separator = found.tokenizer.separator
    between = "no separator" if separator is None else f"separator {separator}"
    return f"{found.tokenizer.name}, {counted(found.tokenizer.vocab_size, 'id')}, {between}"


def _number(value: int | None) -> str | None:
    return None if value is None else f"{value:,}"


@command.command()
@_file_argument
@json_option
@click.pass_obj
def verify(app: App, *, file: Path, as_json: bool) -> None:
    """Check ids, documents and checksums of a data file.

    Reads the whole file. Exit code 1 where something is wrong, 2 where it cannot be opened.
    """
    from gptfast.data.store import Store
    from gptfast.data.verify import verify as check
    from gptfast.errors import GptfastError

    with (
        Store.open(app.folder / file) as store,
        app.console.prepare_progress(None, verb="verify") as progress,
    ):
        found = check(store, progress=progress)
    if as_json:
        app.console.json(found)
    else:
        _report(found, app.console)
    if found.faults:
        raise GptfastError(
            f"{found.path}: {counted(len(found.faults), 'fault')}, see above: make the file "
            "again, or copy it again from where it is whole"
        )


def _report(found: Verified, console: Console) -> None:
    for label, lines in (("ok", found.holds), ("-", found.unknown), ("FAULT", found.faults)):
        for line in lines:
            console.line(f"{label:<6} {line}")


@command.command()
@_file_argument
@click.option("--n", type=click.IntRange(min=1), default=3, show_default=True, help="How many.")
@click.option(
    "--tokens",
    "n_tokens",
    type=click.IntRange(min=1),
    default=200,
    show_default=True,
    help="Tokens of each, at most.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Other documents.")
@click.option(
    "--split", metavar="NAME", default="train", show_default=True, help="Part to look at."
)
@_tokenizer_option
@json_option
@click.pass_obj
def sample(
    app: App,
    *,
    file: Path,
    n: int,
    n_tokens: int,
    seed: int,
    split: str,
    tokenizer: str | None,
    as_json: bool,
) -> None:
    """Read random documents, or stretches of a text that is one stream."""
    from gptfast.data.inspection import sample as draw
    from gptfast.data.inspection import text_tokenizer
    from gptfast.data.store import Store

    with Store.open(app.folder / file) as store:
        stretches = draw(
            store,
            split,
            n=n,
            seed=seed,
            n_tokens=n_tokens,
            tokenizer=text_tokenizer(store, tokenizer),
        )
    if as_json:
        app.console.json(stretches)
        return
    for stretch in stretches:
        app.console.line(_heading(stretch), style="dim")
        app.console.line(str(stretch))


def _heading(stretch: Stretch) -> str:
    document = "" if stretch.document is None else f"document {stretch.document:,}, "
    more = ", goes on" if stretch.cut and stretch.document is not None else ""
    return (
        f"--- {stretch.split}: {document}{counted(stretch.n_tokens, 'token')} "
        f"from {stretch.start:,}{more}"
    )


@command.command()
@_file_argument
@click.option(
    "--format",
    type=click.Choice(["nanogpt", "llm.c"]),
    required=True,
    help="nanogpt: train.bin, val.bin, meta.pkl. llm.c, also for modded-nanogpt: NAME_train.bin.",
)
@click.option(
    "--out",
    metavar="FOLDER",
    type=click.Path(path_type=Path),
    required=True,
    help="Where to; made if it is not there.",
)
@click.option("--name", metavar="NAME", help="Of llm.c's files.  [default: FILE's]")
@click.option(
    "--shard-tokens",
    type=click.IntRange(min=1),
    metavar="N",
    default=10**8,
    show_default=True,
    help="Tokens in a shard of llm.c, at most.",
)
@click.option("--force", is_flag=True, help="Replace files that are there.")
@json_option
@click.pass_obj
def export(
    app: App,
    *,
    file: Path,
    format: Format,
    out: Path,
    name: str | None,
    shard_tokens: int,
    force: bool,
    as_json: bool,
) -> None:
    """Write token files for nanoGPT, llm.c or modded-nanogpt.

    llm.c knows the ids of GPT-2 (uint16) and of Llama 3 (uint32); nanoGPT any below 65,536.
    """
    from gptfast.data.export import export as write
    from gptfast.data.store import Store

    with (
        Store.open(app.folder / file) as store,
        app.console.prepare_progress(None, verb="export") as progress,
    ):
        written = write(
            store,
            app.folder / out,
            format=format,
            name=name or file.resolve().stem,
            shard_tokens=shard_tokens,
            force=force,
            progress=progress,
        )
    for note in written.notes:
        app.console.warn(note)
    if as_json:
        app.console.json(written)
        return
    folder = app.console.path(str(written.folder))
    counts = f"{counted(written.n_tokens, 'token')}, {counted(written.n_bytes, 'byte')}"
    app.console.line(f"{folder}: {counts}")
    for one in written.files:
        app.console.line(f"  {one}")


@command.command(name="import")
@_file_argument
@click.option(
    "--out",
    metavar="FILE.h5",
    type=click.Path(path_type=Path),
    required=True,
    help="The file to make.",
)
@_tokenizer_option
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
@json_option
@click.pass_obj
def import_(
    app: App, *, file: Path, out: Path, tokenizer: str | None, force: bool, as_json: bool
) -> None:
    """Make a data file of token files, ids as they are.

    Training reads such files where they lie, too. A data file of its own also has the tokenizer,
    where documents begin, and checksums.
    """
    from gptfast.data.convert import convert
    from gptfast.data.store import Store

    with (
        Store.open(app.folder / file) as store,
        app.console.prepare_progress(None, verb="import") as progress,
    ):
        made = convert(store, app.folder / out, tokenizer=tokenizer, force=force, progress=progress)
    if as_json:
        app.console.json(made)
        return
    app.console.line(
        f"{app.console.path(str(made.path))}: ids of {made.format}, {made.tokenizer} "
        f"({counted(made.vocab_size, 'id')})"
    )
    app.console.table(
        "",
        ["split", "documents", "tokens", "bytes of text"],
        [
            (name, f"{count.n_documents:,}", f"{count.n_tokens:,}", f"{count.n_bytes:,}")
            for name, count in made.splits.items()
        ],
    )
