"""The console in this process at a port of loopback, and a plain browser for it: cookies, forms, no scripts."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import unescape
from typing import Any
from urllib.parse import urlencode

import uvicorn

from support.coordinators.harness import wait_for


@dataclass(frozen=True)
class Page:
    """A response."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        """Its HTML, with character references replaced."""
        return unescape(self.body.decode())

    @property
    def location(self) -> str:
        return self.headers.get("location", "")


@dataclass
class PlainBrowser:
    """A browser that keeps cookies and says where its requests come from."""

    address: str
    cookies: dict[str, str] = field(default_factory=dict)

    def get(self, path: str, **headers: str) -> Page:
        return self.ask("GET", path, None, **headers)

    def post(self, path: str, *fields: tuple[str, str], **headers: str) -> Page:
        """Send a form from a page of the same address."""
        body = urlencode(fields).encode()
        kind = {"content_type": "application/x-www-form-urlencoded", "origin": f"http://{self.address}"}
        return self.ask("POST", path, body, **{**kind, **headers})

    def ask(self, verb: str, path: str, body: bytes | None, **headers: str) -> Page:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if self.cookies:
            sent.setdefault("cookie", "; ".join(f"{name}={value}" for name, value in self.cookies.items()))
        connection = http.client.HTTPConnection(self.address, timeout=120)
        try:
            connection.request(verb, path, body, sent)
            response = connection.getresponse()
            for name, value in response.getheaders():
                if name.lower() == "set-cookie":
                    key, _, content = value.partition(";")[0].partition("=")
                    self.cookies[key] = content
            return Page(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()


@contextmanager
def serving(application: Any) -> Iterator[str]:
    """Serve an application in a thread; yield its address."""
    config = uvicorn.Config(application, port=0, log_config=None, access_log=False, ws="none", lifespan="off")
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]  # it is not in the main thread
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    host, port = server.servers[0].sockets[0].getsockname()[:2]
    try:
        yield f"{host}:{port}"
    finally:
        server.should_exit = True
        thread.join(60)
