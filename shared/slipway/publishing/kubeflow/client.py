"""The REST protocol of one Model Registry (v1alpha3 or v1), and its token."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from slipway.errors import ArtifactError
from slipway.files.json_documents import parse_json
from slipway.files.regular_file import read_regular
from slipway.publishing.connections import Answer, Connections
from slipway.publishing.destination import Access, destination_error
from slipway.publishing.oci.address import is_loopback
from slipway.texts import one_line, redact, redact_address, shortened

SERVER, TOKEN, TOKEN_FILE = "KUBEFLOW_MODEL_REGISTRY", "KUBEFLOW_MODEL_REGISTRY_TOKEN", "KF_PIPELINES_SA_TOKEN_PATH"
_ROOT, _VERSIONS = "/api/model_registry", ("v1alpha3", "v1")
"""Paths of the protocol, which are the same in both versions, and so is what is sent here."""
_TOKEN = re.compile(r"[\x21-\x7e]{1,16384}")
_ID = re.compile(r"[1-9][0-9]{0,18}")
_LARGEST_TOKEN = 64 << 10


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
        self._url, self._where, self._environment = url, redact_address(server), access.environment
        try:
            parts = urlsplit(server)
            host, _ = parts.hostname or "", parts.port
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
        self._clear = parts.scheme == "http" and not access.insecure and not is_loopback(host)
        self._root, self._version = f"{server}{_ROOT}", _VERSIONS[0]
        self._headers()
        self._connections = Connections(
            self._error,
            _message,
            patience_seconds=access.patience_seconds,
            authorities=access.environment.get("SSL_CERT_FILE", ""),
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
        self._connections.close()

    def taken_error(self, what: str) -> ArtifactError:
        """Return the error for a name that is taken and cannot be found."""
        return self._error("registering with", f"{what} is there, and it does not show it", "STORE_INVALID")

    def _entity(self, kind: str, answer: Any) -> dict[str, Any]:
        if not isinstance(answer, dict) or not isinstance(answer.get("id"), str) or _ID.fullmatch(answer["id"]) is None:
            raise self._error("reading from", f"its answer for {kind} has no id", "STORE_INVALID")
        properties = {} if answer.get("customProperties") is None else answer["customProperties"]
        if not isinstance(properties, dict) or not all(isinstance(each, dict) for each in properties.values()):
            raise self._error("reading from", f"its answer for {kind} has properties that are none", "STORE_INVALID")
        return {**answer, "customProperties": properties}

    def _call(
        self, doing: str, method: str, path: str, content: Any = None, *, absent: bool = False, taken: bool = False
    ) -> Any:
        """Make a request; repeat it while the server is unavailable. None stands for what may be absent, or taken."""
        body = None if content is None else json.dumps(content, allow_nan=False).encode()
        answer = self._connections.repeat(doing, lambda: self._request(doing, method, path, body))
        if (answer.status == 404 and absent) or (answer.status == 409 and taken):
            return None
        if answer.status not in (200, 201):
            reason = "STORE_DENIED" if answer.status in (401, 403) else "STORE_INVALID"
            redirected = ", which may lead to a login" if 300 <= answer.status < 400 else ""
            raise self._error(doing, f"it answers {answer.status}{_message(answer)}{redirected}", reason)
        try:
            document = parse_json(answer.data, lenient=True)
        except ValueError as error:
            raise self._error(doing, f"its answer is no JSON: {error}", "STORE_INVALID") from error
        return {} if document is None else document  # None has another meaning here

    def _request(self, doing: str, method: str, path: str, body: bytes | None) -> Answer:
        headers = self._headers() if body is None else {**self._headers(), "Content-Type": "application/json"}
        url = f"{self._root}/{self._version}/{path}"
        with closing(self._connections.open(method, url, headers=headers, body=body)) as response:
            return self._connections.read(response, doing)

    def _headers(self) -> dict[str, str]:
        """Return the headers with the token, which is read for each request: it may expire during an upload of hours.

        Raises:
            ConfigurationError: ``DESTINATION_INVALID`` if it would go over plain HTTP.
            ArtifactError: ``STORE_DENIED`` for a token that cannot be used.
        """
        token = self._read_token()
        if token and self._clear:
            what = f"the token would go to {self._where} by plain HTTP, which --insecure allows"
            raise destination_error(self._url, what)
        return {"Accept": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}

    def _read_token(self) -> str:
        token, file = self._environment.get(TOKEN, ""), self._environment.get(TOKEN_FILE, "")
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


def _message(answer: Answer) -> str:
    """Return what an error says, if it is one of the protocol."""
    try:
        text = str(parse_json(answer.data, lenient=True)["message"])
    except (ValueError, LookupError, TypeError):
        return ""
    return f" ({shortened(one_line(redact(text)))})"
