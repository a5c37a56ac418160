"""A gRPC server whose TLS certificates are renewed by new listeners, on a port that stays reserved for this process.

gRPC can replace the certificates of a listener, but frees the old ones while other threads still begin handshakes with them, which ends the
process (https://github.com/grpc/grpc/issues/36693). So certificates of a listener never change here: for renewed files, a second
listener takes the port over, and the first one ends with the calls that it serves.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import grpc

from slipway.errors import ModelExportError
from slipway.rpc.serving import SERVER_OPTIONS, check_port, listen, listen_error
from slipway.security.reloading import Reloaded
from slipway.security.tls import load, server_credentials
from slipway.settings.security import TlsFiles

log = logging.getLogger("slipway.security")

LOOK_SECONDS = 0.5
_LONGEST_CALL_SECONDS = 3600.0
"""How long calls that began before a renewal, such as an upload, may continue."""

_ANY = {"", "::", "0.0.0.0"}  # noqa: S104 - compared with, not listened on
_ABSENT = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}


class RenewingServer(grpc.aio.Server):
    """One server at several ports, with and without TLS; each port is a gRPC server with the same services.

    Args:
        interceptors: Checks of every call, at every port.
    """

    def __init__(self, interceptors: Sequence[grpc.aio.ServerInterceptor[Any, Any]] = ()) -> None:
        self._interceptors = tuple(interceptors)
        self._services: list[Callable[[grpc.aio.Server], None]] = []
        self._methods: dict[str, Any] = {}
        self._plain = self._new_server(shared=False)
        self._listeners: list[_TlsListener] = []
        self._renewal: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Iterable[grpc.GenericRpcHandler[Any, Any]]) -> None:
        """Add services to every port."""
        handlers = tuple(generic_rpc_handlers)
        self._add(lambda server: server.add_generic_rpc_handlers(handlers))

    def add_registered_method_handlers(self, service_name: str, method_handlers: dict[str, Any]) -> None:
        """Add services to every port."""
        self._add(lambda server: server.add_registered_method_handlers(service_name, method_handlers))  # type: ignore[attr-defined]
        self._methods.update({f"/{service_name}/{name}": handler for name, handler in method_handlers.items()})

    async def checked_handler(self, details: grpc.HandlerCallDetails) -> Any:
        """Return the handler of a method behind the checks of every call, for calls that do not come over gRPC; None if there is none."""

        async def find(details: grpc.HandlerCallDetails) -> Any:
            return self._methods.get(str(details.method))

        continuation: Any = find
        for interceptor in reversed(self._interceptors):
            continuation = functools.partial(interceptor.intercept_service, continuation)
        return await continuation(details)

    def add_insecure_port(self, address: str) -> int:
        """Bind an address without TLS; return its port."""
        return self._plain.add_insecure_port(address)

    def add_secure_port(self, address: str, server_credentials: grpc.ServerCredentials) -> int:
        """Bind an address with credentials that stay; return its port. :meth:`add_tls_port` renews them."""
        return self._plain.add_secure_port(address, server_credentials)

    def add_tls_port(self, address: str, files: TlsFiles) -> int:
        """Bind an address with TLS; return its port.

        Raises:
            ServiceError: reason ``REQUEST_INVALID`` if the address cannot be bound.
            ConfigurationError: reason ``TLS_INVALID``.
        """
        self._listeners.append(_TlsListener(address, files, lambda: self._new_server(shared=True)))
        return self._listeners[-1].port

    async def start(self) -> None:
        """Serve from now on, and look for renewed files."""
        await self._plain.start()
        for listener in self._listeners:
            await listener.start()
        if self._listeners:
            self._renewal = asyncio.create_task(self._renew())

    async def stop(self, grace: float | None = None) -> None:
        """Stop; calls have the grace in seconds to end, none if it is None."""
        if self._renewal is not None:
            self._stopping.set()
            await self._renewal  # do not stop in the middle of a renewal
            self._renewal = None
        await asyncio.gather(self._plain.stop(grace), *(each.stop(grace) for each in self._listeners))

    async def wait_for_termination(self, timeout: float | None = None) -> bool:
        """Wait until it is stopped."""
        return await self._plain.wait_for_termination(timeout)

    def _new_server(self, *, shared: bool) -> grpc.aio.Server:
        options = list({**dict(SERVER_OPTIONS), "grpc.so_reuseport": int(shared)}.items())
        server = grpc.aio.server(interceptors=self._interceptors, options=options)
        for add in self._services:
            add(server)
        return server

    def _add(self, add: Callable[[grpc.aio.Server], None]) -> None:
        self._services.append(add)
        add(self._plain)

    async def _renew(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), LOOK_SECONDS)
                return
            for listener in self._listeners:
                try:
                    await listener.renew()
                except Exception:  # the previous listener keeps serving, and the next look tries again
                    log.exception("the certificates could not be renewed")


class _TlsListener:
    """The server at one port with TLS: the current one, and earlier ones that still serve calls."""

    def __init__(self, address: str, files: TlsFiles, new_server: Callable[[], grpc.aio.Server]) -> None:
        self._files = Reloaded(files.paths(), lambda: load(files))
        self._used = self._files.current()
        self._new_server = new_server
        self._reserved = ReservedPort(address)
        self._earlier: dict[asyncio.Task[None], grpc.aio.Server] = {}
        try:
            self._current = self._bind()
        except BaseException:
            self._reserved.close()
            raise

    @property
    def port(self) -> int:
        return int(self._reserved.address.rpartition(":")[2])

    async def start(self) -> None:
        await self._current.start()

    async def renew(self) -> None:
        """Serve new connections with the present files; if that fails, the previous listener stays until the next look."""
        now = await asyncio.to_thread(self._files.current)
        if now == self._used:
            return
        before, used = self._current, self._used
        self._used = now
        try:
            self._current = self._bind()
        except (ModelExportError, RuntimeError) as error:
            self._used = used
            log.error(f"the listener of before stays in use: {error}")
            return
        await self._current.start()
        ending = asyncio.create_task(before.stop(_LONGEST_CALL_SECONDS))
        self._earlier[ending] = before
        ending.add_done_callback(lambda task: self._earlier.pop(task, None))
        log.info(f"{self._reserved.address}: new connections get the renewed certificate")

    async def stop(self, grace: float | None) -> None:
        self._reserved.close()
        earlier = dict(self._earlier)
        for task in earlier:
            task.cancel()
        await asyncio.gather(*earlier, return_exceptions=True)
        await asyncio.gather(*(each.stop(grace) for each in (self._current, *earlier.values())))

    def _bind(self) -> grpc.aio.Server:
        server = self._new_server()
        with self._reserved.allow_sharing():
            listen(server, self._reserved.address, credentials=server_credentials(self._used))
        return server


class ReservedPort:
    """A port that is bound, but not listened on, by sockets of its own.

    Two listeners can have one port only with SO_REUSEPORT, and then a second server that is started by mistake would get half of the
    connections. So a server binds its port exclusively first, which fails while another one listens, and opens it in :meth:`allow_sharing`.

    Args:
        address: ``HOST:PORT``; port 0 chooses a free one.

    Attributes:
        address: The same with the port that is bound.

    Raises:
        ServiceError: reason ``REQUEST_INVALID`` if the address cannot be bound.
    """

    def __init__(self, address: str) -> None:
        check_port(address)
        host, _, number = address.rpartition(":")
        self._sockets: list[socket.socket] = []
        try:
            self._bind(host.strip("[]"), int(number))
        except (OSError, ValueError) as error:
            self.close()
            raise listen_error(address, str(error)) from error
        self.address = f"{host}:{self._sockets[0].getsockname()[1]}"

    def close(self) -> None:
        """Give the port up."""
        for each in self._sockets:
            each.close()

    @contextlib.contextmanager
    def allow_sharing(self) -> Iterator[None]:
        """Let listeners with SO_REUSEPORT bind the port within the block."""
        self._share(shared=True)
        try:
            yield
        finally:
            self._share(shared=False)

    def _bind(self, host: str, port: int) -> None:
        """Bind all addresses of a host, as gRPC does; those that this machine lacks are left out."""
        if host in _ANY:
            host = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"  # noqa: S104 - the user named it
        absent: OSError | None = None
        for family, kind, protocol, _, where in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            one = socket.socket(family, kind, protocol)
            try:
                # Otherwise connections that ended a moment ago keep the port.
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, host not in _ANY)
                one.bind((where[0], port, *where[2:]))
            except OSError as error:
                one.close()
                if error.errno not in _ABSENT:
                    raise
                absent = error
            else:
                self._sockets.append(one)
                port = one.getsockname()[1]
        if not self._sockets:
            raise absent or OSError(errno.EADDRNOTAVAIL, f"{host} has no address")

    def _share(self, *, shared: bool) -> None:
        for each in self._sockets:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, shared)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shared)
