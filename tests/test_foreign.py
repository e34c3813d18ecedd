"""Token files of nanoGPT, llm.c, modded-nanogpt and train-llm-from-scratch, read where they lie."""

from __future__ import annotations

import contextlib
import pickle
import pickletools
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from data_helpers import TEXT, prepared, write_foreign
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import load_file

from gptfast import config
from gptfast.cli import main
from gptfast.data.foreign import GPT2, LLAMA3, Vocabulary
from gptfast.data.nanogpt_meta import read_meta, written_meta
from gptfast.data.store import Store
from gptfast.errors import GptfastError, Refused
from gptfast.run.session import with_vocabulary

TINY = (
    *("model.n_layer=1", "model.n_head=1", "model.n_embd=8", "model.block_size=8"),
    *("train.steps=3", "train.batch_size=2", "train.eval_interval=3", "train.warmup_steps=0"),
)


def llm_c(
    path: Path,
    ids: Sequence[int] | NDArray[Any],
    vocabulary: Vocabulary = GPT2,
    *,
    version: int | None = None,
    n_tokens: int | None = None,
) -> Path:
    """As `write_datafile` of llm.c does it."""
    header = np.zeros(256, dtype=np.int32)
    header[0] = vocabulary.magic
    header[1] = vocabulary.version if version is None else version
    header[2] = len(ids) if n_tokens is None else n_tokens
    path.write_bytes(header.tobytes() + np.asarray(ids, dtype=vocabulary.dtype).tobytes())
    return path


def nanogpt_chars(folder: Path, text: str, *, order: str = "") -> Path:
    """As `data/shakespeare_char/prepare.py` of nanoGPT does it."""
    folder.mkdir(exist_ok=True)
    chars = list(order) or sorted(set(text))
    stoi = {ch: i for i, ch in enumerate(chars)}
    itos = dict(enumerate(chars))
    n_train = int(len(text) * 0.9)
    for name, part in (("train", text[:n_train]), ("val", text[n_train:])):
        np.array([stoi[c] for c in part], dtype=np.uint16).tofile(folder / f"{name}.bin")
    with (folder / "meta.pkl").open("wb") as file:
        pickle.dump({"vocab_size": len(chars), "itos": itos, "stoi": stoi}, file)
    return folder


@pytest.fixture
def text() -> str:
    return (TEXT / "plain_small.txt").read_text(encoding="utf-8")


def sizes(store: Store) -> dict[str, int]:
    return {split: store.n_tokens(split) for split in store.splits}


# nanoGPT ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", ["", "train.bin", "val.bin"])
def test_a_folder_of_nanogpt_says_what_our_own_file_of_the_text_says(
    tmp_path: Path, text: str, named: str
) -> None:
    folder = nanogpt_chars(tmp_path / "shakespeare_char", text)
    _, own = prepared(tmp_path, TEXT / "plain_small.txt", tokenizer="chars")
    with Store.open(folder / named) as store, own:
        assert store.tokenizer_definition == own.tokenizer_definition
        assert store.vocab_size == own.vocab_size
        for split in ("train", "val"):
            assert np.array_equal(store.tokens(split)[:], own.tokens(split)[:])
            n = own.n_tokens(split)
            assert store.bytes_of(split, n) == own.bytes_of(split, n) == own.n_bytes(split)


def test_characters_in_an_order_of_their_own_are_decoded_and_encoded(tmp_path: Path) -> None:
    folder = nanogpt_chars(tmp_path / "odd", "abcé" * 5, order="écab")
    with Store.open(folder) as store:
        tokenizer = store.tokenizer()
        ids = store.tokens("train")[:].tolist()
    assert ids[:4] == [2, 3, 1, 0]
    assert tokenizer.decode(ids[:4]) == "abcé"
    assert tokenizer.encode("abcé").tolist() == ids[:4]


