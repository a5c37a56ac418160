"""A receiver, and senders that the tests need not wait for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from slipway_coordinator.webhooks import housekeeping, sender
from support.servers.webhook_receiver import (
    WebhookReceiver,
    webhook_receiver,
)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the tests need not wait for the real pauses."""
    for name, seconds in {"COUNT_SECONDS": 0.1, "TIDY_SECONDS": 0.1}.items():
        monkeypatch.setattr(housekeeping, name, seconds)
    for name, seconds in {
        "LOOK_SECONDS": 0.05,
        "_REFRESH_SECONDS": 0.05,
        "_FIRST_PAUSE": 0.2,
        "_LONGEST_PAUSE": 1.0,
        "_LONGEST_DOWN_PAUSE": 0.5,
    }.items():
        monkeypatch.setattr(sender, name, seconds)


@pytest.fixture
def receiver() -> Iterator[WebhookReceiver]:
    with webhook_receiver() as running:
        yield running
