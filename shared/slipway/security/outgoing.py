"""Requests over HTTP to addresses that the operator names: without redirects, within a limit of time, in threads of their own.

Timeouts of sockets begin anew with every byte, so a peer that sends slowly could hold a thread forever. After its time a request
fails, and its connection is shut down, which ends the thread. A thread that looks up a name cannot be ended, nor one that connects,
but both end by themselves and then send nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import urllib.request
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

from slipway.texts import hidden_character

T = TypeVar("T")


class Connections:
    """Makes the connections of one request; another thread can end them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = False
        self._open: list[socket.socket] = []

    def connect(self, *arguments: Any) -> socket.socket:
        """Connect, as :func:`socket.create_connection` does.

        Raises:
            OSError: There is no connection, or the request has ended.
        """
        connection = socket.create_connection(*arguments)
        with self._lock:
            if not self._ended:
                self._open.append(connection.dup())  # TLS detaches the other one while it shakes hands
                return connection
        connection.close()
        raise TimeoutError("the request has ended")

    def end(self) -> None:
        """Shut all connections down, so that threads that wait for them go on and fail."""
        with self._lock:
            self._ended = True
            for connection in self._open:
                with connection, contextlib.suppress(OSError):  # the peer has closed it
                    connection.shutdown(socket.SHUT_RDWR)
            self._open.clear()


async def run_request(request: Callable[[Connections], T], *, seconds: float, thread: str) -> T:
    """Run a request in a thread of its own, which holds up neither other work nor the end of the process.

    Args:
        request: Makes its connections by what it is given.
        seconds: How long it may take, with look-ups of names, connections and headers.
        thread: Name of the thread.

    Raises:
        TimeoutError: It took longer. What the request raises is raised, too.
    """
    connections = Connections()
    try:
        async with asyncio.timeout(seconds):
            return await _run_in_thread(lambda: request(connections), thread)
    finally:
        connections.end()


async def _run_in_thread(function: Callable[[], T], name: str) -> T:
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

    threading.Thread(target=work, name=name, daemon=True).start()
    return await done


def opener(url: str, connections: Connections, context: ssl.SSLContext) -> urllib.request.OpenerDirector:
    """Return what opens requests to one address, without redirects.

    Args:
        url: The address.
        connections: Makes the connections.
        context: Checks the certificate of the address.
    """

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

    handlers: list[Any] = [Http, Https(context=context), _NoRedirect]
    if is_loopback(urlsplit(url).hostname or ""):
        # Plain HTTP is allowed there because it stays on this machine; a proxy would see the request, and could answer it.
        handlers.append(urllib.request.ProxyHandler({}))
    return urllib.request.build_opener(*handlers)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Takes a redirect for the error that it is here: it would lead to an address that nobody configured."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def check_address(url: str, *, what: str, allow_http: bool = False) -> str:
    """Return an address that requests may be sent to: HTTPS, or plain HTTP on this machine.

    Args:
        url: The address.
        what: What it is, for the error.
        allow_http: Whether plain HTTP is allowed to any machine.

    Raises:
        ValueError: It is another one; the message does not repeat it, as it may hold a password.
    """
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - raises ValueError for an impossible port
    except ValueError:
        raise ValueError(f"{what} cannot be read: its host or port is impossible") from None
    host = parts.hostname or ""
    if (
        parts.username is not None
        or parts.password is not None
        or parts.fragment
        or hidden_character(url)
        or " " in url
    ):
        raise ValueError(f"{what} has no user, password, fragment or space")
    plain = parts.scheme == "http" and (allow_http or is_loopback(host))
    if not host or not (parts.scheme == "https" or plain):
        raise ValueError(f"{what} begins with https:// (http:// on loopback alone)")
    return url


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
