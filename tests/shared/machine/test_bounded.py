"""A process whose work may be endless: what it may take, what it says then, and that it goes on after it."""

from __future__ import annotations

import time

import pytest

from slipway.errors import ConfigurationError
from slipway.machine.bounded.process import BoundedProcess, Bounds, RefusedWorkError, UnboundedWorkError


def process(name: str, **bounds: float) -> BoundedProcess:
    return BoundedProcess(f"support.hostile.endless:{name}", Bounds(**bounds))  # type: ignore[arg-type]


def test_calls_are_answered_by_one_process_whatever_it_prints() -> None:
    with process("double") as doubling:
        assert [doubling.call(number) for number in (1, 2, 3)] == [2, 4, 6]


def test_items_come_one_by_one_and_a_reader_may_stop() -> None:
    with process("count") as counting:
        assert list(counting.items(3)) == [0, 1, 2]
        endless = counting.items(1 << 40)
        assert [next(endless), next(endless)] == [0, 1]
        endless.close()
        assert list(counting.items(2)) == [0, 1]


def test_a_half_of_a_character_is_an_answer() -> None:
    with process("surrogate") as writing:
        assert writing.call() == "\ud83d"


@pytest.mark.parametrize(
    ("name", "bounds", "said"),
    [
        ("loop", {"seconds": 0.2}, "takes more than 0.2 s of processor time"),
        ("wait", {"wait_seconds": 0.5}, "takes more than 0.5 s"),
        ("grow", {}, "needs more than 1.1 GB of memory"),
        ("leave", {}, r"ends the process that does it \(status 7"),
    ],
)
def test_what_is_not_bounded_ends_and_says_why(name: str, bounds: dict[str, float], said: str) -> None:
    began = time.monotonic()
    with process(name, **bounds) as working:
        for _ in range(2):  # the second call has a new process
            with pytest.raises(UnboundedWorkError, match=said):
                working.call()
    assert time.monotonic() - began < 20


def test_memory_is_counted_over_all_items() -> None:
    with (
        process("memory_pieces", memory_bytes=128 << 20) as working,
        pytest.raises(UnboundedWorkError, match="memory"),
    ):
        list(working.items())


def test_exceptions_are_those_of_the_function() -> None:
    with process("refuse") as refusing, pytest.raises(ConfigurationError, match="not so; so") as caught:
        refusing.call()
    assert caught.value.about == {"key": "a"}
    with process("fail") as failing:
        for _ in range(2):
            with pytest.raises(RefusedWorkError, match="by nothing"):
                failing.call()
