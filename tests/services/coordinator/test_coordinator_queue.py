"""A long queue: how much it takes, and who goes first."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from coordinator_harness import DIGEST, Harness, state
from slipway.configuration import ExportConfiguration
from slipway.wire import STATUS_KEY
from slipway_protos.v1 import export_pb2

SOURCES = {"base": DIGEST, "adapter": DIGEST}
DEFAULTS = ExportConfiguration()


def test_a_full_queue_says_when_to_come_back(tmp_path: Path) -> None:
    with Harness(tmp_path, with_worker=False, options={"max_unended": 2}) as harness:
        client = harness.client
        first = client.create_export(DEFAULTS, sources=SOURCES, export_id="a")
        client.create_export(DEFAULTS, sources=SOURCES, export_id="b")
        assert client.create_export(DEFAULTS, sources=SOURCES, export_id="a") == client.get_export("a")
        request = export_pb2.CreateExportRequest(parent="projects/default", sources=SOURCES)
        with pytest.raises(grpc.RpcError) as caught:
            client._stub.CreateExport(request)
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        (data,) = [value for key, value in caught.value.trailing_metadata() if key == STATUS_KEY]
        retry = error_details_pb2.RetryInfo()
        assert any(detail.Unpack(retry) for detail in status_pb2.Status.FromString(data).details)
        assert retry.retry_delay.seconds > 0
        client.cancel_export(first.name)
        assert state(client.create_export(DEFAULTS, sources=SOURCES, export_id="c")) in {"queued", "running"}
