"""From documents to ids: the ids depend on the text alone, not on how it is cut for the threads."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gptfast.data.prepare import encoding, packing
from gptfast.data.prepare.corpus import Chunks, survey
from gptfast.data.prepare.encoding import encode
from gptfast.data.prepare.formats import STRICT
from gptfast.data.prepare.plan import plan
from gptfast.data.prepare.sources import Source
from gptfast.tokenizers.bpe import PATTERNS, Bpe
from gptfast.tokenizers.encoders import encoder_for

spiky = st.lists(
    st.sampled_from(
        [
            *" \n\r\t/.,;'\"_-1aAé你。！\u00a0\u0301\u1e9e",
            "  ",
            "\n\n",
            "'s",
            "n't",
            "a,b",
            "12,3",
            "x'",
        ]
    ),
    max_size=40,
).map("".join)
"""Text of what patterns treat differently, runs of it above all."""
documents = st.lists(st.one_of(spiky, st.text(max_size=40)), min_size=1, max_size=4)


@functools.cache
def small(pattern: str) -> Bpe:
    """Any two of its characters side by side are a token, unless a word ends between them."""
    singles = [bytes([byte]) for byte in range(256)]
    characters = [c.encode() for c in "1aAbnstx \n\r\t/.,;'\"_-"]
    tokens = [*singles, *(a + b for a in characters for b in characters)]
    return Bpe(
        pattern,
        pattern=PATTERNS[pattern],
        ranks={token: rank for rank, token in enumerate(tokens)},
        special_tokens={"<|endoftext|>": len(tokens)},
    )


@pytest.mark.parametrize("pattern", PATTERNS)
@settings(max_examples=120, deadline=None)
@given(
    texts=documents,
    as_rows=st.booleans(),
    val_fraction=st.sampled_from([0.0, 0.3]),
    block=st.integers(1, 60),
    batch=st.integers(1, 60),
    workers=st.integers(1, 3),
)
@example(texts=["n't,x"] * 2, as_rows=True, val_fraction=0, block=3, batch=1, workers=1)
@example(texts=["a\n\nab"], as_rows=False, val_fraction=0, block=5, batch=1, workers=1)
def test_ids_depend_on_the_text_alone(
    pattern: str,
    texts: list[str],
    as_rows: bool,
    val_fraction: float,
    block: int,
    batch: int,
    workers: int,
) -> None:
    tokenizer = small(pattern)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        if as_rows:
            path = Path(folder, "a.jsonl")
            path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        else:
            path = Path(folder, "a.txt")
            texts = ["".join(texts).removeprefix("\ufeff")]
            path.write_bytes(texts[0].encode())
        for module, name, size in (
            (packing, "BLOCK", block),
            (encoding, "_LONG", block),
            (encoding, "_BATCH", batch),
        ):
            patch.setattr(module, name, size)
        surveys = [survey(Source(path.name, path), STRICT, alphabet=None)]
        if not surveys[0].sizes:
            return
        planned = plan(surveys, val_fraction)
        found: dict[str, list[int]] = {"train": [], "val": []}
        starts: dict[str, list[int]] = {"train": [], "val": []}
        for encoded in encode(
            surveys,
            planned,
            tokenizer=tokenizer,
            encoder=encoder_for(tokenizer, "tiktoken", n_bytes=0),
            reading=STRICT,
            workers=workers,
        ):
            starts[encoded.split] += [len(found[encoded.split]) + at for at in encoded.documents]
            found[encoded.split] += encoded.ids.tolist()

    expected: dict[str, list[int]] = {"train": [], "val": []}
    expected_starts: dict[str, list[int]] = {"train": [], "val": []}
    for number, text in enumerate(text for text in texts if text):
        n_train, _ = planned.parts[0].limits(number)
        for split, part in (("train", text[:n_train]), ("val", text[n_train:])):
            if part:
                expected_starts[split].append(len(expected[split]))
                expected[split] += tokenizer.encode(part).tolist()
        if planned.has_documents:
            expected["val" if text[n_train:] else "train"].append(tokenizer.vocab_size - 1)
    assert (found, starts) == (expected, expected_starts)


@pytest.mark.parametrize(
    "text", ['{"key":12,"other":[1,2]},' * 400, "你好。再见！" * 2000, "a-b_c/" * 2000]
)
def test_a_long_line_without_spaces_is_cut(text: str) -> None:
    """So that it needs no more memory than another."""
    chunks = Chunks()
    found = [chunk for at in range(0, len(text), 1000) for chunk in chunks.feed(text[at:][:1000])]
    assert len(found) >= len(text) // 1000 - 1
    assert max(map(len, found)) < 2000
    found += chunks.rest()
    for pattern in PATTERNS:
        ids = [i for chunk in found for i in small(pattern).encode(chunk).tolist()]
        assert ids == small(pattern).encode(text).tolist()


def test_a_long_row_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "some words " * 1000}) + "\n")
    monkeypatch.setattr(encoding, "_LONG", 500)
    monkeypatch.setattr(encoding, "_BATCH", 1)
    surveys = [survey(Source("a.jsonl", path), STRICT, alphabet=None)]
    tokenizer = small("gpt2")
    found = list(
        encode(
            surveys,
            plan(surveys, 0),
            tokenizer=tokenizer,
            encoder=encoder_for(tokenizer, "tiktoken", n_bytes=0),
            reading=STRICT,
            workers=1,
        )
    )
    assert len(found) > 20
    assert [encoded.documents for encoded in found] == [[0], *([[]] * (len(found) - 1))]
