"""The contract with the coordinator, which commands start, and which the embedded mode runs inside a command.

The coordinator's package brings a :class:`CoordinatorService` under the entry point group ``slipway.services``. Finding it imports none of
the coordinator's libraries.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from slipway.contracts.engine import Engine
from slipway.distribution import install_command, installed_entry_points
from slipway.errors import ConfigurationError

if TYPE_CHECKING:
    from slipway_protos.v1 import export_pb2  # not needed to find the coordinator

GROUP, NAME = "slipway.services", "coordinator"


@dataclass(frozen=True, slots=True)
class EmbeddedEngine:
    """The engine that runs the tasks of an embedded coordinator, whose nodes have to reach it.

    Attributes:
        name: Its name, for people.
        owner: Name of the coordinator at the engine.
        open: Returns the engine, given the port at which the coordinator listens.
        security: Who may call it there; a ``slipway.security.server.ServerSecurity``.
    """

    name: str
    owner: str
    open: Callable[[int], Engine]
    security: Any


class Server(Protocol):
    """A coordinator that serves inside this process."""

    @property
    def port(self) -> int:
        """Where it listens, once it has started; 0 at a unix socket."""

    async def start(self) -> None:
        """Begin to serve.

        Raises:
            ServiceError: ``STATE_SCHEMA``: its state is damaged; ``ENGINE_UNAVAILABLE`` or ``ENGINE_UNFIT``: its engine cannot run tasks.
        """

    async def stop(self) -> None:
        """End, within seconds."""


@dataclass(frozen=True, slots=True)
class CoordinatorService:
    """The functions of the coordinator's package. A state is the path of a SQLite file; messages are those that clients receive.

    Attributes:
        parser: Returns the parser of its command line, for a program of this name; it needs none of the coordinator's libraries.
        main: Runs a coordinator with parsed arguments until it ends; returns its exit code.
        hold: Makes this process the only one with a state for the length of a block; raises ``COORDINATOR_LOCKED``, or OSError for a
            file of the state that cannot be opened, or is not a regular file.
        server: Returns a coordinator for a state, an address, a function that opens the artifact store, and the engine that runs its tasks;
            None for a worker in the same process.
        exports: Returns the exports of a state that match a filter, newest first; raises ``STATE_SCHEMA`` or ``REQUEST_INVALID``.
        digests: Returns the digests that exports of a state name, and None of a state without tables; with ``running``, those of ended
            exports too. Raises ``STATE_SCHEMA``.
        check_filter: Checks a filter; raises ``REQUEST_INVALID``.
    """

    parser: Callable[[str], argparse.ArgumentParser]
    main: Callable[[argparse.Namespace], int]
    hold: Callable[[Path], AbstractContextManager[None]]
    server: Callable[[Path, str, Callable[[], Any], EmbeddedEngine | None], Server]
    exports: Callable[[Path, str], Sequence[export_pb2.Export]]
    digests: Callable[[Path, bool], frozenset[str] | None]
    check_filter: Callable[[str], None]


@cache
def coordinator_service() -> CoordinatorService:
    """Return the installed coordinator.

    Raises:
        ConfigurationError: ``SERVICE_UNKNOWN``: none is installed, or it cannot be loaded.
    """
    try:
        service = installed_entry_points(GROUP)[NAME].load()
    except (KeyError, ImportError, AttributeError) as error:
        raise _unknown_error(f": {type(error).__name__}: {error}") from error
    if not isinstance(service, CoordinatorService):
        raise _unknown_error(f": {type(service).__name__} is none")
    return service


def _unknown_error(why: str) -> ConfigurationError:
    return ConfigurationError(
        f"no distribution brings a {NAME} in the entry point group {GROUP}{why}",
        reason="SERVICE_UNKNOWN",
        remedy=f"install slipway again: {install_command(options='--force-reinstall')}",
    )
