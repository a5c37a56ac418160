"""A hub on loopback with the part of the Hugging Face hub's API that is needed to read a repository."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from contextlib import ExitStack
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from support.servers.local_http import local_http

LARGE_BYTES = 16 << 10
_INFO = re.compile(r"/api/models/([^/]+/[^/?]+)(?:/revision/([^/?]+))?(?:\?.*)?")
_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/([^?]+)")


@dataclass
class HubServer:
    """Repositories by name and commit; large files are in LFS, whose digests the hub reports.

    Attributes:
        repositories: Folder by repository and commit.
        branches: Commit by repository and branch.
        token: Token required for every request, unless empty.
        seen: Path and range of each request.
        cut: Bytes after which each response with content breaks off once; 0 never.
        status: Status of every response, unless it is 200.
        flip: Send wrong content of large files after their headers.
        flows: Whether the content of files is sent now; a request for it waits.
    """

    repositories: dict[tuple[str, str], Path] = field(default_factory=dict)
    branches: dict[tuple[str, str], str] = field(default_factory=dict)
    token: str = ""
    seen: list[tuple[str, str]] = field(default_factory=list)
    cut: int = 0
    status: int = 200
    flip: bool = False
    flows: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        """Let content flow."""
        self.flows.set()

    def push(self, name: str, folder: Path, *, branch: str = "main") -> str:
        """Commit a folder as the head of a branch."""
        content = b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())
        commit = hashlib.sha1(content, usedforsecurity=False).hexdigest()
        self.repositories[name, commit] = folder
        self.branches[name, branch] = commit
        return commit

    def downloads(self) -> list[str]:
        """Return the names of the files of which more than a header was read."""
        whole = [path for path, span in self.seen if "/resolve/" in path and not span.startswith("bytes=0-")]
        return [path.rpartition("/")[2] for path in whole]

    def __enter__(self) -> Self:
        self._stack = ExitStack()
        handler = type("Handler", (_Handler,), {"hub": self})
        self.endpoint = self._stack.enter_context(local_http(handler, waits=False))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer

    def do_GET(self) -> None:
        span = self.headers.get("Range", "")
        self.hub.seen.append((self.path, span))
        if self.hub.status != 200:
            self.send(self.hub.status, b"")
        elif self.hub.token and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            self.send(401, b"", {"X-Error-Code": "GatedRepo"})
        elif info := _INFO.fullmatch(self.path):
            self.info(info[1], info[2] or "main")
        elif file := _FILE.fullmatch(self.path):
            self.content(file[1], file[2], file[3], span)
        else:
            self.send(404, b"")

    def info(self, name: str, revision: str) -> None:
        commit = self.hub.branches.get((name, revision), revision)
        folder = self.hub.repositories.get((name, commit))
        if folder is None:
            self.send(404, b"", {"X-Error-Code": "RepoNotFound"})
            return
        siblings = [sibling(folder, path) for path in sorted(folder.rglob("*")) if path.is_file()]
        document = {"id": name, "modelId": name, "sha": commit, "siblings": siblings}
        self.send(200, json.dumps(document).encode(), {"Content-Type": "application/json"})

    def content(self, name: str, commit: str, path: str, span: str) -> None:
        if not span.startswith("bytes=0-"):
            self.hub.flows.wait(300)
        data = (self.hub.repositories[name, commit] / path).read_bytes()
        if self.hub.flip and len(data) > LARGE_BYTES and not span.startswith("bytes=0-"):
            data = bytes(byte ^ 1 for byte in data)
        status = 200
        if found := re.fullmatch(r"bytes=(\d+)-(\d+)", span):
            data, status = data[int(found[1]) : int(found[2]) + 1], 206
        cut = self.hub.cut if self.hub.cut and len(data) > self.hub.cut else 0
        self.send(status, data, cut=cut)

    def send(self, status: int, data: bytes, headers: dict[str, str] | None = None, *, cut: int = 0) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[:cut] if cut else data)
        self.close_connection = bool(cut)

    def log_message(self, *_: object) -> None:
        pass


def sibling(folder: Path, path: Path) -> dict[str, Any]:
    """Return a file's entry as the hub lists it."""
    data = path.read_bytes()
    found: dict[str, Any] = {
        "rfilename": path.relative_to(folder).as_posix(),
        "size": len(data),
        "blobId": hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest(),
    }
    if len(data) > LARGE_BYTES:
        found["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    return found
