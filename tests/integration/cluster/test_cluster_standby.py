"""Who is active: one at a time, the standby at once when the other is gone, nobody without a database."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import psycopg
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from slipway.client import Client
from slipway.errors import ModelExportError
from slipway_coordinator.leadership.locks import LOCK_KEY
from support.cluster.audit import audit
from support.cluster.cluster import Cluster
from support.cluster.reference import Undisturbed, reference
from support.commands.cli import SLIPWAY
from support.coordinators.harness import wait_for
from support.harness.unhurried import unhurried
from support.servers.postgres_server import PostgresServer
from support.servers.s3_server import S3Server

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

TAKE_OVER_SECONDS = 10.0
ENDS = ("kill", "stop", "lose-lock")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Undisturbed]:
    return reference(tmp_path_factory.mktemp("reference") / "home", [f"over-{end}" for end in ENDS])


@pytest.fixture
def cluster(tmp_path: Path, postgres: PostgresServer, s3: S3Server) -> Iterator[Cluster]:
    with Cluster(tmp_path, postgres, s3, workers=1) as running:
        yield running


def test_a_standby_leads_to_the_active_coordinator(cluster: Cluster) -> None:
    """Calls and health checks are answered as if they had gone there."""
    address = f"127.0.0.1:{cluster.standby().port}"
    wait_for(lambda: "standing by" in cluster.standby().log())
    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service="slipway.v1.ExportService")
        answer = health_pb2_grpc.HealthStub(channel).Check(request, wait_for_ready=True, timeout=60)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    with Client(address) as client:
        assert list(client.list_exports()) == []
        with pytest.raises(ModelExportError) as caught:
            client.get_export("x")
        assert caught.value.reason == "EXPORT_NOT_FOUND"
    assert f" to 127.0.0.1:{cluster.active().port} as " in cluster.standby().log()


@pytest.mark.parametrize("end", ENDS)
def test_the_standby_takes_over(cluster: Cluster, expected: dict[str, Undisturbed], end: str) -> None:
    name = cluster.create(f"over-{end}")
    first = cluster.active()
    assert first is not None
    standby = cluster.standby()
    wait_for(lambda: "standing by" in standby.log())
    began = time.monotonic()
    match end:
        case "kill":
            first.kill()
        case "stop":
            first.stop()
        case _:
            with psycopg.connect(cluster.database) as connection:
                ended = connection.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND granted AND objid = %s"
                    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())",
                    (LOCK_KEY,),
                ).fetchall()
            assert len(ended) == 1
    wait_for(lambda: cluster.active() is standby)
    took = time.monotonic() - began
    print(f"take-over after {end}: {took:.2f} s")
    assert took < unhurried(TAKE_OVER_SECONDS)
    if end == "lose-lock":
        assert first.process is not None
        assert "the lock is lost" in first.log()
    audit(cluster, expected, name)


def test_a_database_that_was_not_migrated_is_refused(tmp_path: Path, postgres: PostgresServer) -> None:
    database = postgres.create("never_migrated")
    command = [SLIPWAY, "coordinator", "--listen", "127.0.0.1:0", "--state", database]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=240)
    assert done.returncode == 3
    assert "STATE_SCHEMA" in done.stderr
    assert "migrate" in done.stderr
