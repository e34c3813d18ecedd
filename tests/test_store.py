"""Data files read: damaged ones refused in one line, good ones right from any process."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest
from data_helpers import HDF5, TEXT, prepared, tiny_shakespeare, write_foreign
from hypothesis import given, settings
from hypothesis import strategies as st

from gptfast import config
from gptfast.cli import main
from gptfast.data.store import Store
from gptfast.data.windows import WindowOrder
from gptfast.errors import GptfastError, Refused
from gptfast.run.session import with_vocabulary

RAMP = HDF5 / "ok_u16_ramp20000.h5"
"""Token i is i."""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    folder = tmp_path_factory.mktemp("own")
    _, store = prepared(folder, tiny_shakespeare(folder))
    with store:
        yield store


# files that are refused ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("truncated.h5", "cut short"),
        ("zero_byte.h5", "0 bytes"),
        ("text_named.h5", "not an HDF5 file"),
        ("no_token_dataset.h5", "no dataset train or tokens, it holds something_else"),
        ("empty_dataset.h5", "0 tokens"),
        ("float_tokens.h5", "float32"),
        ("int32_negative.h5", r"int32\) has the negative id -1 at index 2"),
        ("two_dim.h5", r"\(20, 100\)"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(name: str, cause: str) -> None:
    """H5-01, H5-09: the path, the cause, what to do."""
    with pytest.raises(Refused, match=cause) as refusal:
        Store.open(HDF5 / name)
    message = str(refusal.value)
    assert message.startswith(str(HDF5 / name))
    assert "run gptfast prepare again" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("path", "command"),
    [
        ("data/shakespeare-gpt2.h5", "gptfast prepare shakespeare"),
        ("data/shakespeare-chars.h5", "gptfast prepare shakespeare --tokenizer chars"),
        ("data/novel-bytes.h5", "gptfast prepare SOURCE --tokenizer bytes --out {}"),
        ("elsewhere/shakespeare-gpt2.h5", "gptfast prepare shakespeare --out {}"),
        ("corpus.h5", "gptfast prepare SOURCE --out {}"),
        ("my text.txt", "gptfast prepare '{}'"),
    ],
)
def test_a_missing_file_comes_with_the_command_that_makes_it(
    path: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Refused) as refusal:
        Store.open(path)
    whole = Path.cwd() / path
    assert str(refusal.value).startswith(f"{whole}: ")
    assert str(refusal.value).endswith(command.format(whole))


def test_a_text_given_as_data_comes_with_the_command_that_prepares_it() -> None:
    path = TEXT / "plain_small.txt"
    with pytest.raises(Refused, match=f"not an HDF5 file: .*gptfast prepare {path}"):
        Store.open(path)


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="is a folder"):
        Store.open(tmp_path)


def test_a_newer_format_is_refused(own: Store, tmp_path: Path) -> None:
    copy = tmp_path / "new.h5"
    copy.write_bytes(own.path.read_bytes())
    with h5py.File(copy, "r+") as file:
        file.attrs["gptfast_format"] = 2
    with pytest.raises(Refused, match=r"format 2 is newer than 1.*update gptfast"):
        Store.open(copy)


# ids -------------------------------------------------------------------------------------------


def test_ids_beyond_the_vocabulary_are_refused() -> None:
    """TOK-05."""
    with Store.open(HDF5 / "id_out_of_vocab.h5") as store:
        with pytest.raises(Refused, match=r"60000 >= 50257.* at token 900 "):
            store.check_ids(50257)
        store.check_ids(60001)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("truncated.h5", "cut short"),
        ("zero_byte.h5", "0 bytes"),
        ("text_named.h5", "not an HDF5 file"),
        ("no_token_dataset.h5", "no dataset train or tokens"),
        ("empty_dataset.h5", "0 tokens"),
        ("float_tokens.h5", "float32"),
        ("int32_negative.h5", "negative id -1 at index 2"),
        ("two_dim.h5", "(20, 100)"),
        ("id_out_of_vocab.h5", "id 60000 >= 50257"),
    ],
)
def test_training_on_a_wrong_file_is_refused_before_a_run_is_made(
    name: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """H5-01, H5-09, TOK-05."""
    monkeypatch.chdir(tmp_path)
    path = HDF5 / name
    assert main(["train", "--profile=baseline", f"--set=data.path={path}", "--device=cpu"]) == 2
    refused = capsys.readouterr().err
    assert f"{path}: " in refused
    assert said in refused
    assert refused.count("\n") == 1
    assert not list(tmp_path.glob("runs/*"))


def test_the_vocabulary_is_the_datas(own: Store, tmp_path: Path) -> None:
    """TOK-05: 65 characters make a model of 65 ids, whatever else a profile trains on."""
    _, chars = prepared(tmp_path, own.source or "", tokenizer="chars")
    profile = config.load("gpt2-124m", folder=tmp_path).profile
    with chars:
        assert with_vocabulary(profile, chars).model.vocab_size == 65
        with pytest.raises(Refused, match=r"has 65 ids, model\.vocab_size is 64: leave"):
            with_vocabulary(profile.replace({"model.vocab_size": 64}), chars)
        assert (
            with_vocabulary(profile.replace({"model.vocab_size": 128}), chars).model.vocab_size
            == 128
        )


def test_own_files_know_their_largest_id(own: Store) -> None:
    largest = max(int(own.tokens(split)[:].max()) for split in own.splits)
    own.check_ids(largest + 1)
    with pytest.raises(Refused, match=f"{largest} >= {largest}"):
        own.check_ids(largest)


# windows ---------------------------------------------------------------------------------------


def test_windows_come_in_the_order_asked_for_as_int64() -> None:
    """H5-10: equal starts, descending starts."""
    starts = np.array([19_936, 500, 500, 0])
    with Store.open(RAMP) as store:
        windows = store.read("train", starts, 64)
    assert windows.dtype == np.int64
    assert np.array_equal(windows, starts[:, None] + np.arange(64))


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_reading_equals_slicing_whatever_the_layout(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Contiguous, chunked, compressed, big-endian, with a user block: one answer."""
    dtype = data.draw(st.sampled_from(["<u2", ">u2", "<u4", ">i4", "<i8"]))
    layout = data.draw(
        st.sampled_from([{}, {"chunks": (7,)}, {"chunks": (64,), "compression": "gzip"}])
    )
    ids = np.array(data.draw(st.lists(st.integers(0, 32767), min_size=64, max_size=200)), dtype)
    path = tmp_path_factory.getbasetemp() / "layout.h5"
    with h5py.File(path, "w", userblock_size=data.draw(st.sampled_from([0, 512]))) as file:
        file.create_dataset("tokens", data=ids, **layout)
    length = data.draw(st.integers(1, len(ids)))
    starts = np.array(data.draw(st.lists(st.integers(0, len(ids) - length), max_size=8)), int)
    with Store.open(path) as store:
        windows = store.read("train", starts, length)
    assert windows.shape == (len(starts), length)
    for row, start in zip(windows, starts, strict=True):
        assert np.array_equal(row, ids[start : start + length])


