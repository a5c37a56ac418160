"""The command lines and variables of the production overlay with its port for HTTP, run here: all that is in them fits together.

Addresses and folders are this machine's; everything else is as rendered.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import ssl
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import trustme
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pydantic import SecretStr

from slipway.client import Client
from slipway.errors import ModelExportError
from slipway.registry import plays, stage_names
from slipway.security.access.principals import new_token, token_hash
from slipway.settings.security import Security
from slipway.stage import Role
from slipway_protos.externalscaler import externalscaler_pb2 as scaler_pb2
from slipway_protos.externalscaler import externalscaler_pb2_grpc
from slipway_protos.v1 import export_pb2, export_pb2_grpc
from support.commands.cli import SLIPWAY
from support.coordinators.harness import process, wait_for
from support.manifests.overlay import EXTERNAL_SECRETS, ROOT, Cluster, Workload, host_of, render
from support.servers.free_ports import free_port

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Here:
    """The cluster on this machine: a folder for every Secret, a port for every one of a pod's."""

    cluster: Cluster
    folder: Path
    authority: trustme.CA
    ports: Mapping[tuple[str, int], int]

    def certificate(self, name: str) -> trustme.LeafCert:
        """With the names of the Certificate."""
        return self.authority.issue_cert(*self.cluster.named("Certificate", f"slipway-{name}")["spec"]["dnsNames"])

    def command(self, one: Workload) -> list[str]:
        arguments = []
        for argument in one.container["args"]:
            flag, _, value = argument.partition("=")
            owner = "slipway-coordinator" if flag == "--coordinator" else one.name
            host, _, port = value.rpartition(":")
            moved = f"{flag}=127.0.0.1:{self.ports[owner, int(port)]}" if host else argument
            arguments.append(moved)
        return [SLIPWAY, *one.container["command"][1:], *arguments]

    def environment(self, one: Workload) -> dict[str, str]:
        """As rendered, with the mounted files where they are here."""
        home = self.folder / one.name
        home.mkdir()
        found = {name: value for name, value in one.environment.items() if not value.startswith("field:")}
        for volume in one.pod["volumes"]:
            (path,) = (mount["mountPath"] for mount in one.container["volumeMounts"] if mount["name"] == volume["name"])
            place = home / volume["name"]
            place.mkdir()
            name = volume.get("secret", {}).get("secretName", "")
            if name in EXTERNAL_SECRETS:
                for key in EXTERNAL_SECRETS[name]:
                    (place / key).write_text("")  # of services that are not here
            elif name:
                self.write(place, self.certificate(name.split("-")[1]))
            if "configMap" in volume:
                for name, text in self.cluster.named("ConfigMap", volume["configMap"]["name"])["data"].items():
                    (place / name).write_text(text)
            found = {
                name: f"{place}{value.removeprefix(path)}" if value.startswith(path + "/") else value
                for name, value in found.items()
            }
        found.pop("SLIPWAY_TRACING", None)  # no collector is here
        return found

    def write(self, place: Path, certificate: trustme.LeafCert) -> None:
        """As the Secret of a certificate is mounted."""
        self.authority.cert_pem.write_to_path(place / "ca.crt")
        certificate.private_key_pem.write_to_path(place / "tls.key")
        (place / "tls.crt").write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))

    def channel(self, name: str, server_name: str) -> grpc.Channel:
        """To the coordinator, with the certificate of that name; without one for an empty name."""
        key = chain = None
        if name:
            certificate = self.certificate(name)
            key, chain = certificate.private_key_pem.bytes(), certificate.cert_chain_pems[0].bytes()
        credentials = grpc.ssl_channel_credentials(self.authority.cert_pem.bytes(), key, chain)
        options = (("grpc.ssl_target_name_override", server_name),)
        return grpc.secure_channel(f"127.0.0.1:{self.ports['slipway-coordinator', 7070]}", credentials, options)

    def over_http(self, path: str, *, certificate: str = "", token: str = "") -> tuple[int, bytes]:
        """Make a request by a name of the Service for clients; return the status and the body."""
        context = ssl.create_default_context(cadata=self.authority.cert_pem.bytes().decode())
        if certificate:
            self.certificate(certificate).configure_cert(context)
        (port,) = (
            port["port"]
            for port in self.cluster.named("Service", "slipway-clients")["spec"]["ports"]
            if port["name"] == "http"
        )
        name = "slipway-clients.slipway.svc"
        connection = http.client.HTTPConnection(name, port)
        plain = socket.create_connection(("127.0.0.1", self.ports["slipway-coordinator", port]), timeout=120)
        with contextlib.closing(context.wrap_socket(plain, server_hostname=name)) as connection.sock:
            connection.request("GET", path, headers={"authorization": f"Bearer {token}"} if token else {})
            answer = connection.getresponse()
            return answer.status, answer.read()

    def ready(self, one: Workload) -> bool:
        """What kubelet finds out with the readiness probe."""
        probe = one.container["readinessProbe"]["grpc"]
        with grpc.insecure_channel(f"127.0.0.1:{self.ports[one.name, probe['port']]}") as channel:
            request = health_pb2.HealthCheckRequest(service=probe["service"])
            try:
                answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=30)
            except grpc.RpcError:
                return False
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def with_http(folder: Path) -> Cluster:
    """Render the production overlay with the component ``http``."""
    own = folder / "overlay"
    own.mkdir()
    (own / "slipway").symlink_to(ROOT)
    lines = [
        "namespace: slipway",
        "resources: [slipway/k8s/overlays/production]",
        "components: [slipway/k8s/components/http]",
    ]
    (own / "kustomization.yaml").write_text("\n".join(lines))
    return Cluster(render(own))


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Here]:
    folder = tmp_path_factory.mktemp("k8s")
    cluster = with_http(folder)
    coordinator, worker = (
        next(one for one in cluster.workloads() if one.name == name)
        for name in ("slipway-coordinator", "slipway-merge")
    )
    ports = {(one.name, port): free_port() for one in (coordinator, worker) for port in one.ports.values()}
    running = Here(cluster, folder, trustme.CA(), ports)
    own = {**running.environment(coordinator), "SLIPWAY_STATE": str(folder / "state.db")}
    theirs = running.environment(worker)
    del theirs["SLIPWAY_STORE"]  # a bucket
    theirs["SLIPWAY_TLS_SERVER_NAME"] = host_of(worker.arguments().coordinator)  # as the address there has it
    with (
        process(running.command(coordinator), folder / "coordinator.log", **own),
        process(running.command(worker), folder / "worker.log", **theirs),
    ):
        for one in (coordinator, worker):
            wait_for(lambda one=one: running.ready(one), seconds=60)
        yield running


