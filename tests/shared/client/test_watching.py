"""A watch survives restarts of the coordinator without a gap or a repetition."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import slipway
from slipway.client import AsyncClient, Client
from slipway.client.calls import BlockingCalls, Resumption
from slipway.errors import ModelExportError, ServiceError
from slipway_protos.v1 import export_pb2 as pb
from support.coordinators.harness import CONFIGURATION, DIGEST, coordinator_process, wait_for
from support.servers.free_ports import free_port

SOURCES = {"base": DIGEST, "adapter": DIGEST}


class Restarting:
    """A coordinator's process that can be restarted with the same state."""

    def __init__(self, home: Path, stack: ExitStack) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self._home, self._stack = home, stack

    def start(self) -> None:
        self._process: subprocess.Popen[bytes] = self._stack.enter_context(
            coordinator_process(self._home, self.address)
        )
        with Client(self.address) as client:
            wait_for(lambda: answers(client))

    def end(self, number: signal.Signals) -> None:
        self._process.send_signal(number)
        self._process.wait(60)


def answers(client: Client) -> bool:
    try:
        list(client.list_exports())
    except ModelExportError as error:
        assert error.reason == "COORDINATOR_UNAVAILABLE"
        return False
    return True


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Restarting]:
    with ExitStack() as stack:
        restarting = Restarting(tmp_path, stack)
        restarting.start()
        yield restarting


@contextmanager
def watching(address: str, name: str, *, blocking: bool) -> Iterator[list[pb.ExportEvent]]:
    """Collect the events of a watch in another thread; join it at the end."""
    seen: list[pb.ExportEvent] = []

    async def watch() -> None:
        async with AsyncClient(address) as client:
            async for event in client.watch_export(name, patience_seconds=60):
                keep(event)

    def watch_blocking() -> None:
        with Client(address) as client:
            seen.extend(event for event in client.watch_export(name, patience_seconds=60) if keep(event))

    def keep(event: pb.ExportEvent) -> bool:
        seen.append(event)
        return False

    thread = threading.Thread(target=watch_blocking if blocking else lambda: asyncio.run(watch()), daemon=True)
    thread.start()
    yield seen
    thread.join(120)
    assert not thread.is_alive()


@pytest.mark.slow
def test_a_watch_goes_on_over_restarts(coordinator: Restarting) -> None:
    """Of either client, when the coordinator was killed and when it was stopped."""
    with Client(coordinator.address) as client, ExitStack() as stack:
        name = client.create_export(CONFIGURATION, sources=SOURCES, export_id="x").name
        watches = [stack.enter_context(watching(coordinator.address, name, blocking=each)) for each in (False, True)]
        for seen in watches:
            wait_for(lambda seen=seen: seen and seen[-1].export.state == pb.EXPORT_STATE_RUNNING)
        for number in (signal.SIGKILL, signal.SIGTERM):
            before = [len(seen) for seen in watches]
            coordinator.end(number)
            coordinator.start()
            for seen, count in zip(watches, before, strict=True):
                wait_for(lambda seen=seen, count=count: len(seen) > count)
        client.cancel_export(name)
    for seen in watches:
        sequences = [event.sequence for event in seen]
        assert sequences == sorted(set(sequences))
        assert seen[-1].export.state == pb.EXPORT_STATE_CANCELLED


def test_without_patience_a_disconnect_is_an_error(coordinator: Restarting) -> None:
    with Client(coordinator.address) as client:
        name = client.create_export(CONFIGURATION, sources=SOURCES, export_id="x").name
        events = client.watch_export(name, patience_seconds=0)
        next(events)
        coordinator.end(signal.SIGKILL)
        with pytest.raises(ModelExportError) as caught:
            list(events)
    assert caught.value.reason == "COORDINATOR_UNAVAILABLE"


