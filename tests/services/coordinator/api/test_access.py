"""Who may call what on a real server: roles, projects, tokens, certificates."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from slipway.client import Client
from slipway.errors import ModelExportError
from slipway.rpc.serving import add_health_and_reflection
from slipway.security.access.access_file import AccessFile, Everyone
from slipway.security.access.principals import new_token, token_hash
from slipway.security.access.rules import RULES
from slipway.security.interceptor import AccessInterceptor
from slipway.security.server import ServerSecurity
from slipway.settings.security import Security
from slipway_coordinator.server import SERVICES
from slipway_protos.v1 import export_pb2, export_pb2_grpc, stage_pb2, worker_pb2, worker_pb2_grpc
from support.coordinators.harness import CONFIGURATION, DIGEST, Harness, tiny_export, tiny_task
from support.servers.certificates import Authority

PEOPLE = {
    "viewer": ("viewer", ["red"]),
    "submitter": ("submitter", ["red"]),
    "operator": ("operator", ["red"]),
    "admin": ("operator", ["*"]),
    "neighbour": ("operator", ["blue"]),
    "worker": ("worker", []),
}


class Place:
    """A coordinator with an access file, and clients for everybody in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokens = {name: new_token() for name in PEOPLE}
        self.access = folder / "access.yaml"
        self.write_access()
        authority = self.authority = Authority(folder / "tls")
        tls = authority.files("server", "localhost", "127.0.0.1")
        security = ServerSecurity(tls=tls, authenticator=AccessFile(self.access), health_address="127.0.0.1:0")
        (folder / "home").mkdir()
        self.harness = Harness(folder / "home", with_worker=False, security=security)

    def write_access(self, **expires: dt.date) -> None:
        lines = ["principals:"]
        for name, (role, projects) in PEOPLE.items():
            lines += [f"  - name: {name}", f"    role: {role}", f"    token_sha256: {token_hash(self.tokens[name])}"]
            lines += [f"    projects: {[*projects]}"] if projects else []
            lines += [f"    expires: {expires[name]}"] if name in expires else []
        lines += ["  - {name: robots, role: worker, certificate: robots.slipway}"]
        self.access.write_text("\n".join(lines) + "\n")

    def security(self, name: str, *, certificate: str = "anybody.slipway") -> Security:
        base = self.authority.client(certificate)
        if not name:
            return base
        file = self.folder / f"{name}.token"
        file.write_text(self.tokens.get(name, name) + "\n")
        return base.with_files(token_file=file)

    def client(self, name: str, **kwargs: Any) -> Client:
        return Client(self.harness.address, security=self.security(name, **kwargs), project="red", timeout_seconds=120)

    def channel(self, name: str, **kwargs: Any) -> tuple[grpc.Channel, tuple[tuple[str, str], ...]]:
        client = self.client(name, **kwargs)
        return client._calls._channel.stub(lambda channel: channel), client._calls.metadata()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    place = Place(tmp_path_factory.mktemp("access"))
    with place.harness:
        place.harness.give(DIGEST, project="red")
        with place.client("submitter") as client:
            client.create_export(CONFIGURATION, sources={"base": DIGEST, "adapter": DIGEST}, export_id="ours")
        yield place


def create(client: Client, **kwargs: Any) -> Any:
    return client.create_export(CONFIGURATION, sources={"base": DIGEST, "adapter": DIGEST}, **kwargs)


