"""The fault table beside random kills: every row ends with all exports finished and everything as after no fault at all."""

from __future__ import annotations

import errno
import io
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from slipway.rpc.values import failure_of_status
from slipway_protos.v1 import export_pb2
from support.cluster.audit import audit
from support.cluster.cluster import Cluster, Member
from support.cluster.reference import Undisturbed, reference
from support.commands.namespaces import namespace
from support.coordinators.harness import states, wait_for
from support.servers.postgres_server import PostgresServer
from support.servers.s3_server import BUCKET, FaultyProxy, S3Server
from support.servers.tcp_proxy import TcpProxy

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

ROLLING = [f"rolling-{number}" for number in range(5)]
REFUSED = [f"refused-{number}" for number in range(3)]
TEXTS = ["database", "s3", "frozen", "cable", "proxy", "corrupt", "full", "room", *ROLLING, *REFUSED]
OUTAGE_SECONDS = 10.0


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Undisturbed]:
    """What every export here makes when nothing disturbs it."""
    return reference(tmp_path_factory.mktemp("reference") / "home", TEXTS)


def test_postgresql_is_away_for_a_while(
    cluster: Cluster, expected: dict[str, Undisturbed], postgres: PostgresServer
) -> None:
    cluster.all_back()
    name = cluster.create("database")
    wait_for(cluster.working)
    active = cluster.active()
    assert active is not None
    starts = active.starts
    postgres.stop()
    time.sleep(OUTAGE_SECONDS)
    wait_for(lambda: active.starts > starts)  # without its lock a coordinator ends
    wait_for(lambda: cluster.active() is None)
    began = time.monotonic()
    postgres.start()
    cluster.all_back()
    print(f"active again {time.monotonic() - began:.1f} s after the database")
    audit(cluster, expected, name)


def test_s3_is_away_for_a_while(cluster: Cluster, expected: dict[str, Undisturbed], s3: S3Server) -> None:
    cluster.all_back()
    with held(cluster, "merge"):
        name = cluster.create("s3")
        wait_for(cluster.working)
        s3.stop()
    time.sleep(OUTAGE_SECONDS)
    assert "succeeded" not in states(cluster.client.get_export(name)).values(), "nobody could store a result"
    s3.start()
    audit(cluster, expected, name)


def test_s3_refuses_every_fifth_call(
    tmp_path: Path, expected: dict[str, Undisturbed], postgres: PostgresServer, s3: S3Server
) -> None:
    with (
        FaultyProxy(s3.endpoint, refuse=0.2, seed=1) as proxy,
        Cluster(tmp_path, postgres, s3, endpoint=proxy.endpoint) as cluster,
    ):
        audit(cluster, expected, *[cluster.create(text) for text in REFUSED])
        share = proxy.refused / (proxy.refused + proxy.passed)
        print(f"{proxy.refused} calls refused, {proxy.passed} answered")
        assert proxy.refused > 50
        assert 0.15 < share < 0.25


def test_a_frozen_worker_wakes_up_too_late(cluster: Cluster, expected: dict[str, Undisturbed]) -> None:
    cluster.all_back()
    before = merges(cluster)
    with held(cluster, "merge"):
        name = cluster.create("frozen")
        wait_for(lambda: merges(cluster) > before)  # a child gets its job after its start, from the worker
        frozen = wait_for(cluster.working)[0]
        children = wait_for(frozen.children)
        frozen.signal(signal.SIGSTOP)
    try:
        # Its stage ends meanwhile, so that it has a result to hand in; it cannot take note of that yet.
        wait_for(lambda: all(gone(child) for child in children))
        cluster.finished(name)
        etag = cluster.client.get_export(name).etag
    finally:
        frozen.signal(signal.SIGCONT)
    wait_for(lambda: "was refused" in frozen.log())
    audit(cluster, expected, name)
    assert cluster.client.get_export(name).etag == etag


