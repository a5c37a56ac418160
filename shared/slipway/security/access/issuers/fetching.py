"""Fetch an issuer's JSON documents: HTTPS within limits of time and size, without redirects, in threads of their own.

Timeouts of sockets begin anew with every byte, so a peer that sends slowly could hold a thread forever. After
:data:`FETCH_SECONDS` the fetch fails, and its connection is shut down, which ends the thread. A thread that looks up a name cannot
be ended, nor one that connects, but both end by themselves and then send nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from slipway.files.json_documents import parse_json
from slipway.files.regular_file import read_regular
from slipway.security.access.issuers.settings import check_url, is_loopback
from slipway.security.access.principals import is_token

MOST_BYTES = 256 << 10
"""Largest document; a set of a hundred keys has less."""
FETCH_SECONDS = 8.0
"""Longest time for all documents of a fetch, with their names, connections and headers."""
_MOST_TOKEN_BYTES = 16 << 10
_PIECE = 16 << 10

T = TypeVar("T")


class FetchError(Exception):
    """A document cannot be fetched; the message has no content of it."""


class Connections:
    """Makes the connections of one fetch; another thread can end them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = False
        self._open: list[socket.socket] = []

    def connect(self, *arguments: Any) -> socket.socket:
        """Connect, as :func:`socket.create_connection` does.

        Raises:
            OSError: There is no connection, or the fetch has ended.
        """
        connection = socket.create_connection(*arguments)
        with self._lock:
            if not self._ended:
                self._open.append(connection.dup())  # TLS detaches the other one while it shakes hands
                return connection
        connection.close()
        raise TimeoutError("the fetch has ended")

    def end(self) -> None:
        """Shut all connections down, so that threads that wait for them go on and fail."""
        with self._lock:
            self._ended = True
            for connection in self._open:
                with connection, contextlib.suppress(OSError):  # the peer has closed it
                    connection.shutdown(socket.SHUT_RDWR)
            self._open.clear()


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
        document = parse_json(_read(_opener(url, connections, ca_file), request), most_values=MOST_BYTES // 16)
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
    connections = Connections()
    try:
        async with asyncio.timeout(FETCH_SECONDS):
            return await _run_in_thread(lambda: fetch(connections))
    except TimeoutError as error:
        raise FetchError(f"it took longer than {FETCH_SECONDS:g} s") from error
    finally:
        connections.end()


async def _run_in_thread(function: Callable[[], T]) -> T:
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


def _opener(url: str, connections: Connections, ca_file: Path | None) -> urllib.request.OpenerDirector:
    def connection(kind: type[http.client.HTTPConnection], *arguments: Any, **settings: Any) -> Any:
        made = kind(*arguments, **settings)
        made._create_connection = connections.connect  # type: ignore[attr-defined]  # before TLS, and to a proxy, too
        return made

    class Http(urllib.request.HTTPHandler):
        def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
            return self.do_open(partial(connection, http.client.HTTPConnection), request)

    class Https(urllib.request.HTTPSHandler):
        def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
            return self.do_open(partial(connection, http.client.HTTPSConnection), request, context=context)

    context = ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))
    handlers: list[Any] = [Http, Https(context=context), _NoRedirect]
    if is_loopback(urlsplit(url).hostname or ""):
        # Plain HTTP is allowed there because it stays on this machine; a proxy would see the token, and could answer with its keys.
        handlers.append(urllib.request.ProxyHandler({}))
    return urllib.request.build_opener(*handlers)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Takes a redirect for the error that it is here: it would lead to an address that nobody configured."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def _read(opener: urllib.request.OpenerDirector, request: urllib.request.Request) -> bytes:
    data = bytearray()
    with opener.open(request, timeout=FETCH_SECONDS) as response:
        if response.status != http.HTTPStatus.OK:
            raise ValueError(f"its status is {response.status}")
        while piece := response.read1(_PIECE):
            data += piece
            if len(data) > MOST_BYTES:
                raise ValueError(f"it has more than {MOST_BYTES} bytes")
    return bytes(data)
