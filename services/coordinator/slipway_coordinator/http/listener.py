"""The port for HTTP: its connections, their limits, and certificates that are renewed."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import ssl
from collections import Counter
from collections.abc import Iterator, MutableMapping
from typing import Any, cast

import h11
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
_HANDSHAKE_SECONDS = 10.0
_PATIENCE_SECONDS, _BYTES_PER_SECOND = 60.0, 16 << 10
"""How long a client may read nothing of the rest of its response, and the average speed after that, as for a stream of content."""
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
        self._accepted = _Accepted()
        try:
            self._socket = listening_socket(address)
        except (OSError, ValueError) as error:
            raise listen_error(address, str(error)) from error
        self.port = int(self._socket.getsockname()[1])
        config = uvicorn.Config(
            application,
            http=cast("Any", functools.partial(_Connection, accepted=self._accepted, tls=context)),
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=int(_HEADER_SECONDS),
            timeout_graceful_shutdown=1,
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
        self._accepted.end()
        await self._serving


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the coordinator."""
        yield


class _Accepted:
    """The accepted connections of each host, from before their TLS handshake."""

    def __init__(self) -> None:
        self._hosts: dict[_Connection, str] = {}
        self._counts: Counter[str] = Counter()
        self._is_ending = False
        self.handshakes: set[asyncio.Task[None]] = set()

    def add(self, connection: _Connection, host: str) -> bool:
        """Count a connection; return whether there is room for it."""
        self._hosts[connection] = host
        self._counts[host] += 1
        if self._is_ending:
            return False
        return len(self._hosts) <= _MOST_CONNECTIONS and self._counts[host] <= _MOST_OF_A_HOST

    def remove(self, connection: _Connection) -> None:
        """Forget a connection that has ended; again does nothing."""
        host = self._hosts.pop(connection, None)
        if host is None:
            return
        self._counts[host] -= 1
        if not self._counts[host]:
            del self._counts[host]

    def end(self) -> None:
        """Have room for none from now on, and end those in their handshake."""
        self._is_ending = True
        for handshake in self.handshakes:
            handshake.cancel()


class _Connection(H11Protocol):
    """A connection that tells the application its certificate, and ends if it stays without a request.

    It makes its TLS handshake itself: asyncio and uvicorn would not know of the connection before.

    Args:
        accepted: Counts it.
        tls: Gives it a certificate; None for plain HTTP.
        options: As uvicorn gives them.
    """

    def __init__(self, *, accepted: _Accepted, tls: ssl.SSLContext | None, **options: Any) -> None:
        super().__init__(**options)
        self._accepted, self._tls = accepted, tls
        self._wire: Any = None
        self._has_begun, self._early = False, b""
        self._requests = 0
        self._idle: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Admit a connection, or reset it where there are too many."""
        self._wire = transport
        if not self._accepted.add(self, str((transport.get_extra_info("peername") or ("",))[0])):
            transport.abort()
            return
        if self._tls is None:
            self._begin(transport)
            return
        transport.pause_reading()
        handshake = self.loop.create_task(self._shake_hands(transport, self._tls))
        self._accepted.handshakes.add(handshake)
        handshake.add_done_callback(self._accepted.handshakes.discard)

    async def _shake_hands(self, wire: Any, tls: ssl.SSLContext) -> None:
        try:
            transport = await self.loop.start_tls(
                wire, self, tls, server_side=True, ssl_handshake_timeout=_HANDSHAKE_SECONDS
            )
        except OSError:  # of a broken handshake too: the client learns why by its alert
            self._accepted.remove(self)
            return
        except BaseException:
            wire.abort()
            self._accepted.remove(self)
            raise
        if transport is None or transport.is_closing():
            wire.abort()
            self._accepted.remove(self)
            return
        self._begin(transport)
        early, self._early = self._early, b""
        if early:
            self.data_received(early)

    def _begin(self, transport: Any) -> None:
        """Take requests from now on."""
        self._has_begun = True
        super().connection_made(transport)
        state = {"certificate_names": _certificate_names(transport), "abort": transport.abort}
        self.app_state = {**self.app_state, **state}
        self.app = functools.partial(self._serve, self.app)
        self._wait_for_request()

    def data_received(self, data: bytes) -> None:
        """Take bytes; those that come with the end of the handshake wait for the begin."""
        if self._has_begun:
            super().data_received(data)
        else:
            self._early += data

    def handle_events(self) -> None:
        """Handle what has arrived; end the connection where uvicorn would answer in the middle of another response."""
        try:
            super().handle_events()
        except h11.ProtocolError:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._accepted.remove(self)
        if self._has_begun:
            super().connection_lost(exc)
        self._stop_waiting()

    async def _serve(self, app: Any, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: MutableMapping[str, Any]) -> None:
            try:
                async with asyncio.timeout(_PATIENCE_SECONDS):  # until there is room behind what is not read yet
                    await send(message)
            except TimeoutError:
                self.transport.abort()

        self._requests += 1
        self._stop_waiting()
        try:
            await app(scope, receive, send_in_time)
        finally:
            self._requests -= 1
            self._wait_for_request()

    def _wait_for_request(self) -> None:
        """End the connection unless its next request has begun in time, whatever it sends meanwhile."""
        self._stop_waiting()
        if not self._requests and not self.transport.is_closing():
            self._look_later(self.loop.time(), self._unsent())

    def _look_later(self, since: float, unsent: int) -> None:
        self._idle = self.loop.call_later(_HEADER_SECONDS, self._end_if_idle, since, unsent)

    def _end_if_idle(self, since: float, unsent: int) -> None:
        """End the connection unless its client still reads the last response, which is sent in the background."""
        left = self._unsent()
        allowed = _PATIENCE_SECONDS + (unsent - left) / _BYTES_PER_SECOND
        if left and self.loop.time() - since < allowed:
            self._look_later(since, unsent)
        else:
            self.transport.abort()

    def _unsent(self) -> int:
        """Return the bytes of responses that the system has not taken: in TLS, and behind it."""
        behind = self._wire.get_write_buffer_size() if self._wire is not self.transport else 0
        return int(self.transport.get_write_buffer_size() + behind)

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
