"""Two coordinators over one PostgreSQL as processes: the one that waits is ready, and leads to the one that is active."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
import sqlalchemy as sa
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pydantic import SecretStr

from slipway.client import Client
from slipway.configuration import ExportConfiguration
from slipway.errors import ModelExportError, ServiceError
from slipway.security.access.principals import new_token, token_hash
from slipway.settings.security import Security
from slipway_coordinator.leadership.locks import AdvisoryLock
from slipway_coordinator.server import migrate
from slipway_coordinator.storage.database import Database
from slipway_coordinator.storage.database_access import PostgresState, state_at
from support.commands.cli import SLIPWAY
from support.coordinators.harness import DIGEST, process, state, wait_for
from support.coordinators.http_places import call
from support.harness.unhurried import unhurried
from support.servers.certificates import Authority
from support.servers.free_ports import free_port
from support.servers.postgres_server import PostgresServer, postgres_server

ACCESS = """
principals:
  - {{name: people, role: operator, projects: ["*"], certificate: people.slipway}}
  - {{name: strangers, role: viewer, projects: [none], certificate: strangers.slipway}}
  - {{name: ci, role: submitter, projects: [default], token_sha256: {token}}}
"""
TOKEN = new_token()


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with postgres_server() as running:
        yield running


@dataclass
class Pair:
    """A database, certificates, and coordinators that come and go."""

    folder: Path
    place: str
    stack: ExitStack
    authority: Authority
    ports: dict[str, tuple[int, int]] = field(default_factory=dict)

    def start(self, name: str, *more: str) -> subprocess.Popen[bytes]:
        port, health = self.ports.setdefault(name, (free_port(), free_port()))
        tls = self.authority.files("server", "localhost", "127.0.0.1")
        (self.folder / "access.yaml").write_text(ACCESS.format(token=token_hash(TOKEN)))
        command = [SLIPWAY, "coordinator", "--listen", f"127.0.0.1:{port}", "--state", self.place]
        command += ["--health-listen", f"127.0.0.1:{health}", "--access-file", str(self.folder / "access.yaml")]
        command += ["--tls-ca-file", str(tls.ca), "--tls-cert-file", str(tls.certificate)]
        command += ["--tls-key-file", str(tls.key), *more]
        return self.stack.enter_context(process(command, self.folder / f"{name}.log"))

    def ready(self, name: str) -> bool:
        """What kubelet finds out with the readiness probe."""
        with grpc.insecure_channel(f"127.0.0.1:{self.ports[name][1]}") as channel:
            request = health_pb2.HealthCheckRequest(service="slipway.v1.ExportService")
            try:
                answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=30)
            except grpc.RpcError:
                return False
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def client(self, name: str, certificate: str = "people.slipway") -> Client:
        address = f"localhost:{self.ports[name][0]}"
        return self.stack.enter_context(Client(address, security=self.authority.client(certificate)))

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def said(self, name: str) -> list[str]:
        """Messages of its log."""
        return [json.loads(line)["message"] for line in self.log(name).splitlines() if line.startswith("{")]


@pytest.fixture
def pair(tmp_path: Path, server: PostgresServer) -> Iterator[Pair]:
    place = server.create(f"s{time.monotonic_ns()}")
    migrate(state_at(place))
    with ExitStack() as stack:
        yield Pair(tmp_path, place, stack, Authority(tmp_path / "tls"))


@pytest.mark.slow
def test_certificates_tokens_and_streams_go_through_a_standby_which_takes_over_in_its_place(pair: Pair) -> None:
    """Both have the ports for tokens and for HTTP, on two addresses of loopback."""
    tokens, http = free_port(), free_port()
    first = pair.start("a", "--token-listen", f"127.0.0.1:{tokens}", "--http", f"127.0.0.1:{http}")
    wait_for(lambda: pair.ready("a"))
    pair.start("b", "--token-listen", f"127.0.0.2:{tokens}", "--http", f"127.0.0.2:{http}")
    wait_for(lambda: pair.ready("b"))
    assert any("standing by" in text for text in pair.said("b"))
    for host in ("127.0.0.1", "127.0.0.2"):
        assert with_token(pair, f"{host}:{tokens}") == []
        assert over_http(pair, f"{host}:{http}") == []
    database = Database(state_at(pair.place).url)
    database.ownership.record_artifact("default", DIGEST)
    database.close()
    through = pair.client("b")
    sources = {"base": DIGEST, "adapter": DIGEST}
    name = through.create_export(ExportConfiguration(), sources=sources, export_id="x").name
    with pytest.raises(ModelExportError) as caught:
        list(pair.client("b", "strangers.slipway").list_exports())
    assert caught.value.reason == "PERMISSION_DENIED"
    events = through.watch_export(name)
    seen = next(events)
    assert state(seen.export) in {"queued", "running"}
    began = time.monotonic()
    first.kill()
    wait_for(lambda: "active" in pair.said("b"))
    print(f"active {time.monotonic() - began:.2f} s after the other was killed")
    wait_for(lambda: pair.ready("b"))
    wait_for(lambda: cancelled(through, name))
    assert [state(event.export) for event in events if event.WhichOneof("event") == "export"][-1] == "cancelled"
    assert with_token(pair, f"127.0.0.2:{tokens}") == [name]
    assert over_http(pair, f"127.0.0.2:{http}") == [name]
    again = pair.start("a")
    wait_for(lambda: pair.ready("a"))
    assert state(pair.client("a").get_export(name)) == "cancelled"
    again.terminate()
    assert again.wait(60) == 0
    assert "Traceback" not in pair.log("a")
    # One that finds tables of another version is not ready but ends, so that a rollout waits for the migration.
    engine = sa.create_engine(state_at(pair.place).url)
    with engine.begin() as connection:
        connection.execute(
            sa.text(
                "UPDATE slipway_schema SET version = version + 1 WHERE version = (SELECT MAX(version) FROM slipway_schema)"
            )
        )
    engine.dispose()
    assert pair.start("c").wait(120) == 3
    assert "STATE_SCHEMA" in pair.log("c")
    assert pair.ready("b")


def with_token(pair: Pair, address: str) -> list[str]:
    """Names of the exports that a client with a token sees there."""
    security = Security(tls_ca_file=pair.authority.ca, tls_server_name="localhost", token=SecretStr(TOKEN))
    with Client(address, security=security) as client:
        return [export.name for export in client.list_exports()]


def over_http(pair: Pair, address: str) -> list[str]:
    """Names of the exports that a client over HTTP sees there."""
    context = ssl.create_default_context(cafile=str(pair.authority.ca))
    context.check_hostname = False  # its certificate names the first address alone
    answer = call(address, "GET", "/v1/projects/default/exports", token=TOKEN, tls=context, host="localhost")
    assert answer.status == 200, answer.body
    return [export["name"] for export in answer.json.get("exports", [])]


def cancelled(client: Client, name: str) -> bool:
    """Cancel an export, if somebody answers."""
    try:
        return state(client.cancel_export(name)) == "cancelled"
    except ModelExportError as error:
        assert error.reason == "COORDINATOR_UNAVAILABLE", error
        return False


@pytest.mark.slow
def test_a_standby_is_ready_while_it_can_lead_to_somebody(pair: Pair) -> None:
    """The lock is held here, by somebody who announces one address after another."""
    state_of = state_at(pair.place)
    assert isinstance(state_of, PostgresState)
    lock = AdvisoryLock(state_of.address, on_lost=lambda error: None)
    assert lock.acquire()
    process = pair.start("b")
    wait_for(
        lambda: pair.ready("b")
    )  # the holder, of an older version, announces nothing: a rollout shall not wait for it
    refused(pair)
    lock.announce(f"127.0.0.1:{free_port()}")
    wait_for(lambda: not pair.ready("b"))
    refused(pair)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        lock.announce(f"127.0.0.1:{listener.getsockname()[1]}")
        wait_for(lambda: pair.ready("b"))
    lock.announce(f"127.0.0.1:{pair.ports['b'][0]}")
    wait_for(lambda: any("advertises this one's address" in text for text in pair.said("b")))
    refused(pair)
    files = len(list(Path(f"/proc/{process.pid}/fd").iterdir()))
    assert files < 100, "it passes connections on to itself"
    lock.release()
    wait_for(lambda: "active" in pair.said("b"))
    assert list(pair.client("b").list_exports()) == []
    process.terminate()
    assert process.wait(60) == 0


def refused(pair: Pair) -> None:
    """A call by the standby fails at once, as one to be tried again."""
    began = time.monotonic()
    with pytest.raises(ModelExportError) as caught:
        list(pair.client("b").list_exports())
    assert caught.value.reason == "COORDINATOR_UNAVAILABLE"
    assert time.monotonic() - began < unhurried(5)


def test_the_address_of_the_lock_lives_as_long_as_the_lock(pair: Pair) -> None:
    address = state_at(pair.place).address  # type: ignore[union-attr]
    holder, waiting = (AdvisoryLock(address, on_lost=lambda error: None) for _ in range(2))
    assert holder.acquire()
    assert not waiting.acquire()
    assert (waiting.leader, waiting.answers, waiting.near_database) == ("", True, "127.0.0.1")
    holder.announce("[2001:0db8:85a3:0000:0000:8a2e:0370:7334]:65535")
    assert not waiting.acquire()
    assert waiting.leader == "[2001:0db8:85a3:0000:0000:8a2e:0370:7334]:65535"
    with pytest.raises(ServiceError, match="at most 48 bytes"):
        holder.announce(f"{'h' * 44}:7070")
    holder.release()
    wait_for(waiting.acquire)
    assert waiting.leader == ""
    waiting.release()
