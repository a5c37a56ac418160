"""The coordinator's process and gRPC server over one :class:`Coordinator`, and the migration of a state's tables.

Until a starting coordinator has resumed the stored exports, every call is refused as unavailable. ``slipway coordinator
migrate`` brings a state's tables, its own and the workflow engine's, up to date before a rollout.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import gc
import logging
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from dbos import DBOS

from slipway.artifacts import ArtifactStore
from slipway.artifacts.opening import blobs_of, open_store
from slipway.observability.audit_records import sending_audit
from slipway.observability.metrics import reading, serving
from slipway.observability.telemetry import tracing
from slipway.rpc.serving import add_health_and_reflection
from slipway.security.server import ServerSecurity, coordinator_security
from slipway.service_flags import run_service, with_security_flags
from slipway.settings import Settings
from slipway.settings.security import Security
from slipway.sources.addresses import Allowed
from slipway_coordinator.api.artifact_service import ArtifactService
from slipway_coordinator.api.coordinator_service import CoordinatorService
from slipway_coordinator.api.export_service import ExportService
from slipway_coordinator.api.starting import Gate
from slipway_coordinator.api.worker_service import WorkerService
from slipway_coordinator.broker.scaler import SERVICE as SCALER
from slipway_coordinator.broker.scaler import ExternalScaler
from slipway_coordinator.broker.submitter import EngineSetup, Submitter
from slipway_coordinator.coordinator import Coordinator, CoordinatorOptions
from slipway_coordinator.engines import engine_setup
from slipway_coordinator.leadership.file_lock import StateLock
from slipway_coordinator.leadership.forwarding import Forwarder
from slipway_coordinator.leadership.locks import lock_of
from slipway_coordinator.leadership.standby import HealthPort, advertised_address, stand_by
from slipway_coordinator.lifecycle.rules import DEFAULT_RULES, load_rules
from slipway_coordinator.storage.database import Database
from slipway_coordinator.storage.database_access import State, check_access, state_at, translate_startup_errors
from slipway_coordinator.storage.precedents import Precedents
from slipway_coordinator.transfers import TransferLimits
from slipway_coordinator.webhooks.announcer import WebhookAnnouncer
from slipway_coordinator.webhooks.receivers import NoWebhooks, WebhooksFile
from slipway_coordinator.webhooks.sender import Sender
from slipway_coordinator.workflow.observation import Gauges
from slipway_protos.externalscaler import externalscaler_pb2_grpc
from slipway_protos.v1 import artifact_pb2_grpc, coordinator_pb2_grpc, export_pb2_grpc, worker_pb2_grpc

if TYPE_CHECKING:
    from slipway_coordinator.http.listener import HttpListener

log = logging.getLogger("slipway.coordinator")

SERVICES = (
    "slipway.v1.ExportService",
    "slipway.v1.ArtifactService",
    "slipway.v1.CoordinatorService",
    "slipway.v1.WorkerService",
    SCALER,
)


class CoordinatorServer:
    """A coordinator that serves at an address, from :meth:`start` to :meth:`stop`.

    Between :meth:`listen` and :meth:`activate` its health is NOT_SERVING and it refuses calls.

    Args:
        options: How the coordinator runs.
        address: ``HOST:PORT`` or ``unix:PATH``.
        store: Opens the artifact store, for clients and precedents; called at the first use.
        security: Access rules of connections and calls.
        webhooks: Receivers of events; None for none.
        engine: Returns the engine that runs tasks, given the port that the server listens on; None if workers pull them.
    """

    def __init__(
        self,
        options: CoordinatorOptions,
        *,
        address: str,
        store: Callable[[], ArtifactStore],
        security: ServerSecurity | None = None,
        webhooks: WebhooksFile | None = None,
        engine: Callable[[int], EngineSetup] | None = None,
    ) -> None:
        self._engine = engine
        self._submitter: Submitter | None = None
        self._security = security or ServerSecurity()
        projects = self._security.authenticator.projects
        announcer = None if webhooks is None else WebhookAnnouncer(webhooks.current)
        self._blobs = blobs = functools.cache(lambda: blobs_of(store()))
        self.coordinator = Coordinator(
            options,
            precedents=Precedents(store),
            # In the embedded mode nobody has limits.
            manifests=None if options.workers_gone else lambda digest: blobs().manifest(digest),
            projects=projects,
            announcer=announcer,
        )
        self._webhooks = webhooks or NoWebhooks()
        self._sender = Sender(self.coordinator, self._webhooks)
        self._address = address
        self._gate = Gate()
        self._http: HttpListener | None = None
        self._server = self._security.server(self._gate)
        self._health = add_health_and_reflection(self._server, *SERVICES)
        export_pb2_grpc.add_ExportServiceServicer_to_server(ExportService(self.coordinator, blobs), self._server)
        self._artifacts = ArtifactService(self.coordinator, blobs)
        artifact_pb2_grpc.add_ArtifactServiceServicer_to_server(self._artifacts, self._server)
        coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(
            CoordinatorService(self.coordinator), self._server
        )
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(WorkerService(self.coordinator), self._server)
        scaler = ExternalScaler(self.coordinator.broker.board)
        externalscaler_pb2_grpc.add_ExternalScalerServicer_to_server(scaler, self._server)
        self.port = 0

    async def start(self) -> None:
        """Listen and become active. The caller holds the state's lock.

        Raises:
            ServiceError: the address cannot be bound, or the state cannot be used.
        """
        await self.listen()
        try:
            await self.activate()
        except BaseException:
            await self.stop()
            raise

    @property
    def active(self) -> bool:
        """Whether it takes calls."""
        return self._gate.is_open

    async def listen(self, address: str = "") -> None:
        """Listen, but refuse calls.

        Args:
            address: Used instead of the server's address if not empty.

        Raises:
            ServiceError: the address cannot be bound.
        """
        self._address = address or self._address
        self.port = self._security.listen(self._server, self._address)
        self._health.set_serving(*SERVICES, serving=False)
        if self._security.http_address:
            self._http = self._listen_http(self._security.http_address)
        await self._server.start()
        if self._http is not None:
            await self._http.start()

    @property
    def http_port(self) -> int:
        """The port for HTTP; 0 without one."""
        return 0 if self._http is None else self._http.port

    def _listen_http(self, address: str) -> HttpListener:
        # Imported late, because most coordinators have no such port.
        from slipway_coordinator.http.application import HttpApplication
        from slipway_coordinator.http.listener import HttpListener

        application = HttpApplication(
            self._server.checked_handler, active=lambda: self.active, names=self._security.names_over_http()
        )
        return HttpListener(application, address, self._security.tls)

    def gauges(self) -> Gauges:
        """Return the gauges of this coordinator."""
        coordinator = self.coordinator
        return Gauges(coordinator.broker.board, active=lambda: self.active, usage=lambda: coordinator.meter.usage)

    async def activate(self) -> None:
        """Resume the stored exports, then accept calls. The caller holds the state's lock.

        Raises:
            ServiceError: the state cannot be used, or the engine cannot run tasks.
        """
        await asyncio.to_thread(self._webhooks.refresh)  # a standby may have waited for days
        if self._engine is not None:
            self._submitter = Submitter(
                self.coordinator.broker,
                self._engine(self.port),
                self.coordinator.hub,
                lambda digest: self._blobs().manifest(digest),
                self.coordinator.unended,
            )
            await self._submitter.start()
        await self.coordinator.start()
        if self._submitter is not None:
            self._submitter.begin()
        self._sender.start()
        self._gate.is_open = True
        self._health.set_serving(*SERVICES, serving=True)

    async def stop(self) -> None:
        """Refuse new calls, end waiting ones, and stop."""
        self._health.end()
        if self._submitter is not None:  # its workers return their tasks
            await self._submitter.stop()
        if self._http is not None:
            await self._http.stop()
        await self._server.stop(grace=0.2)
        await self._artifacts.transfers.close()
        await self._sender.stop()
        if self._gate.is_open:
            await self.coordinator.stop()


async def serve(
    options: CoordinatorOptions,
    *,
    address: str,
    store: Callable[[], ArtifactStore],
    security: ServerSecurity | None = None,
    webhooks: WebhooksFile | None = None,
    advertise: str = "",
    engine: Callable[[int], EngineSetup] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT; on a shared state, first stand by and forward until this coordinator becomes active.

    Args:
        options: How the coordinator runs.
        address: ``HOST:PORT`` or ``unix:PATH``.
        store: Opens the artifact store for clients.
        security: Access rules of connections and calls.
        webhooks: Receivers of events; None for none.
        advertise: ``HOST:PORT`` at which standbys reach this process; derived from ``address`` if empty.
        engine: As for :class:`CoordinatorServer`.

    Raises:
        ServiceError: the state is not shared and locked (``COORDINATOR_LOCKED``), the address cannot be bound, or the state
            cannot be used.
    """
    await asyncio.to_thread(check_access, options.state)
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    security = security or ServerSecurity()
    lock = lock_of(options.state)
    held = lock.acquire()
    if not held and not options.state.shared:
        raise lock.refusal()
    health = HealthPort(security.health_address, SERVICES, security.interceptor())
    own_security = replace(security, health_address="")
    server = CoordinatorServer(
        options, address=address, store=store, security=own_security, webhooks=webhooks, engine=engine
    )
    try:
        await health.start()
        with reading(server.gauges()):
            if not held:
                others = [each for each in (security.token_address, security.http_address) if each]
                held, address = await _stand_by(
                    lock, health, options.state, address, ended=ended, own=advertise, others=others
                )
            if held:
                await _be_active(server, lock, health, options.state, address, advertise=advertise)
                await ended.wait()
    finally:
        health.report(serving=False)
        await server.stop()
        await health.stop()
        lock.release()


