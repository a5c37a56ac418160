"""Members of a crew share work by its place, and end together."""

from __future__ import annotations

import threading

import pytest
import torch

from slipway_quantize.calibration.streaming.crew import Crew


@pytest.mark.parametrize("count", [1, 2, 3])
def test_results_are_in_the_order_of_the_items(count: int) -> None:
    with Crew(count, threads=2) as crew:
        found = crew.map(lambda member, item: (member, item), range(7))
        assert found == [(item % count, item) for item in range(7)]
        assert crew.map(lambda _, item: item, []) == []
        assert crew.run(lambda member: member) == list(range(count))


def test_members_work_at_the_same_time_with_their_share_of_the_threads() -> None:
    together = threading.Barrier(2, timeout=60)

    def work(_: int) -> int:
        together.wait()
        return torch.get_num_threads()

    with Crew(2, threads=4) as crew:
        assert crew.run(work) == [2, 2]


def test_an_error_ends_the_work_of_all() -> None:
    """The other member is in the middle of an item, and begins no more."""
    failing, failed = threading.Event(), threading.Event()
    begun: list[int] = []

    def work(member: int, item: int) -> None:
        begun.append(item)
        if member == 1:
            failing.wait(60)
            failed.set()
            raise ValueError(item)
        failing.set()
        failed.wait(60)
        while not crew.has_failed:
            pass

    with Crew(2, threads=2) as crew:
        with pytest.raises(ValueError, match="1"):
            crew.map(work, range(10))
        assert sorted(begun) == [0, 1]
        assert crew.map(lambda _, item: item, [1, 2]) == [1, 2]
