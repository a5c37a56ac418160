"""HTTP to one registry: authentication and redirects.

Everything that a registry answers is hostile until it is checked: addresses to go to, and whom to give a password. Credentials
go to the registry and to the service of tokens that it names; never in clear, except where plain HTTP is allowed.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import urlencode, urljoin, urlsplit

import urllib3
from urllib3.exceptions import HTTPError

from slipway.backoff import Backoff
from slipway.errors import ArtifactError
from slipway.files.json_documents import parse_json
from slipway.publishing.connections import LARGEST_ANSWER, Answer, Connections, headers_of
from slipway.publishing.oci.address import Address, Credentials, credentials_remedy, is_loopback
from slipway.texts import one_line, shortened

PATIENCE_SECONDS = 60.0
_MOST_REDIRECTS = 5
_MOST_TOKEN = 64 << 10
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_CHALLENGE = re.compile(r'([a-zA-Z_]+)="([^"]*)"')
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{1,65536}")


class Transport:
    """Connections to a registry.

    Args:
        address: The repository.
        credentials: Who asks; None asks as anybody.
        insecure: Whether plain HTTP is allowed.
        patience_seconds: How long a request is repeated while the registry is unavailable.
    """

    def __init__(
        self,
        address: Address,
        credentials: Credentials | None,
        *,
        insecure: bool = False,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        self.address = address
        self._credentials, self._insecure = credentials, insecure
        self._authorization, self._lock = "", threading.Lock()
        self._scopes = [f"repository:{address.name}:pull"]
        self._connections = Connections(self.error, _code, patience_seconds=patience_seconds)
        self.base = self._find_base()

    def close(self) -> None:
        """Close the connections now, and not when a pool is no longer referenced."""
        self._connections.close()

    def allow_push(self) -> None:
        """Ask for the right to write from now on."""
        self._scopes[0] = f"repository:{self.address.name}:pull,push"

    def allow_pull(self, name: str) -> None:
        """Ask for the right to read another repository, too, from now on."""
        self._scopes.append(f"repository:{name}:pull")

    @contextmanager
    def during(self, on_wait: Callable[[], None]) -> Iterator[None]:
        """Call ``on_wait`` while this thread waits for the registry within the block; it may raise to stop that."""
        with self._connections.during(on_wait):
            yield

    def repeat(self, doing: str, call: Callable[[], Answer]) -> Answer:
        """Repeat a call while the registry is unavailable.

        Raises:
            ArtifactError: ``STORE_UNAVAILABLE``, ``STORE_DENIED``, ``STORE_INVALID``.
        """
        return self._connections.repeat(doing, call)

    def backoff(self) -> Backoff:
        """Return the pauses of one piece of work that is repeated."""
        return self._connections.backoff()

    def request(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: Any = None,
        most: int = LARGEST_ANSWER,
        challenged: bool = False,
    ) -> Answer:
        """Make one request, with authentication and redirects.

        Args:
            method: HTTP's method.
            path: Path on the registry, or a whole address that it gave.
            headers: Headers beside those that every request has.
            body: Bytes, or a file of known length.
            most: Most bytes that the answer may have.
            challenged: Whether the registry has asked for authentication just now.

        Raises:
            ArtifactError: ``STORE_INVALID`` for an answer beyond the limits, ``STORE_DENIED``.
            HTTPError: The connection broke.
        """
        with self._open(method, path, headers=headers, body=body) as response:
            if method == "HEAD":
                response.drain_conn()
                answer = Answer(response.status, headers_of(response))
            else:
                answer = self._connections.read(response, f"{method} {path}", most=most)
        if answer.status == 401 and not challenged and self._authenticate(answer.headers.get("www-authenticate", "")):
            if hasattr(body, "rewind"):
                body.rewind()
            return self.request(method, path, headers=headers, body=body, most=most, challenged=True)
        return answer

    def error(self, doing: str, what: str, reason: str) -> ArtifactError:
        """Return the error for a request that failed."""
        remedies = {
            "STORE_UNAVAILABLE": "check that the registry runs and can be reached, then try again",
            "STORE_DENIED": credentials_remedy(self.address),
            "ARTIFACT_NOT_FOUND": "check the name and the tag",
            "ARTIFACT_CORRUPT": "what the registry has was damaged or changed: publish the model again",
        }
        return ArtifactError(
            f"{doing}: {self.address.host}: {what}",
            reason=reason,
            remedy=remedies.get(reason, "check that the address is one of a registry; --insecure allows plain HTTP"),
            about={"registry": self.address.host, "repository": self.address.name},
        )

    def refusal(self, doing: str, answer: Answer) -> ArtifactError:
        """Return the error for an answer that refuses a request for good."""
        reason = {401: "STORE_DENIED", 403: "STORE_DENIED", 404: "ARTIFACT_NOT_FOUND"}.get(
            answer.status, "STORE_INVALID"
        )
        return self.error(doing, f"it answers {answer.status}{_code(answer)}", reason)

    @contextmanager
    def _open(
        self, method: str, path: str, *, headers: Mapping[str, str] | None, body: Any
    ) -> Iterator[urllib3.BaseHTTPResponse]:
        """Make a request and follow redirects; the password goes to the registry alone."""
        url = self._allowed(urljoin(self.base, path))
        for _ in range(_MOST_REDIRECTS + 1):
            sent = dict(headers or {})
            if self._authorization and _origin(url) == _origin(self.base):
                sent["Authorization"] = self._authorization
            response = self._connections.open(method, url, headers=sent, body=body)
            place = response.headers.get("location", "")
            if response.status not in _REDIRECTS or not place or method not in ("GET", "HEAD"):
                with closing(response):
                    yield response
                return
            response.drain_conn() if method == "HEAD" else response.close()
            url = self._allowed(urljoin(url, place))
        raise self.error(f"{method} {path}", f"it redirects more than {_MOST_REDIRECTS} times", "STORE_INVALID")

    def _allowed(self, url: str) -> str:
        """Return an address to which a request may go."""
        try:
            parts = urlsplit(url)
            host = parts.hostname
        except ValueError:
            host = None
        plain = self._insecure or (self.address.is_local and is_loopback(host or ""))
        if host and (parts.scheme == "https" or (parts.scheme == "http" and plain)):
            return url
        what = "it sends elsewhere by plain HTTP, or to no address of the web"
        raise self.error("following a redirect", what, "STORE_INVALID")

    def _find_base(self) -> str:
        """Return the registry's address: with TLS, or without it where that is allowed and nothing speaks TLS."""
        secure = f"https://{self.address.host}/v2/"
        if not self._insecure and not self.address.is_local:
            return secure
        try:
            self._connections.open("GET", secure).close()
        except (HTTPError, OSError):
            return f"http://{self.address.host}/v2/"
        return secure

    def _authenticate(self, challenge: str) -> bool:
        """Answer a challenge; return whether asking again may help."""
        kind = challenge.partition(" ")[0].lower()
        if kind == "basic" and self._credentials is not None:
            self._authorization = self._credentials.basic
            return True
        if kind != "bearer":
            return False
        with self._lock:
            token = self._token(dict(_CHALLENGE.findall(challenge[:_MOST_TOKEN])))
            self._authorization = f"Bearer {token}"
        return True

    def _token(self, challenge: Mapping[str, str]) -> str:
        """Get a token from the service that the registry names."""
        doing, realm = "asking for a token", self._allowed(challenge.get("realm", ""))
        service, known = challenge.get("service", ""), self._credentials
        if known is not None and not known.user:
            form = {
                "service": service,
                "scope": " ".join(self._scopes),
                "grant_type": "refresh_token",
                "client_id": "slipway",
            }
            form["refresh_token"] = known.secret.get_secret_value()
            method, url, body = "POST", realm, urlencode(form)
            headers = {"Content-Type": "application/x-www-form-urlencoded"}
        else:
            query = urlencode([("service", service), *(("scope", scope) for scope in self._scopes)])
            between = "&" if urlsplit(realm).query else "?"
            method, url, body = "GET", f"{realm}{between}{query}", ""
            headers = {"Authorization": known.basic} if known else {}

        def call() -> Answer:
            with closing(self._connections.open(method, url, headers=headers, body=body or None)) as response:
                return self._connections.read(response, "GET token", most=_MOST_TOKEN * 2)

        answer = self.repeat(doing, call)
        if answer.status != 200:
            raise self.error(doing, f"the service of tokens answers {answer.status}", "STORE_DENIED")
        try:
            document = parse_json(answer.data, lenient=True)
            token = document.get("token") or document.get("access_token")
        except (ValueError, AttributeError) as error:
            raise self.error(doing, "the service of tokens gives no token", "STORE_INVALID") from error
        if not isinstance(token, str) or _TOKEN.fullmatch(token) is None:
            raise self.error(doing, "the service of tokens gives no token", "STORE_INVALID")
        return token


def _origin(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc


def _code(answer: Answer) -> str:
    """Return the registry's own code of an error, if its answer has one."""
    try:
        first = json.loads(answer.data[:_MOST_TOKEN])["errors"][0]
        text = f"{first['code']}: {first.get('message', '')}"
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return ""
    return f" ({shortened(one_line(text))})"
