"""Lists of exports that a client takes as it comes: no answer over 4 MiB, however many and however large they are."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from slipway_coordinator.api.requests import PAGE_BYTES
from slipway_coordinator.lifecycle.records import ExportRecord, ExportState
from slipway_protos.v1 import artifact_pb2, artifact_pb2_grpc, export_pb2_grpc
from slipway_protos.v1 import export_pb2 as pb
from support.coordinators.harness import DIGEST, Harness, tiny_export, tiny_task

MANY, STOCK_CLIENTS_TAKE = 400, 4 << 20
FACTS = {f"fact-{n}": f"{n:0100}" for n in range(120)}  # with them an export has 15 KB, as one of six formats has


def record(number: int) -> ExportRecord:
    """An ended export, which nobody goes on with."""
    ended = tiny_export(f"e-{number:04}", tiny_task("a").with_(facts=FACTS), base=DIGEST)
    changes = {"state": ExportState.CANCELLED, "labels": {"model_name": "m"}, "create_time": 1e9 + number // 2}
    return ended.with_(end_time=time.time(), **changes)


NAMES = sorted(
    (f"projects/default/exports/e-{n:04}" for n in range(MANY)), key=lambda name: (-(int(name[-4:]) // 2), name)
)
"""Newest first; two were created at the same time."""


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[export_pb2_grpc.ExportServiceStub]:
    """Over a channel as everybody makes it, with gRPC's own limits."""
    with Harness(tmp_path_factory.mktemp("lists"), with_worker=False) as harness:
        for number in range(MANY):
            harness.server.coordinator.database.insert(record(number))
        with grpc.insecure_channel(harness.address) as channel:
            yield export_pb2_grpc.ExportServiceStub(channel)


def pages(stub: export_pb2_grpc.ExportServiceStub, **fields: Any) -> list[pb.ListExportsResponse]:
    request, found = pb.ListExportsRequest(parent="projects/default", **fields), []
    while not found or request.page_token:
        found.append(stub.ListExports(request, timeout=60))
        request.page_token = found[-1].next_page_token
    return found


def test_the_largest_page_is_one_that_every_client_takes(stub: export_pb2_grpc.ExportServiceStub) -> None:
    found = pages(stub, page_size=1000)
    assert [export.name for page in found for export in page.exports] == NAMES
    assert sum(page.ByteSize() for page in found) > STOCK_CLIENTS_TAKE, "or this test shows nothing"
    assert max(page.ByteSize() for page in found) < STOCK_CLIENTS_TAKE
    assert [len(page.exports) for page in found[:-1]] == [100] * (len(found) - 1), "a page has a hundred at most"
    assert all(export.tasks and export.HasField("configuration") for page in found for export in page.exports)


def test_a_summary_has_no_tasks_and_fits_many_times_more_into_a_page(stub: export_pb2_grpc.ExportServiceStub) -> None:
    (page,) = pages(stub, page_size=1000, view=pb.EXPORT_VIEW_SUMMARY)
    assert [export.name for export in page.exports] == NAMES
    assert page.ByteSize() < PAGE_BYTES / 20
    whole = stub.GetExport(pb.GetExportRequest(name=NAMES[0]))
    assert whole.tasks
    whole.ClearField("tasks")
    whole.ClearField("sources")
    whole.ClearField("configuration")
    assert page.exports[0] == whole, "the rest is the same"


@pytest.mark.parametrize("size", [7, 99, 100, 101, 200, 399, 400, 401])
def test_pages_have_as_many_as_were_asked_for(stub: export_pb2_grpc.ExportServiceStub, size: int) -> None:
    found = pages(stub, page_size=size, view=pb.EXPORT_VIEW_SUMMARY)
    assert [len(page.exports) for page in found[:-1]] == [size] * (len(found) - 1)
    assert [export.name for page in found for export in page.exports] == NAMES


def test_a_view_that_does_not_exist_is_refused(stub: export_pb2_grpc.ExportServiceStub) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        pages(stub, view=7)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_the_largest_page_of_artifacts_fits_too() -> None:
    page = artifact_pb2.ListArtifactsResponse(digests=[DIGEST] * 10_000, next_page_token="x" * 256)
    assert page.ByteSize() < STOCK_CLIENTS_TAKE
    assert artifact_pb2_grpc  # the service whose pages these are
