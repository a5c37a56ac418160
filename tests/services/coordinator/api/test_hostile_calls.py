"""Values that break programs, in calls on the wire: each gets a typed status with a reason, soon, and the next one is served."""

from __future__ import annotations

import base64
import json

import pytest

from slipway.artifacts.digests import digest_bytes
from slipway.rpc.messages import configuration_message
from slipway_coordinator.storage.filters import page_token
from slipway_protos.v1 import artifact_pb2, configuration_pb2, worker_pb2
from slipway_protos.v1 import export_pb2 as pb
from support.coordinators.attacker import (
    ARTIFACTS,
    EXPORTS,
    OURS,
    SECRET,
    WORKERS,
    Attacker,
    blob,
    done,
    export,
    field,
    report,
)
from support.coordinators.harness import CONFIGURATION, DIGEST
from support.hostile.texts import DECEPTIVE

HALF_A_MEBIBYTE = 1 << 19


@pytest.mark.parametrize(
    ("method", "data", "by"),
    [
        (EXPORTS + "CreateExport", field(pb.CreateExportRequest, "labels") * (HALF_A_MEBIBYTE - 1), "submitter"),
        (EXPORTS + "CreateExport", field(pb.CreateExportRequest, "configuration") * (HALF_A_MEBIBYTE - 1), "submitter"),
        (EXPORTS + "GetExport", field(pb.GetExportRequest, "name") * HALF_A_MEBIBYTE, "submitter"),
        (ARTIFACTS + "CreateArtifact", field(artifact_pb2.CreateArtifactRequest, "files") * 4_000_000, "submitter"),
        (ARTIFACTS + "CreateArtifact", field(artifact_pb2.CreateArtifactRequest, "files") * 400_000, "submitter"),
        (ARTIFACTS + "CreateArtifact", field(artifact_pb2.CreateArtifactRequest, "files") * 4_000_000, "viewer"),
        (ARTIFACTS + "WriteBlob", b"\xf8\x07\x00" * 1_600_000, "submitter"),
        (WORKERS + "Synchronize", field(worker_pb2.SynchronizeRequest, "running") * 4_000_000, "worker"),
        (WORKERS + "Synchronize", field(worker_pb2.SynchronizeRequest, "parameters") * 500_000, "worker"),
        (WORKERS + "CompleteTask", field(worker_pb2.CompleteTaskRequest, "logs") * 4_000_000, "worker"),
        (WORKERS + "CompleteTask", b"\x0b" * 8_000_000, "worker"),
    ],
    ids=[
        "labels", "configurations", "names", "files", "fewer-files", "unauthorized", "unknown", "running", "parameters", "logs", "groups",
    ],
)  # fmt: skip
def test_messages_of_very_many_tiny_parts(attacker: Attacker, method: str, data: bytes, by: str) -> None:
    assert attacker.call(method, data, by=by) in {"LIMIT_EXCEEDED", "REQUEST_INVALID", "PERMISSION_DENIED"}


def tokens() -> list[str]:
    query = ("projects/red", "")
    good = page_token((1.5, "projects/red/exports/ours"), query=query)
    foreign = [page_token((1.5, "x"), query=other) for other in (("projects/blue", ""), ("projects/red", "state=done"))]
    time_, name, mark = json.loads(base64.urlsafe_b64decode(good))
    forged = [[time_, name], [time_, name, mark, 1], [name, time_, mark], {"t": time_}, time_, [[[]]], [10**400, name, mark],
              [time_, "\ud800", mark], [time_, "a\0", mark], [time_, name * 90, mark]]  # fmt: skip
    flipped = bytes([good.encode()[9] ^ 1])
    return [
        *foreign, good[:-4], good[1:], good + "AAAA", good + good, f" {good}", good.replace("=", "") + "%3D", good[:9] + flipped.decode() + good[10:],
        "A" * 257, "A" * 15_000, "=" * 100, "é" * 50, "\u202e" + good, "-", "null", *(base64.urlsafe_b64encode(json.dumps(each).encode()).decode() for each in forged),
    ]  # fmt: skip


