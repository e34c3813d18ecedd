"""Vocabularies of one's own: trained on the corpus, out of a .tiktoken file or a tokenizer.json."""

from __future__ import annotations

import base64
import functools
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from data_helpers import TEXT, prepared, stored_ids
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from gptfast.cli import main
from gptfast.data.store import Store
from gptfast.errors import Refused
from gptfast.tokenizers import training
from gptfast.tokenizers.bpe import PATTERNS, Bpe
from gptfast.tokenizers.hugging_face import HuggingFace
from gptfast.tokenizers.tokenizer import from_definition, load_tokenizer
from gptfast.tokenizers.training import train_bpe

pytestmark = pytest.mark.usefixtures("one_thread")
END = "<|endoftext|>"
WORDS = "low lower newest widest new wide <unk> </s> [SEP] it's 你好 é 2024 \n\n a  b\t"

texts = st.one_of(
    st.text(max_size=100),
    st.lists(
        st.sampled_from(
            [*" \n\r\t/.'1aA你é\u00a0\u0301", "  ", "low", "'s", "</s>", END, "newest"]
        ),
        max_size=20,
    ).map("".join),
)


def trained(n_ids: int, text: str) -> Bpe:
    return train_bpe(n_ids, [text])


def write_ranks(path: Path, tokens: Iterable[bytes], *, first: int = 0) -> Path:
    lines = (base64.b64encode(token) + b" %d\n" % n for n, token in enumerate(tokens, first))
    path.write_bytes(b"".join(lines))
    return path


def all_bytes() -> list[bytes]:
    return [bytes([byte]) for byte in range(256)]


# trained on the corpus ---------------------------------------------------------------------------


def test_the_most_frequent_pair_is_merged_first() -> None:
    """Worked out by hand: " a" comes six times, " ab" four times, " ac" twice, "xy" once."""
    bpe = trained(260, "xy ab ab ac ab ac ab")
    assert bpe.vocab_size == 260
    assert bpe.eot_id == 259
    assert [bpe.decode([i]) for i in (256, 257, 258)] == [" a", " ab", " ac"]
    assert bpe.encode(" ab ac ab xy").tolist() == [257, 258, 257, *bpe.encode(" xy").tolist()]
    assert len(bpe.encode(" xy")) == 3


def test_the_same_corpus_gives_the_same_ids() -> None:
    """Also in a process with other hashes of strings and other threads."""
    code = """
import hashlib, json, sys
from gptfast.tokenizers.training import train_bpe
text = sys.stdin.read()
bpe = train_bpe(900, [text[n : n + 1000] for n in range(0, len(text), 1000)])
print(hashlib.sha256(json.dumps(bpe.definition()).encode()).hexdigest())
"""
    text = (TEXT / "nfc_nfd_rtl.txt").read_bytes().decode() + Path(__file__).read_text()
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            input=text,
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": seed},
        ).stdout
        for threads, seed in (("1", "1"), ("4", "2"))
    }
    assert len(found) == 1


@settings(max_examples=50, deadline=None)
@given(text=texts)
@example(text=f"a{END}b")
def test_a_trained_one_loses_nothing_and_knows_no_markers(text: str) -> None:
    bpe = built("trained")
    ids = bpe.encode(text).tolist()
    assert bpe.decode_bytes(ids) == text.encode()
    assert "".join(bpe.pieces(ids)) == text
    assert bpe.eot_id not in ids
    assert int(bpe.token_bytes()[ids].sum()) == len(text.encode())


@pytest.mark.parametrize("name", ["bpe:256", "bpe:", "bpe:many", "bpe:-300", "bpe:30²", "bpe:1e4"])
def test_a_size_that_cannot_be_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("some text")
    with pytest.raises(Refused, match=rf"^--tokenizer {name}: .* 257 .*bpe:8192$"):
        prepared(tmp_path, path, tokenizer=name)
    assert not (tmp_path / "corpus.h5").exists()


