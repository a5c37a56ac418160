"""Client channels with Slipway's options and the configured certificates and token, renewed when their files change."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc

from slipway.errors import ConfigurationError, ServiceError
from slipway.security.access.principals import MOST_TOKEN_BYTES, is_token
from slipway.security.reloading import Reloaded, describe_path
from slipway.security.tls import channel_credentials, is_private_address, load
from slipway.settings.security import Security
from slipway.texts import quoted

_OLD_CHANNEL_SECONDS = 60.0
_USER = re.compile(r"\S*@")
"""Somebody's name, and perhaps a password, before a host: no address of a coordinator has one, and messages do not repeat it."""
_ADDRESS = re.compile(r"(?:(?:dns|ipv4|ipv6):(?:///)?)?(?:[^\s/:\[\]]+|\[[0-9A-Fa-f:.%]+\]):[0-9]{1,5}|unix:.+")

T = TypeVar("T")
Metadata = tuple[tuple[str, str], ...]

MAX_MESSAGE_BYTES = 64 << 20
"""Largest response that a client accepts: a page of exports."""

# A server that is pinged more often than its minimum (see slipway.rpc.serving) ends the connection: GOAWAY too_many_pings.
CHANNEL_OPTIONS: Sequence[tuple[str, int]] = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    # Despite its name, the time that each attempt to connect may take, with its TLS handshake: of three round trips, on a busy machine.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Without it, channels of one process to one address share a connection, and closing one channel ends the others' calls.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)


class Identity:
    """A client's certificates and token for one address.

    Args:
        address: Address to connect to; a unix socket is private and uses no TLS.
        security: Settings; None is a client without an identity.

    Raises:
        ConfigurationError: ``address`` is malformed (gRPC would retry it for ever); reason ``TLS_INVALID`` or ``ACCESS_INVALID``
            for files that cannot be used, or a token that would be sent unencrypted.
    """

    def __init__(self, address: str, security: Security | None) -> None:
        if not _ADDRESS.fullmatch(address):
            shown = _USER.sub("***@", address)
            raise ConfigurationError(
                f"{quoted(shown)} is not the address of a coordinator",
                remedy="write HOST:PORT, such as coordinator:7070 or [fd00::1]:7070",
                about={"address": shown},
            )
        self.address = address
        security = security or Security()
        files = None if address.startswith("unix:") else security.tls
        self._material = None if files is None else Reloaded(files.paths(), lambda: load(files))
        self._token = _token_source(security)
        self._options = [*CHANNEL_OPTIONS]
        if security.tls_server_name:
            self._options.append(("grpc.ssl_target_name_override", security.tls_server_name))  # type: ignore[arg-type]
        if self._token() and self._material is None and not is_private_address(address):
            raise ConfigurationError(
                f"a token would be sent to {address} without encryption",
                reason="TLS_INVALID",
                remedy="give --tls-ca-file, or SLIPWAY_TLS_CA_FILE",
                about={"address": address},
            )

    @property
    def encrypted(self) -> bool:
        """Whether it connects with TLS."""
        return self._material is not None

    @property
    def generation(self) -> int:
        """Number that changes with the certificates."""
        if self._material is None:
            return 0
        self._material.current()
        return self._material.generation

    def open(self, insecure: Callable[..., T], secure: Callable[..., T]) -> T:
        """Open a channel with the present certificates, by the function for one without TLS or that for one with TLS."""
        if self._material is None:
            return insecure(self.address, options=self._options)
        return secure(self.address, channel_credentials(self._material.current()), options=self._options)

    def metadata(self) -> Metadata:
        """Return the metadata of every call."""
        token = self._token()
        return (("authorization", f"Bearer {token}"),) if token else ()


class BlockingChannel:
    """A channel that is replaced when certificates change. Running calls continue over the old one. Safe for several threads."""

    def __init__(self, address: str, security: Security | None = None) -> None:
        self.identity = Identity(address, security)
        self._generation = self.identity.generation
        self._channel = self._open()
        self._closed = False
        self._lock = threading.Lock()

    def stub(self, make: Callable[[grpc.Channel], T]) -> T:
        """Return the stub of a service for the next call; never on a closed channel, which would end the process (gRPC 1.85).

        Raises:
            ServiceError: reason ``CANCELLED`` after :meth:`close`.
        """
        with self._lock:
            if self._closed:
                raise _closed_error(self.identity.address)
            generation = self.identity.generation
            if generation != self._generation:
                self._generation, self._channel = generation, self._open()
            return make(self._channel)

    def close(self) -> None:
        """Close the connection; calls under way end."""
        with self._lock:
            self._closed = True
        self._channel.close()  # outside the lock: it waits for callbacks of calls, which may ask for a stub

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Translate the ``ValueError`` that gRPC raises for a call on a channel closed meanwhile."""
        try:
            yield
        except ValueError as error:
            if self._closed:
                raise _closed_error(self.identity.address) from error
            raise

    def _open(self) -> grpc.Channel:
        return self.identity.open(grpc.insecure_channel, grpc.secure_channel)


class AsyncChannel:
    """The asyncio version of :class:`BlockingChannel`; use it as a context manager."""

    def __init__(self, address: str, security: Security | None = None) -> None:
        self.identity = Identity(address, security)
        self._generation = self.identity.generation
        self._channel: grpc.aio.Channel | None = None
        self._closed = False
        self._closing: set[asyncio.Task[None]] = set()

    def current(self) -> grpc.aio.Channel:
        """Return the channel for the next call.

        Raises:
            ServiceError: reason ``CANCELLED`` after :meth:`close`.
        """
        if self._closed:
            raise _closed_error(self.identity.address)
        generation = self.identity.generation
        if self._channel is None or generation != self._generation:
            old, self._channel = self._channel, self._open()
            self._generation = generation
            if old is not None:
                task = asyncio.create_task(old.close(_OLD_CHANNEL_SECONDS))
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)
        return self._channel

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Translate the cancellation of a call by closing the channel into an error, because its caller was not cancelled."""
        try:
            yield
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if self._closed and not (task and task.cancelling()):
                raise _closed_error(self.identity.address) from error
            raise

    async def close(self) -> None:
        """Close the connection; calls under way end."""
        self._closed = True
        for task in self._closing:
            task.cancel()
        if self._channel is not None:
            await self._channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _open(self) -> grpc.aio.Channel:
        return self.identity.open(grpc.aio.insecure_channel, grpc.aio.secure_channel)


def _closed_error(address: str) -> ServiceError:
    return ServiceError(f"the client of {address} was closed", reason="CANCELLED", remedy="make a new one")


def _token_source(security: Security) -> Any:
    """Return a function that returns the current token."""
    path = security.token_file
    if path is None:
        token = security.token.get_secret_value().strip()
        if token and not is_token(token):
            raise _token_error("SLIPWAY_TOKEN")
        return lambda: token
    return Reloaded([path], lambda: _read_token(path)).current


def _read_token(path: Path) -> str:
    try:
        token = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise _token_error(describe_path(path, "token_file"), f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise _token_error(str(path)) from None
    if not is_token(token):
        raise _token_error(str(path))
    return token


def _token_error(where: str, what: str = "holds no token") -> ConfigurationError:
    return ConfigurationError(
        f"{where} {what}",
        reason="ACCESS_INVALID",
        remedy=f"a token is one line of 16 to {MOST_TOKEN_BYTES} printable characters; slipway token makes one",
        about={"file": where},
    )
