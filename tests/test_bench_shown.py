"""What is shown of a bench: tables, bars, pictures, comparisons."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench_helpers import (
    CONDITIONS,
    DOUBLING,
    FACTS,
    HALF,
    HUNGRY,
    PROTOCOL,
    SAME,
    FakeMachine,
    Same,
    climb,
    leave_out,
    quarter_second,
)
from matplotlib import rc_context
from matplotlib.figure import Figure
from plugin_helpers import enabled

from gptfast.bench.measure.conditions import Gpu
from gptfast.bench.measure.messages import Operator
from gptfast.bench.overhead import measure_overhead
from gptfast.bench.result.compare import compare
from gptfast.bench.result.pictures import PHASES, bars, pictures, stacked_bars
from gptfast.bench.result.published import published
from gptfast.bench.result.record import Bench, Ratio, read
from gptfast.bench.result.table import (
    breakdown_remarks,
    breakdown_table,
    comparison_remarks,
    comparison_table,
    left_out,
    operators_table,
    overhead_lines,
    published_sources,
    published_table,
    remarks,
    table,
)
from gptfast.cli import main
from gptfast.console import Console, Look
from gptfast.console.ladder import Bar, _draw, in_terminal
from gptfast.contract.tiny import tiny_profile
from gptfast.errors import Refused

# tables ----------------------------------------------------------------------------------


def test_a_narrow_terminal_gets_fewer_columns() -> None:
    machine = FakeMachine(fails={"hungry": ("build", "no memory")})
    result = climb(machine, DOUBLING, HUNGRY, SAME)
    everything, rows = table(result, width=None)
    assert len(everything) == 12
    assert rows[2] == ["+ hungry", *[None] * 10, "cannot run"]
    for width in (60, 80, 100, 140):
        columns, rows = table(result, width=width)
        assert columns[:2] == ["rung", "ms/step"]
        stream = io.StringIO()
        stream.isatty = lambda: True  # a terminal to the console
        Console(stream, stream, Look(no_color=True, width=width)).table("", columns, rows)
        shown = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue()).splitlines()
        assert max(map(len, shown)) <= width
        # Nothing had to be folded: head, rule and a line for each rung.
        assert len([line for line in shown if line.strip()]) == 2 + len(result.rungs)
        assert {*columns, *left_out(result, width=width)} == set(everything)
    assert len(table(result, width=60)[0]) < len(everything)
    assert left_out(result, width=None) == []


def test_a_table_of_one_left_out_says_what_it_is_compared_with() -> None:
    result = leave_out(FakeMachine(), DOUBLING, SAME)
    columns, rows = table(result, width=None)
    assert "x full" in columns
    assert "x before" not in columns
    assert rows[2][columns.index("x full")] == "0.50 [0.50, 0.50]"
    assert any("x full below 1" in line for line in remarks(result))


def divided(tmp_path: Path) -> Bench:
    return climb(
        FakeMachine(fails={"hungry": ("build", "no memory")}),
        *(DOUBLING, HUNGRY, SAME),
        trace=lambda name: tmp_path / f"{name}.json.gz",
    )


def test_where_the_time_goes_adds_up_to_a_step(tmp_path: Path) -> None:
    titles, rows = breakdown_table(divided(tmp_path))
    assert titles == ["ms in", "data", "forward", "backward", "optimizer", "rest", "step"]
    assert [row[0] for row in rows] == ["baseline", "+ doubling", "+ same"]
    *parts, step = (float(cell or "") for cell in rows[0][1:])
    assert sum(parts) == pytest.approx(step)
    _, operators = operators_table(divided(tmp_path).rungs[0])
    assert operators == [["aten::mm", "100.000", "37.3%", "24.0"]]
    (first, *_) = divided(tmp_path).rungs
    assert first.breakdown is not None
    kernel = Operator(f"void gemm<{'float, ' * 40}>", 1.0, 1.0)
    _, ((name, *_),) = operators_table(
        replace(first, breakdown=replace(first.breakdown, operators=[kernel]))
    )
    assert name == f"{kernel.name[:57]}..."


def ladder_of(*names: str) -> Bench:
    plugins = [enabled(name, type("P", (Same,), {})) for name in names]
    return climb(FakeMachine(), DOUBLING, *plugins)


def test_published_ratios_stand_beside_the_measured_ones_as_theirs() -> None:
    a100 = published().ladders[0]
    classic = [plugin for rung in a100.rungs for plugin in rung.plugins]
    result = ladder_of(*classic)
    found = published_table(result)
    assert found is not None
    titles, rows = found
    assert titles == ["x baseline", "here", "theirs: A100", "theirs: RTX 5070"]
    assert [row[0] for row in rows] == [f"+ {name}" for name in classic]
    assert [row[1] for row in rows] == ["2.00"] * 6
    assert [row[2] for row in rows] == ["3.00", "3.33", "7.69", "10.42", "10.75", "11.11"]
    assert [row[3] for row in rows] == [None, None, None, None, "3.12", None]
    sources = list(published_sources(result))
    assert len(sources) == 2
    assert all("not measured here" in source for source in sources)
    assert "250 -> 80 ms with tf32, amp, compile, flash, vocab-pad." in sources[1]


def test_a_ladder_that_nobody_published_has_nothing_beside_it() -> None:
    # Theirs had three others on before flash attention, whose gain is in its ratio.
    for result in (ladder_of("mine"), ladder_of("flash")):
        assert published_table(result) is None
        assert list(published_sources(result)) == []
    first = published_table(ladder_of("tf32", "flash"))
    assert first == (["x baseline", "here", "theirs: A100"], [["+ tf32", "2.00", "3.00"]])


# bars and pictures -----------------------------------------------------------------------


@pytest.mark.parametrize("ascii_only", [True, False])
def test_a_bar_is_as_long_as_a_step(tmp_path: Path, ascii_only: bool) -> None:
    lines = [
        line.plain for line in in_terminal(bars(divided(tmp_path)), width=80, ascii_only=ascii_only)
    ]
    mark = "#" if ascii_only else "━"
    lengths = [line.count(mark) for line in lines]
    assert lengths[0] == 2 * lengths[1] > 20
    assert lengths[2] == 0
    assert lines[2].endswith("cannot run here")
    assert lines[1].endswith("125.0 ms, 2.00x")
    assert max(map(len, lines)) <= 80
    assert all(line.isascii() for line in lines) is ascii_only


def test_a_bar_says_what_is_uncertain_and_what_is_no_gain() -> None:
    result = climb(
        FakeMachine(step_s=lambda on, tick: 0.25 / (2 if "half" in on else 1)), SAME, HALF
    )
    assert [bar.said for bar in bars(result)] == [
        *("250.0 ms", "250.0 ms, ~1.00x", "125.0 ms, 2.00x, claim broken")
    ]


def test_a_backward_pass_within_the_forward_pass_is_said(tmp_path: Path) -> None:
    result = divided(tmp_path)
    assert list(breakdown_remarks(result)) == []
    assert "forward" not in next(bar.said for bar in stacked_bars(result))
    first, *others = result.rungs
    assert first.breakdown is not None
    joint = replace(first.breakdown.phases, backward_in_forward=True)
    first = replace(first, breakdown=replace(first.breakdown, phases=joint))
    result = replace(result, rungs=[first, *others])
    (line,) = breakdown_remarks(result)
    assert line.startswith("baseline: ")
    assert next(bar.said for bar in stacked_bars(result)) == "268.0 ms, backward in forward"


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [(0.9, 1.02, "kept"), (0.9, 1.03, "not certain"), (1.021, 1.03, "broken")],
)
def test_what_the_machinery_costs_is_kept_only_where_the_interval_says_so(
    low: float, high: float, said: str
) -> None:
    machine = FakeMachine()
    found = measure_overhead(
        tiny_profile({}),
        facts=FACTS,
        protocol=PROTOCOL,
        start=machine.start,
        tell=lambda line: None,
        look=lambda: CONDITIONS,
    )
    lines = list(overhead_lines(replace(found, slower=Ratio(1.0, low, high, significant=False))))
    assert f"2% allowed: {said}" in lines[2]


def test_pictures_hold_every_rung_and_every_part(tmp_path: Path) -> None:
    drawn = dict(pictures(divided(tmp_path)))
    assert sorted(drawn) == ["breakdown.png", "breakdown.svg", "ladder.png", "ladder.svg"]
    for name, content in drawn.items():
        assert content.startswith(b"\x89PNG" if name.endswith("png") else b"<?xml")
    ladder, breakdown = (drawn[f"{name}.svg"].decode() for name in ("ladder", "breakdown"))
    for text in ("baseline", "+ doubling", "+ hungry", "+ same", "250.0 ms", "cannot run here"):
        assert text in ladder
    for text in ("data", "forward", "backward", "optimizer", "rest", "+ same"):
        assert text in breakdown
    assert "+ hungry" not in breakdown
    assert drawn == dict(pictures(divided(tmp_path)))
    assert sorted(dict(pictures(ladder_of("mine")))) == ["ladder.png", "ladder.svg"]
    assert [len(one.phases or ()) for one in stacked_bars(divided(tmp_path))] == [5] * 3


def test_the_legend_covers_nothing_that_is_said_of_a_bar(tmp_path: Path) -> None:
    figure = Figure(figsize=(8, 4), layout="constrained")
    _draw(figure, stacked_bars(divided(tmp_path)), title="a bench", phases=PHASES)
    figure.draw_without_rendering()
    legend = figure.legends[0].get_window_extent()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(PHASES)
    (axes,) = figure.axes
    assert len(axes.texts) == 3
    assert not any(legend.overlaps(text.get_window_extent()) for text in axes.texts)


def test_what_is_said_of_a_bar_stays_in_the_picture(tmp_path: Path) -> None:
    said = ["12.1 ms", "1,250.0 ms, backward in forward", "2,250.0 ms, ~1.00x, claim broken"]
    for phases in (None, PHASES):
        figure = Figure(figsize=(12, 4), layout="constrained")
        ms = [12.1, 2250.0, 2250.0]
        drawn = [
            Bar(f"+ {text[:3]}", t, text, [t / 5] * 5) for t, text in zip(ms, said, strict=True)
        ]
        with rc_context({"font.size": 14}):
            _draw(figure, drawn, title="a bench", phases=phases)
            figure.draw_without_rendering()
        (axes,) = figure.axes
        right = axes.get_window_extent().x1
        assert max(text.get_window_extent().x1 for text in axes.texts) < right


# two results -----------------------------------------------------------------------------


def keep(path: Path, result: Bench) -> Path:
    path.mkdir()
    (path / "bench.json").write_text(result.to_json())
    return path


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    gpu = Gpu("560", 1695.0, None, 41.0, None, 3.0)
    result = climb(
        FakeMachine(fails={"hungry": ("build", "no")}),
        *(DOUBLING, HUNGRY, HALF),
        look=lambda: replace(CONDITIONS, gpu=gpu),
        trace=lambda name: tmp_path / "trace",
    )
    folder = keep(tmp_path / "kept", result)
    assert read(folder) == read(folder / "bench.json") == result


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read"),
        ("{", "no JSON"),
        ("[]", "format None"),
        ('{"format": 1}', "format 1, and this gptfast reads 2"),
        ('{"format": 2}', "kind: Field required"),
        ('{"format": NaN}', "no JSON .NaN is no number"),
    ],
)
def test_what_is_no_result_is_refused(
    tmp_path: Path, content: str | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(Refused, match=said):
        read(path)
    assert main(["bench", "compare", str(path), str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(path) in line


DAMAGES: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda it: it["rungs"].clear(), "its baseline did not run"),
    (lambda it: it["rungs"][0].update(ran=False), "its baseline did not run"),
    (lambda it: it["rungs"][1].update(step_ms=None), "ran and has no times above 0"),
    (lambda it: it["rungs"][1].update(round_step_ms=None), "ran and has no times above 0"),
    (lambda it: it["rungs"][1].update(round_step_ms=[]), "ran and has no times above 0"),
    (lambda it: it["rungs"][1].update(round_step_ms=[1.0, 0.0]), "ran and has no times above 0"),
    (lambda it: it["baseline_again"].update(first_step_ms=0.0), "baseline_again has no times"),
    (lambda it: it["profile"].pop("train"), "its profile has no train"),
    (lambda it: it["profile"].pop("name"), "its profile has no name"),
]


@pytest.mark.parametrize(("damage", "said"), DAMAGES)
def test_a_damaged_result_is_refused(
    damage: Callable[[dict[str, Any]], object], said: str, tmp_path: Path
) -> None:
    path = keep(tmp_path / "a", climb(FakeMachine(), DOUBLING)) / "bench.json"
    document = json.loads(path.read_text())
    read(path)
    damage(document)
    path.write_text(json.dumps(document))
    with pytest.raises(Refused, match=said):
        read(path)


def twice_as_fast(plugins: list[str], tick: int) -> float:
    return quarter_second(plugins, tick) / 2


def test_a_faster_machine_is_told_from_a_plugin_that_brings_more() -> None:
    here = climb(FakeMachine(), DOUBLING, SAME)
    there = climb(
        FakeMachine(step_s=twice_as_fast),
        DOUBLING,
        SAME,
        facts=replace(FACTS, name="B", peak_flops=1e15),
    )
    found = compare(here, there)
    assert ("machine", "a fake", "B") in found.differences
    assert found.warnings == []
    for pair in found.pairs:
        assert pair.b_over_a is not None
        assert pair.b_over_a.times == pytest.approx(2.0)
        assert pair.b_over_a.significant
        assert not pair.b_over_a.paired
    assert found.pairs[0].gain_over_gain is None
    for pair in found.pairs[1:]:
        assert pair.gain_over_gain is not None
        assert pair.gain_over_gain.times == pytest.approx(1.0)
        assert not pair.gain_over_gain.significant


def test_rungs_of_one_side_are_rows_without_a_ratio() -> None:
    a = climb(FakeMachine(), DOUBLING, SAME)
    b = climb(FakeMachine(fails={"same": ("build", "no")}), SAME, HALF)
    found = compare(a, b)
    assert [pair.name for pair in found.pairs] == ["baseline", "+ doubling", "+ same", "+ half"]
    assert [pair.b_over_a is not None for pair in found.pairs] == [True, False, False, False]
    assert ("plugins.half", "off", "{}") in found.differences
    _, rows = comparison_table(found)
    assert rows[2] == ["+ same", "125.00", "cannot run", None, None]
    assert rows[3] == ["+ half", None, "250.00", None, None]
    said = list(comparison_remarks(found))
    assert said[-3:] == [
        "+ same cannot run in B: no",
        *("not measured in A: + half", "not measured in B: + doubling"),
    ]
    twice = compare(b, b)
    assert "+ same cannot run in A and B: no" in comparison_remarks(twice)
    assert not any("not measured in" in line for line in comparison_remarks(twice))


def test_rungs_of_one_name_with_other_plugins_below_are_said() -> None:
    """As on two machines of which one does not run them all."""
    a = climb(FakeMachine(fails={"doubling": ("build", "no")}), DOUBLING, SAME)
    b = climb(FakeMachine(), DOUBLING, SAME)
    (line,) = compare(a, b).warnings
    assert line.startswith("+ same have not the same plugins on in both (nothing only in A; ")
    assert "doubling only in B" in line
    assert compare(b, b).warnings == []


def test_a_difference_within_the_drift_of_the_baselines_is_none() -> None:
    """Two benches on one machine that slows by 6 % within each."""

    def slowing(plugins: list[str], tick: int) -> float:
        return quarter_second(plugins, tick) * (1 + 0.002 * tick)

    def a_bit_faster(plugins: list[str], tick: int) -> float:
        return slowing(plugins, tick) / 1.03

    found = compare(
        climb(FakeMachine(step_s=slowing), SAME), climb(FakeMachine(step_s=a_bit_faster), SAME)
    )
    assert found.drift > 0.03
    assert all(pair.b_over_a and not pair.b_over_a.significant for pair in found.pairs)
    steady = compare(
        climb(FakeMachine(), SAME),
        climb(FakeMachine(step_s=lambda on, tick: quarter_second(on, tick) / 1.03), SAME),
    )
    assert all(pair.b_over_a and pair.b_over_a.significant for pair in steady.pairs)


def test_other_work_in_a_step_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = climb(FakeMachine(), SAME)
    b = replace(a, profile={**a.profile, "train": {**a.profile["train"], "batch_size": 8}})
    folders = [str(keep(tmp_path / name, result)) for name, result in (("a", a), ("b", b))]
    assert main(["bench", "compare", *folders]) == 0
    shown = capsys.readouterr()
    assert "train.batch_size" in shown.out
    assert "B is x as fast" in shown.out
    assert "not the same work" in shown.err
    assert main(["bench", "compare", *folders, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["differences"] == [["train.batch_size", "4", "8"]]
    assert found["pairs"][1]["b_over_a"]["significant"] is False
    assert len(found["warnings"]) == 1
    assert PROTOCOL.rounds == len(a.rungs[0].round_step_ms or ())
