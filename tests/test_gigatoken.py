"""gigatoken where it encodes: tiktoken's ids, whatever the text, the threads and the memory."""

from __future__ import annotations

import functools
import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_helpers import TEXT, only, prepared, stored_ids
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gptfast.cli import main
from gptfast.errors import GptfastError, Refused
from gptfast.tokenizers import encoders
from gptfast.tokenizers.bpe import PATTERNS, Bpe, unreachable
from gptfast.tokenizers.encoders import Gigatoken, encoder_for
from gptfast.tokenizers.tokenizer import load_tokenizer
from gptfast.tokenizers.training import train_bpe

END = "<|endoftext|>"

PIECES = [
    *" \n\r\t/.'1aA你é\u00a0\u2028\x1c\u0301\u0085\u3000ſ²Ⅷǅʰ",
    *("  ", "\r\n", ".\n/", "'LL", "'s", "don't", "🤦🏽‍♀️", END),
    *("\u088f", "\u1acf", "\U000323b0", "\U00016ea0"),
]
"""Of what patterns treat differently; the last are letters and marks of Unicode 17."""
spiky = st.lists(st.sampled_from(PIECES), max_size=30).map("".join)


@functools.cache
def pairs(name: str) -> Gigatoken:
    """A pattern over all pairs of bytes: the ids show where words begin."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    for first in range(256):
        for second in range(256):
            ranks[bytes([first, second])] = len(ranks)
    end = {END: len(ranks)}
    return Gigatoken(Bpe(name, pattern=PATTERNS[name], ranks=ranks, special_tokens=end))


@functools.cache
def gpt2() -> tuple[Bpe, Gigatoken]:
    bpe = load_tokenizer("gpt2")
    assert isinstance(bpe, Bpe)
    return bpe, Gigatoken(bpe)


@pytest.mark.parametrize("name", PATTERNS)
def test_every_character_is_cut_as_by_tiktoken(name: str) -> None:
    """Beside a letter and a digit, each by itself. Planes 4 to 13 are empty, 15 and 16 private."""
    numbers = (n for n in range(0x40000) if not 0xD800 <= n < 0xE000)
    characters = [*map(chr, numbers), *map(chr, range(0xE0000, 0xE0200))]
    for at in range(0, len(characters), 64):
        text = " ".join(f"a{c}{c}1" for c in characters[at : at + 64])
        assert pairs(name).differs_at(text) is None, hex(ord(characters[at]))


@pytest.mark.parametrize("name", PATTERNS)
@settings(max_examples=150, deadline=None)
@given(text=st.one_of(spiky, st.text(max_size=50)))
@example(text="a\U000323b0\U000323b0 b")
@example(text="lone \ud800 surrogate")
def test_a_text_is_cut_as_by_tiktoken(name: str, text: str) -> None:
    assert pairs(name).differs_at(text) is None


def test_markers_are_ordinary_text() -> None:
    """TXT-16."""
    bpe, gigatoken = gpt2()
    text = (TEXT / "endoftext_literal.txt").read_text() + (TEXT / "other_specials.txt").read_text()
    ids = gigatoken.encode(text)
    assert ids.tolist() == bpe.encode(text).tolist()
    assert bpe.eot_id not in ids


@pytest.mark.parametrize("name", ["letters", "a", "caret", "cjk", "spaces"])
def test_one_very_long_piece_is_quick(name: str) -> None:
    """TXT-13."""
    bpe, gigatoken = gpt2()
    (path,) = [*TEXT.glob(f"long_line_{name}_*.txt"), *TEXT.glob(f"{name}_90k.txt")]
    text = path.read_bytes().decode()
    begin = time.perf_counter()
    ids = gigatoken.encode(text)
    assert time.perf_counter() - begin < 5
    assert ids.tolist() == bpe.encode(text).tolist()


def test_where_it_differs_is_the_first_character(monkeypatch: pytest.MonkeyPatch) -> None:
    bpe, gigatoken = gpt2()
    monkeypatch.setattr(
        gigatoken, "encode", lambda text: bpe.encode(text.replace("wrong", "right"))
    )
    assert gigatoken.differs_at("你好 all well") is None
    assert gigatoken.differs_at("你好 is wrong here") == 5
    monkeypatch.setattr(gigatoken, "encode", lambda text: bpe.encode(text)[:-1])
    assert gigatoken.differs_at("one two") == 3


# threads and memory ------------------------------------------------------------------------------


def counted(monkeypatch: pytest.MonkeyPatch) -> list[Bpe]:
    """Notes each backend that is made."""
    made: list[Bpe] = []
    load = encoders._loaded

    def loaded(bpe: Bpe) -> Any:
        made.append(bpe)
        return load(bpe)

    monkeypatch.setattr(encoders, "_loaded", loaded)
    return made


def test_many_threads_share_few_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    made = counted(monkeypatch)
    bpe, _ = gpt2()
    gigatoken = Gigatoken(bpe)
    texts = [f"{word} {n} " * 4000 for n, word in enumerate(["low", "newer", "widest", "new"] * 8)]
    barrier = threading.Barrier(8)

    def encode(text: str) -> bool:
        barrier.wait(timeout=30)
        return bool(np.array_equal(gigatoken.encode(text), bpe.encode(text)))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(encode, texts))
    assert 1 <= len(made) <= encoders._BACKENDS


def test_other_threads_run_meanwhile() -> None:
    """Of its other calls some hold Python's lock until all of the text is encoded."""
    _, gigatoken = gpt2()
    text = "".join(f"word {n} " for n in range(600_000))
    ticks: list[float] = []
    done = threading.Event()

    def tick() -> None:
        while not done.wait(0.001):
            ticks.append(time.perf_counter())

    with ThreadPoolExecutor(1) as pool:
        pool.submit(tick)
        begin = time.perf_counter()
        gigatoken.encode(text)
        end = time.perf_counter()
        done.set()
    assert sum(begin < at < end for at in ticks) > 5


