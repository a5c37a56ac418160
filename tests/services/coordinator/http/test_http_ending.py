"""A coordinator that ends while somebody reads events over HTTP."""

from __future__ import annotations

from pathlib import Path

from support.coordinators.event_readers import Reader, submit
from support.coordinators.http_places import HttpPlace


def test_a_coordinator_that_ends_says_so(tmp_path: Path) -> None:
    with HttpPlace(tmp_path) as ending:
        reader = Reader(ending, submit(ending, "going"))
        events = reader.events()
        next(events)
    last = list(events)[-1]
    assert (last["event"], last["data"]["code"]) == ("failure", 14)  # browsers have an event `error` of their own
    reader.close()
