"""The coordinator as commands and the embedded mode find it. Its libraries are imported where they are used."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipway.contracts.coordinator import CoordinatorService, Server
from slipway.errors import ServiceError
from slipway_coordinator.flags import coordinator_parser

if TYPE_CHECKING:
    from slipway_protos.v1 import export_pb2


def run(arguments: argparse.Namespace) -> int:
    """Run a coordinator until it ends; return its exit code."""
    from slipway_coordinator.main import main

    return main(arguments)


@contextmanager
def hold(state: Path) -> Iterator[None]:
    """As :attr:`~slipway.contracts.coordinator.CoordinatorService.hold`."""
    from slipway_coordinator.leadership.file_lock import FileLock, holding
    from slipway_coordinator.storage.database_files import check_database_files

    with holding(FileLock(state)):
        check_database_files(state)
        yield


class _EmbeddedServer:
    def __init__(self, state: Path, address: str, store: Callable[[], Any]) -> None:
        from slipway_coordinator.coordinator import CoordinatorOptions
        from slipway_coordinator.server import CoordinatorServer
        from slipway_coordinator.storage.database_address import SqliteState

        options = CoordinatorOptions(state=SqliteState(state), workers_gone=True, no_worker_seconds=2.0)
        self._state, self._server = state, CoordinatorServer(options, address=address, store=store)

    async def start(self) -> None:
        import sqlalchemy as sa

        try:
            await self._server.start()
        except sa.exc.DatabaseError as error:
            if type(error) is not sa.exc.DatabaseError:  # only the base class itself means damaged content
                raise
            folder = self._state.parent
            raise ServiceError(
                f"the state of this export is damaged: {error.orig}",
                reason="STATE_SCHEMA",
                remedy=f"remove {folder} and run the export again: finished stages are in the store and are not repeated",
                about={"folder": folder},
            ) from error

    async def stop(self) -> None:
        await self._server.stop()


def embedded_server(state: Path, address: str, store: Callable[[], Any]) -> Server:
    """Return a coordinator of one state, whose only worker is in the same process."""
    return _EmbeddedServer(state, address, store)


def exports(state: Path, filter: str) -> Sequence[export_pb2.Export]:  # noqa: A002 - the field's name everywhere
    """As :attr:`~slipway.contracts.coordinator.CoordinatorService.exports`."""
    from slipway_coordinator.api.messages import export_message
    from slipway_coordinator.storage.reading import read_exports

    return [export_message(record) for record in read_exports(state, filter=filter)]


def digests(state: Path, running: bool) -> frozenset[str] | None:
    """As :attr:`~slipway.contracts.coordinator.CoordinatorService.digests`."""
    from slipway_coordinator.storage.reading import digests_named

    return digests_named(state, running=running)


def check_filter(filter: str) -> None:  # noqa: A002 - as above
    """As :attr:`~slipway.contracts.coordinator.CoordinatorService.check_filter`."""
    if filter:
        from slipway_coordinator.storage.filters import parse_filter

        parse_filter(filter)


SERVICE = CoordinatorService(
    parser=coordinator_parser,
    main=run,
    hold=hold,
    server=embedded_server,
    exports=exports,
    digests=digests,
    check_filter=check_filter,
)
