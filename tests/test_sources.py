"""Sources beyond files: corpora by name, data sets of the Hugging Face hub, standard input."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_helpers import INPUTS, command, only, prepared, stored_ids
from flaky_site import Site, flaky_site
from hub_site import COMMIT, hub_site

from gptfast.cli import main
from gptfast.data.prepare import corpora, fetch, hub
from gptfast.data.prepare.corpora import known_names
from gptfast.data.prepare.formats import Reading
from gptfast.data.prepare.hub import DataSet
from gptfast.data.prepare.selection import Selection
from gptfast.data.prepare.sources import short_name
from gptfast.errors import GptfastError, Refused

# corpora by name ---------------------------------------------------------------------------------


def parquet(*texts: str) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"text": list(texts), "id": list(range(len(texts)))}), sink)
    return sink.getvalue().to_pybytes()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A corpus of three files, known as `stories`."""
    monkeypatch.setattr(fetch, "_WAIT_S", 0.001)
    with flaky_site() as site:
        for number in range(3):
            texts = [f"story {number} {row} " + "la " * 30 for row in range(10)]
            site.files[f"{number}.parquet"] = parquet(*texts)
        hashes = {"0.parquet": hashlib.sha256(site.files["0.parquet"]).hexdigest()}
        table = tmp_path / "corpora.toml"
        table.write_text(
            f'[stories]\ntitle = "Stories"\npage = "-"\nfolder = "{site.address}"\n'
            f'files = ["0.parquet", "1.parquet", "2.parquet"]\n'
            f"[stories.sha256]\n" + "".join(f'"{k}" = "{v}"\n' for k, v in hashes.items())
        )
        monkeypatch.setattr(corpora, "TABLE", table)
        yield site


def test_the_shipped_table_is_sound() -> None:
    """Each address has a commit in it."""
    table = corpora.known()
    assert list(table) == ["tinystories", "fineweb-edu", "openwebtext"]
    assert known_names() == ("shakespeare", *table)
    assert [len(corpus.files) for corpus in table.values()] == [5, 14, 80]
    for corpus in table.values():
        assert len(set(corpus.files)) == len(corpus.files)
        assert corpus.folder.startswith(f"{corpus.page}/resolve/")
        commit = corpus.folder.removeprefix(f"{corpus.page}/resolve/").split("/")[0]
        assert len(bytes.fromhex(commit)) == 20
        assert set(corpus.sha256) <= set(corpus.files)


def test_a_corpus_is_fetched_and_kept(site: Site, tmp_path: Path) -> None:
    """And a dropped connection is no matter."""
    site.troubles = [1_000, 503]
    told: list[str] = []
    around: dict[str, Any] = {"cache_dir": tmp_path / "cache", "tell": told.append}
    result, store = prepared(tmp_path, "stories", tokenizer="bytes", val_fraction=0, **around)
    text = store.tokenizer().decode(stored_ids(store))
    assert text.startswith("story 0 0 la la")
    assert text.count("story") == 30
    assert result.source == f"Stories, {site.address}"
    assert [s["name"] for s in store.sources()] == [f"stories/{n}.parquet" for n in range(3)]
    assert [s["sha256"] for s in store.sources()] == [
        hashlib.sha256(content).hexdigest() for content in site.files.values()
    ]
    assert f"fetching {site.address}/0.parquet from byte 1,000 on" in told
    site.files.clear()
    _, again = prepared(
        tmp_path, "stories", tokenizer="bytes", val_fraction=0, force=True, **around
    )
    assert again.fingerprint == store.fingerprint


def test_only_what_is_wanted_is_fetched(site: Site, tmp_path: Path) -> None:
    result, store = prepared(
        tmp_path,
        "stories",
        selection=Selection(max_chars=1_500),
        cache_dir=tmp_path / "cache",
        val_fraction=0,
        tokenizer="bytes",
    )
    assert (len(site.asked), result.n_documents) == (2, 15)
    assert store.n_tokens("train") == 1_500


