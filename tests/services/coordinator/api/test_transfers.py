"""Clients that are too slow end, and hold up nobody of another project meanwhile."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from slipway.artifacts.digests import digest_bytes
from slipway.client import Client
from slipway.errors import ModelExportError, ServiceError
from slipway.rpc.call_ends import failure_of_call
from slipway.security.turns import Turns
from slipway_coordinator.transfers import Pace, TransferLimits, Transfers
from slipway_protos.v1 import artifact_pb2 as pb
from support.coordinators.artifact_places import PEOPLE, Place, content, some_files
from support.coordinators.harness import wait_for
from support.harness.unhurried import unhurried

PATIENCE = 3.0
LIMITS = TransferLimits(at_once=8, each=4, bytes_per_second=1 << 20, patience_seconds=PATIENCE)
SLOW = [f"slow-{n}" for n in range(4)]


class Dripping:
    """An upload that brings just enough to be borne with, later a byte from time to time."""

    def __init__(self, client: Client, number: int, *, later: threading.Event, ended: threading.Event) -> None:
        self._later, self._ended = later, ended
        self.call = client._calls.artifacts.WriteBlob.future(
            self._messages(client.project, digest_bytes(b"%d" % number)), metadata=client._calls.metadata()
        )

    def _messages(self, project: str, digest: str) -> Iterator[pb.WriteBlobRequest]:
        yield pb.WriteBlobRequest(parent=f"projects/{project}", digest=digest, size_bytes=1 << 30)
        while not self._later.wait(0.3):
            yield pb.WriteBlobRequest(data=bytes(LIMITS.bytes_per_second // 2))
        while not self._ended.wait(0.3 * PATIENCE):
            yield pb.WriteBlobRequest(data=b"x")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    people = PEOPLE | dict.fromkeys(SLOW, "role: submitter, projects: [red]")
    with Place(tmp_path_factory.mktemp("transfers"), people=people, transfers=LIMITS) as place:
        yield place


@pytest.fixture
def digest(place: Place, tmp_path: Path) -> str:
    """An artifact of blue's with a file that fills no buffer between here and there."""
    folder = some_files(tmp_path)
    (folder / "larger").write_bytes(b"0123456789abcdef" * 2_000_000)
    with place.client_of("neighbour") as client:
        return client.push_artifact(folder)


def unread(client: Client, digest: str) -> Any:
    """A download that is never read."""
    large = max(client.get_artifact(digest).files, key=lambda file: file.size_bytes)
    request = pb.ReadBlobRequest(name=f"projects/{client.project}/artifacts/{digest}", digest=large.digest)
    return client._calls.artifacts.ReadBlob(request, metadata=client._calls.metadata())


@pytest.mark.slow  # it waits until a client's patience is over
def test_uploads_that_drip_end_and_hold_nobody_up(place: Place, digest: str, tmp_path: Path) -> None:
    """The transfers of four principals of a project that get nowhere, and another project's meanwhile."""
    later, ended = threading.Event(), threading.Event()
    clients = [place.client_of(name, project="red") for name in SLOW]
    try:
        dripping = [
            Dripping(client, 4 * n + m, later=later, ended=ended) for n, client in enumerate(clients) for m in range(4)
        ]
        wait_for(lambda: place.server._artifacts.transfers.incoming.busy)
        with place.client_of("neighbour") as other:
            (tmp_path / "new").write_text("of blue")
            assert other.push_artifact({"new": tmp_path / "new"})
            other.pull_artifact(digest, tmp_path / "pulled")
        assert not any(one.call.done() for one in dripping)
        later.set()
        wait_for(lambda: all(one.call.done() for one in dripping))
        for one in dripping:
            failure = failure_of_call(one.call.exception(), address=place.address)
            assert (failure.reason, failure.retryable) == ("TRANSFER_SLOW", True)
            assert one.call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert "SLIPWAY_TRANSFER_RATE" in failure.remedy
    finally:
        later.set()
        ended.set()
        for client in clients:
            client.close()
    wait_for(lambda: not place.server._artifacts.transfers.incoming.busy)
    # What came is kept for a while, so that their clients can go on.
    assert 0 < len(list((place.home / "store" / "uploads").iterdir())) <= len(dripping)


