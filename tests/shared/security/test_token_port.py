"""Clients that have a token and no certificate, beside those with certificates: a port for each, over real handshakes."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
import yaml
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from slipway.client import AsyncClient, Client
from slipway.errors import Failure, ModelExportError
from slipway.rpc.serving import add_health_and_reflection
from slipway.security.access.principals import new_token, token_hash
from slipway.security.channels import AsyncChannel
from slipway.security.server import coordinator_security
from slipway.settings.security import Security
from support.servers.certificates import Authority
from support.servers.free_ports import free_ports


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[tuple[Authority, str, str, Security]]:
    """A server that asks for certificates at one port and for none at another: addresses of both, and a client with a token."""
    authority, token = Authority(folder / "tls"), new_token()
    access, held = folder / "access.yaml", folder / "token"
    held.write_text(token)
    ci = {"name": "ci", "role": "submitter", "projects": ["red"], "token_sha256": token_hash(token)}
    workers = {"name": "workers", "role": "worker", "certificate": "worker.slipway"}
    access.write_text(yaml.safe_dump({"principals": [ci, workers]}))
    files = authority.files("server", "localhost")
    own = Security(tls_ca_file=files.ca, tls_cert_file=files.certificate, tls_key_file=files.key, access_file=access)
    main, second = (f"127.0.0.1:{port}" for port in free_ports(2))
    security = coordinator_security(own, address=main, token_address=second)
    server = security.server()
    add_health_and_reflection(server)
    security.listen(server, main)
    await server.start()
    try:
        ports = [address.rpartition(":")[2] for address in (main, second)]
        yield (
            authority,
            f"localhost:{ports[0]}",
            f"localhost:{ports[1]}",
            Security(tls_ca_file=authority.ca, token_file=held),
        )
    finally:
        await server.stop(None)


async def identified(address: str, security: Security) -> str:
    """OK, or the status of a call that takes an identity."""
    async with AsyncChannel(address, security) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel.current())
        request = reflection_pb2.ServerReflectionRequest(list_services="*")
        try:
            async for _ in stub.ServerReflectionInfo(iter([request]), metadata=channel.identity.metadata(), timeout=60):
                return "OK"
        except grpc.aio.AioRpcError as error:
            return str(error.code().name)
    return "nothing"


def test_a_token_opens_its_port_and_a_certificate_the_other_one(tmp_path: Path) -> None:
    async def run() -> list[str]:
        async with serving(tmp_path) as (authority, main, second, ci):
            worker = authority.client("worker.slipway")
            return [
                await identified(second, ci),
                await identified(main, worker),
                await identified(second, Security(tls_ca_file=authority.ca)),
                await identified(second, worker),  # nobody asks for its certificate there
                await identified(main, ci),
            ]

    assert asyncio.run(run()) == ["OK", "OK", "UNAUTHENTICATED", "UNAUTHENTICATED", "UNAVAILABLE"]


@pytest.mark.parametrize("kind", ["none", "of-another-authority", "expired"])
def test_who_shows_no_certificate_where_one_is_demanded_need_not_try_again(tmp_path: Path, kind: str) -> None:
    other = Authority(tmp_path / "other")

    async def run() -> list[Failure]:
        failures = []
        async with serving(tmp_path) as (authority, main, _, ci):
            foreign = other.client("worker.slipway").with_files(tls_ca_file=authority.ca)
            expired = authority.client("worker.slipway", expires=dt.datetime.now(dt.UTC) - dt.timedelta(hours=1))
            security = {"none": ci, "expired": expired}.get(kind, foreign)
            with pytest.raises(ModelExportError) as raised:
                async with AsyncClient(main, security=security) as client:
                    await client.get_export("x")
            failures.append(raised.value.failure())
            with pytest.raises(ModelExportError) as raised, Client(main, security=security) as blocking:
                await asyncio.to_thread(blocking.get_export, "x")
            failures.append(raised.value.failure())
        return failures

    for failure in asyncio.run(run()):
        assert (failure.reason, failure.retryable, failure.exit_code) == ("TLS_INVALID", False, 3)
        assert "certificate" in failure.message
        assert "--token-listen" in failure.remedy


def test_a_server_that_is_away_is_worth_another_try(tmp_path: Path) -> None:
    """Also one that hangs up before TLS stands, as a proxy does whose servers are away."""

    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()
        await writer.wait_closed()

    async def run() -> list[Failure]:
        security, failures = Security(tls_ca_file=Authority(tmp_path / "tls").ca), []
        proxy = await asyncio.start_server(hang_up, "127.0.0.1", 0)
        (gone,) = free_ports(1)
        async with proxy:
            for port in (gone, proxy.sockets[0].getsockname()[1]):
                with pytest.raises(ModelExportError) as raised:
                    async with AsyncClient(f"localhost:{port}", security=security) as client:
                        await client.get_export("x")
                failures.append(raised.value.failure())
        return failures

    for failure in asyncio.run(run()):
        assert (failure.reason, failure.retryable, failure.exit_code) == ("COORDINATOR_UNAVAILABLE", True, 7)


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tokens-at-the-main-port"])
def test_a_second_port_is_refused_where_the_main_one_takes_tokens(tmp_path: Path, tls: bool) -> None:
    files = Authority(tmp_path).files("server")
    own = Security(tls_cert_file=files.certificate, tls_key_file=files.key) if tls else Security()
    with pytest.raises(ModelExportError, match="--token-listen") as caught:
        coordinator_security(own, address="127.0.0.1:7070", token_address="127.0.0.1:7072")
    assert caught.value.reason == "TLS_INVALID"