def test_without_a_table_the_ids_are_bare_and_checked_against_gpt2s(tmp_path: Path) -> None:
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "train.bin")
    with Store.open(tmp_path) as store:
        assert (store.splits, store.vocab_size, store.tokenizer_name) == (("train",), None, None)
        profile = config.load("char", folder=tmp_path).profile
        assert with_vocabulary(profile, store).model.vocab_size == 50257
    np.array([1, 50257], dtype=np.uint16).tofile(tmp_path / "train.bin")
    with (
        Store.open(tmp_path) as store,
        pytest.raises(Refused, match=r"id 50257 >= 50257.* at token 1 of train"),
    ):
        with_vocabulary(profile, store)


@pytest.mark.parametrize(
    ("meta", "vocab_size"),
    [
        ({"vocab_size": 70}, 70),
        ({"vocab_size": 3, "itos": {0: "the", 1: "a", 2: "b"}}, 3),
        ({"vocab_size": 70, "itos": {0: "a", 1: "b"}}, 70),
        ({"itos": ["a", "a"], "vocab_size": 2}, 2),
        ({"itos": {0: "a", 2: "b"}, "vocab_size": 2}, 2),
        ({"itos": {0: "a", 1: "\ud800"}, "vocab_size": 2}, 2),
    ],
    ids=str,
)
def test_a_table_that_is_not_of_single_characters_gives_the_size_alone(
    tmp_path: Path, meta: dict[str, Any], vocab_size: int
) -> None:
    np.arange(2, dtype=np.uint16).tofile(tmp_path / "train.bin")
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta))
    with Store.open(tmp_path) as store:
        assert (store.vocab_size, store.tokenizer_definition) == (vocab_size, None)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_table_of_any_protocol_is_read(tmp_path: Path, protocol: int) -> None:
    letters = "".join(map(chr, range(32, 1000)))
    meta = {"vocab_size": len(letters), "itos": dict(enumerate(letters)), "stoi": (1, [None])}
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta, protocol=protocol))
    assert read_meta(tmp_path / "meta.pkl").alphabet == letters


