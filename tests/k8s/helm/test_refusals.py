"""Values that cannot work are refused in words: which one, and what to do; unknown keys and wrong types by the schema."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from support.manifests.chart import CHART, NEEDED, Refusal, call_helm, changed, needs_helm, render_chart
from support.manifests.overlay import Object

pytestmark = needs_helm

GPU = {"resource": "nvidia.com/gpu", "count": 1, "architecture": "sm89"}
ROUTE = {"enabled": True, "parentRefs": [{"name": "public"}]}
PEERS = [{"ipBlock": {"cidr": "203.0.113.0/24"}}]

REFUSED: dict[str, tuple[Object, str]] = {
    "no-bucket": ({"store": {"bucket": ""}}, "no bucket for artifacts: set store.bucket"),
    "no-keys": ({"store": {"existingSecret": ""}}, "nothing gives access to the bucket: set store.existingSecret"),
    "keys-and-a-role": ({"store": {"workloadIdentity": True}}, "are both set, and keys would count: set one of them"),
    "no-database": ({"database": {"existingSecret": ""}}, "no database: set database.existingSecret"),
    "no-certificate": (
        {"tls": {"source": "secrets", "secrets": {"coordinator": "a", "worker": "b"}}},
        "there is none for cleanup: set tls.secrets.cleanup, or tls.source to cert-manager",
    ),
    "no-certificate-for-keda": (
        {"keda": {"enabled": True}, "tls": {"source": "secrets", "secrets": {"cleanup": "c"}}},
        "there is none for keda: set tls.secrets.keda",
    ),
    "two-access-files": (
        {"access": {"existingSecret": "access", "principals": [{"name": "ci", "role": "submitter"}]}},
        "access.principals, access.issuers and access.projects would not be read beside access.existingSecret: put them",
    ),
    "limits-beside-an-access-file": (
        {"access": {"existingSecret": "access", "projects": {"red": {"weight": 2}}}},
        "access.projects would not be read beside access.existingSecret",
    ),
    "a-worker-that-is-none": (
        {"workers": {"mergee": {"replicas": 1}}},
        "workers.mergee: there is no such worker; there are adapter, coreml, executorch, gguf,",
    ),
    "a-pool-of-no-worker": (
        {"pools": {"builders": {"worker": "tensorrt_build", "gpu": GPU}}},
        'pools.builders.worker: there is no worker "tensorrt_build"; there are adapter,',
    ),
    "a-pool-like-a-worker": (
        {"pools": {"validate": {"worker": "validate"}}},
        "pools.validate has the name of a worker: give it another one, such as validate-2",
    ),
    "a-pool-like-the-coordinator": (
        {"pools": {"coordinator": {"worker": "merge"}}},
        "pools.coordinator has the name of another process of the chart: give it another one, such as coordinator-2",
    ),
    "a-gpu-for-no-image": (
        {"workers": {"merge": {"gpu": GPU}}},
        "workers.merge.gpu: merge has no image for GPUs; those with one are tensorrt-build, validate",
    ),
    "keda-beside-an-engine": (
        {"keda": {"enabled": True}, "engine": "kubernetes"},
        "keda.enabled scales workers, and with engine there are none: set keda.enabled to false",
    ),
    "replicas-beside-keda": (
        {"keda": {"enabled": True}, "workers": {"merge": {"replicas": 2}}},
        "workers.merge.replicas is for workers that KEDA does not scale: set workers.merge.scale",
    ),
    "more-requested-than-allowed": (
        {"workers": {"merge": {"resources": {"requests": {"memory": "20Gi"}}}}},
        "workers.merge.resources: requests.memory 20Gi is more than limits.memory 8Gi: raise limits.memory too",
    ),
    "more-requested-of-all": (
        {"worker": {"resources": {"requests": {"memory": "12288Mi"}}}},
        "workers.prepare.resources: requests.memory 12288Mi is more than limits.memory 8Gi",
    ),
    "bounds-turned-round": (
        {"workers": {"merge": {"scale": {"min": 5}}}},
        "workers.merge.scale: min 5 is more than max 4: raise max too",
    ),
    "a-size-that-is-none": ({"size": "13b"}, 'size: "13b" is none of 30b, 70b, 8b'),
    "a-digest-of-no-image": (
        {"image": {"digests": {"mergee": "sha256:" + "0" * 64}}},
        "image.digests.mergee: there is no such image; there are adapter,",
    ),
    "an-ingress-that-nobody-enters": (
        {"ingress": {"enabled": True, "host": "slipway.example.org"}},
        "ingress is set, and the network policies let nobody in from outside: name the controller's pods",
    ),
    "a-balancer-that-nobody-enters": (
        {"clients": {"service": {"type": "LoadBalancer"}}},
        "clients.service is set, and the network policies let nobody in from outside",
    ),
    "an-ingress-without-a-name": (
        {"ingress": {"enabled": True}, "clients": {"from": PEERS}},
        "ingress.enabled needs a name: set ingress.host",
    ),
    "a-route-without-a-gateway": (
        {"gateway": {"enabled": True, "backendTls": {"enabled": False}}, "clients": {"from": PEERS}},
        "gateway.enabled needs a Gateway: name it in gateway.parentRefs",
    ),
    "a-route-without-an-authority": (
        {"gateway": {"enabled": True, "parentRefs": [{"name": "public"}]}, "clients": {"from": PEERS}},
        "the coordinator speaks TLS alone: name a ConfigMap with its authority as ca.crt in gateway.backendTls",
    ),
    "an-ingress-for-http-without-a-name": (
        {"http": {"enabled": True, "ingress": {"enabled": True}}, "clients": {"from": PEERS}},
        "http.ingress.enabled needs a name: set http.ingress.host",
    ),
    "a-route-for-http-that-nobody-enters": (
        {"http": {"enabled": True, "gateway": {"enabled": True, "parentRefs": [{"name": "public"}]}}},
        "http.gateway is set, and the network policies let nobody in from outside: name the controller's pods",
    ),
    "a-route-for-http-without-an-authority": (
        {"http": {"enabled": True, "gateway": {"enabled": True, "parentRefs": [{"name": "public"}]}}},
        "the coordinator speaks TLS alone: name a ConfigMap with its authority as ca.crt in gateway.backendTls",
    ),
    "an-ingress-to-no-port": (
        {"http": {"ingress": {"enabled": True, "host": "console.example.org"}}, "clients": {"from": PEERS}},
        "http.ingress or http.gateway is set, and no coordinator has a port for HTTP: set http.enabled to true",
    ),
    "a-port-of-another-kind": (
        {"http": {"enabled": True, "port": 7072}},
        "http.port: coordinators have another port 7072: set it to one that is free, such as 7080",
    ),
    "one-host-for-both": (
        {
            "clients": {"from": PEERS},
            "ingress": {"enabled": True, "host": "slipway.example.org"},
            "http": {"enabled": True, "ingress": {"enabled": True, "host": "slipway.example.org"}},
        },
        "ingress.host and http.ingress.host are both slipway.example.org, and each takes all of its paths: give them",
    ),
    "one-hostname-for-both": (
        {
            "clients": {"from": PEERS},
            "gateway": {**ROUTE, "hostnames": ["a.example.org", "b.example.org"], "backendTls": {"enabled": False}},
            "http": {"enabled": True, "gateway": {**ROUTE, "hostnames": ["b.example.org"]}},
        },
        "gateway and http.gateway have a name in common at the same listener, where one route would be refused",
    ),
    "every-hostname-for-one": (
        {
            "clients": {"from": PEERS},
            "gateway": {**ROUTE, "backendTls": {"enabled": False}},
            "http": {"enabled": True, "gateway": {**ROUTE, "hostnames": ["b.example.org"]}},
        },
        "gateway and http.gateway have a name in common at the same listener, where one route would be refused",
    ),
    "a-setting-of-the-chart": (
        {"settings": {"SLIPWAY_STORE": "s3://other"}},
        "settings.SLIPWAY_STORE is the chart's own: set store.bucket",
    ),
    "a-variable-of-the-chart": (
        {"workers": {"merge": {"env": [{"name": "SLIPWAY_HOME", "value": "/tmp"}]}}},
        "workers.merge.env.SLIPWAY_HOME is the chart's own, and fixed: remove it",
    ),
    "an-audit-log-without-a-collector": (
        {"coordinator": {"settings": {"SLIPWAY_AUDIT": "otlp"}}},
        "coordinator.settings.SLIPWAY_AUDIT is set, and there is no collector: set telemetry.endpoint, or OTEL_EXPORTER",
    ),
    "a-secret-written-out": (
        {"coordinator": {"env": [{"name": "HF_TOKEN", "value": "hf_abc"}]}},
        "coordinator.env.HF_TOKEN would be written out for everybody to read: take it from a Secret",
    ),
    "a-variable-twice": (
        {"worker": {"env": [{"name": "CC", "value": "gcc"}, {"name": "CC", "value": "clang"}]}},
        "worker.env has CC twice: remove one",
    ),
    "a-long-name": (
        {"fullnameOverride": "models-of-the-department-of-languages"},
        "has more than 36 characters, or begins with a digit: set fullnameOverride to another one",
    ),
}
"""Values over those that are needed, and what is said of them."""

WRONG: dict[str, tuple[Object, str]] = {
    "unknown": ({"stores": {}}, "additional properties 'stores' not allowed"),
    "unknown-deep": ({"store": {"buckets": "a"}}, "at '/store': additional properties 'buckets' not allowed"),
    "unknown-of-a-worker": ({"workers": {"merge": {"replica": 1}}}, "additional properties 'replica' not allowed"),
    "a-text-for-a-number": ({"coordinator": {"retainDays": "90d"}}, "at '/coordinator/retainDays': got string"),
    "a-number-for-a-text": ({"settings": {"SLIPWAY_UPLOAD_SIZE": 5}}, "got number, want string"),
    "nothing-for-a-group": ({"store": None}, "missing property 'store'"),
    "no-replicas": ({"coordinator": {"replicas": 0}}, "at '/coordinator/replicas'"),
    "half-a-replica": ({"workers": {"merge": {"replicas": 0.5}}}, "at '/workers/merge/replicas'"),
    "a-volume-in-bytes": ({"workers": {"merge": {"volume": {"size": "64G"}}}}, "at '/workers/merge/volume/size'"),
    "no-architecture": ({"workers": {"validate": {"gpu": {"resource": "nvidia.com/gpu", "count": 1}}}}, "missing property 'architecture'"),
    "an-architecture-of-another-kind": ({"workers": {"validate": {"gpu": {**GPU, "architecture": "8.9"}}}}, "at '/workers/validate/gpu/architecture'"),
    "a-pool-like-nothing": ({"pools": {"fast": {}}}, "missing property 'worker'"),
    "a-source-that-is-none": ({"tls": {"source": "vault"}}, "value must be one of 'cert-manager', 'secrets'"),
    "a-digest-that-is-none": ({"image": {"digests": {"merge": "latest"}}}, "at '/image/digests/merge'"),
    "an-address-with-a-password": ({"store": {"endpoint": "https://a:b@s3.example.org"}}, "at '/store/endpoint'"),
    "a-value-and-a-source": ({"worker": {"env": [{"name": "CC", "value": "a", "valueFrom": {"fieldRef": {}}}]}}, "at '/worker/env/0'"),
    "a-label-of-the-chart": ({"worker": {"podLabels": {"app.kubernetes.io/component": "mine"}}}, "invalid propertyName 'app.kubernetes.io/component'"),
    "a-label-of-an-account": ({"serviceAccounts": {"labels": {"helm.sh/chart": "mine"}}}, "invalid propertyName 'helm.sh/chart'"),
    "a-folder-with-a-comment": ({"store": {"prefix": "team #1"}}, "at '/store/prefix'"),
    "a-folder-with-a-key": ({"store": {"prefix": "a: b"}}, "at '/store/prefix'"),
    "a-folder-above": ({"store": {"prefix": "a/../b"}}, "at '/store/prefix'"),
    "a-registry-with-a-comment": ({"image": {"registry": "registry.example.org/a #b"}}, "at '/image/registry'"),
    "an-address-with-a-space": ({"store": {"endpoint": "http://minio.a: b.svc"}}, "at '/store/endpoint'"),
    "a-port-that-is-root's": ({"http": {"port": 443}}, "at '/http/port'"),
    "a-host-of-two-words-for-http": ({"http": {"ingress": {"host": "a.example.org b"}}}, "at '/http/ingress/host'"),
    "a-host-of-two-words": ({"ingress": {"host": "a.example.org b"}}, "at '/ingress/host'"),
    "an-engine-that-is-none": ({"engine": "slurm"}, "at '/engine'"),
    "a-namespace-that-is-none": ({"keda": {"namespace": "a: b"}}, "at '/keda/namespace'"),
    "a-limit-that-is-none": (
        {"access": {"projects": {"red": {"gpus": 1}}}},
        "at '/access/projects/red'",
    ),
    "bytes-that-are-no-size": (
        {"access": {"projects": {"red": {"stored_bytes": "much"}}}},
        "at '/access/projects/red/stored_bytes'",
    ),
    "several-hubs-in-one-text": ({"import": {"from": ["hf://a hf://b"]}}, "at '/import/from/0'"),
}  # fmt: skip
"""Values that the schema refuses."""


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    """What Helm says of each, asked at once."""
    cases = {**REFUSED, **WRONG}
    calls = [
        {"do": "render", "chart": str(CHART), "values": changed(NEEDED, values), "name": "slipway", "namespace": "ml"}
        for values, _ in cases.values()
    ]
    return dict(zip(cases, call_helm(calls), strict=True))


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_with_what_to_do(answers: dict[str, Any], case: str) -> None:
    answer = answers[case]
    assert isinstance(answer, Refusal), "it was taken"
    assert answer.kind == "HelmRenderError"
    assert "invalid values:\n- " in answer.error
    assert REFUSED[case][1] in answer.error


@pytest.mark.parametrize("case", WRONG)
def test_unknown_keys_and_wrong_types_are_refused(answers: dict[str, Any], case: str) -> None:
    answer = answers[case]
    assert isinstance(answer, Refusal), "it was taken"
    assert answer.kind == "HelmValuesError"
    assert WRONG[case][1] in answer.error


def test_no_pool_has_the_name_of_another_process() -> None:
    """Its Deployment and its service account would be those of that process."""
    things = render_chart(changed(NEEDED, {"fullnameOverride": "x"}))
    workers = {f"x-{name}" for name in yaml.safe_load((CHART / "files" / "workers.yaml").read_text())}
    accounts = {thing["metadata"]["name"] for thing in things if thing["kind"] == "ServiceAccount"}
    taken = sorted(name.removeprefix("x-") for name in accounts - workers)
    assert len(taken) == 3
    calls = [
        {
            "do": "render",
            "chart": str(CHART),
            "values": changed(NEEDED, {"pools": {name: {"worker": "merge"}}}),
            "name": "s",
            "namespace": "ml",
        }
        for name in taken
    ]
    for name, answer in zip(taken, call_helm(calls), strict=True):
        assert isinstance(answer, Refusal), f"{name} was taken"
        assert f"pools.{name} has the name of another process" in answer.error


@pytest.mark.parametrize(
    "values",
    [
        {"settings": {"SLIPWAY_AUDIT": "otlp"}, "telemetry": {"endpoint": "http://collector.example.org:4317"}},
        {
            "settings": {"OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": "http://logs.example.org:4317"},
            "worker": {"settings": {"SLIPWAY_AUDIT": "otlp"}},
        },
    ],
    ids=["that-of-traces", "its-own"],
)
def test_an_audit_log_with_a_collector_is_taken(values: Object) -> None:
    assert render_chart(changed(NEEDED, values))


def test_all_is_said_at_once() -> None:
    call = {"do": "render", "chart": str(CHART), "values": {"workers": {"mergee": {}}}, "name": "s", "namespace": "ml"}
    (answer,) = call_helm([call])
    assert "4 invalid values:" in answer.error
    assert len(re.findall("^- ", answer.error, re.MULTILINE)) == 4


def test_every_check_has_its_test(answers: dict[str, Any]) -> None:
    """Each sentence of the chart's checks is one that a case here has Helm say."""
    checks = (CHART / "templates" / "_checks.tpl").read_text()
    sentences = re.findall(r'append \$problems (?:\(printf )?"((?:[^"\\]|\\.)*)"', checks)
    assert len(sentences) > 20
    said = "\n".join(answers[case].error for case in REFUSED)
    unsaid = [one for one in sentences if not re.search(re.sub(r"%[sdq]", ".*", re.escape(one)), said)]
    assert unsaid == []


def test_the_schema_knows_every_value() -> None:
    """A default that the schema has no rule for would be refused; one that it does not require may be taken away unseen."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert set(schema["required"]) == set(values)
    for name, value in values.items():
        rule = schema["properties"][name]
        if isinstance(value, dict) and "required" in rule:
            assert set(rule["required"]) == set(value), name