def test_a_partition_between_a_worker_and_the_coordinator(cluster: Cluster, expected: dict[str, Undisturbed]) -> None:
    """A proxy that passes nothing on; works without privileges."""
    cluster.all_back()
    with TcpProxy(cluster._target) as proxy, only(cluster, "partitioned", proxy.address) as worker:
        with held(cluster, "merge"):
            name = cluster.create("proxy")
            wait_for(worker.children)
            proxy.hold()
        time.sleep(2 * cluster.lease_seconds)
        wake(cluster)
        cluster.finished(name)
        etag = cluster.client.get_export(name).etag
        proxy.resume()
        wait_for(lambda: "was refused" in worker.log())
        assert cluster.client.get_export(name).etag == etag
        audit(cluster, expected, name)


@pytest.mark.skipif(os.geteuid() != 0, reason="a network namespace needs privileges")
def test_a_cable_is_pulled(cluster: Cluster, expected: dict[str, Undisturbed], s3: S3Server) -> None:
    """The worker is a host of its own whose only network goes down and comes back."""
    cluster.all_back()
    host, _, port = s3.endpoint.removeprefix("http://").partition(":")
    with ExitStack() as stack:
        try:
            here = stack.enter_context(namespace("slipw", net=77))
        except subprocess.CalledProcessError as error:
            pytest.skip(f"a network namespace needs privileges: {error.stderr}")
        coordinator = stack.enter_context(TcpProxy(cluster._target, host=here))
        objects = stack.enter_context(TcpProxy(lambda: (host, int(port)), host=here))
        environment = {"AWS_ENDPOINT_URL": f"http://{objects.address}"}
        prefix = ("ip", "netns", "exec", "slipw")
        worker = stack.enter_context(only(cluster, "remote", coordinator.address, prefix=prefix, **environment))
        with held(cluster, "merge"):
            name = cluster.create("cable")
            wait_for(worker.children)
            subprocess.run(["ip", "link", "set", "slipwa", "down"], check=True)
        time.sleep(2 * cluster.lease_seconds)
        wake(cluster)
        cluster.finished(name)
        etag = cluster.client.get_export(name).etag
        subprocess.run(["ip", "link", "set", "slipwa", "up"], check=True)
        wait_for(lambda: "was refused" in worker.log(), seconds=120)
        assert cluster.client.get_export(name).etag == etag
        audit(cluster, expected, name)


def test_a_workers_disk_is_full(cluster: Cluster, expected: dict[str, Undisturbed], small_disk: Path) -> None:
    """What finds no space there is done by the others; it takes nothing more until there is room, and then it does."""
    cluster.all_back()
    with only(cluster, "full", cluster.service.address, SLIPWAY_HOME=str(small_disk)) as worker:
        with held(cluster, "merge"):
            name = cluster.create("full")
            wait_for(worker.children)
            filler = fill(small_disk)
            wait_for(lambda: "takes no tasks" in worker.log())
            wake(cluster)
            cluster.all_back()
        export = cluster.finished(name)
        (failed,) = [attempt for task in export.tasks for attempt in task.attempts if attempt.error.message]
        assert failure_of_status(failed.error).reason == "DISK_FULL"
        assert cluster.running_on(failed.worker) is worker
        attempts = {task.id: list(task.attempts) for task in export.tasks}
        assert [attempt.rule for attempt in attempts.pop("merge")] == ["", "disk-elsewhere"]
        assert all(len(others) == 1 for others in attempts.values())
        assert all(cluster.running_on(others[0].worker) is not worker for others in attempts.values())
        filler.unlink()
        wait_for(lambda: "takes tasks again" in worker.log())
        for other in cluster.running[:-1]:
            other.stop()
        cluster.finished(cluster.create("room"))
        assert worker.log().count("takes no tasks") == 1
        audit(cluster, expected, name, f"{name.rpartition('/')[0]}/room")


