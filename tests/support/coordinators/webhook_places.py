"""Coordinators that tell receivers of their exports, and what waits there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from slipway.client import Client
from support.coordinators.harness import Harness, state, tiny_export, tiny_task, wait_for
from support.servers.webhook_receiver import (
    webhooks_file,
)


@contextmanager
def coordinator(home: Path, *entries: dict[str, Any], with_worker: bool = False, **more: Any) -> Iterator[Harness]:
    path = webhooks_file(home / "webhooks", *entries)
    with Harness(home, with_worker=with_worker, webhooks=path, **more) as harness:
        yield harness


def create(place: Harness, *names: str) -> None:
    for name in names:
        place.submit(tiny_export(name, tiny_task("m")))


def rows(place: Harness) -> list[Any]:
    with place.server.coordinator.database._engine.connect() as connection:
        return list(connection.execute(sa.text("SELECT receiver, type, attempts, export FROM slipway_deliveries")))


def cancel(client: Client, name: str) -> None:
    client.cancel_export(name)
    wait_for(lambda: state(client.get_export(name)) == "cancelled")
