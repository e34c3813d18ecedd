"""Several sources with weights: which part of each is taken, and what the data file then holds."""

from __future__ import annotations

import json
import shutil
from array import array
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gptfast.cli import main
from gptfast.data.prepare.corpus import Survey
from gptfast.data.prepare.formats import Tally
from gptfast.data.prepare.plan import Plan, plan
from gptfast.data.prepare.sources import Source
from gptfast.data.store import Store

# the plan ----------------------------------------------------------------------------------------


def surveyed(*sizes: int) -> Survey:
    return Survey(Source("x", Path("x")), 0, "", array("q", sizes), 0, sum(sizes), Tally())


def splits_of(planned: Plan, surveys: list[Survey]) -> tuple[list[str], list[str]]:
    """The characters of train and of val, each called by its place: source.document.number."""
    train: list[str] = []
    val: list[str] = []
    for number, (source, part) in enumerate(zip(surveys, planned.parts, strict=True)):
        for document, size in enumerate(source.sizes):
            chars = [f"{number}.{document}.{char}" for char in range(size)]
            n_train, n_taken = part.limits(document)
            train += chars[:n_train]
            val += chars[n_train:n_taken]
    return train, val


SIZES = st.lists(st.integers(1, 50), min_size=1, max_size=8)
GROUPS = st.lists(st.lists(SIZES, min_size=1, max_size=3), min_size=1, max_size=3)


@given(
    groups=GROUPS,
    weights=st.lists(st.floats(0.01, 100), min_size=3, max_size=3),
    val_fraction=st.sampled_from([0, 0.1, 0.5, 0.9]),
    max_chars=st.none() | st.integers(1, 300),
    copied=st.sets(st.integers(0, 30)),
)
@settings(max_examples=300, deadline=None)
def test_a_plan_takes_what_the_weights_allow(
    groups: list[list[list[int]]],
    weights: list[float],
    val_fraction: float,
    max_chars: int | None,
    copied: set[int],
) -> None:
    """To a hundredth; nothing twice, no copy, and something of each source."""
    surveys = [surveyed(*sizes) for group in groups for sizes in group]
    weights = weights[: len(groups)]
    kept: list[list[int]] = []  # sizes by group, a copy's 0
    copies: list[bool] = []
    for group in groups:
        joined = [size for sizes in group for size in sizes]
        flags = [n > 0 and len(copies) + n in copied for n in range(len(joined))]
        kept.append([0 if flag else size for size, flag in zip(joined, flags, strict=True)])
        copies += flags
    planned = plan(
        surveys,
        val_fraction,
        copies=np.array(copies),
        groups=[len(group) for group in groups],
        weights=weights,
        max_chars=max_chars,
    )
    train, val = splits_of(planned, surveys)
    assert len(set(train + val)) == len(train + val) == sum(part.n_chars for part in planned.parts)

    whole = sum(weights)
    room = min(sum(sizes) * whole / w for sizes, w in zip(kept, weights, strict=True))
    room = min(room, max_chars or room)
    parts = iter(planned.parts)
    first = 0
    for group, sizes, weight in zip(groups, kept, weights, strict=True):
        n_chars = sum(next(parts).n_chars for _ in group)
        wanted = max(1, room * weight / whole)
        assert abs(n_chars - wanted) <= 1 + wanted / 100
        its_names = {f"{first + number}" for number in range(len(group))}
        first += len(group)
        its_train = sum(char.split(".")[0] in its_names for char in train)
        assert 1 <= its_train <= n_chars
        wanted = (1 - val_fraction) * n_chars
        whole_ones = len(groups) == 1 and sum(size > 0 for size in sizes) > 1
        slack = max(sizes) if whole_ones else min(wanted, n_chars - wanted) / 100
        assert abs(its_train - wanted) <= 1 + slack


def test_without_a_mix_the_corpus_is_one() -> None:
    surveys = [surveyed(10), surveyed(10, 10), surveyed(10)]
    planned = plan(surveys, 0.25)
    assert splits_of(planned, surveys)[1] == [f"2.0.{char}" for char in range(10)]
    assert (planned.has_documents, planned.is_mix) == (True, False)


def test_in_a_mix_each_source_has_its_own_border() -> None:
    """The second source is used up; of the first a third of its characters go."""
    surveys = [surveyed(60), surveyed(*[5] * 4)]
    planned = plan(surveys, 0.25, groups=[1, 1], weights=[1, 1])
    train, val = splits_of(planned, surveys)
    assert train == [f"0.0.{n}" for n in range(15)] + [
        f"1.{d}.{n}" for d in range(3) for n in range(5)
    ]
    assert val == [f"0.0.{n}" for n in range(15, 20)] + [f"1.3.{n}" for n in range(5)]
    assert (planned.has_documents, planned.is_mix) == (True, True)


# the command -------------------------------------------------------------------------------------

