"""Security of a server: its certificates, its ports, and whom it admits."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from slipway.errors import ConfigurationError
from slipway.rpc.serving import listen
from slipway.security.access.access_file import AccessFile, Everyone, Nobody
from slipway.security.access.callers import Authenticator
from slipway.security.interceptor import AccessInterceptor
from slipway.security.limits import Limits
from slipway.security.renewing import RenewingServer
from slipway.security.tls import is_private_address
from slipway.settings.security import Security, TlsFiles

if TYPE_CHECKING:
    import grpc

log = logging.getLogger("slipway.security")


@dataclass(frozen=True)
class ServerSecurity:
    """The listening and access settings of a server; by default a private one, as on a unix socket.

    Attributes:
        tls: Certificate and key; with an authority, clients must have certificates too.
        authenticator: Identifies callers.
        limits: Limits of one client.
        health_address: ``HOST:PORT`` of a second port without TLS, for health checks only: Kubernetes' probes speak no TLS.
            Empty for none.
        token_address: ``HOST:PORT`` of a second TLS port that requires no client certificate, for callers with a token.
            Empty for none.
        http_address: ``HOST:PORT`` of the port for JSON over HTTP; with TLS where the main port has it. Empty for none.
        http_names: Names by which clients call that port, besides its own.
        audits: Whether to write the audit log.
    """

    tls: TlsFiles | None = None
    authenticator: Authenticator = field(default_factory=Everyone)
    limits: Limits = field(default_factory=Limits)
    health_address: str = ""
    token_address: str = ""
    http_address: str = ""
    http_names: frozenset[str] = frozenset()
    audits: bool = False

    def __post_init__(self) -> None:
        if self.health_address and self.tls is None:
            raise ConfigurationError(
                "a port for health checks is needed only with TLS",
                reason="TLS_INVALID",
                remedy="give certificates, or leave out --health-listen: the main port answers plain probes",
            )
        if self.token_address and (self.tls is None or self.tls.ca is None):
            raise ConfigurationError(
                "a port for clients without a certificate is needed only where the main one demands certificates",
                reason="TLS_INVALID",
                remedy="give --tls-ca-file, or leave out --token-listen: the main port takes tokens",
            )

    def names_over_http(self) -> frozenset[str] | None:
        """Return the only names by which the port for HTTP may be called; None if all may, because callers show who they are.

        Without an access file, the address alone lets callers in, and a page can give its own name this address.
        """
        if not isinstance(self.authenticator, Everyone):
            return None
        names = ("localhost", self.http_address.rpartition(":")[0], *self.http_names)
        return frozenset(name.lower() for name in names if name)

    def interceptor(self) -> AccessInterceptor:
        """Return the interceptor that checks this server's calls."""
        return AccessInterceptor(
            self.authenticator, encrypted_only=self.tls is not None, limits=self.limits, audits=self.audits
        )

    def server(self, *checks: grpc.aio.ServerInterceptor[Any, Any]) -> RenewingServer:
        """Return a server without services whose calls are checked by this security, then by more checks."""
        return RenewingServer((self.interceptor(), *checks))

    def listen(self, server: RenewingServer, address: str) -> int:
        """Bind a server to its address, and to those for health checks and tokens; return the port of the first.

        A unix socket has no TLS: its clients use none, as it does not leave the machine.

        Raises:
            ServiceError: An address cannot be bound.
            ConfigurationError: reason ``TLS_INVALID``.
        """
        if self.health_address:
            listen(server, self.health_address)
        if self.token_address and self.tls is not None:
            server.add_tls_port(self.token_address, replace(self.tls, ca=None))
        if self.tls is None:
            return listen(server, address)
        return server.add_tls_port(address, self.tls)


def coordinator_security(
    security: Security,
    *,
    address: str,
    health_address: str = "",
    token_address: str = "",
    http_address: str = "",
    http_names: Collection[str] = (),
    allow_anonymous: bool = False,
) -> ServerSecurity:
    """Return the security of a coordinator.

    Raises:
        ConfigurationError: reason ``ACCESS_OPEN`` if it is reachable over a network without an access file; reason
            ``ACCESS_INVALID`` or ``TLS_INVALID`` for files that cannot be used.
    """
    authenticator: Authenticator
    public = next((each for each in (address, http_address) if each and not is_private_address(each)), "")
    if security.access_file is not None:
        authenticator = AccessFile(security.access_file)
    elif allow_anonymous or not public:
        authenticator = Everyone()
    else:
        raise ConfigurationError(
            f"every caller that reaches {public} could control this coordinator",
            reason="ACCESS_OPEN",
            remedy="give --access-file, listen on 127.0.0.1, or give --allow-anonymous on a private network",
            about={"address": public},
        )
    if security.tls is None and public:
        log.warning(f"calls to {public} are not encrypted: give --tls-cert-file and --tls-key-file")
    return ServerSecurity(
        tls=security.tls,
        authenticator=authenticator,
        health_address=health_address,
        token_address=token_address,
        http_address=http_address,
        http_names=frozenset(http_names),
        audits=True,
    )


def worker_security(security: Security, *, address: str, health_address: str = "") -> ServerSecurity:
    """Return the security of a worker's own server: on a network and without an access file, it serves only health checks.

    Raises:
        ConfigurationError: reason ``ACCESS_INVALID`` or ``TLS_INVALID`` for files that cannot be used.
    """
    authenticator: Authenticator = Everyone() if is_private_address(address) else Nobody()
    if security.access_file is not None:
        authenticator = AccessFile(security.access_file)
    # A worker may have only an authority, to verify its coordinator.
    tls = security.tls if security.tls_cert_file is not None else None
    return ServerSecurity(tls=tls, authenticator=authenticator, health_address=health_address, audits=True)
