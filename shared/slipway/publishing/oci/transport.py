"""HTTP to one registry: authentication, redirects, retries, and limits on what it answers.

Everything that a registry answers is hostile until it is checked: sizes, addresses to go to, and whom to give a password. Credentials
go to the registry and to the service of tokens that it names; never in clear, except where plain HTTP is allowed.
"""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode, urljoin, urlsplit

import certifi
import urllib3
from urllib3.exceptions import HTTPError, SSLError

from slipway.distribution import own_version
from slipway.errors import ArtifactError
from slipway.files.json_documents import parse_json
from slipway.publishing.oci.address import Address, Credentials, credentials_remedy, is_loopback
from slipway.texts import one_line, shortened

LARGEST_ANSWER = 4 << 20
"""Largest manifest, as most registries have it too."""
PATIENCE_SECONDS = 60.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 5.0
_CONNECT_SECONDS, _READ_SECONDS = 10.0, 120.0
_LONGEST_ANSWER_SECONDS = 600.0
"""Longest time that a manifest or a document may take; each piece of it has the shorter limit of a read."""
_MOST_REDIRECTS = 5
_MOST_TOKEN = 64 << 10
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
_CHALLENGE = re.compile(r'([a-zA-Z_]+)="([^"]*)"')
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{1,65536}")
_BLOCK_BYTES = 1 << 20
CONNECTIONS = 8


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request.

    Attributes:
        status: Status code.
        headers: Headers, by their names in lower case.
        data: Content; empty where it was not asked for.
    """

    status: int
    headers: Mapping[str, str]
    data: bytes = b""


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
        self._credentials, self._patience = credentials, patience_seconds
        self._insecure = insecure
        self._authorization, self._lock, self._waiting = "", threading.Lock(), threading.local()
        self._scopes = [f"repository:{address.name}:pull"]
        self._http = urllib3.PoolManager(
            num_pools=4,
            maxsize=CONNECTIONS,
            timeout=urllib3.Timeout(connect=_CONNECT_SECONDS, read=_READ_SECONDS),
            retries=False,
            cert_reqs="CERT_REQUIRED",
            ca_certs=certifi.where(),
            blocksize=_BLOCK_BYTES,
            headers={"User-Agent": f"slipway/{own_version()}"},
        )
        self.base = self._find_base()

    def close(self) -> None:
        """Close the connections now, and not when a pool is no longer referenced."""
        pools = self._http.pools
        for key in pools.keys():  # noqa: SIM118 - it cannot be iterated itself
            pools[key].close()
        self._http.clear()

    def allow_push(self) -> None:
        """Ask for the right to write from now on."""
        self._scopes[0] = f"repository:{self.address.name}:pull,push"

    def allow_pull(self, name: str) -> None:
        """Ask for the right to read another repository, too, from now on."""
        self._scopes.append(f"repository:{name}:pull")

    @contextmanager
    def during(self, on_wait: Callable[[], None]) -> Iterator[None]:
        """Call ``on_wait`` while this thread waits for the registry within the block; it may raise to stop that."""
        self._waiting.call = on_wait
        try:
            yield
        finally:
            self._waiting.call = None

    def repeat(self, doing: str, call: Callable[[], Answer]) -> Answer:
        """Repeat a call while the registry is unavailable.

        Raises:
            ArtifactError: ``STORE_UNAVAILABLE``, ``STORE_DENIED``, ``STORE_INVALID``.
        """
        deadline, pause = time.monotonic() + self._patience, _FIRST_PAUSE
        while True:
            try:
                answer = call()
                fault = f"it answers {answer.status}{_code(answer)}" if answer.status in _PASSING else ""
            except (HTTPError, OSError) as error:
                if isinstance(error, SSLError):
                    raise self.error(
                        doing, f"its certificate is not valid ({_cause(error)})", "STORE_INVALID"
                    ) from error
                fault = _cause(error)
            if not fault:
                return answer
            if time.monotonic() + pause > deadline:
                raise self.error(doing, fault, "STORE_UNAVAILABLE")
            self._wait(pause * random.uniform(0.5, 1))  # noqa: S311
            pause = min(pause * 2, _LONGEST_PAUSE)

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
            answer = Answer(response.status, _headers(response), self._read(response, method, path, most))
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
            response = self._http.request(
                method, url, headers={**self._http.headers, **sent}, body=body, redirect=False, preload_content=False
            )
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

    def _read(self, response: urllib3.BaseHTTPResponse, method: str, path: str, most: int) -> bytes:
        if method == "HEAD":
            response.drain_conn()
            return b""
        data, end = bytearray(), time.monotonic() + _LONGEST_ANSWER_SECONDS
        while len(data) <= most and (piece := response.read1(min(_BLOCK_BYTES, most + 1 - len(data)))):
            data += piece
            if time.monotonic() > end:
                what = f"its answer takes longer than {_LONGEST_ANSWER_SECONDS:.0f} s"
                raise self.error(f"{method} {path}", what, "STORE_UNAVAILABLE")
        if len(data) > most:
            raise self.error(f"{method} {path}", f"its answer has more than {most} bytes", "STORE_INVALID")
        return bytes(data)

    def _wait(self, seconds: float) -> None:
        """Sleep in short pieces, so that an interrupted command ends soon."""
        call, end = getattr(self._waiting, "call", None), time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if call is not None:
                call()
            time.sleep(min(left, 0.25))

    def _find_base(self) -> str:
        """Return the registry's address: with TLS, or without it where that is allowed and nothing speaks TLS."""
        secure = f"https://{self.address.host}/v2/"
        if not self._insecure and not self.address.is_local:
            return secure
        try:
            self._http.request("GET", secure, redirect=False, preload_content=False).close()
        except (SSLError, HTTPError, OSError):
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
            options: dict[str, Any] = {"method": "POST", "url": realm, "body": urlencode(form)}
            headers = {"Content-Type": "application/x-www-form-urlencoded"}
        else:
            query = urlencode([("service", service), *(("scope", scope) for scope in self._scopes)])
            between = "&" if urlsplit(realm).query else "?"
            options = {"method": "GET", "url": f"{realm}{between}{query}"}
            headers = {"Authorization": known.basic} if known else {}

        def call() -> Answer:
            with closing(
                self._http.request(
                    **options, headers={**self._http.headers, **headers}, redirect=False, preload_content=False
                )
            ) as response:
                return Answer(
                    response.status, _headers(response), self._read(response, "GET", "token", _MOST_TOKEN * 2)
                )

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


def _headers(response: urllib3.BaseHTTPResponse) -> dict[str, str]:
    return {name.lower(): value for name, value in response.headers.items()}


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


def _cause(error: BaseException) -> str:
    return shortened(one_line(str(error))) or type(error).__name__