def trigger_address(here: Here) -> str:
    return str(here.cluster.of("ScaledObject")[0]["spec"]["triggers"][0]["metadata"]["scalerAddress"])


def test_every_trigger_is_answered_with_kedas_certificate(here: Here) -> None:
    triggers = [trigger for one in here.cluster.of("ScaledObject") for trigger in one["spec"]["triggers"]]
    named = [stage for trigger in triggers for stage in trigger["metadata"]["stage"].split(",")]
    assert sorted(named) == sorted(name for name in stage_names() if not plays(name, Role.CONVERSION, Role.ANSWERING))
    with here.channel("keda", host_of(trigger_address(here))) as channel:
        stub = externalscaler_pb2_grpc.ExternalScalerStub(channel)
        for trigger in triggers:
            reference = scaler_pb2.ScaledObjectRef(name="n", scalerMetadata=trigger["metadata"])
            answers = stub.StreamIsActive(reference, timeout=120)
            assert next(answers).result is False
            answers.cancel()
            (spec,) = stub.GetMetricSpec(reference).metricSpecs
            request = scaler_pb2.GetMetricsRequest(scaledObjectRef=reference, metricName=spec.metricName)
            assert stub.GetMetrics(request).metricValues[0].metricValueFloat == 0


def test_the_worker_is_let_in(here: Here) -> None:
    """It reported to the coordinator, which says so at the port that Prometheus reads."""
    page = f"http://127.0.0.1:{here.ports['slipway-coordinator', 9464]}/metrics"

    def workers() -> bool:
        with urllib.request.urlopen(page, timeout=60) as answer:
            return 'slipway_workers{stage="merge"} 1.0' in answer.read().decode()

    wait_for(workers)


