"""Fetch an issuer's JSON documents: HTTPS within limits of time and size, without redirects, in threads of their own."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from slipway.files.json_documents import parse_json
from slipway.files.regular_file import read_regular
from slipway.security.access.issuers.settings import check_url
from slipway.security.access.principals import is_token

MOST_BYTES = 256 << 10
"""Largest document; a set of a hundred keys has less."""
FETCH_SECONDS = 8.0
"""Longest time for one document, and for each wait for its next bytes."""
_MOST_TOKEN_BYTES = 16 << 10
_PIECE = 16 << 10

T = TypeVar("T")


class FetchError(Exception):
    """A document cannot be fetched; the message has no content of it."""


def fetch_json(url: str, *, ca_file: Path | None = None, token_file: Path | None = None) -> dict[str, Any]:
    """Return the JSON object at an address.

    Args:
        url: Its address.
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
        opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=context), _NoRedirect)
        document = parse_json(_read(opener, request), most_values=MOST_BYTES // 16)
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


async def run_in_thread(function: Callable[[], T]) -> T:
    """Run a blocking function in a thread of its own, which neither holds up other work nor the end of the process."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def finish(result: T | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]  # with no error there is a result

    def work() -> None:
        result, problem = None, None
        try:
            result = function()
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            problem = error
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(finish, result, problem)

    threading.Thread(target=work, name="slipway-issuer", daemon=True).start()
    return await done


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Takes a redirect for the error that it is here: it would lead to an address that nobody configured."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def _read(opener: urllib.request.OpenerDirector, request: urllib.request.Request) -> bytes:
    until = time.monotonic() + FETCH_SECONDS
    data = bytearray()
    with opener.open(request, timeout=FETCH_SECONDS) as response:
        if response.status != http.HTTPStatus.OK:
            raise ValueError(f"its status is {response.status}")
        while piece := response.read1(_PIECE):
            data += piece
            if len(data) > MOST_BYTES:
                raise ValueError(f"it has more than {MOST_BYTES} bytes")
            if time.monotonic() > until:
                raise TimeoutError(f"it took longer than {FETCH_SECONDS:g} s")
    return bytes(data)
