"""Callers who break the rules, on the wire: each gets a typed status with a reason, soon, and the next one is served."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from slipway.artifacts.digests import digest_bytes
from slipway.security.access.principals import new_token
from slipway_protos.v1 import artifact_pb2, worker_pb2
from slipway_protos.v1 import export_pb2 as pb
from support.coordinators.attacker import (
    ARTIFACTS,
    EXPORTS,
    OURS,
    WORKERS,
    Attacker,
    Wire,
    blob,
    done,
    export,
    field,
    report,
)
from support.coordinators.harness import CONFIGURATION
from support.coordinators.random_messages import messages


def test_artifacts_of_another_project_are_as_if_they_were_not_there(attacker: Attacker) -> None:
    name, nothing = attacker.theirs, digest_bytes(b"nothing at all")
    own = f"projects/red/artifacts/{OURS}"
    calls: list[tuple[str, Callable[[str], Wire]]] = [
        ("ExportService/CreateExport", lambda digest: export(sources={"base": digest, "adapter": digest})),
        ("ArtifactService/GetArtifact", lambda digest: artifact_pb2.GetArtifactRequest(name=f"projects/red/artifacts/{digest}")),
        ("ArtifactService/GetArtifact", lambda digest: artifact_pb2.GetArtifactRequest(name=f"projects/blue/artifacts/{digest}")),
        ("ArtifactService/ReadBlob", lambda digest: artifact_pb2.ReadBlobRequest(name=f"projects/red/artifacts/{digest}", digest=digest_bytes(b"theirs"))),
        ("ArtifactService/ReadBlob", lambda digest: artifact_pb2.ReadBlobRequest(name=own, digest=digest)),
    ]  # fmt: skip
    for method, request in calls:
        found = [attacker.failure(f"/slipway.v1.{method}", request(digest)) for digest in (name, nothing)]
        texts = {
            f"{each}".replace(digest, "")
            for each, digest in zip(found, (name, nothing), strict=True)
            if each is not None
        }
        assert len(texts) == 1, texts
        assert all(each is not None and each.reason == "ARTIFACT_NOT_FOUND" for each in found)
    file = artifact_pb2.ArtifactFile(path="theirs", size_bytes=6, digest=digest_bytes(b"theirs"))
    created = artifact_pb2.CreateArtifactRequest(parent="projects/red", files=[file])
    assert attacker.call(ARTIFACTS + "CreateArtifact", created) == "", "told what is missing"
    get = artifact_pb2.GetArtifactRequest(name=f"projects/red/artifacts/{name}")
    assert attacker.call(ARTIFACTS + "GetArtifact", get) == "ARTIFACT_NOT_FOUND"


def test_who_holds_no_lease_writes_nothing_into_an_export(attacker: Attacker) -> None:
    with attacker.place.client_of("submitter") as client:
        name = client.create_export(CONFIGURATION, sources={"base": OURS, "adapter": OURS}, export_id="watched").name
        logs = [pb.LogLine(message="forged")]
        for task in client.get_export(name).tasks:
            key = f"{name}:{task.id}:1"
            running = worker_pb2.RunningTask(
                task=key, lease_epoch=1, progress=pb.TaskProgress(phase="forged"), logs=logs
            )
            assert attacker.call(WORKERS + "Synchronize", report(running=[running]), by="worker") == ""
            assert attacker.call(WORKERS + "CompleteTask", done(task=key, logs=logs), by="worker") == "LEASE_LOST"
        client.cancel_export(name)
        events = list(client.watch_export(name))
    assert events
    assert not [event for event in events if "forged" in (event.log.message, event.progress.phase)]


UNKNOWN = {
    "none": "",
    "made-up": new_token(),
    "expired": "expired",
    "a-name": "admin-of-everything-here",
    "a-hash": "0" * 64,
    "long": "x" * 4000,
    "claims": "eyJhbGciOiJub25lIn0.eyJzdWIiOiJhZG1pbiJ9.",
}


@pytest.mark.parametrize("who", UNKNOWN)
def test_who_is_nobody_learns_nothing(attacker: Attacker, who: str) -> None:
    for method, request in (
        (EXPORTS + "GetExport", pb.GetExportRequest(name="projects/red/exports/ours")),
        (EXPORTS + "CreateExport", export()),
        (ARTIFACTS + "WriteBlob", blob()),
        (WORKERS + "Synchronize", report()),
    ):
        assert attacker.call(method, request, by=UNKNOWN[who]) == "UNAUTHENTICATED"


@pytest.mark.parametrize(
    "metadata",
    [
        [("authorization", "Bearer {submitter}")],
        [
            ("x-forwarded-user", "admin"),
            ("x-slipway-principal", "admin"),
            ("x-forwarded-client-cert", "By=spiffe://admin"),
        ],
        [("grpc-accept-encoding", "gzip"), ("traceparent", "00-" + "z" * 32 + "-1-01"), ("tracestate", "x" * 3000)],
    ],
    ids=["twice", "claims", "traces"],
)
def test_claims_in_metadata_are_worth_nothing(attacker: Attacker, metadata: list[tuple[str, str]]) -> None:
    shown = [(key, value.format(**attacker.place.tokens)) for key, value in metadata]
    deletion = pb.DeleteExportRequest(name="projects/red/exports/ended")
    assert attacker.call(EXPORTS + "DeleteExport", deletion, metadata=shown) in {"PERMISSION_DENIED", "UNAUTHENTICATED"}
    assert attacker.call(EXPORTS + "ListExports", pb.ListExportsRequest(parent="projects/blue"), metadata=shown) in {
        "PERMISSION_DENIED", "UNAUTHENTICATED"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("by", "method", "request_"),
    [
        ("worker", EXPORTS + "GetExport", pb.GetExportRequest(name="projects/red/exports/ours")),
        ("worker", ARTIFACTS + "ListArtifacts", artifact_pb2.ListArtifactsRequest(parent="projects/red")),
        ("worker", ARTIFACTS + "WriteBlob", blob()),
        ("viewer", EXPORTS + "CreateExport", export()),
        ("viewer", ARTIFACTS + "WriteBlob", blob()),
        ("submitter", EXPORTS + "DeleteExport", pb.DeleteExportRequest(name="projects/red/exports/ended")),
        ("admin", WORKERS + "Synchronize", report()),
        ("admin", WORKERS + "CompleteTask", done()),
        ("neighbour", EXPORTS + "ListExports", pb.ListExportsRequest(parent="projects/red")),
        ("neighbour", ARTIFACTS + "WriteBlob", blob()),
    ],
)
def test_a_role_is_for_its_own_calls(attacker: Attacker, by: str, method: str, request_: Message) -> None:
    assert attacker.call(method, request_, by=by) == "PERMISSION_DENIED"


@pytest.mark.parametrize(
    "sent",
    [
        [],
        [b""],
        [b"", blob()],
        [artifact_pb2.WriteBlobRequest(data=b"data")],
        [artifact_pb2.WriteBlobRequest(data=b"data"), blob()],
        [blob()],
        [blob(data=b"dat")],
        [blob(data=b"data!")],
        [blob(data=b"date")],
        [blob(), artifact_pb2.WriteBlobRequest(data=b"data" * 1000)],
        [blob(data=b"data"), artifact_pb2.WriteBlobRequest(data=b"!")],
        [blob(), blob(), blob()],
        [blob(data=bytes(1 << 17))],
        [blob(size_bytes=1 << 30), artifact_pb2.WriteBlobRequest(data=bytes(6 << 20))],
        [blob(size_bytes=0)],
        [blob(), b"\xff"],
    ],
    ids=[
        "nothing", "empty", "empty-first", "headless", "head-last", "no-data", "too-short", "too-long", "other", "far-too-long",
        "more-after-the-end", "heads", "large-first", "large-chunk", "nothing-announced", "no-message",
    ],
)  # fmt: skip
def test_uploads_in_the_wrong_order_and_of_the_wrong_sizes(attacker: Attacker, sent: list[Wire]) -> None:
    refused = {"REQUEST_INVALID", "LIMIT_EXCEEDED", "ARTIFACT_CORRUPT", "ARTIFACT_INVALID"}
    assert attacker.call(ARTIFACTS + "WriteBlob", *sent) in refused
    file = artifact_pb2.ArtifactFile(path="a", size_bytes=4, digest=digest_bytes(b"data"))
    created = artifact_pb2.CreateArtifactRequest(parent="projects/red", files=[file])
    assert attacker.call(ARTIFACTS + "CreateArtifact", created) == ""
    assert not attacker.place.forgotten_uploads(), (
        "nothing stays of what was refused, but a beginning that waits for its rest"
    )


def test_an_upload_that_never_ends_is_ended_at_its_announced_size(attacker: Attacker) -> None:
    """A client that goes on sending gets its answer all the same."""
    endless = itertools.chain(
        [blob(size_bytes=1 << 20)], itertools.repeat(artifact_pb2.WriteBlobRequest(data=bytes(1 << 16)))
    )
    failure = attacker.failure(ARTIFACTS + "WriteBlob", endless)
    assert failure is not None
    assert failure.reason in {"ARTIFACT_INVALID", "LIMIT_EXCEEDED"}


@pytest.mark.parametrize(
    ("method", "request_", "by", "reason"),
    [
        ("ExportService/DeleteExport", pb.DeleteExportRequest(name="projects/red/exports/ours"), "admin", "EXPORT_STATE"),
        ("ExportService/RetryExport", pb.RetryExportRequest(name="projects/red/exports/ours"), "submitter", "EXPORT_STATE"),
        ("ExportService/CancelExport", pb.CancelExportRequest(name="projects/red/exports/ours", etag="9-9"), "submitter", "ETAG_MISMATCH"),
        ("ExportService/CancelExport", pb.CancelExportRequest(name="projects/red/exports/none"), "submitter", "EXPORT_NOT_FOUND"),
        ("WorkerService/CompleteTask", done(), "worker", "LEASE_LOST"),
        ("WorkerService/CompleteTask", done(task="projects/red/exports/none:merge:1"), "worker", "LEASE_LOST"),
        ("WorkerService/CompleteTask", done(task="projects/red/exports/ours:none:99"), "worker", "LEASE_LOST"),
        ("WorkerService/CompleteTask", worker_pb2.CompleteTaskRequest(worker_id="w", task="projects/red/exports/ours:merge:1"), "worker", "REQUEST_INVALID"),
        ("WorkerService/Synchronize", worker_pb2.SynchronizeRequest(worker_id="w"), "worker", "REQUEST_INVALID"),
    ],
)  # fmt: skip
def test_requests_in_the_wrong_order(attacker: Attacker, method: str, request_: Message, by: str, reason: str) -> None:
    assert attacker.call(f"/slipway.v1.{method}", request_, by=by) == reason


METHODS = [
    (EXPORTS, pb, ("CreateExport", "GetExport", "ListExports", "CancelExport", "RetryExport", "DeleteExport", "WatchExport")),
    (ARTIFACTS, artifact_pb2, ("GetArtifact", "ListArtifacts", "CreateArtifact", "ReadBlob", "WriteBlob", "GetUpload")),
    (WORKERS, worker_pb2, ("Synchronize", "CompleteTask")),
]  # fmt: skip
KINDS = [
    (service + name, getattr(module, f"{name}Request").DESCRIPTOR)
    for service, module, names in METHODS
    for name in names
]


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, bytes, str]:
    """Draw a method, a request of it that is damaged on the wire, and a caller."""
    method, kind = draw(st.sampled_from(KINDS))
    data = bytearray(draw(messages(kind)).SerializeToString())
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.integers(0, len(data)))
        match draw(st.integers(0, 3)):
            case 0:
                del data[place:]
            case 1:
                data[place:place] = draw(st.binary(min_size=1, max_size=12))
            case 2:
                data += data[:place]
            case _ if place < len(data):
                data[place] = draw(st.integers(0, 255))
    caller = "worker" if method.startswith(WORKERS) else draw(st.sampled_from(["submitter", "admin"]))
    return method, bytes(data), caller


@settings(max_examples=60)
@given(call=calls())
def test_requests_that_are_damaged_on_the_wire(running_attacker: Attacker, call: tuple[str, bytes, str]) -> None:
    method, data, by = call
    if by == "worker" and method.endswith("Synchronize"):
        data += field(worker_pb2.SynchronizeRequest, "max_wait")  # does not wait for work
    running_attacker.call(method, data, by=by)


def test_after_all_of_it_everything_is_as_before(attacker: Attacker) -> None:
    assert attacker.call("/grpc.health.v1.Health/Check", b"", by="") == ""
    with attacker.place.client_of("submitter") as client:
        assert OURS in set(client.list_artifacts())
        assert attacker.theirs not in set(client.list_artifacts())
