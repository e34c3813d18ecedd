"""What a person sees, in every kind of terminal, pipe and file."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import runpy
import struct
import subprocess
import sys
import termios
import xml.etree.ElementTree
from pathlib import Path

import pytest
import watch
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from gptfast.console import Console, Look
from gptfast.console.curve import Series, loss_curve
from gptfast.console.progress import Pace, PrepareProgress
from gptfast.console.text import (
    ASCII_BLOCKS,
    BLOCKS,
    bar,
    clock,
    count,
    milliseconds,
    one_line,
    printable,
    size,
    sparkline,
)
from gptfast.report import Logged

ROOT = Path(__file__).parent.parent
WATCH = [sys.executable, str(Path(__file__).parent / "watch.py")]

COLOUR = re.compile(r"\x1b\[[\d;]*m")
CONTROL = re.compile(r"\x1b\[[?\d;]*[A-Za-z]")
LOG_LINE = (
    "step   4/400  loss 4.0941  lr 9.8e-04  grad 0.91  11.8 ms/step  65,084 tok/s  "
    "38% of peak  eta 00:05"
)


def environment(**changes: str) -> dict[str, str]:
    silent = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "PYTHONIOENCODING", "LC_ALL", "TERM")
    kept = {key: text for key, text in os.environ.items() if key not in silent}
    return {**kept, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", **changes}


def on_a_terminal(*args: str, columns: int = 100, **changes: str) -> str:
    """What `watch.py` writes to a terminal of so many columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    attributes = termios.tcgetattr(theirs)
    attributes[1] &= ~termios.OPOST  # newlines as written, so that a CR is the program's own
    termios.tcsetattr(theirs, termios.TCSANOW, attributes)
    with subprocess.Popen(
        [*WATCH, *args], stdin=theirs, stdout=theirs, stderr=theirs, env=environment(**changes)
    ) as process:
        os.close(theirs)
        written = b""
        while True:
            try:
                chunk = os.read(ours, 65536)
            except OSError:  # how Linux says that the other side is closed
                break
            if not chunk:
                break
            written += chunk
    os.close(ours)
    text = written.decode()
    assert process.returncode == 0, text
    return text