@pytest.mark.parametrize("number", range(len(tokens())))
def test_page_tokens_that_are_long_foreign_or_damaged(attacker: Attacker, number: int) -> None:
    token = tokens()[number]
    for method, kind in (
        (EXPORTS + "ListExports", pb.ListExportsRequest),
        (ARTIFACTS + "ListArtifacts", artifact_pb2.ListArtifactsRequest),
    ):
        request = kind(parent="projects/red", page_token=token)
        assert attacker.call(method, request) in {"REQUEST_INVALID", "LIMIT_EXCEEDED"}


SURROGATE = b"\xed\xa0\xbd"
NAMES = [
    *(text for text in DECEPTIVE if text.encode(errors="replace").decode() == text),
    "\0",
    "../red",
    "a" * 300,
    "a" * 15_000,
    "²",
    "%s",
    " ",
]


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_names_that_deceive_or_are_very_long(attacker: Attacker, name: str) -> None:
    below = f"projects/red/exports/{name}"
    refused = {"REQUEST_INVALID", "LIMIT_EXCEEDED", "CONFIGURATION_INVALID"}
    for method, request in (
        ("CreateExport", export(labels={"model_name": name})),
        ("CreateExport", export(parent=f"projects/{name}")),
        ("CreateExport", export(export_id=name)),
        ("CreateExport", export(sources={name: DIGEST})),
        ("ListExports", pb.ListExportsRequest(parent=f"projects/{name}")),
        ("ListExports", pb.ListExportsRequest(parent="projects/red", filter=f"{name}=x")),
        ("GetExport", pb.GetExportRequest(name=below)),
        ("WatchExport", pb.WatchExportRequest(name=below)),
        ("RetryExport", pb.RetryExportRequest(name="projects/red/exports/ended", etag=name)),
    ):
        allowed = refused | {"EXPORT_NOT_FOUND", "PERMISSION_DENIED", "ETAG_MISMATCH"}
        if attacker.call(EXPORTS + method, request) not in allowed:
            assert name in {"²", "%s", " ", "../red", "a" * 300}, method  # ugly, and shown as they are
    assert attacker.call(WORKERS + "Synchronize", report(worker_id=name), by="worker") in refused
    assert attacker.call(WORKERS + "CompleteTask", done(task=f"{below}:merge:1"), by="worker") in {
        *refused,
        "LEASE_LOST",
    }


@pytest.mark.parametrize("text", [SURROGATE, b"\xff", b"\xc0\x80", b"a\xe2\x28\xa1"])
def test_texts_that_are_no_unicode(attacker: Attacker, text: bytes) -> None:
    for method, data, by in (
        (EXPORTS + "GetExport", field(pb.GetExportRequest, "name", b"projects/red/exports/" + text), "submitter"),
        (EXPORTS + "CreateExport", field(pb.CreateExportRequest, "export_id", text), "submitter"),
        (EXPORTS + "CreateExport", field(pb.CreateExportRequest, "labels", b"\x0a\x01a\x12" + bytes([len(text)]) + text), "submitter"),
        (ARTIFACTS + "ListArtifacts", field(artifact_pb2.ListArtifactsRequest, "page_token", text), "submitter"),
        (WORKERS + "Synchronize", field(worker_pb2.SynchronizeRequest, "stages", text), "worker"),
        (WORKERS + "CompleteTask", field(worker_pb2.CompleteTaskRequest, "task", text), "worker"),
    ):  # fmt: skip
        assert attacker.call(method, data, by=by) == "REQUEST_INVALID"


LOWEST, HIGHEST = -(2**63), 2**63 - 1