CALLS: dict[str, Callable[[Client], Any]] = {
    "get": lambda client: client.get_export("ours"),
    "list": lambda client: list(client.list_exports()),
    "watch": lambda client: next(iter(client.watch_export("ours", patience_seconds=0))),
    "create": lambda client: create(client, validate_only=True),
    "cancel": lambda client: client.cancel_export("no-such-export"),
    "retry": lambda client: client.retry_export("no-such-export"),
    "delete": lambda client: client.delete_export("no-such-export"),
}
READ, WRITE = {"get", "list", "watch"}, {"create", "cancel", "retry"}
ALLOWED = {
    "viewer": READ,
    "submitter": READ | WRITE,
    "operator": READ | WRITE | {"delete"},
    "admin": READ | WRITE | {"delete"},
    "worker": set(),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", ALLOWED)
def test_each_role_may_call_what_it_is_for(place: Place, name: str, call: str) -> None:
    with place.client(name) as client:
        try:
            CALLS[call](client)
            reason = ""
        except ModelExportError as error:
            reason = error.reason
    let_in = "" if call in READ | {"create", "delete"} else "EXPORT_NOT_FOUND"  # what is deleted already is no error
    assert reason == (let_in if call in ALLOWED[name] else "PERMISSION_DENIED")


@pytest.mark.parametrize("call", ["get", "watch"])
def test_another_projects_export_looks_like_one_that_does_not_exist(place: Place, call: str) -> None:
    with place.client("neighbour") as client:
        answers = []
        for name in ("projects/red/exports/ours", "projects/red/exports/none"):
            with pytest.raises(ModelExportError) as caught:
                client.get_export(name) if call == "get" else next(client.watch_export(name, patience_seconds=0))
            answers.append((caught.value.reason, str(caught.value).replace(name, "")))
    with place.client("operator") as owner, pytest.raises(ModelExportError) as caught:
        owner.get_export("projects/red/exports/none")
    answers.append((caught.value.reason, str(caught.value).replace("projects/red/exports/none", "")))
    assert len(set(answers)) == 1
    assert answers[0][0] == "EXPORT_NOT_FOUND"


@pytest.mark.parametrize("project", ["red", "no-such-project"])
def test_another_projects_list_and_creation_are_refused_alike(place: Place, project: str) -> None:
    with place.client("neighbour") as client:
        for call in (lambda: list(client.list_exports(project=project)), lambda: create(client, project=project)):
            with pytest.raises(ModelExportError, match=f"has no access to the project '{project}'") as caught:
                call()
            assert caught.value.reason == "PERMISSION_DENIED"


@pytest.mark.parametrize(
    "parent",
    ["", "projects", "projects/", "red", "/projects/red", "projects/red/", "projects/red/../blue"],
)
def test_odd_names_of_projects_open_nothing(place: Place, parent: str) -> None:
    channel, metadata = place.channel("neighbour")
    stub = export_pb2_grpc.ExportServiceStub(channel)
    for call in (
        lambda: stub.ListExports(export_pb2.ListExportsRequest(parent=parent), metadata=metadata),
        lambda: stub.GetExport(export_pb2.GetExportRequest(name=f"{parent}/exports/ours"), metadata=metadata),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            call()
        assert caught.value.code() in {
            grpc.StatusCode.INVALID_ARGUMENT,
            grpc.StatusCode.PERMISSION_DENIED,
            grpc.StatusCode.NOT_FOUND,
        }


def test_all_projects_are_those_that_the_caller_may_see(place: Place) -> None:
    for name, seen in (("viewer", True), ("admin", True), ("neighbour", False)):
        channel, metadata = place.channel(name)
        stub = export_pb2_grpc.ExportServiceStub(channel)
        page = stub.ListExports(export_pb2.ListExportsRequest(parent="projects/-"), metadata=metadata)
        assert ("projects/red/exports/ours" in {export.name for export in page.exports}) is seen
        if not seen:
            assert not page.exports
            with pytest.raises(grpc.RpcError) as caught:
                stub.GetExport(export_pb2.GetExportRequest(name="projects/-/exports/ours"), metadata=metadata)
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    "token", ["", new_token(), "short-but-long-enough-for-one"], ids=["none", "unknown", "made up"]
)
def test_without_a_known_token_nothing_is_answered(place: Place, token: str) -> None:
    with place.client(token) as client, pytest.raises(ModelExportError) as caught:
        client.get_export("ours")
    assert caught.value.reason == "UNAUTHENTICATED"
    assert not token or token not in str(caught.value)


@pytest.mark.parametrize("headers", [["Basic eDp5"], ["Bearer"], ["Bearer a", "Bearer b"], [""]])
def test_malformed_authorization_is_refused(place: Place, headers: list[str]) -> None:
    channel, _ = place.channel("")
    stub = export_pb2_grpc.ExportServiceStub(channel)
    metadata = tuple(("authorization", value) for value in headers)
    with pytest.raises(grpc.RpcError) as caught:
        stub.GetExport(export_pb2.GetExportRequest(name="projects/red/exports/ours"), metadata=metadata)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_token_that_expired_or_was_taken_out_is_refused_without_a_restart(place: Place) -> None:
    with place.client("viewer") as client:
        client.get_export("ours")
        place.write_access(viewer=dt.datetime.now(dt.UTC).date() - dt.timedelta(days=1))
        with pytest.raises(ModelExportError, match="expired"):
            client.get_export("ours")
        place.access.write_text("principals: [{name: x, role: no-such-role}]\n")
        with pytest.raises(ModelExportError, match="expired"):
            client.get_export("ours")  # a broken file changes nothing
        place.write_access()
        client.get_export("ours")


def test_workers_are_let_in_by_certificate_or_token(place: Place) -> None:
    request = worker_pb2.SynchronizeRequest(worker_id="w", stages=["merge"])
    for name, certificate in (("worker", "anybody.slipway"), ("", "robots.slipway")):
        channel, metadata = place.channel(name, certificate=certificate)
        assert worker_pb2_grpc.WorkerServiceStub(channel).Synchronize(request, metadata=metadata).lease_ttl.seconds
    for name, code in (("admin", grpc.StatusCode.PERMISSION_DENIED), ("", grpc.StatusCode.UNAUTHENTICATED)):
        channel, metadata = place.channel(name)
        with pytest.raises(grpc.RpcError) as caught:
            worker_pb2_grpc.WorkerServiceStub(channel).Synchronize(request, metadata=metadata)
        assert caught.value.code() is code


def test_a_worker_cannot_touch_the_lease_of_another_identity(place: Place) -> None:
    """One shows a token, the other a certificate; both call themselves the same."""
    place.harness.submit(tiny_export("leased", tiny_task("t", stage="leased")))
    stubs = {}
    for name, certificate in (("worker", "anybody.slipway"), ("", "robots.slipway")):
        channel, metadata = place.channel(name, certificate=certificate)
        stubs[name] = worker_pb2_grpc.WorkerServiceStub(channel), metadata
    report = worker_pb2.SynchronizeRequest(worker_id="same", stages=["leased"], free_slots=1)
    stub, metadata = stubs["worker"]
    report.max_wait.FromSeconds(10)
    (lease,) = stub.Synchronize(report, metadata=metadata).leases
    running = [worker_pb2.RunningTask(task=lease.task, lease_epoch=lease.lease_epoch)]
    report = worker_pb2.SynchronizeRequest(worker_id="same", stages=["none"], running=running)
    done = worker_pb2.CompleteTaskRequest(worker_id="same", task=lease.task, lease_epoch=lease.lease_epoch)
    thief, shown = stubs[""]
    forged = worker_pb2.SynchronizeRequest()
    forged.CopyFrom(report)
    forged.running[0].logs.add(message="forged")
    assert thief.Synchronize(forged, metadata=shown).cancel_tasks == [lease.task]
    for brought in ("no digest", DIGEST):  # nor does what is no result end the attempt of another
        done.output.outputs["out"] = brought
        with pytest.raises(grpc.RpcError) as caught:
            thief.CompleteTask(done, metadata=shown)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert not stub.Synchronize(report, metadata=metadata).cancel_tasks
    with place.client("admin") as admin:
        events = admin.watch_export("projects/default/exports/leased")
        assert next(events).export.name
        done.logs.add(message="true")
        stub.CompleteTask(done, metadata=metadata)
        seen = list(events)
    assert [event.log.message for event in seen if event.HasField("log")] == ["true"]
    export = seen[-1].export
    assert export.state == export_pb2.EXPORT_STATE_SUCCEEDED
    assert [attempt.worker for attempt in export.tasks[0].attempts] == ["worker/same"]


@pytest.mark.parametrize("worker_id", ["", "robots/w", "w" * 100, "a b", "é"])
def test_odd_names_of_workers_are_refused(place: Place, worker_id: str) -> None:
    channel, metadata = place.channel("worker")
    request = worker_pb2.SynchronizeRequest(worker_id=worker_id, stages=["merge"])
    with pytest.raises(grpc.RpcError) as caught:
        worker_pb2_grpc.WorkerServiceStub(channel).Synchronize(request, metadata=metadata)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_health_needs_no_identity_and_reflection_does(place: Place) -> None:
    channel, _ = place.channel("")
    health = health_pb2_grpc.HealthStub(channel)
    answer = health.Check(health_pb2.HealthCheckRequest(service=SERVICES[0]))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    assert next(iter(health.Watch(health_pb2.HealthCheckRequest()))).status == answer.status
    assert services(place, "viewer") >= set(SERVICES)
    with pytest.raises(grpc.RpcError) as caught:
        services(place, "")
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def services(place: Place, name: str) -> set[str]:
    """Names of the services the server has, as it says itself."""
    channel, metadata = place.channel(name)
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="*")
    response = next(iter(stub.ServerReflectionInfo(iter([request]), metadata=metadata)))
    return {service.name for service in response.list_services_response.service}