def test_own_files_are_mapped_where_they_lie(own: Store) -> None:
    with h5py.File(own.path) as file:
        for split in ("train", "val"):
            tokens = own.tokens(split)
            assert isinstance(tokens, np.memmap)
            assert tokens.dtype == np.uint16
            assert np.array_equal(tokens, file[split][:])


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc to count memory")
def test_reading_many_batches_takes_no_memory(tmp_path: Path) -> None:
    """H5-11: 5000 batches from 64 MB of tokens; a kept map would grow by the file."""
    path = write_foreign(tmp_path / "big.h5", np.zeros(32 << 20, dtype=np.uint16))
    script = f"""
import numpy as np, resource
from gptfast.data.store import Store
store = Store.open({str(path)!r})
rng = np.random.default_rng(0)
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
store.read("train", rng.integers(0, (32 << 20) - 65, 8), 65)
before = resident()
for _ in range(5000):
    store.read("train", rng.integers(0, (32 << 20) - 65, 8), 65)
print(resident() - before)
"""
    grown = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert int(grown.stdout) < 10 << 20


def test_a_foreign_file_in_large_compressed_chunks_is_still_fast(own: Store) -> None:
    """H5-11: 1000 windows of 64 ids; processor time, whatever else the machine is doing."""
    for path, patience_s in ((HDF5 / "big_gzip_chunks.h5", 2), (own.path, 1)):
        begin = time.process_time()
        with Store.open(path) as store:
            starts = np.random.default_rng(0).integers(0, store.n_tokens("train") - 64, 1000)
            store.read("train", starts, 64)
        assert time.process_time() - begin < patience_s


# processes, locks ------------------------------------------------------------------------------


def _one_epoch(store: Store, order: WindowOrder, rank: int, world: int, answers: object) -> None:
    opened: list[int] = []
    raw_open = Path.open

    def counting(self: Path, *args: object, **kwargs: object) -> object:
        opened.append(os.getpid())
        return raw_open(self, *args, **kwargs)

    Path.open = counting
    starts = order.starts(1, batch_size=order.n_windows(0), rank=rank, world=world)
    answers.put((opened, store.read("train", starts, order.block_size + 1)))


def test_forked_workers_open_the_file_themselves() -> None:
    """H5-05: the parent has read already; each of four workers opens its own handle."""
    context = multiprocessing.get_context("fork")
    order = WindowOrder(seed=1, split="train", n_tokens=20_000, block_size=64)
    with Store.open(RAMP) as store:
        alone = store.read("train", order.starts(1, batch_size=312), 65)
        answers = context.Queue()
        workers = [
            context.Process(target=_one_epoch, args=(store, order, rank, 4, answers))
            for rank in range(4)
        ]
        for worker in workers:
            worker.start()
        found = [answers.get(timeout=60) for _ in workers]
        for worker in workers:
            worker.join()
    assert sorted(pid for opened, _ in found for pid in opened) == sorted(w.pid for w in workers)
    together = np.concatenate([windows for _, windows in found])
    assert np.array_equal(together[together[:, 0].argsort()], alone[alone[:, 0].argsort()])


