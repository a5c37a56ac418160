"""A coordinator and a worker as processes, with principals of two projects, for clients that break the rules."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from slipway.artifacts import Manifest, ManifestFile
from slipway.artifacts.digests import digest_bytes
from slipway.client import Client
from slipway.rpc.messages import configuration_message
from slipway.security.access.principals import new_token, token_hash
from slipway.settings.security import Security
from slipway_protos.externalscaler import externalscaler_pb2
from slipway_protos.v1 import artifact_pb2, stage_pb2
from slipway_protos.v1 import export_pb2 as pb
from support.commands.cli import SLIPWAY
from support.coordinators.harness import CONFIGURATION, process
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


def create(**changes: Any) -> pb.CreateExportRequest:
    fields = {"parent": "projects/red", "configuration": configuration_message(CONFIGURATION), "sources": SOURCES}
    return pb.CreateExportRequest(**(fields | {"validate_only": True} | changes))