def test_one_that_has_kept_too_much_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    made = counted(monkeypatch)
    bpe, _ = gpt2()
    monkeypatch.setattr(encoders, "_WORTH", 10_000)
    roomy = Gigatoken(bpe)
    for _ in range(4):
        roomy.encode("word " * 1500)
    assert len(made) == 1, "there is room"
    monkeypatch.setattr(encoders, "_ROOM", -(1 << 40))
    cramped = Gigatoken(bpe)
    for _ in range(4):
        assert cramped.encode("word " * 1500).tolist() == bpe.encode("word " * 1500).tolist()
    assert len(made) == 1 + 2, "each is worth two texts"


def test_a_text_too_long_to_watch_is_left_to_tiktoken(monkeypatch: pytest.MonkeyPatch) -> None:
    made = counted(monkeypatch)
    bpe, _ = gpt2()
    monkeypatch.setattr(encoders, "_LONGEST", 100)
    assert Gigatoken(bpe).encode("word " * 21).tolist() == bpe.encode("word " * 21).tolist()
    assert not made


# the choice --------------------------------------------------------------------------------------


def test_it_is_taken_where_it_pays() -> None:
    bpe, _ = gpt2()
    large = encoders._PAYS
    assert encoder_for(bpe, n_bytes=large).name == "gigatoken"
    assert encoder_for(bpe, n_bytes=large - 1).name == "tiktoken"
    assert encoder_for(bpe, "gigatoken", n_bytes=1).name == "gigatoken"
    assert encoder_for(bpe, "tiktoken", n_bytes=large).name == "tiktoken"
    assert encoder_for(load_tokenizer("bytes"), n_bytes=large).name == "bytes"
    trained = train_bpe(265, ["some text, some words "] * 20)
    assert encoder_for(trained, n_bytes=large).name == "gigatoken"
    assert encoder_for(trained, n_bytes=large).differs_at("some text, some words") is None