async def _stand_by(
    lock: StateLock,
    health: HealthPort,
    state: State,
    address: str,
    *,
    ended: asyncio.Event,
    own: str,
    others: Sequence[str],
) -> tuple[bool, str]:
    """Stand by; return whether this process now holds the lock, and the address it has listened on."""
    forwarder, more = Forwarder(address), [Forwarder(each, same_port=True) for each in others]
    async with contextlib.AsyncExitStack() as closing:
        for one in (forwarder, *more):
            closing.push_async_callback(one.close)
            await one.listen()
        log.info(f"coordinator on {forwarder.address}, state {state}, standing by")
        held = await stand_by(lock, forwarder, health, ended=ended, own=own, others=more)
    return held, forwarder.address


async def _be_active(
    server: CoordinatorServer, lock: StateLock, health: HealthPort, state: State, address: str, *, advertise: str
) -> None:
    """Listen, announce the address, and resume the stored exports. The lock is held."""
    await server.listen(address)
    if not address.startswith("unix:"):
        address = f"{address.rpartition(':')[0]}:{server.port}"
    log.info(f"coordinator on {address}, state {state}")
    if server.http_port:
        log.info(f"HTTP on port {server.http_port}")
    own = advertised_address(advertise, address=address, near_database=lock.near_database)
    if own:
        await asyncio.to_thread(lock.announce, own)
    elif state.shared:
        log.warning("standbys cannot forward to this coordinator: give its address with --advertise")
    with translate_startup_errors(state):
        await server.activate()
    health.report(serving=True)
    log.info("active")


