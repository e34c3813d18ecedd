"""Downloads that survive: retried, resumed after a drop or a kill, checked, complete or absent.

No well-kept library does all of it for any address: pooch begins again after a drop, and
huggingface_hub resumes from its own hub only.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import re
import shutil
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.client import HTTPMessage
from pathlib import Path
from typing import IO

from filelock import FileLock

from gptfast.errors import GptfastError

_TIMEOUT_S = 30.0
_ATTEMPTS = 6
"""In a row that bring nothing."""
_ATTEMPTS_OFFLINE = 3
"""Where not once the name of the server could be looked up: most likely there is no network."""
_WAIT_S = 1.0
"""Before the second attempt; each further wait is twice as long."""
_BLOCK = 1 << 18
TELL_S = 10.0
"""Between two lines on how far it is."""
_HEADERS = {"User-Agent": "gptfast", "Accept-Encoding": "identity"}
_ADVICE = "free space, or set GPTFAST_CACHE to a folder elsewhere"
_FOR_GOOD = (400, 401, 403, 404, 405, 410, 451)
"""HTTP answers that another attempt does not change."""


def fetch(address: str, path: Path, *, sha256: str | None, note: Callable[[str], None]) -> None:
    """Download a file, unless it is there.

    What has come so far lies beside it as `NAME.partial`, and the next call goes on from there,
    whatever ended the last one.

    Args:
        sha256: what the file must have; None: what the server states (`X-Linked-ETag` of the
            Hugging Face hub), and if it states nothing only the length is checked.
        note: told in one line what is fetched, and why it takes longer.

    Raises:
        GptfastError: the address does not answer or has another file; the disk has no room.
    """
    if path.exists():
        return
    with only_one(path):
        if not path.exists():
            partial = Partial(path, note)
            stated = _in_attempts(address, partial, note)
            partial.finish(address, sha256 or stated)


@contextlib.contextmanager
def only_one(path: Path) -> Iterator[None]:
    """One process makes a file of the cache, the others wait.

    Raises:
        GptfastError: its folder cannot be written to.
    """
    lock = FileLock(path.with_name(f"{path.name}.lock"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError as error:
        raise GptfastError(
            f"{path.parent}: cannot be written to ({error.strerror}): {_ADVICE}"
        ) from error
    try:
        yield
    finally:
        lock.release()


def _in_attempts(address: str, partial: Partial, note: Callable[[str], None]) -> str | None:
    in_vain, attempts = 0, _ATTEMPTS_OFFLINE
    while True:
        before = partial.n_bytes
        note(f"fetching {address}" + f" from byte {before:,} on" * (before > 0))
        try:
            return partial.grow(address)
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, urllib.error.HTTPError) and error.code in _FOR_GOOD:
                raise GptfastError(
                    f"{address}: answers {_reason(error)}: the file is not there for you"
                ) from None
            reason = _reason(error)
            if not isinstance(getattr(error, "reason", None), socket.gaierror):
                attempts = _ATTEMPTS
        in_vain = in_vain + 1 if partial.n_bytes <= before else 0
        if in_vain >= attempts:
            kept = f"; {partial.n_bytes:,} bytes are kept" * (partial.n_bytes > 0)
            raise GptfastError(
                f"{address}: cannot be fetched ({reason}){kept}: run the command again to go on"
            )
        wait_s = _WAIT_S * 2**in_vain
        note(f"{address}: {reason}, trying again in {wait_s:.0f} s")
        time.sleep(wait_s)


def size_of(address: str) -> int:
    """How many bytes are at an address.

    Raises:
        GptfastError: it does not answer.
    """
    request = urllib.request.Request(address, method="HEAD", headers=_HEADERS)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            return _length(response.headers)
    except (OSError, http.client.HTTPException) as error:
        raise GptfastError(f"{address}: does not answer ({_reason(error)})") from error


def check_room(folder: Path, n_bytes: int, *, what: str) -> None:
    """
    Raises:
        GptfastError: so much does not fit on the disk of a folder.
    """
    free = shutil.disk_usage(folder).free
    if n_bytes > free:
        raise GptfastError(
            f"{what}: needs {n_bytes:,} bytes more in {folder}, where {free:,} are free: {_ADVICE}"
        )


class Partial:
    """A file on its way, and which version of it that is."""

    def __init__(self, path: Path, note: Callable[[str], None] = lambda line: None) -> None:
        self._path = path
        self._note = note
        self._content = path.with_name(f"{path.name}.partial")
        self._origin = path.with_name(f"{path.name}.partial.json")

    @property
    def n_bytes(self) -> int:
        return self._content.stat().st_size if self._content.exists() else 0

    def grow(self, address: str) -> str | None:
        """Get the rest in one attempt; what the server states as its SHA-256, if it does.

        Raises:
            OSError, http.client.HTTPException: no answer, or the connection dropped.
            GptfastError: the disk has no room.
        """
        redirects = _Redirects()
        opener = urllib.request.build_opener(redirects)
        try:
            response = opener.open(self._request(address), timeout=_TIMEOUT_S)
        except urllib.error.HTTPError as error:
            # Nothing is left to get: the last process was killed before it could finish.
            if error.code == 416 and error.headers["Content-Range"] == f"bytes */{self.n_bytes}":
                return redirects.sha256
            raise
        with response:
            begin = self.n_bytes if response.status == 206 else 0
            total = begin + _length(response.headers)
            check_room(self._path.parent, total - begin, what=self._path.name)
            if begin == 0:
                self._begin(address, response.headers)
            self._append(response, total)
        if self.n_bytes < total:
            raise OSError(f"the connection ended at byte {self.n_bytes:,} of {total:,}")
        return redirects.sha256

    def finish(self, address: str, sha256: str | None) -> None:
        """Give the file its name, if it is the right one.

        Raises:
            GptfastError: it is not, and is deleted.
        """
        digest = hashlib.sha256()
        with self._content.open("rb+") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
            os.fsync(file.fileno())
        if sha256 not in (None, digest.hexdigest()):
            self._content.unlink()
            raise GptfastError(
                f"{address}: what came has SHA-256 {digest.hexdigest()}, not {sha256}, and is "
                "deleted: run the command again; if it stays so, the file there is another one"
            )
        self._content.replace(self._path)
        self._origin.unlink(missing_ok=True)

    def _request(self, address: str) -> urllib.request.Request:
        """For the rest, if the file is still the same; else for all of it."""
        headers = dict(_HEADERS)
        if self.n_bytes:
            origin = json.loads(self._origin.read_text())
            if origin["address"] == address and origin["version"]:
                headers |= {"Range": f"bytes={self.n_bytes}-", "If-Range": origin["version"]}
        return urllib.request.Request(address, headers=headers)

    def _begin(self, address: str, headers: HTTPMessage) -> None:
        self._content.unlink(missing_ok=True)
        # A weak tag promises the same meaning, not the same bytes.
        tag = headers["ETag"] if not (headers["ETag"] or "W/").startswith("W/") else None
        origin = {"address": address, "version": tag or headers["Last-Modified"]}
        self._origin.write_text(json.dumps(origin))

    def _append(self, response: http.client.HTTPResponse, total: int) -> None:
        told = time.monotonic()
        with self._content.open("ab") as file:
            while block := response.read1(_BLOCK):
                if time.monotonic() - told >= TELL_S:
                    told = time.monotonic()
                    self._note(f"{self._path.name}: {file.tell():,} of {total:,} bytes")
                try:
                    file.write(block)
                    file.flush()
                except OSError as error:
                    raise GptfastError(
                        f"{self._content}: cannot be written ({error.strerror}): {_ADVICE}"
                    ) from error


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Notes what the Hugging Face hub states of a file when it points to where it lies."""

    sha256: str | None = None

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        # Of a small file in git itself the tag is another hash, and shorter.
        if stated := re.fullmatch('"([0-9a-f]{64})"', headers["X-Linked-ETag"] or ""):
            self.sha256 = stated[1]
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _length(headers: HTTPMessage) -> int:
    if headers["Content-Length"] is None:
        raise OSError("it does not say how long the file is")
    return int(headers["Content-Length"])


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"{error.code} {error.reason}"
    return str(getattr(error, "reason", error) or type(error).__name__)