def watch_all(address: str, seen: list[pb.ExportsEvent], *, blocking: bool) -> threading.Thread:
    """Collect changes of all exports in another thread until one named last is deleted."""

    def keep(event: pb.ExportsEvent) -> bool:
        seen.append(event)
        change = event.change
        return change.export.name.endswith("/last") and change.kind == pb.EXPORT_CHANGE_KIND_DELETED

    async def watch() -> None:
        async with AsyncClient(address) as client, contextlib.aclosing(client.watch_exports()) as events:
            async for event in events:
                if keep(event):
                    return

    def watch_blocking() -> None:
        with Client(address) as client, contextlib.closing(client.watch_exports()) as events:
            any(map(keep, events))

    thread = threading.Thread(target=watch_blocking if blocking else lambda: asyncio.run(watch()), daemon=True)
    thread.start()
    return thread


@pytest.mark.slow
def test_all_exports_are_watched_over_restarts(coordinator: Restarting) -> None:
    """Each of both clients sees every creation, change of state and deletion once, though the coordinator is killed in between."""
    seen: tuple[list[pb.ExportsEvent], ...] = ([], [])
    threads = [watch_all(coordinator.address, each, blocking=bool(number)) for number, each in enumerate(seen)]
    wait_for(lambda: all(seen))
    with Client(coordinator.address) as client:
        for number, how in enumerate((signal.SIGKILL, signal.SIGTERM, signal.SIGKILL)):
            for name in (f"a{number}", f"b{number}"):
                client.create_export(CONFIGURATION, sources=SOURCES, export_id=name)
            coordinator.end(how)
            coordinator.start()
            client.cancel_export(f"a{number}")
        client.create_export(CONFIGURATION, sources=SOURCES, export_id="last")
        client.cancel_export("last")
        wait_for(lambda: client.get_export("last").state == pb.EXPORT_STATE_CANCELLED)
        client.delete_export("last")
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    first, second = ([event for event in each if event.HasField("change")] for each in seen)
    assert first == second
    assert len({event.cursor for event in first}) == len(first)
    changes: dict[str, list[str]] = {}
    for event in first:
        change = event.change
        kind = pb.ExportChangeKind.Name(change.kind).removeprefix("EXPORT_CHANGE_KIND_").lower()
        state = pb.ExportState.Name(change.export.state).removeprefix("EXPORT_STATE_").lower()
        changes.setdefault(change.export.name.rpartition("/")[2], []).append(f"{kind} {state}")
    begun = ["created queued", "state_changed running"]
    ended = [*begun, "state_changed cancelled"]
    assert changes == {
        **{f"a{number}": ended for number in range(3)},
        **{f"b{number}": begun for number in range(3)},
        "last": [*ended, "deleted cancelled"],
    }


def event(sequence: int) -> pb.ExportEvent:
    return pb.ExportEvent(sequence=sequence, log=pb.LogLine(message="m"))


def test_what_was_seen_is_not_repeated_and_patience_is_for_one_absence() -> None:
    gone = ServiceError("gone").failure()
    watch = Resumption(3, patience_seconds=60)
    with pytest.raises(ModelExportError):
        watch.pause_seconds(gone)  # it never answered
    assert [watch.is_new(event(number)) for number in (2, 3, 4, 4, 9)] == [False, False, True, False, True]
    pauses = [watch.pause_seconds(gone) for _ in range(9)]
    assert pauses[0] < 0.3 < max(pauses) <= 5
    assert watch.is_new(event(10))
    assert watch.pause_seconds(gone) < 0.3
    assert watch.pause_seconds(ServiceError("it was not read", reason="TRANSFER_SLOW").failure()) < 1
    with pytest.raises(ModelExportError):
        watch.pause_seconds(ServiceError("no", reason="PERMISSION_DENIED").failure())