class Hostile:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("place", ["value", "key", "whole"])
def test_a_table_that_would_run_something_is_refused_and_runs_nothing(
    tmp_path: Path, protocol: int, place: str
) -> None:
    marker = tmp_path / "it-ran"
    hostile: Any = Hostile(marker)
    meta = {"value": {"vocab_size": 2, "x": hostile}, "key": {hostile: 1}, "whole": hostile}[place]
    content = pickle.dumps(meta, protocol=protocol)
    np.arange(2, dtype=np.uint16).tofile(tmp_path / "train.bin")
    (tmp_path / "meta.pkl").write_bytes(content)
    with pytest.raises(Refused, match=r"meta\.pkl: is more than a table of characters") as refused:
        Store.open(tmp_path)
    assert "\n" not in str(refused.value)
    assert not marker.exists()
    pickle.loads(content)
    assert marker.exists(), "the pickle is harmless and the test shows nothing"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no pickle",
        b"\x80\x04}.",
        b"\x80\x04]K\x01a.",
        b"\x80\x04K\x01K\x02K\x03s.",
        b"\x80\x04K\x01K\x02a.",
        b"\x80\x04}]K\x01s.",
        b"\x80\x04}h\x07.",
        b"\x80\x04}r\xff\xff\xff\xef.",
        b"\x80\x04}N" + 300_000 * b"\x85" + b"Ns.",
        pickle.dumps({"vocab_size": 1 << 64}),
    ],
    ids=[
        "empty",
        "text",
        "no vocabulary",
        "a list",
        "an item of a number",
        "appended to a number",
        "a list as key",
        "a place never filled",
        "a place for which 60 GB would be set aside",
        "a key too deep to be hashed",
        "more ids than a model can have",
    ],
)
def test_what_is_no_table_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "meta.pkl").write_bytes(content)
    with pytest.raises(Refused, match=r"meta\.pkl: .* make it again with nanoGPT's"):
        read_meta(tmp_path / "meta.pkl")


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_damaged_table_is_refused_or_read_but_never_more(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "meta.pkl"
    content = bytearray(written_meta(3, "abc"))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    with contextlib.suppress(Refused):
        read_meta(path)


def test_the_table_that_is_written_is_nanogpts_own(tmp_path: Path, text: str) -> None:
    content = (nanogpt_chars(tmp_path / "n", text) / "meta.pkl").read_bytes()
    written = written_meta(len(set(text)), "".join(sorted(set(text))))
    assert pickle.loads(written) == pickle.loads(content)
    assert list(pickle.loads(written)) == ["vocab_size", "itos", "stoi"]
    assert max(opcode.proto for opcode, _, _ in pickletools.genops(written)) <= 4


# llm.c and modded-nanogpt ----------------------------------------------------------------------


def test_shards_are_one_split_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    ids = np.arange(1000)
    llm_c(tmp_path / "fineweb_val_000000.bin", ids[:100])
    for number, at in ((1, 100), (2, 300), (10, 400)):
        end = {100: 300, 300: 400, 400: 1000}[at]
        llm_c(tmp_path / f"fineweb_train_{number}.bin", ids[at:end])
    with Store.open(tmp_path) as store:
        assert sizes(store) == {"train": 900, "val": 100}
        assert (store.vocab_size, store.tokenizer_name) == (50257, "gpt2")
        assert np.array_equal(np.asarray(store.tokens("train")), ids[100:])
    with pickle.loads(pickle.dumps(store)) as sent:
        assert sent.read("train", np.array([298]), 3).tolist() == [[398, 399, 400]]
        with pytest.raises(Refused, match="no split test, only train, val: lay its file beside it"):
            sent.tokens("test")
    with Store.open(tmp_path / "fineweb_train_2.bin") as one:
        assert sizes(one) == {"train": 100, "val": 100}
        assert one.tokens("train")[0:2].tolist() == [300, 301]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_reading_shards_equals_slicing_what_they_hold_together(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    vocabulary = data.draw(st.sampled_from([GPT2, LLAMA3]))
    shard_sizes = data.draw(st.lists(st.integers(1, 20), min_size=2, max_size=5))
    ids = np.arange(sum(shard_sizes)) * 7 % vocabulary.n_ids
    at = 0
    for number, size in enumerate(shard_sizes):
        llm_c(folder / f"c_train_{number:06d}.bin", ids[at : at + size], vocabulary)
        at += size
    length = data.draw(st.integers(1, len(ids)))
    starts = np.array(data.draw(st.lists(st.integers(0, len(ids) - length), max_size=8)), int)
    begin, end = data.draw(st.integers(-3, len(ids))), data.draw(st.integers(-3, len(ids) + 3))
    with Store.open(folder) as store:
        windows = store.read("train", starts, length)
        assert store.tokens("train").dtype == vocabulary.dtype
        assert np.array_equal(store.tokens("train")[begin:end], ids[begin:end])
    assert windows.dtype == np.int64
    assert [row.tolist() for row in windows] == [ids[s : s + length].tolist() for s in starts]
    shutil.rmtree(folder)


def test_a_file_of_llama3_has_its_vocabulary_and_no_tokenizer(tmp_path: Path) -> None:
    llm_c(tmp_path / "tiny_shakespeare_train.bin", [128000, 1, 2], LLAMA3)
    with Store.open(tmp_path) as store:
        assert (store.vocab_size, store.tokenizer_name) == (128256, None)
        assert store.tokens("train")[:].tolist() == [128000, 1, 2]


def test_a_file_of_any_name_with_a_header_is_read(tmp_path: Path) -> None:
    with Store.open(llm_c(tmp_path / "mine.bin", [1, 2, 3])) as store:
        assert sizes(store) == {"train": 3}


def test_a_shard_that_was_replaced_is_not_mixed_with_the_old_ones(tmp_path: Path) -> None:
    for number in (1, 2):
        llm_c(tmp_path / f"c_train_{number}.bin", np.arange(50))
    with Store.open(tmp_path) as store:
        llm_c(tmp_path / "new", np.arange(50)).replace(tmp_path / "c_train_2.bin")
        assert store.tokens("train")[:50].tolist() == list(range(50))
        with pytest.raises(GptfastError, match=r"c_train_2\.bin: has been replaced"):
            store.tokens("train")[49:51]


def damaged(folder: Path, name: str) -> Path:
    header = llm_c(folder / "whole.bin", [1, 2, 3]).read_bytes()
    (folder / "whole.bin").unlink()
    path = folder / "c_train_000001.bin"
    contents = {
        "another magic": b"\x01" + header[1:],
        "questions": np.array([20240522, 1], "<i4").tobytes() + header[8:],
        "cut header": header[:900],
        "cut": header[:-2],
        "long": header + b"\0\0",
        "empty": b"",
        "two bytes": b"\0\0",
    }
    if name in contents:
        path.write_bytes(contents[name])
    elif name == "version":
        llm_c(path, [1, 2, 3], version=2)
    elif name == "version of llama":
        llm_c(path, [1, 2, 3], LLAMA3, version=1)
    elif name == "no tokens":
        llm_c(path, [])
    elif name == "negative":
        llm_c(path, [1], n_tokens=-1)
    elif name == "odd":
        path = folder / "train.bin"
        path.write_bytes(b"\0\0\0")
    elif name == "mixed":
        llm_c(path, [1, 2, 3])
        llm_c(folder / "c_train_000002.bin", [1, 2, 3], LLAMA3)
    elif name == "two corpora":
        llm_c(path, [1, 2, 3])
        np.arange(2, dtype=np.uint16).tofile(folder / "train.bin")
    elif name == "no token file":
        (folder / "input.txt").write_text("text")
    return folder


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("another magic", r"begins with 20240385, and .* 20240520 \(GPT-2\) or 20240801"),
        ("questions", "questions of an evaluation of llm.c"),
        ("cut header", "900 of the 1024 bytes of its header"),
        ("cut", "says 3 tokens, but 4 bytes follow instead of 6"),
        ("long", "says 3 tokens, but 8 bytes follow instead of 6"),
        ("empty", "empty, 0 tokens"),
        ("two bytes", "begins with less than a header"),
        ("version", "version 2 of the token files of GPT-2, and only 1"),
        ("version of llama", "version 1 of the token files of Llama 3, and only 7"),
        ("no tokens", "0 tokens"),
        ("negative", "says -1 tokens"),
        ("odd", "3 bytes, no whole number of uint16"),
        (
            "mixed",
            r"000002\.bin: is of Llama 3's vocabulary, but c_train_000001\.bin is of GPT-2's",
        ),
        ("two corpora", r"2 corpora \(c, train\.bin\)"),
        ("no token file", "is a folder without token files"),
        ("missing", "no such file: name a token file, or the folder of them"),
    ],
)
def test_what_is_no_whole_token_file_is_refused_in_one_line(
    tmp_path: Path, name: str, said: str
) -> None:
    folder = damaged(tmp_path, name)
    with pytest.raises(Refused, match=said) as refused:
        Store.open(folder / "val.bin" if name == "missing" else folder)
    assert str(refused.value).startswith(str(tmp_path))
    assert "\n" not in str(refused.value)


