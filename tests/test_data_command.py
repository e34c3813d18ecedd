"""`gptfast data`: show, verify, sample; export to other programs and import from them."""

from __future__ import annotations

import base64
import hashlib
import json
import pickle
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from data_helpers import HDF5, TEXT, WordTokenizer, only, prepared, stored_ids, write_foreign
from hypothesis import given, settings
from hypothesis import strategies as st

from gptfast.cli import main
from gptfast.data import export as exporting
from gptfast.data.convert import document_starts
from gptfast.data.export import export
from gptfast.data.foreign import GPT2, LLAMA3
from gptfast.data.store import Store
from gptfast.data.verify import verify
from gptfast.errors import GptfastError, Refused

ROWS = ["one", "\x1b[2Jtwo", "three three", "four", "five", "six and seven"]
EOT = 50256


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`rows.h5` of documents, `chars.h5` of one stream, `bytes.h5` with the least beside ids."""
    folder = tmp_path_factory.mktemp("made")
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": row}) + "\n" for row in ROWS))
    prepared(folder, rows, val_fraction=0.3)[0].path.rename(folder / "rows.h5")
    prepared(folder, rows, tokenizer="bytes")[0].path.rename(folder / "bytes.h5")
    plain = TEXT / "plain_small.txt"
    prepared(folder, plain, tokenizer="chars")[0].path.rename(folder / "chars.h5")
    return folder


Data = Callable[..., Any]


@pytest.fixture
def data(capsys: pytest.CaptureFixture[str]) -> Data:
    """`gptfast data ... --json`: what it prints."""

    def run(*args: object, code: int = 0) -> Any:
        assert main(["data", *map(str, args), "--json"]) == code
        return json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """`gptfast data ...`, refused: its one line."""

    def run(*args: object, code: int = 2) -> str:
        assert main(["data", *map(str, args)]) == code
        captured = capsys.readouterr()
        assert captured.err.count("\n") == 1
        return captured.err

    return run


# show ------------------------------------------------------------------------------------------


def test_show_says_what_the_file_holds(made: Path, data: Data) -> None:
    facts = data("show", made / "rows.h5")
    with Store.open(made / "rows.h5") as store:
        assert facts["fingerprint"] == store.fingerprint
        for split in facts["splits"]:
            ids = store.tokens(split["name"])[:]
            assert split["n_tokens"] == len(ids)
            assert split["n_documents"] == np.count_nonzero(ids == EOT)
            assert split["max_id"] == EOT
            assert split["dtype"] == "uint16"
            assert split["sha256"] == hashlib.sha256(ids.tobytes()).hexdigest()
    assert sum(split["n_bytes"] for split in facts["splits"]) == sum(map(len, ROWS))
    assert facts["tokenizer"] == {"name": "gpt2", "vocab_size": 50257, "separator": EOT}
    (source,) = facts["sources"]
    assert source["sha256"] == hashlib.sha256((made / "rows.jsonl").read_bytes()).hexdigest()
    assert source["documents"] == len(ROWS)
    assert facts["attributes"]["val_fraction"] == 0.3
    assert facts["head"]["text"] == "one"


def test_one_is_not_told_as_several(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "a.txt").write_text("a")
    for command in (
        ["prepare", "a.txt", "--tokenizer", "chars", "--out", "a.h5"],
        ["data", "show", "a.h5"],
        ["data", "verify", "a.h5"],
        ["data", "sample", "a.h5"],
        ["data", "export", "a.h5", "--format", "nanogpt", "--out", "moved"],
        ["data", "import", "moved", "--out", "b.h5"],
    ):
        assert main(command) == 0
        said = capsys.readouterr().out
        assert re.search(r"\b1 (token|id|byte|document)\b", said), said
        assert not re.search(r"\b1 \w+s\b", said), said


def test_show_prints_no_control_code_of_the_text(
    made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "sample", str(made / "rows.h5"), "--n=6"]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "\\x1b[2Jtwo\n" in shown


def test_show_of_bare_ids_says_what_it_can(data: Data) -> None:
    path = HDF5 / "ok_u16_ramp20000.h5"
    facts = data("show", path)
    assert facts["tokenizer"] is facts["vocab_size"] is facts["head"]["text"] is None
    assert facts["splits"][0]["n_documents"] is facts["splits"][0]["sha256"] is None
    assert facts["head"]["ids"] == list(range(64))
    assert data("show", path, "--tokenizer=gpt2")["head"]["text"].startswith("!\"#$%&'()*+,-./0123")


def test_a_tokenizer_that_cannot_be_the_files_is_refused(
    made: Path, here: Path, said: Callable[..., str]
) -> None:
    assert "was made with chars" in said("show", made / "chars.h5", "--tokenizer=gpt2")
    path = write_foreign(here / "t.h5", [1, 300])
    assert "holds the id 300, and the tokenizer bytes has 256" in said(
        "show", path, "--tokenizer=bytes"
    )


def test_show_does_not_read_the_ids(made: Path, data: Data) -> None:
    """A file of many gigabytes is shown at once: its ids are not looked through."""
    path = made / "large.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("tokens", shape=(1 << 31,), dtype=np.uint16)
    before = time.process_time()
    assert data("show", path)["splits"][0]["n_tokens"] == 1 << 31
    assert time.process_time() - before < 2


# sample ----------------------------------------------------------------------------------------


def test_sample_reads_whole_documents_without_their_separator(made: Path, data: Data) -> None:
    stretches = data("sample", made / "rows.h5", "--n=99")
    with Store.open(made / "rows.h5") as store:
        n_train = len(store.documents("train"))
    assert [(s["document"], s["text"], s["cut"]) for s in stretches] == [
        (number, text, False) for number, text in enumerate(ROWS[:n_train])
    ]
    (val,) = data("sample", made / "rows.h5", "--split=val", "--n=1", "--seed=3")
    assert val["text"] in ROWS[n_train:]


def test_sample_is_the_same_for_a_seed_and_another_for_another(made: Path, data: Data) -> None:
    drawn = [
        data("sample", made / "chars.h5", "--n=4", "--tokens=9", f"--seed={s}") for s in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    text = (TEXT / "plain_small.txt").read_text(encoding="utf-8")
    for stretch in drawn[0] + drawn[2]:
        assert stretch["text"] == text[stretch["start"] : stretch["start"] + 9]


def test_a_long_document_is_cut_and_says_so(made: Path, data: Data) -> None:
    drawn = data("sample", made / "rows.h5", "--n=99", "--tokens=1")
    assert [s["n_tokens"] for s in drawn] == [1] * len(drawn)
    assert [s["cut"] for s in drawn] == [s["text"] != ROWS[s["document"]] for s in drawn]


# verify ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rows.h5", "chars.h5"])
def test_a_file_as_prepare_made_it_has_no_fault(made: Path, data: Data, name: str) -> None:
    found = data("verify", made / name)
    assert found["faults"] == found["unknown"] == []
    assert len(found["holds"]) == 1 + 2 * 4


def _id(file: h5py.File) -> None:
    file["train"][1] = 1 - (file["train"][1] == 1)


def _range(file: h5py.File) -> None:
    file["train"][1] = 60_000


def _largest(file: h5py.File) -> None:
    file["val"].attrs["max_id"] = 9


def _text(file: h5py.File) -> None:
    file["train"].attrs["bytes"] += 1


def _boundary(file: h5py.File) -> None:
    file["train_documents"][1] += 1


def _separator(file: h5py.File) -> None:
    del file["train_documents"]
    file["train_documents"] = np.zeros(1, dtype=np.int64)


def _order(file: h5py.File) -> None:
    file["train_documents"][1] = file["train_documents"][2]


def _beyond(file: h5py.File) -> None:
    file["train_documents"][-1] = len(file["train"])


def _first(file: h5py.File) -> None:
    file["val_documents"][0] = 1


def _vocabulary(file: h5py.File) -> None:
    file.attrs["vocab_size"] = 70_000


def _tokenizer(file: h5py.File) -> None:
    del file["tokenizer"]


def _definition(file: h5py.File) -> None:
    file["tokenizer"][0] = 0


def _sources(file: h5py.File) -> None:
    file["sources"][0] = 0


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (_id, "train: the SHA-256 of its ids is"),
        (_range, "train: id 60000 at token 1 is not below 50257"),
        (_largest, f"val: its largest id is {EOT}, but 9 is written down"),
        (_text, "train: its ids spell"),
        (_boundary, "train: document 0 does not end with a separator, at token 2"),
        (_separator, "train: a separator stands inside a document, at token 1"),
        (_order, "train: document 2 begins at id"),
        (_beyond, "train: document 4 begins at id"),
        (_first, "val: its first document does not begin with its first id"),
        (_vocabulary, "tokenizer: gpt2, 50,257 ids, but 70,000 are written down"),
        (_tokenizer, "tokenizer: its definition cannot be used"),
        (_definition, "tokenizer: its definition cannot be used"),
        (_sources, "sources: cannot be read"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_each_fault_is_one_line_and_the_exit_code_is_1(
    made: Path,
    here: Path,
    damage: Callable[[h5py.File], None],
    fault: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = shutil.copy(made / "rows.h5", here / "rows.h5")
    with h5py.File(path, "r+") as file:
        damage(file)
    assert main(["data", "verify", str(path)]) == 1
    captured = capsys.readouterr()
    faults = [line for line in captured.out.splitlines() if line.startswith("FAULT")]
    assert any(line.startswith(f"FAULT  {fault}") for line in faults), faults
    assert captured.err.startswith(f"gptfast: error: {path}: {len(faults)} fault")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("damage", "name"),
    [(_tokenizer, "tokenizer"), (_definition, "tokenizer"), (_sources, "sources")],
)
def test_what_a_damaged_part_is_needed_for_is_refused(
    made: Path,
    here: Path,
    damage: Callable[[h5py.File], None],
    name: str,
    said: Callable[..., str],
) -> None:
    path = shutil.copy(made / "rows.h5", here / "rows.h5")
    with h5py.File(path, "r+") as file:
        damage(file)
    assert f"{path}: its {name} cannot be read" in said("show", path)


@pytest.mark.parametrize("name", ["truncated.h5", "zero_byte.h5", "text_named.h5", "two_dim.h5"])
def test_what_is_no_data_file_is_refused(name: str, said: Callable[..., str]) -> None:
    """H5-01, H5-09."""
    assert str(HDF5 / name) in said("verify", HDF5 / name)


def test_a_foreign_file_is_verified_as_far_as_it_goes(here: Path, data: Data) -> None:
    np.array([0, 3, 70], dtype=np.uint16).tofile(here / "train.bin")
    (here / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 70}))
    assert data("verify", here, code=1)["faults"] == [
        "train: id 70 at token 2 is not below 70, the vocabulary"
    ]
    (here / "meta.pkl").unlink()
    found = data("verify", here)
    assert found["holds"] == ["train: 3 ids, the largest 70"]
    assert len(found["unknown"]) == 2


def with_a_damaged_chunk(path: Path, dtype: type[np.integer[Any]]) -> Path:
    ids = np.arange(5000, dtype=dtype)
    write_foreign(path, ids, chunks=(1000,), compression="gzip")
    with h5py.File(path) as file:
        chunk = file["tokens"].id.get_chunk_info(3)
    content = bytearray(path.read_bytes())
    content[chunk.byte_offset : chunk.byte_offset + chunk.size] = bytes(chunk.size)
    path.write_bytes(content)
    return path


def test_a_damaged_chunk_of_a_foreign_file_is_a_fault(
    here: Path, data: Data, said: Callable[..., str]
) -> None:
    """Of signed ids it shows earlier: they are looked through when the file is opened."""
    (fault,) = data("verify", with_a_damaged_chunk(here / "u.h5", np.uint16), code=1)["faults"]
    assert fault.startswith("train: cannot be read from id 0 on")
    assert "i.h5: is damaged" in said("verify", with_a_damaged_chunk(here / "i.h5", np.int32))


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_no_flipped_byte_is_more_than_a_fault_or_a_refusal(
    data: st.DataObject, made: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "flipped.h5"
    content = bytearray((made / "bytes.h5").read_bytes())
    with h5py.File(made / "bytes.h5") as file:
        regions = {name: file[name].id.get_offset() for name in ("train", "val")}
        sizes = {name: file[name].nbytes for name in regions}
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    try:
        with Store.open(path) as store:
            faults = verify(store).faults
    except GptfastError:
        faults = ["not opened"]
    in_ids = any(regions[name] <= at < regions[name] + sizes[name] for name in regions)
    assert faults or not in_ids


# export and import -----------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_nanogpt_gets_what_its_own_prepare_makes(made: Path, here: Path, data: Data) -> None:
    written = data("export", made / "chars.h5", "--format=nanogpt", "--out=n")
    assert written["files"] == ["train.bin", "val.bin", "meta.pkl"]
    text = (TEXT / "plain_small.txt").read_text(encoding="utf-8")
    chars = sorted(set(text))
    ids = np.array([chars.index(c) for c in text], dtype=np.uint16)
    n_train = int(len(text) * 0.9)
    found = contents(here / "n")
    assert found["train.bin"] == ids[:n_train].tobytes()
    assert found["val.bin"] == ids[n_train:].tobytes()
    assert pickle.loads(found["meta.pkl"]) == {
        "vocab_size": len(chars),
        "itos": dict(enumerate(chars)),
        "stoi": {c: i for i, c in enumerate(chars)},
    }


def test_ids_of_gpt2_go_to_nanogpt_without_a_table(made: Path, here: Path, data: Data) -> None:
    data("export", made / "rows.h5", "--format=nanogpt", "--out=n")
    assert only(here / "n", "train.bin", "val.bin")


def test_another_vocabulary_goes_to_nanogpt_with_its_size(
    made: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "export", str(made / "bytes.h5"), "--format=nanogpt", "--out=n"]) == 0
    assert pickle.loads((here / "n/meta.pkl").read_bytes()) == {"vocab_size": 256}
    assert "sample.py wants characters" in capsys.readouterr().err


def test_a_vocabulary_that_is_merely_named_gpt2_is_not_taken_for_it(
    made: Path, here: Path, said: Callable[..., str], data: Data
) -> None:
    ranks = "".join(f"{base64.b64encode(bytes([i])).decode()} {i}\n" for i in range(256))
    (here / "gpt2.tiktoken").write_text(ranks)
    mine = prepared(here, made / "rows.jsonl", tokenizer=str(here / "gpt2.tiktoken"))[1]
    assert mine.tokenizer_name == "gpt2"
    assert "has 257 ids of gpt2, and llm.c knows" in said(
        "export", mine.path, "--format=llm.c", "--out=n"
    )
    data("export", mine.path, "--format=nanogpt", "--out=n")
    assert pickle.loads((here / "n/meta.pkl").read_bytes()) == {"vocab_size": 257}


@given(n_tokens=st.integers(1, 10_000), most=st.integers(1, 10_000))
def test_shards_are_as_few_and_as_equal_as_can_be(n_tokens: int, most: int) -> None:
    sizes = exporting._cut(n_tokens, most)
    assert sum(sizes) == n_tokens
    assert max(sizes) <= most
    assert max(sizes) - min(sizes) <= 1
    assert (len(sizes) - 1) * most < n_tokens


def test_no_shard_is_larger_than_its_header_can_say() -> None:
    assert exporting._cut(2**31, 2**40) == [2**30, 2**30]


@pytest.mark.parametrize("shard_tokens", [None, 3, 1])
def test_llm_c_gets_a_header_and_the_ids(
    made: Path, here: Path, data: Data, shard_tokens: int | None
) -> None:
    shards = [] if shard_tokens is None else [f"--shard-tokens={shard_tokens}"]
    written = data("export", made / "rows.h5", "--format=llm.c", "--out=n", "--name=x", *shards)
    assert set(written["files"]) == set(contents(here / "n"))
    with Store.open(made / "rows.h5") as store:
        expected = {split: store.tokens(split)[:] for split in store.splits}
    if shard_tokens is None:
        assert written["files"] == ["x_val.bin", "x_train.bin"]
    else:
        assert written["files"][0] == "x_val_000000.bin"
        assert written["files"][-1] == f"x_train_{len(written['files']) - 1:06d}.bin"
    for split, ids in expected.items():
        names = [name for name in written["files"] if f"_{split}" in name]
        sizes, found = [], []
        for name in names:
            content = (here / "n" / name).read_bytes()
            header = np.frombuffer(content[:1024], np.int32)
            assert header[:3].tolist() == [20240520, 1, (len(content) - 1024) // 2]
            assert not header[3:].any()
            sizes.append(int(header[2]))
            found.append(np.frombuffer(content[1024:], np.uint16))
        assert np.array_equal(np.concatenate(found), ids)
        assert max(sizes) - min(sizes) <= 1
        assert max(sizes) <= (shard_tokens or len(ids))


@pytest.mark.parametrize(
    ("name", "format"), [("chars.h5", "nanogpt"), ("rows.h5", "nanogpt"), ("rows.h5", "llm.c")]
)
def test_there_and_back_changes_no_byte(
    made: Path, here: Path, data: Data, name: str, format: str
) -> None:
    tokenizer = ["--tokenizer=gpt2"] if (name, format) == ("rows.h5", "nanogpt") else []
    data("export", made / name, f"--format={format}", "--out=a", "--name=x")
    data("import", "a", "--out=back.h5", *tokenizer)
    data("export", "back.h5", f"--format={format}", "--out=b", "--name=x")
    data("export", "a", f"--format={format}", "--out=c", "--name=x")
    assert contents(here / "a") == contents(here / "b") == contents(here / "c")
    with Store.open(made / name) as before, Store.open("back.h5") as after:
        assert after.fingerprint == before.fingerprint
        assert after.tokenizer_definition == before.tokenizer_definition
        for split in before.splits:
            assert after.n_bytes(split) == before.n_bytes(split)
            assert after.documents(split).tolist() == before.documents(split).tolist()
    assert data("verify", "back.h5")["faults"] == []


def llm_c(path: Path, ids: list[int], vocabulary: Any = GPT2) -> None:
    header = np.zeros(256, dtype=np.int32)
    header[:3] = vocabulary.magic, vocabulary.version, len(ids)
    path.write_bytes(header.tobytes() + np.array(ids, vocabulary.dtype).tobytes())


def test_ids_of_llama3_go_both_ways(here: Path, data: Data) -> None:
    (here / "a").mkdir()
    llm_c(here / "a/x_train.bin", [128_000, 1, 2], LLAMA3)
    data("export", "a", "--format=llm.c", "--out=b", "--name=x")
    assert contents(here / "a") == contents(here / "b")


@given(ids=st.lists(st.sampled_from([EOT, 11]), min_size=1), piece=st.integers(1, 9))
def test_a_document_begins_after_each_separator_whatever_the_pieces(
    ids: list[int], piece: int
) -> None:
    found, begins = [], True
    for at in range(0, len(ids), piece):
        part = np.array(ids[at : at + piece])
        found += [at + start for start in document_starts(part, separator=EOT, begins=begins)]
        begins = part[-1] == EOT
    assert found == [0] + [at + 1 for at, i in enumerate(ids[:-1]) if i == EOT]


def test_separators_may_stand_first_as_in_modded_nanogpt(
    here: Path, data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gptfast.data.layout._PIECE", 2)
    ids = [EOT, 11, 12, EOT, 13, EOT, EOT, 14]
    llm_c(here / "x_train.bin", ids)
    data("import", "x_train.bin", "--out=x.h5")
    with Store.open("x.h5") as store:
        assert stored_ids(store) == ids
        assert store.documents("train").tolist() == [0, 1, 4, 6, 7]
    assert data("verify", "x.h5")["faults"] == []


def test_the_ids_of_train_llm_from_scratch_are_imported(here: Path, data: Data) -> None:
    """int32 and resizable, as it makes them; r50k_base is GPT-2's vocabulary."""
    with h5py.File(here / "pile_train.h5", "w") as file:
        tokens = file.create_dataset("tokens", (0,), maxshape=(None,), dtype="i")
        tokens.resize(4, axis=0)
        tokens[:] = [31373, EOT, 995, EOT]
    data("import", "pile_train.h5", "--out=x.h5", "--tokenizer=gpt2")
    with Store.open("x.h5") as store:
        assert store.tokens("train").dtype == np.uint16
        assert store.documents("train").tolist() == [0, 2]
        assert (
            store.tokenizer().decode(stored_ids(store)) == "hello<|endoftext|> world<|endoftext|>"
        )
        assert store.n_bytes("train") == len("hello world")


