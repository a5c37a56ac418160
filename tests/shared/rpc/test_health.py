"""Health checks of a real server: open to every caller, and no caller can block others."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1 import health_pb2_grpc

from slipway.rpc.call_ends import failure_of_call
from slipway.rpc.serving import HealthService, add_health_and_reflection
from slipway.security.access.access_file import AccessFile
from slipway.security.access.issuers import fetching
from slipway.security.access.principals import new_token, token_hash
from slipway.security.limits import Limits
from slipway.security.server import ServerSecurity
from support.harness.unhurried import unhurried
from support.servers.oidc_issuer import AUDIENCE, OidcIssuer

SERVING, NOT_SERVING = pb.HealthCheckResponse.SERVING, pb.HealthCheckResponse.NOT_SERVING
UNNAMED = 3
TOKEN = new_token()
Stub = health_pb2_grpc.HealthStub


@asynccontextmanager
async def serving(folder: Path, **limits: int) -> AsyncIterator[tuple[HealthService, Callable[[], grpc.aio.Channel]]]:
    """A server with one principal, and channels to it."""
    access = folder / "access.yaml"
    access.write_text(f"principals: [{{name: probe, role: worker, token_sha256: {token_hash(TOKEN)}}}]")
    security = ServerSecurity(authenticator=AccessFile(access), limits=Limits(**limits))
    server = security.server()
    health = add_health_and_reflection(server, "a.Service")
    port = security.listen(server, "127.0.0.1:0")
    await server.start()
    channels = []

    def connect() -> grpc.aio.Channel:
        channels.append(grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
        return channels[-1]

    try:
        yield health, connect
    finally:
        for channel in channels:
            await channel.close()
        await server.stop(None)


def watch(channel: grpc.aio.Channel, *, token: str = "") -> Any:
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    return Stub(channel).Watch(pb.HealthCheckRequest(), metadata=metadata, timeout=60)


async def told(channel: grpc.aio.Channel, *, token: str = "") -> Any:
    """Start a watch and wait for its first answer."""
    call = watch(channel, token=token)
    assert (await call.read()).status == SERVING
    return call


async def why_it_ended(call: Any) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    return failure_of_call(caught.value, address="").reason


def test_check_list_and_watch_say_the_same(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with serving(tmp_path) as (health, connect):
            stub, watched = Stub(connect()), watch(connect())
            seen = [(await watched.read()).status]
            for serving_now in (False, True):
                health.set_serving("a.Service", serving=serving_now)
                state = SERVING if serving_now else NOT_SERVING
                listed = (await stub.List(pb.HealthListRequest())).statuses
                assert {name: one.status for name, one in listed.items()} == {"": state, "a.Service": state}
                for name in listed:
                    assert (await stub.Check(pb.HealthCheckRequest(service=name))).status == state
                seen.append((await watched.read()).status)
            health.end()
            health.set_serving("a.Service", serving=True)
            seen.append((await watched.read()).status)
            assert seen == [SERVING, NOT_SERVING, SERVING, NOT_SERVING]
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Check(pb.HealthCheckRequest(service="b.Service"))
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
            assert "Traceback" not in caplog.text  # before the server stops: gRPC may log that it cancels the watch

    with caplog.at_level(logging.INFO):
        asyncio.run(run())


async def test_watches_without_an_identity_keep_nobody_from_watching(tmp_path: Path) -> None:
    async with serving(tmp_path, unnamed_streams=UNNAMED) as (_, connect):
        known = await told(connect(), token=TOKEN)
        hoarded = [await told(connect()) for _ in range(UNNAMED)]
        newer = [await told(connect(), token="unknown" * n) for n in range(2)]
        assert [await why_it_ended(call) for call in hoarded[:2]] == ["LIMIT_EXCEEDED"] * 2
        assert not known.done()
        assert not hoarded[2].done()
        assert not newer[0].done()


async def test_there_is_an_end_to_watches_from_many_addresses(tmp_path: Path) -> None:
    async with serving(tmp_path, all_unnamed_streams=UNNAMED) as (_, connect):
        hoarded = [await told(connect()) for _ in range(UNNAMED + 1)]
        assert await why_it_ended(hoarded[0]) == "LIMIT_EXCEEDED"


async def test_a_health_check_does_not_wait_for_the_keys_of_an_issuer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patience = unhurried(1.0)
    monkeypatch.setattr(fetching, "FETCH_SECONDS", 3 * patience)
    issuer = OidcIssuer()
    async with serving(tmp_path) as (_, connect):
        with socket.create_server(("127.0.0.1", 0)) as silent:
            issuer.url = f"http://127.0.0.1:{silent.getsockname()[1]}"
            rules = [{"claims": {}, "role": "worker"}]
            entry = {"name": "id", "issuer": issuer.url, "audiences": [AUDIENCE], "rules": rules}
            (tmp_path / "access.yaml").write_text(json.dumps({"issuers": [entry]}))
            channel, metadata = connect(), (("authorization", f"Bearer {issuer.token()}"),)
            reflection = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
            waiting = asyncio.create_task(why_it_ended(reflection(iter([b""]), metadata=metadata)))
            checked = await Stub(channel).Check(pb.HealthCheckRequest(), metadata=metadata, timeout=patience)
            assert checked.status == SERVING
            assert not waiting.done()
        assert await waiting == "ISSUER_UNAVAILABLE"
