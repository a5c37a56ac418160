"""The examples of other orchestrators: their shell scripts run here, with the real command line behind ``slipway``."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipway.reasons import Category
from slipway.registry import IMPORT
from slipway.sources.addresses import Allowed
from support.manifests.overlay import NAMESPACE, ROOT, Cluster, host_of, port_of, render, rendered
from support.manifests.pod_rules import built_images, known_variables

EXAMPLES = ROOT / "examples" / "pipelines"
NAME = "projects/default/exports/e-0123"
DIGEST = "sha256:" + 64 * "0"
HOSTILE = "s3://training/run 17/$(touch hacked);'"


def argo() -> Any:
    return yaml.safe_load((EXAMPLES / "argo" / "export.yaml").read_text())


def template() -> Any:
    (only,) = argo()["spec"]["templates"]
    return only


def kubeflow() -> Any:
    return next(yaml.safe_load_all((EXAMPLES / "kubeflow" / "export.yaml").read_text()))


def containers() -> dict[str, Any]:
    """The containers of the examples by platform."""
    executor = kubeflow()["deploymentSpec"]["executors"]["exec-slipway-export"]
    return {"argo": template()["container"], "kubeflow": executor["container"]}


def placeholders(folder: Path, *, state: str) -> dict[str, str]:
    """What each platform puts in place of its placeholders, and this test in place of ``/tmp``."""
    inputs = {
        "checkpoint": HOSTILE,
        "base_model": "hf://Qwen/Qwen3-0.6B",
        "formats": "onnx:int8",
        "request_id": "uid-1",
    }
    files = {name: str(folder / state / name / "file") for name in ("export", "digests")}
    return {
        **{f"{{{{$.inputs.parameters['{name}']}}}}": value for name, value in inputs.items()},
        **{f"{{{{inputs.parameters.{name.replace('_', '-')}}}}}": value for name, value in inputs.items()},
        **{f"{{{{$.outputs.parameters['{name}'].output_file}}}}": path for name, path in files.items()},
        "/tmp/export": files["export"],
        "/tmp/digests.json": files["digests"],
    }


def run_step(container: Any, folder: Path, *, state: str) -> list[list[str]]:
    """Run a step with a ``slipway`` that notes how it was called; what it was given, call by call.

    Stands in for a coordinator: what is under test is the script, and each call is read by the real command line below. The tests of the
    examples run the step at a real one.
    """
    tool = folder / "slipway"
    answer = shlex.quote(json.dumps({"name": NAME, "state": state, "outputs": {"onnx": DIGEST, "validation": DIGEST}}))
    tool.write_text(
        f'#!/bin/sh\nprintf "%s\\0" "$@" >> {folder}/calls\nprintf "\\1" >> {folder}/calls\necho {answer}\n'
    )
    tool.chmod(0o755)
    words = "\0".join(container["args"])
    for name, value in placeholders(folder, state=state).items():
        words = words.replace(name, value)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    command = [*container["command"], *words.split("\0")]
    subprocess.run(command, check=True, env={"PATH": path}, capture_output=True, timeout=240, cwd=folder)
    calls = (folder / "calls").read_text().split("\1")[:-1]
    (folder / "calls").unlink()
    return [call.split("\0")[:-1] for call in calls]


def understood(call: list[str]) -> dict[str, Any]:
    """What the command line makes of a call; it raises for what it does not know."""
    import typer

    from slipway.cli.app import app

    command = typer.main.get_command(app)
    assert hasattr(command, "commands")
    return dict(command.commands[call[0]].make_context(call[0], list(call[1:])).params)


@pytest.mark.parametrize("name", ["argo", "kubeflow"])
def test_a_step_submits_watches_and_hands_name_and_digests_on(name: str, tmp_path: Path) -> None:
    container = containers()[name]
    submit, watch, get = run_step(container, tmp_path, state="EXPORT_STATE_QUEUED")
    read = understood(submit)
    assert (read["checkpoint"], read["base_model"]) == (HOSTILE, "hf://Qwen/Qwen3-0.6B")
    assert (read["formats"], read["as_json"], read["request_id"]) == (["onnx:int8"], True, "uid-1")
    assert (watch[0], understood(watch)["export"], understood(get)["export"]) == ("watch", NAME, NAME)
    files = tmp_path / "EXPORT_STATE_QUEUED"
    assert (files / "export" / "file").read_text() == NAME
    assert json.loads((files / "digests" / "file").read_text()) == {"onnx": DIGEST}
    assert not (tmp_path / "hacked").exists()


@pytest.mark.parametrize("state", ["EXPORT_STATE_CANCELLING", "EXPORT_STATE_CANCELLED"])
def test_a_step_continues_what_its_end_cancelled(state: str, tmp_path: Path) -> None:
    calls = run_step(containers()["argo"], tmp_path, state=state)
    assert [call[0] for call in calls] == ["submit", "watch", "retry", "watch", "get"]
    assert understood(calls[2])["export"] == NAME


def test_both_steps_are_the_same_script() -> None:
    script = (EXAMPLES / "step.sh").read_text().partition("\n\n")[2]
    assert {container["command"][2] for container in containers().values()} == {script}
    assert all(container["command"][:2] == ["sh", "-ec"] for container in containers().values())


def test_every_try_of_a_step_has_the_same_request_id() -> None:
    values = {each["name"]: each["value"] for each in template()["inputs"]["parameters"]}
    assert values["request-id"] == "{{workflow.uid}}"
    task = kubeflow()["root"]["dag"]["tasks"]["slipway-export"]["inputs"]["parameters"]
    assert task["request_id"]["runtimeValue"]["constant"] == "{{$.pipeline_job_uuid}}"


def test_argo_repeats_what_may_pass_and_nothing_else() -> None:
    strategy = template()["retryStrategy"]
    assert strategy["retryPolicy"] == "Always", "the expression alone decides"
    status, _, codes = strategy["expression"].partition(" || asInt(lastRetry.exitCode) in ")
    assert status == 'lastRetry.status == "Error"'
    ended = {128 + signal.SIGKILL, 128 + signal.SIGTERM}
    assert set(json.loads(codes)) == ended | {Category.UNAVAILABLE.exit_code}
    assert Category.CANCELLED.exit_code not in json.loads(codes), "what somebody cancelled stays so"


@pytest.mark.parametrize("name", ["argo", "kubeflow"])
def test_the_coordinator_is_reached_and_knows_the_certificate(name: str) -> None:
    environment = {variable["name"]: variable["value"] for variable in containers()[name]["env"]}
    cluster = Cluster(rendered("production"))
    address = environment["SLIPWAY_COORDINATOR"]
    service = cluster.named("Service", "slipway-coordinator")
    assert host_of(address) == f"slipway-coordinator.{NAMESPACE}.svc"
    assert port_of(address) in {port["port"] for port in service["spec"]["ports"]}
    certificate = cluster.named("Certificate", "slipway-pipelines")["spec"]
    assert certificate["secretName"] == "slipway-pipelines-tls"
    assert {environment[f"SLIPWAY_TLS_{kind}_FILE"] for kind in ("CA", "CERT", "KEY")} == {
        "/tls/ca.crt",
        "/tls/tls.crt",
        "/tls/tls.key",
    }
    assert set(environment) <= known_variables()


def test_pods_of_the_examples_are_restricted_and_let_through() -> None:
    spec, container = argo()["spec"], template()["container"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["podMetadata"]["labels"] == {"slipway.dev/client": "true"}
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert set(container["resources"]) == {"requests", "limits"}
    _, platform = yaml.safe_load_all((EXAMPLES / "kubeflow" / "export.yaml").read_text())
    pod = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]["exec-slipway-export"]
    assert pod["podMetadata"]["labels"] == {"slipway.dev/client": "true"}
    assert pod["secretAsVolume"][0]["secretName"] == "slipway-pipelines-tls"


def test_pods_that_only_name_sources_have_neither_room_nor_credentials_for_them() -> None:
    for container in containers().values():
        assert "envFrom" not in container
        assert not [variable for variable in container["env"] if variable["name"].startswith("AWS_")]
    assert template()["container"]["resources"]["limits"]["ephemeral-storage"] == "128Mi"
    assert [volume["emptyDir"] for volume in argo()["spec"]["volumes"] if "emptyDir" in volume] == [
        {"sizeLimit": "64Mi"}
    ]


@pytest.fixture
def importing(tmp_path: Path) -> Cluster:
    """``production`` with the component that turns imports on, and the documented addresses."""
    (tmp_path / "slipway").symlink_to(ROOT)
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    (documented,) = re.findall(r"```yaml\n(components:\n  - slipway/k8s/components/import.*?)```", page, re.DOTALL)
    lines = ["namespace: slipway", "resources: [slipway/k8s/overlays/production]", documented]
    (tmp_path / "kustomization.yaml").write_text("\n".join(lines))
    return Cluster(render(tmp_path))


def test_the_component_gives_importing_workers_work_a_list_and_a_way(importing: Cluster) -> None:
    worker = importing.named("Deployment", "slipway-merge")["spec"]["template"]["spec"]["containers"][0]
    stages = worker["args"][0].removeprefix("--stage=")
    assert set(stages.split(",")) == {"combine", "merge", IMPORT}
    trigger = importing.named("ScaledObject", "slipway-merge")["spec"]["triggers"][0]
    assert trigger["metadata"]["stage"] == stages
    for name in ("slipway-merge", "slipway-coordinator"):
        (workload,) = (one for one in importing.workloads() if one.name == name)
        allowed = Allowed.parse(workload.settings["SLIPWAY_IMPORT_FROM"])
        allowed.check("s3://training/default/run-17", project="default")
        allowed.check("hf://Qwen/Qwen3-8B", project="default")
    (policy,) = (
        one for one in importing.objects if one["kind"] == "NetworkPolicy" and one["metadata"]["name"] == "hub"
    )
    (selected,) = policy["spec"]["podSelector"]["matchExpressions"]
    labels = importing.named("Deployment", "slipway-merge")["spec"]["template"]["metadata"]["labels"]
    assert selected["operator"] == "In"
    assert labels[selected["key"]] in selected["values"]


def test_the_images_can_read_and_write_s3() -> None:
    for container in containers().values():
        assert "s3" in built_images()[container["image"]]
