"""What `gptfast prepare` reads besides plain text files: packed files, rows, standard input."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import json
import lzma
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from data_helpers import (
    INPUTS,
    TEXT,
    command,
    needs_proc,
    only,
    prepared,
    spent,
    stored_ids,
    tiny_shakespeare,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from gptfast.cli import main
from gptfast.data.prepare import encoding, packing, selection
from gptfast.data.prepare.formats import Reading, Tally, read_pieces
from gptfast.data.prepare.packing import Input, unpacked
from gptfast.data.prepare.prepare import PrepareOptions, prepare
from gptfast.data.store import Store
from gptfast.errors import GptfastError, Refused
from gptfast.tokenizers.tokenizer import load_tokenizer

PACKED = INPUTS / "compressed"
JSONL = INPUTS / "jsonl"
PARQUET = INPUTS / "parquet"
EOT = 50256
SKIP = Reading(on_bad_row="skip")


def gz(content: bytes) -> bytes:
    return gzip.compress(content, mtime=0)


def zstd(content: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(content)


def rows_of(path: Path, key: str = "text") -> list[str]:
    """The texts in a JSONL file, read in the plainest way."""
    lines = path.read_text(encoding="utf-8-sig").split("\n")
    rows = [json.loads(line) for line in lines if line.strip()]
    return [row[key] for row in rows if row[key]]


def encoded(texts: list[str]) -> list[int]:
    """Each text as a document of its own."""
    tokenizer = load_tokenizer("gpt2")
    return [i for text in texts for i in (*tokenizer.encode(text).tolist(), EOT)]


OK_ROWS = rows_of(JSONL / "ok.jsonl")


# packed files ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("ok.txt.gz", gzip.decompress((PACKED / "ok.txt.gz").read_bytes())),
        ("gz_bytes_named.txt", gzip.decompress((PACKED / "gz_bytes_named.txt").read_bytes())),
        ("plain_named.txt.gz", (PACKED / "plain_named.txt.gz").read_bytes()),
        pytest.param(
            "two_members.txt.gz", b"member one\n" * 50 + b"member two\n" * 50, id="TXT-20"
        ),
    ],
)
def test_packing_is_told_by_content(name: str, content: bytes, tmp_path: Path) -> None:
    """TXT-18: and gives the ids of the text itself."""
    (tmp_path / "plain.txt").write_bytes(content)
    _, plain = prepared(tmp_path, tmp_path / "plain.txt")
    _, store = prepared(tmp_path, PACKED / name, force=True)
    assert store.fingerprint == plain.fingerprint
    assert store.tokenizer().decode_bytes(stored_ids(store)) == content


@pytest.mark.parametrize("name", ["ok.jsonl.zst", "two_frames.jsonl.zst"])
def test_packed_rows_are_the_rows(name: str, tmp_path: Path) -> None:
    """TXT-18, TXT-20."""
    result, store = prepared(tmp_path, PACKED / name, val_fraction=0)
    assert result.n_documents == 6
    assert stored_ids(store) == encoded(OK_ROWS)


PACKERS: list[Callable[[bytes], bytes]] = [gz, zstd]
FILLING = {gz: b"\0" * 3, zstd: b"\x50\x2a\x4d\x18\x02\x00\x00\x00ab"}
"""What may stand behind a member: zeros, or a frame to be skipped."""


@given(
    parts=st.lists(st.binary(max_size=60), min_size=1, max_size=4),
    pack=st.sampled_from(PACKERS),
    filled=st.booleans(),
    block=st.integers(4, 50),
    sip=st.integers(1, 20),
)
@settings(max_examples=200, deadline=None)
def test_all_members_are_unpacked_wherever_blocks_end(
    parts: list[bytes], pack: Callable[[bytes], bytes], filled: bool, block: int, sip: int
) -> None:
    packed = b"".join(pack(b"t" + part) + FILLING[pack] * filled for part in parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "BLOCK", block)
        patch.setattr(packing, "_SIP", sip)
        file = Input("x", io.BytesIO(packed))
        blocks = list(unpacked(file))
    assert b"".join(blocks) == b"".join(b"t" + part for part in parts)
    assert {len(b) for b in blocks[:-1]} <= {block}
    assert file.n_bytes == len(packed)


@pytest.mark.parametrize("pack", PACKERS)
@pytest.mark.parametrize("kept", [6, 100, -1])
def test_a_cut_archive_is_refused(
    pack: Callable[[bytes], bytes], kept: int, tmp_path: Path
) -> None:
    """Also where all but its check sum is there, and in the second of two members."""
    text = (TEXT / "plain_small.txt").read_bytes()
    for whole_members in (b"", pack(b"first")):
        path = tmp_path / "cut.txt"
        path.write_bytes(whole_members + pack(text)[:kept])
        with pytest.raises(Refused, match=f"^{path}: is cut short, the end of its .* is missing"):
            prepared(tmp_path, path, tokenizer="bytes")
    assert only(tmp_path, "cut.txt")


@pytest.mark.parametrize("pack", PACKERS)
def test_a_damaged_archive_is_refused(pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = tmp_path / "damaged.gz"
    path.write_bytes(pack(b"text " * 100) + b"what is this?")
    with pytest.raises(Refused, match=f"^{path}: is damaged .* data"):
        prepared(tmp_path, path)
    assert only(tmp_path, "damaged.gz")


def tar(content: bytes) -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as file:
        entry = tarfile.TarInfo("text.txt")
        entry.size = len(content)
        file.addfile(entry, io.BytesIO(content))
    return archive.getvalue()


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (bz2.compress(b"text"), "bzip2"),
        (lzma.compress(b"text"), "xz"),
        (b"PK\x03\x04 and so on", "zip"),
        (tar(b"text"), "tar"),
        (gz(tar(b"text")), "tar"),
        (zstd(gz(b"text")), "gzip"),
        (gz((PARQUET / "ok.parquet").read_bytes()), "parquet"),
        ((INPUTS / "hdf5/ok_u16_ramp20000.h5").read_bytes(), "HDF5"),
    ],
)
@pytest.mark.parametrize("name", ["text.txt", "rows.jsonl"])
def test_what_is_not_text_is_refused(content: bytes, kind: str, name: str, tmp_path: Path) -> None:
    """TXT-18: packed or not, and never read as text."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(Refused, match=rf"{name}: holds {kind} data, where only text is read"):
        prepared(tmp_path, tmp_path / name, reading=SKIP, tokenizer="bytes")
    assert only(tmp_path, name)


