"""What a running stage says, as messages."""

from __future__ import annotations

from slipway.rpc.structs import sendable
from slipway.stage import Progress
from slipway_protos.v1 import export_pb2

_LINE_START, _LINE_END = 1000, 3000  # the end of a traceback matters most


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
