"""Requests of very many tiny parts are refused before they are parsed."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import pytest

from slipway.errors import ServiceError
from slipway.rpc.call_ends import failure_of_call
from slipway.rpc.values import struct_of
from slipway.security.access.access_file import Everyone
from slipway.security.access.principals import OWNER
from slipway.security.access.rules import Rule
from slipway.security.channels import MAX_MESSAGE_BYTES
from slipway.security.incoming import MOST_FIELDS, check_fields
from slipway.security.interceptor import AccessInterceptor
from slipway_protos.v1 import artifact_pb2, export_pb2, worker_pb2
from support.harness.unhurried import unhurried

ARTIFACT = "/slipway.v1.ArtifactService/CreateArtifact"
REPORT, RESULT = "/slipway.v1.WorkerService/Synchronize", "/slipway.v1.WorkerService/CompleteTask"
MANY = 1_000_000


def part(message: Any, field: str, content: bytes = b"") -> bytes:
    """One length-delimited field of a message."""
    number, size, length = message.DESCRIPTOR.fields_by_name[field].number, len(content), bytearray()
    while True:
        length.append(size & 0x7F | (0x80 if size > 0x7F else 0))
        size >>= 7
        if not size:
            return bytes([number << 3 | 2]) + bytes(length) + content


ERROR = part(worker_pb2.CompleteTaskRequest, "error", b"\x1a\x00" * MANY)


@pytest.mark.parametrize(
    ("method", "data"),
    [
        (ARTIFACT, part(artifact_pb2.CreateArtifactRequest, "files") * MANY),
        (ARTIFACT, part(artifact_pb2.CreateArtifactRequest, "parent") * MANY),
        (ARTIFACT, b"\xf8\x07\x00" * MANY),
        (REPORT, part(worker_pb2.SynchronizeRequest, "running") * MANY),
        (REPORT, part(worker_pb2.SynchronizeRequest, "stages") * MANY),
        (REPORT, part(worker_pb2.SynchronizeRequest, "parameters") * MANY),
        (RESULT, part(worker_pb2.CompleteTaskRequest, "logs") * MANY),
        (RESULT, ERROR),
        (RESULT, part(worker_pb2.CompleteTaskRequest, "logs") * MANY + b"\xff"),
        (RESULT, b"\x0b" * 2 * MANY),
    ],
    ids=["files", "parent", "unknown", "running", "stages", "parameters", "logs", "details", "malformed", "groups"],
)
def test_very_many_fields_are_refused_at_once(method: str, data: bytes) -> None:
    began = time.monotonic()
    with pytest.raises(ServiceError, match="more than 200000 fields") as caught:
        check_fields(data, method)
    assert caught.value.reason == "LIMIT_EXCEEDED"
    assert time.monotonic() - began < 5


async def _sent(channel: grpc.aio.Channel, method: str, data: bytes) -> Any:
    return await channel.unary_unary(method)(data)


async def longest_pause(until: asyncio.Future[Any]) -> float:
    """The longest time in which the event loop did nothing else."""
    longest, last = 0.0, time.monotonic()
    while not until.done():
        await asyncio.sleep(0.001)
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    return longest


async def test_counting_the_fields_of_a_large_request_holds_nobody_up() -> None:
    """Fields whose numbers have as many bytes as possible; even the audit log does not read them a second time."""
    long = bytes([0xF8, *[0x80] * 8, 0x01, *[0x80] * 9, 0x00])
    rules = {RESULT: Rule(OWNER.roles, max_bytes=MAX_MESSAGE_BYTES), ARTIFACT: Rule(OWNER.roles, max_bytes=8 << 20)}
    server = grpc.aio.server(
        interceptors=[AccessInterceptor(Everyone(), rules=rules, audits=True)],
        options=[("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)],
    )
    for method in rules:
        service, _, name = method.strip("/").partition("/")
        handler = grpc.unary_unary_rpc_method_handler(lambda request, _: request)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {name: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            for method, data in ((RESULT, long * 700_000), (ARTIFACT, long * 300_000)):
                refused = asyncio.create_task(_sent(channel, method, data))
                pause = await longest_pause(refused)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    refused.result()
                assert failure_of_call(caught.value, address="").reason == "LIMIT_EXCEEDED"
                assert pause < unhurried(0.1), f"{pause:.2f} s"
    finally:
        await server.stop(None)


def test_real_requests_are_not() -> None:
    files = [
        artifact_pb2.ArtifactFile(path=f"f{n}", size_bytes=n, digest="d" * 71, media_type="m") for n in range(10_000)
    ]
    whole = artifact_pb2.CreateArtifactRequest(parent="projects/red", files=files)
    check_fields(whole.SerializeToString(), ARTIFACT)
    lines = [export_pb2.LogLine(level="info", message="x" * 200) for _ in range(1000)]
    running = [worker_pb2.RunningTask(task=f"t{n}", logs=lines) for n in range(40)]
    check_fields(worker_pb2.SynchronizeRequest(running=running).SerializeToString(), REPORT)
    output = worker_pb2.TaskOutput(facts=struct_of({f"list-{n}": [0.5] * 300 for n in range(70)}))
    check_fields(worker_pb2.CompleteTaskRequest(output=output).SerializeToString(), RESULT)
    check_fields(part(artifact_pb2.WriteBlobRequest, "data", bytes(4 << 20)), "/slipway.v1.ArtifactService/WriteBlob")
    check_fields(b"\x0a\x00" * 8 * MOST_FIELDS, "/of.Another/Method")