EOT = 50256


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two streams of 1000 and 600 letters, and 40 rows of 25."""
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("aaaa " * 200)
    Path("b.txt").write_text("bbbb " * 120)
    Path("c.jsonl").write_text("".join(f'{{"text": "{"cccc " * 5}"}}\n' for _ in range(40)))
    return tmp_path


def texts_of(store: Store, split: str) -> list[str]:
    """What stands between the separators."""
    text = store.tokenizer().decode(store.tokens(split)[:].tolist())
    return text.removesuffix("<|endoftext|>").split("<|endoftext|>")


def test_a_mix_of_streams(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """b is used up first; each has its border, and a separator where the other text begins."""
    assert main(["prepare", "--mix", "a.txt:1", "b.txt:3", "--out=m.h5", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    with Store.open("m.h5") as store:
        assert texts_of(store, "train") == ["aaaa " * 36, "bbbb " * 108]
        assert texts_of(store, "val") == ["aaaa " * 4, "bbbb " * 12]
        assert store.documents("train").tolist()[0] == 0
        ids = store.tokens("train")[:].tolist()
        assert [i for i, token in enumerate(ids) if token == EOT] == [
            store.documents("train").tolist()[1] - 1,
            len(ids) - 1,
        ]
        recorded = [(s["taken_characters"], s["characters"], s["mix"]) for s in store.sources()]
    assert recorded == [
        (200, 1000, {"source": "a.txt", "weight": 1.0}),
        (600, 600, {"source": "b.txt", "weight": 3.0}),
    ]
    assert [(s["name"], s["share"], s["n_left_out"]) for s in answer["shares"]] == [
        ("a.txt", 0.25, 800),
        ("b.txt", 0.75, 0),
    ]
    assert (answer["n_documents"], answer["n_left_out"]) == (2, 800)


def test_a_mix_of_documents(here: Path) -> None:
    """The weight is of a source, which may be several files; whole documents where it has them."""
    Path("folder").mkdir()
    for name in ("a.txt", "b.txt"):
        Path(name).rename(Path("folder", name))
    assert main(["prepare", "--mix", "c.jsonl:2", "folder:2", "--out=m.h5"]) == 0
    with Store.open("m.h5") as store:
        assert texts_of(store, "train") == ["cccc " * 5] * 36 + ["aaaa " * 180]
        assert texts_of(store, "val") == ["cccc " * 5] * 4 + ["aaaa " * 20]
        assert [s["taken_characters"] for s in store.sources()] == [1000, 1000, 0]


def test_data_show_tells_the_mix(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", "--mix", "c.jsonl:1", "b.txt:1.5", "--out=m.h5"]) == 0
    capsys.readouterr()
    assert main(["data", "show", "m.h5"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["source", "weight", "documents", "taken", "bytes", "SHA-256"] in lines
    assert [line[:6] for line in lines if line[:1] == ["c.jsonl"]] == [
        ["c.jsonl", "c.jsonl:", "1", "40", "16", "1,520"]
    ]


def test_what_is_left_out_is_said(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", "--mix", "a.txt:1", "b.txt:3", "--out=m.h5"]) == 0
    out, err = capsys.readouterr()
    assert [line.split() for line in out.splitlines() if line.startswith("a.txt ")] == [
        ["a.txt", "1", "25.00%", "200", "800"]
    ]
    assert "characters left out to keep the proportions: 800\n" in err


@pytest.mark.parametrize(
    ("args", "taken"),
    [
        (["a.txt", "--max-chars=100"], [100]),
        (["c.jsonl", "a.txt", "--max-chars=0.11k"], [110]),  # a.txt is not even read
        (["c.jsonl", "--max-chars=976"], [975]),  # whole rows
        (["c.jsonl", "b.txt", "--max-chars=1.4k"], [1000, 400]),
        (["--mix", "a.txt:1", "b.txt:3", "--max-chars=400"], [100, 300]),
    ],
)
def test_a_limit_takes_the_beginning(args: list[str], taken: list[int], here: Path) -> None:
    assert main(["prepare", *args, "--out=m.h5"]) == 0
    with Store.open("m.h5") as store:
        assert [s["taken_characters"] for s in store.sources()] == taken


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["a.txt"], "--mix a.txt: has no weight: write a.txt:0.5, say"),
        ([":1"], "--mix :1: has no weight"),
        (["a.txt:0"], "--mix a.txt:0: the weight 0 is no number above 0"),
        (["a.txt:-1"], "the weight -1 is no number above 0"),
        (["a.txt:nan"], "the weight nan is no number above 0"),
        (["a.txt:inf"], "the weight inf is no number above 0"),
        (["a.txt:"], "the weight after the colon is no number above 0"),
        (["a.txt:1", "a.txt:2"], "--mix a.txt:2: a.txt is in it twice"),
        (["a.txt:1", "*.txt:2"], "--mix: *.txt has 1 of the files of an earlier source"),
        (["a.txt:1", "empty.txt:1"], "empty.txt: 0 tokens, no text in it"),
        (["a.txt:1", "none.txt:1"], "none.txt: no such file or folder"),
        (["c.jsonl:1", "copy.jsonl:1", "--dedupe=exact"], "copy.jsonl has copies of earlier"),
    ],
)
def test_a_mix_that_cannot_be_is_refused(
    args: list[str], message: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("empty.txt").touch()
    shutil.copy("c.jsonl", "copy.jsonl")
    assert main(["prepare", "--mix", *args]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not Path("data").exists()


def test_a_name_may_have_colons(here: Path) -> None:
    Path("a.txt").rename("a:0.5:b.txt")
    assert main(["prepare", "--mix", "a:0.5:b.txt:2", "b.txt:1e0", "--out=m.h5"]) == 0
    with Store.open("m.h5") as store:
        assert store.sources()[0]["name"] == "a:0.5:b.txt"
        assert [s["mix"]["weight"] for s in store.sources()] == [2, 1]