def test_what_import_refuses(made: Path, here: Path, said: Callable[..., str]) -> None:
    path = write_foreign(here / "t.h5", [1, 60_000])
    assert "name it with --tokenizer" in said("import", path, "--out=x.h5")
    assert "id 60000 >= 50257, the ids of gpt2" in said(
        "import", path, "--out=x.h5", "--tokenizer=gpt2"
    )
    assert "is a data file of gptfast already" in said("import", made / "rows.h5", "--out=x.h5")
    assert only(here, "t.h5")
    write_foreign(here / "x.h5", [1])
    assert "--force" in said("import", path, "--out=x.h5", "--tokenizer=cl100k_base")


def test_ids_that_do_not_fit_are_refused_and_nothing_stays(
    here: Path, said: Callable[..., str]
) -> None:
    words = here / "words.txt"
    words.write_text("1 65536 2 3 4 5 6 7 8 9")
    path = prepared(here, words, tokenizer=WordTokenizer(70_000))[0].path
    assert "holds the id 65536, and this format has room for ids below 65,536" in said(
        "export", path, "--format=nanogpt", "--out=n"
    )
    assert "knows those of GPT-2 and of Llama 3" in said(
        "export", path, "--format=llm.c", "--out=n"
    )
    bare = write_foreign(here / "bare.h5", [1] * 9 + [65_536])
    assert "65536" in said("export", bare, "--format=nanogpt", "--out=n")
    assert "65536, and this format has room for ids below 50,257" in said(
        "export", bare, "--format=llm.c", "--out=n"
    )
    assert not list((here / "n").glob("*"))
    write_foreign(here / "fits.h5", [65_535])
    with Store.open(here / "fits.h5") as store:
        export(store, here / "n", format="nanogpt", name="x")
    assert (here / "n/train.bin").read_bytes() == b"\xff\xff"