def test_the_asynchronous_client_has_every_method_and_raises_the_same(coordinator: Restarting) -> None:
    async def run() -> list[str]:
        async with AsyncClient(coordinator.address, project="async") as client:
            made = [await client.create_export(CONFIGURATION, sources=SOURCES, export_id=f"e{i}") for i in range(3)]
            assert (await client.get_export("e1")).name == made[1].name
            listed = [export.name async for export in client.list_exports(page_size=2)]
            assert listed == [export.name for export in reversed(made)]
            cancelled = await client.cancel_export("e2")
            assert [one async for one in client.watch_export(cancelled.name)][
                -1
            ].export.state == pb.EXPORT_STATE_CANCELLED
            assert (await client.retry_export("e2")).state == pb.EXPORT_STATE_QUEUED
            reasons = []
            for call in (client.get_export("none"), client.delete_export("e0")):
                with pytest.raises(ModelExportError) as caught:
                    await call
                reasons.append(caught.value.reason)
            return reasons

    assert asyncio.run(run()) == ["EXPORT_NOT_FOUND", "EXPORT_STATE"]
    public = {name for name in dir(Client) if not name.startswith("_")} - {"over"}  # takes a blocking connection
    assert public <= {name for name in dir(AsyncClient) if not name.startswith("_")}


def test_importing_slipway_brings_no_network_and_its_names_do() -> None:
    code = "import sys, slipway; assert 'grpc' not in sys.modules; slipway.Client; assert 'grpc' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert slipway.Client is Client
    assert slipway.AsyncClient is AsyncClient
    with pytest.raises(AttributeError):
        slipway.Clinet  # type: ignore[attr-defined] # noqa: B018


async def test_a_client_that_is_closed_says_so(coordinator: Restarting, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "text").write_text("x")
    client = Client(coordinator.address)
    name = client.create_export(CONFIGURATION, sources=SOURCES).name
    events = client.watch_export(name)
    next(events)
    threading.Timer(0.2, client.close).start()
    with pytest.raises(ServiceError, match="was closed"):
        list(events)
    for call in (
        lambda: client.get_export(name),
        lambda: client.push_artifact(tmp_path / "folder"),  # its service was not called before the end
        lambda: next(client.watch_export(name)),
    ):
        with pytest.raises(ServiceError, match="was closed") as raised:
            call()
        assert raised.value.reason == "CANCELLED"
    client = AsyncClient(coordinator.address)
    events = client.watch_export(name)
    await anext(events)
    closing = asyncio.create_task(client.close())
    with pytest.raises(ServiceError, match="was closed"):
        async for _ in events:
            pass
    await closing
    with pytest.raises(ServiceError, match="was closed"):
        await client.get_export(name)

    client = AsyncClient(coordinator.address)
    watching = asyncio.create_task(anext(client.watch_export(name, after_sequence=1_000_000)))
    await asyncio.sleep(0.2)
    watching.cancel()  # which stays a cancellation
    with pytest.raises(asyncio.CancelledError):
        await watching
    await client.close()


def test_a_client_that_is_closed_between_a_stub_and_its_call_says_so() -> None:
    calls = BlockingCalls(f"127.0.0.1:{free_port()}")
    method = calls.exports.GetExport
    calls.close()
    with pytest.raises(ServiceError, match="was closed") as raised:
        calls.call(method, pb.GetExportRequest(name="projects/default/exports/x"))
    assert raised.value.reason == "CANCELLED"


def test_what_is_done_when_a_call_ends_may_use_a_client_that_is_being_closed() -> None:
    calls = BlockingCalls(f"127.0.0.1:{free_port()}")
    told: list[str] = []

    def done(_: object) -> None:
        try:
            assert calls.exports
        except ServiceError as error:
            told.append(error.reason)

    request = pb.GetExportRequest(name="projects/default/exports/x")
    for _ in range(8):  # nobody answers them
        calls.exports.GetExport.future(request, wait_for_ready=True).add_done_callback(done)
    closing = threading.Thread(target=calls.close, daemon=True)
    closing.start()
    wait_for(lambda: told == ["CANCELLED"] * 8)
    closing.join(60)
    assert not closing.is_alive()
