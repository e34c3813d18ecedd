"""Ids written once, and a killed `prepare` gone on with: the same file as if nothing had been."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from data_helpers import TEXT, needs_proc, only, prepared, spent, tiny_shakespeare
from hypothesis import given, settings
from hypothesis import strategies as st

from gptfast.data.prepare import encoding, packing, progress, writer
from gptfast.data.prepare.formats import Reading
from gptfast.data.prepare.selection import Selection
from gptfast.data.prepare.writer import Draft
from gptfast.errors import GptfastError, Refused
from gptfast.tokenizers.plain import Bytes
from gptfast.tokenizers.tokenizer import load_tokenizer

Sources = list[Path]


class Killed(BaseException):
    """Ends a `prepare` in this process with nothing put away, as kill -9 does."""


def datasets(path: Path) -> dict[str, list[int]]:
    """What training reads, through nothing of ours."""
    with h5py.File(path) as file:
        names = ("train", "val", "train_documents", "val_documents")
        found = {name: file[name][:].tolist() for name in names}
        for name in ("train", "val"):
            assert file[name].chunks is None
            if len(file[name]):
                stored = path.read_bytes()[file[name].id.get_offset() :][: file[name].nbytes]
                assert file[name].attrs["sha256"] == hashlib.sha256(stored).hexdigest()
                assert file[name][:].tobytes() == stored
                assert file[name].attrs["max_id"] == max(found[name])
            found[f"{name} bytes"] = [int(file[name].attrs["bytes"])]
    return found


# ids are written once ----------------------------------------------------------------------------


def drafted(path: Path, splits: dict[str, Any], *, vocab_size: int, pieces: int) -> None:
    with Draft(path, vocab_size=vocab_size) as draft:
        for name, ids in splits.items():
            for piece in np.array_split(ids, pieces):
                draft.append(name, piece, documents=[0], n_bytes=len(piece))
        draft.finish(tokenizer=Bytes(), source="", documents=[], attributes={})


def check(path: Path, splits: dict[str, Any], *, dtype: type, pieces: int) -> None:
    found = datasets(path)
    assert {name: found[name] for name in splits} == {n: x.tolist() for n, x in splits.items()}
    for name, ids in splits.items():
        expected = np.cumsum([0, *map(len, np.array_split(ids, pieces))])[:-1]
        assert found[f"{name}_documents"] == expected.tolist()
    with h5py.File(path) as file:
        assert file["train"].dtype == dtype


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 9000), st.integers(0, 9000)),
    vocab=st.sampled_from([(65_536, np.uint16), (65_537, np.uint32)]),
    pieces=st.integers(1, 5),
    shift=st.sampled_from([0, 4096, 2048, -512]),
)
def test_hdf5_finds_the_ids_where_they_were_laid(
    sizes: tuple[int, int], vocab: tuple[int, type], pieces: int, shift: int
) -> None:
    """`shift`: and where HDF5 lays its datasets elsewhere, they are moved there."""
    vocab_size, dtype = vocab
    made = np.random.default_rng(0)
    splits = {
        name: made.integers(0, vocab_size, n)
        for name, n in zip(("train", "val"), sizes, strict=True)
    }
    begin = Draft._begin
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(writer, "_COPY", 1000)
        patch.setattr(Draft, "_begin", lambda draft, split: begin(draft, split) + shift)
        move, n_moves = Draft._move, iter(range(2 if shift else 0))
        patch.setattr(Draft, "_move", lambda *args: (next(n_moves), move(*args)))
        drafted(Path(folder, "x.h5"), splits, vocab_size=vocab_size, pieces=pieces)
        check(Path(folder, "x.h5"), splits, dtype=dtype, pieces=pieces)
        assert only(Path(folder), "x.h5")


@needs_proc
def test_ids_go_to_the_disk_once(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("sixteen letters\n" * 250_000)
    assert 8_000_000 < spent(text, tmp_path / "out.h5").written < 8_500_000


def test_too_small_a_disk_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TXT-28: with the bytes that it takes and those that there are."""
    text = tmp_path / "text.txt"
    text.write_text("a" * 1_000_000)
    usage = shutil.disk_usage(tmp_path)
    notes: list[str] = []

    def prepare_with(free: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free))
        prepared(tmp_path, text, tokenizer="bytes", note=notes.append)

    with pytest.raises(Refused) as refused:
        prepare_with(400_000)
    assert str(refused.value) == (
        f"{tmp_path / 'corpus.h5'}: needs 400,010 bytes, perhaps 2,000,010, and {tmp_path} has "
        "400,000 left: free space or choose another --out"
    )
    assert only(tmp_path, "text.txt")
    assert not notes
    prepare_with(2_000_009)
    (note,) = notes
    assert "may need 2,000,010 bytes" in note
    (tmp_path / "corpus.h5").unlink()
    prepare_with(2_000_010)
    assert len(notes) == 1


