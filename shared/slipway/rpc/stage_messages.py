"""Convert calls of stages to messages and back, and log lines and progress to messages."""

from __future__ import annotations

from datetime import timedelta

from slipway.rpc.structs import dict_of, sendable, struct_of
from slipway.stage import Progress
from slipway.stage_call import Limits, StageCall
from slipway_protos.v1 import export_pb2, stage_pb2, worker_pb2

_LINE_START, _LINE_END = 1000, 3000  # the end of a traceback matters most


def put_call(lease: worker_pb2.TaskLease, call: StageCall) -> None:
    """Write a call into a lease."""
    lease.stage, lease.threads = call.stage, call.limits.threads
    lease.max_memory_bytes = call.limits.max_memory_bytes
    lease.params.CopyFrom(struct_of(call.params))
    lease.inputs.update(call.inputs)
    if call.limits.timeout_seconds:
        lease.timeout.FromTimedelta(timedelta(seconds=call.limits.timeout_seconds))


def call_of(message: worker_pb2.TaskLease | stage_pb2.RunRequest) -> StageCall:
    """Read the call in a lease, or in a request, whose limits the worker sets."""
    limits = Limits()
    if isinstance(message, worker_pb2.TaskLease):
        seconds = message.timeout.ToTimedelta().total_seconds()
        limits = Limits(seconds, message.max_memory_bytes, message.threads)
    return StageCall(message.stage, dict_of(message.params), dict(message.inputs), limits)


def log_line(level: str, message: str) -> export_pb2.LogLine:
    """Return a log line as a message; keep only the beginning and the end of a very long one."""
    left_out = len(message) - _LINE_START - _LINE_END
    if left_out > 0:
        message = f"{message[:_LINE_START]} … {left_out} characters … {message[-_LINE_END:]}"
    return export_pb2.LogLine(level=level, message=sendable(message))


def progress_message(progress: Progress, memory_bytes: int) -> export_pb2.TaskProgress:
    """Return progress as a message."""
    return export_pb2.TaskProgress(
        phase=sendable(progress.phase),
        done=progress.done,
        total=progress.total,
        unit=sendable(progress.unit),
        memory_bytes=memory_bytes,
    )