@pytest.mark.parametrize(
    ("source", "module", "advice"),
    [
        (PACKED / "ok.jsonl.zst", "zstandard", r"zstandard .* pip install 'gptfast\[zst\]'"),
        (PARQUET / "ok.parquet", "pyarrow", r"pyarrow .* pip install 'gptfast\[parquet\]'"),
    ],
)
def test_a_package_that_is_not_installed_is_named(
    source: Path, module: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TXT-18."""
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(Refused, match=rf"^{source}: .*{advice}"):
        prepared(tmp_path, source)
    assert only(tmp_path)


# rows --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "reading", "left_out"),
    [
        pytest.param(JSONL / "ok.jsonl", Reading(), (0, 0, 0), id="ok"),
        pytest.param(JSONL / "bom.jsonl", Reading(), (0, 0, 0), id="TXT-06"),
        pytest.param(JSONL / "blank_lines_crlf.jsonl", Reading(), (0, 0, 0), id="TXT-21 blank"),
        pytest.param(JSONL / "missing_key_row3.jsonl", SKIP, (0, 0, 1), id="TXT-21 key"),
        pytest.param(JSONL / "bad_json_line4.jsonl", SKIP, (0, 0, 1), id="TXT-21 line"),
        pytest.param(
            JSONL / "key_is_content.jsonl", Reading(text_key="content"), (0, 0, 0), id="TXT-22"
        ),
        pytest.param(
            JSONL / "key_upper_TEXT.jsonl", Reading(text_key="TEXT"), (0, 0, 0), id="TXT-22 case"
        ),
        pytest.param(JSONL / "null_text_row2.jsonl", Reading(), (0, 1, 0), id="TXT-23"),
        pytest.param(PARQUET / "ok.parquet", Reading(), (0, 0, 0), id="parquet"),
        pytest.param(
            PARQUET / "no_text_column.parquet",
            Reading(text_key="body"),
            (0, 0, 0),
            id="TXT-22 parquet",
        ),
    ],
)
def test_rows_become_documents(
    path: Path, reading: Reading, left_out: tuple[int, int, int], tmp_path: Path
) -> None:
    """Six rows, 969 tokens of text, and one separator behind each."""
    result, store = prepared(tmp_path, path, reading=reading, val_fraction=0)
    ids = stored_ids(store)
    assert ids == encoded(OK_ROWS)
    assert (len(ids), ids.count(EOT)) == (975, 6)
    assert store.documents("train").tolist() == [
        0,
        *(at + 1 for at, i in enumerate(ids[:-1]) if i == EOT),
    ]
    assert (result.n_empty, result.n_null, result.n_bad_rows) == left_out


def test_a_separator_is_never_taken_from_the_text(tmp_path: Path) -> None:
    """TXT-16."""
    path = JSONL / "endoftext_in_row.jsonl"
    _, store = prepared(tmp_path, path, val_fraction=0)
    ids = stored_ids(store)
    assert ids.count(EOT) == 7
    assert ids == encoded(rows_of(path))


@pytest.mark.parametrize(
    ("path", "n_documents", "n_empty", "n_null", "shown"),
    [
        (JSONL / "null_text_row2.jsonl", 6, 0, 1, "1 null"),
        (JSONL / "empty_text_rows.jsonl", 3, 5, 0, "5 empty"),
        (PARQUET / "null_rows.parquet", 3, 1, 2, "2 null + 1 empty"),
    ],
)
def test_rows_without_text_are_counted_and_nothing_else(
    path: Path,
    n_documents: int,
    n_empty: int,
    n_null: int,
    shown: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """TXT-23: no separator of their own, and never the word None."""
    result, store = prepared(tmp_path, path, val_fraction=0)
    assert (result.n_documents, result.n_empty, result.n_null) == (n_documents, n_empty, n_null)
    ids = stored_ids(store)
    assert ids.count(EOT) == n_documents == len(store.documents("train"))
    assert [EOT, EOT] not in [ids[at : at + 2] for at in range(len(ids))]
    assert "None" not in store.tokenizer().decode(ids)
    assert main(["prepare", str(path), "--out", str(store.path), "--force"]) == 0
    assert f"documents left out: {shown}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("row", "cause"),
    [
        ('{"text": "cut', r"is not JSON \(Unterminated string starting at, character 10\)"),
        ("[" * 100_000, "is not JSON that can be read"),
        ("9" * 5_000, "is not JSON that can be read|is a number"),
        ("[1]", "is an array, which must be an object"),
        ("null", "is null, which must be an object"),
        ('{"text": 7}', "has a number under text, which must be a string"),
        ('{"text": [true]}', "has an array under text"),
        ('{"body": 1, "id": 2}', "has no key text, it has body, id: name the key"),
        ('{"Text": "a"}', "has no key text, it has Text: use --text-key Text"),
        ("{}", "has no key text, it has none"),
        ('{"a\\nb": 1}', "has no key text, it has a b: "),
        ('{"text": "ab\\ud83d"}', r"character 3 of its text \(\\ud83d\) is not Unicode"),
        (b'{"text": "ab\xff"}', r"character 3 of its text \(byte 0xff\) is not Unicode"),
    ],
)
def test_a_bad_row_is_named_or_left_out(row: str | bytes, cause: str, tmp_path: Path) -> None:
    """TXT-21: with file, line, what was wanted and what is there."""
    path = tmp_path / "rows.jsonl"
    raw = row.encode() if isinstance(row, str) else row
    path.write_bytes(b'{"text": "first"}\r\n\r\n' + raw + b'\n{"text": "last"}')
    with pytest.raises(Refused, match=rf"^{path}:3: ({cause}).*--on-bad-row skip$") as refusal:
        prepared(tmp_path, path, tokenizer="bytes")
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 600
    assert only(tmp_path, "rows.jsonl")

    result, store = prepared(tmp_path, path, reading=SKIP, tokenizer="bytes", val_fraction=0)
    assert (result.n_documents, result.n_bad_rows) == (2, 1)
    assert store.tokenizer().decode(stored_ids(store)) == "firstlast"


def test_what_is_no_character_is_replaced_and_counted(tmp_path: Path) -> None:
    """TXT-09, in rows: only what is in the text counts."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "a\xff\\udc00b", "id": "\xff"}\n{"text": "\\ud83d\\ude00"}\n')
    result, store = prepared(
        tmp_path, path, reading=Reading(errors="replace"), tokenizer="bytes", val_fraction=0
    )
    assert store.tokenizer().decode(stored_ids(store)) == "a\ufffd\ufffdb😀"
    assert result.n_replaced == 2


def test_a_file_of_bad_rows_is_an_empty_corpus(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"0 tokens, .* \(6 bad rows are left out\)"):
        prepared(tmp_path, JSONL / "key_is_content.jsonl", reading=SKIP)


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
ROWS = st.lists(st.one_of(TEXTS, st.none(), st.just(7)), max_size=12)


@given(
    rows=ROWS,
    newline=st.sampled_from(["\n", "\r\n", "\n\n", "\r\n \r\n"]),
    ends=st.booleans(),
    ascii_only=st.booleans(),
    mark=st.booleans(),
    pack=st.sampled_from([bytes, *PACKERS]),
    block=st.integers(4, 60),
)
@settings(max_examples=200, deadline=None)
def test_rows_are_read_wherever_blocks_end(
    rows: list[str | int | None],
    newline: str,
    ends: bool,
    ascii_only: bool,
    mark: bool,
    pack: Callable[[bytes], bytes],
    block: int,
) -> None:
    lines = [json.dumps({"n": 1, "text": row}, ensure_ascii=ascii_only) for row in rows]
    content = "\ufeff" * mark + newline.join(lines) + newline * ends
    tally = Tally()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "BLOCK", block)
        file = Input("rows.jsonl.gz", io.BytesIO(pack(content.encode())))
        pieces = list(read_pieces(file, SKIP, tally))
    assert [piece.text for piece in pieces] == [row for row in rows if isinstance(row, str)]
    assert all(piece.ends for piece in pieces)
    assert (tally.n_null, tally.n_bad_rows) == (rows.count(None), rows.count(7))


