"""Values of the chart for what runs: images, settings, coordinators, workers, pools, scaling, cleanup, migration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.manifests.chart import PRODUCTION, VERSION, changed, needs_helm, render_chart
from support.manifests.chart_values import (
    CLEANUP,
    COORDINATOR,
    MERGE,
    MIGRATE,
    TOKEN,
    Case,
    access_file,
    assert_changes,
    every,
    principals,
    spec,
    variable,
    volume,
    workload,
)
from support.manifests.overlay import Cluster, Object, Workload

pytestmark = needs_helm

DIGEST = "sha256:" + "ab" * 32
PLACED = {
    "nodeSelector": {"disks": "fast"},
    "tolerations": [{"key": "batch", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "podLabels": {"team": "models"},
    "podAnnotations": {"example.org/cost": "models"},
}


LIMITS: dict[str, Any] = {
    "*": {},
    "red": {"stored_bytes": 20_000_000_000_000, "gpu_seconds": 36_000_000},
    "blue": {"weight": 3, "stored_bytes": "500GB"},
}


def claim(one: Workload) -> Any:
    return volume(one, "scratch")["ephemeral"]["volumeClaimTemplate"]["spec"]


def is_placed(one: Workload) -> bool:
    pod = all(one.pod[key] == PLACED[key] for key in ("nodeSelector", "tolerations", "affinity"))
    labels = one.template["metadata"]
    return pod and "team" in labels["labels"] and "example.org/cost" in labels["annotations"]


def placed(cluster: Cluster) -> set[str]:
    return {name for name, one in every(cluster).items() if "nodeSelector" in one.pod and is_placed(one)}


def annotations(one: Workload) -> dict[str, str]:
    return dict(one.template["metadata"].get("annotations", {}))


def gpu_of(cluster: Cluster, name: str) -> tuple[Any, ...]:
    one = workload(cluster, name)
    resources = one.container["resources"]
    assert resources["requests"]["example.org/card"] == resources["limits"]["example.org/card"]
    (trigger,) = spec(cluster, "ScaledObject", name)["triggers"]
    pod = one.pod
    count = resources["limits"]["example.org/card"]
    architecture = trigger["metadata"]["gpuArchitecture"]
    return count, pod["nodeSelector"], pod["tolerations"], pod["runtimeClassName"], architecture


CASES: list[Case] = [
    (
        "image.registry",
        {"image": {"registry": "registry.example.org:5000/models", "repository": "own", "tag": "1.2"}},
        lambda c: workload(c, MERGE).container["image"] == "registry.example.org:5000/models/own-merge:1.2",
    ),
    (
        "image.digests",
        {"image": {"digests": {"merge": DIGEST}}},
        lambda c: [n for n, one in every(c).items() if one.container["image"].endswith(f":{VERSION}@{DIGEST}")] == [MERGE],
    ),
    (
        "image.digests-of-gpus",
        {
            "image": {"digests": {"validate-cuda": DIGEST}},
            "workers": {"validate": {"gpu": {"resource": "nvidia.com/gpu", "count": 1, "architecture": "sm89"}}},
        },
        lambda c: workload(c, "slipway-validate").container["image"] == f"slipway-validate:{VERSION}-cuda@{DIGEST}",
    ),
    (
        "image.pullSecrets",
        {"image": {"pullSecrets": ["registry"], "pullPolicy": "Always"}},
        lambda c: (
            all(account["imagePullSecrets"] == [{"name": "registry"}] for account in c.of("ServiceAccount"))
            and {one.container["imagePullPolicy"] for one in c.workloads()} == {"Always"}
        ),
    ),
    (
        "settings",
        {"settings": {"SLIPWAY_UPLOAD_SIZE": "1TiB"}},
        lambda c: (
            {n for n, one in every(c).items() if one.environment.get("SLIPWAY_UPLOAD_SIZE") == "1TiB"}
            == set(every(c)) - {MIGRATE}
        ),
    ),
    (
        "coordinator",
        {"coordinator": {"replicas": 1, "retainDays": 7, "env": [TOKEN], **PLACED}},
        lambda c: (
            spec(c, "Deployment", COORDINATOR)["replicas"] == 1
            and COORDINATOR not in c.names("PodDisruptionBudget")
            and "--retain-days=7" in workload(c, COORDINATOR).container["args"]
            and variable(workload(c, COORDINATOR), "HF_TOKEN") == TOKEN
            and placed(c) == {COORDINATOR}
        ),
    ),
    (
        "coordinator.settings",
        {"coordinator": {"settings": {"SLIPWAY_LOG_LEVEL": "debug"}}, "worker": {"settings": {"CC": "gcc"}}},
        lambda c: (
            workload(c, COORDINATOR).environment["SLIPWAY_LOG_LEVEL"] == "debug"
            and workload(c, MERGE).environment["SLIPWAY_LOG_LEVEL"] == "info"
            and workload(c, MERGE).environment["CC"] == "gcc"
        ),
    ),
    (
        "worker",
        {"worker": {"drainSeconds": 7200, "env": [TOKEN], "volume": {"storageClass": "local"}, **PLACED}},
        lambda c: (
            placed(c) == {one.name for one in c.workers()}
            and {one.arguments().drain_seconds for one in c.workers()} == {7200}
            and {one.pod["terminationGracePeriodSeconds"] for one in c.workers()} == {7320}
            and {one.object["spec"]["progressDeadlineSeconds"] for one in c.workers()} == {8100}
            and {claim(one)["storageClassName"] for one in c.workers()} == {"local"}
            and all(variable(one, "HF_TOKEN") == TOKEN for one in c.workers())
        ),
    ),
    (
        "worker.scale",
        {"worker": {"scale": {"max": 9}}, "workers": {"merge": {"scale": {"min": 1}}}},
        lambda c: (
            {one["spec"]["maxReplicaCount"] for one in c.of("ScaledObject")} == {9}
            and [one["metadata"]["name"] for one in c.of("ScaledObject") if one["spec"]["minReplicaCount"]] == [MERGE]
        ),
    ),
    (
        "workers.replicas",
        {"keda": {"enabled": False}, "workers": {"merge": {"replicas": 0}, "gguf": {"replicas": 3}}},
        lambda c: {
            one.name.removeprefix("slipway-"): one.object["spec"]["replicas"]
            for one in c.workers()
            if one.object["spec"]["replicas"] or one.name == MERGE
        }
        == {"merge": 0, "gguf": 3, "quantize": 1, "onnx-export": 1, "validate": 1},
    ),
    (
        "workers.resources",
        {"workers": {"merge": {"resources": {"requests": {"cpu": 1}, "limits": {"memory": "12Gi"}}, "spot": True}}},
        lambda c: (
            workload(c, MERGE).container["resources"]
            == {
                "requests": {"cpu": 1, "memory": "4Gi", "ephemeral-storage": "1Gi"},
                "limits": {"cpu": "8", "memory": "12Gi", "ephemeral-storage": "2Gi"},
            }
            and [one.name for one in c.workers() if one.arguments().drain_seconds == 5] == [MERGE]
        ),
    ),
    (
        "workers.volume",
        {
            "workers": {
                "merge": {"volume": {"size": "1Ti"}},
                "gguf": {"volume": {"size": "65Gi"}},
                "adapter": {"volume": {"size": "3000Mi"}},
            }
        },
        lambda c: {
            (claim(one)["resources"]["requests"]["storage"], one.environment["SLIPWAY_CACHE_SIZE"])
            for one in c.workers()
            if one.name in {MERGE, "slipway-gguf", "slipway-adapter"}
        }
        == {("1Ti", "512GiB"), ("65Gi", "33280MiB"), ("3000Mi", "1500MiB")},
    ),
    (
        "workers.gpu",
        {
            "workers": {
                "validate": {
                    "gpu": {
                        "resource": "example.org/card",
                        "count": 2,
                        "architecture": "sm120",
                        "nodeSelector": {"cards": "large"},
                        "tolerations": [{"key": "cards"}],
                        "runtimeClassName": "cards",
                    },
                    "nodeSelector": {"disks": "fast"},
                    "tolerations": [{"key": "batch"}],
                }
            }
        },
        lambda c: gpu_of(c, "slipway-validate")
        == ("2", {"cards": "large", "disks": "fast"}, [{"key": "batch"}, {"key": "cards"}], "cards", "sm120"),
    ),
    (
        "pools",
        {"pools": {"merge-large": {"worker": "merge", "nodeSelector": {"disks": "large"}}}},
        lambda c: (
            workload(c, "slipway-merge-large").container["args"][0] == "--stage=combine,merge"
            and workload(c, "slipway-merge-large").pod["nodeSelector"] == {"disks": "large"}
            and "nodeSelector" not in workload(c, MERGE).pod
            and spec(c, "ScaledObject", "slipway-merge-large")["scaleTargetRef"]["name"] == "slipway-merge-large"
        ),
    ),
    (
        "workers.env",
        {
            "worker": {"env": [{"name": "CC", "value": "gcc"}, {"name": "CXX", "value": "g++"}]},
            "workers": {"merge": {"env": [{"name": "CC", "value": "clang"}]}},
        },
        lambda c: (
            [each for each in workload(c, MERGE).container["env"] if each["name"].startswith("C")]
            == [{"name": "CXX", "value": "g++"}, {"name": "CC", "value": "clang"}]
            and variable(workload(c, "slipway-gguf"), "CC")["value"] == "gcc"
        ),
    ),
    (
        "keda.namespace",
        {"keda": {"namespace": "scalers"}},
        lambda c: "scalers" in str(spec(c, "NetworkPolicy", "slipway-scaling")),
    ),
    (
        "keda.startAtZero",
        {"keda": {"startAtZero": True}, "workers": {"merge": {"scale": {"min": 1}}}},
        lambda c: {one.name for one in c.workers() if one.object["spec"]["replicas"]} == {MERGE},
    ),
    (
        "engine",
        {"engine": "kubernetes", "keda": {"enabled": False}},
        lambda c: (
            spec(c, "Deployment", MERGE)["replicas"] == 0
            and "slipway-merge" not in c.names("PodDisruptionBudget")
            and "--engine=kubernetes" in workload(c, COORDINATOR).container["args"]
            and variable(workload(c, COORDINATOR), "SLIPWAY_KUBERNETES_INSTANCE")["value"] == "slipway"
            and "projected" in volume(workload(c, COORDINATOR), "api-token")
            and c.names("Role") == {COORDINATOR}
        ),
    ),
    (
        "keda.enabled",
        {"keda": {"enabled": False}},
        lambda c: (
            not c.of("ScaledObject")
            and not c.of("TriggerAuthentication")
            and "slipway-scaling" not in c.names("NetworkPolicy")
            and "slipway-keda" not in c.names("Certificate")
            and "keda" not in {one["name"] for one in principals(c)}
        ),
    ),
    (
        "podAnnotations",
        {"workers": {"merge": {"podAnnotations": {"prometheus.io/scrape": "false"}}}},
        lambda c: [
            n for n, one in every(c).items() if annotations(one).get("prometheus.io/scrape") == "false"
        ]
        == [MERGE],
    ),
    (
        "cleanup",
        {"cleanup": {"olderThanDays": 14, "schedule": "0 5 * * *", "suspend": True, "env": [TOKEN], **PLACED}},
        lambda c: (
            "--older-than=14d" in workload(c, CLEANUP).container["args"]
            and spec(c, "CronJob", CLEANUP)["schedule"] == "0 5 * * *"
            and spec(c, "CronJob", CLEANUP)["suspend"] is True
            and variable(workload(c, CLEANUP), "HF_TOKEN") == TOKEN
            and placed(c) == {CLEANUP}
        ),
    ),
    (
        "cleanup.enabled",
        {"cleanup": {"enabled": False}},
        lambda c: (
            not c.of("CronJob")
            and CLEANUP not in c.names("ServiceAccount")
            and CLEANUP not in c.names("Certificate")
        ),
    ),
    ("migration", {"migration": PLACED}, lambda c: placed(c) == {MIGRATE}),
    ("access.projects", {"access": {"projects": LIMITS}}, lambda c: access_file(c)["projects"] == LIMITS),
    (
        "priorityClasses",
        {"priorityClasses": {"create": False, "coordinator": "high"}},
        lambda c: (
            not c.of("PriorityClass")
            and {name: one.pod.get("priorityClassName") for name, one in every(c).items() if "priorityClassName" in one.pod}
            == {COORDINATOR: "high", MIGRATE: "high"}
        ),
    ),
    (
        "priorityClassName",
        {"workers": {"merge": {"priorityClassName": "urgent"}}},
        lambda c: [n for n, one in every(c).items() if one.pod.get("priorityClassName") == "urgent"] == [MERGE],
    ),
    (
        "serviceAccount",
        {"workers": {"merge": {"serviceAccount": {"annotations": {"example.org/role": "merge"}}}}},
        lambda c: [a["metadata"]["name"] for a in c.of("ServiceAccount") if "example.org/role" in str(a)] == [MERGE],
    ),
    (
        "fullnameOverride",
        {"fullnameOverride": "models"},
        lambda c: (
            {one["metadata"]["name"].partition("-")[0] for one in c.objects} == {"models", "slipway.models"}
            and "--coordinator=models-coordinator:7070" in workload(c, "models-merge").container["args"]
        ),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("values", "holds"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_value_changes_what_it_should(values: Object, holds: Callable[[Cluster], bool]) -> None:
    assert_changes(values, holds)


def test_a_coordinator_reads_the_limits_of_projects(tmp_path: Path) -> None:
    """Helm writes large numbers as 2e+13 where it is not told otherwise."""
    from slipway.security.access.access_file import load_access

    file = tmp_path / "access.yaml"
    cluster = Cluster(render_chart(changed(PRODUCTION, {"access": {"projects": LIMITS}})))
    file.write_text(cluster.named("ConfigMap", "slipway-access")["data"]["access.yaml"])
    read = load_access(file).projects
    assert {name: one.stored_bytes for name, one in read.items()} == {"*": None, "red": 2 * 10**13, "blue": 5 * 10**11}
    assert (read["red"].gpu_seconds, read["blue"].weight, read["*"].model_fields_set) == (36_000_000, 3, set())
