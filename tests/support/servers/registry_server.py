"""A real registry (Debian's docker-registry, 2.8) on loopback, and skopeo to read it; a token service, and a proxy that misbehaves."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from support.servers.free_ports import free_port
from support.servers.local_http import local_http

TOOLS = Path(__file__).parents[3] / ".registry-tools"
_LIBRARIES = ":".join(map(str, sorted((TOOLS / "usr" / "lib").glob("*-linux-gnu")))) if TOOLS.exists() else ""
USER, PASSWORD = "publisher", "a-secret-that-no-log-shows"
_HTPASSWD = f"{USER}:$2a$04$abcdefghijklmnopqrstuu8a0SKUiQRnm8USkx1iYNvc2WhoP9w4i\n"  # of PASSWORD


def _program(name: str) -> str:
    unpacked = TOOLS / "usr" / "bin" / name
    return str(unpacked) if unpacked.exists() else shutil.which(name) or ""


needs_registry = pytest.mark.skipif(
    not _program("docker-registry"),
    reason="docker-registry is missing: tests/shared/publishing/tools/tools.sh brings it",
)
needs_skopeo = pytest.mark.skipif(
    not _program("skopeo"), reason="skopeo is missing: tests/shared/publishing/tools/tools.sh brings it"
)


def skopeo(*words: str | Path) -> str:
    """Run skopeo; return what it prints."""
    environment = {**os.environ, "LD_LIBRARY_PATH": _LIBRARIES} if _LIBRARIES else None
    done = subprocess.run(
        [_program("skopeo"), "--insecure-policy", *map(str, words)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@dataclass
class RegistryServer:
    """A running registry."""

    folder: Path
    port: int

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def blob(self, digest: str) -> Path:
        """Return the file in which the registry keeps a blob."""
        key = digest.removeprefix("sha256:")
        return self.folder / "data" / "docker" / "registry" / "v2" / "blobs" / "sha256" / key[:2] / key / "data"


@contextlib.contextmanager
def registry_server(folder: Path, *, password: bool = False) -> Iterator[RegistryServer]:
    """Run a registry that ends with the context; with ``password``, it takes :data:`USER` and :data:`PASSWORD` alone."""
    folder.mkdir(parents=True, exist_ok=True)
    server = RegistryServer(folder, free_port())
    settings: dict[str, object] = {
        "version": 0.1,
        "log": {"level": "warn"},
        "storage": {"filesystem": {"rootdirectory": str(folder / "data")}, "delete": {"enabled": True}},
        "http": {"addr": server.host},
    }
    if password:
        (folder / "htpasswd").write_text(_HTPASSWD)
        settings["auth"] = {"htpasswd": {"realm": "tests", "path": str(folder / "htpasswd")}}
    (folder / "config.yml").write_text(json.dumps(settings))
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig=KILL", _program("docker-registry"), "serve", str(folder / "config.yml")],
            stdout=log,
            stderr=log,
        )
    try:
        _wait_until_ready(server, process)
        yield server
    finally:
        process.kill()
        process.wait()


def _wait_until_ready(server: RegistryServer, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        connection = HTTPConnection(server.host, timeout=5)
        with contextlib.suppress(OSError), contextlib.closing(connection):
            connection.request("GET", "/v2/")
            connection.getresponse().read()
            return
        time.sleep(0.1)
    raise RuntimeError(f"the registry does not start: {(server.folder / 'log').read_text()[-3000:]}")


Change = Callable[[str, str], "tuple[int, dict[str, str], bytes] | None"]
"""Takes method and path of a request; returns status, headers and content of an answer in place of the registry's, or None."""


@dataclass
class Seen:
    """Requests that passed a proxy: method, path without its query, and the header Authorization; and how many were broken."""

    requests: list[tuple[str, str, str]] = field(default_factory=list)
    broken: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, method: str, part: str) -> int:
        return sum(part in path for one, path, _ in self.requests if one == method)


@contextlib.contextmanager
def registry_proxy(
    upstream: str, *, change: Change = lambda *_: None, break_every: int = 0
) -> Iterator[tuple[str, Seen]]:
    """Run a proxy before a registry; yield its host and what it saw.

    Args:
        upstream: Host of the registry.
        change: Answers some requests itself.
        break_every: Closes the connection in the middle of every such PATCH request, after half of it was passed on; 0 for none.
    """
    seen = Seen()
    patches = [0]

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            with seen.lock:
                path = self.path.partition("?")[0]
                seen.requests.append((self.command, path, self.headers.get("Authorization", "")))
                patches[0] += self.command == "PATCH"
                broken = self.command == "PATCH" and break_every and patches[0] % break_every == 0
                seen.broken += bool(broken)
            length = int(self.headers.get("Content-Length") or 0)
            own = change(self.command, self.path)
            body = self.rfile.read(length // 2 if broken else length)
            if own is not None:
                self._send(*own)
                return
            connection = HTTPConnection(upstream, timeout=60)
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                connection.putheader(name, value)
            connection.endheaders()
            connection.send(body)
            if broken:
                connection.close()
                self.close_connection = True
                self.connection.close()
                return
            found = connection.getresponse()
            self._send(found.status, dict(found.getheaders()), found.read())
            connection.close()

        def _send(self, status: int, headers: dict[str, str], data: bytes) -> None:
            self.send_response(status)
            for name, value in headers.items():
                if name.lower() not in {"transfer-encoding", "content-length", "connection", "date", "server"}:
                    self.send_header(name, value)
            given = {name.lower(): value for name, value in headers.items()}.get("content-length")
            self.send_header("Content-Length", given if self.command == "HEAD" and given else str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        do_GET = do_PUT = do_POST = do_PATCH = do_DELETE = do_HEAD = answer  # noqa: N815 - names of the base class

        def log_message(self, *_: object) -> None:
            pass

    with local_http(Handler, waits=True) as address:
        yield address.removeprefix("http://"), seen
