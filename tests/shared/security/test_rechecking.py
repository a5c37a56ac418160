"""A check that is repeated while a stream goes on: the stream ends if the check fails, and only then."""

from __future__ import annotations

import asyncio

import pytest

from slipway.errors import ModelExportError, ServiceError
from slipway.security.access.principals import Principal, Role
from slipway.security.rechecking import check_unchanged, rechecking


async def test_a_check_that_fails_ends_the_block_with_its_error() -> None:
    count = 0

    async def check() -> None:
        nonlocal count
        count += 1
        if count == 3:
            raise ServiceError("the token has expired", reason="UNAUTHENTICATED")

    with pytest.raises(ModelExportError) as caught:
        async with rechecking(check, seconds=0.01):
            await asyncio.sleep(60)
    assert (caught.value.reason, count) == ("UNAUTHENTICATED", 3)


async def test_keys_that_cannot_be_fetched_say_nothing_about_the_caller() -> None:
    done = asyncio.Event()
    count = 0

    async def check() -> None:
        nonlocal count
        count += 1
        if count == 3:
            done.set()
        raise ServiceError("its keys cannot be fetched", reason="ISSUER_UNAVAILABLE")

    async with asyncio.timeout(30), rechecking(check, seconds=0.01):
        await done.wait()


async def test_a_block_does_not_go_on_for_ever_while_nothing_is_known_about_the_caller() -> None:
    outcomes = iter([False, False, True])
    seconds: list[float] = []

    async def check() -> None:
        seconds.append(asyncio.get_running_loop().time())
        if not next(outcomes, False):
            raise ServiceError("its keys cannot be fetched", reason="ISSUER_UNAVAILABLE")

    with pytest.raises(ModelExportError) as caught:
        async with asyncio.timeout(30), rechecking(check, seconds=0.05, patience_seconds=0.3):
            await asyncio.sleep(60)
    assert caught.value.reason == "ISSUER_UNAVAILABLE"
    assert seconds[-1] - seconds[2] >= 0.3 - 0.01, "since the last check that said something"


async def test_a_check_with_a_fault_ends_the_block(caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        raise KeyError("an unforeseen fault")

    with pytest.raises(ModelExportError) as caught:
        async with asyncio.timeout(5), rechecking(check, seconds=0.01):
            await asyncio.sleep(60)
    assert caught.value.reason == "INTERNAL"
    assert "unforeseen" not in str(caught.value)
    assert "an unforeseen fault" in caplog.text


async def test_checks_end_with_the_block_and_its_own_errors_stay() -> None:
    count = 0

    async def check() -> None:
        nonlocal count
        count += 1

    async def fail(error: Exception) -> None:
        async with rechecking(check, seconds=0.01):
            await asyncio.sleep(0.05)
            raise error

    for error in (ValueError("own"), TimeoutError("own")):
        with pytest.raises(type(error), match="own"):
            await fail(error)
    seen = count
    await asyncio.sleep(0.05)
    assert count == seen > 0


def test_only_role_and_projects_count() -> None:
    before = Principal("a", frozenset({Role.VIEWER}), frozenset({"red"}))
    check_unchanged(before, Principal("a", frozenset({Role.VIEWER}), frozenset({"red"}), holds_store=True))
    for roles, projects in (({Role.OPERATOR}, {"red"}), ({Role.VIEWER}, {"red", "blue"}), ({Role.VIEWER}, set())):
        with pytest.raises(ServiceError) as caught:
            check_unchanged(before, Principal("a", frozenset(roles), frozenset(projects)))
        assert caught.value.reason == "RIGHTS_CHANGED"