@pytest.mark.parametrize("number", [-1, LOWEST, HIGHEST, 2**31 - 1, -(2**31)])
def test_counts_and_sizes_that_are_negative_or_huge(attacker: Attacker, number: int) -> None:
    small = max(min(number, 2**31 - 1), -(2**31))
    name = f"projects/red/artifacts/{OURS}"
    refused_if = {True: {"REQUEST_INVALID"}, False: {""}}
    for method, kind in (
        (EXPORTS + "ListExports", pb.ListExportsRequest),
        (ARTIFACTS + "ListArtifacts", artifact_pb2.ListArtifactsRequest),
    ):
        assert attacker.call(method, kind(parent="projects/red", page_size=small)) in refused_if[small < 0]
    assert attacker.call(EXPORTS + "CreateExport", export(priority=small)) in refused_if[small != -1]
    assert attacker.call(ARTIFACTS + "WriteBlob", blob(size_bytes=number)) in {
        "REQUEST_INVALID", "LIMIT_EXCEEDED", "ARTIFACT_INVALID", "DISK_FULL"
    }  # fmt: skip
    files = [artifact_pb2.ArtifactFile(path="a", size_bytes=number, digest=digest_bytes(b"x"))]
    created = artifact_pb2.CreateArtifactRequest(parent="projects/red", files=files)
    assert attacker.call(ARTIFACTS + "CreateArtifact", created) in {"", "ARTIFACT_INVALID", "LIMIT_EXCEEDED"}
    read = artifact_pb2.ReadBlobRequest(name=name, digest=digest_bytes(b"ours"), offset=number)
    assert attacker.call(ARTIFACTS + "ReadBlob", read) == "REQUEST_INVALID"
    assert attacker.call(EXPORTS + "WatchExport", pb.WatchExportRequest(name="projects/red/exports/ended", after_sequence=number)) in {
        "", "REQUEST_INVALID"
    }  # fmt: skip
    capabilities = worker_pb2.Capabilities(gpu_memory_bytes=number, memory_bytes=number, scratch_bytes=number)
    progress = pb.TaskProgress(done=number, total=number, memory_bytes=number, attempt=small)
    held = worker_pb2.RunningTask(task="projects/red/exports/ours:merge:1", lease_epoch=number, progress=progress)
    assert (
        attacker.call(
            WORKERS + "Synchronize", report(free_slots=small, capabilities=capabilities, running=[held]), by="worker"
        )
        == ""
    )
    assert (
        attacker.call(WORKERS + "CompleteTask", done(lease_epoch=number, peak_memory_bytes=number), by="worker")
        == "LEASE_LOST"
    )


@pytest.mark.parametrize(("seconds", "nanos"), [(LOWEST, 0), (-1, 0), (0, -(2**31)), (-5, 2**31 - 1)])
def test_waits_that_are_no_times(attacker: Attacker, seconds: int, nanos: int) -> None:
    request = report()
    request.max_wait.seconds, request.max_wait.nanos = seconds, nanos
    assert attacker.call(WORKERS + "Synchronize", request, by="worker") in {"", "REQUEST_INVALID"}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e308, -0.0, 5e-324])
def test_numbers_that_are_none(attacker: Attacker, value: float) -> None:
    limits = configuration_message(CONFIGURATION)
    limits.validation.limits["int4"].mean_kl = value
    if attacker.call(EXPORTS + "CreateExport", export(configuration=limits)) != "CONFIGURATION_INVALID":
        assert value in {1e308, 0.0, 5e-324}
    formats = configuration_message(CONFIGURATION)
    formats.formats["onnx"].settings["opset_version"] = value
    assert attacker.call(EXPORTS + "CreateExport", export(configuration=formats)) in {"", "CONFIGURATION_INVALID"}
    completed = done()
    completed.output.facts["output_bytes"] = value
    assert attacker.call(WORKERS + "CompleteTask", completed, by="worker") == "LEASE_LOST"


