"""Each value of the chart changes what it should, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.manifests.chart import CHART, NEEDED, PRODUCTION, VERSION, changed, needs_helm, render_chart
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
TOKEN = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}
ISSUER = {
    "name": "keycloak",
    "issuer": "https://id.example.org/realms/ml",
    "audiences": ["slipway"],
    "rules": [{"claims": {"groups": "ml"}, "role": "submitter", "projects": ["default"]}],
}
COORDINATOR, MERGE, CLEANUP, MIGRATE = (f"slipway-{name}" for name in ("coordinator", "merge", "cleanup", "migrate"))


def workload(cluster: Cluster, name: str) -> Workload:
    return next(one for one in cluster.workloads() if one.name == name)


def every(cluster: Cluster) -> dict[str, Workload]:
    return {one.name: one for one in cluster.workloads()}


def spec(cluster: Cluster, kind: str, name: str) -> Any:
    return cluster.named(kind, name)["spec"]


def volume(one: Workload, name: str) -> Any:
    return next(volume for volume in one.pod["volumes"] if volume["name"] == name)


def claim(one: Workload) -> Any:
    return volume(one, "scratch")["ephemeral"]["volumeClaimTemplate"]["spec"]


def is_placed(one: Workload) -> bool:
    pod = all(one.pod[key] == PLACED[key] for key in ("nodeSelector", "tolerations", "affinity"))
    labels = one.template["metadata"]
    return pod and "team" in labels["labels"] and "example.org/cost" in labels["annotations"]


def placed(cluster: Cluster) -> set[str]:
    return {name for name, one in every(cluster).items() if "nodeSelector" in one.pod and is_placed(one)}


def variable(one: Workload, name: str) -> Any:
    return next(each for each in one.container["env"] if each["name"] == name)


def outside(cluster: Cluster, policy: str) -> bool:
    peers = [rule["to"][0] for rule in spec(cluster, "NetworkPolicy", f"slipway-{policy}")["egress"]]
    return "ipBlock" in peers[0]


# A name, the values, and what must hold of what is rendered.
CASES: list[tuple[str, Object, Callable[[Cluster], bool]]] = [
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
        "store",
        {"store": {"bucket": "models", "prefix": "/a/b/", "endpoint": "https://s3.example.org", "region": "eu"}},
        lambda c: (
            {
                (e["SLIPWAY_STORE"], e["AWS_ENDPOINT_URL_S3"], e["AWS_REGION"])
                for e in (workload(c, name).environment for name in (COORDINATOR, MERGE, CLEANUP))
            }
            == {("s3://models/a/b", "https://s3.example.org", "eu")}
            and outside(c, "artifacts")
        ),
    ),
    (
        "store.secretKey",
        {"store": {"existingSecret": "keys", "secretKey": "aws"}},
        lambda c: all(
            workload(c, name).environment["AWS_SHARED_CREDENTIALS_FILE"] == "/s3/aws"
            and volume(workload(c, name), "s3")["secret"]["secretName"] == "keys"
            for name in (COORDINATOR, MERGE, CLEANUP)
        ),
    ),
    (
        "store.workloadIdentity",
        {
            "store": {"existingSecret": "", "workloadIdentity": True},
            "serviceAccounts": {"annotations": {"example.org/role": "models"}, "labels": {"identity": "use"}},
        },
        lambda c: (
            {a["metadata"]["name"] for a in c.of("ServiceAccount") if "annotations" not in a["metadata"]} == set()
            and {
                a["metadata"]["name"]
                for a in c.of("ServiceAccount")
                if "example.org/role" not in a["metadata"]["annotations"] or "identity" not in a["metadata"]["labels"]
            }
            == {MIGRATE}
            and not any("s3" in str(one.pod["volumes"]) for one in c.workloads())
        ),
    ),
    (
        "database.serviceFileKey",
        {"database": {"existingSecret": "db", "serviceFileKey": "service"}},
        lambda c: all(
            workload(c, name).environment["PGSERVICEFILE"] == "/state/service"
            and volume(workload(c, name), "state")["secret"]["secretName"] == "db"
            for name in (COORDINATOR, MIGRATE)
        ),
    ),
    (
        "database.urlKey",
        {"database": {"existingSecret": "db", "urlKey": "uri"}},
        lambda c: all(
            workload(c, name).environment["SLIPWAY_STATE"] == "secret:db/uri"
            and "PGSERVICEFILE" not in workload(c, name).environment
            for name in (COORDINATOR, MIGRATE)
        ),
    ),
    (
        "tls.issuer",
        {"tls": {"issuer": {"name": "company", "kind": "ClusterIssuer"}}},
        lambda c: (
            not c.of("Issuer")
            and {str(one["spec"]["issuerRef"]) for one in c.of("Certificate")}
            == {str({"group": "cert-manager.io", "kind": "ClusterIssuer", "name": "company"})}
        ),
    ),
    (
        "tls.extraNames",
        {"tls": {"extraNames": ["slipway.example.org"]}},
        lambda c: [
            one["metadata"]["name"] for one in c.of("Certificate") if "slipway.example.org" in str(one["spec"])
        ]
        == [COORDINATOR],
    ),
    (
        "tls.secrets",
        {"tls": {"source": "secrets", "secrets": {"coordinator": "c", "worker": "w", "cleanup": "g", "keda": "k"}}},
        lambda c: (
            not c.of("Certificate")
            and not c.of("Issuer")
            and [volume(workload(c, n), "tls")["secret"]["secretName"] for n in (COORDINATOR, MERGE, CLEANUP)]
            == ["c", "w", "g"]
            and {one["name"] for one in spec(c, "TriggerAuthentication", "slipway-scaler")["secretTargetRef"]} == {"k"}
        ),
    ),
    (
        "access.principals",
        {"access": {"principals": [{"name": "ci", "role": "submitter", "projects": ["default"]}]}},
        lambda c: [one["name"] for one in principals(c)] == ["workers", "keda", "cleanup", "pipelines", "ci"],
    ),
    (
        "access.issuers",
        {"access": {"issuers": [ISSUER]}},
        lambda c: access_file(c)["issuers"] == [ISSUER] and outside(c, "issuers"),
    ),
    (
        "networkPolicies.issuers",
        {"networkPolicies": {"issuers": {"to": [{"ipBlock": {"cidr": "192.0.2.5/32"}}]}}},
        lambda c: spec(c, "NetworkPolicy", "slipway-issuers")["egress"]
        == [{"to": [{"ipBlock": {"cidr": "192.0.2.5/32"}}], "ports": [{"port": 443, "protocol": "TCP"}]}],
    ),
    (
        "access.existingSecret",
        {"access": {"existingSecret": "who", "secretKey": "callers.yaml"}},
        lambda c: (
            "slipway-access" not in c.names("ConfigMap")
            and workload(c, COORDINATOR).environment["SLIPWAY_ACCESS_FILE"] == "/access/callers.yaml"
            and volume(workload(c, COORDINATOR), "access")["secret"]["secretName"] == "who"
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
        "metrics",
        {"metrics": {"namespace": "watching"}},
        lambda c: "watching" in str(spec(c, "NetworkPolicy", "slipway-observability")["ingress"]),
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
        "metrics.enabled",
        {"metrics": {"enabled": False}},
        lambda c: (
            not any("metrics" in str(one.container) for one in c.workloads())
            and spec(c, "NetworkPolicy", "slipway-observability")["policyTypes"] == ["Egress"]
        ),
    ),
    (
        "telemetry.endpoint",
        {"telemetry": {"endpoint": "https://traces.example.org:4318"}},
        lambda c: (
            workload(c, MERGE).environment["OTEL_EXPORTER_OTLP_ENDPOINT"] == "https://traces.example.org:4318"
            and outside(c, "observability")
            and "4318" in str(spec(c, "NetworkPolicy", "slipway-observability")["egress"])
        ),
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
    (
        "clients",
        {
            "clients": {
                "from": [{"ipBlock": {"cidr": "203.0.113.0/24"}}],
                "service": {
                    "type": "LoadBalancer",
                    "annotations": {"example.org/scheme": "internal"},
                    "loadBalancerSourceRanges": ["203.0.113.0/24"],
                },
            }
        },
        lambda c: (
            {key: value for key, value in spec(c, "Service", "slipway-clients").items() if key not in {"ports", "selector"}}
            == {
                "type": "LoadBalancer",
                "externalTrafficPolicy": "Local",
                "loadBalancerSourceRanges": ["203.0.113.0/24"],
            }
            and "203.0.113.0/24" in str(spec(c, "NetworkPolicy", "slipway-clients")["ingress"][0])
            and "example.org/scheme" in c.named("Service", "slipway-clients")["metadata"]["annotations"]
        ),
    ),
    (
        "ingress",
        {
            "clients": {"from": [{"namespaceSelector": {}}]},
            "ingress": {"enabled": True, "className": "nginx", "host": "a.example.org", "tlsSecret": "public", "annotations": {"example.org/protocol": "GRPCS"}},
        },
        lambda c: (
            spec(c, "Ingress", "slipway-clients")["rules"][0]["http"]["paths"][0]["backend"]["service"]
            == {"name": "slipway-clients", "port": {"name": "tokens"}}
            and spec(c, "Ingress", "slipway-clients")["tls"] == [{"hosts": ["a.example.org"], "secretName": "public"}]
            and spec(c, "Ingress", "slipway-clients")["ingressClassName"] == "nginx"
        ),
    ),
    (
        "gateway",
        {
            "clients": {"from": [{"namespaceSelector": {}}]},
            "gateway": {"enabled": True, "parentRefs": [{"name": "public"}], "hostnames": ["a.example.org"], "backendTls": {"authority": {"name": "authority"}}},
        },
        lambda c: (
            spec(c, "GRPCRoute", "slipway-clients")["rules"] == [{"backendRefs": [{"name": "slipway-clients", "port": 7072}]}]
            and spec(c, "GRPCRoute", "slipway-clients")["hostnames"] == ["a.example.org"]
            and spec(c, "BackendTLSPolicy", "slipway-clients")["validation"]["hostname"]
            in spec(c, "Certificate", COORDINATOR)["dnsNames"]
        ),
    ),
    (
        "networkPolicies",
        {
            "networkPolicies": {
                "dns": {"to": [{"ipBlock": {"cidr": "192.0.2.1/32"}}], "port": 5353},
                "database": {"to": [{"ipBlock": {"cidr": "192.0.2.2/32"}}], "port": 6432},
                "store": {"to": [{"ipBlock": {"cidr": "192.0.2.3/32"}}]},
                "telemetry": {"to": [{"ipBlock": {"cidr": "192.0.2.4/32"}}]},
            }
        },
        lambda c: (
            [
                [(rule["to"][0]["ipBlock"]["cidr"], rule["ports"][0]["port"]) for rule in spec(c, "NetworkPolicy", f"slipway-{name}")["egress"]]
                for name in ("names", "state", "artifacts", "observability", "migrate")
            ]
            == [[("192.0.2.1/32", 5353)], [("192.0.2.2/32", 6432)], [("192.0.2.3/32", 9000)], [("192.0.2.4/32", 4317)], [("192.0.2.1/32", 5353), ("192.0.2.2/32", 6432)]]
        ),
    ),
    ("networkPolicies.enabled", {"networkPolicies": {"enabled": False}}, lambda c: not c.of("NetworkPolicy")),
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


def annotations(one: Workload) -> dict[str, str]:
    return dict(one.template["metadata"].get("annotations", {}))


def access_file(cluster: Cluster) -> Object:
    found: Object = yaml.safe_load(cluster.named("ConfigMap", "slipway-access")["data"]["access.yaml"])
    return found


def principals(cluster: Cluster) -> list[Object]:
    found: list[Object] = access_file(cluster)["principals"]
    return found


def gpu_of(cluster: Cluster, name: str) -> tuple[Any, ...]:
    one = workload(cluster, name)
    resources = one.container["resources"]
    assert resources["requests"]["example.org/card"] == resources["limits"]["example.org/card"]
    (trigger,) = spec(cluster, "ScaledObject", name)["triggers"]
    pod = one.pod
    count = resources["limits"]["example.org/card"]
    architecture = trigger["metadata"]["gpuArchitecture"]
    return count, pod["nodeSelector"], pod["tolerations"], pod["runtimeClassName"], architecture


@pytest.mark.parametrize(("values", "holds"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_value_changes_what_it_should(values: Object, holds: Callable[[Cluster], bool]) -> None:
    assert not holds_without(holds), "it holds without the value too"
    assert holds(Cluster(render_chart(changed(PRODUCTION, values))))


def test_the_access_file_is_one_that_a_coordinator_reads(tmp_path: Path) -> None:
    from slipway.security.access.access_file import load_access

    people = [{"name": "ci", "role": "submitter", "projects": ["default"], "token_sha256": "0" * 64}]
    values = {"access": {"principals": people, "issuers": [ISSUER]}}
    cluster = Cluster(render_chart(changed(PRODUCTION, values)))
    file = tmp_path / "access.yaml"
    file.write_text(cluster.named("ConfigMap", "slipway-access")["data"]["access.yaml"])
    read = load_access(file)
    assert [one.name for one in read.principals] == ["workers", "keda", "cleanup", "pipelines", "ci"]
    assert [one.name for one in read.issuers] == ["keycloak"]


def holds_without(holds: Callable[[Cluster], bool]) -> bool:
    try:
        return holds(Cluster(render_chart(PRODUCTION)))
    except (LookupError, StopIteration):  # what it asks for is not there
        return False


def test_every_group_of_values_has_a_case() -> None:
    groups = set(yaml.safe_load((CHART / "values.yaml").read_text()))
    # As the overlays have them: test_same_as_kustomize.py.
    compared = {"size", "import"}
    named = {name.partition(".")[0] for name, _, _ in CASES}
    assert groups - compared - named - {"serviceAccounts"} == set()
    assert all(key in NEEDED or key in groups for key in NEEDED)
