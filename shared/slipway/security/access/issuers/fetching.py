"""Fetch an issuer's JSON documents: HTTPS within limits of time and size, without redirects (:mod:`slipway.security.outgoing`)."""

from __future__ import annotations

import http.client
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from slipway.files.json_documents import parse_json
from slipway.files.regular_file import read_regular
from slipway.security.access.issuers.settings import check_url
from slipway.security.access.principals import is_token
from slipway.security.outgoing import Connections, opener, run_request

MOST_BYTES = 256 << 10
"""Largest document; a set of a hundred keys has less."""
FETCH_SECONDS = 8.0
"""Longest time for all documents of a fetch, with their names, connections and headers."""
_MOST_TOKEN_BYTES = 16 << 10
_PIECE = 16 << 10

T = TypeVar("T")


class FetchError(Exception):
    """A document cannot be fetched; the message has no content of it."""


def fetch_json(
    url: str, connections: Connections, *, ca_file: Path | None = None, token_file: Path | None = None
) -> dict[str, Any]:
    """Return the JSON object at an address.

    Args:
        url: Its address.
        connections: Makes the connection.
        ca_file: Authorities of its certificate; the system's by default.
        token_file: A bearer token to show there, as the API server of Kubernetes may ask for one.

    Raises:
        FetchError: It cannot be fetched, or is no JSON object within the limits.
    """
    try:
        headers = {"Accept": "application/json", "User-Agent": "slipway"}
        if token_file is not None:
            token = read_regular(token_file, largest=_MOST_TOKEN_BYTES).decode("ascii", "replace").strip()
            if not is_token(token):  # the errors of http.client would repeat it
                raise FetchError(f"{token_file} holds no token")
            headers["Authorization"] = f"Bearer {token}"
        request = urllib.request.Request(check_url(url), headers=headers)  # noqa: S310 - check_url lets only HTTP pass
        context = ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))
        document = parse_json(_read(opener(url, connections, context), request), most_values=MOST_BYTES // 16)
    except urllib.error.HTTPError as error:
        error.close()
        raise FetchError(f"{url} responded with status {error.code}") from error
    except urllib.error.URLError as error:
        raise FetchError(f"{url} cannot be reached: {error.reason}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise FetchError(f"{url} cannot be read: {error or type(error).__name__}") from error
    if not isinstance(document, dict):
        raise FetchError(f"{url} is not a JSON object")
    return document


async def run_fetch(fetch: Callable[[Connections], T]) -> T:
    """Run a fetch in a thread of its own, which holds up neither other work nor the end of the process.

    Raises:
        FetchError: It took longer than :data:`FETCH_SECONDS`, or the fetch raised it.
    """
    try:
        return await run_request(fetch, seconds=FETCH_SECONDS, thread="slipway-issuer")
    except TimeoutError as error:
        raise FetchError(f"it took longer than {FETCH_SECONDS:g} s") from error


def _read(opening: urllib.request.OpenerDirector, request: urllib.request.Request) -> bytes:
    data = bytearray()
    with opening.open(request, timeout=FETCH_SECONDS) as response:
        if response.status != http.HTTPStatus.OK:
            raise ValueError(f"its status is {response.status}")
        while piece := response.read1(_PIECE):
            data += piece
            if len(data) > MOST_BYTES:
                raise ValueError(f"it has more than {MOST_BYTES} bytes")
    return bytes(data)