# train-llm-from-scratch ------------------------------------------------------------------------


def test_its_hdf5_has_the_other_split_beside_it(tmp_path: Path) -> None:
    for name, n in (("pile_train.h5", 500), ("pile_dev.h5", 50)):
        with h5py.File(tmp_path / name, "w") as file:
            tokens = file.create_dataset("tokens", (0,), maxshape=(None,), dtype="i")
            tokens.resize(n, axis=0)
            tokens[:] = np.arange(n)
    for named in ("pile_train.h5", "pile_dev.h5"):
        with Store.open(tmp_path / named) as store:
            assert sizes(store) == {"train": 500, "val": 50}
            for split, n in sizes(store).items():
                assert store.tokens(split).dtype == np.int32
                assert store.read(split, np.array([n - 9, 3]), 9).tolist() == [
                    list(range(n - 9, n)),
                    list(range(3, 12)),
                ]
    (tmp_path / "pile_train.h5").unlink()
    with Store.open(tmp_path / "pile_dev.h5") as store:
        assert store.splits == ("val",)


def test_our_own_file_is_complete_whatever_lies_beside_it(tmp_path: Path) -> None:
    own = prepared(tmp_path, TEXT / "plain_small.txt", val_fraction=0)[0].path
    own.rename(tmp_path / "a_train.h5")
    write_foreign(tmp_path / "a_val.h5", [1, 2, 3])
    for name, split in (("a_train.h5", "train"), ("a_val.h5", "val")):
        with Store.open(tmp_path / name) as store:
            assert store.splits == (split,)


