"""The REST protocol of one Model Registry (v1alpha3 or v1): a token, retries, and limits on what it answers."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import certifi
import urllib3
from urllib3.exceptions import HTTPError, SSLError

from slipway.distribution import own_version
from slipway.errors import ArtifactError
from slipway.files.json_documents import parse_json
from slipway.files.regular_file import read_regular
from slipway.publishing.destination import Access, destination_error
from slipway.publishing.oci.address import is_loopback
from slipway.texts import one_line, redact, redact_address, shortened

SERVER, TOKEN, TOKEN_FILE = "KUBEFLOW_MODEL_REGISTRY", "KUBEFLOW_MODEL_REGISTRY_TOKEN", "KF_PIPELINES_SA_TOKEN_PATH"
_ROOT, _VERSIONS = "/api/model_registry", ("v1alpha3", "v1")
"""Paths of the protocol, which are the same in both versions, and so is what is sent here."""
_TOKEN = re.compile(r"[\x21-\x7e]{1,16384}")
_ID = re.compile(r"[1-9][0-9]{0,18}")
_LARGEST_ANSWER, _LARGEST_TOKEN = 4 << 20, 64 << 10
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 5.0
_CONNECT_SECONDS, _READ_SECONDS, _LONGEST_ANSWER_SECONDS = 10.0, 60.0, 120.0
_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})


class RegistryClient:
    """A Model Registry.

    Args:
        url: Address of the destination, for messages.
        access: The environment with the server's address and token, and whether a token may go over plain HTTP.

    Raises:
        ConfigurationError: ``DESTINATION_INVALID`` if no server, or none that may be used, is named.
        ArtifactError: ``STORE_DENIED`` for a token that cannot be used.
    """

    def __init__(self, url: str, access: Access) -> None:
        server = access.environment.get(SERVER, "").rstrip("/")
        self._where, self._patience = redact_address(server), access.patience_seconds
        token = self._read_token(access.environment)
        try:
            parts = urlsplit(server)
            host = parts.hostname or ""
        except ValueError:
            host = ""
        if (
            not host
            or parts.scheme not in ("http", "https")
            or parts.username is not None
            or parts.query
            or parts.fragment
        ):
            raise destination_error(url, f"{SERVER} does not name the server, such as https://registry.example.com")
        if token and parts.scheme == "http" and not access.insecure and not is_loopback(host):
            raise destination_error(url, f"the token would go to {self._where} by plain HTTP, which --insecure allows")
        self._root, self._version = f"{server}{_ROOT}", _VERSIONS[0]
        self._headers = {"User-Agent": f"slipway/{own_version()}", "Accept": "application/json"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._http = urllib3.PoolManager(
            timeout=urllib3.Timeout(connect=_CONNECT_SECONDS, read=_READ_SECONDS),
            retries=False,
            cert_reqs="CERT_REQUIRED",
            ca_certs=access.environment.get("SSL_CERT_FILE") or certifi.where(),
        )

    def reach(self) -> None:
        """Ask the server whether it is a Model Registry and takes the token, and for the version of its protocol.

        Raises:
            ArtifactError: ``STORE_UNAVAILABLE``, ``STORE_DENIED``, ``STORE_INVALID``.
        """
        first = "registered_models?pageSize=1"
        answer = self._call("asking", "GET", first, absent=True)
        if answer is None:
            self._version = _VERSIONS[1]
            answer = self._call("asking", "GET", first)
        if not isinstance(answer, dict) or not isinstance(answer.get("items"), list):
            raise self._error("asking", "its answer is no list of models", "STORE_INVALID")

    def find(self, kind: str, **query: str) -> dict[str, Any] | None:
        """Return the one entity of a kind that a query names; None if there is none.

        Raises:
            ArtifactError: As :meth:`reach`.
        """
        answer = self._call(f"looking for a {kind} in", "GET", f"{kind}?{urlencode(query)}", absent=True)
        return None if answer is None else self._entity(kind, answer)

    def create(self, path: str, document: Mapping[str, Any]) -> dict[str, Any] | None:
        """Make an entity; return None if there is one of this name already.

        Raises:
            ArtifactError: As :meth:`reach`.
        """
        answer = self._call("registering with", "POST", path, document, taken=True)
        return None if answer is None else self._entity(path, answer)

    def update(self, path: str, document: Mapping[str, Any]) -> dict[str, Any]:
        """Change an entity.

        Raises:
            ArtifactError: As :meth:`reach`.
        """
        return self._entity(path, self._call("registering with", "PATCH", path, document))

    def close(self) -> None:
        """Close the connections."""
        self._http.clear()

    def taken_error(self, what: str) -> ArtifactError:
        """Return the error for a name that is taken and cannot be found."""
        return self._error("registering with", f"{what} is there, and it does not show it", "STORE_INVALID")

    def _entity(self, kind: str, answer: Any) -> dict[str, Any]:
        if not isinstance(answer, dict) or not isinstance(answer.get("id"), str) or _ID.fullmatch(answer["id"]) is None:
            raise self._error("reading from", f"its answer for {kind} has no id", "STORE_INVALID")
        return answer

    def _call(
        self, doing: str, method: str, path: str, document: Any = None, *, absent: bool = False, taken: bool = False
    ) -> Any:
        """Make a request; repeat it while the server is unavailable. None stands for what may be absent, or taken."""
        body = None if document is None else json.dumps(document, allow_nan=False).encode()
        status, data = self._repeat(doing, lambda: self._request(doing, method, path, body))
        if (status == 404 and absent) or (status == 409 and taken):
            return None
        if status not in (200, 201):
            reason = "STORE_DENIED" if status in (401, 403) else "STORE_INVALID"
            redirected = ", which may lead to a login" if 300 <= status < 400 else ""
            raise self._error(doing, f"it answers {status}{_message(data)}{redirected}", reason)
        try:
            answer = parse_json(data, lenient=True)
        except ValueError as error:
            raise self._error(doing, f"its answer is no JSON: {error}", "STORE_INVALID") from error
        return {} if answer is None else answer  # None has another meaning here

    def _request(self, doing: str, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        headers = self._headers if body is None else {**self._headers, "Content-Type": "application/json"}
        response = self._http.request(
            method,
            f"{self._root}/{self._version}/{path}",
            headers=headers,
            body=body,
            redirect=False,
            preload_content=False,
        )
        with closing(response):
            data, end = bytearray(), time.monotonic() + _LONGEST_ANSWER_SECONDS
            while len(data) <= _LARGEST_ANSWER and (piece := response.read1(1 << 16)):
                data += piece
                if time.monotonic() > end:
                    raise self._error(
                        doing, f"its answer takes longer than {_LONGEST_ANSWER_SECONDS:.0f} s", "STORE_UNAVAILABLE"
                    )
            if len(data) > _LARGEST_ANSWER:
                raise self._error(doing, f"its answer has more than {_LARGEST_ANSWER} bytes", "STORE_INVALID")
            return response.status, bytes(data)

    def _repeat(self, doing: str, call: Callable[[], tuple[int, bytes]]) -> tuple[int, bytes]:
        deadline, pause = time.monotonic() + self._patience, _FIRST_PAUSE
        while True:
            try:
                status, data = call()
                if status not in _PASSING:
                    return status, data
                fault = f"it answers {status}{_message(data)}"
            except (HTTPError, OSError) as error:
                fault = shortened(one_line(str(error))) or type(error).__name__
                if isinstance(error, SSLError):
                    raise self._error(doing, f"its certificate is not valid ({fault})", "STORE_INVALID") from error
            if time.monotonic() + pause > deadline:
                raise self._error(doing, fault, "STORE_UNAVAILABLE")
            time.sleep(pause * random.uniform(0.5, 1))  # noqa: S311
            pause = min(pause * 2, _LONGEST_PAUSE)

    def _read_token(self, environment: Mapping[str, str]) -> str:
        token, file = environment.get(TOKEN, ""), environment.get(TOKEN_FILE, "")
        if not token and file:
            try:
                token = read_regular(Path(file), largest=_LARGEST_TOKEN).decode("ascii").strip()
            except (OSError, UnicodeDecodeError) as error:
                raise self._error(
                    "opening", f"the file that {TOKEN_FILE} names cannot be read", "STORE_DENIED"
                ) from error
        if token and _TOKEN.fullmatch(token) is None:
            raise self._error("opening", "the token has spaces, or letters that no header takes", "STORE_DENIED")
        return token

    def _error(self, doing: str, what: str, reason: str) -> ArtifactError:
        remedies = {
            "STORE_DENIED": f"set {TOKEN}, or {TOKEN_FILE} to a file with the token, and check its rights",
            "STORE_UNAVAILABLE": f"check that the server runs and that {SERVER} names it, then try again",
        }
        return ArtifactError(
            f"{doing} the Model Registry {self._where}: {what}",
            reason=reason,
            remedy=remedies.get(reason, f"check that {SERVER} names a Kubeflow Model Registry"),
            about={"server": self._where},
        )


def _message(data: bytes) -> str:
    """Return what an error says, if it is one of the protocol."""
    try:
        text = str(parse_json(data, lenient=True)["message"])
    except (ValueError, LookupError, TypeError):
        return ""
    return f" ({shortened(one_line(redact(text)))})"
