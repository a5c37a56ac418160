"""Places of messages on their way in: bounded in all, fair, and not held by the slow while others wait."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from slipway.errors import ServiceError
from slipway.security.incoming import Incoming, next_message
from slipway.security.limits import Limits

LIMITS = Limits(requests=4, all_requests=4, reports=2, arrival_seconds=0.2)


class Slow:
    """A stream whose message arrives when it is told to."""

    def __init__(self, data: bytes = b"") -> None:
        self.asked, self.arrived, self._data = asyncio.Event(), asyncio.Event(), data

    def __aiter__(self) -> Slow:
        return self

    async def __anext__(self) -> bytes:
        self.asked.set()
        await self.arrived.wait()
        return self._data


async def test_principals_share_the_places_and_the_slow_give_theirs_to_those_who_wait() -> None:
    incoming = Incoming(LIMITS)
    streams = {name: [Slow() for _ in range(4)] for name in "abc"}
    calls = {
        name: [asyncio.create_task(next_message(each, lambda name=name: incoming.of_client(name), seconds=60)) for each in mine]
        for name, mine in streams.items()
    }  # fmt: skip
    await asyncio.sleep(0.05)
    asked = {name: sum(each.asked.is_set() for each in mine) for name, mine in streams.items()}
    assert asked == {"a": 2, "b": 1, "c": 1}  # one more only while fewer are held than free

    honest = Slow(b"here")
    honest.arrived.set()
    began = asyncio.get_running_loop().time()
    assert await next_message(honest, lambda: incoming.of_client("d"), seconds=60) == b"here"
    assert asyncio.get_running_loop().time() - began < 5
    await asyncio.sleep(1)
    ended = [call for each in calls.values() for call in each if call.done()]
    assert ended
    for call in ended:
        with pytest.raises(ServiceError) as caught:
            call.result()
        failure = caught.value.failure()
        assert (failure.reason, failure.retryable) == ("REQUESTS_FULL", True)
    for call in (call for each in calls.values() for call in each):
        call.cancel()
    await asyncio.gather(*(call for each in calls.values() for call in each), return_exceptions=True)
    async with incoming.of_client("a"), incoming.of_client("a"), incoming.of_client("b"):
        pass  # every place was given back


async def test_a_worker_does_not_wait_for_clients_and_not_long_for_its_own_kind() -> None:
    incoming, stuck = Incoming(LIMITS), [Slow() for _ in range(6)]
    clients = [
        asyncio.create_task(next_message(each, lambda n=n: incoming.of_client(f"client-{n}"), seconds=60))
        for n, each in enumerate(stuck)
    ]
    workers = [
        asyncio.create_task(next_message(each, lambda: incoming.of_worker("worker"), seconds=60))
        for each in (Slow(), Slow())
    ]
    await asyncio.sleep(0.05)
    report = Slow(b"report")
    report.arrived.set()
    async with asyncio.timeout(5):
        assert await next_message(report, lambda: incoming.of_worker("worker"), seconds=60) == b"report"
    for call in (*clients, *workers):
        call.cancel()
    await asyncio.gather(*clients, *workers, return_exceptions=True)


@pytest.mark.parametrize(("size", "free"), [(100, True), (1 << 20, False)])
async def test_a_large_message_keeps_its_place_while_it_is_handled(size: int, *, free: bool) -> None:
    incoming, stream = Incoming(Limits(requests=1, all_requests=2, arrival_seconds=60)), Slow(bytes(size))
    stream.arrived.set()
    async with AsyncExitStack() as handling:
        await next_message(stream, lambda: incoming.of_client("a"), seconds=5, keeping=handling)
        with AsyncTimeout() as waited:
            async with asyncio.timeout(0.1), incoming.of_client("a"):
                pass
        assert waited.expired is not free
    async with asyncio.timeout(5), incoming.of_client("a"):
        pass


class AsyncTimeout:
    """Notes whether a block ran into a timeout."""

    expired = False

    def __enter__(self) -> AsyncTimeout:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        self.expired = kind is TimeoutError
        return self.expired
