"""Downloads: dropped, killed, wrong, too large, and whole in the end."""

from __future__ import annotations

import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from data_helpers import only
from flaky_site import Site, flaky_site

from gptfast.data.prepare import fetch as fetch_module
from gptfast.data.prepare.fetch import fetch, size_of
from gptfast.errors import GptfastError

CONTENT = random.Random(7).randbytes(300_000)


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(fetch_module, "_WAIT_S", 0.001)
    with flaky_site() as site:
        site.files["file"] = CONTENT
        yield site


def fetched(site: Site, folder: Path, *, sha256: str | None = None) -> tuple[bytes, list[str]]:
    notes: list[str] = []
    path = folder / "kept" / "file"
    fetch(f"{site.address}/file", path, sha256=sha256, note=notes.append)
    assert only(path.parent, "file", "file.lock")
    return path.read_bytes(), notes


def test_a_file_is_fetched_once(site: Site, tmp_path: Path) -> None:
    content, notes = fetched(site, tmp_path)
    assert content == CONTENT
    assert notes == [f"fetching {site.address}/file"]
    assert fetched(site, tmp_path) == (CONTENT, [])
    assert site.asked == [""]
    assert size_of(f"{site.address}/file") == 300_000


def test_a_dropped_download_goes_on(site: Site, tmp_path: Path) -> None:
    """At the byte where it stopped; drops that bring something may go on without end."""
    site.troubles = [10_000, 503, 10_000, *[20_000] * 8, 429]
    content, notes = fetched(site, tmp_path)
    assert content == CONTENT
    assert site.asked[:4] == ["", *["bytes=10000-"] * 2, "bytes=20000-"]
    assert site.asked[-1] == "bytes=180000-"
    assert "the connection ended at byte 10,000 of 300,000, trying again in" in notes[1]
    assert "503 Service Unavailable" in notes[3]


def test_how_far_it_is_is_told(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_module, "TELL_S", 0)
    _, notes = fetched(site, tmp_path)
    told = [re.fullmatch(r"file: ([\d,]+) of 300,000 bytes", line) for line in notes[1:]]
    places = [int(found[1].replace(",", "")) for found in told]
    assert places[0] == 0
    assert places == sorted(places)
    assert places[-1] < 300_000


def test_who_never_answers_is_given_up(site: Site, tmp_path: Path) -> None:
    site.troubles = [5_000, *[500] * 50]
    with pytest.raises(GptfastError) as error:
        fetched(site, tmp_path)
    assert str(error.value) == (
        f"{site.address}/file: cannot be fetched (500 Internal Server Error); 5,000 bytes are "
        "kept: run the command again to go on"
    )
    assert len(site.asked) == 1 + fetch_module._ATTEMPTS
    site.troubles = []
    assert fetched(site, tmp_path)[0] == CONTENT
    assert site.asked[-1] == "bytes=5000-"


def test_a_missing_file_is_not_asked_for_again(site: Site, tmp_path: Path) -> None:
    site.files.clear()
    with pytest.raises(GptfastError, match=r"file: answers 404 Not Found: the file is not there"):
        fetched(site, tmp_path)
    assert only(tmp_path / "kept", "file.lock")
    with pytest.raises(GptfastError, match=r"file: does not answer \(404 Not Found\)"):
        size_of(f"{site.address}/file")


def test_a_file_that_changes_meanwhile_is_begun_again(site: Site, tmp_path: Path) -> None:
    site.troubles = [5_000, *[500] * 50]
    with pytest.raises(GptfastError):
        fetched(site, tmp_path)
    site.troubles = []
    site.files["file"] = b"new" * 10_000
    assert fetched(site, tmp_path)[0] == b"new" * 10_000


@pytest.mark.parametrize("stated", [False, True])
def test_a_wrong_hash_is_said_and_the_file_deleted(
    stated: bool, site: Site, tmp_path: Path
) -> None:
    """Whoever knows the hash: the table, or the server, which states it."""
    wrong = "0" * 64
    site.states_hash, site.hash_stated = stated, wrong
    with pytest.raises(GptfastError, match=f"has SHA-256 [0-9a-f]+, not {wrong}, and is deleted"):
        fetched(site, tmp_path, sha256=None if stated else wrong)
    assert not (tmp_path / "kept" / "file").exists()
    assert not (tmp_path / "kept" / "file.partial").exists()
    site.hash_stated = None
    assert fetched(site, tmp_path)[0] == CONTENT