def test_downloads_that_are_not_read_hold_nobody_up_and_go_on_later(place: Place, digest: str, tmp_path: Path) -> None:
    place.give(digest, project="red")
    outgoing = place.server._artifacts.transfers.outgoing
    clients = [place.client_of(name, project="red") for name in SLOW]
    try:
        calls = [unread(client, digest) for client in clients for _ in range(2)]
        wait_for(lambda: outgoing.busy == LIMITS.at_once // 2)
        with place.client_of("neighbour") as other:
            other.pull_artifact(digest, tmp_path / "pulled")
        assert content(tmp_path / "pulled")["larger"]
        for call in calls:
            call.cancel()
    finally:
        for client in clients:
            client.close()
    wait_for(lambda: not outgoing.busy)


@pytest.mark.slow  # as above
def test_a_download_that_is_read_too_slowly_ends_and_is_gone_on_with(place: Place, digest: str, tmp_path: Path) -> None:
    stalls = iter([2 * PATIENCE])

    def tell(count: int) -> None:
        if count:
            time.sleep(next(stalls, 0))

    with place.client_of("neighbour") as client:
        got, call = 0, unread(client, digest)

        def read() -> None:
            nonlocal got
            for message in call:
                got += len(message.data)
                time.sleep(PATIENCE / 2)

        with pytest.raises(grpc.RpcError) as caught:
            read()
        assert failure_of_call(caught.value, address="").reason == "TRANSFER_SLOW"
        assert got < 32_000_000
        client.pull_artifact(digest, tmp_path / "pulled", on_bytes=tell)
    assert len(content(tmp_path / "pulled")["larger"]) == 32_000_000


async def test_patience_ends_with_waiting_and_grows_with_bytes() -> None:
    async def messages(*pauses: float) -> AsyncIterator[bytes]:
        for pause in pauses:
            await asyncio.sleep(pause)
            yield b"x" * 100

    async def receive(pace: Pace, *pauses: float) -> int:
        count, incoming = 0, messages(*pauses)
        while (data := await pace.next(incoming)) is not None:
            pace.count_bytes(len(data))
            count += 1
        return count

    def begin(*, patience: float = 0.3) -> Pace:
        return Pace(TransferLimits(bytes_per_second=1000, patience_seconds=patience))

    assert await receive(begin(patience=1), *[0.03] * 50) == 50, "three times as fast as it has to be"
    began = time.monotonic()
    for pauses in ([60.0], [0.0] * 50 + [60.0], [0.2] * 20):  # also after a fast start, and not quite fast enough
        with pytest.raises(ModelExportError) as caught:
            await receive(begin(), *pauses)
        assert caught.value.reason == "TRANSFER_SLOW"
    assert time.monotonic() - began < 20


async def test_projects_take_turns_and_one_of_them_cannot_have_all() -> None:
    turns, log, ends = Turns(8, each=4), [], {}

    async def hold(principal: str, project: str, number: int) -> None:
        async with turns.one(principal, project=project):
            log.append((project, number))
            end = ends.setdefault((project, number), asyncio.Event())
            await end.wait()

    async def settle() -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        tasks = {}
        for project in "abcde":
            for number in range(10):
                principal = f"{project}{number % 3}"
                tasks[project, number] = group.create_task(hold(principal, project, number))
            await settle()
        held = [project for project, _ in log]
        assert [held.count(project) for project in "abcde"] == [4, 2, 1, 1, 0]
        log.clear()
        ends["a", 0].set()
        await settle()
        assert log == [("e", 0)], "who has none comes before who has three"
        log.clear()
        tasks["b", 5].cancel()
        for one in ("a", 1), ("a", 2), ("a", 3):
            ends[one].set()
        await settle()
        assert [project for project, _ in log] == ["a", "c"], "in turn, one more each; the last one is for who has none"
        for one in tasks:
            ends.setdefault(one, asyncio.Event()).set()
    assert turns.busy == 0
    assert tasks["b", 5].cancelled()


def test_a_principal_leaves_turns_to_others_of_its_project() -> None:
    async def run() -> list[str]:
        turns, log, end = Turns(16, each=4), [], asyncio.Event()

        async def hold(principal: str) -> None:
            async with turns.one(principal, project="a"):
                log.append(principal)
                await end.wait()

        async with asyncio.TaskGroup() as group:
            for principal in [*["greedy"] * 12, "modest"]:
                group.create_task(hold(principal))
            await asyncio.sleep(0.05)
            now = list(log)
            end.set()
        return now

    assert asyncio.run(run()) == [*["greedy"] * 4, "modest"]


async def test_the_first_look_that_fails_ends_the_others() -> None:
    def looked(item: int) -> int:
        if item == 300:
            raise ServiceError("gone", reason="STORE_UNAVAILABLE")
        return item

    transfers = Transfers(LIMITS)
    with pytest.raises(ServiceError, match="gone"):
        await transfers.look_up_each("one", "red", looked, itertools.count())
    assert not transfers.looks.busy
    await transfers.close()


def test_looks_at_many_files_let_those_of_others_between() -> None:
    """What one project asks of the store in 20 calls takes 2 s of all its turns; another one's look comes at once."""

    async def run() -> None:
        transfers, items = Transfers(LIMITS), range(400)

        def slowly(item: int) -> int:
            time.sleep(0.001)
            return -item

        async def many(number: int) -> list[int]:
            return await transfers.look_up_each(f"greedy-{number}", "red", slowly, items)

        asked = [asyncio.create_task(many(number)) for number in range(20)]
        await asyncio.sleep(0.2)
        began = time.monotonic()
        assert await transfers.look_up("modest", "blue", lambda: "seen") == "seen"
        assert time.monotonic() - began < unhurried(1)
        assert not any(one.done() for one in asked[10:])
        for one in asked:
            assert await one == [-item for item in items]
        await transfers.close()

    asyncio.run(run())
