"""One leased task on a worker: run it, and report its progress and result to the coordinator."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from slipway.errors import Failure, ServiceError, StageError
from slipway.execution.runner import TaskResult, TaskRunner
from slipway.observability import metrics
from slipway.observability.telemetry import span
from slipway.planning.references import AttemptKey
from slipway.rpc.messages import call_of, log_line, progress_message
from slipway.rpc.values import status_of, struct_of
from slipway.stage import MOST_FACTS_BYTES, Progress, cut_lists
from slipway_protos.v1 import export_pb2, worker_pb2

log = logging.getLogger("slipway.worker")

# A call larger than the coordinator accepts would be refused for ever, and with it the reports of all other tasks.
_MAX_LOG_LINES = 500
_MAX_REPORTED_BYTES = 128 << 10


@dataclass
class LeasedTask:
    """A running task, until its result is handed in.

    Attributes:
        lease: The coordinator's lease.
        worker: Name of the worker.
        threads: Threads for numeric libraries.
        memory_bytes: Memory limit if the lease has none.
        progress: The latest progress.
        logs: The last lines that were not reported yet.
        task: The asyncio task that runs it.
        ending: It was told to end, or has ended and hands in its result.
    """

    lease: worker_pb2.TaskLease
    worker: str
    threads: int
    memory_bytes: int
    progress: export_pb2.TaskProgress | None = None
    logs: list[export_pb2.LogLine] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
    ending: bool = False

    def report(self) -> worker_pb2.RunningTask:
        """Return a report on the task: its progress, and as many new log lines as fit."""
        lines, size = 0, 0
        for line in self.logs:
            size += line.ByteSize()
            if size > _MAX_REPORTED_BYTES:
                break
            lines += 1
        now, self.logs = self.logs[:lines], self.logs[lines:]
        return worker_pb2.RunningTask(
            task=self.lease.task, lease_epoch=self.lease.lease_epoch, progress=self.progress, logs=now
        )

    def take_back(self, lines: Sequence[export_pb2.LogLine]) -> None:
        """Keep log lines of a report that did not arrive for the next one."""
        self.logs = [*lines, *self.logs][-_MAX_LOG_LINES:]

    def cancel(self) -> bool:
        """Begin to end the task; return False if it is ending already, because handing in a result is not interrupted."""
        if self.task is None or self.ending:
            return False
        self.ending = True
        return self.task.cancel()

    async def outcome(self, runner: TaskRunner, *, on_phase: Callable[[], None]) -> worker_pb2.CompleteTaskRequest:
        """Run the task; return the result to hand in, also if this call is cancelled.

        Args:
            runner: Runs the task.
            on_phase: Called when a new phase begins, so that it is reported at once.
        """
        request = worker_pb2.CompleteTaskRequest(
            worker_id=self.worker, task=self.lease.task, lease_epoch=self.lease.lease_epoch
        )
        try:
            result = await self._execute(runner, on_phase)
        except asyncio.CancelledError:
            request.cancelled.SetInParent()
        except ServiceError as error:  # the lease is invalid
            request.error.CopyFrom(status_of(error.failure()))
        else:
            request.peak_memory_bytes = result.peak_memory_bytes
            if result.memory.samples_bytes:
                request.memory.sample_seconds = result.memory.sample_seconds
                request.memory.samples_bytes.extend(result.memory.samples_bytes)
            output = output_message(result)
            failure = result.failure or _facts_failure(self.lease.stage, output)
            if failure is not None:
                request.error.CopyFrom(status_of(failure))
            else:
                request.output.CopyFrom(output)
        self.ending = True
        request.logs.extend(self.logs)
        return request

    async def _execute(self, runner: TaskRunner, on_phase: Callable[[], None]) -> TaskResult:
        lease = self.lease
        call = call_of(lease).with_defaults(max_memory_bytes=self.memory_bytes, threads=self.threads)
        key = AttemptKey.parse(lease.task)

        def on_progress(progress: Progress, memory_bytes: int) -> None:
            before, self.progress = self.progress, progress_message(progress, memory_bytes)
            if before is None or before.phase != progress.phase:
                on_phase()

        def on_log(level: str, message: str) -> None:
            if level == "warning":  # watchers get it anyway, but the operator of this machine may be someone else
                log.info(f"{lease.task}: {message}")
            self.logs.append(log_line(level, message))
            del self.logs[:-_MAX_LOG_LINES]

        attributes = {"slipway.task": lease.task, "slipway.stage": lease.stage, "slipway.worker": self.worker}
        began = time.monotonic()
        with span(f"stage {lease.stage}", parent=lease.traceparent, attributes=attributes, kind="consumer") as recorded:
            log.info(f"runs {lease.task}")
            result = await runner.run(call, project=key.project, on_progress=on_progress, on_log=on_log)
            recorded.set(**{"slipway.reused": result.reused, "slipway.peak_memory_bytes": result.peak_memory_bytes})
            if result.failure is not None:
                recorded.fail(result.failure.reason, result.failure.message)
        if not result.reused:
            outcome = "succeeded" if result.failure is None else "failed"
            metrics.STAGE_SECONDS.observe(
                time.monotonic() - began, traceparent=recorded.traceparent, stage=lease.stage, outcome=outcome
            )
            if result.peak_memory_bytes:
                metrics.STAGE_PEAK.observe(
                    result.peak_memory_bytes, traceparent=recorded.traceparent, stage=lease.stage
                )
        return result


def output_message(result: TaskResult) -> worker_pb2.TaskOutput:
    """Return a successful result as a message. Cut its lists again: an older version may have recorded a reused result."""
    return worker_pb2.TaskOutput(outputs=result.outputs, facts=struct_of(cut_lists(result.facts)), reused=result.reused)


def _facts_failure(stage: str, output: worker_pb2.TaskOutput) -> Failure | None:
    """Return the failure of a stage whose facts are larger than a coordinator accepts; else None."""
    size = output.facts.ByteSize()
    if size <= MOST_FACTS_BYTES:
        return None
    return StageError(
        f"{stage} recorded facts of {size} bytes, {MOST_FACTS_BYTES} are allowed",
        reason="RESULT_INVALID",
        remedy="write them into a file of the output",
    ).failure()
