"""Numbers, control characters and small pictures as text. Pure functions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.-=+*#@"

_CONTROLS = {
    code: f"\\x{code:02x}" for code in [*range(0x20), *range(0x7F, 0xA0)] if chr(code) not in "\n\t"
}


def printable(text: str, *, ascii_only: bool = False) -> str:
    """`text` with control characters spelt out, so that it cannot move a terminal's cursor.

    Example: `printable("a\x1b[2J")` is `a\\x1b[2J`, with the escape as four characters. Newlines
    and tabs stay; `\r\n` becomes a newline. With `ascii_only` every other character is spelt out
    too, before a line is laid out, as a stream that cannot take it would do after.
    """
    text = text.replace("\r\n", "\n").translate(_CONTROLS)
    return text.encode("ascii", "backslashreplace").decode() if ascii_only else text


def one_line(text: str, *, ascii_only: bool = False) -> str:
    """`text` on one line: control characters spelt out, line breaks and runs of blanks as one."""
    return " ".join(printable(text, ascii_only=ascii_only).split())


def clock(seconds: float) -> str:
    """`mm:ss`, or `h:mm:ss` from an hour on, or `3d 04h` from two days on."""
    if not math.isfinite(seconds):
        return "--:--"
    whole = round(seconds)
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if days >= 2:
        return f"{days}d {hours % 24:02d}h"
    if hours:
        return f"{hours}:{minutes % 60:02d}:{whole % 60:02d}"
    return f"{minutes:02d}:{whole % 60:02d}"


def size(n_bytes: float) -> str:
    """Bytes in binary units: `512 B`, `1.2 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n_bytes < 1024:
            return f"{n_bytes:.0f} B" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.1f} TiB"


def count(number: float) -> str:
    """A large number in short, three digits or more of it: `950`, `834k`, `1.50M`, `124M`."""
    for factor, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= factor:
            short = number / factor
            return f"{short:.{0 if short >= 100 else 1 if short >= 10 else 2}f}{unit}"
    return f"{number:.0f}"


def milliseconds(ms: float) -> str:
    """Three digits that matter: `0.12 ms`, `11.8 ms`, `1,240 ms`."""
    return f"{ms:.2f} ms" if ms < 10 else f"{ms:.1f} ms" if ms < 100 else f"{ms:,.0f} ms"


def sparkline(values: Sequence[float], width: int, *, ascii_only: bool = False) -> str:
    """`values` in `width` characters, each the mean of its share; the lowest stands lowest.

    A share with a value that is not finite is shown as `!`.
    """
    blocks = ASCII_BLOCKS if ascii_only else BLOCKS
    means = _shares(values, width)
    finite = [mean for mean in means if math.isfinite(mean)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    scale = (len(blocks) - 1) / (high - low) if high > low else 0.0
    return "".join(
        blocks[round((mean - low) * scale)] if math.isfinite(mean) else "!" for mean in means
    )


def _shares(values: Sequence[float], width: int) -> list[float]:
    if len(values) <= width or width == 0:
        return list(values[:width])
    edges = [len(values) * share // width for share in range(width + 1)]
    return [sum(values[begin:end]) / (end - begin) for begin, end in itertools.pairwise(edges)]


def bar(share: float, width: int, *, ascii_only: bool = False) -> tuple[str, str]:
    """The done and the open part of a bar of `width` characters; they differ without colour."""
    done = int(min(max(share, 0.0), 1.0) * width)
    full, empty = ("#", "-") if ascii_only else ("━", "─")
    return full * done, empty * (width - done)
