"""Requests of very many tiny parts are refused before they are parsed."""

from __future__ import annotations

import time
from typing import Any

import pytest

from slipway.errors import ServiceError
from slipway.rpc.structs import struct_of
from slipway.security.wire import MOST_FIELDS, check_fields
from slipway_protos.v1 import artifact_pb2, export_pb2, worker_pb2

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