def test_the_size_of_a_batch_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = [JSONL / "ok.jsonl", TEXT / "plain_small.txt", PARQUET / "ok.parquet"]
    seen: list[tuple[int, int, int]] = []
    _, whole = prepared(tmp_path, *sources)
    expected = (whole.fingerprint, [whole.documents(s).tolist() for s in whole.splits])
    monkeypatch.setattr(packing, "BLOCK", 50)
    monkeypatch.setattr(encoding, "_BATCH", 1)
    _, cut = prepared(tmp_path, *sources, force=True, progress=lambda *now: seen.append(now))
    assert (cut.fingerprint, [cut.documents(s).tolist() for s in cut.splits]) == expected
    assert len(seen) > 100
    n_bytes = cut.n_bytes("train") + cut.n_bytes("val")
    assert seen[-1][:2] == (n_bytes, n_bytes)


def test_a_single_row_is_a_document(tmp_path: Path) -> None:
    """It ends, as a single text does not; the border is inside of it."""
    path = tmp_path / "one.jsonl"
    path.write_text('{"text": "one two three four"}')
    _, store = prepared(tmp_path, path, val_fraction=0.5)
    tokenizer = load_tokenizer("gpt2")
    assert store.tokens("train")[:].tolist() == tokenizer.encode("one two t").tolist()
    assert store.tokens("val")[:].tolist() == [*tokenizer.encode("hree four").tolist(), EOT]


