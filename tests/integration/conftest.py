"""Servers for tests of hostile clients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from support.coordinators.guarded_servers import CONTENT, PUSHED, SOURCES, Servers
from support.coordinators.harness import CONFIGURATION, wait_for


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with ExitStack() as stack:
        servers = Servers(tmp_path_factory.mktemp("bad-clients"), stack)
        wait_for(servers.healthy)
        with servers.client("submitter") as client:
            (servers.home / "text.txt").write_bytes(CONTENT)
            assert client.push_artifact({"text.txt": servers.home / "text.txt"}) == PUSHED
            client.create_export(CONFIGURATION, sources=SOURCES, export_id="ours")
        yield servers
        assert servers.healthy()
