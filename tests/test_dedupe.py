"""Copies of documents: exact ones, near ones, and what is left in the data file."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from data_helpers import INPUTS, prepared, stored_ids
from hypothesis import given, settings
from hypothesis import strategies as st

from gptfast.cli import main
from gptfast.data.prepare import dedupe
from gptfast.data.prepare.dedupe import Copies, ExactCopies, NearCopies, shingles
from gptfast.data.prepare.selection import Selection
from gptfast.errors import Refused

BOTH = [ExactCopies, NearCopies]


def flags(copies: Copies, *documents: str, cut: int = 7) -> list[bool]:
    for text in documents:
        for at in range(0, len(text), cut):
            copies.feed(text[at : at + cut])
        copies.end()
    return copies.found().tolist()


@given(st.lists(st.sampled_from(["a", "ab", "b" * 30, "é", "c d e f g h " * 20]), max_size=12))
@settings(deadline=None)
@pytest.mark.parametrize("kind", BOTH)
def test_the_first_of_equal_documents_stays(kind: type[Copies], documents: list[str]) -> None:
    expected = [text in documents[:number] for number, text in enumerate(documents)]
    assert flags(kind(), *documents) == expected


def sentence(rng: random.Random, n_words: int) -> list[str]:
    letters = "abcdefghijklmnopqrstuvwxyz"
    return ["".join(rng.choices(letters, k=rng.randint(2, 9))) for _ in range(n_words)]


def changed(words: list[str], every: int) -> list[str]:
    """Another word in each place of some."""
    return [f"{word}x" if n % every == 1 else word for n, word in enumerate(words)]


@pytest.mark.parametrize(
    ("every", "least", "most"),
    [
        (100, 99, 100),  # 0.94 of the shingles in common
        (40, 88, 100),  # 0.85
        (8, 0, 15),  # 0.45
        (2, 0, 0),
    ],
)
def test_near_copies_are_found_as_the_bands_say(every: int, least: int, most: int) -> None:
    """100 pairs, of which so many are found."""
    rng = random.Random(1)
    firsts = [sentence(rng, 200) for _ in range(100)]
    documents = [" ".join(words) for words in firsts]
    documents += [" ".join(changed(words, every)) for words in firsts]
    found = flags(NearCopies(), *documents, cut=10_000)
    assert not any(found[:100])
    assert least <= sum(found[100:]) <= most


def test_shingles_are_the_runs_of_sixteen_characters() -> None:
    rng = random.Random(2)
    text = "".join(rng.choices("ab ", k=5_000))
    plain = " ".join(text.split())
    runs = [plain[at : at + 16] for at in range(len(plain) - 15)]
    hashes = shingles(text).tolist()
    assert len(hashes) == len(runs)
    assert len(dict.fromkeys(zip(runs, hashes, strict=True))) == len(set(runs)) == len(set(hashes))


def test_case_and_spacing_make_no_difference_to_near_copies() -> None:
    text = "It was the best of times, it was the worst of times, it was the age of wisdom"
    other = text.upper().replace(" ", "\n  ")
    assert flags(NearCopies(), text, other, cut=10_000) == [False, True]
    assert flags(ExactCopies(), text, other) == [False, False]


@pytest.mark.parametrize("batch", [1, 50, 1 << 18])
def test_batches_change_nothing(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(3)
    words = [sentence(rng, 30) for _ in range(20)]
    documents = [
        " ".join(changed(words[n % 20], 29)) if n > 40 else " ".join(words[n % 20])
        for n in range(60)
    ]
    expected = flags(NearCopies(), *documents, cut=10_000)
    monkeypatch.setattr(dedupe, "_BATCH", batch)
    assert flags(NearCopies(), *documents, cut=10_000) == expected
    assert expected[:41] == [False] * 20 + [True] * 21


def test_a_very_long_document_is_compared_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dedupe, "_LONGEST", 100)
    long = "0123456789" * 20
    short = "abcdefghij" * 5
    documents = [short, long, short, long, long + "!", long[:100]]
    assert flags(NearCopies(), *documents) == [False, False, True, True, False, False]


def test_hashes_do_not_depend_on_the_process() -> None:
    """Which copy is kept is the same tomorrow."""
    script = (
        "from gptfast.data.prepare.dedupe import NearCopies\n"
        "n = NearCopies()\n"
        "for text in ('one ' * 40, 'two three ' * 9): n.feed(text); n.end()\n"
        "n.found(); print(bytes(n._keys).hex())\n"
    )
    here = NearCopies()
    flags(here, "one " * 40, "two three " * 9, cut=1000)
    for seed in ("1", "2"):
        ran = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed},
        )
        assert ran.stdout.strip() == bytes(here._keys).hex()


@pytest.mark.parametrize(("kind", "n_bytes"), [(ExactCopies, 16), (NearCopies, 112)])
def test_memory_is_what_the_documentation_says(kind: type[Copies], n_bytes: int) -> None:
    copies = kind()
    flags(copies, *(f"document {n} of many, all of them short" for n in range(1000)), cut=100)
    kept = copies._digests if isinstance(copies, ExactCopies) else copies._keys
    assert len(kept) == 1000 * n_bytes


# the command -------------------------------------------------------------------------------------


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Six texts, two of them again, one of them nearly again, and one again in another file."""
    monkeypatch.chdir(tmp_path)
    texts = [json.loads(line)["text"] for line in (INPUTS / "jsonl/ok.jsonl").open()]
    rng = random.Random(4)
    long = sentence(rng, 300)
    texts += [texts[0], texts[3], " ".join(long), "", " ".join(changed(long, 150))]
    Path("rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    Path("again.txt").write_text(texts[1])
    return Path("rows.jsonl")


@pytest.mark.parametrize(("kind", "n_copies"), [("exact", 3), ("near", 4)])
def test_copies_are_left_out_and_counted(
    kind: str, n_copies: int, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first stays, also before one in another file; separators are those of what stays."""
    args = ["prepare", str(rows), "again.txt", "--dedupe", kind, "--val-fraction=0", "--out=d.h5"]
    assert main([*args, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["n_copies"], answer["n_documents"]) == (n_copies, 11 - n_copies)
    assert main([*args, "--force"]) == 0
    assert f"documents left out: 1 empty + {n_copies} copies\n" in capsys.readouterr().err

    kept = [json.loads(line) for line in rows.open()]
    kept = [*kept[:6], kept[8], *([kept[10]] if kind == "exact" else [])]
    Path("kept.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    _, expected = prepared(tmp_path, "kept.jsonl", val_fraction=0)
    result, store = prepared(
        tmp_path / "out", rows, "again.txt", selection=Selection(dedupe=kind), val_fraction=0
    )
    assert stored_ids(store) == stored_ids(expected)
    assert store.documents("train").tolist() == expected.documents("train").tolist()
    assert np.count_nonzero(store.tokens("train")[:] == 50256) == result.n_documents


def test_one_stream_has_nothing_to_compare(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", "again.txt", "--dedupe=exact"]) == 0
    assert "--dedupe: there is one document, and nothing to compare" in capsys.readouterr().err


def test_without_its_package_near_is_refused(
    rows: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rensa", None)
    with pytest.raises(
        Refused, match=r"rensa, .* pip install 'gptfast\[dedupe\]', or use --dedupe"
    ):
        NearCopies()
    assert main(["prepare", str(rows), "--dedupe=exact"]) == 0
