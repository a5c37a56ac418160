"""The fault table. Every test ends with all exports finished, each result taken in once, and digests as undisturbed."""

from __future__ import annotations

import io
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import psutil
import pytest

from cluster import Cluster, Member, namespace, reference
from coordinator_harness import state, states, wait_for
from postgres_server import PostgresServer
from s3_server import BUCKET, S3Server
from tcp_proxy import TcpProxy

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

RUNS = int(os.environ.get("CLUSTER_FAULT_RUNS", "6"))
"""Random kills; 50 for the full table."""

SEEDS = [f"seed-{number}" for number in range(RUNS)]
OTHERS = ["database", "s3", "frozen", "cable", "proxy", "corrupt", *(f"rolling-{number}" for number in range(5))]
OUTAGE_SECONDS = 10.0


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Outputs of every export here when nothing disturbs it."""
    return reference(tmp_path_factory.mktemp("reference") / "home", [*SEEDS, *OTHERS])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, postgres: PostgresServer, s3: S3Server) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster"), postgres, s3) as running:
        yield running


def check(
    cluster: Cluster, name: str, expected: dict[str, dict[str, str]], *, remade: frozenset[str] = frozenset()
) -> None:
    """The export ended well; only tasks in ``remade`` have more than one result."""
    export = cluster.finished(name)
    assert state(export) == "succeeded", f"{export.error}\n{cluster.logs()}"
    assert dict(export.outputs) == expected[name.rpartition("/")[2]]
    commits = cluster.commits(name)
    assert set(commits) == {task.id for task in export.tasks}
    assert {task for task, count in commits.items() if count != 1} <= remade, commits


def all_back(cluster: Cluster) -> None:
    """Everybody runs and somebody serves."""
    wait_for(
        lambda: cluster.active() and all(m.process and m.process.poll() is None for m in cluster.running), seconds=30
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_kill_9_at_a_random_moment(cluster: Cluster, expected: dict[str, dict[str, str]], seed: str) -> None:
    chance = random.Random(seed)
    all_back(cluster)
    name = cluster.create(seed)
    for _ in range(3):
        time.sleep(chance.uniform(0.0, 1.2))
        what = chance.choice(["coordinator", "worker", "child"])
        match what:
            case "coordinator":
                active = cluster.active()
                if active is not None:
                    active.kill()
            case "worker":
                chance.choice(cluster.working() or cluster.running).kill()
            case _:
                for child in [child for worker in cluster.working() for child in worker.children()][:1]:
                    with suppress(psutil.NoSuchProcess):
                        child.kill()
    check(cluster, name, expected)


def test_postgresql_is_away_for_a_while(
    cluster: Cluster, expected: dict[str, dict[str, str]], postgres: PostgresServer
) -> None:
    all_back(cluster)
    name = cluster.create("database")
    wait_for(cluster.working)
    active = cluster.active()
    assert active is not None
    starts = active.starts
    postgres.stop()
    time.sleep(OUTAGE_SECONDS)
    assert active.starts > starts, "without its lock a coordinator ends"
    assert cluster.active() is None
    began = time.monotonic()
    postgres.start()
    all_back(cluster)
    print(f"active again {time.monotonic() - began:.1f} s after the database")
    check(cluster, name, expected)


def test_s3_is_away_for_a_while(cluster: Cluster, expected: dict[str, dict[str, str]], s3: S3Server) -> None:
    all_back(cluster)
    name = cluster.create("s3")
    wait_for(cluster.working)
    s3.stop()
    time.sleep(OUTAGE_SECONDS)
    s3.start()
    check(cluster, name, expected)


def test_a_frozen_worker_wakes_up_too_late(cluster: Cluster, expected: dict[str, dict[str, str]]) -> None:
    all_back(cluster)
    name = cluster.create("frozen")
    frozen = wait_for(cluster.working)[0]
    assert frozen.process is not None
    children = frozen.children()
    frozen.signal(signal.SIGSTOP)
    try:
        # Its stage ends meanwhile, so that it has a result to hand in; it cannot take note of that yet.
        wait_for(lambda: all(gone(child) for child in children))
        check(cluster, name, expected)
        etag = cluster.client.get_export(name).etag
    finally:
        frozen.signal(signal.SIGCONT)
    wait_for(lambda: "was given to another worker since" in frozen.log() or "cancel" in frozen.log(), seconds=20)
    assert cluster.client.get_export(name).etag == etag


def test_a_partition_between_a_worker_and_the_coordinator(
    cluster: Cluster, expected: dict[str, dict[str, str]]
) -> None:
    """A proxy that passes nothing on; works without privileges."""
    all_back(cluster)
    with TcpProxy(cluster._target) as proxy, only(cluster, "partitioned", proxy.address) as worker:
        name = cluster.create("proxy")
        wait_for(worker.children)
        proxy.hold()
        time.sleep(2 * cluster.lease_seconds)
        wake(cluster)
        check(cluster, name, expected)
        etag = cluster.client.get_export(name).etag
        proxy.resume()
        time.sleep(2.0)
        assert cluster.client.get_export(name).etag == etag


@pytest.mark.skipif(os.geteuid() != 0, reason="a network namespace needs privileges")
def test_a_cable_is_pulled(cluster: Cluster, expected: dict[str, dict[str, str]], s3: S3Server) -> None:
    """The worker is a host of its own whose only network goes down and comes back."""
    all_back(cluster)
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
        name = cluster.create("cable")
        wait_for(worker.children)
        subprocess.run(["ip", "link", "set", "slipwa", "down"], check=True)
        time.sleep(2 * cluster.lease_seconds)
        wake(cluster)
        check(cluster, name, expected)
        etag = cluster.client.get_export(name).etag
        subprocess.run(["ip", "link", "set", "slipwa", "up"], check=True)
        time.sleep(3.0)
        assert cluster.client.get_export(name).etag == etag


def test_a_damaged_blob_is_named_and_made_again(
    cluster: Cluster, expected: dict[str, dict[str, str]], s3: S3Server
) -> None:
    all_back(cluster)
    hold = cluster.folder / "hold-onnx_export"
    hold.touch()
    name = cluster.create("corrupt")
    others = {"merge": "succeeded", "quantize-pytorch-int8": "succeeded", "onnx_export": "running"}
    wait_for(lambda: others.items() <= states(cluster.client.get_export(name)).items())
    (merged,) = cluster.client.get_export(name).tasks[0].outputs.values()
    damage(cluster, s3, merged)
    for worker in cluster.running:  # nobody has a copy any more, as on another machine
        worker.wanted = False
        worker.kill()
        shutil.rmtree(cluster.folder / worker.name)
    hold.unlink()
    wake(cluster)
    check(cluster, name, expected, remade=frozenset({"merge"}))
    export = cluster.client.get_export(name)
    reasons = {a.error.message for task in export.tasks for a in task.attempts if a.error.message}
    assert any("sha256" in reason or "digest" in reason for reason in reasons), reasons
    assert len(export.tasks[0].attempts) == 2


def test_everything_is_restarted_one_by_one_during_five_exports(
    cluster: Cluster, expected: dict[str, dict[str, str]]
) -> None:
    all_back(cluster)
    names = [cluster.create(f"rolling-{number}") for number in range(5)]
    for member in [*cluster.running, *cluster.coordinators]:
        member.stop()
        member.start()
        all_back(cluster)
    for name in names:
        check(cluster, name, expected)


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


def damage(cluster: Cluster, s3: S3Server, digest: str) -> None:
    """Change one byte of a file of an artifact in the bucket."""
    client = s3.client()
    prefix = f"{cluster.folder.name}/blobs/"
    manifest = cluster.store().manifest(digest)
    entry = next(file for file in manifest.files if file.path == "from")
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
