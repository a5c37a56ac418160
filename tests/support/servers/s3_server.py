"""A real S3 server (SeaweedFS) on loopback, and a proxy in front of it that misbehaves on purpose."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from minio import Minio
from pydantic import SecretStr

from slipway.settings.s3 import S3Options
from support.commands.child_processes import owned
from support.servers.free_ports import free_ports

WEED = Path(sys.executable).with_name("weed")
ACCESS_KEY, SECRET_KEY = "SLIPWAYTESTS", "a-secret-that-no-log-shows"
READER_KEY, READER_SECRET = "SLIPWAYREADER", "another-secret-that-no-log-shows"
BUCKET = "slipway"


@dataclass
class S3Server:
    """A server with its data in a folder; it can be stopped and restarted on the same ports."""

    folder: Path
    ports: list[int] = field(default_factory=list)
    _process: subprocess.Popen[bytes] | None = None
    _starts: int = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.ports[0]}"

    def options(self, *, access_key: str = ACCESS_KEY, secret_key: str = SECRET_KEY, endpoint: str = "") -> S3Options:
        return S3Options(
            endpoint=endpoint or self.endpoint, access_key=SecretStr(access_key), secret_key=SecretStr(secret_key)
        )

    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_CA_BUNDLE": "",
        }

    def client(self) -> Minio:
        return Minio(self.endpoint.removeprefix("http://"), ACCESS_KEY, SECRET_KEY, secure=False, region="us-east-1")

    def start(self) -> None:
        """Start the server and wait until the bucket accepts objects."""
        self.ports = self.ports or free_ports(8)
        (self.folder / "data").mkdir(parents=True, exist_ok=True)
        config = self.folder / "s3.json"
        config.write_text(json.dumps({"identities": [
            _identity("tests", ACCESS_KEY, SECRET_KEY, ["Admin", "Read", "Write", "List", "Tagging"]),
            _identity("reader", READER_KEY, READER_SECRET, [f"Read:{BUCKET}", f"List:{BUCKET}"]),
        ]}))  # fmt: skip
        names = ("s3.port", "s3.port.grpc", "master.port", "master.port.grpc", "volume.port", "volume.port.grpc",
                 "filer.port", "filer.port.grpc")  # fmt: skip
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig=KILL",  # no server outlives tests that were killed
                 WEED, "-logtostderr", "server", f"-dir={self.folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
                 "-filer", "-s3", f"-s3.config={config}", "-s3.port.iceberg=0", "-s3.port.lance=0",
                 "-master.telemetry=false", "-master.electionTimeout=1s",
                 "-master.volumeSizeLimitMB=1024", "-volume.max=100", "-volume.preStopSeconds=0",
                 *(f"-{name}={port}" for name, port in zip(names, self.ports, strict=True))],
                stdout=log, stderr=log,
            )  # fmt: skip
        self._starts += 1
        if self._starts > 1:
            owned.add(self._process.pid)
        self._wait_until_ready()

    def stop(self) -> None:
        """End the server's process at once, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            owned.discard(self._process.pid)
            self._process = None

    def _wait_until_ready(self) -> None:
        """Wait until an object can be written; the port answers earlier than that."""
        client, deadline = self.client(), time.monotonic() + 120
        client._http.connection_pool_kw["retries"] = False
        while time.monotonic() < deadline:
            if self._process is None or self._process.poll() is not None:
                break
            with contextlib.suppress(Exception):
                if not client.bucket_exists(BUCKET):
                    client.make_bucket(BUCKET)
                client.put_object(BUCKET, "ready", (self.folder / "s3.json").open("rb"), 1)
                return
            time.sleep(0.1)
        raise RuntimeError(f"the S3 server does not start: {(self.folder / 'server.log').read_text()[-3000:]}")


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """Run a server that ends with the context."""
    server = S3Server(folder)
    try:
        server.start()
        yield server
    finally:
        server.stop()


class _Counted(BaseHTTPRequestHandler):
    """Keeps a list of open connections."""

    connections: set[socket.socket]

    def setup(self) -> None:
        super().setup()
        self.connections.add(self.connection)

    def finish(self) -> None:
        self.connections.discard(self.connection)
        super().finish()


class FaultyProxy:
    """An HTTP proxy that passes requests on, but refuses some and cuts some answers short, chosen by a seed.

    Args:
        endpoint: Target of the requests.
        refuse: Share of refused calls.
        status: Status of refused calls.
        truncate: Share of responses that break off in the middle.
        shorten: Number of responses, from the first, that contain only half of their content and a matching length.
        seed: Seed of the choices.

    Attributes:
        mute_until: Until then, by the monotonic clock, answers break off before the first byte of their content.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        refuse: float = 0.0,
        status: int = 503,
        truncate: float = 0.0,
        shorten: int = 0,
        seed: int = 0,
    ) -> None:
        chance, lock = random.Random(seed), threading.Lock()
        upstream = endpoint.removeprefix("http://")
        self.refused = self.truncated = self.passed = 0
        self.shorten, self.mute_until = shorten, 0.0
        self._connections: set[socket.socket] = set()
        proxy = self

        class Handler(_Counted):
            protocol_version = "HTTP/1.1"
            connections = self._connections

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                with lock:
                    refused, cut = chance.random() < refuse, chance.random() < truncate
                    proxy.refused += refused
                if refused:
                    self.send_response(status)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                connection = HTTPConnection(upstream, timeout=30)
                connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                for name, value in self.headers.items():
                    connection.putheader(name, value)
                connection.endheaders(body)
                found = connection.getresponse()
                data = found.read()
                with lock:
                    if proxy.shorten and self.command == "GET" and data:
                        proxy.shorten -= 1
                        data = data[: len(data) // 2]
                self.send_response(found.status)
                for name, value in found.getheaders():
                    if name.lower() not in {"transfer-encoding", "content-length", "connection", "date", "server"}:
                        self.send_header(name, value)
                length = found.getheader("Content-Length") if self.command == "HEAD" else str(len(data))
                self.send_header("Content-Length", length or "0")
                self.end_headers()
                connection.close()
                mute = time.monotonic() < proxy.mute_until
                cut = (cut or mute) and self.command == "GET" and len(data) > 1000
                with lock:
                    proxy.truncated += cut
                    proxy.passed += not cut
                if cut:
                    self.wfile.write(b"" if mute else data[: len(data) // 2])
                    self.close_connection = True
                    return
                self.wfile.write(data)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer  # noqa: N815 - names of the base class

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> FaultyProxy:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        for connection in list(self._connections):  # clients keep them open, and each has a thread here
            with contextlib.suppress(OSError):  # it has just ended
                connection.shutdown(socket.SHUT_RDWR)
        self._server.server_close()


def _identity(name: str, access_key: str, secret_key: str, actions: list[str]) -> dict[str, object]:
    return {"name": name, "credentials": [{"accessKey": access_key, "secretKey": secret_key}], "actions": actions}