def main(arguments: argparse.Namespace) -> int:
    """Run a coordinator; return 0 or the exit code of the error that ended it."""
    return run_service(arguments, _run)


def _run(arguments: argparse.Namespace) -> None:
    state = state_at(arguments.state)
    if arguments.command == "migrate":
        migrate(state)
        return
    settings = Settings.from_environment(os.environ)
    options = CoordinatorOptions(
        state=state,
        lease_seconds=arguments.lease_seconds,
        max_unended=arguments.max_exports,
        upload_bytes=settings.upload_bytes,
        open_uploads=settings.open_uploads,
        import_from=Allowed.parse(settings.import_from),
        transfers=TransferLimits(bytes_per_second=settings.transfer_rate),
        download_endpoint=settings.download_endpoint,
        retain_days=arguments.retain_days,
        rules=load_rules(arguments.recovery_rules or DEFAULT_RULES),
    )
    files = with_security_flags(arguments, Security.from_environment(os.environ))
    security = coordinator_security(
        files,
        address=arguments.listen,
        health_address=arguments.health_listen,
        token_address=arguments.token_listen,
        http_address=arguments.http,
        http_names=arguments.http_name,
        allow_anonymous=arguments.allow_anonymous,
    )
    webhooks = None if arguments.webhooks is None else WebhooksFile(arguments.webhooks)
    service = "slipway-coordinator"
    place = {"listen": arguments.listen, "advertise": arguments.advertise or ""}
    with (
        engine_setup(arguments.engine, settings, files, state, **place) as engine,
        tracing(settings, service=service),
        serving(arguments.metrics) as port,
        sending_audit(settings, service=service),
    ):
        if port:
            log.info(f"metrics on port {port}")
        # Queued exports hold many long-lived objects; frequent garbage collection over them would pause every call.
        gc.freeze()
        gc.set_threshold(20_000, 50, 100)
        asyncio.run(
            serve(
                options,
                address=arguments.listen,
                store=lambda: open_store(settings),
                security=security,
                webhooks=webhooks,
                advertise=arguments.advertise,
                engine=engine,
            )
        )


def migrate(state: State) -> int:
    """Apply the missing migrations; return how many of our own there were. Harmless to repeat.

    Raises:
        ServiceError: ``COORDINATOR_UNAVAILABLE`` if the database is unavailable, ``STATE_DENIED`` if it refuses access,
            ``STATE_SCHEMA`` if its tables cannot be changed.
    """
    database = Database(state.url)
    try:
        with translate_startup_errors(state):
            if state.shared:
                database.ping()  # fails at once for a missing database, which DBOS would retry for ever
                logging.getLogger("dbos").setLevel(logging.WARNING)
                DBOS.migrate(state.url)
            applied = database.migrate()
    finally:
        database.close()
    log.info(f"applied {applied} migrations to {state}")
    return applied
