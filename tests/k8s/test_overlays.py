"""Every overlay renders, is what Kubernetes takes, and keeps every rule; and every rule notices when it is broken."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from support.manifests import pod_rules as k8s_pod_rules
from support.manifests import store_rules as k8s_store_rules
from support.manifests import wiring_rules as k8s_wiring_rules
from support.manifests.overlay import OVERLAYS, Cluster, Object, data_of, rendered

kubernetes_validate = pytest.importorskip("kubernetes_validate")

RULES = {rule.__name__: rule for rule in (*k8s_pod_rules.RULES, *k8s_store_rules.RULES, *k8s_wiring_rules.RULES)}
OWN = ("Certificate", "Issuer", "ScaledObject", "TriggerAuthentication")


def test_the_overlays_are_there() -> None:
    assert OVERLAYS == ["gpu", "gpu-pools", "jobs", "production", "single-node"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubernetes_takes_every_object(overlay: str) -> None:
    known = [thing for thing in rendered(overlay) if thing["kind"] not in OWN]
    assert len(known) > 20
    for thing in known:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a kind without a schema would pass unseen
            kubernetes_validate.validate(thing, "1.33", strict=True)


def test_validation_is_strict() -> None:
    deployment = Cluster(rendered("production")).named("Deployment", "slipway-merge")
    deployment["spec"]["template"]["spec"]["containers"][0]["livenessPorbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, "1.33", strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_overlay_keeps_the_rules(overlay: str) -> None:
    cluster = Cluster(rendered(overlay))
    assert {name: broken for name, rule in RULES.items() if (broken := list(rule(cluster)))} == {}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_monitors_select_every_pod_with_metrics(overlay: str) -> None:
    """By the label that docs/kubernetes.md names for a PodMonitor."""
    pods = {one.name: one.labels for one in Cluster(rendered(overlay)).workloads() if one.kind == "Deployment"}
    assert len(pods) > 10
    assert [name for name, labels in pods.items() if labels.get("app.kubernetes.io/part-of") != "slipway"] == []


def deployment(cluster: Cluster, name: str = "slipway-merge") -> Object:
    return cluster.named("Deployment", name)


def pod(cluster: Cluster, name: str = "slipway-merge") -> Any:
    return deployment(cluster, name)["spec"]["template"]["spec"]


def container(cluster: Cluster, name: str = "slipway-merge") -> Any:
    return pod(cluster, name)["containers"][0]


def from_secret(name: str, secret: str, key: str) -> Object:
    """A variable with the value of a Secret, as it was when the pod began."""
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def jobs(cluster: Cluster) -> Any:
    """What the jobs of the cleanup are made from."""
    return cluster.named("CronJob", CLEANUP)["spec"]["jobTemplate"]["spec"]


def cleaner(cluster: Cluster) -> Any:
    return jobs(cluster)["template"]["spec"]["containers"][0]


def daily(cluster: Cluster, **changes: Any) -> None:
    cluster.named("CronJob", CLEANUP)["spec"].update(changes)


def policy(cluster: Cluster, name: str) -> Any:
    return cluster.named("NetworkPolicy", name)["spec"]


def remove(cluster: Cluster, kind: str, name: str) -> None:
    cluster.objects.remove(cluster.named(kind, name))


def by_a_trigger_for_each_stage(cluster: Cluster) -> None:
    triggers = cluster.named("ScaledObject", "slipway-merge")["spec"]["triggers"]
    triggers[:] = [copy.deepcopy(trigger(cluster)) for _ in range(2)]
    for one, stage in zip(triggers, ("combine", "merge"), strict=True):
        one["metadata"]["stage"] = stage


def trigger(cluster: Cluster, name: str = "slipway-merge") -> Any:
    return cluster.named("ScaledObject", name)["spec"]["triggers"][0]


def argument(cluster: Cluster, old: str, new: str, *, name: str = "slipway-merge") -> None:
    arguments = container(cluster, name)["args"]
    arguments[arguments.index(old)] = new


def with_data(cluster: Cluster, key: str) -> Object:
    """The ConfigMap that has a key."""
    return next(one for one in cluster.of("ConfigMap") if key in data_of(one))


def settings(cluster: Cluster) -> Any:
    return with_data(cluster, "SLIPWAY_LOG_LEVEL")["data"]


def access_file(cluster: Cluster) -> Any:
    return with_data(cluster, "access.yaml")["data"]


COORDINATOR, CLEANUP = "slipway-coordinator", "slipway-cleanup"
EVERYWHERE: list[Object] = [{}]
OTHERS = "principals: [{name: other, role: viewer, projects: [a], certificate: other.slipway}]"

# What is broken, and the rule that has to notice. All on the overlay gpu, which has everything.
BREAKS: list[tuple[str, Callable[[Cluster], object]]] = [
    ("restricted_pods", lambda c: pod(c)["securityContext"].update(runAsNonRoot=False)),
    ("restricted_pods", lambda c: pod(c)["securityContext"].update(runAsUser=0)),
    ("restricted_pods", lambda c: jobs(c)["template"]["spec"]["securityContext"].update(runAsUser=0)),
    ("restricted_pods", lambda c: cleaner(c)["securityContext"].pop("readOnlyRootFilesystem")),
    ("restricted_pods", lambda c: container(c)["securityContext"].update(runAsUser=0)),
    ("restricted_pods", lambda c: pod(c)["securityContext"].pop("seccompProfile")),
    ("restricted_pods", lambda c: container(c)["securityContext"].pop("readOnlyRootFilesystem")),
    ("restricted_pods", lambda c: container(c)["securityContext"].pop("allowPrivilegeEscalation")),
    ("restricted_pods", lambda c: container(c)["securityContext"]["capabilities"].update(drop=["NET_RAW"])),
    ("restricted_pods", lambda c: container(c)["securityContext"]["capabilities"].update(add=["SYS_PTRACE"])),
    ("restricted_pods", lambda c: pod(c).update(hostNetwork=True)),
    ("restricted_pods", lambda c: pod(c)["volumes"].append({"name": "h", "hostPath": {"path": "/"}})),
    ("restricted_pods", lambda c: c.named("Namespace", "slipway")["metadata"]["labels"].clear()),
    ("images", lambda c: container(c).update(image="slipway-merge:latest")),
    ("images", lambda c: container(c).update(image="slipway-merge")),
    ("images", lambda c: cleaner(c).update(image="slipway-coordinator:latest")),
    ("images", lambda c: container(c).update(image="registry.example.org/slipway-merge:0.1.0")),
    ("images", lambda c: container(c).update(image="slipway-quantize:0.1.0")),
    ("images", lambda c: container(c, COORDINATOR).update(image="slipway-console:0.1.0")),
    ("every_stage", lambda c: argument(c, "--stage=combine,merge", "--stage=merge")),
    ("every_stage", lambda c: remove(c, "Deployment", "slipway-quantize")),
    ("resources", lambda c: container(c)["resources"]["limits"].pop("memory")),
    ("resources", lambda c: container(c)["resources"]["requests"].pop("cpu")),
    ("resources", lambda c: cleaner(c)["resources"]["limits"].pop("ephemeral-storage")),
    ("resources", lambda c: container(c)["resources"]["limits"].update(memory="1Gi")),
    ("resources", lambda c: pod(c)["volumes"][0]["emptyDir"].clear()),
    ("probes", lambda c: container(c).pop("readinessProbe")),
    ("probes", lambda c: container(c).pop("startupProbe")),
    ("probes", lambda c: container(c)["readinessProbe"]["grpc"].update(port=7070)),
    ("probes", lambda c: container(c)["livenessProbe"]["tcpSocket"].update(port="grpc")),
    ("probes", lambda c: container(c, COORDINATOR)["readinessProbe"]["grpc"].update(service="slipway.v1.StageService")),
    ("default_deny", lambda c: remove(c, "NetworkPolicy", "default-deny")),
    ("default_deny", lambda c: policy(c, "default-deny").update(policyTypes=["Ingress"])),
    ("default_deny", lambda c: policy(c, "default-deny").update(egress=EVERYWHERE)),
    ("edges", lambda c: remove(c, "NetworkPolicy", "scaling")),
    ("edges", lambda c: remove(c, "NetworkPolicy", "to-coordinator")),
    ("edges", lambda c: policy(c, "to-coordinator").update(podSelector={})),
    ("edges", lambda c: policy(c, "state").update(podSelector={})),
    ("edges", lambda c: remove(c, "NetworkPolicy", "clients")),
    ("edges", lambda c: policy(c, "clients")["egress"].clear()),
    ("edges", lambda c: settings(c).update(AWS_ENDPOINT_URL_S3="https://s3.example.org")),
    ("edges", lambda c: policy(c, "artifacts").update(egress=EVERYWHERE)),
    ("edges", lambda c: policy(c, "artifacts")["egress"][0]["ports"].append({"port": 443, "protocol": "TCP"})),
    ("edges", lambda c: policy(c, "to-coordinator")["podSelector"].update(matchLabels={"nobody": "here"})),
    ("edges", lambda c: policy(c, "artifacts")["podSelector"]["matchExpressions"][0]["values"].remove("cleanup")),
    ("edges", lambda c: jobs(c)["template"]["metadata"]["labels"].pop("slipway.dev/client")),
    ("edges", lambda c: policy(c, "coordinator")["ingress"][0]["from"][0].update(podSelector={})),
    ("edges", lambda c: settings(c).update(AWS_ENDPOINT_URL_S3="http://minio.minio.svc:9001")),
    ("edges", lambda c: with_data(c, "SLIPWAY_TRACING")["data"].pop("SLIPWAY_TRACING")),
    ("service_accounts", lambda c: pod(c).pop("automountServiceAccountToken")),
    ("service_accounts", lambda c: pod(c).update(serviceAccountName="slipway-quantize")),
    ("service_accounts", lambda c: remove(c, "ServiceAccount", "slipway-merge")),
    ("service_accounts", lambda c: c.named("ServiceAccount", "slipway-merge").pop("automountServiceAccountToken")),
    ("service_accounts", lambda c: jobs(c)["template"]["spec"].pop("automountServiceAccountToken")),
    ("service_accounts", lambda c: jobs(c)["template"]["spec"].update(serviceAccountName="slipway-migrate")),
    ("one_store", lambda c: cleaner(c)["env"].append({"name": "SLIPWAY_STORE", "value": "s3://other/place"})),
    ("cleanup", lambda c: remove(c, "CronJob", CLEANUP)),
    ("cleanup", lambda c: cleaner(c)["args"].append("--dry-run")),
    ("cleanup", lambda c: cleaner(c)["args"].remove("--coordinator=slipway-coordinator:7070")),
    ("cleanup", lambda c: cleaner(c)["args"].append("--older-than=1h")),
    ("cleanup", lambda c: cleaner(c)["args"].append("--max-size=1TB")),
    ("cleanup", lambda c: daily(c, schedule="17 * * * *")),
    ("cleanup", lambda c: daily(c, concurrencyPolicy="Allow")),
    ("cleanup", lambda c: daily(c, suspend=True)),
    ("cleanup", lambda c: c.named("CronJob", CLEANUP)["spec"].pop("failedJobsHistoryLimit")),
    ("cleanup", lambda c: jobs(c).pop("activeDeadlineSeconds")),
    ("cleanup", lambda c: access_file(c).update({"access.yaml": access_file(c)["access.yaml"].replace('"*"', "red")})),
    ("references", lambda c: remove(c, "Certificate", "slipway-worker")),
    ("references", lambda c: remove(c, "Issuer", "slipway")),
    ("references", lambda c: remove(c, "PriorityClass", "slipway-worker")),
    ("references", lambda c: remove(c, "TriggerAuthentication", "slipway-scaler")),
    ("references", lambda c: c.named("ScaledObject", "slipway-merge")["spec"]["scaleTargetRef"].update(name="merge")),
    ("references", lambda c: container(c)["envFrom"][0]["configMapRef"].update(name="slipway-settings")),
    ("references", lambda c: pod(c)["volumes"][-1]["secret"].update(secretName="slipway-s4")),
    ("references", lambda c: container(c)["env"].append(from_secret("PGPASSWORD", "slipway-state", "password"))),
    ("references", lambda c: c.objects.remove(with_data(c, "access.yaml"))),
    (
        "references",
        lambda c: pod(c)["volumes"].append({"name": "x", "persistentVolumeClaim": {"claimName": "nowhere"}}),
    ),
    (
        "references",
        lambda c: c.named("TriggerAuthentication", "slipway-scaler")["spec"]["secretTargetRef"][0].update(key="ca"),
    ),
    ("secrets_by_reference", lambda c: c.objects.append({"kind": "Secret", "metadata": {"name": "s"}})),
    ("secrets_by_reference", lambda c: container(c)["env"].append({"name": "SLIPWAY_TOKEN", "value": "abc"})),
    ("secrets_by_reference", lambda c: container(c)["env"].append(from_secret("PGUSER", "slipway-state", "user"))),
    ("secrets_by_reference", lambda c: settings(c).update(SLIPWAY_STATE="postgresql://a:b@c/d")),
    ("secrets_by_reference", lambda c: container(c, COORDINATOR)["args"].append("--state=postgresql://a:b@c/d")),
    ("mounts", lambda c: pod(c)["volumes"].pop()),
    ("mounts", lambda c: container(c)["env"].append({"name": "AWS_SHARED_CREDENTIALS_FILE", "value": "/s3/keys"})),
    ("mounts", lambda c: container(c)["env"].append({"name": "SLIPWAY_HOME", "value": "/var/slipway"})),
    ("mounts", lambda c: container(c)["env"].append({"name": "SLIPWAY_TLS_CA_FILE", "value": "/tls/ca.pem"})),
    ("flags", lambda c: container(c)["args"].append("--stages=merge")),
    ("flags", lambda c: argument(c, "--slots=1", "--slots=one")),
    ("flags", lambda c: cleaner(c)["args"].append("--older=30d")),
    ("flags", lambda c: cleaner(c)["args"].__setitem__(1, "collect")),
    ("flags", lambda c: argument(c, "--stage=combine,merge", "--stage=combine,mergee")),
    ("flags", lambda c: container(c, COORDINATOR)["env"].pop()),
    ("flags", lambda c: container(c, COORDINATOR)["args"].__setitem__(0, "run")),
    ("flags", lambda c: container(c).update(env=container(c)["env"][:3])),
    ("environment", lambda c: container(c)["env"].append({"name": "SLIPWAY_HOMME", "value": "x"})),
    ("environment", lambda c: settings(c).update(AWS_ENDPOINT="x")),
    ("ports", lambda c: argument(c, "--listen=0.0.0.0:7070", "--listen=0.0.0.0:7077")),
    ("ports", lambda c: argument(c, "--metrics=0.0.0.0:9464", "--metrics=0.0.0.0:9090")),
    (
        "ports",
        lambda c: argument(c, "--coordinator=slipway-coordinator:7070", "--coordinator=slipway-coordinator:7071"),
    ),
    ("ports", lambda c: argument(c, "--coordinator=slipway-coordinator:7070", "--coordinator=coordinator:7070")),
    ("ports", lambda c: argument(c, "--token-listen=0.0.0.0:7072", "--token-listen=0.0.0.0:7073", name=COORDINATOR)),
    ("ports", lambda c: c.named("Service", "slipway-clients")["spec"]["ports"][0].update(port=443)),
    ("ports", lambda c: c.named("Certificate", COORDINATOR)["spec"]["dnsNames"].remove("slipway-clients.slipway.svc")),
    ("ports", lambda c: c.named("Service", COORDINATOR)["spec"]["ports"][0].update(targetPort="http")),
    ("ports", lambda c: c.named("Service", COORDINATOR)["spec"]["selector"].update(nobody="here")),
    ("ports", lambda c: trigger(c)["metadata"].update(scalerAddress="slipway-coordinator.default.svc:7070")),
    ("ports", lambda c: c.named("Certificate", COORDINATOR)["spec"].update(dnsNames=["slipway-coordinator"])),
    ("access", lambda c: c.named("Certificate", "slipway-worker")["spec"].update(dnsNames=["workers.slipway"])),
    ("access", lambda c: c.named("Certificate", "slipway-keda")["spec"].update(usages=["server auth"])),
    ("access", lambda c: access_file(c).update({"access.yaml": OTHERS})),
    ("access", lambda c: c.named("ConfigMap", "slipway-access")["metadata"].update(name="slipway-access-k5h9t")),
    ("scaling", lambda c: remove(c, "ScaledObject", "slipway-merge")),
    ("scaling", lambda c: trigger(c)["metadata"].update(stage="quantize")),
    ("scaling", lambda c: trigger(c)["metadata"].update(stage="merge")),
    ("scaling", by_a_trigger_for_each_stage),
    ("scaling", lambda c: trigger(c)["metadata"].update(gpuArchitecture="sm89")),
    ("scaling", lambda c: trigger(c)["metadata"].pop("gpuArchitecture")),
    ("scaling", lambda c: trigger(c, "slipway-tensorrt-build")["metadata"].update(gpuArchitecture="none")),
    ("scaling", lambda c: trigger(c, "slipway-validate")["metadata"].update(gpuArchitecture="sm90")),
    ("scaling", lambda c: pod(c, "slipway-validate").pop("tolerations")),
    ("scaling", lambda c: pod(c, "slipway-validate").pop("nodeSelector")),
    ("scaling", lambda c: deployment(c)["spec"].update(replicas=1)),
    ("scaling", lambda c: c.named("ScaledObject", "slipway-merge")["spec"].update(minReplicaCount=1)),
    ("disruptions", lambda c: remove(c, "PodDisruptionBudget", "slipway-merge")),
    ("disruptions", lambda c: c.named("PodDisruptionBudget", "slipway-merge")["spec"].update(maxUnavailable=0)),
    (
        "disruptions",
        lambda c: c.named("PodDisruptionBudget", "slipway-merge")["spec"]["selector"]["matchLabels"].pop(
            "slipway.dev/stage"
        ),
    ),
    ("disruptions", lambda c: pod(c).update(terminationGracePeriodSeconds=30)),
    ("disruptions", lambda c: pod(c, COORDINATOR).pop("topologySpreadConstraints")),
    ("rollouts", lambda c: deployment(c)["spec"].pop("progressDeadlineSeconds")),
    ("scratch", lambda c: container(c)["env"].append({"name": "SLIPWAY_CACHE_SIZE", "value": "33GiB"})),
    ("scratch", lambda c: container(c).update(env=container(c)["env"][:3])),
    ("state", lambda c: deployment(c, COORDINATOR)["spec"].update(replicas=1)),
    ("state", lambda c: deployment(c, COORDINATOR)["spec"].update(replicas=3)),
    ("state", lambda c: remove(c, "Job", "slipway-migrate")),
    ("state", lambda c: deployment(c, COORDINATOR)["spec"]["strategy"].pop("rollingUpdate")),
    ("state", lambda c: deployment(c, COORDINATOR)["spec"]["strategy"]["rollingUpdate"].update(maxUnavailable=1)),
    ("state", lambda c: container(c, COORDINATOR)["args"].remove("--advertise=$(POD_IP):7070")),
    ("state", lambda c: argument(c, "--advertise=$(POD_IP):7070", f"--advertise={COORDINATOR}:7070", name=COORDINATOR)),
    ("edges", lambda c: remove(c, "NetworkPolicy", "standby")),
    ("disruptions", lambda c: remove(c, "PodDisruptionBudget", COORDINATOR)),
    ("selectors", lambda c: deployment(c)["spec"]["selector"]["matchLabels"].pop("slipway.dev/stage")),
    ("selectors", lambda c: deployment(c)["metadata"].pop("namespace")),
    ("custom_resources", lambda c: c.named("Certificate", "slipway-keda")["spec"].update(dnsName="keda.slipway")),
    ("custom_resources", lambda c: c.named("Certificate", "slipway-keda")["spec"].pop("issuerRef")),
    ("custom_resources", lambda c: c.named("Certificate", "slipway-keda")["spec"].update(renewBefore="2000h")),
    ("custom_resources", lambda c: c.named("Certificate", "slipway-keda")["spec"].update(usages=[])),
    ("custom_resources", lambda c: c.named("ScaledObject", "slipway-merge").update(apiVersion="keda.sh/v1")),
    ("custom_resources", lambda c: trigger(c).pop("authenticationRef")),
    ("custom_resources", lambda c: trigger(c)["metadata"].update(target=1)),
    ("engine", lambda c: container(c, COORDINATOR)["args"].append("--engine=kubernetes")),
    ("engine", lambda c: c.objects.append({"kind": "ClusterRole", "metadata": {"name": "any"}, "rules": []})),
]


IN_JOBS: list[Callable[[Cluster], object]] = [
    lambda c: deployment(c)["spec"].pop("replicas"),
    lambda c: c.named("Role", COORDINATOR)["rules"][1]["verbs"].append("delete"),
    lambda c: c.named("Role", COORDINATOR)["rules"][0]["verbs"].remove("watch"),
    lambda c: c.named("Role", COORDINATOR)["rules"].append({"resources": ["secrets"], "verbs": ["get"]}),
    lambda c: c.named("RoleBinding", COORDINATOR)["subjects"].append(
        {"kind": "ServiceAccount", "name": "slipway-merge"}
    ),
    lambda c: pod(c, COORDINATOR)["volumes"].pop(),
    lambda c: argument(c, "--engine=kubernetes", "--engine=pull", name=COORDINATOR),
]


@pytest.mark.parametrize("number", range(len(IN_JOBS)))
def test_an_engine_has_its_rights_and_no_others(number: int) -> None:
    cluster = Cluster(rendered("jobs"))
    IN_JOBS[number](cluster)
    assert list(RULES["engine"](cluster))


@pytest.mark.parametrize("rule", RULES)
def test_the_rule_notices(rule: str) -> None:
    breaks = [break_it for name, break_it in BREAKS if name == rule]
    assert breaks
    for number, break_it in enumerate(breaks):
        cluster = Cluster(rendered("gpu"))
        break_it(cluster)
        assert list(RULES[rule](cluster)), f"number {number} of its breaks, in line {break_it.__code__.co_firstlineno}"


def test_every_break_is_of_a_rule() -> None:
    assert {rule for rule, _ in BREAKS} <= set(RULES)


def test_a_file_of_state_is_replaced_only_after_its_coordinator_ended() -> None:
    cluster = Cluster(rendered("single-node"))
    deployment(cluster, COORDINATOR)["spec"]["strategy"] = {"type": "RollingUpdate"}
    assert list(RULES["state"](cluster))


def test_every_process_on_one_node_has_the_same_store() -> None:
    cluster = Cluster(rendered("single-node"))
    assert list(RULES["one_store"](cluster)) == []
    container(cluster, COORDINATOR)["env"][1]["value"] = "/tmp/home"
    assert list(RULES["one_store"](cluster))
