"""Servers that every test of the cluster shares, and the table of what was killed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.cluster import kills as cluster_kills
from support.cluster.cluster import Cluster
from support.servers.postgres_server import PostgresServer, postgres_server
from support.servers.s3_server import S3Server


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    with postgres_server() as server:
        yield server


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, postgres: PostgresServer, s3: S3Server) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster"), postgres, s3) as running:
        yield running


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if cluster_kills.RUNS:
        terminalreporter.section("kills at random moments")
        for line in cluster_kills.table():
            terminalreporter.write_line(line)
