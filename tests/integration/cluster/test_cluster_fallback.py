"""Outputs that fail validation are made again on a cluster, through ``kill -9`` of coordinator and worker, each attempt once."""

from __future__ import annotations

import pytest

from slipway.configuration import parse
from slipway.rpc.values import dict_of, failure_of_status
from slipway_protos.v1 import export_pb2
from support.cluster.cluster import Cluster
from support.coordinators.harness import state, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

CONFIGURATION = parse({"optimization": {"quantization": "int4"}, "validation": {"on_failure": "fallback"}})
RULES = ["", *(f"quantize-rejected-{how}" for how in ("calibrated", "mixed", "int8"))]


def quantized(export: export_pb2.Export) -> list[export_pb2.Task]:
    return [task for task in export.tasks if task.stage == "quantize"]


def test_an_int4_that_fails_becomes_int8_whatever_is_killed_meanwhile(cluster: Cluster) -> None:
    cluster.all_back()
    (cluster.folder / "reject").write_text("pytorch-int4 onnx-int4")
    digest = cluster.store().put_files({"text": cluster.folder / "reject"})
    name = cluster.client.create_export(CONFIGURATION, sources={"base": digest, "adapter": digest}).name

    def in_attempt(number: int) -> bool:
        export = cluster.look(name)
        return export is not None and any(len(task.attempts) >= number for task in quantized(export))

    wait_for(lambda: in_attempt(2), seconds=200)
    active = cluster.active()
    assert active is not None
    active.kill()
    wait_for(lambda: in_attempt(3), seconds=200)
    wait_for(cluster.working, seconds=100)
    for member in cluster.working()[:1]:
        member.kill()
    cluster.all_back()
    export = cluster.finished(name)
    assert state(export) == "succeeded", f"{export.error}\n{cluster.logs()}"
    assert set(export.outputs) == {"pytorch", "pytorch-int8", "onnx", "onnx-int8", "validation"}
    (calibrate,) = (task for task in export.tasks if task.stage == "calibrate")
    assert calibrate.outputs["calibration"]
    assert len(calibrate.attempts) == 1, "both formats take it, and no kill makes it twice"
    for task in quantized(export):
        assert [attempt.rule for attempt in task.attempts] == RULES
        assert task.requested_format == task.format.replace("int8", "int4")
        reasons = [failure_of_status(attempt.error).reason for attempt in task.attempts if attempt.HasField("error")]
        assert reasons == ["VALIDATION_FAILED"] * 3
        assert task.inputs["calibration"] == "task:calibrate-int4/calibration"
        assert dict_of(task.attempts[2].params)["keep"] == ["layers.0.q_proj"]
        assert dict_of(task.attempts[3].params)["level"] == "int8"
    (validate,) = (task for task in export.tasks if task.stage == "validate")
    assert [list(dict_of(attempt.params).get("again", [])) for attempt in validate.attempts] == [
        [],
        ["onnx-int4", "pytorch-int4"],
        ["onnx-int4", "pytorch-int4"],
        ["onnx-int8", "pytorch-int8"],
    ]
