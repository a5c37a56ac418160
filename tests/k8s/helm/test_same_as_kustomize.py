"""The chart makes what the overlays make: object by object, for the same way of running, so that neither can drift from the other."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.manifests import pod_rules, store_rules, wiring_rules
from support.manifests.chart import (
    PRODUCTION,
    RELEASE_LABELS,
    as_kustomize,
    changed,
    needs_helm,
    render_chart,
)
from support.manifests.overlay import ROOT, Cluster, Object, Workload, data_of, render

pytestmark = needs_helm

COMPONENTS = ("postgresql", "s3", "mtls", "keda", "observability")
SM89 = {"gpu": {"resource": "nvidia.com/gpu", "count": 1, "architecture": "sm89"}}
ON_GPUS = {"tensorrt-build": SM89, "validate": SM89}
SLICES = {
    "worker": "tensorrt-build",
    "gpu": {"resource": "nvidia.com/mig-3g.40gb", "count": 1, "architecture": "sm90"},
}
IMPORTED = ["s3://training/{project}", "hf://Qwen"]

WAYS: dict[str, tuple[Object, Object]] = {
    "production": ({"resources": ["overlays/production"]}, PRODUCTION),
    "gpu": ({"resources": ["overlays/gpu"]}, changed(PRODUCTION, {"workers": ON_GPUS})),
    "gpu-pools": (
        {"resources": ["overlays/gpu-pools"]},
        changed(PRODUCTION, {"workers": ON_GPUS, "pools": {"tensorrt-build-sm90": SLICES}}),
    ),
    "without-keda": (
        {"resources": ["base"], "components": [name for name in COMPONENTS if name != "keda"]},
        changed(PRODUCTION, {"keda": {"enabled": False}}),
    ),
    "without-observability": (
        {"resources": ["base"], "components": [name for name in COMPONENTS if name != "observability"]},
        changed(PRODUCTION, {"telemetry": {"endpoint": ""}, "metrics": {"enabled": False}}),
    ),
    "aws": (
        {"resources": ["base"], "components": ["aws" if name == "s3" else name for name in COMPONENTS]},
        changed(PRODUCTION, {"store": {"endpoint": "", "existingSecret": "", "workloadIdentity": True}}),
    ),
    "spot": (
        {"resources": ["overlays/production"], "components": ["spot"]},
        changed(PRODUCTION, {"worker": {"spot": True}}),
    ),
    "jobs": (
        {"resources": ["overlays/jobs"]},
        changed(PRODUCTION, {"keda": {"enabled": False}, "engine": "kubernetes"}),
    ),
    "http": (
        {"resources": ["overlays/production"], "components": ["http"]},
        changed(PRODUCTION, {"http": {"enabled": True}}),
    ),
    "import": (
        {
            "resources": ["overlays/production"],
            "components": ["import"],
            "settings": {"slipway-import-settings": [f"SLIPWAY_IMPORT_FROM={' '.join(IMPORTED)}"]},
        },
        changed(PRODUCTION, {"import": {"from": IMPORTED}}),
    ),
    **{
        f"size-{size}": (
            {"resources": ["overlays/gpu-pools"], "components": [f"sizes/{size}"]},
            changed(PRODUCTION, {"size": size, "workers": ON_GPUS, "pools": {"tensorrt-build-sm90": SLICES}}),
        )
        for size in ("8b", "30b", "70b")
    },
}
"""A way of running: an overlay of one's own, and the values for the same."""

SLOW = ("gpu", "without-observability", "aws", "size-8b", "size-30b")


def overlay(folder: Path, way: Object) -> list[Object]:
    """Render an overlay of one's own."""
    (folder / "slipway").symlink_to(ROOT)
    text = {
        "namespace": "slipway",
        "resources": [f"slipway/k8s/{name}" for name in way["resources"]],
        "components": [f"slipway/k8s/components/{name}" for name in way.get("components", ())],
        "configMapGenerator": [
            {"name": name, "behavior": "merge", "literals": values} for name, values in way.get("settings", {}).items()
        ],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(text))
    return render(folder)


def compared(objects: list[Object]) -> dict[tuple[str, str], Any]:
    """Return what is compared of each object, by kind and name: settings as the variables that a process gets of them."""
    objects = [thing for thing in as_kustomize(objects) if not is_apart(thing)]
    workloads = {(one.kind, one.name): one for one in Cluster(objects).workloads()}
    found: dict[tuple[str, str], Any] = {}
    for thing in objects:
        key = (thing["kind"], thing["metadata"]["name"])
        assert key not in found
        if thing["kind"] == "ConfigMap":
            if "access.yaml" in data_of(thing):
                found[key] = yaml.safe_load(data_of(thing)["access.yaml"])
            continue  # the others are compared as variables
        found[key] = sorted_lists(process_of(workloads[key])) if key in workloads else sorted_lists(thing)
    return found