@pytest.mark.parametrize("path", [RAMP, HDF5 / "big_gzip_chunks.h5"])
def test_an_open_store_can_be_pickled(path: Path) -> None:
    with Store.open(path) as store:
        before = store.read("train", np.array([3]), 10)
        with pickle.loads(pickle.dumps(store)) as other:
            assert np.array_equal(other.read("train", np.array([3]), 10), before)
            assert other.fingerprint == store.fingerprint


def test_a_closed_store_opens_again() -> None:
    store = Store.open(RAMP)
    for _ in range(2):
        assert store.read("train", np.array([9]), 1).tolist() == [[9]]
        store.close()


def test_a_file_that_was_replaced_is_not_mixed_with_the_old_one(tmp_path: Path) -> None:
    path = write_foreign(tmp_path / "t.h5", [1, 2, 3])
    store = Store.open(path)
    write_foreign(tmp_path / "new.h5", [7, 8, 9]).replace(path)
    with pytest.raises(GptfastError, match="has been replaced"):
        store.read("train", np.array([0]), 3)


def _in_another_process(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **environ},
        timeout=60,
    )


def test_two_readers_and_a_read_only_folder_work(tmp_path: Path) -> None:
    """H5-03."""
    path = write_foreign(tmp_path / "t.h5", [1, 2, 3], chunks=(2,))
    path.chmod(0o444)
    tmp_path.chmod(0o555)
    with Store.open(path) as store:
        store.tokens("train")
        other = _in_another_process(
            "from gptfast.data.store import Store\n"
            f"print(Store.open({str(path)!r}).tokens('train')[:].tolist())"
        )
    tmp_path.chmod(0o755)
    assert (other.returncode, other.stdout) == (0, "[1, 2, 3]\n")


@pytest.mark.parametrize(("locking", "opens"), [("TRUE", False), ("FALSE", True)])
def test_a_writer_is_named_and_the_users_locking_holds(
    tmp_path: Path, locking: str, opens: bool
) -> None:
    """H5-03: HDF5_USE_FILE_LOCKING is never overwritten."""
    path = write_foreign(tmp_path / "t.h5", [1, 2, 3])
    code = (
        "import os\n"
        "from gptfast.data.store import Store\n"
        "from gptfast.errors import GptfastError\n"
        "try:\n"
        f"    print(Store.open({str(path)!r}).n_tokens('train'))\n"
        "except GptfastError as error:\n"
        "    print(error.exit_code, error)\n"
        "print(os.environ['HDF5_USE_FILE_LOCKING'])\n"
    )
    with h5py.File(path, "r+", locking=True):
        answer = _in_another_process(code, HDF5_USE_FILE_LOCKING=locking).stdout.splitlines()
    assert answer[-1] == locking
    if opens:
        assert answer[0] == "3"
    else:
        assert answer[0].startswith(f"1 {path}: another program holds its lock")
        assert "HDF5_USE_FILE_LOCKING=FALSE" in answer[0]


# what the file says ----------------------------------------------------------------------------


def test_a_foreign_file_says_what_it_does_not_know() -> None:
    with Store.open(RAMP) as store:
        assert store.splits == ("train",)
        assert store.n_tokens("train") == 20_000
        assert store.vocab_size is store.tokenizer_definition is store.source is None
        assert store.n_bytes("train") is store.bytes_of("train", 10) is None
        assert store.documents("train").tolist() == [0]
        with pytest.raises(Refused, match="no tokenizer"):
            store.tokenizer()
        with pytest.raises(Refused, match="no split val, only train"):
            store.n_tokens("val")


def test_a_foreign_file_may_have_both_splits(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "t.h5", "w") as file:
        file["train"] = np.arange(5)
        file["val"] = np.arange(3)
    with Store.open(tmp_path / "t.h5") as store:
        assert [(s, store.n_tokens(s)) for s in store.splits] == [("train", 5), ("val", 3)]


def test_bytes_of_a_part_are_those_of_its_text(own: Store) -> None:
    ids = own.tokens("val")[:1000].tolist()
    assert own.bytes_of("val", 1000) == len(own.tokenizer().decode_bytes(ids))
    assert own.bytes_of("val", own.n_tokens("val")) == own.n_bytes("val") == 111_540


def test_the_fingerprint_tells_one_changed_id(tmp_path: Path) -> None:
    ids = np.arange(5000, dtype=np.uint16)
    before = Store.open(write_foreign(tmp_path / "a.h5", ids)).fingerprint
    assert Store.open(write_foreign(tmp_path / "b.h5", ids)).fingerprint == before
    ids[2500] += 1
    assert Store.open(write_foreign(tmp_path / "c.h5", ids)).fingerprint != before