def test_every_rpc_of_every_service_has_a_rule(place: Place) -> None:
    pool = descriptor_pool.Default()
    served = services(place, "admin") | {stage_pb2.DESCRIPTOR.services_by_name["StageService"].full_name}
    methods = {f"/{name}/{method.name}" for name in served for method in pool.FindServiceByName(name).methods}
    assert len(methods) > 12
    assert methods - set(RULES) == set()


def test_every_rpc_is_implemented(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    channel, metadata = place.channel("admin")
    pool, unimplemented = descriptor_pool.Default(), []
    for service in sorted(services(place, "admin")):
        for method in pool.FindServiceByName(service).methods:
            kinds = ("stream" if many else "unary" for many in (method.client_streaming, method.server_streaming))
            call = getattr(channel, "_".join(kinds))(f"/{service}/{method.name}")
            try:
                answer = call(iter([b""]) if method.client_streaming else b"", metadata=metadata, timeout=30)
                if method.server_streaming:
                    next(answer, None)
                    answer.cancel()
            except grpc.RpcError as error:
                if error.code() in {grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNKNOWN}:
                    unimplemented.append(method.name)
    assert unimplemented == []
    assert "Traceback" not in caplog.text


def test_an_rpc_without_a_rule_is_refused() -> None:
    async def call() -> grpc.StatusCode:
        rules = {method: rule for method, rule in RULES.items() if not method.endswith("/Check")}
        server = grpc.aio.server(interceptors=[AccessInterceptor(Everyone(), rules=rules)])
        add_health_and_reflection(server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        except grpc.aio.AioRpcError as error:
            return error.code()
        finally:
            await server.stop(None)
        return grpc.StatusCode.OK

    assert asyncio.run(call()) is grpc.StatusCode.PERMISSION_DENIED
