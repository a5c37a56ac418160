"""Services for temporary credentials on loopback: an STS with web identities, and a container's agent."""

from __future__ import annotations

import json
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs

from support.servers.local_http import local_http

_STS = """<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><AssumeRoleWithWebIdentityResult>
<Credentials><AccessKeyId>{AccessKeyId}</AccessKeyId><SecretAccessKey>{SecretAccessKey}</SecretAccessKey>
<SessionToken>{Token}</SessionToken><Expiration>{Expiration}</Expiration></Credentials>
</AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"""
_REFUSED = "<ErrorResponse><Error><Code>{}</Code><Message>no</Message></Error></ErrorResponse>"


@dataclass
class CredentialService:
    """A server of both protocols: POST is STS, GET the agent. Every response has a new key: ``KEY1``, ``KEY2`` …

    Attributes:
        tokens: Accepted tokens; all others are refused.
        lifetime: Lifetime of credentials, in seconds.
        status: Status of every response, unless it is 200.
        pause: Seconds before a response.
        seen: Path and token of each request, with the form of those to STS.
        handed_out: Number of responses with credentials so far.
        body: Response instead of credentials.
    """

    tokens: set[str] = field(default_factory=set)
    lifetime: float = 3600.0
    status: int = 200
    pause: float = 0.0
    seen: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    handed_out: int = 0
    body: str = ""

    def __enter__(self) -> Self:
        service, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.reply(self.headers.get("Authorization", ""), {}, json.dumps)

            def do_POST(self) -> None:
                text = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
                form = {name: values[0] for name, values in parse_qs(text).items()}
                self.reply(form.get("WebIdentityToken", ""), form, lambda found: _STS.format(**found))

            def reply(self, token: str, form: dict[str, str], shown: Any) -> None:
                with lock:
                    service.seen.append((self.path, token, form))
                time.sleep(service.pause)
                status = service.status if service.status != 200 or token in service.tokens else 400
                text = _REFUSED.format("InvalidIdentityToken")
                if status == 200:
                    with lock:
                        service.handed_out += 1
                        text = service.body or shown(service.fresh())
                self.send_response(status)
                if status in {302, 307}:
                    self.send_header("Location", f"{service.endpoint}/elsewhere")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None:
                pass

        self._stack = ExitStack()
        self.endpoint = self._stack.enter_context(local_http(Handler, waits=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def fresh(self) -> dict[str, str]:
        ends = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + self.lifetime))
        return {
            "AccessKeyId": f"KEY{self.handed_out}",
            "SecretAccessKey": "a-secret",
            "Token": f"session{self.handed_out}",
            "Expiration": ends,
        }
