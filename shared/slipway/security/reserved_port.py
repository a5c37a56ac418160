"""Keep a TCP port for this process while its listeners change."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator

from slipway.rpc.serving import cannot_listen, check_port

_ANY = {"", "::", "0.0.0.0"}  # noqa: S104 - compared with, not listened on
_ABSENT = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}


class ReservedPort:
    """A port that is bound, but not listened on, by sockets of its own.

    Two listeners can have one port only with SO_REUSEPORT, and then a second server that is started by mistake would get half of the
    connections. So a server binds its port exclusively first, which fails while another one listens, and opens it in :meth:`opened`.

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
            raise cannot_listen(address, str(error)) from error
        self.address = f"{host}:{self._sockets[0].getsockname()[1]}"

    def close(self) -> None:
        """Give the port up."""
        for each in self._sockets:
            each.close()

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
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