# going on ----------------------------------------------------------------------------------------


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A point in the progress file after each few characters, there before the next are encoded."""
    keep = progress.ProgressFile.keep

    def keep_now(log: progress.ProgressFile, point: progress.Point, *, file: int) -> None:
        keep(log, point, file=file)
        log.settle()

    monkeypatch.setattr(progress.ProgressFile, "keep", keep_now)
    monkeypatch.setattr(progress, "_EVERY_S", 0)
    monkeypatch.setattr(packing, "BLOCK", 200)
    monkeypatch.setattr(encoding, "_BATCH", 100)


def killed(
    folder: Path, sources: Sources, *, after: int, resume: bool = False, **options: Any
) -> bool:
    """Prepare, and die at the n-th time that bytes are written; False: it was done before."""
    write, left = Draft._write, iter(range(after))

    def dying(draft: Draft, at: int, content: memoryview) -> None:
        if next(left, None) is None:
            # As torn as a write can be, and the progress file as far as its thread has come.
            write(draft, at, content[: len(content) // 2])
            raise Killed
        write(draft, at, content)

    leave = Draft.__exit__

    def leaving(draft: Draft, kind: type[BaseException] | None, *rest: Any) -> None:
        if kind is Killed:
            draft._progress.close()
            draft._stack.close()
        else:
            leave(draft, kind, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Draft, "_write", dying)
        patch.setattr(Draft, "__exit__", leaving)
        try:
            prepared(folder, *sources, resume=resume, **options)
        except Killed:
            return True
    return False


def one_text(folder: Path) -> Sources:
    path = folder / "a.txt"
    path.write_bytes(tiny_shakespeare(folder).read_bytes()[:9000])
    return [path]


def packed_text(folder: Path) -> Sources:
    path = folder / "a.txt.gz"
    path.write_bytes(gzip.compress((TEXT / "emoji_zwj.txt").read_bytes() * 20))
    return [path]


def several(folder: Path) -> Sources:
    rows = folder / "rows.jsonl"
    texts = [f"row {n} of some text, é. " * (n % 7) for n in range(60)]
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return [*one_text(folder), rows, *packed_text(folder)]


CORPORA: list[Callable[[Path], Sources]] = [one_text, packed_text, several]


@pytest.mark.parametrize("corpus", CORPORA)
@pytest.mark.parametrize("tokenizer", ["gpt2", "bytes"])
@pytest.mark.usefixtures("often")
def test_a_prepare_killed_again_and_again_makes_the_same_file(
    corpus: Callable[[Path], Sources], tokenizer: str, tmp_path: Path
) -> None:
    sources = corpus(tmp_path)
    options = {"tokenizer": load_tokenizer(tokenizer), "val_fraction": 0.3}
    _, straight = prepared(tmp_path, *sources, **options)
    expected = datasets(straight.path)
    straight.path.unlink()
    before = sorted(path.name for path in tmp_path.iterdir())
    random = np.random.default_rng(0)
    n_kills = 0
    while killed(
        tmp_path, sources, after=int(random.integers(3, 15)), resume=n_kills > 0, **options
    ):
        n_kills += 1
        assert not straight.path.exists()
        assert n_kills < 100, "it goes on, but never far"
    assert n_kills >= 3
    assert datasets(straight.path) == expected
    assert only(tmp_path, "corpus.h5", *before)


@pytest.mark.parametrize(
    "options",
    [
        {"tokenizer": "bpe:300"},
        {"tokenizer": "bytes", "selection": Selection(weights=(0.2, 0.3, 0.5))},
    ],
    ids=["bpe", "mix"],
)
@pytest.mark.usefixtures("often")
def test_what_is_made_from_the_text_is_made_again(options: dict[str, Any], tmp_path: Path) -> None:
    """A vocabulary that was learnt from it; the parts of a mix, of which all train comes first."""
    sources = several(tmp_path)
    _, straight = prepared(tmp_path, *sources, **options)
    expected = datasets(straight.path)
    straight.path.unlink()
    assert killed(tmp_path, sources, after=20, **options)
    assert killed(tmp_path, sources, after=15, resume=True, **options)
    prepared(tmp_path, *sources, resume=True, **options)
    assert datasets(straight.path) == expected


@pytest.mark.usefixtures("often")
def test_what_is_done_is_not_encoded_again(tmp_path: Path) -> None:
    sources = several(tmp_path)
    seen: list[int] = []

    class Counting(Bytes):
        def encode(self, text: str) -> Any:
            seen.append(len(text))
            return super().encode(text)

    prepared(tmp_path, *sources, tokenizer=Counting())
    whole = sum(seen)
    (tmp_path / "corpus.h5").unlink()
    seen.clear()
    for n in range(4):
        assert killed(tmp_path, sources, after=30, resume=n > 0, tokenizer=Counting(), workers=1)
    prepared(tmp_path, *sources, tokenizer=Counting(), resume=True, workers=1)
    # A kill costs what is underway.
    assert whole < sum(seen) < whole + 4 * 1500


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("text", r"SHA-256 of .*rows\.jsonl was \w{64} and is \w{64}"),
        ("another text", r"SOURCE was .*a\.txt, .*rows\.jsonl, .* and is .*a\.txt"),
        ({"val_fraction": 0.2}, r"--val-fraction was 0\.1 and is 0\.2"),
        ({"tokenizer": "chars"}, r"--tokenizer was bytes \w{64} and is chars \w{64}"),
        ({"reading": Reading(errors="replace")}, "--errors was strict and is replace"),
        ("version", r"gptfast was .* and is 99\.0"),
    ],
)
@pytest.mark.usefixtures("often")
def test_what_has_changed_is_not_gone_on_with(
    change: str | dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = several(tmp_path)
    assert killed(tmp_path, sources, after=30, tokenizer="bytes")
    left = sorted(path.name for path in tmp_path.iterdir())
    options = {"tokenizer": "bytes", **(change if isinstance(change, dict) else {})}
    if change == "text":
        with sources[1].open("a") as file:
            file.write("\n")
    elif change == "another text":
        sources = sources[:1]
    elif change == "version":
        monkeypatch.setattr(progress, "__version__", "99.0")
    with pytest.raises(
        Refused, match=rf"^--resume: {message}, so the tokens would not be the same"
    ):
        prepared(tmp_path, *sources, resume=True, **options)
    assert only(tmp_path, *left), "and it is still there to be gone on with"


@pytest.mark.usefixtures("often")
def test_without_resume_it_begins_anew_and_says_so(tmp_path: Path) -> None:
    sources = several(tmp_path)
    assert killed(tmp_path, sources, after=30, tokenizer="bytes")
    before = {path.name for path in sources} | {"tinyshakespeare.txt", "corpus.h5"}
    notes: list[str] = []
    prepared(tmp_path, *sources, tokenizer="bytes", note=notes.append)
    assert only(tmp_path, *before)
    (note,) = notes
    assert " tokens, goes now: with --resume it would" in note
    notes.clear()
    prepared(tmp_path, *sources, tokenizer="bytes", note=notes.append, resume=True, force=True)
    assert notes == [f"{tmp_path / 'corpus.h5'}: there is nothing to resume, it begins anew"]


@pytest.mark.usefixtures("often")
def test_what_is_damaged_is_not_gone_on_with(tmp_path: Path) -> None:
    """Ids that are not those of the progress file; and one whose last line is half a line."""
    sources = one_text(tmp_path)
    assert killed(tmp_path, sources, after=12, tokenizer="bytes")
    (partial,) = tmp_path.glob(".*.partial")
    (log,) = tmp_path.glob(".*.journal")
    whole = log.read_bytes()
    with log.open("ab") as file:
        file.write(whole.splitlines()[-1][:-5])
    assert killed(tmp_path, sources, after=3, tokenizer="bytes", resume=True)
    assert all(json.loads(line) for line in log.read_bytes().splitlines())
    content = bytearray(partial.read_bytes())
    content[2 * 4096 + 10] ^= 1
    partial.write_bytes(content)
    with pytest.raises(Refused, match="what there is of it is damaged: run the command without"):
        prepared(tmp_path, *sources, tokenizer="bytes", resume=True)


def test_another_process_at_work_is_left_alone(tmp_path: Path) -> None:
    theirs = tmp_path / f".corpus.h5.{os.getppid()}.partial"
    theirs.write_bytes(b"")
    with pytest.raises(Refused, match=f"process {os.getppid()} is at work on it"):
        prepared(tmp_path, TEXT / "plain_small.txt", resume=True)
    assert only(tmp_path, theirs.name)


def test_a_number_that_another_process_has_now_is_no_obstacle(tmp_path: Path) -> None:
    """After a reboot: the process began after the file was last written."""
    theirs = tmp_path / f".corpus.h5.{os.getppid()}.partial"
    theirs.write_bytes(b"")
    os.utime(theirs, (1_000_000_000, 1_000_000_000))
    notes: list[str] = []
    prepared(tmp_path, TEXT / "plain_small.txt", resume=True, note=notes.append)
    assert only(tmp_path, "corpus.h5")
    assert "nothing to resume" in notes[0]


@pytest.mark.usefixtures("often")
def test_what_is_gone_on_with_is_ours_before_it_is_written(tmp_path: Path) -> None:
    """Another process must not sweep it meanwhile."""
    assert killed(tmp_path, one_text(tmp_path), after=12, tokenizer="bytes")
    for path in tmp_path.glob(".*"):
        os.utime(path, (1_000_000_000, 1_000_000_000))
    found = progress.find_unfinished(tmp_path / "corpus.h5")
    assert found is not None
    found.take_over(tmp_path / "corpus.h5")
    ages = [time.time() - path.stat().st_mtime for path in tmp_path.glob(".*")]
    assert len(ages) == 2
    assert max(ages) < 60


# real signals ------------------------------------------------------------------------------------

SLOW = """
import sys, time
from gptfast.cli import main
from gptfast.data.prepare import encoding, progress, packing
from gptfast.tokenizers.plain import Bytes