def test_files_in_the_way_are_left_alone_or_all_replaced(
    made: Path, here: Path, data: Data, said: Callable[..., str]
) -> None:
    """What stayed of an earlier export would be read together with the new files."""
    rows = made / "rows.h5"
    data("export", rows, "--format=llm.c", "--out=n", "--name=x", "--shard-tokens=3")
    (here / "n/x_y_train_000001.bin").write_bytes(b"of another corpus")
    before = contents(here / "n")
    again = ("export", rows, "--format=llm.c", "--out=n", "--name=x")
    assert "is there already" in said(*again)
    assert contents(here / "n") == before
    data(*again, "--force")
    assert only(here / "n", "x_train.bin", "x_val.bin", "x_y_train_000001.bin")
    data("export", made / "chars.h5", "--format=nanogpt", "--out=n")
    data("export", rows, "--format=nanogpt", "--out=n", "--force")
    assert not (here / "n/meta.pkl").exists()


def test_a_failed_export_leaves_what_was_there(
    made: Path, here: Path, data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    data("export", made / "rows.h5", "--format=nanogpt", "--out=n")
    before = contents(here / "n")

    def full(file: object) -> None:
        raise OSError(28, "No space left on device")

    with Store.open(made / "chars.h5") as store:
        with monkeypatch.context() as patch:
            patch.setattr(exporting, "_sync", full)
            with pytest.raises(GptfastError, match="No space left on device"):
                export(store, here / "n", format="nanogpt", name="x", force=True)
        with monkeypatch.context() as patch:
            patch.setattr("shutil.disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 0))
            with pytest.raises(Refused, match=r"needs [\d,]+ bytes, and there are 0"):
                export(store, here / "n", format="nanogpt", name="x", force=True)
    assert contents(here / "n") == before


def test_what_a_killed_export_left_goes_with_the_next(made: Path, here: Path, data: Data) -> None:
    (here / "n").mkdir()
    (here / "n/.train.bin.999999999.partial").write_bytes(b"cut")
    data("export", made / "rows.h5", "--format=nanogpt", "--out=n")
    assert only(here / "n", "train.bin", "val.bin")


def test_a_split_that_is_missing_is_said(made: Path, here: Path) -> None:
    with Store.open(write_foreign(here / "t.h5", [1, 2])) as store:
        assert "has no split val" in export(store, here / "n", format="nanogpt", name="x").notes[0]