def test_a_corpus_that_does_not_fit_is_refused_before_anything_comes(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = sum(map(len, site.files.values()))
    for free, exit_code in ((needed - 1, 1), (needed * 100, 0)):
        usage = type("Usage", (), {"free": free})
        monkeypatch.setattr("shutil.disk_usage", lambda folder, usage=usage: usage)
        if exit_code:
            with pytest.raises(GptfastError, match=f"^stories: needs {needed:,} bytes more in"):
                prepared(tmp_path, "stories", cache_dir=tmp_path / "cache")
            assert site.asked == []
        else:
            prepared(tmp_path, "stories", cache_dir=tmp_path / "cache")


def test_a_file_that_is_another_is_refused(site: Site, tmp_path: Path) -> None:
    site.files["0.parquet"] = parquet("other")
    with pytest.raises(GptfastError, match=f"{site.address}/0.parquet: what came has SHA-256"):
        prepared(tmp_path, "stories", cache_dir=tmp_path / "cache")


def test_parquet_can_be_read_before_it_is_fetched(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(Refused, match=r"^stories: .* pip install 'gptfast\[parquet\]'"):
        prepared(tmp_path, "stories", cache_dir=tmp_path / "cache")
    assert site.asked == []


def test_a_known_name_wins_over_a_file_and_says_so(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("stories").write_text("a file")
    notes: list[str] = []
    result, _ = prepared(tmp_path, "stories", cache_dir=tmp_path / "cache", note=notes.append)
    assert result.n_documents == 30
    assert notes == ["stories is the corpus of that name: write ./stories for the file here"]


# data sets of the hub ----------------------------------------------------------------------------


@pytest.fixture
def data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as the hub has them: two files of a split, one of another."""
    monkeypatch.chdir(tmp_path)
    folder = Path("my-data")
    for name, texts in (
        ("train-0", ["one", "two", None]),
        ("train-1", ["three", "", "four"]),
        ("test-0", ["last"]),
    ):
        path = folder / "data" / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [{"text": text, "body": f"b{n}", "n": n} for n, text in enumerate(texts)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize(
    ("source", "column", "texts"),
    [
        ("hf:my-data", "text", "onetwothreefour"),
        ("hf:./my-data::train", "text", "onetwothreefour"),
        ("hf:my-data:default:test", "text", "last"),
        ("hf:my-data", "body", "b0b1b2b0b1b2"),
    ],
)
def test_a_data_set_folder_is_a_source(
    source: str, column: str, texts: str, data_set: Path, tmp_path: Path
) -> None:
    result, store = prepared(
        tmp_path, source, reading=Reading(text_key=column), tokenizer="bytes", val_fraction=0
    )
    assert store.tokenizer().decode(stored_ids(store)) == texts
    assert (result.n_null, result.n_empty) == ((1, 1) if "four" in texts else (0, 0))
    assert result.source == source
    assert only(tmp_path, "corpus.h5", "my-data")


def test_a_data_set_of_parquet_is_a_source_of_a_mix(data_set: Path) -> None:
    folder = Path("tables")
    folder.mkdir()
    (folder / "train.parquet").write_bytes(parquet("abcd " * 10, "efgh " * 10))
    Path("a.txt").write_text("text " * 100)
    assert main(["prepare", "--mix", "hf:tables:1", "a.txt:1", "--out=m.h5", "--json"]) == 0


@pytest.mark.parametrize(
    ("source", "column", "message"),
    [
        ("hf:", "text", "hf:: names no data set: write hf:NAME"),
        ("hf:my-data:a:b:c", "text", "names no data set"),
        ("hf:my-data:nope", "text", "BuilderConfig 'nope' not found. Available: .'default'.*check"),
        ("hf:my-data::nope", "text", "Bad split: nope. Available splits: .*train"),
        ("hf:my-data", "Text", "has no column Text, it has text, body, n: name the column"),
        ("hf:empty", "text", "EmptyDatasetError: .*doesn't contain any data files"),
        ("hf:my-data", "n", r"hf:my-data:1: has an array under text"),
    ],
)
def test_a_data_set_that_cannot_be_read_is_one_line(
    source: str, column: str, message: str, data_set: Path, tmp_path: Path
) -> None:
    Path("empty").mkdir()
    with pytest.raises(Refused, match=message) as error:
        prepared(tmp_path, source, reading=Reading(text_key=column))
    assert "\n" not in str(error.value)
    assert only(tmp_path, "empty", "my-data")


def test_without_a_network_the_hub_is_one_line(tmp_path: Path) -> None:
    ran = command("hf:somebody/something", folder=tmp_path, HF_HUB_OFFLINE="1")
    assert ran.returncode == 1
    (line,) = ran.stderr.decode().splitlines()
    assert "hf:somebody/something: cannot be read (" in line
    assert "offline mode is enabled" in line
    assert only(tmp_path)


def test_without_its_package_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(Refused, match=r"needs the package datasets, .* 'gptfast\[hf\]'"):
        prepared(tmp_path, "hf:somebody/something", cache_dir=tmp_path)


def test_the_parts_of_a_name() -> None:
    assert hub.parse("hf:a/b@v1:c:d") == DataSet("hf:a/b@v1:c:d", "a/b", "v1", "c", "d")
    assert hub.parse("hf:a/b") == DataSet("hf:a/b", "a/b", None, None, "train")
    assert hub.parse("hf:a/b::d") == DataSet("hf:a/b::d", "a/b", None, None, "d")
    assert short_name("hf:a/b@v1:c:d") == "b"


class Dropped(Exception):
    """The connection."""


@dataclass
class FarAway:
    """A stream from the hub."""

    sent: list[int] = field(default_factory=list)
    """Numbers of the rows that came."""
    last: int = 40
    """Before which row it breaks off."""


@pytest.fixture
def on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FarAway:
    """40 rows in four files, as if they were far away."""
    import datasets

    folder = tmp_path / "far"
    folder.mkdir()
    for file in range(4):
        rows = [{"text": f"text {10 * file + n:03} " + "x" * 90} for n in range(10)]
        (folder / f"train-{file}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    far_away = FarAway()

    def load(data_set: DataSet) -> Any:
        assert data_set.revision == COMMIT

        def seen(row: dict[str, str]) -> dict[str, str]:
            far_away.sent.append(int(row["text"].split()[1]))
            if far_away.sent[-1] >= far_away.last:
                raise Dropped("far away")
            return row

        rows = datasets.load_dataset(str(folder), split="train", streaming=True)
        return rows.map(seen, features=rows.features)

    monkeypatch.setattr(hub, "_load", load)
    monkeypatch.setattr(hub, "_FRAME", 500)
    return far_away


def test_rows_of_the_hub_are_fetched_once(on_the_hub: FarAway, tmp_path: Path) -> None:
    source = f"hf:far/away@{COMMIT}"
    for _ in range(2):
        result, store = prepared(
            tmp_path,
            source,
            cache_dir=tmp_path / "cache",
            tokenizer="bytes",
            val_fraction=0,
            force=True,
        )
    assert on_the_hub.sent == list(range(40))
    assert result.n_documents == 40
    assert store.source == f"{source} at commit {COMMIT}"


def test_a_limit_of_the_hub_sends_no_more(on_the_hub: FarAway, tmp_path: Path) -> None:
    result, _ = prepared(
        tmp_path,
        f"hf:far/away@{COMMIT}",
        cache_dir=tmp_path / "cache",
        selection=Selection(max_chars=1_500),
        val_fraction=0,
    )
    assert result.n_documents == 15
    assert len(on_the_hub.sent) == 16


def test_a_stream_that_breaks_off_goes_on(on_the_hub: FarAway, tmp_path: Path) -> None:
    """With the first row that is not kept; the rows are those of a stream that does not."""
    data_set = hub.parse(f"hf:far/away@{COMMIT}")
    notes: list[str] = []

    def fetched(folder: str) -> Path:
        path, _ = hub.keep_in_cache(
            data_set, tmp_path / folder, column="text", max_chars=None, note=notes.append
        )
        return path

    whole = fetched("a")
    for on_the_hub.last in (7, 25, 26):
        with pytest.raises(GptfastError, match=r"cannot be read \(Dropped: far away\)"):
            fetched("b")
        (partial,) = (tmp_path / "b" / "hub").glob("*.partial")
        with partial.open("ab") as file:  # as a kill between a frame and its place leaves it
            file.write(b"more than is known of")
    on_the_hub.last = 40
    on_the_hub.sent.clear()
    notes.clear()
    path = fetched("b")
    assert path.read_bytes() == whole.read_bytes()
    assert on_the_hub.sent == list(range(on_the_hub.sent[0], 40))
    assert on_the_hub.sent[0] > 20
    assert notes[1].endswith("characters of it are here already")
    assert only(path.parent, path.name, f"{path.name}.lock")


def test_a_data_set_comes_from_the_hub(tmp_path: Path) -> None:
    """With the hub's own client, from a server that answers as the hub does."""
    with hub_site() as site:
        site.files["README.md"] = b"---\nlicense: mit\n---\n"
        for number in range(2):
            rows = [json.dumps({"text": f"row {number} {n}", "n": n}) for n in range(10)]
            site.files[f"data/train-0000{number}-of-00002.jsonl"] = "\n".join(rows).encode()
        around = {
            "HF_ENDPOINT": site.address,
            "HF_HOME": str(tmp_path / "home"),
            "GPTFAST_CACHE": str(tmp_path / "cache"),
        }
        ran = command("hf:me/mine@v2", "--json", folder=tmp_path, **around)
        assert ran.returncode == 0, ran.stderr
        answer = json.loads(ran.stdout)
        assert answer["path"] == str(tmp_path / "data" / "mine-gpt2.h5")
        assert answer["source"] == f"hf:me/mine@v2 at commit {COMMIT}"
        assert answer["n_documents"] == 20
        assert not any("/v2/" in path for path in site.asked), "after the first answer, the commit"

        ran = command("hf:me/other", folder=tmp_path, **around)
        assert ran.returncode == 2
        (line,) = ran.stderr.decode().splitlines()
        assert "hf:me/other: cannot be read (RepositoryNotFoundError: 404" in line


# standard input ----------------------------------------------------------------------------------

ROWS = (INPUTS / "jsonl/ok.jsonl").read_bytes()


def test_json_lines_on_standard_input(tmp_path: Path) -> None:
    ran = command("-", "--format=jsonl", "--json", folder=tmp_path, stdin=ROWS)
    assert ran.returncode == 0, ran.stderr
    answer = json.loads(ran.stdout)
    assert answer["n_documents"] == 6
    assert answer["train"]["n_tokens"] + answer["val"]["n_tokens"] == 969 + 6


def test_json_lines_that_are_read_as_text_are_told(tmp_path: Path) -> None:
    hint = b"standard input begins as JSON lines do and is read as text: --format jsonl?"
    for stdin, options, told in (
        (ROWS, [], True),
        (b"[1] a list of things", [], False),
    ):
        ran = command("-", *options, "--force", folder=tmp_path, stdin=stdin)
        assert ran.returncode == 0
        assert (hint in ran.stderr) == told


def test_a_format_is_for_files_of_any_name(tmp_path: Path) -> None:
    (tmp_path / "rows.log").write_bytes(ROWS)
    (tmp_path / "text.jsonl").write_bytes(b"no rows\n")
    result, _ = prepared(tmp_path, tmp_path / "rows.log", reading=Reading(kind="jsonl"))
    assert result.n_documents == 6
    result, store = prepared(
        tmp_path, tmp_path / "text.jsonl", reading=Reading(kind="text"), force=True
    )
    assert store.tokenizer().decode(stored_ids(store)) == "no rows\n"


# UTF-16 and UTF-32 -------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("block", [4, 5, 1 << 18])
def test_wide_text_is_decoded_where_bytes_may_be_replaced(
    encoding: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TXT-09: lone halves of a pair are replaced and counted, a real U+FFFD is not."""
    monkeypatch.setattr("gptfast.data.prepare.packing.BLOCK", block)
    text = "\ufeffhello 👩 \ufffd wörld\n"
    wide = text.encode(encoding) + "\ud83d!".encode(encoding, "surrogatepass")
    path = tmp_path / "wide.txt"
    path.write_bytes(wide)
    with pytest.raises(Refused, match=f"is UTF-{encoding[4:6]} text .* --errors replace decodes"):
        prepared(tmp_path, path)
    result, store = prepared(
        tmp_path, path, reading=Reading(errors="replace"), tokenizer="bytes", val_fraction=0
    )
    expected = text[1:] + "\ufffd!"
    assert store.tokenizer().decode(stored_ids(store)).replace("\ufffd\ufffd", "\ufffd") == expected
    assert result.n_replaced >= 1
    assert result.n_wide == 1


def test_wide_files_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """TXT-09, and JSON lines."""
    monkeypatch.chdir(tmp_path)
    wide = str(INPUTS / "text/utf16le_bom.txt")
    assert main(["prepare", wide]) == 2
    assert "utf16le_bom.txt: is UTF-16 text" in capsys.readouterr().err
    assert main(["prepare", wide, "--errors=replace", "--tokenizer=bytes", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["train"]["n_bytes"] + answer["val"]["n_bytes"] == 18 * 20
    Path("w.jsonl").write_text('{"text": "one"}\n{"text": "tẅo"}\n', encoding="utf-16")
    assert main(["prepare", "w.jsonl", "--errors=replace", "--tokenizer=bytes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["n_documents"] == 2
    assert main(["prepare", "w.jsonl", "--errors=replace", "--out=w.h5"]) == 0
    assert "decoded 1 file from UTF-16 or UTF-32, replaced 0 bytes" in capsys.readouterr().err
