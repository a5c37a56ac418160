"""An interrupted batch at a coordinator: what is cancelled, and when the rest is left."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from slipway.errors import ServiceError
from slipway.exporting.batches.running import Batch


class Job:
    """Notes which exports are cancelled, and fails for a reason."""

    def __init__(self, reason: str = "") -> None:
        self.reason = reason
        self.asked: list[str] = []

    def cancel(self, name: str) -> None:
        self.asked.append(name)
        if self.reason:
            raise ServiceError("no", reason=self.reason)


def cancelled(job: Job) -> list[str]:
    batch: Any = Batch.__new__(Batch)
    exports = [SimpleNamespace(name=f"e{number}") for number in range(3)]
    batch._cancel(
        SimpleNamespace(
            job=job, submitted=SimpleNamespace(export=one), each=SimpleNamespace(subject=SimpleNamespace(name=one.name))
        )
        for one in exports
    )
    return job.asked


@pytest.mark.parametrize(
    ("reason", "asked"),
    [("", ["e0", "e1", "e2"]), ("EXPORT_NOT_FOUND", ["e0", "e1", "e2"]), ("COORDINATOR_UNAVAILABLE", ["e0"])],
)
def test_a_coordinator_that_is_away_is_asked_once(
    reason: str, asked: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert cancelled(Job(reason)) == asked
    assert len(caplog.records) == (len(asked) if reason else 0)
