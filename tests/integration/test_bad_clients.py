"""Clients that break the rules: each is refused with the status that says why, and the server goes on for the others."""

from __future__ import annotations

import base64
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipway.artifacts import Manifest, ManifestFile
from slipway.artifacts.digests import digest_bytes
from slipway.client import Client
from slipway.errors import ModelExportError
from slipway.rpc.wire import configuration_message
from slipway.security.access.tokens import new_token, token_hash
from slipway.settings.security import Security
from slipway_protos.externalscaler import externalscaler_pb2
from slipway_protos.v1 import artifact_pb2, configuration_pb2, stage_pb2, worker_pb2
from slipway_protos.v1 import export_pb2 as pb
from support.commands.cli import SLIPWAY
from support.coordinators.harness import CONFIGURATION, process, wait_for
from support.coordinators.random_messages import messages
from support.harness.unhurried import unhurried
from support.hostile.texts import DECEPTIVE
from support.servers.free_ports import free_port

ROLES = {"viewer": "[red]", "submitter": "[red]", "operator": '["*"]', "neighbour": "[blue]", "worker": ""}
CONTENT = b"of an artifact"
PUSHED = Manifest.of([ManifestFile("text.txt", len(CONTENT), digest_bytes(CONTENT), "text/plain")]).digest
SOURCES = {"base": PUSHED, "adapter": PUSHED}
SERVICE = "/slipway.v1.ExportService/"
EVERYWHERE = ("grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection")
SERVED = {
    "coordinator": (
        "slipway.v1.ExportService",
        "slipway.v1.ArtifactService",
        "slipway.v1.WorkerService",
        "externalscaler.ExternalScaler",
        *EVERYWHERE,
    ),
    "worker": ("slipway.v1.StageService", *EVERYWHERE),
}
Code = grpc.StatusCode
assert all(
    (pb, artifact_pb2, externalscaler_pb2, health_pb2, reflection_pb2, stage_pb2)
)  # their descriptors are looked up by name


class Servers:
    """A coordinator and a worker as processes, with an access file."""

    def __init__(self, home: Path, stack: ExitStack) -> None:
        self.home = home
        self.tokens = {name: new_token() for name in ROLES}
        lines = ["principals:"]
        for name, projects in ROLES.items():
            role = "operator" if name == "neighbour" else name
            lines += [f"  - name: {name}", f"    role: {role}", f"    token_sha256: {token_hash(self.tokens[name])}"]
            lines += [f"    projects: {projects}"] if projects else []
        (home / "access.yaml").write_text("\n".join(lines))
        (home / "worker.token").write_text(self.tokens["worker"])
        self.ports = {name: free_port() for name in SERVED}
        access = ["--access-file", str(home / "access.yaml")]
        address, listen = (f"127.0.0.1:{self.ports[name]}" for name in SERVED)
        coordinator = [
            SLIPWAY,
            "coordinator",
            "--listen",
            address,
            "--state",
            str(home / "state.db"),
        ]
        worker = [
            SLIPWAY,
            "worker",
            "--coordinator",
            address,
            "--stage",
            "support.stages.watched:STAGE",
        ]
        worker += ["--listen", listen, "--token-file", str(home / "worker.token"), "--drain-seconds", "0"]
        environment = {"SLIPWAY_HOME": str(home)}
        self.processes = {
            "coordinator": stack.enter_context(
                process([*coordinator, *access], home / "coordinator.log", **environment)
            ),
            "worker": stack.enter_context(process([*worker, *access], home / "worker.log", **environment)),
        }
        self.channels = {
            name: stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{port}")) for name, port in self.ports.items()
        }

    def call(
        self, method: str, data: bytes, *, token: str = "", server: str = "coordinator", seconds: float = 60
    ) -> Code:
        """Status of a call with a body of any bytes; a stream is read up to its first message."""
        metadata = (("authorization", f"Bearer {token}"),) if token else ()
        service, _, name = method.removeprefix("/").partition("/")
        described = descriptor_pool.Default().FindServiceByName(service).FindMethodByName(name)
        kind = "_".join(
            "stream" if many else "unary" for many in (described.client_streaming, described.server_streaming)
        )
        try:
            call = getattr(self.channels[server], kind)(method)
            answer: Any = call(iter([data]) if described.client_streaming else data, metadata=metadata, timeout=seconds)
            if described.server_streaming:
                next(answer, None)
                answer.cancel()
        except grpc.RpcError as error:
            return error.code()
        return Code.OK

    def as_(self, name: str, method: str, request: Any) -> Code:
        return self.call(SERVICE + method, request.SerializeToString(), token=self.tokens[name])

    def client(self, name: str) -> Client:
        path = self.home / f"{name}.token"
        path.write_text(self.tokens[name])
        return Client(f"127.0.0.1:{self.ports['coordinator']}", security=Security(token_file=path), project="red")

    def healthy(self) -> bool:
        return all(
            running.poll() is None and self.call("/grpc.health.v1.Health/Check", b"", server=name) is Code.OK
            for name, running in self.processes.items()
        )


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with ExitStack() as stack:
        servers = Servers(tmp_path_factory.mktemp("bad-clients"), stack)
        wait_for(servers.healthy)
        with servers.client("submitter") as client:
            (servers.home / "text.txt").write_bytes(CONTENT)
            assert client.push_artifact({"text.txt": servers.home / "text.txt"}) == PUSHED
            client.create_export(CONFIGURATION, sources=SOURCES, export_id="ours")
        yield servers
        assert servers.healthy()