progress._EVERY_S, packing.BLOCK, encoding._BATCH = 0.05, 2000, 2000
encode = Bytes.encode
def slowly(self, text):
    time.sleep(0.01)
    return encode(self, text)
Bytes.encode = slowly
sys.exit(main(sys.argv[1:]))
"""


def slow(text: Path, *options: str, limit: int = -1) -> subprocess.Popen[str]:
    """`gptfast prepare`, 100 chunks of 2000 bytes a second, on a disk with `limit` bytes a file."""
    out = text.with_name("corpus.h5")
    args = ["prepare", text, "--out", out, "--tokenizer=bytes", "--workers=1", *options]
    return subprocess.Popen(
        [sys.executable, "-c", SLOW, *args],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_stopped_prepare_is_gone_on_with(signum: signal.Signals, tmp_path: Path) -> None:
    """TXT-28."""
    text = tmp_path / "text.txt"
    text.write_bytes(b"sixteen letters\n" * 6_250)  # 0.5 s
    running = slow(text)
    while not any(tmp_path.glob(".*.journal")):
        assert running.poll() is None, running.stderr.read()
        time.sleep(0.01)
    time.sleep(0.1)
    running.send_signal(signum)
    _, err = running.communicate(timeout=20)
    assert "Traceback" not in err
    if signum != signal.SIGKILL:
        assert running.returncode == 128 + signum
        assert "the same command with --resume goes on with it" in err
    assert not (tmp_path / "corpus.h5").exists()
    (partial,) = tmp_path.glob(".*.partial")
    assert partial.stat().st_size > 20_000
    again = slow(text, "--resume")
    again.communicate(timeout=20)
    assert again.returncode == 0
    expected = text.read_bytes()
    found = datasets(tmp_path / "corpus.h5")
    assert bytes(found["train"] + found["val"]) == expected
    assert only(tmp_path, "text.txt", "corpus.h5")


def test_a_full_disk_is_gone_on_from(tmp_path: Path) -> None:
    """TXT-28: with what there was, once there is room."""
    text = tmp_path / "text.txt"
    text.write_bytes(b"sixteen letters\n" * 6_250)
    full = slow(text, limit=100_000)
    _, err = full.communicate(timeout=20)
    assert full.returncode == 1
    kept, error = err.splitlines()[-2:]
    assert "the same command with --resume goes on with it" in kept
    assert f"{tmp_path / 'corpus.h5'}: cannot be written (File too large)" in error
    again = slow(text, "--resume")
    again.communicate(timeout=20)
    found = datasets(tmp_path / "corpus.h5")
    assert bytes(found["train"] + found["val"]) == text.read_bytes()


# who reads the target ----------------------------------------------------------------------------


def test_a_run_that_has_the_file_mapped_reads_on_in_the_old_one(tmp_path: Path) -> None:
    _, store = prepared(tmp_path, TEXT / "plain_small.txt", tokenizer="bytes")
    mapped = store.tokens("train")
    starts = np.array([0, 700, 7], dtype=np.int64)
    before = store.read("train", starts, 100)
    inode = store.path.stat().st_ino
    _, after = prepared(tmp_path, TEXT / "crlf.txt", tokenizer="bytes", force=True)
    assert after.path.stat().st_ino != inode
    assert after.fingerprint != store.fingerprint
    assert (store.read("train", starts, 100) == before).all()
    assert bytes(mapped[:].tolist()) == (TEXT / "plain_small.txt").read_bytes()[: len(mapped)]
    # One that opens it anew is told.
    store.close()
    with pytest.raises(GptfastError, match="has been replaced since this run opened it"):
        store.read("train", starts, 100)