def to_a_pipe(*args: str, **changes: str) -> str:
    """What `watch.py` writes where it is no terminal, stdout and stderr together."""
    done = subprocess.run(
        [*WATCH, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment(**changes),
    )
    text = done.stdout.decode(errors="strict")
    assert done.returncode == 0, text
    return text


# terminals, pipes and files --------------------------------------------------------------


def test_a_terminal_gets_a_view_that_is_redrawn_in_colour() -> None:
    shown = on_a_terminal()
    assert COLOUR.search(shown)
    assert "\x1b[1A" in shown  # drawn over
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # the cursor is back
    plain = CONTROL.sub("", shown)
    for words in ("step 400/400", "━", "best", "38% of measured", "65,084 tok/s", "123.0 MiB"):
        assert words in plain
    assert "flash (rounding, sdpa), ema (recipe)" in plain
    assert "compile: no C++ compiler [see docs]: install g++" in plain
    assert "profile quick on Some CPU [tm]" in plain
    assert LOG_LINE not in plain


def test_no_color_keeps_the_view_and_drops_the_colour() -> None:  # CLI-11
    shown = on_a_terminal(NO_COLOR="1")
    assert not COLOUR.search(shown)
    assert "\x1b[1A" in shown
    assert re.search("━+─+", shown)


@pytest.mark.parametrize("where", ["pipe", "dumb terminal"])
def test_elsewhere_there_are_plain_lines_without_control_codes(where: str) -> None:  # CLI-10
    shown = to_a_pipe() if where == "pipe" else on_a_terminal(TERM="dumb")
    assert not set(shown) & {"\x1b", "\r", "\x07", "\b"}
    lines = shown.splitlines()
    assert LOG_LINE in lines
    assert sum(line.startswith("step ") and "ms/step" in line for line in lines) == 100
    assert "step 100/400  validation loss 2.5933 (best)  111,540 tokens in 0.8 s" in lines
    assert "a note [with] brackets" in lines
    assert "plugins: flash (rounding), ema (recipe)" in lines
    assert "skipped: compile: no C++ compiler [see docs]: install g++" in lines
    assert "KING [bold red]HENRY[/]:" in lines
    assert r"Once \x1b[2Jmore\x07, café 数据 👑" in lines
    assert lines[-3:] == [
        "done: 400 steps in 00:24, of that 7.5 s for the first, loss 1.5301, "
        "validation loss 1.6990, best 1.6950",
        "next: gptfast generate 'runs/demo [1]'",
        "      gptfast eval 'runs/demo [1]'",
    ]


def test_plain_lines_can_be_asked_for_on_a_terminal() -> None:
    shown = on_a_terminal("--plain")
    assert LOG_LINE in shown.splitlines()
    assert "\x1b[1A" not in shown


def test_a_line_is_written_when_it_happens() -> None:  # CLI-10
    with subprocess.Popen(
        [*WATCH, "--wait"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment(),
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        seen = [process.stdout.readline().rstrip("\n") for _ in range(13)]
        assert process.poll() is None  # it waits, and its tenth record is here
        assert seen[3] == LOG_LINE
        assert seen[12].startswith("step  40/400")
        process.stdin.write("\n")
        process.stdin.close()
        assert "done: 400 steps" in process.stdout.read()


def test_forced_colour_in_a_file_moves_no_cursor() -> None:  # CLI-11
    shown = to_a_pipe(FORCE_COLOR="1")
    assert COLOUR.search(shown)
    assert not CONTROL.search(COLOUR.sub("", shown))
    assert "\r" not in shown
    assert LOG_LINE in COLOUR.sub("", shown).splitlines()


def test_no_color_wins_over_forced_colour() -> None:
    assert "\x1b" not in to_a_pipe(FORCE_COLOR="1", NO_COLOR="1")


@pytest.mark.parametrize("terminal", [False, True])
def test_an_ascii_stream_gets_ascii(terminal: bool) -> None:
    changes = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    shown = on_a_terminal(**changes) if terminal else to_a_pipe(**changes)
    assert shown.isascii()
    assert r"caf\xe9" in shown
    assert re.search(r"\d\.\d\d \| \*", CONTROL.sub("", shown))  # the curve
    if terminal:
        assert re.search(r"#+-+", CONTROL.sub("", shown))
        assert "+- gptfast: demo -" in CONTROL.sub("", shown)


@pytest.mark.parametrize("columns", [20, 40, 64, 80, 200])
def test_no_drawn_line_is_wider_than_the_terminal(columns: int) -> None:
    shown = CONTROL.sub("", on_a_terminal(columns=columns))
    drawn = [line for line in re.split("[\r\n]", shown) if line[:1] in "╭│╰"]
    assert max(map(cell_len, drawn)) == min(columns, 100)


def test_columns_says_how_wide() -> None:
    shown = CONTROL.sub("", on_a_terminal(COLUMNS="50"))
    drawn = [line for line in re.split("[\r\n]", shown) if line[:1] in "╭│╰"]
    assert max(map(cell_len, drawn)) == 50


# lines, tables, JSON ---------------------------------------------------------------------


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def console(out: io.StringIO, **look: bool | int) -> Console:
    return Console(out, io.StringIO(), Look(**look))


def test_a_path_is_shown_from_where_one_stands(tmp_path: Path) -> None:
    shown = Console(io.StringIO(), io.StringIO(), Look(folder=tmp_path)).path
    assert shown(str(tmp_path / "runs" / "a")) == str(Path("runs", "a"))
    assert shown(str(tmp_path.parent / "b")) == str(tmp_path.parent / "b")


@pytest.mark.parametrize("terminal", [False, True])
@given(text=st.text(st.characters(exclude_categories=("Cc", "Cs", "Zl", "Zp")), max_size=200))
def test_a_line_is_shown_as_it_is(terminal: bool, text: str) -> None:
    out = Terminal() if terminal else io.StringIO()
    console(out, no_color=True, width=20).line(text)
    assert out.getvalue() == text + "\n"


@given(st.text())
def test_printable_text_holds_no_control_character(text: str) -> None:
    shown = printable(text)
    assert not any((ord(c) < 32 and c not in "\n\t") or 0x7F <= ord(c) < 0xA0 for c in shown)
    assert len(one_line(text).splitlines()) <= 1


def test_generated_text_reaches_a_file_unchanged_and_a_terminal_unarmed() -> None:
    text = "a👩b\r\n[red]\x1b[2J"
    file, terminal = io.StringIO(newline=""), Terminal(newline="")
    console(file).stream(text)
    console(terminal).stream(text)
    assert file.getvalue() == text
    assert terminal.getvalue() == "a👩b\n[red]\\x1b[2J"


def test_a_table_in_a_file_is_aligned_and_never_cut() -> None:
    out = io.StringIO()
    long = "x" * 300
    console(out, width=20).table("ladder", ["rung", "ms"], [["[amp]", 9.5], [long, None]])
    assert out.getvalue().splitlines() == [
        "ladder",
        f"{'rung':300}   ms",
        f"{'[amp]':300}  9.5",
        f"{long}    -",
    ]


def test_a_table_on_a_terminal_folds_into_its_width() -> None:
    out = Terminal()
    console(out, width=30).table("t", ["key", "value"], [["[model]", "w" * 60], ["b", "z"]])
    shown = COLOUR.sub("", out.getvalue())
    assert max(map(len, shown.splitlines())) <= 30
    assert shown.count("w") == 60
    assert "[model]" in shown


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=20,
    )
)
def test_json_is_always_json(value: object) -> None:
    def refuse(word: str) -> float:
        raise AssertionError(word)

    out = io.StringIO()
    console(out).json(value)
    json.loads(out.getvalue(), parse_constant=refuse)


# drawing costs ---------------------------------------------------------------------------


@pytest.mark.parametrize("cost", [0.0001, 0.004, 0.05])
def test_drawing_takes_at_most_a_hundredth_of_the_time(cost: float) -> None:
    time, drawn = 0.0, 0
    pace = Pace(0.25, now=lambda: time)
    for _ in range(200_000):
        time += 0.001
        if pace.due():
            with pace.drawing():
                time += cost
            drawn += 1
    assert (drawn - 1) * cost <= 0.01 * time  # the first is drawn at once
    assert drawn <= time / 0.25 + 1
    assert drawn >= 0.9 * time / max(0.25, 100 * cost)


@given(st.lists(st.floats(0, 10), min_size=1, max_size=300), st.sampled_from([2, 8, 64]))
def test_a_series_is_bounded_ends_at_the_newest_and_keeps_the_mean(
    losses: list[float], capacity: int
) -> None:
    series = Series(capacity)
    for step, loss in enumerate(losses, 1):
        series.add(step, loss)
        assert len(series.points) <= capacity
    steps = [step for step, _ in series.points]
    assert steps == sorted(set(steps))
    assert steps[-1] == len(losses)
    spans = [end - begin for begin, end in zip([0, *steps], steps, strict=False)]
    total = sum(span * loss for span, (_, loss) in zip(spans, series.points, strict=True))
    assert total == pytest.approx(sum(losses), abs=1e-6)


# small pictures --------------------------------------------------------------------------


@pytest.mark.parametrize(("ascii_only", "blocks"), [(False, BLOCKS), (True, ASCII_BLOCKS)])
def test_a_sparkline_rises_with_its_values(ascii_only: bool, blocks: str) -> None:
    assert sparkline(range(8), 8, ascii_only=ascii_only) == blocks
    assert sparkline(range(800), 8, ascii_only=ascii_only) == blocks
    assert sparkline([1.0, float("nan"), 0.0], 8, ascii_only=ascii_only)[1] == "!"
    assert sparkline([2.0, 2.0], 8, ascii_only=ascii_only) == blocks[0] * 2
    assert sparkline([], 8, ascii_only=ascii_only) == ""
    assert sparkline([1.0], 0, ascii_only=ascii_only) == ""


@pytest.mark.parametrize("ascii_only", [False, True])
def test_the_curve_falls_where_the_loss_falls(ascii_only: bool) -> None:
    train = [(step, 4.0 - step / 100) for step in range(1, 301)]
    val = [(100, 3.2), (300, float("nan"))]
    drawn = loss_curve(train, val, width=60, height=10, ascii_only=ascii_only).plain
    rows = [line.partition("|" if ascii_only else "│")[2] for line in drawn.splitlines()[:10]]
    first_column = [re.search(r"[*\u2800-\u28ff]", row) for row in rows]
    places = [match.start() for match in first_column if match]
    assert len(places) == 10
    assert places == sorted(places)
    assert sum(row.count("o" if ascii_only else "●") for row in rows) == 1
    assert max(map(len, drawn.splitlines())) <= 60
    assert "3.99" in drawn
    assert "1.00" in drawn
    assert not loss_curve(train[:1], [], width=60)


def test_the_picture_of_the_live_view_is_the_same_each_time_and_loads_nothing() -> None:
    live_view_svg = runpy.run_path(str(ROOT / "docs" / "live_view.py"))["live_view_svg"]
    records = list(watch.records())
    svg = live_view_svg(watch.INFO, records[:60], seconds=14.7, saved=200)
    assert svg == live_view_svg(watch.INFO, records[:60], seconds=14.7, saved=200)
    root = xml.etree.ElementTree.fromstring(svg)
    shown = "".join(root.itertext()).replace("\xa0", " ")
    last = [record for record in records[:60] if isinstance(record, Logged)][-1]
    for words in (f"step {last.step}/400", f"{last.loss:.4f}", "00:15", "65,084 tok/s", "flash"):
        assert words in shown
    assert "@font-face" not in svg
    assert "url(http" not in svg


# prepare ---------------------------------------------------------------------------------


def test_prepare_says_how_far_it_is_every_few_seconds() -> None:
    time = 0.0
    out = io.StringIO()
    view = PrepareProgress(console(out)._out, None, 20 << 20, now=lambda: time)
    for mib in range(1, 21):
        time += 1.0
        view(mib << 20, None, mib * 300_000)
    assert out.getvalue().splitlines() == [
        "prepare  25%  5.0 MiB/20.0 MiB  1.50M tokens  300k tok/s  eta 00:15",
        "prepare  50%  10.0 MiB/20.0 MiB  3.00M tokens  300k tok/s  eta 00:10",
        "prepare  75%  15.0 MiB/20.0 MiB  4.50M tokens  300k tok/s  eta 00:05",
        "prepare 100%  20.0 MiB/20.0 MiB  6.00M tokens  300k tok/s  eta 00:00",
    ]


@pytest.mark.parametrize("total", [100, None])
@pytest.mark.parametrize("width", [20, 80])
def test_prepare_has_a_bar_on_a_terminal_that_goes_away(total: int | None, width: int) -> None:
    err = Terminal()
    both = Console(io.StringIO(), err, Look(width=width))
    with both.prepare_progress(total) as update:
        update(50, total, 10)
        both.warn("a [word] meanwhile")
    shown = CONTROL.sub("", err.getvalue())
    assert "gptfast: warning: a [word] meanwhile\n" in shown
    assert ("━" in shown) == (total is not None and width == 80)
    assert err.getvalue().rindex("\x1b[2K") > err.getvalue().rindex("prepare")


@pytest.mark.parametrize(
    ("shown", "wanted"),
    [
        (clock(0), "00:00"),
        (clock(59.6), "01:00"),
        (clock(3661), "1:01:01"),
        (clock(86400 * 3 + 3600 * 4), "3d 04h"),
        (clock(float("nan")), "--:--"),
        (size(512), "512 B"),
        (size(1536), "1.5 KiB"),
        (size(3 << 40), "3.0 TiB"),
        (count(950), "950"),
        (count(124_439_808), "124M"),
        (count(1_557_611_200), "1.56B"),
        (milliseconds(0.1234), "0.12 ms"),
        (milliseconds(11.84), "11.8 ms"),
        (milliseconds(1240), "1,240 ms"),
        (bar(0.5, 4), ("━━", "──")),
        (bar(2.0, 4, ascii_only=True), ("####", "")),
    ],
)
def test_numbers_are_short_and_carry_their_unit(shown: object, wanted: object) -> None:
    assert shown == wanted
