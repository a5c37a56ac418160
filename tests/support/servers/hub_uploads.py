"""A hub on loopback with the part of the Hugging Face hub's API by which a model repository is written, without Xet."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote, urlsplit

from support.servers.local_http import local_http

TOKEN = "hf_a-token-that-may-write"
LARGE_BYTES = 1000
"""Files of this size are sent by Git LFS; the real hub decides by names, and from 10 MB."""
FIRST = {".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"}
NAME = r"([^/]+/[^/]+)"


@dataclass
class UploadedRepository:
    """A repository: its branches, and the files of each commit."""

    private: bool
    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, branch: str, files: dict[str, bytes], message: str) -> str:
        text = json.dumps([message, len(self.commits), sorted(files)]).encode()
        name = hashlib.sha1(text, usedforsecurity=False).hexdigest()
        self.commits[name], self.branches[branch] = files, name
        self.messages.append(message)
        return name

    def files(self, branch: str = "main") -> dict[str, bytes]:
        return self.commits[self.branches[branch]]


@dataclass
class HubUploads:
    """The hub.

    Attributes:
        repositories: Its repositories by name.
        blobs: Content of large files by SHA-256, also of those that no commit has yet.
        owners: Whom the token may write for: the user, then organizations.
        role: Role of the token.
        chunk: Size of the parts that large files are sent in; 0 for one piece.
        answers: Status by a pattern of the path, in place of an answer, and how many times.
        before: Called with the path of each request.
        seen: Method and path of every request.
    """

    repositories: dict[str, UploadedRepository] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    owners: tuple[str, ...] = ("me", "org")
    role: str = "write"
    chunk: int = 0
    answers: dict[str, tuple[int, int]] = field(default_factory=dict)
    before: Callable[[str], None] = lambda _: None
    seen: list[tuple[str, str]] = field(default_factory=list)
    parts: dict[str, dict[int, bytes]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def make(self, name: str, *, private: bool = True, files: dict[str, bytes] | None = None) -> UploadedRepository:
        """Make a repository with a first commit."""
        made = self.repositories[name] = UploadedRepository(private)
        made.commit("main", {**FIRST, **(files or {})}, "initial commit")
        return made

    def sent(self) -> list[str]:
        """Return the paths by which content was sent."""
        return [path for method, path in self.seen if method == "PUT" or "/commit/" in path]

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
    hub: HubUploads

    def do_GET(self) -> None:
        self.route("GET")

    def do_POST(self) -> None:
        self.route("POST")

    def do_PUT(self) -> None:
        self.route("PUT")

    def route(self, method: str) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self.body()
        with self.hub.lock:
            self.hub.seen.append((method, path))
        self.hub.before(path)
        for pattern, (status, times) in list(self.hub.answers.items()):
            if re.search(pattern, path) and times:
                self.hub.answers[pattern] = (status, times - 1)
                self.send(status, {"error": "as the test wants"})
                return
        if not path.startswith("/blob/") and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.send(401, {"error": "Invalid credentials"})
            return
        for verb, pattern, answer in ROUTES:
            found = re.fullmatch(pattern, path)
            if found and verb == method:
                answer(self, body, *found.groups())
                return
        self.send(404, {"error": f"no such page: {method} {path}"})

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def whoami(self, _: bytes) -> None:
        name, *orgs = self.hub.owners
        auth = {"accessToken": {"displayName": "test", "role": self.hub.role}}
        self.send(200, {"type": "user", "name": name, "orgs": [{"name": each} for each in orgs], "auth": auth})

    def create(self, body: bytes) -> None:
        asked = json.loads(body)
        name = f"{asked['organization'] or self.hub.owners[0]}/{asked['name']}"
        if name in self.hub.repositories:
            self.send(409, {"error": "exists"})
            return
        private = asked["visibility"] == "private" if "visibility" in asked else asked["private"]
        self.hub.make(name, private=private)
        self.send(200, {"url": f"{self.hub.endpoint}/{name}", "name": name})

    def branch(self, _: bytes, name: str, branch: str) -> None:
        repository = self.hub.repositories[name]
        repository.branches[branch] = repository.branches["main"]
        self.send(200, {})

    def info(self, _: bytes, name: str, revision: str | None = None) -> None:
        repository = self.hub.repositories.get(name)
        commit = self.commit_of(name, revision or "main")
        if repository is None or not commit:
            self.send(404, {}, {"X-Error-Code": "RevisionNotFound" if repository else "RepoNotFound"})
            return
        self.send(200, {"id": name, "modelId": name, "sha": commit, "private": repository.private, "siblings": []})

    def commit_of(self, name: str, revision: str) -> str:
        repository = self.hub.repositories.get(name)
        if repository is None:
            return ""
        return repository.branches.get(revision) or (revision if revision in repository.commits else "")

    def tree(self, _: bytes, name: str, revision: str) -> None:
        files = self.hub.repositories[name].commits[self.commit_of(name, revision)]
        entries: list[dict[str, Any]] = [{"type": "directory", "path": "onnx-int4", "oid": "0" * 40, "size": 0}]
        for path, data in sorted(files.items()):
            blob = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
            entry: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": blob}
            if len(data) >= LARGE_BYTES:
                sha = hashlib.sha256(data).hexdigest()
                entry |= {"oid": "1" * 40, "lfs": {"oid": sha, "size": len(data), "pointerSize": 134}}
            entries.append(entry)
        self.send(200, entries)

    def preupload(self, body: bytes, name: str, _branch: str) -> None:
        files = [
            {
                "path": each["path"],
                "uploadMode": "lfs" if each["size"] >= LARGE_BYTES else "regular",
                "shouldIgnore": False,
                "oid": None,
            }
            for each in json.loads(body)["files"]
        ]
        assert name in self.hub.repositories
        self.send(200, {"files": files})

    def batch(self, body: bytes, _name: str) -> None:
        asked = json.loads(body)
        assert "xet" not in asked["transfers"]
        objects = []
        for each in asked["objects"]:
            entry = {"oid": each["oid"], "size": each["size"]}
            if each["oid"] not in self.hub.blobs:
                href, header = f"{self.hub.endpoint}/blob/{each['oid']}", {}
                if self.hub.chunk:
                    count = -(-each["size"] // self.hub.chunk)
                    header = {str(part): f"{href}/{part}" for part in range(1, count + 1)}
                    header["chunk_size"] = str(self.hub.chunk)
                entry["actions"] = {"upload": {"href": href, "header": header}}
            objects.append(entry)
        self.send(200, {"transfer": "basic", "objects": objects})

    def put(self, body: bytes, sha: str) -> None:
        assert hashlib.sha256(body).hexdigest() == sha
        self.hub.blobs[sha] = body
        self.send(200, {})

    def put_part(self, body: bytes, sha: str, part: str) -> None:
        self.hub.parts.setdefault(sha, {})[int(part)] = body
        self.send(200, {}, {"ETag": f'"{part}"'})

    def complete(self, body: bytes, sha: str) -> None:
        parts = self.hub.parts.pop(sha)
        assert [each["partNumber"] for each in json.loads(body)["parts"]] == sorted(parts)
        self.put(b"".join(parts[part] for part in sorted(parts)), sha)

    def validate(self, _: bytes) -> None:
        self.send(200, {"warnings": [], "errors": []})

    def commit(self, body: bytes, name: str, branch: str) -> None:
        header, *operations = map(json.loads, body.splitlines())
        with self.hub.lock:
            repository = self.hub.repositories[name]
            if header["value"].get("parentCommit") != repository.branches[branch]:
                self.send(412, {"error": "A commit has happened since. Please refresh and try again."})
                return
            files = dict(repository.files(branch))
            for operation in operations:
                value = operation["value"]
                match operation["key"]:
                    case "file":
                        files[value["path"]] = base64.b64decode(value["content"])
                    case "lfsFile":
                        files[value["path"]] = self.hub.blobs[value["oid"]]
                    case "deletedFile":
                        del files[value["path"]]
                    case other:
                        raise AssertionError(other)
            made = repository.commit(branch, files, header["value"]["summary"])
        self.send(200, {"commitUrl": f"{self.hub.endpoint}/{name}/commit/{made}", "commitOid": made, "success": True})

    def content(self, _: bytes, name: str, revision: str, path: str) -> None:
        self.send(200, self.hub.repositories[name].commits[self.commit_of(name, revision)][path])

    def send(self, status: int, document: Any, headers: dict[str, str] | None = None) -> None:
        data = document if isinstance(document, bytes) else json.dumps(document).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


ROUTES: tuple[tuple[str, str, Callable[..., None]], ...] = (
    ("GET", "/api/whoami-v2", _Handler.whoami),
    ("POST", "/api/repos/create", _Handler.create),
    ("POST", "/api/validate-yaml", _Handler.validate),
    ("GET", f"/api/models/{NAME}", _Handler.info),
    ("GET", f"/api/models/{NAME}/revision/(.+)", _Handler.info),
    ("GET", f"/api/models/{NAME}/tree/(.+)", _Handler.tree),
    ("POST", f"/api/models/{NAME}/branch/(.+)", _Handler.branch),
    ("POST", f"/api/models/{NAME}/preupload/(.+)", _Handler.preupload),
    ("POST", f"/api/models/{NAME}/commit/(.+)", _Handler.commit),
    ("POST", rf"/{NAME}\.git/info/lfs/objects/batch", _Handler.batch),
    ("PUT", "/blob/([0-9a-f]{64})", _Handler.put),
    ("PUT", r"/blob/([0-9a-f]{64})/(\d+)", _Handler.put_part),
    ("POST", "/blob/([0-9a-f]{64})", _Handler.complete),
    ("GET", f"/{NAME}/resolve/([^/]+)/(.+)", _Handler.content),
)
