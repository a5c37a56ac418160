"""The operator for ModelExport resources, run by kopf's own command at a stand-in for a cluster's API and a real coordinator."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import yaml

from support.commands.platforms import EXAMPLES, Platform, finish
from support.coordinators.harness import wait_for
from support.coordinators.pipeline_site import ONLY_PYTORCH, PROJECT, WAITS, PipelineSite
from support.servers.kubernetes_api import KubernetesApi, kubernetes_api
from support.servers.tcp_proxy import TcpProxy

pytestmark = pytest.mark.slow
FOLDER = EXAMPLES / "kopf"


@pytest.fixture(scope="module")
def cluster() -> Iterator[KubernetesApi]:
    with kubernetes_api(FOLDER / "crd.yaml") as api:
        yield api


@contextmanager
def operator_of(
    platform: Platform, cluster: KubernetesApi, site: PipelineSite, *, http: str = ""
) -> Iterator[subprocess.Popen[str]]:
    """Run the operator until the block ends."""
    config = platform.folder / "kubeconfig"
    clusters = [{"name": "here", "cluster": {"server": cluster.address}}]
    users, contexts = (
        [{"name": "me", "user": {"token": "any"}}],
        [{"name": "c", "context": {"cluster": "here", "user": "me"}}],
    )
    config.write_text(
        yaml.safe_dump({"clusters": clusters, "users": users, "contexts": contexts, "current-context": "c"})
    )
    variables = {
        "KUBECONFIG": str(config),
        "SLIPWAY_URL": f"http://{http or site.http}",
        "SLIPWAY_PROJECT": PROJECT,
        "SLIPWAY_TOKEN_FILE": str(site.token_file),
    }
    words = ("run", "--standalone", "--namespace=default", str(FOLDER / "export_operator.py"))
    running = platform.start("kopf", *words, **variables)
    try:
        yield running
    finally:
        running.send_signal(signal.SIGTERM)
        _, output = finish(running, timeout=60)
        print(output)
    assert "Traceback" not in output


@pytest.fixture
def operator(
    platforms: Callable[[str], Platform], cluster: KubernetesApi, site: PipelineSite
) -> Iterator[subprocess.Popen[str]]:
    with operator_of(platforms("kopf"), cluster, site) as running:
        yield running


def resource(site: PipelineSite, name: str, *, base: str = "", **formats: Any) -> dict[str, Any]:
    made = dict(yaml.safe_load((FOLDER / "model-export.yaml").read_text()))
    return {**made, "metadata": {"name": name}, "spec": {"configuration": site.configuration(base=base, **formats)}}


def waited(cluster: KubernetesApi, name: str, state: str) -> dict[str, Any]:
    def reached() -> dict[str, Any]:
        status = cluster.status(name)
        return status if status.get("state") == state else {}

    return dict(wait_for(reached, seconds=480))


def test_a_resource_becomes_an_export_and_has_its_outputs(
    operator: subprocess.Popen[str], cluster: KubernetesApi, site: PipelineSite
) -> None:
    cluster.apply(resource(site, "good", **ONLY_PYTORCH))
    status = waited(cluster, "good", "SUCCEEDED")
    export = site.call("GET", status["export"]).json
    assert status["outputs"]["pytorch"]["digest"] == export["outputs"]["pytorch"]
    assert status["outputs"]["pytorch"]["verdict"] == "passed"
    assert operator.poll() is None


def test_a_failing_export_has_its_reason_in_the_status(
    operator: subprocess.Popen[str], cluster: KubernetesApi, site: PipelineSite
) -> None:
    cluster.apply(resource(site, "bad", base=site.other_base, **ONLY_PYTORCH))
    status = waited(cluster, "bad", "FAILED")
    assert status["reason"] == "ADAPTER_BASE_MISMATCH"
    assert "outputs" not in status
    before = site.names()
    cluster.apply(resource(site, "refused", gguf={"quantization": {"levels": ["q4_k_n"]}}))
    status = waited(cluster, "refused", "FAILED")
    assert (status["reason"], "q4_k_n" in status["message"]) == ("CONFIGURATION_INVALID", True)
    assert site.names() == before


def test_a_deleted_resource_cancels_its_export(
    operator: subprocess.Popen[str], cluster: KubernetesApi, site: PipelineSite
) -> None:
    before = site.names()
    cluster.apply(resource(site, "deleted", **WAITS))
    export = site.wait_for_export("RUNNING", besides=before)
    wait_for(lambda: cluster.status("deleted").get("export") == export["name"])
    cluster.delete("deleted")
    assert site.wait_for_export("CANCELLED", besides=before)["name"] == export["name"]
    wait_for(lambda: "deleted" not in cluster.objects)


def test_a_coordinator_that_is_away_is_asked_again(
    platforms: Callable[[str], Platform], cluster: KubernetesApi, site: PipelineSite
) -> None:
    before, asked, there = site.names(), list[int](), list[tuple[str, int]]()
    host, _, port = site.http.rpartition(":")

    def target() -> tuple[str, int] | None:
        asked.append(1)
        return there[0] if there else None

    with TcpProxy(target) as proxy, operator_of(platforms("kopf"), cluster, site, http=proxy.address):
        cluster.apply(resource(site, "patient", **WAITS))
        wait_for(lambda: asked)
        assert cluster.status("patient").get("state") is None
        there.append((host, int(port)))
        export = site.wait_for_export("RUNNING", besides=before)
        wait_for(lambda: cluster.status("patient").get("export") == export["name"])
        cluster.delete("patient")
        wait_for(lambda: "patient" not in cluster.objects)
    site.wait_for_export("CANCELLED", besides=before)
