"""The worker's process, ``slipway worker``, and its gauges."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
from collections.abc import Iterator

from slipway.artifacts.opening import cache_size, open_store
from slipway.errors import ConfigurationError
from slipway.execution.runner import TaskRunner
from slipway.observability import metrics
from slipway.observability.audit_records import sending_audit
from slipway.observability.metrics import reading, serving
from slipway.observability.telemetry import tracing
from slipway.registry import IMPORT, load_stage, stage_names
from slipway.rpc.serving import add_health_and_reflection
from slipway.security.server import worker_security
from slipway.service_flags import run_service, with_security_flags
from slipway.settings import Settings
from slipway.sources.addresses import Allowed
from slipway.worker.machine import probe
from slipway.worker.pull import Worker, WorkerOptions, new_worker_id
from slipway.worker.service import StageService
from slipway_protos.v1 import stage_pb2_grpc

log = logging.getLogger("slipway.worker")

SERVICE = "slipway.v1.StageService"


def main(arguments: argparse.Namespace) -> int:
    """Run a worker until SIGTERM; return 0 or the exit code of the error that ended it."""
    return run_service(arguments, _run)


def _run(arguments: argparse.Namespace) -> None:
    settings = Settings.from_environment(os.environ)
    imports = Allowed.parse(settings.import_from)
    stages = tuple(arguments.stage.split(",")) if arguments.stage else (*stage_names(), *([IMPORT] if imports else ()))
    if IMPORT in stages and not imports:
        raise ConfigurationError(
            "this worker is to import sources, but no address is allowed",
            remedy="set SLIPWAY_IMPORT_FROM here and for the coordinator, or leave import out of --stage",
            about={"key": "SLIPWAY_IMPORT_FROM"},
        )
    for name in stages:
        load_stage(name)
    if not (arguments.coordinator or settings.coordinator):
        raise ConfigurationError("no coordinator is named", remedy="give --coordinator, or set SLIPWAY_COORDINATOR")
    service = "slipway-worker"
    with (
        tracing(settings, service=service),
        serving(arguments.metrics) as port,
        sending_audit(settings, service=service),
    ):
        if port:
            log.info(f"metrics on port {port}")
        asyncio.run(run_once(arguments, settings, stages) if arguments.once else serve(arguments, settings, stages))


async def run_once(arguments: argparse.Namespace, settings: Settings, stages: tuple[str, ...]) -> None:
    """Take one attempt from the coordinator, run it, and end; SIGTERM and SIGINT return it.

    Raises:
        ServiceError: ``COORDINATOR_UNAVAILABLE`` if the coordinator was silent for too long.
    """
    worker = _worker(arguments, settings, stages, slots=1, only_task=arguments.once)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, worker.stop)
    log.info(f"worker {worker.options.worker_id} runs {arguments.once} for {worker.options.coordinator}")
    with reading(lambda: gauges(worker)), reading(lambda: cache_size(settings)):
        await worker.run()
    if worker.failure is not None:
        raise worker.failure.error()


async def serve(arguments: argparse.Namespace, settings: Settings, stages: tuple[str, ...]) -> None:
    """Pull tasks from the coordinator and serve direct calls until SIGTERM or SIGINT, then drain.

    Raises:
        ServiceError: the address to listen on cannot be bound.
    """
    worker = _worker(arguments, settings, stages, slots=arguments.slots)
    options = worker.options
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, worker.stop)
    identity = with_security_flags(arguments, settings.security)
    security = worker_security(identity, address=arguments.listen, health_address=arguments.health_listen)
    server = security.server()
    health = add_health_and_reflection(server, SERVICE)
    stage_pb2_grpc.add_StageServiceServicer_to_server(StageService(worker), server)
    port = security.listen(server, arguments.listen)
    await server.start()
    health.set_serving(SERVICE, serving=True)
    log.info(
        f"worker {options.worker_id} runs {', '.join(stages)} for {options.coordinator}, direct calls on port {port}"
    )
    try:
        with reading(lambda: gauges(worker)), reading(lambda: cache_size(settings)):
            await worker.run()
    finally:
        health.end()
        await server.stop(grace=1.0)


def _worker(
    arguments: argparse.Namespace,
    settings: Settings,
    stages: tuple[str, ...],
    *,
    slots: int | None,
    only_task: str = "",
) -> Worker:
    settings.scratch.mkdir(parents=True, exist_ok=True)
    machine = probe(settings.scratch, stages).within(cores=arguments.cores, memory_bytes=arguments.memory_bytes)
    options = WorkerOptions(
        coordinator=arguments.coordinator or settings.coordinator,
        stages=stages,
        slots=slots or machine.default_slots(),
        drain_seconds=arguments.drain_seconds,
        security=with_security_flags(arguments, settings.security),
        only_task=only_task,
        worker_id=new_worker_id(arguments.submission),
        waits_for_room=not only_task,  # its place on the node is kept meanwhile; the stage reports a full disk
    )
    runner = TaskRunner(open_store(settings), settings.scratch, gpu_architecture=machine.gpu_architecture)
    return Worker(options, runner, machine)


def gauges(worker: Worker) -> Iterator[metrics.Sample]:
    """Yield the samples of this moment: slots, tasks, memory and disk. Safe from any thread."""
    yield metrics.SLOTS, {}, worker.options.slots
    yield metrics.WITHOUT_ROOM, {}, not worker.room.enough
    yield metrics.SCRATCH_FREE, {}, worker.room.free_bytes()
    running = worker.running()
    for stage in sorted(worker.options.stages):
        memory = [bytes_used for name, bytes_used in running if name == stage]
        yield metrics.RUNNING, {"stage": stage}, len(memory)
        yield metrics.STAGE_MEMORY, {"stage": stage}, sum(memory)
