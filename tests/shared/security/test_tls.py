"""TLS both ways with real certificates: who is let in, and what happens when files are renewed."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from slipway.client import AsyncClient
from slipway.errors import Failure, ModelExportError
from slipway.rpc.serving import add_health_and_reflection
from slipway.security import renewing
from slipway.security.access.principals import new_token
from slipway.security.channels import AsyncChannel, BlockingChannel
from slipway.security.renewing import ReservedPort
from slipway.security.server import ServerSecurity, coordinator_security, worker_security
from slipway.security.tls import load
from slipway.settings.security import Security, TlsFiles
from support.servers.certificates import Authority, replace
from support.servers.handshakes import connect, tls_process
from support.servers.tcp_proxy import TcpProxy

SERVING = health_pb2.HealthCheckResponse.SERVING


@asynccontextmanager
async def serving(security: ServerSecurity) -> AsyncIterator[str]:
    """A server with health and reflection only."""
    server = security.server()
    health = add_health_and_reflection(server)
    port = security.listen(server, "127.0.0.1:0")
    await server.start()
    health.set_serving(serving=True)
    try:
        yield f"localhost:{port}"
    finally:
        await server.stop(None)


async def check(channel: grpc.aio.Channel) -> str:
    """OK, or the status of a health check."""
    try:
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


async def ask(address: str, security: Security) -> str:
    """The same over a new connection."""
    async with AsyncChannel(address, security) as channel:
        return await check(channel.current())


def test_both_ends_need_a_certificate_of_the_authority(tmp_path: Path) -> None:
    async def run() -> list[str]:
        ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
        async with serving(ServerSecurity(tls=ours.files("server", "localhost"))) as address:
            return [
                await ask(address, ours.client("client.slipway")),
                await ask(address, Security(tls_ca_file=ours.ca)),
                await ask(address, theirs.client("client.slipway").with_files(tls_ca_file=ours.ca)),
                await ask(address, ours.client("client.slipway").with_files(tls_ca_file=theirs.ca)),
                await ask(address, Security()),
            ]

    assert asyncio.run(run()) == ["OK"] + ["UNAVAILABLE"] * 4


def test_a_handshake_may_take_its_time(tmp_path: Path) -> None:
    """As over a long way, or with a machine that has much else to do."""

    async def run() -> str:
        authority = Authority(tmp_path)
        async with serving(ServerSecurity(tls=authority.files("server", "127.0.0.1"))) as address:
            target = ("127.0.0.1", int(address.rpartition(":")[2]))
            with TcpProxy(lambda: target) as slow:
                slow.hold()
                asyncio.get_running_loop().call_later(1.0, slow.resume)
                return await ask(slow.address, authority.client("client.slipway"))

    assert asyncio.run(run()) == "OK"


def test_the_servers_name_is_checked_and_can_be_given(tmp_path: Path) -> None:
    async def run() -> list[str]:
        authority = Authority(tmp_path)
        async with serving(ServerSecurity(tls=authority.files("server", "coordinator.slipway"))) as address:
            client = authority.client("client.slipway")
            named = client.model_copy(update={"tls_server_name": "coordinator.slipway"})
            return [await ask(address, client), await ask(address, named)]

    assert asyncio.run(run()) == ["UNAVAILABLE", "OK"]


async def test_renewed_files_hold_for_new_connections_and_calls_go_on(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "tls")
    async with serving(ServerSecurity(tls=authority.files("server", "localhost"))) as address:
        security = authority.client("client.slipway")
        async with AsyncChannel(address, security) as old:
            first = old.current()
            watch = health_pb2_grpc.HealthStub(first).Watch(health_pb2.HealthCheckRequest(), timeout=60)
            assert (await watch.read()).status == SERVING
            new = Authority(tmp_path / "new")  # another authority altogether
            made = new.files("server", "localhost"), new.files("client.slipway")
            replace(authority.folder / "server.key", made[0].key.read_bytes())  # type: ignore[union-attr]
            await asyncio.sleep(2 * renewing.LOOK_SECONDS)
            assert await ask(address, security) == "OK"  # a key that does not fit its certificate yet
            replace(authority.folder / "server.pem", made[0].certificate.read_bytes())  # type: ignore[union-attr]
            await until("UNAVAILABLE", address, security)  # the client's authority is still the old one
            replace(authority.ca, new.ca.read_bytes())
            replace(authority.folder / "client.slipway.key", made[1].key.read_bytes())  # type: ignore[union-attr]
            replace(authority.folder / "client.slipway.pem", made[1].certificate.read_bytes())  # type: ignore[union-attr]
            await until("OK", address, security)
            with pytest.raises(TimeoutError):  # the call of before waits for changes still
                await asyncio.wait_for(asyncio.shield(reading := asyncio.ensure_future(watch.read())), 0.1)
            reading.cancel()
            assert old.current() is not first
            assert await check(old.current()) == "OK"


async def until(status: str, address: str, security: Security) -> None:
    """Ask until the answer is so: the server looks for renewed files now and then."""
    async with asyncio.timeout(30):
        while await ask(address, security) != status:
            await asyncio.sleep(0.05)


async def test_a_renewed_server_stops_with_the_calls_of_before(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "tls")
    async with serving(ServerSecurity(tls=authority.files("server", "localhost"))) as address:
        security = authority.client("client.slipway")
        async with AsyncChannel(address, security) as channel:
            watch = health_pb2_grpc.HealthStub(channel.current()).Watch(health_pb2.HealthCheckRequest(), timeout=60)
            assert (await watch.read()).status == SERVING
            shown = await certificate_of(address, security)
            authority.files("server", "localhost")
            async with asyncio.timeout(30):
                while not await is_renewed(shown, address, security):
                    await asyncio.sleep(0.05)
            stopping = asyncio.create_task(watch.code())
    async with asyncio.timeout(10):
        await stopping


async def is_renewed(shown: bytes, address: str, security: Security) -> bool:
    """Return whether a server shows another certificate. The listener that leaves resets connections that it has not accepted yet."""
    try:
        return await certificate_of(address, security) != shown
    except ConnectionResetError:
        return False


async def certificate_of(address: str, security: Security) -> bytes:
    """Return the certificate a server shows."""
    context = ssl.create_default_context(cafile=str(security.tls_ca_file))
    context.load_cert_chain(str(security.tls_cert_file), str(security.tls_key_file))
    host, _, port = address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return bytes(shown)


def test_the_plain_port_answers_health_checks_and_nothing_else(tmp_path: Path) -> None:
    async def run() -> tuple[str, str]:
        authority = Authority(tmp_path)
        health = f"unix:{tmp_path / 'health'}"
        security = ServerSecurity(tls=authority.files("server", "localhost"), health_address=health)
        async with serving(security), grpc.aio.insecure_channel(health) as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            request = reflection_pb2.ServerReflectionRequest(list_services="*")
            try:
                async for _ in stub.ServerReflectionInfo(iter([request])):
                    return await check(channel), "OK"
            except grpc.aio.AioRpcError as error:
                return await check(channel), error.code().name
        raise AssertionError("no answer")

    assert asyncio.run(run()) == ("OK", "UNAUTHENTICATED")


def _encrypted_key(authority: Authority) -> TlsFiles:
    files = authority.files("a")
    assert files.key is not None
    replace(files.key, b"-----BEGIN ENCRYPTED PRIVATE KEY-----\nMIIB\n-----END ENCRYPTED PRIVATE KEY-----\n")
    return files


BROKEN: dict[str, Callable[[Authority], TlsFiles]] = {
    "certificate and its key belong together": lambda a: TlsFiles(certificate=a.files("a").certificate),
    "No such file": lambda a: TlsFiles(ca=a.folder / "none.pem"),
    "no certificate authority": lambda a: TlsFiles(ca=a.files("a").key),
    "do not belong together": lambda a: TlsFiles(certificate=a.files("a").certificate, key=a.files("b").key),
    "a.pem": _encrypted_key,
}


@pytest.mark.parametrize("message", BROKEN)
def test_files_that_cannot_be_used_are_named(tmp_path: Path, message: str) -> None:
    with pytest.raises(ModelExportError, match=message) as caught:
        load(BROKEN[message](Authority(tmp_path)))
    assert caught.value.reason == "TLS_INVALID"


@pytest.mark.parametrize("kind", [BlockingChannel, AsyncChannel])
def test_a_token_never_travels_over_a_network_in_the_clear(tmp_path: Path, kind: Any) -> None:
    file = tmp_path / "token"
    file.write_text(new_token())
    with pytest.raises(ModelExportError, match="without encryption") as caught:
        kind("coordinator.example:7070", Security(token_file=file))
    assert caught.value.reason == "TLS_INVALID"
    assert file.read_text() not in str(caught.value)


@pytest.mark.parametrize("kind", [BlockingChannel, AsyncChannel])
def test_what_is_no_address_is_refused_instead_of_tried_for_ever(kind: Any) -> None:
    for wrong in (
        "",
        "coordinator",
        "host:",
        ":7070",
        "host:port",
        "http://host:7070",
        "host:7070/path",
        "a b:1",
        "h:123456",
        "::1:7070",
    ):
        with pytest.raises(ModelExportError, match="write HOST:PORT") as caught:
            kind(wrong)
        assert caught.value.reason == "CONFIGURATION_INVALID"
    with pytest.raises(ModelExportError, match="write HOST:PORT") as caught:
        kind("somebody:a-password@host:7070")
    assert "a-password" not in repr(caught.value.failure())
    for right in (
        "coordinator:7070",
        "10.0.0.7:7070",
        "[::1]:7070",
        "dns:///coordinator.slipway.svc:7070",
        "unix:/run/s",
        "unix:s",
    ):
        kind(right)


def test_a_coordinator_for_everybody_on_a_network_has_to_be_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ModelExportError, match="--allow-anonymous") as caught:
        coordinator_security(Security(), address="0.0.0.0:7070")
    assert caught.value.reason == "ACCESS_OPEN"
    coordinator_security(Security(), address="0.0.0.0:7070", allow_anonymous=True)
    for private in ("127.0.0.1:7070", "[::1]:7070", "localhost:7070", f"unix:{tmp_path}/s"):
        coordinator_security(Security(), address=private)


def test_a_workers_own_server_answers_only_health_checks_on_a_network() -> None:
    async def run() -> tuple[str, str]:
        security = worker_security(Security(), address="0.0.0.0:0")
        async with serving(security) as address, grpc.aio.insecure_channel(address) as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="*")]))
            return await check(channel), (await call.code()).name

    assert asyncio.run(run()) == ("OK", "UNAUTHENTICATED")


@pytest.mark.parametrize(
    ("names", "trusted", "said"),
    [
        (("localhost",), "theirs", "CERTIFICATE_VERIFY_FAILED"),
        (("elsewhere",), "ours", "Hostname Verification Check failed"),
        ((), "ours", "WRONG_VERSION_NUMBER"),
        (("localhost",), "", "whether it requires TLS"),
    ],
    ids=["other-authority", "other-name", "server-without-tls", "client-without-tls"],
)
def test_why_there_is_no_tls_connection_is_said(
    tmp_path: Path, names: tuple[str, ...], trusted: str, said: str
) -> None:
    authorities = {name: Authority(tmp_path / name) for name in ("ours", "theirs")}
    files = authorities["ours"].files("server", *names) if names else None
    tls = files and TlsFiles(certificate=files.certificate, key=files.key)

    async def run() -> Failure:
        async with serving(ServerSecurity(tls=tls)) as address:
            client = Security(tls_ca_file=authorities[trusted].ca) if trusted else Security()
            with pytest.raises(ModelExportError) as raised:
                async with AsyncClient(address, security=client) as asking:
                    await asking.get_export("x")
            return raised.value.failure()

    failure = asyncio.run(run())
    assert said in f"{failure.message}; {failure.remedy}"
    assert failure.exit_code == (3 if trusted else 7)  # only what may pass by itself is worth another try


def test_broken_handshakes_and_renewals_end_no_server(tmp_path: Path) -> None:
    """The cluster's tests do it with more of them."""
    authority = Authority(tmp_path / "ours")
    with tls_process(authority) as (process, port):
        load = connect(port, authority, 400, renewals=2)
        assert process.poll() is None, f"it ended with {process.returncode}: {load}"
    assert load.complete + load.reset <= 200, load
    assert load.complete > 190, load


async def test_a_port_with_tls_is_this_servers_alone(tmp_path: Path) -> None:
    """Although its listeners share it for the moment of a renewal."""
    tls = Authority(tmp_path).files("server", "localhost")
    async with serving(ServerSecurity(tls=tls)) as address:
        port = int(address.rpartition(":")[2])
        with pytest.raises(ModelExportError, match="in use") as caught:
            ServerSecurity(tls=tls).server().add_tls_port(f"127.0.0.1:{port}", tls)
        assert caught.value.reason == "REQUEST_INVALID"
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", port))
    ReservedPort(f"127.0.0.1:{port}").close()


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "localhost"])
async def test_a_reserved_port_covers_what_grpc_binds(tmp_path: Path, host: str) -> None:
    tls = Authority(tmp_path).files("server", "localhost", "127.0.0.1")
    server = ServerSecurity(tls=tls).server()
    port = server.add_tls_port(f"{host}:0", tls)
    await server.start()
    for where in ("127.0.0.1", "[::1]"):
        with pytest.raises(ModelExportError, match="in use"):
            ReservedPort(f"{where}:{port}")
    await server.stop(None)
