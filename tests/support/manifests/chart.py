"""Render the Helm chart with Helm itself, and bring its objects into the form that kustomize's have; tests/k8s/tools/tools.sh installs Helm."""

from __future__ import annotations

import copy
import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.manifests.checkers import TOOLS
from support.manifests.overlay import ROOT, Object

CHART = ROOT / "k8s" / "helm" / "slipway"
VERSION = str(yaml.safe_load((CHART / "Chart.yaml").read_text())["version"])
_PYTHON = TOOLS / "helm" / "bin" / "python"
_CALLS = ROOT / "tests" / "k8s" / "tools" / "helm_calls.py"

needs_helm = pytest.mark.skipif(not _PYTHON.exists(), reason="Helm is not installed: make test-k8s does")

NEEDED: Object = {
    "store": {
        "bucket": "slipway",
        "prefix": "artifacts",
        "endpoint": "http://minio.minio.svc:9000",
        "existingSecret": "slipway-s3",
    },
    "database": {"existingSecret": "slipway-state"},
}
"""Values without which the chart is refused, with the names and addresses that the overlays have."""

PRODUCTION: Object = {
    **NEEDED,
    "keda": {"enabled": True, "startAtZero": False},
    "telemetry": {"endpoint": "http://otel-collector.monitoring.svc:4317"},
}
"""Values for what the overlay production is, applied as rendered: nobody asks a cluster for numbers of replicas."""

RELEASE_LABELS = frozenset(
    {
        "helm.sh/chart",
        "app.kubernetes.io/name",
        "app.kubernetes.io/instance",
        "app.kubernetes.io/version",
        "app.kubernetes.io/managed-by",
        "app.kubernetes.io/part-of",
    }
)
"""Labels by which a release knows its objects, and one that kustomize sets on most of them only."""


@dataclass(frozen=True)
class Refusal:
    """What Helm says where it makes nothing, and the name of its error."""

    error: str
    kind: str


def changed(values: Mapping[str, Any], change: Mapping[str, Any]) -> Object:
    """Return values with others over them, at every depth, as Helm takes several files."""
    result = dict(values)
    for key, value in change.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = changed(result[key], value) if both else value
    return result


def call_helm(calls: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return Helm's answers to calls of ``helm_calls.py``, or a :class:`Refusal` in the place of one."""
    command = [str(_PYTHON), "-P", str(_CALLS)]
    done = subprocess.run(command, input=json.dumps(calls), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [Refusal(**answer) if "error" in answer else answer["value"] for answer in json.loads(done.stdout)]


def render_files(
    values: Mapping[str, Any], *, name: str = "slipway", namespace: str = "slipway", chart: Path = CHART
) -> dict[str, str] | Refusal:
    """Return the text of each template, or why there is none."""
    answer = _rendered(json.dumps(values, sort_keys=True), name, namespace, str(chart))
    return answer if isinstance(answer, Refusal) else dict(answer)


@cache
def _rendered(values: str, name: str, namespace: str, chart: str) -> Any:
    call = {"do": "render", "chart": chart, "values": json.loads(values), "name": name, "namespace": namespace}
    return call_helm([call])[0]


def render_chart(
    values: Mapping[str, Any], *, name: str = "slipway", namespace: str = "slipway", chart: Path = CHART
) -> list[Object]:
    """Return the objects of a release, those of its hooks too."""
    files = render_files(values, name=name, namespace=namespace, chart=chart)
    assert not isinstance(files, Refusal), files.error
    texts = [text for file, text in sorted(files.items()) if file.endswith(".yaml")]
    return [thing for text in texts for thing in yaml.load_all(text, Loader=_OnceLoader) if thing]


class _OnceLoader(yaml.CSafeLoader):
    """Refuse a key that stands twice, as Helm and Kubernetes do; YAML's own loader takes the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        twice = {key for key in keys if keys.count(key) > 1}
        assert not twice, f"{sorted(twice)} twice, {node.start_mark}"
        return super().construct_mapping(node, deep)


def as_kustomize(objects: Sequence[Object]) -> list[Object]:
    """Return copies with the names that kustomize's objects have, and without what makes a release one of several."""
    return [_plain(thing) for thing in objects]


def _plain(thing: Object) -> Object:
    plain: Object = _without_release(copy.deepcopy(thing))
    if plain["kind"] == "NetworkPolicy":
        plain["metadata"]["name"] = plain["metadata"]["name"].removeprefix("slipway-")
    return plain


def _without_release(value: Any) -> Any:
    match value:
        case dict():
            kept = {key: _without_release(inner) for key, inner in value.items() if not _is_of_the_release(key, inner)}
            return {key: inner for key, inner in kept.items() if key not in _EMPTIED or inner}
        case list():
            return [_without_release(inner) for inner in value]
        case str():
            # Objects of the cluster, and names in certificates, have the namespace and the release in them.
            return value.replace("slipway.slipway-", "slipway-").replace(".slipway.slipway", ".slipway")
        case _:
            return value


def _is_of_the_release(key: str, value: Any) -> bool:
    """Say whether a label or an annotation is a release's own; the name of another application, such as a database, is not."""
    if key == "app.kubernetes.io/name":
        return value == "slipway"
    return key in RELEASE_LABELS or key.startswith(("helm.sh/", "checksum/"))


_EMPTIED = ("labels", "annotations", "matchLabels", "metadata")