@pytest.mark.parametrize("value", [9, -1, 2**31 - 1, -(2**31)])
def test_values_that_no_enumeration_has(attacker: Attacker, value: int) -> None:
    listing = pb.ListExportsRequest(parent="projects/red", view=value)  # type: ignore[arg-type]
    assert attacker.call(EXPORTS + "ListExports", listing) == "REQUEST_INVALID"
    assert (
        attacker.call(EXPORTS + "ListExports", pb.ListExportsRequest(parent="projects/red", filter=f"state={value}"))
        == "REQUEST_INVALID"
    )
    for section, name in (("recovery", "profile"), ("log", "level"), ("checkpoint", "select"), ("combination", "type")):
        chosen = configuration_pb2.ExportConfiguration(**{section: {name: str(value)}})
        assert attacker.call(EXPORTS + "CreateExport", export(configuration=chosen)) == "CONFIGURATION_INVALID"


@pytest.mark.parametrize(
    "address",
    [
        f"s3://user:{SECRET}@bucket/run", f"s3://{SECRET}@bucket/run", f"hf://user:{SECRET}@owner/name", f"https://user:{SECRET}@hub/x",
        f"s3://bucket/run?X-Amz-Security-Token={SECRET}", f"file://{SECRET}@localhost/etc/passwd", f"s3://bucket@{SECRET}@host/x",
    ],
)  # fmt: skip
def test_addresses_with_credentials_are_refused_without_them(attacker: Attacker, address: str) -> None:
    for changes in (
        {"checkpoint": {"path": address}},
        {"base_model": {"name": address}, "checkpoint": {"path": address}},
        {"combination": {"adapters": [address]}, "checkpoint": {"path": "s3://bucket/x"}},
    ):
        chosen = configuration_pb2.ExportConfiguration(**changes)  # type: ignore[arg-type]
        failure = attacker.failure(EXPORTS + "CreateExport", export(configuration=chosen, sources={}))
        assert failure is not None
        assert failure.reason in {
            "CONFIGURATION_INVALID",
            "REQUEST_INVALID",
            "SOURCE_NOT_ALLOWED",
            "STORE_INVALID",
            "BASE_MODEL_NOT_FOUND",
        }
        assert SECRET not in f"{failure}"


NO_DIGESTS = ["", "x", "sha256:", "sha256:" + "0" * 63, "sha256:" + "0" * 65, "sha256:" + "G" * 64, "SHA256:" + "0" * 64, "md5:" + "0" * 32,
              "sha256:" + "0" * 63 + "\n", "sha256:" + "０" * 64, "sha256:../../" + "0" * 58, "sha256:" + "0" * 3000]  # fmt: skip


@pytest.mark.parametrize("digest", NO_DIGESTS, ids=range(len(NO_DIGESTS)))
def test_digests_that_are_none(attacker: Attacker, digest: str) -> None:
    refused = {"REQUEST_INVALID", "LIMIT_EXCEEDED", "ARTIFACT_INVALID", "ARTIFACT_NOT_FOUND"}
    file = artifact_pb2.ArtifactFile(path="a", size_bytes=1, digest=digest)
    name = f"projects/red/artifacts/{OURS}"
    for method, request in (
        (EXPORTS + "CreateExport", export(sources={"base": digest, "adapter": DIGEST})),
        (ARTIFACTS + "GetArtifact", artifact_pb2.GetArtifactRequest(name=f"projects/red/artifacts/{digest}")),
        (ARTIFACTS + "ReadBlob", artifact_pb2.ReadBlobRequest(name=name, digest=digest)),
        (ARTIFACTS + "WriteBlob", blob(digest=digest)),
        (ARTIFACTS + "CreateArtifact", artifact_pb2.CreateArtifactRequest(parent="projects/red", files=[file])),
    ):
        assert attacker.call(method, request) in refused
    result = done(output=worker_pb2.TaskOutput(outputs={"pytorch": digest}))
    assert attacker.call(WORKERS + "CompleteTask", result, by="worker") in {"LEASE_LOST", "RESULT_INVALID"}
