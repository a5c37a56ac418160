"""Values of the chart for what processes reach, and who reaches them: store, database, certificates, callers, clients, policies."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from support.manifests.chart import CHART, PRODUCTION, changed, needs_helm, render_chart
from support.manifests.chart_values import (
    CLEANUP,
    COORDINATOR,
    MERGE,
    MIGRATE,
    Case,
    access_file,
    assert_changes,
    principals,
    spec,
    volume,
    workload,
)
from support.manifests.overlay import Cluster, Object

pytestmark = needs_helm

ISSUER = {
    "name": "keycloak",
    "issuer": "https://id.example.org/realms/ml",
    "audiences": ["slipway"],
    "rules": [{"claims": {"groups": "ml"}, "role": "submitter", "projects": ["default"]}],
}


def outside(cluster: Cluster, policy: str) -> bool:
    peers = [rule["to"][0] for rule in spec(cluster, "NetworkPolicy", f"slipway-{policy}")["egress"]]
    return "ipBlock" in peers[0]


def ports_to(cluster: Cluster, policy: str) -> set[int]:
    """Return the ports to which a policy lets others in."""
    return {port["port"] for rule in spec(cluster, "NetworkPolicy", policy)["ingress"] for port in rule["ports"]}


CASES: list[Case] = [
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
        "store.prefix",
        {"store": {"prefix": "/"}},
        lambda c: workload(c, MERGE).environment["SLIPWAY_STORE"] == "s3://slipway",
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
        "coordinator.webhooks",
        {"coordinator": {"webhooks": {"existingSecret": "receivers", "secretKey": "all.yaml"}}},
        lambda c: (
            "--webhooks=/webhooks/all.yaml" in workload(c, COORDINATOR).container["args"]
            and volume(workload(c, COORDINATOR), "webhooks")["secret"]["secretName"] == "receivers"
            and outside(c, "webhooks")
        ),
    ),
    (
        "networkPolicies.apiServer",
        {
            "engine": "kubernetes",
            "keda": {"enabled": False},
            "networkPolicies": {"apiServer": {"to": [{"ipBlock": {"cidr": "192.0.2.7/32"}}]}},
        },
        lambda c: (
            spec(c, "NetworkPolicy", "slipway-api-server")["egress"][0]["to"] == [{"ipBlock": {"cidr": "192.0.2.7/32"}}]
        ),
    ),
    (
        "networkPolicies.webhooks",
        {
            "coordinator": {"webhooks": {"existingSecret": "receivers"}},
            "networkPolicies": {"webhooks": {"to": [{"ipBlock": {"cidr": "192.0.2.6/32"}}]}},
        },
        lambda c: spec(c, "NetworkPolicy", "slipway-webhooks")["egress"]
        == [{"to": [{"ipBlock": {"cidr": "192.0.2.6/32"}}], "ports": [{"port": 443, "protocol": "TCP"}]}],
    ),
    (
        "metrics",
        {"metrics": {"namespace": "watching"}},
        lambda c: "watching" in str(spec(c, "NetworkPolicy", "slipway-observability")["ingress"]),
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
        "ingress.host",
        {
            "clients": {"from": [{"namespaceSelector": {}}]},
            "ingress": {"enabled": True, "host": "*.example.org", "tlsSecret": "public"},
        },
        lambda c: (
            spec(c, "Ingress", "slipway-clients")["rules"][0]["host"] == "*.example.org"
            and spec(c, "Ingress", "slipway-clients")["tls"][0]["hosts"] == ["*.example.org"]
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
        "http",
        {"http": {"enabled": True, "port": 8443}, "clients": {"from": [{"ipBlock": {"cidr": "203.0.113.0/24"}}]}},
        lambda c: (
            workload(c, COORDINATOR).arguments().http == "0.0.0.0:8443"
            and workload(c, COORDINATOR).ports["http"] == 8443
            and [spec(c, "Service", name)["ports"][1] for name in (COORDINATOR, "slipway-clients")]
            == [{"name": "http", "port": 8443, "targetPort": "http"}] * 2
            and "203.0.113.0/24" in str(spec(c, "NetworkPolicy", "slipway-http")["ingress"][0])
            and ports_to(c, "slipway-http") == {8443}
            and ports_to(c, "slipway-standby") == {7070, 8443}
            and workload(c, COORDINATOR).container["readinessProbe"]
            == workload(Cluster(render_chart(PRODUCTION)), COORDINATOR).container["readinessProbe"]
        ),
    ),
    (
        "http.ingress",
        {
            "clients": {"from": [{"namespaceSelector": {}}]},
            "http": {
                "enabled": True,
                "ingress": {"enabled": True, "className": "nginx", "host": "a.example.org", "tlsSecret": "public", "annotations": {"example.org/protocol": "HTTPS"}},
            },
        },
        lambda c: (
            c.names("Ingress") == {"slipway-http"}
            and spec(c, "Ingress", "slipway-http")["rules"][0]["http"]["paths"][0]["backend"]["service"]
            == {"name": "slipway-clients", "port": {"name": "http"}}
            and spec(c, "Ingress", "slipway-http")["tls"] == [{"hosts": ["a.example.org"], "secretName": "public"}]
            and spec(c, "Ingress", "slipway-http")["ingressClassName"] == "nginx"
            and c.named("Ingress", "slipway-http")["metadata"]["annotations"] == {"example.org/protocol": "HTTPS"}
        ),
    ),
    (
        "http.gateway",
        {
            "clients": {"from": [{"namespaceSelector": {}}]},
            "http": {"enabled": True, "gateway": {"enabled": True, "parentRefs": [{"name": "public"}], "hostnames": ["a.example.org"]}},
            "gateway": {"backendTls": {"authority": {"name": "authority"}}},
        },
        lambda c: (
            not c.of("GRPCRoute")
            and spec(c, "HTTPRoute", "slipway-http")["rules"] == [{"backendRefs": [{"name": "slipway-clients", "port": 7080}]}]
            and spec(c, "HTTPRoute", "slipway-http")["hostnames"] == ["a.example.org"]
            and spec(c, "BackendTLSPolicy", "slipway-http")["targetRefs"][0]["sectionName"] == "http"
            and spec(c, "BackendTLSPolicy", "slipway-http")["validation"]["hostname"]
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
]  # fmt: skip


@pytest.mark.parametrize(("values", "holds"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_value_changes_what_it_should(values: Object, holds: Callable[[Cluster], bool]) -> None:
    assert_changes(values, holds)


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


def test_every_group_of_values_has_a_case() -> None:
    """Here, beside this file, or, for what the overlays have too, in test_same_as_kustomize.py."""
    groups = set(yaml.safe_load((CHART / "values.yaml").read_text()))
    texts = [path.read_text() for path in Path(__file__).parent.glob("test_values_*.py")]
    assert len(texts) == 2
    named = {name for text in texts for name in re.findall(r'^    \(\s*"(\w+)[".]', text, re.MULTILINE)}
    compared = {"size", "import"}
    assert groups - compared - named == {"serviceAccounts"}, "of which store.workloadIdentity has the case"