def test_a_text_too_short_says_how_many_ids_it_has(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("xy ab ab ac ab ac ab" + " never read: validation" * 5)
    with pytest.raises(Refused, match=r"only enough for 260 ids .*: use bpe:260 or less"):
        prepared(tmp_path, path, tokenizer="bpe:5000", val_fraction=0.85)
    assert prepared(tmp_path, path, tokenizer="bpe:260", val_fraction=0.85)[0].vocab_size == 260
    assert prepared(tmp_path, path, tokenizer="bpe:257", force=True)[0].vocab_size == 257


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 3000), max_size=60),
    most=st.integers(3000, 60_000),
    different=st.integers(3000, 60_000),
    repeats=st.booleans(),
)
def test_a_sample_is_spread_evenly(
    sizes: list[int], most: int, different: int, repeats: bool
) -> None:
    """All while it fits, else as much as may be, from everywhere, in the order of the text."""
    numbers = itertools.repeat("12345") if repeats else map("{:05}".format, itertools.count())
    texts = ["".join(f"{next(numbers)} " for _ in range(size // 6)) for size in sizes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "_PIECE", 1000)
        patch.setattr(training, "SAMPLE", most)
        patch.setattr(training, "DIFFERENT", different)
        taken = [piece.decode() for piece in training.sample(texts)]
        pieces = list(training._pieces(texts))
    assert "".join("".join(pieces).split()) == "".join("".join(texts).split())
    distance = -(-len(pieces) // len(taken)) if taken else 1
    distance = 1 << (distance - 1).bit_length()
    assert taken == pieces[::distance]
    assert sum(map(len, taken)) <= most
    assert n_different(taken) <= different
    if distance > 1:
        more = pieces[:: distance // 2]
        assert sum(map(len, more)) > most or n_different(more) > different


def n_different(pieces: list[str]) -> int:
    """Characters of what is different in them: numbers, and what stands between two."""
    return len("".join({word for piece in pieces for word in re.split(r"\b", piece)}))


def test_only_the_sample_is_learnt_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "_PIECE", 30)
    monkeypatch.setattr(training, "SAMPLE", 1200)
    texts = [" ab" * 10, " cd" * 10] * 40
    bpe = train_bpe(259, texts)
    assert [bpe.decode([i]) for i in (256, 257)] == ["ab", " ab"]
    with pytest.raises(Refused, match="only enough for 259"):
        train_bpe(260, texts)


@pytest.mark.parametrize("character", ["a", "^", "你", " "])
def test_training_on_one_endless_word_is_quick(character: str) -> None:
    """TXT-13: merging takes time with the square of a word's length."""
    begin = time.perf_counter()
    trained(260, character * 300_000)
    assert time.perf_counter() - begin < 10


# files -------------------------------------------------------------------------------------------


def test_a_rank_file_gives_the_ids_that_it_says(tmp_path: Path) -> None:
    """GPT-2's ranks as a file: the very tokenizer, by another name."""
    gpt2 = built("gpt2")
    path = write_ranks(tmp_path / "mine.tiktoken", sorted(gpt2.ranks, key=lambda t: gpt2.ranks[t]))
    mine = load_tokenizer(str(path))
    assert (mine.name, mine.vocab_size, mine.eot_id) == ("mine", 50257, 50256)
    assert mine.definition() == {**gpt2.definition(), "name": "mine"}


@pytest.mark.parametrize(
    ("name", "pattern", "text", "n_tokens"),
    [
        ("mine.tiktoken", "gpt2", "12345", 1),
        ("mine.tiktoken:cl100k_base", "cl100k_base", "12345", 2),
        ("mine.tiktoken:o200k_base", "o200k_base", "12345", 2),
        ("r50k_base.tiktoken", "gpt2", "12345", 1),
    ],
)
def test_the_pattern_of_a_rank_file(
    name: str, pattern: str, text: str, n_tokens: int, tmp_path: Path
) -> None:
    tokens = [*all_bytes(), b"12", b"123", b"45", b"12345"]
    write_ranks(tmp_path / name.split(":")[0], tokens)
    mine = load_tokenizer(str(tmp_path / name))
    assert isinstance(mine, Bpe)
    assert mine.pattern == PATTERNS[pattern]
    assert len(mine.encode(text)) == n_tokens
    again = from_definition(json.loads(json.dumps(mine.definition())))
    assert again.definition() == mine.definition()
    assert again.encode(text).tolist() == mine.encode(text).tolist()


def test_gaps_and_markers_of_openais_own_files(tmp_path: Path) -> None:
    """p50k_base leaves 50256 free for its marker, cl100k_base leaves 100256 to nobody."""
    filler = (b"\xff\xfe%d" % n for n in range(200_000))
    tokens = [*all_bytes(), *(next(filler) for _ in range(50_000))]
    path = write_ranks(tmp_path / "p50k_base.tiktoken", tokens)
    ranks = path.read_text().splitlines()
    path.write_text("\n".join([*ranks, "IGE= 50257"]))
    p50k = load_tokenizer(str(path))
    assert (p50k.eot_id, p50k.vocab_size) == (50256, 50258)
    again = from_definition(json.loads(json.dumps(p50k.definition())))
    assert again.encode(" a").tolist() == [50257]
    assert again.decode([50257, 50256]) == f" a{END}"
    cl100k = load_tokenizer(str(write_ranks(tmp_path / "cl100k_base.tiktoken", tokens)))
    assert (cl100k.eot_id, cl100k.vocab_size) == (100257, 100277)
    assert cl100k.decode([97, 100_256, 98]) == "ab", "an id that means nothing"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "is empty"),
        (b"YQ== 0\nYg==\n", "line 2: is not a token in base64 and its id, but 'Yg=='"),
        (b"YQ== 0\nYg== x\n", "line 2: is not"),
        (b"YQ== 0\n*** 1\n", "line 2: is not"),
        (b"YQ== 0\nYg== 0\n", "line 2: gives a token or an id that stands above"),
        (b"YQ== 0\nYQ== 1\n", "line 2: gives a token or an id that stands above"),
        (b"YQ== -1\n", r"line 1: gives the id -1, which must be in \[0, 16777216\)"),
        (b"YQ== 5000000000\n", "line 1: gives the id 5000000000, which must"),
        (b"YQ== 0\n", r"has no token for byte 0x00 \(255 bytes are missing\)"),
    ],
)
def test_a_damaged_rank_file_is_refused(content: bytes, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.tiktoken"
    path.write_bytes(content)
    with pytest.raises(Refused, match=complaint) as caught:
        load_tokenizer(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("nowhere.tiktoken", "cannot be read"),
        ("nowhere/tokenizer.json", "cannot be read"),
        ("nowhere", "is not known.*bpe:N, or a .tiktoken or tokenizer.json file"),
        ("there.tiktoken:gpt3", "no such pattern: did you mean gpt2"),
        ("broken.json", "is not JSON"),
        ("list.json", "does not describe a tokenizer"),
        ("other.json", "does not describe a tokenizer"),
        ("odd.json", "does not describe a tokenizer"),
        (
            "huge.json",
            r"does not describe a tokenizer \(ValueError: the id 5000000000 of 'a' is not",
        ),
        ("bpe:300", "is made from the text"),
        ("chars", "is made from the text"),
    ],
)
def test_what_is_no_tokenizer_is_refused(
    name: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_ranks(Path("there.tiktoken"), all_bytes())
    Path("broken.json").write_text("{")
    Path("list.json").write_text("[1]")
    Path("other.json").write_text('{"kind": "bpe"}')
    Path("odd.json").write_text('{"added_tokens": [], "model": {"type": "Odd"}}')
    Path("huge.json").write_text(
        '{"added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 5000000000}, "merges": []}}'
    )
    with pytest.raises(Refused, match=complaint) as caught:
        load_tokenizer(name)
    assert "\n" not in str(caught.value)


# tokenizer.json ----------------------------------------------------------------------------------


def byte_level(**options: Any) -> tokenizers.Tokenizer:
    """As GPT-2's own file."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, **options)
    tokenizer.decoder = decoders.ByteLevel()
    _learn(tokenizer, trainers.BpeTrainer, 400, [END], alphabet=True)
    return tokenizer


def split_first(pattern: str) -> tokenizers.Tokenizer:
    """As Llama 3's file: a pattern of its own before the bytes."""
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    _learn(
        tokenizer, trainers.BpeTrainer, 400, ["<|begin_of_text|>", "<|end_of_text|>"], alphabet=True
    )
    return tokenizer


def byte_fallback() -> tokenizers.Tokenizer:
    """As Llama 2's file: no words, a mark before the text, bytes for what is not in it."""
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    fallbacks = [f"<0x{byte:02X}>" for byte in range(256)]
    _learn(tokenizer, trainers.BpeTrainer, 400, ["<unk>", "<s>", "</s>", *fallbacks])
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = content["added_tokens"][:3]
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def unigram() -> tokenizers.Tokenizer:
    """As T5's file; its </s> is a word of the vocabulary like any other."""
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    _learn(tokenizer, trainers.UnigramTrainer, 60, ["<unk>", "</s>"], unk_token="<unk>")
    return tokenizer


def word_piece() -> tokenizers.Tokenizer:
    """As BERT's file, which cuts, fills up and frames what it encodes."""
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    _learn(tokenizer, trainers.WordPieceTrainer, 80, ["[UNK]", "[CLS]", "[SEP]", "[PAD]"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=20)
    return tokenizer


def _learn(
    tokenizer: tokenizers.Tokenizer,
    trainer: Callable[..., Any],
    vocab_size: int,
    markers: list[str],
    *,
    alphabet: bool = False,
    **options: Any,
) -> None:
    initial = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet()} if alphabet else {}
    tokenizer.train_from_iterator(
        [WORDS] * 20,
        trainer(
            vocab_size=vocab_size,
            special_tokens=markers,
            show_progress=False,
            **initial,
            **options,
        ),
    )


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
FOUND: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte-level": byte_level,
    "llama 3": lambda: split_first(LLAMA3),
    "o200k": lambda: split_first(PATTERNS["o200k_base"]),
    "byte fallback": byte_fallback,
    "unigram": unigram,
    "word piece": word_piece,
    "unknown pattern": lambda: split_first(r"\p{L}+|\P{L}+"),
    "space before": lambda: _with_space_before(byte_level()),
}
BYTE_LEVEL = ("byte-level", "llama 3", "o200k")
LOSSLESS = (*BYTE_LEVEL, "byte fallback", "unknown pattern")


def _with_space_before(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


@functools.cache
def built(name: str) -> Any:
    """Built once; examples share it."""
    if name == "gpt2":
        return load_tokenizer("gpt2")
    if name == "trained":
        text = Path(__file__).read_text()
        return trained(700, text)
    return FOUND[name]()


@functools.cache
def loaded(name: str) -> Any:
    """Out of a file, and then out of its definition, as a checkpoint has it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tokenizer.json")
        path.write_text(built(name).to_str())
        tokenizer = load_tokenizer(folder)
        assert tokenizer.definition() == load_tokenizer(str(path)).definition()
    again = from_definition(json.loads(json.dumps(tokenizer.definition())))
    assert again.definition() == tokenizer.definition()
    return again


def bare(name: str) -> tokenizers.Tokenizer:
    """As the library has it, without what it puts around a text."""
    content = json.loads(built(name).to_str())
    bare = tokenizers.Tokenizer.from_str(
        json.dumps({**content, "truncation": None, "padding": None, "post_processor": None})
    )
    bare.encode_special_tokens = True
    return bare


@pytest.mark.parametrize("name", FOUND)
@settings(max_examples=60, deadline=None)
@given(text=texts)
@example(text="low newest")
@example(text=f"a {END} b</s>c [SEP] </s>")
def test_a_tokenizer_json_is_what_the_library_makes_of_it(name: str, text: str) -> None:
    """TXT-16 among it: a marker in the text is never the separator."""
    tokenizer = loaded(name)
    ids = tokenizer.encode(text).tolist()
    assert tokenizer.eot_id is not None
    assert tokenizer.eot_id not in ids
    if name != "unigram" or "</s>" not in text:  # there the library takes it for the marker
        assert ids == bare(name).encode(text, add_special_tokens=False).ids
    whole = tokenizer.decode(ids)
    assert whole == built(name).decode(ids, skip_special_tokens=False)
    pieces = list(tokenizer.pieces(ids))
    assert "".join(pieces) == whole
    if name in LOSSLESS:
        assert whole == text
        assert not any("\ufffd" in piece for piece in pieces), "no half characters"


@pytest.mark.parametrize("name", ["trained", *FOUND])
def test_long_runs_without_a_space_are_quick(name: str) -> None:
    """TXT-13."""
    tokenizer = built(name) if name == "trained" else loaded(name)
    for run in ("letters_90k", "cjk_28k", "caret_90k"):
        text = (TEXT / f"long_line_{run}.txt").read_bytes().decode()
        begin = time.perf_counter()
        ids = tokenizer.encode(text).tolist()
        assert time.perf_counter() - begin < 5
        if name in LOSSLESS:
            assert tokenizer.decode(ids) == text


def test_a_marker_that_is_a_word_is_cut_in_two() -> None:
    library = bare("unigram")
    parts = ["low\0<", "/s>new <", "/s>"]
    expected = [i for part in parts for i in library.encode(part, add_special_tokens=False).ids]
    assert loaded("unigram").encode("".join(parts)).tolist() == expected
    folded = json.loads(built("unigram").to_str())
    folded["normalizer"] = {"type": "Lowercase"}
    tokenizer = HuggingFace("folded", content=folded, separator="</s>")
    assert tokenizer.eot_id not in tokenizer.encode("low </S> new").tolist()


@pytest.mark.parametrize("name", BYTE_LEVEL)
def test_byte_level_needs_nobody_but_tiktoken(name: str) -> None:
    assert isinstance(loaded(name), Bpe)


@pytest.mark.parametrize("name", sorted(FOUND.keys() - set(BYTE_LEVEL)))
def test_what_tiktoken_would_do_otherwise_is_left_to_the_library(name: str) -> None:
    assert isinstance(loaded(name), HuggingFace)


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "NFC"}},
        {"decoder": None},
        {"model": {"byte_fallback": True}},
        {"model": {"dropout": 0.1}},
        {"added_tokens": [{"id": 0, "content": END, "special": False}]},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}},
    ],
    ids=str,
)
def test_no_change_to_a_byte_level_file_is_overlooked(
    change: Mapping[str, Any], tmp_path: Path
) -> None:
    content = json.loads(built("byte-level").to_str())
    marker = content["added_tokens"][0]
    for key, value in change.items():
        if key == "model":
            content[key].update(value)
        elif key == "added_tokens":
            content[key] = [{**marker, **value[0]}]
        else:
            content[key] = {**(content[key] or {}), **value} if value else value
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    assert isinstance(load_tokenizer(str(path)), HuggingFace)


def test_merges_that_do_not_follow_the_ids_are_left_to_the_library(tmp_path: Path) -> None:
    """The first merge made the last: tiktoken, which goes by the ids, would get it wrong."""
    content = json.loads(built("byte-level").to_str())
    first, *others = content["model"]["merges"]
    content["model"]["merges"] = [*others, first]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    assert isinstance(load_tokenizer(str(path)), HuggingFace)


def test_a_token_that_its_own_bytes_do_not_merge_to_is_left_to_the_library(tmp_path: Path) -> None:
    """ "qz" is made before "zx", so "qzx" never is; tiktoken would take the word as it stands."""
    content = json.loads(built("byte-level").to_str())
    vocabulary = content["model"]["vocab"]
    for first, second in (("q", "z"), ("z", "x"), ("q", "zx")):
        vocabulary[first + second] = len(vocabulary)
        content["model"]["merges"].append([first, second])
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    tokenizer = load_tokenizer(str(path))
    assert isinstance(tokenizer, HuggingFace)
    assert tokenizer.encode("qzx").tolist() == [vocabulary["qz"], vocabulary["x"]]


@pytest.mark.parametrize("name", FOUND)
def test_bytes_of_tokens_add_up(name: str) -> None:
    """In a text without the space that some put before it."""
    tokenizer = loaded(name)
    text = "low newest wide"
    ids = tokenizer.encode(text).tolist()
    extra = len(tokenizer.decode(ids)) - len(text)
    first = name in ("byte fallback", "unigram", "word piece")
    spaces = text.count(" ") if name == "word piece" else 0
    total = int(tokenizer.token_bytes()[ids].sum())
    assert abs(total - len(text) - extra) <= first + spaces
    assert tokenizer.token_bytes()[tokenizer.eot_id] == 0
    if name == "byte fallback":
        ids = tokenizer.encode("é").tolist()
        assert tokenizer.token_bytes()[ids[1:]].tolist() in ([2], [1, 1])


@pytest.mark.parametrize(
    ("config", "marker"),
    [
        (None, "<|end_of_text|>"),
        ({"eos_token": "<|begin_of_text|>"}, "<|begin_of_text|>"),
        ({"eos_token": {"content": "<|begin_of_text|>"}}, "<|begin_of_text|>"),
        ({"eos_token": "<|not there|>"}, "<|end_of_text|>"),
        ({}, "<|end_of_text|>"),
    ],
)
def test_the_separator_of_a_tokenizer_json(
    config: dict[str, Any] | None, marker: str, tmp_path: Path
) -> None:
    built("llama 3").save(str(tmp_path / "tokenizer.json"))
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.decode([tokenizer.eot_id]) == marker
    again = from_definition(tokenizer.definition())
    assert again.eot_id == tokenizer.eot_id


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built("unigram").save(str(tmp_path / "tokenizer.json"))
    definition = load_tokenizer(str(tmp_path)).definition()
    built("byte-level").save(str(tmp_path / "plain.json"))
    (tmp_path / "a.txt").write_text("text")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    hint = r"tokenizers, which is not installed: pip install 'gptfast\[tokenizers\]'"
    with pytest.raises(Refused, match=hint):
        load_tokenizer(str(tmp_path))
    with pytest.raises(Refused, match=hint):
        from_definition(definition)
    with pytest.raises(Refused, match=hint):
        prepared(tmp_path, tmp_path / "a.txt", tokenizer="bpe:300")
    assert load_tokenizer(str(tmp_path / "plain.json")).encode("low").tolist() != []


# through the commands ----------------------------------------------------------------------------


def test_a_document_too_long_to_be_seen_whole_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gptfast.data.prepare.prepare._WHOLE", 100)
    built("unigram").save(str(tmp_path / "tokenizer.json"))
    for n in (100, 101):
        (tmp_path / "a.jsonl").write_text('{"text": "low"}\n' + json.dumps({"text": "a" * n}))
        run = functools.partial(
            prepared, tmp_path, tmp_path / "a.jsonl", tokenizer=str(tmp_path), force=True
        )
        if n == 100:
            run()
        else:
            with pytest.raises(Refused, match=r"a\.jsonl: has a document of 101 characters"):
                run()


@pytest.mark.parametrize("name", ["unigram", "byte fallback"])
def test_a_document_is_encoded_whole(name: str, tmp_path: Path) -> None:
    """Where it is not, each part begins with the mark that stands before a text."""
    built(name).save(str(tmp_path / "tokenizer.json"))
    text = "low newest wide\n" * 40_000
    (tmp_path / "a.txt").write_text(text)
    _, store = prepared(tmp_path, tmp_path / "a.txt", tokenizer=str(tmp_path), val_fraction=0)
    assert stored_ids(store) == loaded(name).encode(text).tolist()


@pytest.mark.parametrize(
    "name", ["bpe:400", "mine.tiktoken", "tokenizer.json", "llama/tokenizer.json"]
)
def test_markers_in_the_text_are_not_the_separator(name: str, tmp_path: Path) -> None:
    """TXT-16."""
    (tmp_path / "llama").mkdir()
    write_ranks(tmp_path / "mine.tiktoken", all_bytes())
    built("unigram").save(str(tmp_path / "tokenizer.json"))
    built("llama 3").save(str(tmp_path / "llama" / "tokenizer.json"))
    tokenizer = name if name.startswith("bpe") else str(tmp_path / name)
    source = TEXT.parent / "jsonl" / "endoftext_in_row.jsonl"
    rows = source.read_text().splitlines()
    source = tmp_path / "rows.jsonl"
    source.write_text("\n".join([*rows, '{"text": "</s> <|end_of_text|>"}'] * 3))
    _, store = prepared(tmp_path, source, tokenizer=tokenizer)
    n_rows = 3 * (len(rows) + 1)
    assert stored_ids(store).count(store.tokenizer().eot_id) == n_rows


@pytest.mark.parametrize(("n_ids", "dtype"), [(65_536, np.uint16), (65_537, np.uint32)])
def test_the_largest_vocabulary_of_16_bits(
    n_ids: int, dtype: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TOK-01: prepared, trained on, evaluated and continued; the separator is the last id."""
    monkeypatch.chdir(tmp_path)
    filler = [b"\xff\xfe%d" % n for n in range(n_ids - 257)]
    write_ranks(Path("mine.tiktoken"), [*all_bytes(), *filler])
    rows = [json.dumps({"text": f"row {n} of some text"}) for n in range(40)]
    Path("rows.jsonl").write_text("\n".join(rows))
    result, store = prepared(tmp_path, Path("rows.jsonl"), tokenizer="mine.tiktoken")
    assert result.vocab_size == store.vocab_size == n_ids
    assert all(store.tokens(split).dtype == dtype for split in store.splits)
    assert stored_ids(store).count(n_ids - 1) == 40
    assert max(stored_ids(store)) == n_ids - 1
    train_here(steps=1)
    Path("mine.tiktoken").unlink()
    assert main(["eval", "tiny", "--data", "corpus.h5"]) == 0
    assert main(["generate", "tiny", "--prompt", "row", "--max-new-tokens", "2"]) == 0


@pytest.mark.parametrize(
    "name", ["bpe:290", "mine.tiktoken", "llama/tokenizer.json", "tokenizer.json"]
)
def test_data_file_and_checkpoint_carry_the_tokenizer(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """TOK-05: they are all that eval, generate and a resumed run need."""
    (tmp_path / "made").mkdir()
    monkeypatch.chdir(tmp_path / "made")
    Path("llama").mkdir()
    write_ranks(Path("mine.tiktoken"), [*all_bytes(), b"lo", b"low"])
    built("byte fallback").save("tokenizer.json")
    built("llama 3").save("llama/tokenizer.json")
    Path("a.txt").write_text(WORDS * 60)
    original, _ = prepared(Path(), Path("a.txt"), tokenizer=name)
    train_here(steps=2)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    Path("runs").rename(elsewhere / "runs")
    Path("corpus.h5").rename(elsewhere / "corpus.h5")
    monkeypatch.chdir(elsewhere)
    for path in (tmp_path / "made").rglob("*"):
        if path.is_file():
            path.unlink()

    with Store.open("corpus.h5") as store:
        tokenizer = store.tokenizer()
        assert "lower newest" in tokenizer.decode(stored_ids(store))
        # One byte more or less: the space that some put before a text.
        n_bytes_unscored = len(tokenizer.decode(store.tokens("val")[:1].tolist()).encode())
    capsys.readouterr()
    assert main(["eval", "tiny", "--data", "corpus.h5", "--json"]) == 0
    score = json.loads(capsys.readouterr().out)
    n_bytes = score["loss"] * score["tokens"] / np.log(2) / score["bits_per_byte"]
    assert n_bytes == pytest.approx(original.val.n_bytes - n_bytes_unscored, abs=1.01)
    command = ["generate", "tiny", "--prompt", "low", "--max-new-tokens", "5"]
    assert main([*command, "--no-stream"]) == 0
    at_once = capsys.readouterr().out
    assert main(command) == 0
    assert capsys.readouterr().out == at_once
    assert at_once.startswith("low")
    assert main(["train", "--resume", "--run", "tiny", "--set", "data.path=corpus.h5"]) == 0


def train_here(*, steps: int) -> None:
    Path("gptfast.toml").write_text(
        f"""
[profiles.tiny.model]
n_layer = 1
n_head = 1
n_embd = 4
block_size = 8
[profiles.tiny.data]
path = "corpus.h5"
[profiles.tiny.train]
steps = {steps}
batch_size = 2
"""
    )
    assert main(["train", "--profile", "tiny", "--run", "tiny", "--device", "cpu", "--plain"]) == 0
