"""A web server for tests of downloads: it knows ranges, drops connections, answers errors."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

Handler = http.server.BaseHTTPRequestHandler


@dataclass
class Site:
    """What is served, what goes wrong, and what was asked for."""

    address: str
    files: dict[str, bytes] = field(default_factory=dict)
    troubles: list[int] = field(default_factory=list)
    """For each coming request: below 1000 the error that is answered, else after how many bytes
    the connection drops."""
    states_hash: bool = False
    """Whether it points elsewhere and states the hash, as the Hugging Face hub does."""
    hash_stated: str | None = None
    """Another than the right one."""
    slow: threading.Event | None = None
    """After the first 100,000 bytes of an answer it is waited for."""
    asked: list[str] = field(default_factory=list)
    """`Range` of each request for content, "" where there was none."""


@contextlib.contextmanager
def flaky_site() -> Iterator[Site]:
    site = Site("")

    class Answers(Handler):
        def do_HEAD(self) -> None:
            self._answer(with_content=False)

        def do_GET(self) -> None:
            self._answer(with_content=True)

        def log_message(self, *args: Any) -> None:
            pass

        def _answer(self, *, with_content: bool) -> None:
            name = self.path.rpartition("/")[2]
            content = site.files.get(name)
            if content is None:
                self.send_error(404)
                return
            sha256 = hashlib.sha256(content).hexdigest()
            if site.states_hash and not self.path.startswith("/elsewhere/"):
                self.send_response(302)
                self.send_header("Location", f"/elsewhere/{name}")
                self.send_header("X-Linked-ETag", f'"{site.hash_stated or sha256}"')
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            trouble = site.troubles.pop(0) if with_content and site.troubles else None
            if with_content:
                site.asked.append(self.headers["Range"] or "")
            if trouble is not None and trouble < 1000:
                self.send_error(trouble)
                return
            self._send(content, f'"{sha256[:16]}"', trouble, with_content=with_content)

        def _send(
            self, content: bytes, tag: str, trouble: int | None, *, with_content: bool
        ) -> None:
            begin = 0
            if self.headers["Range"] and self.headers["If-Range"] == tag:
                begin = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-"))
                if begin >= len(content):
                    self.send_response(416)
                    self.send_header("Content-Range", f"bytes */{len(content)}")
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {begin}-/{len(content)}")
            else:
                self.send_response(200)
            self.send_header("ETag", tag)
            self.send_header("Content-Length", str(len(content) - begin))
            self.end_headers()
            if with_content:
                rest = content[begin:] if trouble is None else content[begin : begin + trouble]
                with contextlib.suppress(ConnectionError):
                    self.wfile.write(rest[:100_000])
                    if site.slow is not None:
                        site.slow.wait(30)
                    self.wfile.write(rest[100_000:])

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        site.address = f"http://127.0.0.1:{server.server_port}/folder"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield site
        if site.slow is not None:
            site.slow.set()
        server.shutdown()
