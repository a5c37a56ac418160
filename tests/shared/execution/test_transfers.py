"""Inputs come side by side, stop together, and are counted as one."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest

from slipway.errors import ArtifactError
from slipway.execution.transfers import MOST_AT_ONCE, transfer
from slipway.stage import Progress

OnBytes = Callable[[int], None]


def carry(calls: dict[str, Callable[..., object]], phases: list[Progress] | None = None) -> dict[str, object]:
    """Make the calls as a task does for its inputs."""
    seen = phases if phases is not None else []
    return asyncio.run(
        transfer("fetched", calls, stage="x", on_progress=lambda progress, memory: seen.append(progress))
    )


def test_as_many_as_allowed_come_at_once() -> None:
    together, lock = threading.Barrier(MOST_AT_ONCE), threading.Lock()
    running = most = 0

    def fetch(name: str, *, on_bytes: OnBytes) -> str:
        nonlocal running, most
        with lock:
            running, most = running + 1, max(most, running + 1)
        together.wait(30)  # breaks unless as many others wait at the same time
        on_bytes(1)
        with lock:
            running -= 1
        return name.upper()

    names = [f"n{number}" for number in range(2 * MOST_AT_ONCE)]
    phases: list[Progress] = []
    results = carry({name: partial(fetch, name) for name in names}, phases)
    assert list(results.items()) == [(name, name.upper()) for name in names]
    assert most == MOST_AT_ONCE
    assert {phase.phase for phase in phases} == {"fetching inputs"}
    assert max(phase.done for phase in phases) <= len(names)


def endless(ended: list[str], begun: threading.Event, *, on_bytes: OnBytes) -> None:
    """Transfer until it is stopped."""
    try:
        while True:
            begun.set()
            on_bytes(1)
            time.sleep(0.01)
    finally:
        ended.append("stopped")


def test_the_first_error_ends_the_others_before_it_is_raised() -> None:
    ended: list[str] = []
    begun = threading.Event()

    def failing(*, on_bytes: OnBytes) -> None:
        begun.wait(30)
        raise ArtifactError("gone", reason="ARTIFACT_NOT_FOUND")

    waiting = {f"w{number}": partial(endless, ended, begun) for number in range(MOST_AT_ONCE)}
    with pytest.raises(ArtifactError, match="gone"):
        carry({"a": partial(endless, ended, begun), "b": failing, **waiting})
    assert 1 <= len(ended) <= MOST_AT_ONCE  # those that had begun


def test_cancelling_waits_for_the_threads() -> None:
    ended: list[str] = []
    begun = threading.Event()

    async def cancelled() -> int:
        calls = {name: partial(endless, ended, begun) for name in "ab"}
        running = asyncio.create_task(transfer("fetched", calls, stage="x", on_progress=lambda *_: None))
        while not begun.is_set():
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return len(ended)

    assert asyncio.run(cancelled()) in {1, 2}


def test_one_alone_is_called_by_its_name() -> None:
    phases: list[Progress] = []

    def fetch(*, on_bytes: OnBytes) -> int:
        on_bytes(7)
        return 7

    assert carry({"base": fetch}, phases) == {"base": 7}
    assert {phase.phase for phase in phases} == {"fetching base"}
    assert carry({}) == {}