def process_of(one: Workload) -> Object:
    """Return a workload with its variables in one mapping, wherever they come from."""
    thing = one.object
    container = one.container
    spec = {key: value for key, value in container.items() if key not in {"env", "envFrom"}}
    pod = {**one.pod, "containers": [{**spec, "environment": one.environment}]}
    template = {**one.template, "spec": pod}
    if one.kind == "CronJob":
        jobs = thing["spec"]["jobTemplate"]
        jobs = {**jobs, "spec": {**jobs["spec"], "template": template}}
        return {**thing, "spec": {**thing["spec"], "jobTemplate": jobs}}
    return {**thing, "spec": {**thing["spec"], "template": template}}


def sorted_lists(value: Any) -> Any:
    """Sort every list: the order of arguments, ports, volumes and peers means nothing to Kubernetes or to our programs."""
    if isinstance(value, dict):
        return {key: sorted_lists(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return sorted((sorted_lists(inner) for inner in value), key=lambda inner: json.dumps(inner, sort_keys=True))
    return value


def is_apart(thing: Object) -> bool:
    """Say what only one of the two ways has, and why.

    The namespace is made by whoever installs the chart. The migration runs before the release's own policies are there, so it has one.
    """
    return thing["kind"] == "Namespace" or (thing["kind"], thing["metadata"]["name"]) == ("NetworkPolicy", "migrate")


def without_differences(objects: dict[tuple[str, str], Any]) -> dict[tuple[str, str], Any]:
    """Leave out what differs on purpose.

    The migration has no priority in the chart, where it runs before the classes are made. Without KEDA, kustomize runs one worker of
    each stage, the chart those that most exports need; and the chart has no certificate and no principal for KEDA. The chart always has an
    access file, with which names over HTTP do not count; the component is for coordinators without one, too. Only a release says its name
    to the engine, because a namespace may have several.
    """
    container = objects["Deployment", "slipway-coordinator"]["spec"]["template"]["spec"]["containers"][0]
    container["args"] = [word for word in container["args"] if not word.startswith("--http-name=")]
    container["environment"].pop("SLIPWAY_KUBERNETES_INSTANCE", None)
    objects["Job", "slipway-migrate"]["spec"]["template"]["spec"].pop("priorityClassName", None)
    for (kind, name), thing in objects.items():
        if kind == "Deployment" and name != "slipway-coordinator":
            thing["spec"].pop("replicas", None)
    if not any(kind == "ScaledObject" for kind, _ in objects):
        objects.pop(("Certificate", "slipway-keda"), None)
        access = objects["ConfigMap", "slipway-access"]
        access["principals"] = [one for one in access["principals"] if one["name"] != "keda"]
    return objects


@pytest.mark.parametrize("way", [pytest.param(way, marks=[pytest.mark.slow] * (way in SLOW)) for way in WAYS])
def test_the_chart_makes_what_the_overlay_makes(way: str, tmp_path: Path) -> None:
    kustomization, values = WAYS[way]
    theirs = without_differences(compared(overlay(tmp_path, kustomization)))
    ours = without_differences(compared(render_chart(values)))
    assert sorted(set(theirs) ^ set(ours)) == []
    assert len(ours) > 55
    for key, thing in theirs.items():
        assert ours[key] == thing, key


def rules(cluster: Cluster) -> dict[str, list[str]]:
    every = (*pod_rules.RULES, *store_rules.RULES, *wiring_rules.RULES)
    return {rule.__name__: said for rule in every if (said := list(rule(cluster)))}


def namespace() -> Object:
    """The namespace as docs/kubernetes.md has it made, with the label that the chart's notes tell to set."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    return {"kind": "Namespace", "metadata": {"name": "slipway", "labels": labels}}


@pytest.mark.parametrize("way", [pytest.param(way, marks=[pytest.mark.slow] * (way in SLOW)) for way in WAYS])
def test_the_chart_keeps_the_rules_of_the_overlays(way: str) -> None:
    cluster = Cluster([namespace(), *as_kustomize(render_chart(WAYS[way][1]))])
    assert rules(cluster) == {}


def labels_in(value: Any) -> Iterable[Object]:
    if isinstance(value, dict):
        yield from (inner for key, inner in value.items() if key in {"labels", "matchLabels", "selector"})
        for inner in value.values():
            yield from labels_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from labels_in(inner)


def test_what_is_left_out_of_the_comparison_is_there() -> None:
    """The labels of a release, which kustomize does not have, are on every object, pod and selector of our own pods."""
    for thing in render_chart(PRODUCTION):
        assert set(thing["metadata"]["labels"]) >= RELEASE_LABELS, thing["metadata"]["name"]
        for labels in labels_in(thing.get("spec", {})):
            pods = labels.get("matchLabels", labels)
            if "app.kubernetes.io/component" in pods or "slipway.dev/stage" in pods:
                assert pods["app.kubernetes.io/instance"] == "slipway", thing["metadata"]["name"]