def test_a_damaged_blob_is_named_and_made_again(
    cluster: Cluster, expected: dict[str, Undisturbed], s3: S3Server
) -> None:
    cluster.all_back()
    with held(cluster, "onnx_export"):
        name = cluster.create("corrupt")
        others = {"merge": "succeeded", "quantize-pytorch-int8": "succeeded", "onnx_export": "running"}
        wait_for(lambda: others.items() <= states(cluster.client.get_export(name)).items())
        (merged,) = cluster.client.get_export(name).tasks[0].outputs.values()
        damage(cluster, s3, merged)
        for worker in cluster.running:  # nobody has a copy any more, as on another machine
            worker.wanted = False
            worker.kill()
            shutil.rmtree(worker.home)
    wake(cluster)
    audit(cluster, expected, name, results={"merge": 2})
    export = cluster.client.get_export(name)
    failures = [failure_of_status(a.error) for task in export.tasks for a in task.attempts if a.error.message]
    assert {failure.reason for failure in failures} <= {"ARTIFACT_CORRUPT", "ARTIFACT_NOT_FOUND"}
    named = next(failure for failure in failures if failure.reason == "ARTIFACT_CORRUPT")
    assert (named.about["digest"], named.about["path"]) == (merged, "from")


def test_everything_is_restarted_one_by_one_during_five_exports(
    cluster: Cluster, expected: dict[str, Undisturbed]
) -> None:
    cluster.all_back()
    with held(cluster, "validate"):  # none ends before the last restart
        names = [cluster.create(text) for text in ROLLING]
        for member in [*cluster.running, *cluster.coordinators]:
            before = member.process
            member.stop()
            member.start()
            cluster.all_back()
            assert member.process is not before
        exports = [wait_for(lambda name=name: cluster.look(name)) for name in names]
        assert all(running(export) for export in exports)
    audit(cluster, expected, *names)


@contextmanager
def only(cluster: Cluster, name: str, coordinator: str, **more: Any) -> Iterator[Member]:
    """One worker of its own way to the coordinator, and nobody else."""
    for worker in cluster.running:
        worker.stop()
    worker = cluster.worker(name, coordinator, **more)
    try:
        yield worker
    finally:
        worker.stop()
        cluster.running.remove(worker)
        wake(cluster)


@contextmanager
def held(cluster: Cluster, stage: str) -> Iterator[None]:
    """No run of a stage ends before the block does."""
    hold = cluster.folder / f"hold-{stage}"
    hold.touch()
    try:
        yield
    finally:
        hold.unlink()


def merges(cluster: Cluster) -> int:
    """Return how many runs of the merge have begun."""
    runs = cluster.folder / "runs"
    return runs.read_text().splitlines().count("merge") if runs.exists() else 0


def running(export: export_pb2.Export) -> bool:
    return export.state == export_pb2.EXPORT_STATE_RUNNING


def gone(process: psutil.Process) -> bool:
    """Whether it has ended, though perhaps nobody has looked."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wake(cluster: Cluster) -> None:
    """Start the workers that were stopped."""
    for worker in cluster.running:
        if not worker.wanted:
            worker.start()


def fill(disk: Path) -> Path:
    """Take what space there is on a file system."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            assert error.errno == errno.ENOSPC, error
    return filler


def damage(cluster: Cluster, s3: S3Server, digest: str) -> None:
    """Change one byte of a file of an artifact in the bucket."""
    client = s3.client()
    prefix = f"{cluster.folder.name}/blobs/"
    entry = next(file for file in cluster.manifest(digest).files if file.path == "from")
    key = next(
        o.object_name
        for o in client.list_objects(BUCKET, prefix, recursive=True)
        if entry.digest[7:] in (o.object_name or "")
    )
    assert key is not None
    answer = client.get_object(BUCKET, key)
    data = bytearray(answer.read())
    answer.close()
    data[0] ^= 1
    client.put_object(BUCKET, key, io.BytesIO(bytes(data)), len(data))