def test_it_need_not_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    bpe, _ = gpt2()
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    assert encoder_for(bpe, n_bytes=1 << 40).name == "tiktoken"
    with pytest.raises(
        Refused, match=r"--encoder gigatoken: .* pip install 'gptfast\[gigatoken\]'"
    ):
        encoder_for(bpe, "gigatoken", n_bytes=1)


def test_a_token_that_no_merge_makes_is_found() -> None:
    """Such as "abc" from "ab" and "bc": "ab" comes first, and "c" cannot be added to it."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    assert unreachable({**ranks, b"ab": 256, b"bc": 257, b"abcd": 259, b"cd": 258}) is None
    assert unreachable({**ranks, b"ab": 256, b"bc": 257, b"abcd": 258}) == b"abcd"
    assert unreachable({**ranks, b"bc": 256, b"abc": 257}) is None
    assert unreachable(gpt2()[0].ranks) is None


@pytest.mark.parametrize(
    ("changes", "obstacle"),
    [
        ({"pattern": r"\p{L}+|\P{L}+"}, "does not know the pattern of odd"),
        ({"ranks": {b"ab": 300}}, "no vocabulary with gaps"),
        ({"ranks": {b"abc": 256}}, r"a token as b'abc', which no merge makes"),
    ],
)
def test_what_it_cannot_do_is_tiktokens(changes: dict[str, Any], obstacle: str) -> None:
    ranks = {bytes([byte]): byte for byte in range(256)} | changes.get("ranks", {})
    pattern = changes.get("pattern", PATTERNS["gpt2"])
    bpe = Bpe("odd", pattern=pattern, ranks=ranks, special_tokens={END: 400})
    assert encoder_for(bpe, n_bytes=1 << 40).name == "tiktoken"
    with pytest.raises(Refused, match=rf"--encoder gigatoken: .*{obstacle}"):
        encoder_for(bpe, "gigatoken", n_bytes=1)


# through prepare ---------------------------------------------------------------------------------


def test_prepare_gives_the_same_file(tmp_path: Path) -> None:
    rows = [f"Row {n}: café 你好 {END} it's {n * 7919} \U000323b0" for n in range(4000)]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"text": row}) for row in rows))
    (tmp_path / "text.txt").write_text("\n".join(rows))
    found = []
    for encoder, workers in (("tiktoken", 2), ("gigatoken", 1), ("gigatoken", 6)):
        result, store = prepared(
            tmp_path,
            tmp_path / "rows.jsonl",
            tmp_path / "text.txt",
            encoder=encoder,
            workers=workers,
            force=True,
        )
        assert result.encoder == encoder
        found.append((result.fingerprint, stored_ids(store)))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("wrong", ["a.txt", "b.txt"])
def test_other_ids_stop_the_command(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line that names the source and the place; nothing is left behind."""
    names = ("a.txt", "b.txt", "c.txt")
    for name in names:
        (tmp_path / name).write_text(f"This is {name}, you see. " * 10)

    def loaded(bpe: Bpe) -> Any:
        return lambda text: bpe.encode(text.decode().replace(f"is {wrong}", f"was {wrong}"))

    monkeypatch.setattr(encoders, "_loaded", loaded)
    with pytest.raises(GptfastError) as caught:
        prepared(tmp_path, tmp_path, encoder="gigatoken")
    assert str(caught.value) == (
        f"{tmp_path / wrong}: document {names.index(wrong) + 1} of 3: gigatoken gives other ids "
        f"than tiktoken for {f'This is {wrong}, you see. '!r}: use --encoder tiktoken"
    )
    assert only(tmp_path, *names)
    result, _ = prepared(tmp_path, tmp_path, encoder="tiktoken")
    assert result.n_documents == 3


def test_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("some text")
    assert main(["prepare", "a.txt", "--encoder", "gigatoken"]) == 0
    assert "gpt2 (50,257 ids) by gigatoken" in capsys.readouterr().out
    command = ["prepare", "a.txt", "--encoder", "gigatoken", "--tokenizer", "bytes"]
    assert main(command) == 2
    assert "does not know the tokenizer bytes" in capsys.readouterr().err
