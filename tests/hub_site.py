"""A stand-in for the Hugging Face hub, with what `datasets` asks of it to stream a data set."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

COMMIT = "c" * 40


@dataclass
class Hub:
    """One data set, me/mine, whose branch v2 is at COMMIT."""

    address: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    """Paths of all requests."""


@contextlib.contextmanager
def hub_site() -> Iterator[Hub]:
    hub = Hub()

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.split("?")[0]
            hub.asked.append(path)
            api, content = "/api/datasets/me/mine", "/datasets/me/mine/resolve/"
            if path.startswith(f"{api}/tree/"):
                folder = path.removeprefix(f"{api}/tree/").partition("/")[2]
                self._send(200, _listed(folder))
            elif path in (api, f"{api}/revision/v2", f"{api}/revision/{COMMIT}"):
                siblings = [{"rfilename": name} for name in hub.files]
                self._send(200, {"id": "me/mine", "sha": COMMIT, "siblings": siblings})
            elif path.startswith(content):
                self._send_file(path.removeprefix(content).partition("/")[2])
            else:
                revision = path.startswith(f"{api}/revision/")
                code = "RevisionNotFound" if revision else "RepoNotFound"
                self._send(404, {}, {"X-Error-Code": code})

        def log_message(self, *args: Any) -> None:
            pass

        def _send_file(self, name: str) -> None:
            if name not in hub.files:
                self._send(404, {}, {"X-Error-Code": "EntryNotFound"})
                return
            content = hub.files[name]
            headers = {
                "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
                "X-Repo-Commit": COMMIT,
                "Accept-Ranges": "bytes",
            }
            if self.headers["Range"] is None:
                self._send(200, content, headers)
                return
            begin, _, end = self.headers["Range"].removeprefix("bytes=").partition("-")
            part = content[int(begin) : int(end or len(content)) + 1]
            last = int(begin) + len(part) - 1
            headers["Content-Range"] = f"bytes {begin}-{last}/{len(content)}"
            self._send(206, part, headers)

        def _send(self, code: int, body: Any, headers: dict[str, str] | None = None) -> None:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(code)
            for key, value in (headers or {}).items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

    def _listed(folder: str) -> list[dict[str, Any]]:
        """What lies in a folder of the data set."""
        prefix = f"{folder}/" if folder else ""
        inside = [name.removeprefix(prefix) for name in hub.files if name.startswith(prefix)]
        folders = dict.fromkeys(name.partition("/")[0] for name in inside if "/" in name)
        entries = [{"type": "directory", "path": f"{prefix}{name}"} for name in folders]
        entries += [
            {"type": "file", "path": f"{prefix}{name}", "size": len(hub.files[f"{prefix}{name}"])}
            for name in inside
            if "/" not in name
        ]
        return [{**entry, "oid": "e" * 40} for entry in entries]

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        hub.address = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield hub
        server.shutdown()
