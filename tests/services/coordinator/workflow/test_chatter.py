"""Stages that say more than a message can carry: their work counts all the same, and others read what fits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from slipway.rpc.serving import MAX_REQUEST_BYTES
from slipway.rpc.values import failure_of_status
from slipway.stage import MOST_FACTS_BYTES
from support.coordinators.harness import Harness, state, states, tiny_export, tiny_task


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    with Harness(tmp_path, options={"lease_seconds": 3600.0}) as harness:
        yield harness


@pytest.mark.parametrize(
    ("chatter", "last"),
    [({"logged_bytes": 2 * MAX_REQUEST_BYTES}, "longg"), ({"printed_lines": 450}, "449 p")],
    ids=["one-long-line", "many-lines"],
)
@pytest.mark.parametrize("sleep_seconds", [0.0, 2.0], ids=["handed-in-with-the-result", "reported-while-it-runs"])
def test_a_stage_that_says_more_than_a_message_carries(
    harness: Harness, chatter: dict[str, int], last: str, sleep_seconds: float
) -> None:
    task = tiny_task("m", sleep_seconds=sleep_seconds, **chatter)
    name = harness.submit(tiny_export("talks", task, base=harness.base()))
    events = list(harness.client.watch_export(name))
    assert state(events[-1].export) == "succeeded"
    lines = [event.log.message for event in events if event.WhichOneof("event") == "log"]
    assert any(line.startswith(last) for line in lines)
    assert sum(event.ByteSize() for event in events) < MAX_REQUEST_BYTES


def test_a_stage_that_says_what_no_message_can_carry(harness: Harness) -> None:
    name = harness.submit(tiny_export("halves", tiny_task("m", half_a_character=True), base=harness.base()))
    events = list(harness.client.watch_export(name))
    assert state(events[-1].export) == "failed"
    assert events[-1].export.tasks[0].attempts[-1].error.message == "half ?"
    assert "half ?" in [event.log.message for event in events]


def test_a_stage_that_records_too_much_fails_and_says_so(harness: Harness) -> None:
    tasks = [
        tiny_task(name, facts={"more": "m" * size}) for name, size in (("little", 1000), ("much", MOST_FACTS_BYTES))
    ]
    ended = harness.finished(
        harness.submit(tiny_export("x", *tasks, base=harness.base(), recovery={"max_attempts": 1}))
    )
    assert states(ended) == {"little": "succeeded", "much": "failed"}
    failure = failure_of_status(ended.error)
    assert failure.reason == "RESULT_INVALID"
    assert str(MOST_FACTS_BYTES) in failure.message
