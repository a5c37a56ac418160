"""The state of an earlier coordinator under the new one, and back: nothing is lost, and what cannot be read is refused by name."""

from __future__ import annotations

import socket
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from slipway.client import Client
from slipway.errors import ModelExportError
from slipway_protos.v1 import export_pb2 as pb
from support.coordinators.harness import state, states, wait_for
from support.servers.free_ports import free_port
from support.servers.postgres_server import PostgresServer
from support.servers.tcp_proxy import TcpProxy
from support.upgrades.site import Site, document, exports_of, finished, lost
from support.upgrades.versions import THIS, Version

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ENDED = ("succeeded", "failed", "cancelled")
QUEUED = ("queued-1", "queued-2")
ALL_RUNS = ["merge", "quantize", "validate"]


@pytest.fixture
def site(tmp_path: Path, place: str, previous: Version) -> Site:
    """A state with the tables of the earlier version."""
    site = Site(tmp_path, place)
    if "://" in place:
        assert site.migrate(previous).code == 0
    return site


def same_tables(previous: Version) -> bool:
    return bool(previous.facts["migrations"] == THIS.facts["migrations"])


def fill(site: Site, client: Client) -> Path:
    """Leave exports in each state; return the file that holds the one that runs."""
    site.create(client, "succeeded", labels={"team": "speech"}, priority=7)
    assert state(finished(client, "succeeded")) == "succeeded"
    failing = site.fail("quantize")
    site.create(client, "failed")
    assert state(finished(client, "failed")) == "failed"
    failing.unlink()
    hold = site.hold("merge")
    site.create(client, "cancelled")
    wait_for(lambda: state(client.get_export("cancelled")) == "running")
    client.cancel_export("cancelled")
    assert state(finished(client, "cancelled")) == "cancelled"
    before = len(site.runs())
    site.create(client, "running")
    wait_for(lambda: site.runs()[before:] == ["merge"])  # no result is reused: the one that was cancelled made none
    for name in QUEUED:
        site.create(client, name, labels={"order": name[-1]})
    return hold


def documents(client: Client) -> dict[str, Mapping[str, Any]]:
    return {name: document(export) for name, export in exports_of(client).items()}


@pytest.mark.parametrize("kill", [False, True], ids=["stopped", "killed"])
def test_nothing_is_lost_and_what_was_queued_ends(site: Site, previous: Version, kill: bool) -> None:
    """A worker of the earlier version stays and reports to the new coordinator what it has gone on with meanwhile."""
    with Client(site.address) as client, site.worker(previous):
        with site.coordinator(previous, kill=kill):
            hold = fill(site, client)
            before, runs = documents(client), site.runs()
        if "://" in site.place and not same_tables(previous):
            kept = site.rows()
            refused = site.refused(THIS)
            assert (refused.code, "STATE_SCHEMA" in refused.err, "migrate" in refused.err) == (3, True, True)
            assert site.rows() == kept
        if "://" in site.place:
            assert site.migrate(THIS).code == 0
        with site.coordinator(THIS):
            after = documents(client)
            assert set(after) == set(before)
            for name in ENDED:
                assert lost(before[name], after[name]) == []
            hold.unlink()
            for name in ("running", *QUEUED):
                ended = finished(client, name)
                assert state(ended) == "succeeded", ended.error
                assert dict(ended.labels) == before[name].get("labels", {})
            assert site.runs()[len(runs) :].count("merge") == len(QUEUED), "a task that ran was repeated"
            assert [len(task.attempts) for task in client.get_export("running").tasks] == [1, 1, 1]
            client.retry_export("failed")
            assert state(finished(client, "failed")) == "succeeded"
            client.delete_export("cancelled")
            assert set(exports_of(client)) == {*before} - {"cancelled"}
            assert [each.name for each in client.list_exports(filter='label.team = "speech"')] == [
                before["succeeded"]["name"]
            ]


def test_an_older_coordinator_refuses_newer_tables_and_changes_nothing(site: Site, previous: Version) -> None:
    """With the same tables, it goes on with what the newer one began."""
    if "://" in site.place:
        assert site.migrate(THIS).code == 0
    hold = site.hold("quantize")
    with Client(site.address) as client, site.worker(THIS):
        with site.coordinator(THIS):
            site.create(client, "x")
            wait_for(lambda: states(client.get_export("x")).get("quantize-pytorch-int8") == "running")
            before = document(client.get_export("x"))
        if same_tables(previous):
            with site.coordinator(previous):
                hold.unlink()
                assert state(finished(client, "x")) == "succeeded"
        else:
            kept = site.rows()
            refused = site.refused(previous)
            assert refused.code == 3, refused.err
            assert "STATE_SCHEMA" in refused.err
            assert "newer" in refused.err
            assert "Traceback" not in refused.err
            assert site.rows() == kept
            assert site.migrate(previous).code == 0
            assert site.rows() == kept, "an older migrate leaves newer tables as they are"
        with site.coordinator(THIS):
            hold.unlink(missing_ok=True)
            ended = finished(client, "x")
            assert state(ended) == "succeeded", ended.error
            assert lost(before["tasks"][0], document(ended)["tasks"][0]) == []
    assert site.runs() == ALL_RUNS


@pytest.fixture
def shared(tmp_path: Path, postgres: PostgresServer, previous: Version) -> Site:
    site = Site(tmp_path, postgres.create("rolling"))
    assert site.migrate(previous).code == 0
    return site


@contextmanager
def one_address(*ports: int) -> Iterator[str]:
    """Lead every connection to the first of these ports at which a coordinator listens, as a service's address does."""

    def listening() -> tuple[str, int] | None:
        return next((("127.0.0.1", port) for port in ports if _listens(port)), None)

    with TcpProxy(listening) as proxy:
        yield proxy.address


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=2).close()
    except OSError:
        return False
    return True


def test_coordinators_are_replaced_one_after_the_other_while_an_export_runs(shared: Site, previous: Version) -> None:
    """As documented: migrate while the earlier one is active, start the new one as a standby, end the earlier one."""
    old, new = free_port(), free_port()
    hold = shared.hold("merge")
    with ExitStack() as stack:
        address = stack.enter_context(one_address(old, new))
        client = stack.enter_context(Client(address))
        stack.enter_context(shared.worker(previous, address=address))
        active = stack.enter_context(shared.coordinator(previous, address=f"127.0.0.1:{old}"))
        shared.create(client, "x")
        wait_for(lambda: shared.runs() == ["merge"])
        migrated = shared.migrate(THIS)
        assert migrated.code == 0, migrated.err
        shared.create(client, "y")
        stack.enter_context(shared.coordinator(THIS, address=f"127.0.0.1:{new}"))
        standby = stack.enter_context(Client(f"127.0.0.1:{new}"))
        assert set(exports_of(standby)) == {"x", "y"}, "it forwards to the earlier one"
        active.terminate()
        active.wait(60)
        changes = wait_for(lambda: changes_of(standby))
        stack.callback(changes.close)
        hold.unlink()
        for name in "xy":
            ended = finished(standby, name)
            assert state(ended) == "succeeded", ended.error
        told = next(each.change for each in changes if each.WhichOneof("event") == "change")
        assert told.kind == pb.EXPORT_CHANGE_KIND_STATE_CHANGED
    assert shared.runs().count("merge") == 2, "the task that ran was repeated"


def changes_of(client: Client) -> Generator[pb.ExportsEvent, None, None] | None:
    """Return the changes of all exports from now on, once the new coordinator is active."""
    changes = client.watch_exports(patience_seconds=0)
    try:
        next(changes)
    except ModelExportError:
        changes.close()
        return None
    return changes
