"""Identify the caller by a bearer token, or by the names in the connection's certificate."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from slipway.errors import ServiceError
from slipway.rpc.serving import Context
from slipway.security.access.principals import Principal
from slipway.security.access.projects import Projects
from slipway.security.access.refusals import unauthenticated_error

_BEARER = "bearer "
_SCHEME = "transport_security_type"
_NAMES = "x509_subject_alternative_name"

ANONYMOUS = Principal("anonymous", frozenset())

Metadata = Sequence[tuple[str, str | bytes]]


class Authenticator(Protocol):
    """Identifies callers by credentials."""

    async def identify(self, *, token: str, certificate_names: Sequence[str]) -> Principal:
        """Return the principal; raise ServiceError ``UNAUTHENTICATED`` without one. It may wait; the event loop never does."""
        ...

    def projects(self) -> Projects:
        """Return the limits of projects."""
        ...


class Callers:
    """Identifies the caller of a gRPC call.

    Args:
        authenticator: Knows the principals.
        encrypted_only: Refuse connections without TLS.
    """

    def __init__(self, authenticator: Authenticator, *, encrypted_only: bool = False) -> None:
        self._authenticator = authenticator
        self._encrypted_only = encrypted_only

    async def identify(self, context: Context) -> Principal:
        """Return the caller.

        Raises:
            ServiceError: reason ``UNAUTHENTICATED``.
        """
        identity = context.auth_context() or {}
        encrypted = _SCHEME in identity and identity[_SCHEME] != [b"insecure"]
        if self._encrypted_only and not encrypted:
            raise unauthenticated_error("this port answers only health checks without TLS")
        token = bearer_token(_metadata(context))
        return await self._authenticator.identify(token=token, certificate_names=certificate_names(context))

    async def identify_if_shown(self, context: Context) -> Principal:
        """Return the caller of a call that is open to everybody, without waiting.

        Anonymous are callers without a valid token or certificate, and those whose issuer's keys have to be fetched first.
        """
        if not certificate_names(context) and all(key != "authorization" for key, _ in _metadata(context)):
            return ANONYMOUS
        try:
            async with asyncio.timeout(0):
                return await self.identify(context)
        except (ServiceError, TimeoutError):
            return ANONYMOUS


def certificate_names(context: Context) -> list[str]:
    """Return the DNS and URI names in the client's certificate."""
    return [name.decode(errors="replace") for name in (context.auth_context() or {}).get(_NAMES, ())]


def host_of(context: Context) -> str:
    """Return the address a call comes from, without the port."""
    return str(context.peer()).rpartition(":")[0]


def bearer_token(metadata: Metadata) -> str:
    """Return the token of a call; empty without one.

    Raises:
        ServiceError: reason ``UNAUTHENTICATED`` for another scheme, or several tokens.
    """
    values = [value for key, value in metadata if key == "authorization"]
    if not values:
        return ""
    value = values[0]
    if len(values) > 1 or not isinstance(value, str) or not value.lower().startswith(_BEARER):
        raise unauthenticated_error("authorization is not one bearer token")
    return value[len(_BEARER) :].strip()


def _metadata(context: Context) -> Metadata:
    return tuple(context.invocation_metadata() or ())
