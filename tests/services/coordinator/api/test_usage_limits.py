"""Limits of stored bytes and GPU seconds, with a real coordinator, store and workers: new work is refused, running work continues."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from slipway.artifacts import ManifestFile
from slipway.artifacts.digests import digest_bytes
from slipway.artifacts.opening import open_store
from slipway.client import Client
from slipway.configuration import parse
from slipway.errors import ModelExportError
from slipway.requirements import Needs, Requirements
from slipway.rpc.messages import asked_configuration_message
from slipway.settings import Settings
from slipway.sources.addresses import Allowed
from slipway_coordinator.api.export_service import new_record
from slipway_coordinator.api.worker_service import worker_report
from slipway_coordinator.lifecycle.records import ExportRecord, TaskState
from slipway_coordinator.workflow.admission import _will_use_gpu
from slipway_protos.v1 import artifact_pb2, export_pb2, worker_pb2
from slipway_protos.v1 import coordinator_pb2 as pb
from support.coordinators.artifact_places import PEOPLE, Place, some_files, write
from support.coordinators.artifact_places import create as create_artifact
from support.coordinators.harness import CONFIGURATION, DIGEST, state, states, tiny_export, tiny_task, wait_for
from support.coordinators.joined_workers import MACHINE, joined
from support.servers.s3_server import BUCKET, S3Server

MORE = {**PEOPLE, "robots": "role: worker"}
ON_GPU = Requirements(any_of=(Needs(gpu=True),))
TWO_GPUS = replace(MACHINE, gpu_architecture="sm89", gpu_memory_bytes=24 << 30, gpus=2)


class LimitedPlace(Place):
    """A coordinator whose access file has limits of projects."""

    def limit(self, **projects: Mapping[str, Any]) -> None:
        path = self.home / "access.yaml"
        path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "projects": projects}))

    def artifact(self, name: str, *, size: int = 2000) -> str:
        """Put an artifact into the store, as who holds its credentials."""
        path = self.home / f"{name}.bin"
        path.write_bytes(name.encode().ljust(size, b"."))
        return self.store.put_files({"data": path})

    def usage(self, project: str = "red") -> pb.ProjectUsage:
        with self.client_of("admin") as client:
            return next(
                (each.usage for each in client.list_projects() if each.name == f"projects/{project}"), pb.ProjectUsage()
            )

    def measured(self, project: str = "red") -> int:
        """Return the stored bytes once all artifacts are measured."""
        wait_for(lambda: not self.usage(project).unmeasured_artifacts)
        return self.usage(project).stored_bytes

    def begin(self, export_id: str, *tasks: Any) -> str:
        record = tiny_export(export_id, *tasks, base=self.base())
        renamed = {**record.model_dump(), "name": f"projects/red/exports/{export_id}"}
        return self.submit(ExportRecord.model_validate(renamed))


@contextmanager
def limited(home: Path, *, lease_seconds: float = 30.0, **projects: Mapping[str, Any]) -> Iterator[LimitedPlace]:
    place = LimitedPlace(home, people=MORE, workers_gone=False, lease_seconds=lease_seconds)
    place.limit(**projects)
    with place:
        yield place


@pytest.fixture
def place(tmp_path: Path) -> Iterator[LimitedPlace]:
    with limited(tmp_path) as place:
        yield place


def create(client: Client, digest: str, *, formats: dict[str, Any] | None = None, **more: Any) -> str:
    configuration = parse({"formats": formats}) if formats else CONFIGURATION
    return client.create_export(configuration, sources={"base": digest, "adapter": digest}, **more).name


def refusal(error: ModelExportError) -> tuple[str, str, int, int]:
    assert error.reason == "QUOTA_EXCEEDED"
    assert not error.failure().retryable, "a client that repeats it at once gets the same"
    about = error.about
    return str(about["project"]), str(about["quota"]), int(str(about["value"])), int(str(about["limit"]))


def test_no_export_begins_and_nothing_is_uploaded_with_the_bytes_used_up(place: LimitedPlace) -> None:
    base, other, third = (place.artifact(name) for name in ("base", "other", "third"))
    place.limit(red={"stored_bytes": "3kB"})
    pushed = place.home / "pushed"
    pushed.mkdir()
    (pushed / "text").write_text("pushed")
    with place.client_of("admin", project="red") as client, place.client_of("submitter") as submitter:
        first = create(client, base, export_id="first", request_id="r1")
        assert 2000 < place.measured() < 3000
        create(
            client, other, export_id="second"
        )  # less than the limit is used: it may be exceeded by what is under way
        used = place.measured()
        assert used > 4000
        for more in ({}, {"validate_only": True}, {"export_id": "third"}):
            with pytest.raises(ModelExportError, match=r"has 4\.\d kB in the store, 3\.0 kB is its limit") as caught:
                create(client, third, **more)
            assert refusal(caught.value) == ("red", "stored_bytes", used, 3000)
        assert "delete exports" in str(caught.value)
        assert create(client, base, export_id="first", request_id="r1") == first, "it was made before"
        client.cancel_export(first)
        wait_for(lambda: state(client.get_export(first)) == "cancelled")
        with pytest.raises(ModelExportError) as caught:
            client.retry_export(first)
        assert refusal(caught.value)[1] == "stored_bytes"
        with pytest.raises(ModelExportError) as caught:
            submitter.push_artifact(pushed)
        assert refusal(caught.value)[1] == "stored_bytes"
        assert client.push_artifact({"data": place.home / "other.bin"}) == other, "it is the project's already"
        with place.client_of("admin", project="blue") as blue:
            create(blue, base)
        client.delete_export(first)
        assert 2000 < place.measured() < 3000
        digest = submitter.push_artifact(pushed)
        create(submitter, digest)
        place.limit(red={"stored_bytes": 0})
        with pytest.raises(ModelExportError):
            create(client, third)
        place.limit()
        create(client, third)
    assert place.measured("blue") > 2000


def test_an_upload_is_refused_before_its_content_is_taken(place: LimitedPlace) -> None:
    place.limit(red={"stored_bytes": 0})
    (place.home / "text").write_text("text")
    with place.client_of("submitter") as client, pytest.raises(ModelExportError) as caught:
        client._artifacts("").put_files({"text": place.home / "text"})
    assert refusal(caught.value) == ("red", "stored_bytes", 4, 0)
    file = ManifestFile("text", 4, digest_bytes(b"text"), "")
    with place.client_of("submitter") as client, place.client_of("neighbour") as neighbour:
        assert write(client._calls, "red", file, b"text") is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert write(neighbour._calls, "blue", file, b"text") is grpc.StatusCode.OK
    assert place.forgotten_uploads() == 0


def blob(data: bytes) -> ManifestFile:
    return ManifestFile("file", len(data), digest_bytes(data), "")


def test_what_an_upload_announces_counts_and_what_began_goes_on(place: LimitedPlace) -> None:
    whole, small, half = b"7" * 3_000_000, b"small", 2_000_000
    place.limit(red={"stored_bytes": len(whole) + len(small)})
    with place.client_of("submitter", project="red") as client:
        calls = client._calls
        assert write(calls, "red", blob(small), small) is grpc.StatusCode.OK
        assert place.usage().stored_bytes == len(small), "no artifact has it yet"
        assert write(calls, "red", blob(whole + b"1"), whole + b"1") is grpc.StatusCode.RESOURCE_EXHAUSTED
        end = threading.Event()

        def begin() -> Iterator[artifact_pb2.WriteBlobRequest]:
            yield artifact_pb2.WriteBlobRequest(parent="projects/red", digest=blob(whole).digest, size_bytes=len(whole))
            yield artifact_pb2.WriteBlobRequest(data=whole[:half])
            end.wait(60)

        call = calls.artifacts.WriteBlob.future(begin(), metadata=calls.metadata())
        wait_for(lambda: any(path.stat().st_size == half for path in place.home.rglob("uploads/*")))
        assert write(calls, "red", blob(b"1"), b"1") is grpc.StatusCode.RESOURCE_EXHAUSTED, "room is held meanwhile"
        call.cancel()
        end.set()
        asked = artifact_pb2.GetUploadRequest(parent="projects/red", digest=blob(whole).digest)
        wait_for(lambda: calls.send(calls.artifacts.GetUpload, asked).offset == half)
        place.limit(red={"stored_bytes": 1})
        rest = artifact_pb2.WriteBlobRequest(
            parent="projects/red", digest=blob(whole).digest, size_bytes=len(whole), offset=half
        )
        more = artifact_pb2.WriteBlobRequest(data=whole[half:])
        calls.artifacts.WriteBlob(iter([rest, more]), metadata=calls.metadata())
        made = create_artifact(client, [blob(whole)])
        assert not made.missing, "an artifact of what was uploaded is never refused"
        with pytest.raises(ModelExportError) as caught:
            create_artifact(client, [blob(whole), replace(blob(b"22"), path="other")])
        assert refusal(caught.value)[1:] == ("stored_bytes", place.usage().stored_bytes + 2, 1)


def test_what_an_artifact_of_the_project_lacks_may_be_uploaded_with_the_bytes_used_up(place: LimitedPlace) -> None:
    (place.home / "text").write_text("text")
    with place.client_of("admin", project="red") as client:
        digest = client.push_artifact({"text": place.home / "text"})
        used = place.measured()
        place.limit(red={"stored_bytes": 1})
        (path,) = (path for path in place.home.rglob(f"*{digest_bytes(b'text').removeprefix('sha256:')}*"))
        path.unlink()
        assert client.push_artifact({"text": place.home / "text"}) == digest
        assert path.is_file()
    assert place.measured() == used


@pytest.mark.slow
def test_what_runs_goes_on_with_the_bytes_used_up(place: LimitedPlace) -> None:
    gate = place.home / "gate"
    place.limit(red={"stored_bytes": 1})
    with joined(place, "one", security=place.security_of("robots")), place.client_of("admin", project="red") as client:
        waiting = tiny_task("a", sleep_seconds=60, unless=str(gate))
        name = place.begin("x", waiting, tiny_task("b", needs=("a",)))
        assert place.measured() > 1
        with pytest.raises(ModelExportError) as caught:
            place.begin("y", tiny_task("a"))
        assert caught.value.reason == "QUOTA_EXCEEDED"
        before = place.usage().stored_bytes
        gate.touch()
        wait_for(lambda: state(client.get_export(name)) == "succeeded")
        assert place.measured() > before, "its results count"


@pytest.mark.slow
def test_artifacts_in_a_bucket_count(s3: S3Server, tmp_path: Path) -> None:
    environment = s3.environment() | {"SLIPWAY_STORE": f"s3://{BUCKET}/{tmp_path.name}", "SLIPWAY_HOME": str(tmp_path)}
    store = open_store(Settings.from_environment(environment))
    folder = some_files(tmp_path)
    place = LimitedPlace(tmp_path, people=MORE, workers_gone=False)
    place.open_store = lambda: store
    with place, place.client_of("submitter") as client:
        digest = client.push_artifact(folder)
        manifest = store.manifest(digest)
        assert place.measured() == manifest.distinct_bytes + len(manifest.to_bytes())


def test_gpu_seconds_limit_what_needs_a_gpu_and_survive_a_restart(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    first = tiny_task("a", sleep_seconds=60, unless=str(gate)).with_(requirements=ON_GPU)
    then = tiny_task("b", needs=("a",)).with_(requirements=ON_GPU)
    with limited(tmp_path, red={"gpu_seconds": 1}) as place, place.client_of("admin", project="red") as client:
        with joined(place, "gpu", security=place.security_of("robots"), machine=TWO_GPUS):
            name = place.begin("x", first, then)
            wait_for(lambda: place.usage().gpu_seconds >= 1)
            with pytest.raises(
                ModelExportError, match=r"used GPUs for \d+ seconds in 30 days, 1 is its limit"
            ) as caught:
                place.begin("y", first)
            project, quota, value, limit = refusal(caught.value)
            assert (project, quota, limit, value >= 1) == ("red", "gpu_seconds", 1, True)
            assert "(UTC) if nothing more of it runs until then, or leave out what needs or prefers a GPU" in str(
                caught.value
            )
            free = place.begin("z", tiny_task("a"))
            gate.touch()
            for each in (name, free):
                wait_for(lambda each=each: client.get_export(each).HasField("end_time"))  # type: ignore[misc]
                assert state(client.get_export(each)) == "succeeded", "what runs goes on, and what needs no GPU begins"
            assert states(client.get_export(name)) == {"a": "succeeded", "b": "succeeded"}
        with pytest.raises(ModelExportError) as caught:
            create(client, place.base(), formats={"tensorrt": {"enabled": True}}, validate_only=True)
        assert refusal(caught.value)[1] == "gpu_seconds"
        create(client, place.base(), validate_only=True)
        used = place.usage().gpu_seconds
        client.delete_export(name)
        assert place.usage().gpu_seconds == used, "what was used stays used"
    with limited(tmp_path, red={"gpu_seconds": 1}) as place:
        assert place.usage().gpu_seconds == used
        with pytest.raises(ModelExportError) as caught:
            place.begin("y", first)
        assert refusal(caught.value)[1] == "gpu_seconds"
        place.limit(red={"gpu_seconds": 3600})
        place.begin("y", first)


@pytest.mark.slow
def test_of_the_time_without_a_coordinator_only_that_of_a_lease_counts(tmp_path: Path) -> None:
    task = tiny_task("a", sleep_seconds=60).with_(requirements=ON_GPU)
    with limited(tmp_path) as place:
        with joined(place, "gpu", security=place.security_of("robots"), machine=TWO_GPUS) as worker:
            name = place.begin("x", task)
            wait_for(lambda: place.usage().gpu_seconds > 0)
            worker.vanish()
        granted = running_since(tmp_path)
    time.sleep(5)
    with limited(tmp_path, lease_seconds=1.0) as place, place.client_of("admin", project="red") as client:
        client.cancel_export(name)
        wait_for(lambda: client.get_export(name).HasField("end_time"))
        used = place.usage().gpu_seconds
        assert 2 <= used < 2 * (time.time() - granted - 3), "two GPUs, without most of the five seconds"
        assert place.usage().gpu_seconds == used, "its lease has ended"


def test_uploading_an_artifact_again_renews_its_time(place: LimitedPlace) -> None:
    (place.home / "text").write_text("text")
    (path,) = place.home.rglob("state.db")
    with place.client_of("submitter") as client, contextlib.closing(sqlite3.connect(path)) as connection:
        client.push_artifact({"text": place.home / "text"})
        connection.execute("UPDATE slipway_artifacts SET create_time = 1")
        connection.commit()
        client.push_artifact({"text": place.home / "text"})
        times = connection.execute("SELECT create_time FROM slipway_artifacts").fetchall()
    assert [at > 1 for (at,) in times] == [True], "it is kept for --retain-days from now on"


def running_since(home: Path) -> float:
    """Return since when the only lease on GPUs counts."""
    (path,) = home.rglob("state.db")
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return float(connection.execute("SELECT since FROM slipway_leases WHERE gpus > 0").fetchone()[0])


def test_a_retry_is_refused_for_what_is_left_of_an_export() -> None:
    done = tiny_task("a").with_(requirements=ON_GPU, state=TaskState.SUCCEEDED)
    left = tiny_task("b", needs=("a",))
    record = tiny_export("x", done, left).with_(needs_gpu=True)
    assert not _will_use_gpu(record)
    assert _will_use_gpu(record.with_task(done.with_(state=TaskState.QUEUED)))
    imported = left.with_(stage="import")
    assert _will_use_gpu(record.with_(tasks=(imported,))), "what follows the import is not planned yet"
    assert not _will_use_gpu(record.with_(tasks=(imported, left)))


@pytest.mark.parametrize("by_address", [False, True])
def test_a_plan_that_follows_an_import_needs_its_gpu_already(by_address: bool) -> None:
    source = {"checkpoint.path": "s3://runs/one", "base_model.name": "s3://models/base"} if by_address else {}
    for settings, expected in (({"formats": {"tensorrt": {"enabled": True}}}, True), ({}, False)):
        configuration = parse(settings | source)
        request = export_pb2.CreateExportRequest(
            parent="projects/red",
            configuration=asked_configuration_message(configuration),
            sources={} if by_address else {"base": DIGEST, "adapter": DIGEST},
        )
        record = new_record(request, import_from=Allowed.parse("s3://runs,s3://models"))
        assert [task.id for task in record.tasks][:1] == (["import"] if by_address else ["merge"])
        assert record.needs_gpu is expected


def test_workers_say_how_many_gpus_they_have() -> None:
    def gpus(**can: Any) -> int:
        request = worker_pb2.SynchronizeRequest(stages=["merge"], capabilities=worker_pb2.Capabilities(**can))
        return worker_report("w", request).gpus

    assert gpus(gpu_architecture="sm89", gpus=8) == 8
    assert gpus(gpu_architecture="sm89") == 1, "a worker of an earlier version"
    assert gpus(gpus=8) == 0
    assert gpus(gpu_architecture="sm89", gpus=2**31 - 1) == 1024
    assert gpus(gpu_architecture="sm89", gpus=-5) == 1


def test_each_caller_sees_its_own_projects(place: LimitedPlace) -> None:
    limits: dict[str, Mapping[str, Any]] = {
        "*": {"unended_exports": 7},
        "red": {"weight": 3, "stored_bytes": "2TB"},
        "green": {"gpu_seconds": 5},
    }
    place.limit(**limits)
    with place.client_of("admin", project="lilac") as client:
        create(client, place.artifact("base"))

    def seen(who: str) -> dict[str, pb.Project]:
        with place.client_of(who) as client:
            return {each.name.removeprefix("projects/"): each for each in client.list_projects(page_size=1)}

    place.measured("lilac")
    assert list(seen("admin")) == ["green", "lilac", "red"]
    assert list(seen("neighbour")) == ["blue"]
    (red,) = seen("viewer").values()
    assert red.limits == pb.ProjectLimits(weight=3, highest_priority=100, unended_exports=7, stored_bytes=2 * 10**12)
    assert red.usage == pb.ProjectUsage()
    lilac = seen("admin")["lilac"]
    assert (lilac.usage.unended_exports, lilac.usage.stored_bytes > 2000) == (1, True)
    assert not lilac.limits.HasField("stored_bytes")
    assert seen("admin")["green"].limits.gpu_seconds == 5
    with place.client_of("viewer") as client:
        for request in (pb.ListProjectsRequest(page_size=-1), pb.ListProjectsRequest(page_token="x")):
            with pytest.raises(ModelExportError) as caught:
                client._calls.call(client._calls.coordinator.ListProjects, request)
            assert caught.value.reason == "REQUEST_INVALID"
    with place.client_of("robots") as client, pytest.raises(ModelExportError) as caught:
        list(client.list_projects())
    assert caught.value.reason == "PERMISSION_DENIED"
