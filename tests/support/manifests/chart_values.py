"""Say what a value of the Helm chart changes, and find the parts of rendered objects that show it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import yaml

from support.manifests.chart import PRODUCTION, changed, render_chart
from support.manifests.overlay import Cluster, Object, Workload

Case = tuple[str, Object, Callable[[Cluster], bool]]
"""A name, which begins with the group of the values; the values, and what must hold of what is rendered with them."""

COORDINATOR, MERGE, CLEANUP, MIGRATE = (f"slipway-{name}" for name in ("coordinator", "merge", "cleanup", "migrate"))
TOKEN = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}


def assert_changes(values: Object, holds: Callable[[Cluster], bool]) -> None:
    """Check that something holds with the values, and not without."""
    assert not _holds_without(holds), "it holds without the value too"
    assert holds(Cluster(render_chart(changed(PRODUCTION, values))))


def _holds_without(holds: Callable[[Cluster], bool]) -> bool:
    try:
        return holds(Cluster(render_chart(PRODUCTION)))
    except (LookupError, StopIteration):  # what it asks for is not there
        return False


def workload(cluster: Cluster, name: str) -> Workload:
    return next(one for one in cluster.workloads() if one.name == name)


def every(cluster: Cluster) -> dict[str, Workload]:
    return {one.name: one for one in cluster.workloads()}


def spec(cluster: Cluster, kind: str, name: str) -> Any:
    return cluster.named(kind, name)["spec"]


def volume(one: Workload, name: str) -> Any:
    return next(volume for volume in one.pod["volumes"] if volume["name"] == name)


def variable(one: Workload, name: str) -> Any:
    return next(each for each in one.container["env"] if each["name"] == name)


def access_file(cluster: Cluster) -> Object:
    found: Object = yaml.safe_load(cluster.named("ConfigMap", "slipway-access")["data"]["access.yaml"])
    return found


def principals(cluster: Cluster) -> list[Object]:
    found: list[Object] = access_file(cluster)["principals"]
    return found
