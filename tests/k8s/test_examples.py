"""The examples of other orchestrators: their shell scripts run here, with the real command line behind ``slipway``."""

from __future__ import annotations

import ast
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

EXAMPLES = ROOT / "k8s" / "examples"
NAME = "projects/default/exports/e-0123"


def argo() -> Any:
    return yaml.safe_load((EXAMPLES / "argo" / "export.yaml").read_text())


def kubeflow() -> Any:
    return yaml.safe_load((EXAMPLES / "kubeflow" / "component.yaml").read_text())


def constant(name: str) -> Any:
    """A value that is written out in pipeline.py, whose libraries are not installed here."""
    tree = ast.parse((EXAMPLES / "kubeflow" / "pipeline.py").read_text())
    (value,) = (
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
    )
    return ast.literal_eval(value)


def template(name: str) -> Any:
    return next(one for one in argo()["spec"]["templates"] if one["name"] == name)


def run_script(script: str, arguments: list[str], folder: Path, **environment: str) -> list[list[str]]:
    """Run a script with a ``slipway`` that notes how it was called; what it was given, call by call.

    Stands in for a coordinator: what is under test is the script, and each call is read by the real command line below.
    """
    tool = folder / "slipway"
    answer = shlex.quote(json.dumps({"name": NAME}))
    tool.write_text(
        f'#!/bin/sh\nprintf "%s\\0" "$@" >> {folder}/calls\nprintf "\\1" >> {folder}/calls\necho {answer}\n'
    )
    tool.chmod(0o755)
    script = script.replace("/tmp/", f"{folder}/tmp/")
    (folder / "tmp").mkdir()
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    command = ["sh", "-ec", script, *arguments]
    subprocess.run(command, check=True, env={"PATH": path, **environment}, capture_output=True, timeout=240)
    calls = (folder / "calls").read_text().split("\1")[:-1]
    return [call.split("\0")[:-1] for call in calls]


def understood(call: list[str]) -> dict[str, Any]:
    """What the command line makes of a call; it raises for what it does not know."""
    import typer

    from slipway.cli.app import app

    command = typer.main.get_command(app)
    assert hasattr(command, "commands")
    return dict(command.commands[call[0]].make_context(call[0], list(call[1:])).params)


HOSTILE = "s3://training/run 17/$(touch hacked);'"


def test_argo_submits_and_hands_the_name_on(tmp_path: Path) -> None:
    container = template("submit")["container"]
    (script,) = container["args"]
    given = {"CHECKPOINT": HOSTILE, "BASE_MODEL": "hf://Qwen/Qwen3-0.6B", "QUANTIZATION": "int8", "REQUEST_ID": "uid-1"}
    assert set(given) < {variable["name"] for variable in container["env"]}
    (call,) = run_script(script, [], tmp_path, **given)
    read = understood(call)
    assert (read["checkpoint"], read["base_model"]) == (HOSTILE, "hf://Qwen/Qwen3-0.6B")
    assert read["assignments"] == ["optimization.quantization=int8"]
    assert (read["as_json"], read["request_id"]) == (True, "uid-1")
    assert {"name": "REQUEST_ID", "value": "{{workflow.uid}}"} in container["env"], "the same for every try of a step"
    path = template("submit")["outputs"]["parameters"][0]["valueFrom"]["path"]
    assert (tmp_path / path.lstrip("/")).read_text() == NAME


def test_argo_watches_what_was_submitted(tmp_path: Path) -> None:
    container = template("watch")["container"]
    (script,) = container["args"]
    (call,) = run_script(script, [], tmp_path, EXPORT=NAME)
    assert understood(call)["export"] == NAME
    assert {"name": "EXPORT", "value": "{{inputs.parameters.export}}"} in container["env"]


@pytest.mark.parametrize("name", ["submit", "watch"])
def test_argo_repeats_what_may_pass_and_nothing_else(name: str) -> None:
    strategy = template(name)["retryStrategy"]
    assert strategy["retryPolicy"] == "Always", "the expression alone decides"
    status, _, codes = strategy["expression"].partition(" || asInt(lastRetry.exitCode) in ")
    assert status == 'lastRetry.status == "Error"'
    ended = {128 + signal.SIGINT, 128 + signal.SIGKILL, 128 + signal.SIGTERM}
    assert set(json.loads(codes)) == ended | {Category.UNAVAILABLE.exit_code}


def test_kubeflow_submits_watches_and_hands_the_name_on(tmp_path: Path) -> None:
    component = kubeflow()
    container = component["implementation"]["container"]
    inputs = {one["name"]: one.get("default", HOSTILE) for one in component["inputs"]}
    output = tmp_path / "outputs" / "export"
    arguments = [inputs[one["inputValue"]] if "inputValue" in one else str(output) for one in container["args"]]
    *shell, script = container["command"]
    assert shell == ["sh", "-ec"]
    submit, watch = run_script(script, arguments, tmp_path)
    read = understood(submit)
    assert (read["checkpoint"], read["base_model"]) == (HOSTILE, HOSTILE)
    assert read["assignments"] == ["optimization.quantization=int8"]
    assert read["request_id"] == HOSTILE
    assert understood(watch)["export"] == NAME == output.read_text()


def test_the_pipeline_gives_the_component_its_inputs() -> None:
    tree = ast.parse((EXAMPLES / "kubeflow" / "pipeline.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    (call,) = (node for node in calls if ast.unparse(node.func) == "export_component")
    given = {keyword.arg for keyword in call.keywords}
    inputs = {one["name"]: "default" in one for one in kubeflow()["inputs"]}
    assert given <= set(inputs)
    assert {name for name, optional in inputs.items() if not optional} <= given


def environments() -> list[dict[str, str]]:
    argo_ones = [
        {variable["name"]: variable["value"] for variable in template(name)["container"]["env"]}
        for name in ("submit", "watch")
    ]
    return [*argo_ones, constant("ENVIRONMENT")]


@pytest.mark.parametrize("number", range(3))
def test_the_coordinator_is_reached_and_knows_the_certificate(number: int) -> None:
    environment = environments()[number]
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
    own = {"CHECKPOINT", "BASE_MODEL", "QUANTIZATION", "EXPORT", "REQUEST_ID"}
    assert set(environment) - own <= known_variables()


def test_pods_of_the_examples_are_restricted_and_let_through() -> None:
    spec = argo()["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["podMetadata"]["labels"] == {"slipway.dev/client": "true"}
    for name in ("submit", "watch"):
        container = template(name)["container"]
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert set(container["resources"]) == {"requests", "limits"}


def test_pods_that_only_name_sources_have_neither_room_nor_credentials_for_them() -> None:
    for name in ("submit", "watch"):
        container = template(name)["container"]
        assert "envFrom" not in container
        assert not [variable for variable in container["env"] if variable["name"].startswith("AWS_")]
        assert container["resources"]["limits"]["ephemeral-storage"] == "128Mi"
    assert [volume["emptyDir"] for volume in argo()["spec"]["volumes"] if "emptyDir" in volume] == [
        {"sizeLimit": "64Mi"}
    ]
    assert not [name for name in constant("ENVIRONMENT") if name.startswith("AWS_")]
    assert "s3" not in (EXAMPLES / "kubeflow" / "pipeline.py").read_text()


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
    images = [template(name)["container"]["image"] for name in ("submit", "watch")]
    for image in [*images, kubeflow()["implementation"]["container"]["image"]]:
        assert "s3" in built_images()[image]
