"""Clients that send or open too much: memory and streams are bounded, and the server goes on for the others."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import grpc
import psutil
import pytest

from slipway.artifacts.digests import digest_bytes
from slipway.client import Client
from slipway.errors import ModelExportError
from slipway.security.limits import Limits
from slipway_coordinator.transfers import TransferLimits
from slipway_protos.v1 import artifact_pb2, worker_pb2
from slipway_protos.v1 import export_pb2 as pb
from support.coordinators.guarded_servers import SERVICE, Code, Servers, create
from support.coordinators.harness import wait_for
from support.harness.unhurried import unhurried
from support.servers.begun_messages import bytes_taken


def test_a_message_of_100_megabytes_is_refused(servers: Servers) -> None:
    before = psutil.Process(servers.processes["coordinator"].pid).memory_info().rss
    request = create(labels={"x": "y" * 100_000_000})
    assert servers.as_("submitter", "CreateExport", request) is Code.RESOURCE_EXHAUSTED
    assert psutil.Process(servers.processes["coordinator"].pid).memory_info().rss - before < 100e6


LARGE = 4 << 20
UNASKED = 256 << 10  # of a call: what HTTP/2 has room for before anybody reads


@pytest.mark.parametrize(
    ("method", "caller", "whole"),
    [
        ("slipway.v1.ExportService/GetExport", "", 0),
        ("grpc.health.v1.Health/Check", "", Limits().unnamed_requests),
        ("slipway.v1.ExportService/CreateExport", "submitter", Limits().requests),
    ],
)
def test_requests_that_are_begun_and_never_whole_take_bounded_memory(
    servers: Servers, method: str, caller: str, whole: int
) -> None:
    calls, token = 32, servers.tokens[caller] if caller else ""
    taken = bytes_taken(servers.ports["coordinator"], f"/{method}", calls=calls, announced=LARGE, token=token)
    assert taken <= whole * LARGE + calls * UNASKED
    assert servers.healthy()


def test_files_that_wait_for_their_turn_take_bounded_memory(servers: Servers) -> None:
    """Their first messages are small, and the next ones wait at the client."""
    method, calls = "slipway.v1.ArtifactService/WriteBlob", 32
    first = [
        artifact_pb2.WriteBlobRequest(parent="projects/red", digest=digest_bytes(b"%d" % number), size_bytes=1 << 30)
        for number in range(calls)
    ]
    taken = bytes_taken(
        servers.ports["coordinator"],
        f"/{method}",
        calls=calls,
        announced=LARGE,
        first=[each.SerializeToString() for each in first],
        token=servers.tokens["submitter"],
    )
    assert taken <= TransferLimits().each * LARGE + calls * UNASKED
    first[0].data = bytes(1 << 20)
    assert servers.call(f"/{method}", first[0].SerializeToString(), token=servers.tokens["submitter"]) is (
        Code.RESOURCE_EXHAUSTED
    )


def test_requests_of_all_principals_together_take_bounded_memory(servers: Servers) -> None:
    """Four principals begin large requests and end none; workers' reports and health checks are answered meanwhile."""
    method, calls, names = SERVICE + "CreateExport", 8, ("submitter", "operator", "neighbour", "viewer")
    port, report = servers.ports["coordinator"], worker_pb2.SynchronizeRequest(worker_id="w", stages=["none"])
    with ThreadPoolExecutor(len(names)) as pool:
        begun = [
            pool.submit(bytes_taken, port, method, calls=calls, announced=LARGE, token=servers.tokens[name])
            for name in names
        ]
        while not all(each.done() for each in begun):
            began = time.monotonic()
            synchronize = "/slipway.v1.WorkerService/Synchronize"
            assert servers.call(synchronize, report.SerializeToString(), token=servers.tokens["worker"]) is Code.OK
            assert servers.healthy()
            assert time.monotonic() - began < unhurried(2)
            time.sleep(0.1)
        taken = sum(each.result() for each in begun)
    # A busy machine is slow enough for some to give their place to those who wait; without a bound all would be taken, twice as much.
    assert taken <= 1.5 * Limits().all_requests * LARGE + len(names) * calls * UNASKED
    with servers.client("submitter") as client:
        client.get_export("ours")


@pytest.mark.slow
def test_one_client_cannot_take_all_streams(servers: Servers) -> None:
    with ExitStack() as stack:
        calls = []
        for _ in range(3):  # one connection has room for 512 streams, one principal for 256
            channel = grpc.insecure_channel(
                f"127.0.0.1:{servers.ports['coordinator']}", options=[("grpc.use_local_subchannel_pool", 1)]
            )
            watch = stack.enter_context(channel).unary_stream(SERVICE + "WatchExport")
            request = pb.WatchExportRequest(name="projects/red/exports/ours").SerializeToString()
            metadata = (("authorization", f"Bearer {servers.tokens['viewer']}"),)
            calls += [watch(request, metadata=metadata, timeout=240) for _ in range(100)]
        codes = [first_status(call) for call in calls]
        assert codes.count(Code.OK) == 256
        assert set(codes) == {Code.OK, Code.RESOURCE_EXHAUSTED}
        with servers.client("submitter") as other:
            assert next(other.watch_export("ours")).export.name.endswith("ours")
    with servers.client("viewer") as client:
        wait_for(lambda: watches(client))


def watches(client: Client) -> bool:
    try:
        return bool(next(client.watch_export("ours", patience_seconds=0)))
    except ModelExportError as error:
        assert error.reason == "LIMIT_EXCEEDED"
        return False


def first_status(call: Any) -> Code:
    try:
        next(call)
    except grpc.RpcError as error:
        return error.code()
    return Code.OK


def test_slow_readers_hold_nobody_up(servers: Servers) -> None:
    """Twenty streams that are never read, while 40 MB of log lines pass through the export they watch."""
    lines = [pb.LogLine(level="info", message="x" * 20_000) for _ in range(100)]
    running = worker_pb2.RunningTask(task="projects/red/exports/ours:merge:1", logs=lines)
    report = worker_pb2.SynchronizeRequest(worker_id="w", stages=["none"], running=[running])
    watch = servers.channels["coordinator"].unary_stream(SERVICE + "WatchExport")
    request = pb.WatchExportRequest(name="projects/red/exports/ours").SerializeToString()
    metadata = (("authorization", f"Bearer {servers.tokens['operator']}"),)
    before = psutil.Process(servers.processes["coordinator"].pid).memory_info().rss
    unread = [watch(request, metadata=metadata, timeout=240) for _ in range(20)]
    try:
        for _ in range(20):
            method = "/slipway.v1.WorkerService/Synchronize"
            assert servers.call(method, report.SerializeToString(), token=servers.tokens["worker"]) is Code.OK
        began = time.monotonic()
        with servers.client("viewer") as client:
            client.get_export("ours")
        assert time.monotonic() - began < unhurried(2)
        grown = psutil.Process(servers.processes["coordinator"].pid).memory_info().rss - before
        assert grown < 150e6, f"{grown / 1e6:.0f} MB more"
    finally:
        for call in unread:
            call.cancel()