def test_what_does_not_fit_is_refused_before_a_byte_comes(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = SimpleNamespace(free=299_999)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(
        GptfastError, match=r"file: needs 300,000 bytes more in .* 299,999 are free"
    ):
        fetched(site, tmp_path)
    assert only(tmp_path / "kept", "file.lock")


def test_a_full_disk_keeps_what_has_come(site: Site, tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from gptfast.data.prepare.fetch import fetch\n"
        "from gptfast.errors import GptfastError\n"
        "try: fetch(sys.argv[1], Path(sys.argv[2]), sha256=None, note=print)\n"
        "except GptfastError as error: sys.exit(str(error))\n"
    )
    path = tmp_path / "file"
    command = f'ulimit -f 100; trap "" XFSZ; "{sys.executable}" -c "$0" "$1" "$2"'
    ran = subprocess.run(
        ["bash", "-c", command, script, f"{site.address}/file", path],
        capture_output=True,
        text=True,
    )
    assert f"{path}.partial: cannot be written (File too large): free space" in ran.stderr
    assert (tmp_path / "file.partial").stat().st_size == 100 * 1024
    fetch(f"{site.address}/file", path, sha256=None, note=print)
    assert path.read_bytes() == CONTENT
    assert site.asked[-1] == "bytes=102400-"


@pytest.mark.parametrize("whole", [False, True])
def test_a_killed_download_goes_on(whole: bool, site: Site, tmp_path: Path) -> None:
    """Also one that was killed between its last byte and its name."""
    path = tmp_path / "file"
    script = (
        "import sys, time, os; from pathlib import Path; from gptfast.data.prepare import fetch\n"
        "fetch.Partial.finish = lambda *a: time.sleep(60)\n"
        "fetch.fetch(sys.argv[1], Path(sys.argv[2]), sha256=None, note=print)\n"
    )
    site.slow = None if whole else threading.Event()
    expected = 300_000 if whole else 100_000
    process = subprocess.Popen([sys.executable, "-c", script, f"{site.address}/file", path])
    partial = tmp_path / "file.partial"
    deadline = time.monotonic() + 30
    while not partial.exists() or partial.stat().st_size < expected:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    if site.slow:
        site.slow.set()
    fetch(f"{site.address}/file", path, sha256=None, note=print)
    assert path.read_bytes() == CONTENT
    assert site.asked == ["", f"bytes={expected}-"]


def test_an_unreachable_address_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_module, "_WAIT_S", 0)
    with pytest.raises(GptfastError, match=r"^http://127.0.0.1:9/x: cannot be fetched \(.*refused"):
        fetch("http://127.0.0.1:9/x", tmp_path / "x", sha256=None, note=[].append)


@pytest.mark.parametrize("once_known", [False, True])
def test_a_name_that_is_never_known_is_given_up_sooner(
    once_known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a network, and not where it drops out for a while."""
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    asked: list[str] = []

    def look_up(host: str, *rest: object, **more: object) -> list[object]:
        asked.append(host)
        if once_known and len(asked) == 2:
            raise TimeoutError("timed out")
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with pytest.raises(GptfastError, match=r"^http://nowhere/x: cannot be fetched \(.*not known\)"):
        fetch("http://nowhere/x", tmp_path / "x", sha256=None, note=[].append)
    assert len(asked) == (fetch_module._ATTEMPTS if once_known else fetch_module._ATTEMPTS_OFFLINE)
    assert (sum(waits) <= 10) != once_known


def test_a_cache_that_cannot_be_written_to_is_one_line(site: Site, tmp_path: Path) -> None:
    (tmp_path / "kept").touch()
    with pytest.raises(GptfastError, match=r"kept: cannot be written to \(File exists\)"):
        fetched(site, tmp_path)
    assert site.asked == []


def test_what_is_there_needs_no_writing(tmp_path: Path) -> None:
    """As in a cache that many share."""
    path = tmp_path / "file"
    path.touch()
    fetch("http://127.0.0.1:9/file", path, sha256=None, note=print)
    assert only(tmp_path, "file")


def test_two_processes_fetch_a_file_once(site: Site, tmp_path: Path) -> None:
    results: list[Any] = []
    threads = [
        threading.Thread(target=lambda: results.append(fetched(site, tmp_path))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [content == CONTENT for content, _ in results] == [True, True]
    assert site.asked == [""]