# as text -------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["n", "n/train.bin", "c/c_train_000001.bin", "c", "c/*"])
def test_prepare_takes_no_ids_for_text(
    tmp_path: Path, text: str, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small ids are valid UTF-8, and nanoGPT's folders have a readme.md beside them."""
    monkeypatch.chdir(tmp_path)
    nanogpt_chars(tmp_path / "n", text)
    (tmp_path / "n/readme.md").write_text("# about")
    (tmp_path / "c").mkdir()
    llm_c(tmp_path / "c/c_train_000001.bin", [11, 12])
    with pytest.raises(Refused, match=r"ids.*--set data\.path="):
        prepared(tmp_path, source)
    prepared(tmp_path, tmp_path / "n/readme.md")
    prepared(tmp_path, "n", pattern="*.md", force=True)


# in training -----------------------------------------------------------------------------------


def test_a_folder_of_nanogpt_trains_scores_and_writes(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint carries the characters, so that the folder may go."""
    monkeypatch.chdir(tmp_path)
    folder = nanogpt_chars(tmp_path / "shakespeare_char", text)
    changes = [f"--set={change}" for change in ("data.path=shakespeare_char", *TINY)]
    assert main(["train", "--profile=baseline", "--run=r", "--device=cpu", *changes]) == 0
    assert main(["eval", "r", "--data=shakespeare_char/val.bin", "--device=cpu"]) == 0
    shutil.rmtree(folder)
    capsys.readouterr()
    assert main(["generate", "r", "--max-new-tokens=9", "--temperature=9", "--device=cpu"]) == 0
    assert set(capsys.readouterr().out) <= set(text) | {"\n"}


def test_training_on_shards_equals_training_on_our_own_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own = prepared(tmp_path, TEXT / "plain_small.txt")[1]
    shards = tmp_path / "shards"
    shards.mkdir()
    with own:
        train, val = (own.tokens(split)[:] for split in ("train", "val"))
    llm_c(shards / "p_val_000000.bin", val)
    llm_c(shards / "p_train_000001.bin", train[:40])
    llm_c(shards / "p_train_000002.bin", train[40:])
    weights = []
    for name, data in (("own", "corpus.h5"), ("shards", "shards")):
        changes = [f"--set={change}" for change in (f"data.path={data}", *TINY)]
        assert main(["train", "--profile=baseline", f"--run={name}", "--device=cpu", *changes]) == 0
        folder = tmp_path / "runs" / name / "checkpoints/step-000003"
        weights.append(load_file(folder / "model.safetensors"))
    for name, tensor in weights[0].items():
        assert np.array_equal(tensor, weights[1][name]), name


@pytest.mark.parametrize("ids", [[0, 50257, 1], [65535] * 3])
def test_an_id_that_no_token_of_gpt2_has_is_refused_before_a_step(
    tmp_path: Path, ids: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    """TOK-05."""
    path = llm_c(tmp_path / "c_train_1.bin", np.array([1] * 500 + ids))
    changes = [f"--set={change}" for change in (f"data.path={path}", *TINY)]
    assert main(["train", "--profile=baseline", "--device=cpu", *changes]) == 2
    assert f">= 50257, the model's vocabulary, at token {500 + (ids[0] == 0)}" in (
        capsys.readouterr().err
    )