def create(**changes: Any) -> pb.CreateExportRequest:
    fields = {"parent": "projects/red", "configuration": configuration_message(CONFIGURATION), "sources": SOURCES}
    return pb.CreateExportRequest(**(fields | {"validate_only": True} | changes))


def pb_configuration(**sections: Any) -> configuration_pb2.ExportConfiguration:
    return configuration_pb2.ExportConfiguration(**sections)


def test_a_message_of_100_megabytes_is_refused(servers: Servers) -> None:
    before = psutil.Process(servers.processes["coordinator"].pid).memory_info().rss
    request = create(labels={"x": "y" * 100_000_000})
    assert servers.as_("submitter", "CreateExport", request) is Code.RESOURCE_EXHAUSTED
    assert psutil.Process(servers.processes["coordinator"].pid).memory_info().rss - before < 100e6


@pytest.mark.parametrize(
    "request_",
    [
        create(labels={f"label-{n}": "x" for n in range(65)}),
        create(labels={"x" * 300: "x"}),
        create(labels={"x": "y" * 5000}),
        create(export_id="x" * 300),
        create(sources={f"source-{n}": PUSHED for n in range(65)}),
        create(labels={f"label-{n}": "x" * 4000 for n in range(300)}),
    ],
    ids=["labels", "label-name", "label-value", "id", "sources", "bytes"],
)
def test_requests_over_a_limit_are_refused(servers: Servers, request_: pb.CreateExportRequest) -> None:
    assert servers.as_("submitter", "CreateExport", create()) is Code.OK
    assert servers.as_("submitter", "CreateExport", request_) is Code.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("data", [b"\xff", b"\x0a\xff\xff\xff\xff\x0f", b"\x0a\x02\xc3\x28", b"\x12"])
def test_malformed_protobuf_is_an_invalid_argument_and_only_for_those_let_in(servers: Servers, data: bytes) -> None:
    for method in ("CreateExport", "GetExport", "WatchExport"):
        assert servers.call(SERVICE + method, data, token=servers.tokens["submitter"]) is Code.INVALID_ARGUMENT
        assert servers.call(SERVICE + method, data, token=new_token()) is Code.UNAUTHENTICATED


def test_forged_page_tokens_and_sizes(servers: Servers) -> None:
    for token in ("x", "LTE=", "OTk5OTk5OTk5OTk5OTk5OTk5OTk5OTk=", "e30=", "é"):
        request = pb.ListExportsRequest(parent="projects/red", page_token=token)
        assert servers.as_("viewer", "ListExports", request) is Code.INVALID_ARGUMENT
    assert servers.as_("viewer", "ListExports", pb.ListExportsRequest(parent="projects/red", page_size=-1)) is (
        Code.INVALID_ARGUMENT
    )
    most = pb.ListExportsRequest(parent="projects/red", page_size=2**31 - 1)
    assert servers.as_("viewer", "ListExports", most) is Code.OK


