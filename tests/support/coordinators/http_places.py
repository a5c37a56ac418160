"""A coordinator with users of several projects that takes JSON over HTTP, and a plain client for it."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from support.coordinators.artifact_places import PEOPLE, Place


@dataclass(frozen=True)
class Answer:
    """A response over HTTP."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def info(self) -> dict[str, Any]:
        """The ErrorInfo of a failure."""
        return self.detail("google.rpc.ErrorInfo")

    @property
    def reason(self) -> str:
        return str(self.info["reason"])

    @property
    def fields(self) -> list[str]:
        """The fields that a refusal names."""
        return [violation["field"] for violation in self.detail("google.rpc.BadRequest")["fieldViolations"]]

    def detail(self, kind: str) -> dict[str, Any]:
        return next(each for each in self.json["details"] if each["@type"].endswith(kind))


class HttpPlace(Place):
    """A coordinator with an access file, at a port for HTTP."""

    def __init__(self, home: Path, *, people: Mapping[str, str] = PEOPLE, **options: Any) -> None:
        super().__init__(home, people=people, **options)
        assert self.security is not None
        self.security = replace(self.security, http_address="127.0.0.1:0")

    @property
    def http_address(self) -> str:
        return f"127.0.0.1:{self.server.http_port}"

    def call(self, who: str, verb: str, path: str, body: Any = None, **headers: str) -> Answer:
        """Make one request as somebody; ``""`` is nobody. Bytes are sent as they are, all else as JSON."""
        return call(self.http_address, verb, path, body, token=self.tokens.get(who, who), **headers)


def call(
    address: str,
    verb: str,
    path: str,
    body: Any = None,
    *,
    token: str = "",
    tls: ssl.SSLContext | None = None,
    **headers: str,
) -> Answer:
    """Make one request over a connection of its own; in names of headers, ``_`` stands for ``-``."""
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    if token:
        sent["authorization"] = f"Bearer {token}"
    if body is not None and not isinstance(body, bytes):
        body = json.dumps(body).encode()
        sent.setdefault("content-type", "application/json")
    connection: http.client.HTTPConnection
    if tls is None:
        connection = http.client.HTTPConnection(address, timeout=120)
    else:
        connection = http.client.HTTPSConnection(address, timeout=120, context=tls)
    try:
        connection.request(verb, path, body, sent)
        response = connection.getresponse()
        return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
    finally:
        connection.close()
