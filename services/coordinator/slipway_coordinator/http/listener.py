"""The port for HTTP: its connections, their limits, and certificates that are renewed."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import ssl
from collections import Counter
from collections.abc import Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from slipway.rpc.serving import check_port, listen_error
from slipway.security.reloading import Reloaded
from slipway.security.tls import server_context
from slipway.settings.security import TlsFiles
from slipway_coordinator.http.application import HttpApplication
from slipway_coordinator.http.requests import Receive, Scope, Send
from slipway_coordinator.leadership.forwarding import listening_socket

_HEADER_SECONDS = 20.0
"""How long a connection may take for the head of its next request; a connection without a request is idle for as long."""
_MOST_CONNECTIONS, _MOST_OF_A_HOST = 4096, 512
_NAMES = frozenset({"DNS", "URI"})

# Broken requests are answered, and are not worth a warning each.
logging.getLogger("uvicorn.error").setLevel(logging.ERROR)


class HttpListener:
    """Serves an application at an address from :meth:`start` to :meth:`stop`.

    Args:
        application: What answers.
        address: ``HOST:PORT``.
        tls: Certificate and key; with an authority, clients may show certificates of it.

    Raises:
        ServiceError: reason ``REQUEST_INVALID`` if the address cannot be bound.
        ConfigurationError: reason ``TLS_INVALID``.
    """

    def __init__(self, application: HttpApplication, address: str, tls: TlsFiles | None) -> None:
        check_port(address)
        context = None if tls is None else _RenewedContext.of(tls)
        self._application = application
        try:
            self._socket = listening_socket(address)
        except (OSError, ValueError) as error:
            raise listen_error(address, str(error)) from error
        self.port = int(self._socket.getsockname()[1])
        config = uvicorn.Config(
            application,
            http=_Connection,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=int(_HEADER_SECONDS),
            timeout_graceful_shutdown=1,
            ssl_context_factory=None if context is None else lambda *_: context,
        )
        self._server = _Server(config)
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Accept connections from now on."""
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started:
            if self._serving.done():
                await self._serving  # it says why
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        """End all calls and connections."""
        if self._serving is None:
            self._socket.close()
            return
        self._server.should_exit = True
        await self._application.close()
        await self._serving


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the coordinator."""
        yield


class _Connection(H11Protocol):
    """A connection that tells the application its certificate, and ends if it stays without a request."""

    def connection_made(self, transport: Any) -> None:
        """Admit a connection, or reset it where there are too many."""
        super().connection_made(transport)
        self._requests = 0
        self._idle: asyncio.TimerHandle | None = None
        hosts = Counter(one.client[0] for one in self.connections if isinstance(one, _Connection) and one.client)
        if len(self.connections) > _MOST_CONNECTIONS or (self.client and hosts[self.client[0]] > _MOST_OF_A_HOST):
            transport.abort()
            return
        state = {"certificate_names": _certificate_names(transport), "abort": transport.abort}
        self.app_state = {**self.app_state, **state}
        self.app = functools.partial(self._serve, self.app)
        self._wait_for_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        super().connection_lost(exc)
        self._stop_waiting()

    async def _serve(self, app: Any, scope: Scope, receive: Receive, send: Send) -> None:
        self._requests += 1
        self._stop_waiting()
        try:
            await app(scope, receive, send)
        finally:
            self._requests -= 1
            self._wait_for_request()

    def _wait_for_request(self) -> None:
        """End the connection unless its next request has begun in time, whatever it sends meanwhile."""
        self._stop_waiting()
        if not self._requests and not self.transport.is_closing():
            self._look_later()

    def _look_later(self) -> None:
        unsent = self.transport.get_write_buffer_size()
        self._idle = self.loop.call_later(_HEADER_SECONDS, self._end_if_idle, unsent)

    def _end_if_idle(self, unsent: int) -> None:
        """End the connection unless its client still reads the last response, which is sent in the background."""
        if 0 < self.transport.get_write_buffer_size() < unsent:
            self._look_later()
        else:
            self.transport.abort()

    def _stop_waiting(self) -> None:
        if self._idle is not None:
            self._idle.cancel()


class _RenewedContext(ssl.SSLContext):
    """Gives each new connection the present certificates."""

    _contexts: Reloaded[ssl.SSLContext]

    @classmethod
    def of(cls, files: TlsFiles) -> _RenewedContext:
        """Return the context of some files.

        Raises:
            ConfigurationError: reason ``TLS_INVALID``.
        """
        context = cls(ssl.PROTOCOL_TLS_SERVER)
        context._contexts = Reloaded(files.paths(), lambda: server_context(files))
        return context

    def wrap_bio(self, *arguments: Any, **options: Any) -> ssl.SSLObject:
        """Begin TLS on a new connection."""
        return self._contexts.current().wrap_bio(*arguments, **options)


def _certificate_names(transport: Any) -> list[str]:
    """Return the DNS and URI names in the client's certificate, which TLS has verified."""
    certificate = transport.get_extra_info("peercert") or {}
    return [value for kind, value in certificate.get("subjectAltName", ()) if kind in _NAMES]