def test_certificates_open_what_they_are_for(here: Here) -> None:
    found = {}
    request = export_pb2.ListExportsRequest(parent="projects/default")
    for name in ("pipelines", "keda", ""):
        with here.channel(name, "slipway-coordinator.slipway.svc") as channel:
            try:
                export_pb2_grpc.ExportServiceStub(channel).ListExports(request, timeout=120)
                found[name] = grpc.StatusCode.OK
            except grpc.RpcError as error:
                found[name] = error.code()
    assert found == {
        "pipelines": grpc.StatusCode.OK,
        "keda": grpc.StatusCode.PERMISSION_DENIED,
        "": grpc.StatusCode.UNAVAILABLE,
    }


def let_in(here: Here, name: str) -> str:
    """Add an entry with a token to the mounted access file; return the token."""
    access, token = here.folder / "slipway-coordinator" / "access" / "access.yaml", new_token()
    entry = {"name": name, "role": "submitter", "projects": ["default"], "token_sha256": token_hash(token)}
    principals = [*yaml.safe_load(access.read_text())["principals"], entry]
    new = access.with_suffix(".new")
    new.write_text(yaml.safe_dump({"principals": principals}))
    new.replace(access)
    return token


def test_a_new_principal_with_a_token_is_let_in_at_the_port_for_tokens_without_a_restart(here: Here) -> None:
    """Its entry is added to the mounted file; it has no certificate, so the main port refuses it."""
    token = let_in(here, "ci")
    authority = here.folder / "slipway-coordinator" / "tls" / "ca.crt"
    found = []
    for port, name in ((7072, "slipway-clients.slipway.svc"), (7070, "slipway-coordinator.slipway.svc")):
        security = Security(tls_ca_file=authority, tls_server_name=name, token=SecretStr(token))
        address = f"127.0.0.1:{here.ports['slipway-coordinator', port]}"
        try:
            with Client(address, security=security) as client:
                found.append(len(list(client.list_exports())))
        except ModelExportError as error:
            found.append((error.reason, error.failure().exit_code))
    assert found == [0, ("TLS_INVALID", 3)]


def test_certificates_and_tokens_open_the_port_for_http(here: Here) -> None:
    """By the name that its Service has, and the console with them."""
    path = "/v1/projects/default/exports"
    found = {name: here.over_http(path, certificate=name)[0] for name in ("pipelines", "keda", "")}
    assert found == {"pipelines": 200, "keda": 403, "": 401}
    assert here.over_http(path, token=let_in(here, "people"))[0] == 200
    assert here.over_http(path, token=new_token())[0] == 401
    assert here.over_http("/healthz")[0] == 200
    status, page = here.over_http("/ui/", certificate="pipelines")
    assert (status, b"<title>" in page) == (200, True)


@pytest.mark.parametrize(("certificate", "code"), [("cleanup", 0), ("keda", 3)])
def test_the_cleanup_is_told_what_is_whose(here: Here, tmp_path: Path, certificate: str, code: int) -> None:
    """With its own certificate; one that sees a single project would have it take the others' artifacts, and gets no answer."""
    (one,) = (one for one in here.cluster.workloads() if one.kind == "CronJob")
    own = Here(here.cluster, tmp_path, here.authority, here.ports)
    environment = own.environment(one)
    del environment["SLIPWAY_STORE"]  # a bucket
    environment |= {"SLIPWAY_HOME": str(tmp_path), "SLIPWAY_TLS_SERVER_NAME": host_of(one.arguments().coordinator)}
    if certificate != "cleanup":
        own.write(Path(environment["SLIPWAY_TLS_CERT_FILE"]).parent, here.certificate(certificate))
    arguments = own.command(one)
    ended = subprocess.run(arguments, env={**os.environ, **environment}, capture_output=True, text=True, timeout=240)
    assert ended.returncode == code, ended.stderr
    said = json.loads(ended.stdout)
    assert said["artifacts"] == [] if code == 0 else said["reason"] == "PERMISSION_DENIED"


def test_the_port_for_probes_answers_nothing_else(here: Here) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{here.ports['slipway-coordinator', 7071]}") as channel:
        request = export_pb2.ListExportsRequest(parent="projects/default")
        with pytest.raises(grpc.RpcError) as caught:
            export_pb2_grpc.ExportServiceStub(channel).ListExports(request, timeout=120)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
