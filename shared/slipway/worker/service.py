"""``slipway.v1.StageService``: call a worker's stages directly, with the same runner and slots as leased tasks."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from google.protobuf import struct_pb2

from slipway.errors import ConfigurationError, ServiceError
from slipway.execution.runner import TaskResult
from slipway.registry import IMPORT, load_stage
from slipway.rpc.messages import call_of, log_line, progress_message
from slipway.rpc.serving import Context, stream, unary
from slipway.rpc.values import status_of, struct_of
from slipway.stage import Progress
from slipway.stage_call import StageCall
from slipway.worker.leased import output_message
from slipway.worker.pull import Worker
from slipway_protos.v1 import stage_pb2, stage_pb2_grpc

_MOST_EVENTS = 1000
"""Most events kept for a slow reader of a direct call; the oldest are dropped."""
_LOOK_SECONDS = 0.05


class StageService(stage_pb2_grpc.StageServiceServicer):
    """Describes and runs the stages of a worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        # Without the import: a direct call names no project, so its allowed sources are unknown.
        self._stages = [stage for stage in worker.options.stages if stage != IMPORT]

    @unary
    async def Describe(self, request: stage_pb2.DescribeRequest, context: Context) -> stage_pb2.DescribeResponse:
        """Return what this worker can run."""
        options = self._worker.options
        return stage_pb2.DescribeResponse(
            stages=[describe(name) for name in self._stages],
            capabilities=self._worker.machine.capabilities(slots=options.slots),
        )

    @stream
    async def Run(self, request: stage_pb2.RunRequest, context: Context) -> AsyncIterator[stage_pb2.RunResponse]:
        """Run one task; cancelling the call cancels it."""
        worker = self._worker
        call = self._check_call(request)
        events: deque[stage_pb2.RunResponse] = deque(maxlen=_MOST_EVENTS)

        def on_progress(progress: Progress, memory_bytes: int) -> None:
            events.append(stage_pb2.RunResponse(progress=progress_message(progress, memory_bytes)))

        def on_log(level: str, message: str) -> None:
            events.append(stage_pb2.RunResponse(log=log_line(level, message)))

        with worker.slot() as threads, worker.runner.using_store():
            memory_bytes = worker.machine.capabilities(slots=worker.options.slots).memory_bytes
            call = call.with_defaults(max_memory_bytes=memory_bytes, threads=threads)
            running = asyncio.create_task(worker.runner.run(call, on_progress=on_progress, on_log=on_log))
            try:
                while not running.done() or events:
                    if events:
                        yield events.popleft()
                    else:
                        await asyncio.wait({running}, timeout=_LOOK_SECONDS)
                yield _last_event(running.result())
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)

    def _check_call(self, request: stage_pb2.RunRequest) -> StageCall:
        """Return the requested call; refuse an invalid one before any work."""
        options = self._worker.options
        if request.stage not in self._stages:
            raise ConfigurationError(
                f"this worker does not run {request.stage!r}",
                reason="STAGE_UNKNOWN",
                remedy=f"it runs {', '.join(self._stages)}",
                about={"stage": request.stage},
            )
        call = call_of(request)
        call.check(call.step(load_stage(request.stage)))
        if self._worker.free_slots <= 0:
            raise ServiceError(
                f"all {options.slots} slots are taken", reason="WORKER_BUSY", remedy="try again later, or elsewhere"
            )
        return call


def describe(name: str) -> stage_pb2.StageDescription:
    """Return a stage's inputs, outputs, parameters, and its libraries and devices on this machine.

    Raises:
        ConfigurationError: reason ``STAGE_UNKNOWN``.
    """
    stage = load_stage(name)
    schema: struct_pb2.Struct = struct_of(stage.params.model_json_schema())
    return stage_pb2.StageDescription(
        name=name,
        version=stage.version,
        inputs=stage.inputs,
        outputs=stage.outputs,
        more_inputs=stage.more_inputs,
        params_json_schema=schema,
        versions=stage.library_versions(),
        providers=[
            stage_pb2.Provider(
                name=provider.name, available=provider.available, version=provider.version, detail=provider.detail
            )
            for provider in stage.providers()
        ],
    )


def _last_event(result: TaskResult) -> stage_pb2.RunResponse:
    if result.failure is not None:
        return stage_pb2.RunResponse(error=status_of(result.failure))
    return stage_pb2.RunResponse(output=output_message(result))
