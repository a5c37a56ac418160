"""Convert calls of stages to their messages and back."""

from __future__ import annotations

from datetime import timedelta

from slipway.rpc.structs import dict_of, struct_of
from slipway.stage_call import Limits, StageCall
from slipway_protos.v1 import stage_pb2, worker_pb2


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
