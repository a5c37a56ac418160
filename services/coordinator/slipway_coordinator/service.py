"""The coordinator's command line, and its entry points for commands and the embedded mode. Libraries are imported where used."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipway.contracts.coordinator import CoordinatorService, EmbeddedEngine, Server
from slipway.errors import ServiceError
from slipway.service_flags import at_least, service_parser
from slipway.texts import number_of

if TYPE_CHECKING:
    from slipway_protos.v1 import export_pb2


def coordinator_parser(prog: str) -> argparse.ArgumentParser:
    """Return the argument parser for a program of this name."""
    parser = service_parser(
        prog,
        "Carries out exports.",
        "--state state.db",
        "migrate --state postgresql://slipway@db/slipway",
        listen="127.0.0.1:7070",
        listens_for="clients and workers",
    )
    parser.add_argument(
        "command",
        nargs="?",
        choices=["serve", "migrate"],
        default="serve",
        help="serve (the default), or bring the tables of a PostgreSQL state up to date and end",
    )
    place = os.environ.get("SLIPWAY_STATE", "")
    parser.add_argument(
        "--state",
        default=place or None,
        required=not place,
        metavar="PLACE",
        help="SQLite file, or postgresql://USER@HOST/DATABASE; by default SLIPWAY_STATE, which ps does not show",
    )
    parser.add_argument(
        "--recovery-rules", type=Path, metavar="FILE", help="recovery table; by default the built-in one"
    )
    parser.add_argument(
        "--webhooks", type=Path, metavar="FILE", help="receivers of signed events of exports; none by default"
    )
    parser.add_argument(
        "--lease-seconds",
        type=at_least(1.0),
        default=30.0,
        metavar="N",
        help="seconds of silence after which a worker loses its tasks (%(default)g)",
    )
    parser.add_argument(
        "--max-exports",
        type=at_least(1),
        default=10_000,
        metavar="N",
        help="exports that may be under way; more are refused (%(default)s)",
    )
    parser.add_argument(
        "--retain-days",
        type=at_least(0.0),
        metavar="N",
        help="forget exports this many days after their end; never by default",
    )
    parser.add_argument(
        "--token-listen",
        default="",
        metavar="HOST:PORT",
        help="second TLS port, for clients with a token and no certificate; use the same port on all coordinators of a state",
    )
    parser.add_argument(
        "--http",
        default="",
        metavar="HOST:PORT",
        help="port for JSON over HTTP, off by default; use the same port on all coordinators of a state",
    )
    parser.add_argument(
        "--http-name",
        action="append",
        default=[],
        metavar="NAME",
        help="name by which clients call --http without an access file, besides localhost, its HOST and addresses; repeat for more",
    )
    parser.add_argument(
        "--advertise",
        type=_address,
        metavar="HOST:PORT",
        help="address at which standbys reach this process alone; by default that of --listen, or of this machine",
    )
    parser.add_argument(
        "--engine",
        default="",
        metavar="NAME[:ADDRESS]",
        help="run tasks on a cluster, such as ray:HOST:PORT, instead of workers that pull",
    )
    parser.add_argument("--allow-anonymous", action="store_true", help="accept every caller that reaches the address")
    return parser


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    try:
        host.encode("idna")  # a standby resolves the name this way
    except UnicodeError:
        host = ""
    if not host or not number_of(port, most=65535):
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return text


def run(arguments: argparse.Namespace) -> int:
    """Run a coordinator until it ends; return its exit code."""
    from slipway_coordinator.server import main

    return main(arguments)


@contextmanager
def hold(state: Path) -> Iterator[None]:
    """As :attr:`~slipway.contracts.coordinator.CoordinatorService.hold`."""
    from slipway_coordinator.leadership.file_lock import FileLock, hold_lock
    from slipway_coordinator.storage.state_file import check_database_files

    with hold_lock(FileLock(state)):
        check_database_files(state)
        yield


class _EmbeddedServer:
    def __init__(self, state: Path, address: str, store: Callable[[], Any], engine: EmbeddedEngine | None) -> None:
        from slipway_coordinator.broker.submitter import EngineSetup
        from slipway_coordinator.coordinator import CoordinatorOptions
        from slipway_coordinator.server import CoordinatorServer
        from slipway_coordinator.storage.database_access import SqliteState

        self._state = state
        if engine is None:
            options = CoordinatorOptions(state=SqliteState(state), workers_gone=True, no_worker_seconds=2.0)
            self._server = CoordinatorServer(options, address=address, store=store)
        else:
            options = CoordinatorOptions(state=SqliteState(state))
            self._server = CoordinatorServer(
                options,
                address=address,
                store=store,
                security=engine.security,
                engine=lambda port: EngineSetup(engine.name, engine.open(port), engine.owner, cancels_at_stop=True),
            )

    @property
    def port(self) -> int:
        return self._server.port

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


def embedded_server(state: Path, address: str, store: Callable[[], Any], engine: EmbeddedEngine | None) -> Server:
    """Return a coordinator of one state, whose only worker is in the same process, or whose tasks run on an engine."""
    return _EmbeddedServer(state, address, store, engine)


def exports(state: Path, filter: str) -> Sequence[export_pb2.Export]:  # noqa: A002 - the field's name everywhere
    """As :attr:`~slipway.contracts.coordinator.CoordinatorService.exports`."""
    from slipway_coordinator.api.messages import export_message
    from slipway_coordinator.storage.state_file import read_exports

    return [export_message(record) for record in read_exports(state, filter=filter)]


def digests(state: Path, running: bool) -> frozenset[str] | None:
    """As :attr:`~slipway.contracts.coordinator.CoordinatorService.digests`."""
    from slipway_coordinator.storage.state_file import find_digests

    return find_digests(state, running=running)


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