def test_the_files_own_hash_is_kept(tmp_path: Path) -> None:
    names = [PARQUET / "ok.parquet", PACKED / "ok.jsonl.zst", PACKED / "ok.txt.gz"]
    _, store = prepared(tmp_path, *names)
    with h5py.File(store.path) as file:
        sources = json.loads(file["sources"][:].tobytes())
    for path, source in zip(names, sources, strict=True):
        assert source["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
        assert source["bytes"] == path.stat().st_size
    assert [source["documents"] for source in sources] == [6, 6, 1]


# parquet -----------------------------------------------------------------------------------------


def parquet(path: Path, column: Any, **options: Any) -> Path:
    pq.write_table(pa.table({"id": range(len(column)), "text": column}), path, **options)
    return path


def raw_strings(*texts: bytes) -> pa.Array:
    """Strings that nobody has checked."""
    return pa.Array.from_buffers(pa.string(), len(texts), pa.array(texts).buffers())


@pytest.mark.parametrize(
    "column",
    [
        pa.array(["one", None, "two é", ""] * 100),
        pa.array(["one", None, "two é", ""] * 100, type=pa.large_string()),
        pa.array([b"one", None, "two é".encode(), b""] * 100),
        pa.array(["one", None, "two é", ""] * 100).dictionary_encode(),
    ],
    ids=["string", "large_string", "binary", "dictionary"],
)
def test_all_row_groups_are_read(column: pa.Array, tmp_path: Path) -> None:
    """By content, and in whatever Arrow keeps strings."""
    path = parquet(tmp_path / "table.data", column, row_group_size=90)
    assert pq.ParquetFile(path).num_row_groups == 5
    result, store = prepared(tmp_path, path, val_fraction=0)
    assert stored_ids(store) == encoded(["one", "two é"] * 100)
    assert (result.n_null, result.n_empty) == (100, 100)


@pytest.mark.parametrize(
    ("name", "column", "cause"),
    [
        ("no_text_column.parquet", None, ": has no column text, it has body, id: name the column"),
        ("x.parquet", pa.array([1, 2]), ": column text is int64, which must be strings"),
        (
            "x.parquet",
            raw_strings(b"fine", b"ab\xff"),
            r":2: character 3 of its text \(byte 0xff\) is not Unicode",
        ),
    ],
)
def test_a_table_without_texts_is_refused(
    name: str, column: pa.Array | None, cause: str, tmp_path: Path
) -> None:
    """TXT-22."""
    path = PARQUET / name if column is None else parquet(tmp_path / name, column)
    with pytest.raises(Refused, match=rf"^{path}{cause}"):
        prepared(tmp_path, path)
    assert not (tmp_path / "corpus.h5").exists()


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1 and so on", None])
def test_a_cut_table_is_refused(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "cut.parquet"
    path.write_bytes((PARQUET / "ok.parquet").read_bytes()[:-100] if content is None else content)
    with pytest.raises(Refused, match=f"^{path}: is cut short or damaged") as refusal:
        prepared(tmp_path, path)
    assert "\n" not in str(refusal.value)
    assert only(tmp_path, "cut.parquet")


# standard input ----------------------------------------------------------------------------------


@pytest.mark.parametrize("pack", [bytes, *PACKERS])
def test_standard_input_is_a_source(pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    """As a file is, also packed, and kept nowhere; the file has a name of its own."""
    text = (TEXT / "plain_small.txt").read_bytes()
    ran = command("-", "--json", folder=tmp_path, stdin=pack(text))
    assert ran.returncode == 0, ran.stderr
    answer = json.loads(ran.stdout)
    assert answer["path"] == str(tmp_path / "data" / "stdin-gpt2.h5")
    assert answer["source"] == "standard input"
    _, store = prepared(tmp_path, TEXT / "plain_small.txt")
    assert answer["fingerprint"] == store.fingerprint
    assert only(tmp_path / "data", "stdin-gpt2.h5")


def test_standard_input_is_one_of_several(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a file")
    ran = command("a.txt", "-", "-", "--out=x.h5", "--val-fraction=0", folder=tmp_path, stdin=b"in")
    assert ran.returncode == 0, ran.stderr
    store = Store.open(tmp_path / "x.h5")
    assert stored_ids(store) == encoded(["a file", "in"])
    assert store.source == "a.txt, standard input"


@pytest.mark.parametrize(
    ("stdin", "message"),
    [
        (b"ab\xff", "standard input: byte 2 (0xff) is not UTF-8"),
        (b"", "standard input: 0 tokens"),
        (gz(b"text" * 1000)[:-9], "standard input: is cut short"),
    ],
)
def test_errors_name_standard_input(stdin: bytes, message: str, tmp_path: Path) -> None:
    ran = command("-", folder=tmp_path, stdin=stdin)
    assert ran.returncode == 2
    (line,) = ran.stderr.decode().splitlines()
    assert message in line
    assert only(tmp_path)


@pytest.mark.parametrize("limit", ["-f 100", "-f 0"])
def test_standard_input_that_does_not_fit_is_one_line(limit: str, tmp_path: Path) -> None:
    text = tiny_shakespeare(tmp_path)
    script = f'ulimit {limit}; cat {text} | "{sys.executable}" -m gptfast prepare - --out x.h5'
    ran = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 1
    (line,) = ran.stderr.splitlines()
    assert f"standard input: cannot be kept in {tmp_path} (" in line
    assert only(tmp_path, text.name)


# folders -----------------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "project"
    for name in ("a.py", "src/b.py", "src/deep/c.py", "src/d.TXT", ".git/e.py", "src/.f.py"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{name}\n")
    return folder


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("*.py", ["a.py", "src/b.py", "src/deep/c.py"]),
        ("**/*.py", ["a.py", "src/b.py", "src/deep/c.py"]),
        ("src/*.py", ["src/b.py"]),
        ("src/**/*.py", ["src/b.py", "src/deep/c.py"]),
        ("[bd].*", ["src/b.py", "src/d.TXT"]),
    ],
)
def test_glob_picks_any_text_of_a_folder(
    pattern: str, found: list[str], project: Path, tmp_path: Path
) -> None:
    _, store = prepared(tmp_path, project, pattern=pattern, tokenizer="bytes", val_fraction=0)
    assert store.tokenizer().decode(stored_ids(store)) == "".join(f"{name}\n" for name in found)


@pytest.mark.parametrize(
    ("pattern", "source", "message"),
    [
        ("*.rs", "project", "project: no file in this folder .* matches --glob"),
        ("/a.py", "project", "--glob /a.py: is no pattern for files of a folder"),
        ("*.py", "project/a.py", "--glob .*: it picks files of a folder, and no folder is named"),
    ],
)
def test_a_glob_that_picks_nothing_is_refused(
    pattern: str, source: str, message: str, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project.parent)
    with pytest.raises(Refused, match=f"^{message}"):
        prepare([source], PrepareOptions(pattern=pattern))
    assert only(project.parent, "project")


def test_a_folder_gives_what_it_knows_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt.gz").write_bytes(gz(b"packed"))
    (folder / "b.JSONL").write_text('{"text": "row"}')
    (folder / "c.ndjson.zst").write_bytes(zstd(b'{"text": "packed row"}'))
    parquet(folder / "d.parquet", pa.array(["cell"]))
    (folder / "e.csv.gz").write_bytes(b"not read")
    result, store = prepared(tmp_path, folder, val_fraction=0)
    assert stored_ids(store) == encoded(["packed", "row", "packed row", "cell"])
    assert result.n_documents == 4


# the command -------------------------------------------------------------------------------------


def test_the_command_takes_the_options_of_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = str(JSONL / "key_is_content.jsonl")
    assert main(["prepare", path]) == 2
    assert "has no key text, it has content" in capsys.readouterr().err
    assert main(["prepare", path, "--text-key", "content"]) == 0
    assert "6 documents" in capsys.readouterr().out
    assert main(["prepare", str(JSONL / "bad_json_line4.jsonl"), "--on-bad-row", "skip"]) == 0
    out, err = capsys.readouterr()
    assert "6 documents" in out
    assert "skipped 1 bad row\n" in err


def test_a_packed_file_gives_its_name_without_its_endings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = prepare([PACKED / "ok.jsonl.zst"])
    assert result.path == tmp_path / "data" / "ok-gpt2.h5"


# memory ------------------------------------------------------------------------------------------

LINE = b'{"text": "' + b"sixteen letters " * 61 + b'"}\n'


def _text_zst(folder: Path, n_mb: int) -> Path:
    path = folder / f"{n_mb}.txt.zst"
    path.write_bytes(zstd(b"sixteen letters\n" * 62_500 * n_mb))
    return path


def _rows_gz(folder: Path, n_mb: int) -> Path:
    packer = zlib.compressobj(wbits=31)
    path = folder / f"{n_mb}.jsonl.gz"
    path.write_bytes(packer.compress(LINE * 1000 * n_mb) + packer.flush())
    return path


def _one_row_group(folder: Path, n_mb: int) -> Path:
    texts = [f"{number} " + "sixteen letters " * 61 for number in range(1000 * n_mb)]
    return parquet(
        folder / f"{n_mb}.parquet",
        pa.array(texts),
        row_group_size=10**9,
        use_dictionary=False,
        compression="none",
    )


@needs_proc
@pytest.mark.parametrize("write", [_text_zst, _rows_gz, _one_row_group])
def test_memory_does_not_grow_with_what_is_packed(
    write: Callable[[Path, int], Path], tmp_path: Path
) -> None:
    """TXT-17: 70 MB take what 30 MB take, but for what threads leave in their heaps."""
    peaks = []
    for n_mb in (30, 70):
        took = spent(write(tmp_path, n_mb), tmp_path / "out.h5")
        assert took.n_tokens >= n_mb * 970_000
        peaks.append(took.peak_kb)
    assert peaks[1] < peaks[0] + 25_000, peaks
    assert peaks[1] < 400_000, peaks


def test_a_packed_text_that_changes_meanwhile_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parquet is read out of order, and its hash is of the whole file all the same."""
    path = parquet(tmp_path / "x.parquet", pa.array(["one", "two"]))
    survey = selection.survey

    def surveyed(*args: object, **options: object) -> object:
        found = survey(*args, **options)
        parquet(path, pa.array(["one", "six"]))
        return found

    monkeypatch.setattr(selection, "survey", surveyed)
    with pytest.raises(GptfastError, match=r"x\.parquet: has changed while it was read"):
        prepared(tmp_path, path)
    assert only(tmp_path, "x.parquet")
