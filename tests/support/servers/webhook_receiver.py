"""A receiver of webhooks on loopback, which records what it is sent and responds as asked for."""

from __future__ import annotations

import base64
import json
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml
from standardwebhooks import Webhook

from support.coordinators.harness import wait_for

SECRET = "whsec_" + base64.b64encode(b"0123456789abcdef0123456789abcdef").decode()


@dataclass(frozen=True)
class Received:
    """One request."""

    path: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def id(self) -> str:
        return self.headers["Webhook-Id"]

    @property
    def event(self) -> dict[str, Any]:
        """The event, read without any check."""
        return json.loads(self.body)

    @property
    def type(self) -> str:
        return self.event["type"].removeprefix("dev.slipway.export.")

    def verified(self, secret: str = SECRET) -> dict[str, Any]:
        """The event, if its signature is right."""
        return Webhook(secret).verify(self.body, dict(self.headers))


Respond = Callable[[Received, BaseHTTPRequestHandler], int | None]
"""Returns the status of a response; None if it has sent one itself."""


@dataclass
class WebhookReceiver:
    """What a receiver was sent; change its attributes at any time.

    Attributes:
        port: Its port.
        requests: All requests, in the order in which they came.
        taken: Those that it responded to with 2xx.
        statuses: Statuses of the next responses; 204 once there are none.
        respond: Responds instead.
        ended: Set when the receiver ends, for responses that wait.
    """

    port: int = 0
    secure: bool = False
    requests: list[Received] = field(default_factory=list)
    taken: list[Received] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    respond: Respond | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def url(self) -> str:
        """Its address."""
        return f"{'https' if self.secure else 'http'}://localhost:{self.port}/hook"

    def types(self, export: str = "") -> list[str]:
        """The types of the events it took, of one export if it is named."""
        return [one.type for one in list(self.taken) if one.event["subject"].endswith(export)]

    def wait_for(self, *types: str, export: str = "") -> None:
        """Wait until it has taken these events, and check that there are no others."""
        try:
            wait_for(lambda: len(self.types(export)) >= len(types))
        finally:
            assert self.types(export) == list(types)

    def entry(self, name: str = "portal", **settings: Any) -> dict[str, Any]:
        """Its entry in a webhooks file."""
        return {"name": name, "url": self.url, "secret_file": "secret", **settings}


def webhooks_file(folder: Path, *entries: Mapping[str, Any], secret: str = SECRET, **more: Any) -> Path:
    """Write a webhooks file and a secret beside it."""
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "secret").write_text(secret + "\n")
    path = folder / "webhooks.yaml"
    path.write_text(yaml.safe_dump({"receivers": list(entries), **more}))
    return path


@contextmanager
def webhook_receiver(
    receiver: WebhookReceiver | None = None, *, tls: ssl.SSLContext | None = None
) -> Iterator[WebhookReceiver]:
    """Run a receiver within a block; one that ran before begins again on its port."""
    receiver = receiver or WebhookReceiver()
    receiver.ended.clear()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            headers = {name.title(): value for name, value in self.headers.items()}
            request = Received(self.path, headers, body)
            receiver.requests.append(request)
            if receiver.respond is not None:
                status = receiver.respond(request, self)
            else:
                status = receiver.statuses.pop(0) if receiver.statuses else 204
            if status is None:
                return
            if 200 <= status < 300:
                receiver.taken.append(request)
            self.send_response(status)
            if 300 <= status < 400:
                self.send_header("Location", f"{receiver.url}/elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Write nothing."""

    with ThreadingHTTPServer(("127.0.0.1", receiver.port), Handler) as server:
        server.daemon_threads = True
        if tls is not None:
            receiver.secure = True
            server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        receiver.port = server.server_port
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield receiver
        finally:
            receiver.ended.set()
            server.shutdown()
            thread.join()
