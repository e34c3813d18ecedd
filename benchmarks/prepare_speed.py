"""How fast `gptfast prepare` is on real text, and how much memory it takes.

The text is this machine's own: documentation, sources and package metadata, each file once, in an
order that is the same every time. Each encoder prepares it in a process of its own; rounds are
interleaved, A B A B, so that drift of the machine cancels. The time is that of the whole command,
from its start to the data file under its name.

    python benchmarks/prepare_speed.py
    python benchmarks/prepare_speed.py --mb 100 --rounds 5 --tokenizer gpt2
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ROOTS = (sys.prefix, sys.base_prefix, "/usr/share", "/usr/lib", "/usr/include", "/usr/local")
LARGEST = 4_000_000
"""Bytes of a file that is taken: beyond, it is mostly data."""


@dataclass(frozen=True)
class Ran:
    """One command."""

    seconds: float
    cpu_seconds: float
    """Of all cores, which other programs on the machine disturb less."""
    peak_mb: float
    """Of resident memory; the command is one process."""
    n_tokens: int
    fingerprint: str


def files() -> list[Path]:
    """All below the roots, well mixed, in an order that depends on their names alone."""
    found = {
        os.path.join(folder, name)  # noqa: PTH118  # a million paths
        for root in ROOTS
        for folder, _, names in os.walk(root)
        for name in names
    }
    return [
        Path(name) for name in sorted(found, key=lambda n: hashlib.sha256(os.fsencode(n)).digest())
    ]


def text_of(path: Path) -> bytes | None:
    """What is in a file, if it is UTF-8 text without control characters."""
    try:
        if path.is_symlink() or not 0 < path.stat().st_size <= LARGEST:
            return None
        content = path.read_bytes()
        if content.startswith(b"\x1f\x8b"):
            content = gzip.decompress(content)
        text = content.decode()
    except (OSError, EOFError, UnicodeDecodeError):
        return None
    return None if any(c < " " and c not in "\t\n\r\f" for c in set(text)) else content


def collect(target: Path, n_bytes: int) -> tuple[int, int]:
    """Fill `target` with texts; how many bytes and files it got."""
    seen: set[bytes] = set()
    written = 0
    with target.open("wb") as file:
        for path in files():
            content = text_of(path)
            if content is None or (digest := hashlib.sha256(content).digest()) in seen:
                continue
            seen.add(digest)
            written += file.write(content[: n_bytes - written].decode(errors="ignore").encode())
            if written >= n_bytes - 3:
                break
    return written, len(seen)


def run(corpus: Path, *, tokenizer: str, encoder: str, workers: int) -> Ran:
    out = corpus.with_name("corpus.h5")
    args = ["--out", str(out), "--tokenizer", tokenizer, "--encoder", encoder, "--json"]
    begin = time.perf_counter()
    running = subprocess.Popen(
        [sys.executable, "-m", "gptfast", "prepare", str(corpus), *args, f"--workers={workers}"],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    assert running.stdout is not None
    said = running.stdout.read()
    _, status, usage = os.wait4(running.pid, 0)
    seconds = time.perf_counter() - begin
    if status:
        raise SystemExit(f"gptfast prepare failed with {encoder}, see above")
    answer = json.loads(said)
    out.unlink()
    # Linux counts in KiB, macOS in bytes.
    peak_mb = usage.ru_maxrss / (1e6 if sys.platform == "darwin" else 1e6 / 1024)
    n_tokens = answer["train"]["n_tokens"] + answer["val"]["n_tokens"]
    return Ran(seconds, usage.ru_utime + usage.ru_stime, peak_mb, n_tokens, answer["fingerprint"])


def machine() -> str:
    model = platform.processor()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), model)
    return f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, default=1000, help="of text, in millions of bytes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokenizer", default="gpt2")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--folder", type=Path, help="where there is room for text and data file")
    asked = parser.parse_args()
    encoders = ["tiktoken", *(["gigatoken"] if find_spec("gigatoken") else [])]

    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        corpus = Path(folder, "corpus.txt")
        n_bytes, n_files = collect(corpus, asked.mb * 1_000_000)
        print(f"{n_bytes / 1e6:,.0f} MB of text from {n_files:,} files; {machine()}")
        ran: dict[str, list[Ran]] = {encoder: [] for encoder in encoders}
        for _ in range(asked.rounds):
            for encoder in encoders:
                made = run(
                    corpus, tokenizer=asked.tokenizer, encoder=encoder, workers=asked.workers
                )
                ran[encoder].append(made)
        fingerprints = {made.fingerprint for rounds in ran.values() for made in rounds}
        assert len(fingerprints) == 1, "every encoder and every round gives the same ids"
        for encoder, rounds in ran.items():
            seconds = [made.seconds for made in rounds]
            median = statistics.median(seconds)
            print(
                f"{encoder:10} {n_bytes / 1e6 / median:7.1f} MB/s  {median:7.1f} s (median of "
                f"{len(seconds)}, {min(seconds):.1f} to {max(seconds):.1f})  "
                f"{statistics.median(made.cpu_seconds for made in rounds):7.1f} s of processors  "
                f"{max(made.peak_mb for made in rounds):5.0f} MB of memory  "
                f"{rounds[0].n_tokens:,} tokens"
            )


if __name__ == "__main__":
    main()
