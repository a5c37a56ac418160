"""A call of a stage survives every conversion: to JSON, to a message, and to the values that the stage gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipway.errors import ConfigurationError
from slipway.execution.execution import Execution
from slipway.registry import load_stage
from slipway.rpc.messages import call_of, put_call
from slipway.stage_call import Limits, StageCall
from slipway_protos.v1 import stage_pb2, worker_pb2

CALL = StageCall(
    "quantize",
    {"format": "onnx", "level": "int4", "group_size": 32, "packed": True},
    {"model": "sha256:" + "0" * 64},
    Limits(timeout_seconds=90.5, max_memory_bytes=1 << 33, threads=3),
)


def test_a_call_survives_the_line_that_a_child_gets() -> None:
    execution = Execution(
        CALL, Path("/work"), kept=Path("/kept"), input_digests=CALL.inputs, traceparent="00-1-2-01", started=1.5
    )
    assert Execution.parse(execution.line()) == execution
    assert execution.line().count(b"\n") == 1
    bare = Execution(StageCall("merge", {}, {}), Path("/work"), environment={"HF_TOKEN": "canary"})
    assert b"canary" not in bare.line()
    assert Execution.parse(bare.line()).limits == Limits(0.0, 4 << 30, 1)


def test_a_call_survives_a_lease() -> None:
    lease = worker_pb2.TaskLease()
    put_call(lease, CALL)
    assert call_of(worker_pb2.TaskLease.FromString(lease.SerializeToString())) == CALL


def test_a_request_leaves_the_limits_to_the_worker() -> None:
    request = stage_pb2.RunRequest(stage="quantize", inputs=CALL.inputs)
    request.params.update(CALL.params)
    call = call_of(request)
    assert call == StageCall("quantize", CALL.params, CALL.inputs)
    assert call.with_defaults(max_memory_bytes=5, threads=2).limits == Limits(0.0, 5, 2)
    assert CALL.with_defaults(max_memory_bytes=5, threads=2) == CALL


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (StageCall("quantize", CALL.params, {}), "INPUT_MISSING"),
        (StageCall("quantize", CALL.params, {**CALL.inputs, "other": "x"}), "INPUT_MISSING"),
        (StageCall("quantize", {**CALL.params, "level": "int5"}, CALL.inputs), "PARAMS_INVALID"),
        (StageCall("quantize", {**CALL.params, "x" * 5000: None}, CALL.inputs), "PARAMS_INVALID"),
    ],
)
def test_what_the_stage_does_not_take_is_refused_with_what_it_takes(call: StageCall, reason: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        call.check(load_stage("quantize"))
    assert refused.value.reason == reason
    assert refused.value.remedy
