"""An OpenID Connect issuer on loopback: real keys, a discovery document, a key set, and tokens as asked for."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

from joserfc import jwt
from joserfc.jwk import ECKey, OKPKey, RSAKey

from support.servers.local_http import local_http

AUDIENCE = "slipway"
_DISCOVERY, _KEYS = "/.well-known/openid-configuration", "/keys"


class OidcIssuer:
    """What an issuer serves and signs; change its attributes at any time.

    Attributes:
        url: Its address, and the ``iss`` of its tokens.
        keys: Its keys by their ids; the last one signs.
        changes: Replaces the document at a path; an ``int`` is an HTTP status, ``bytes`` are sent as they are.
        asked: How often each path was asked for.
        headers: Headers of the last request.
    """

    def __init__(self) -> None:
        self.url = ""
        self.keys: dict[str, RSAKey | ECKey | OKPKey] = {}
        self.changes: dict[str, Any] = {}
        self.asked: Counter[str] = Counter()
        self.headers: Mapping[str, str] = {}
        self.rotate("first")

    def rotate(self, kid: str, *, keep: bool = False) -> None:
        """Sign with a new key; forget the others unless they are kept."""
        kept = self.keys if keep else {}
        self.keys = kept | {kid: ECKey.generate_key("P-256", {"kid": kid, "use": "sig", "alg": "ES256"})}

    def claims(self, **changes: Any) -> dict[str, Any]:
        """Give the claims of a good token; None leaves one out."""
        now = int(time.time())
        good = {"iss": self.url, "aud": AUDIENCE, "sub": "alice", "iat": now, "nbf": now, "exp": now + 600}
        return {name: value for name, value in (good | changes).items() if value is not None}

    def token(self, *, header: Mapping[str, Any] | None = None, key: Any = None, **changes: Any) -> str:
        """Sign a token."""
        kid = list(self.keys)[-1]
        header = {"alg": "ES256", "kid": kid, **(header or {})}
        header = {name: value for name, value in header.items() if value is not None}
        return jwt.encode(header, self.claims(**changes), key or self.keys[kid], algorithms=[header["alg"]])

    def document(self, path: str) -> Any:
        """Give what a path responds with."""
        if path in self.changes:
            return self.changes[path]
        if path == _DISCOVERY:
            return {"issuer": self.url, "jwks_uri": self.url + _KEYS}
        return {"keys": [key.as_dict(private=False) for key in self.keys.values()]} if path == _KEYS else 404


@contextmanager
def oidc_issuer() -> Iterator[OidcIssuer]:
    """Run an issuer within a block."""
    issuer = OidcIssuer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            issuer.asked[self.path] += 1
            issuer.headers = dict(self.headers.items())
            document = issuer.document(self.path)
            if isinstance(document, float):
                time.sleep(document)
                document = 500
            status = document if isinstance(document, int) else 200
            body = document if isinstance(document, bytes) else json.dumps(document).encode()
            self.send_response(status)
            if 300 <= status < 400:
                self.send_header("Location", issuer.url + "/elsewhere")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Write nothing."""

    with local_http(Handler, waits=False) as url:
        issuer.url = url
        yield issuer