@pytest.mark.parametrize("last", ['"\\ud800"', '"\\u0000"', "7", "[" * 10_000, "null"])
def test_page_tokens_of_the_right_form_with_the_wrong_content(servers: Servers, last: str) -> None:
    token = base64.urlsafe_b64encode(f'[1.5, {last}, ""]'.encode()).decode()
    request = pb.ListExportsRequest(parent="projects/red", page_token=token[:256])
    assert servers.as_("viewer", "ListExports", request) is Code.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "text", [text for text in DECEPTIVE if text.isascii() or text.encode(errors="ignore").decode() == text]
)
def test_nobody_gives_an_export_a_name_that_others_terminals_obey(servers: Servers, text: str) -> None:
    for request in (
        create(labels={"model_name": text}),
        create(labels={text: "x"}),
        create(sources=SOURCES | {text: PUSHED}),
        create(source_formats={text: "gptq"}),
        create(source_formats={"base": text}),
        create(configuration=pb_configuration(checkpoint={"path": text})),
        create(configuration=pb_configuration(output={"naming_pattern": text})),
    ):
        assert servers.as_("submitter", "CreateExport", request) is Code.INVALID_ARGUMENT
    report = worker_pb2.SynchronizeRequest(worker_id="w", stages=[text])
    method = "/slipway.v1.WorkerService/Synchronize"
    assert servers.call(method, report.SerializeToString(), token=servers.tokens["worker"]) is Code.INVALID_ARGUMENT


@pytest.mark.parametrize("attempt", ["²", "9" * 5000, "-1", ""])
def test_a_workers_attempt_is_a_number(servers: Servers, attempt: str) -> None:
    done = worker_pb2.CompleteTaskRequest(
        worker_id="w", task=f"projects/red/exports/ours:merge:{attempt}", lease_epoch=1
    )
    done.cancelled.SetInParent()
    report = worker_pb2.SynchronizeRequest(
        worker_id="w", stages=["none"], running=[worker_pb2.RunningTask(task=done.task)]
    )
    for method, request in (("CompleteTask", done), ("Synchronize", report)):
        path = f"/slipway.v1.WorkerService/{method}"
        assert servers.call(path, request.SerializeToString(), token=servers.tokens["worker"]) is Code.INVALID_ARGUMENT


@pytest.mark.parametrize("pages", [500, pytest.param(10_000, marks=pytest.mark.cluster)])
def test_many_list_pages_in_a_row(servers: Servers, pages: int) -> None:
    with servers.client("submitter") as client:
        for number in range(49):
            client.create_export(CONFIGURATION, sources=SOURCES, export_id=f"page-{number}")
        names: list[str] = []
        while len(names) < pages:
            names.extend(export.name for export in client.list_exports(page_size=1))
    assert len(set(names)) >= 50
    assert all(names.count(name) == names.count(names[0]) for name in set(names))


@pytest.mark.slow
def test_one_client_cannot_take_all_streams(servers: Servers) -> None:
    with ExitStack() as stack:
        calls = []
        for _ in range(3):  # one connection has room for 512 streams, one principal for 256
            channel = grpc.insecure_channel(
                f"127.0.0.1:{servers.ports['coordinator']}", options=[("grpc.use_local_subchannel_pool", 1)]
            )
            watch = stack.enter_context(channel).unary_stream(SERVICE + "WatchExport")
            request = pb.WatchExportRequest(name="projects/red/exports/ours").SerializeToString()
            metadata = (("authorization", f"Bearer {servers.tokens['viewer']}"),)
            calls += [watch(request, metadata=metadata, timeout=240) for _ in range(100)]
        codes = [first_status(call) for call in calls]
        assert codes.count(Code.OK) == 256
        assert set(codes) == {Code.OK, Code.RESOURCE_EXHAUSTED}
        with servers.client("submitter") as other:
            assert next(other.watch_export("ours")).export.name.endswith("ours")
    with servers.client("viewer") as client:
        wait_for(lambda: watches(client))


