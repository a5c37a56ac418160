"""A client's side: channels with the certificates and the token of the settings, renewed when their files change."""

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
from slipway.rpc.channel_options import CHANNEL_OPTIONS
from slipway.security.access.tokens import is_token
from slipway.security.addresses import is_private
from slipway.security.named_files import described
from slipway.security.reloading import Reloaded
from slipway.security.tls import channel_credentials, load
from slipway.settings.security import Security

_OLD_CHANNEL_SECONDS = 60.0
_ADDRESS = re.compile(r"(?:(?:dns|ipv4|ipv6):(?:///)?)?(?:[^\s/:\[\]]+|\[[0-9A-Fa-f:.%]+\]):[0-9]{1,5}|unix:.+")

T = TypeVar("T")
Metadata = tuple[tuple[str, str], ...]


class Identity:
    """What a client shows of itself, and whether it may show it there.

    Args:
        address: Where it connects to; a unix socket is private and takes no TLS.
        security: Settings; None is a client without any identity.

    Raises:
        ConfigurationError: What is no address, which would be tried again and again; reason ``TLS_INVALID`` or ``ACCESS_INVALID``
            for files that cannot be used, or a token that would travel unencrypted.
    """

    def __init__(self, address: str, security: Security | None) -> None:
        if not _ADDRESS.fullmatch(address):
            raise ConfigurationError(
                f"{address!r} is not the address of a coordinator",
                remedy="write HOST:PORT, such as coordinator:7070 or [fd00::1]:7070",
                about={"address": address},
            )
        security = security or Security()
        files = None if address.startswith("unix:") else security.tls
        self._material = None if files is None else Reloaded(files.paths(), lambda: load(files))
        self._token = _token_source(security)
        self._options = [*CHANNEL_OPTIONS]
        if security.tls_server_name:
            self._options.append(("grpc.ssl_target_name_override", security.tls_server_name))  # type: ignore[arg-type]
        if self._token() and self._material is None and not is_private(address):
            raise ConfigurationError(
                f"a token would travel to {address} without encryption",
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
        """Changes when the certificates did."""
        if self._material is None:
            return 0
        self._material.current()
        return self._material.generation

    @property
    def options(self) -> Sequence[tuple[str, Any]]:
        """Options of the channel."""
        return self._options

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Credentials of a new channel; None for a plain one."""
        return None if self._material is None else channel_credentials(self._material.current())

    def metadata(self) -> Metadata:
        """What every call carries."""
        token = self._token()
        return (("authorization", f"Bearer {token}"),) if token else ()


class BlockingChannel:
    """A channel that is made anew when certificates change. Calls under way go on over the old one. Safe for several threads."""

    def __init__(self, address: str, security: Security | None = None) -> None:
        self._address = address
        self.identity = Identity(address, security)
        self._generation = self.identity.generation
        self._channel = self._open()
        self._closed = False
        self._lock = threading.Lock()

    def stub(self, make: Callable[[grpc.Channel], T]) -> T:
        """The stub of a service, for the next call. One that is made on a closed channel ends the process (gRPC 1.85).

        Raises:
            ServiceError: reason ``CANCELLED`` after :meth:`close`.
        """
        with self._lock:
            if self._closed:
                raise _was_closed(self._address)
            generation = self.identity.generation
            if generation != self._generation:
                self._generation, self._channel = generation, self._open()
            return make(self._channel)

    def close(self) -> None:
        """Close the connection; calls under way end."""
        with self._lock:
            self._closed = True
        self._channel.close()  # waits for what is done when a call ends, and that may ask for a stub

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Around a call: to gRPC it is a wrong value when the channel was closed since the stub was made."""
        try:
            yield
        except ValueError as error:
            if self._closed:
                raise _was_closed(self._address) from error
            raise

    def _open(self) -> grpc.Channel:
        credentials = self.identity.credentials()
        options = list(self.identity.options)
        if credentials is None:
            return grpc.insecure_channel(self._address, options=options)
        return grpc.secure_channel(self._address, credentials, options=options)


class AsyncChannel:
    """The same for asyncio; use it as a context manager."""

    def __init__(self, address: str, security: Security | None = None) -> None:
        self._address = address
        self.identity = Identity(address, security)
        self._generation = self.identity.generation
        self._channel: grpc.aio.Channel | None = None
        self._closed = False
        self._closing: set[asyncio.Task[None]] = set()

    def current(self) -> grpc.aio.Channel:
        """The channel for the next call.

        Raises:
            ServiceError: reason ``CANCELLED`` after :meth:`close`.
        """
        if self._closed:
            raise _was_closed(self._address)
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
        """Around a call: that it ends when the channel is closed is an error, not the cancellation of who made it."""
        try:
            yield
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if self._closed and not (task and task.cancelling()):
                raise _was_closed(self._address) from error
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
        credentials = self.identity.credentials()
        options = list(self.identity.options)
        if credentials is None:
            return grpc.aio.insecure_channel(self._address, options=options)
        return grpc.aio.secure_channel(self._address, credentials, options=options)


def _was_closed(address: str) -> ServiceError:
    return ServiceError(f"the client of {address} was closed", reason="CANCELLED", remedy="make a new one")


def _token_source(security: Security) -> Any:
    """A function that gives the token as of now."""
    path = security.token_file
    if path is None:
        token = security.token.get_secret_value().strip()
        if token and not is_token(token):
            raise _bad_token("SLIPWAY_TOKEN")
        return lambda: token
    return Reloaded([path], lambda: _read_token(path)).current


def _read_token(path: Path) -> str:
    try:
        token = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise _bad_token(described(path, "token_file"), f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise _bad_token(str(path)) from None
    if not is_token(token):
        raise _bad_token(str(path))
    return token


def _bad_token(where: str, what: str = "holds no token") -> ConfigurationError:
    return ConfigurationError(
        f"{where} {what}",
        reason="ACCESS_INVALID",
        remedy="it is one line of 16 to 512 printable characters; slipway token makes one",
        about={"file": where},
    )
