"""A coordinator that listens and is not active yet, as one that waits for its state."""

from __future__ import annotations

import asyncio
from pathlib import Path

from slipway.artifacts import LocalStore
from slipway.security.server import ServerSecurity
from slipway_coordinator.coordinator import CoordinatorOptions
from slipway_coordinator.server import CoordinatorServer
from slipway_coordinator.storage.database_access import SqliteState
from support.coordinators.http_places import Answer, call


async def test_calls_are_unavailable_until_it_is_active(tmp_path: Path) -> None:
    server = CoordinatorServer(
        CoordinatorOptions(state=SqliteState(tmp_path / "state.db")),
        address="127.0.0.1:0",
        store=lambda: LocalStore(tmp_path / "store"),
        security=ServerSecurity(http_address="127.0.0.1:0"),
    )

    async def ask(verb: str, path: str) -> Answer:
        return await asyncio.to_thread(call, f"127.0.0.1:{server.http_port}", verb, path)

    await server.listen()
    try:
        assert (await ask("GET", "/healthz")).status == 503
        for verb, path in (
            ("GET", "/v1/projects/default/exports"),
            ("POST", "/v1/projects/default/exports"),
            ("GET", "/v1/projects/default/exports/x:watch"),
            ("PUT", f"/v1/projects/default/blobs/sha256:{'0' * 64}"),
        ):
            refused = await ask(verb, path)
            assert (refused.status, refused.reason) == (503, "COORDINATOR_UNAVAILABLE"), path
        assert (await ask("GET", "/openapi.json")).status == 200
    finally:
        await server.stop()