def watches(client: Client) -> bool:
    try:
        return bool(next(client.watch_export("ours", patience_seconds=0)))
    except ModelExportError as error:
        assert error.reason == "LIMIT_EXCEEDED"
        return False


def first_status(call: Any) -> Code:
    try:
        next(call)
    except grpc.RpcError as error:
        return error.code()
    return Code.OK


def test_slow_readers_hold_nobody_up(servers: Servers) -> None:
    """Twenty streams that are never read, while 40 MB of log lines pass through the export they watch."""
    lines = [pb.LogLine(level="info", message="x" * 20_000) for _ in range(100)]
    running = worker_pb2.RunningTask(task="projects/red/exports/ours:merge:1", logs=lines)
    report = worker_pb2.SynchronizeRequest(worker_id="w", stages=["none"], running=[running])
    watch = servers.channels["coordinator"].unary_stream(SERVICE + "WatchExport")
    request = pb.WatchExportRequest(name="projects/red/exports/ours").SerializeToString()
    metadata = (("authorization", f"Bearer {servers.tokens['operator']}"),)
    before = psutil.Process(servers.processes["coordinator"].pid).memory_info().rss
    unread = [watch(request, metadata=metadata, timeout=240) for _ in range(20)]
    try:
        for _ in range(20):
            method = "/slipway.v1.WorkerService/Synchronize"
            assert servers.call(method, report.SerializeToString(), token=servers.tokens["worker"]) is Code.OK
        began = time.monotonic()
        with servers.client("viewer") as client:
            client.get_export("ours")
        assert time.monotonic() - began < unhurried(2)
        grown = psutil.Process(servers.processes["coordinator"].pid).memory_info().rss - before
        assert grown < 150e6, f"{grown / 1e6:.0f} MB more"
    finally:
        for call in unread:
            call.cancel()


def _methods() -> list[tuple[str, str, Any]]:
    pool = descriptor_pool.Default()
    return [
        (server, f"/{service}/{method.name}", method.input_type)
        for server, services in SERVED.items()
        for service in services
        for method in pool.FindServiceByName(service).methods
    ]


CALLS = st.sampled_from(_methods()).flatmap(
    lambda found: st.tuples(
        st.just(found[:2]),
        st.one_of(messages(found[2]).map(lambda message: message.SerializeToString()), st.binary(max_size=200)),
        st.sampled_from([*ROLES, "", "unknown"]),
    )
)
ANSWERS = {
    Code.OK,
    Code.INVALID_ARGUMENT,
    Code.NOT_FOUND,
    Code.ALREADY_EXISTS,
    Code.FAILED_PRECONDITION,
    Code.ABORTED,
    Code.PERMISSION_DENIED,
    Code.UNAUTHENTICATED,
    Code.RESOURCE_EXHAUSTED,
    Code.DEADLINE_EXCEEDED,  # of calls that wait for something to happen
}


@pytest.mark.parametrize("cases", [100, pytest.param(2000, marks=pytest.mark.cluster)])
def test_any_call_of_any_rpc_is_answered_in_order(servers: Servers, cases: int) -> None:
    seen: Counter[Code] = Counter()

    @settings(max_examples=cases, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(case=CALLS)
    def call(case: Any) -> None:
        (server, method), data, name = case
        token = servers.tokens.get(name, new_token() if name else "")
        seconds = 0.5 if name in ROLES else 60  # some wait for something to happen, which are not for unknown people
        code = servers.call(method, data, token=token, server=server, seconds=seconds)
        seen[code] += 1
        assert code in ANSWERS
        if "health" not in method:
            assert (code is Code.UNAUTHENTICATED) == (name in {"", "unknown"})

    call()
    print(dict(seen.most_common()))
    assert seen.total() >= cases * 0.9
    assert len(seen) >= 5
    assert servers.healthy()
