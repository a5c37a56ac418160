"""Rules about the relations of objects: network, references, scaling and trust."""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from slipway.registry import IMPORT
from slipway.requirements import NO_GPU
from support.manifests.engine_rules import engine
from support.manifests.overlay import (
    CERTIFICATE_KEYS,
    EXTERNAL_SECRETS,
    NAMESPACE,
    Cluster,
    Object,
    Workload,
    data_of,
    host_of,
    matches,
    place_of,
    port_of,
    stages_of,
    walk,
)

Rule = Callable[[Cluster], Iterator[str]]

REFERENCES = {
    "configMapRef": "ConfigMap",
    "configMap": "ConfigMap",
    "claimName": "PersistentVolumeClaim",
    "priorityClassName": "PriorityClass",
    "issuerRef": "Issuer",
    "scaleTargetRef": "Deployment",
    "authenticationRef": "TriggerAuthentication",
}

EVERY_NAMESPACE_HAS = "kube-root-ca.crt"
"""The ConfigMap with the authority of the API server."""
API_SERVER_PORTS = (443, 6443)
CREDENTIAL_AGENTS = ("169.254.170.23/32", "fd00:ec2::23/128")
"""Addresses at which EKS's Pod Identity gives credentials to nodes with IPv4 and with IPv6."""


def default_deny(cluster: Cluster) -> Iterator[str]:
    for policy in cluster.of("NetworkPolicy"):
        spec = policy["spec"]
        if spec["podSelector"] == {} and set(spec["policyTypes"]) == {"Ingress", "Egress"}:
            if spec.get("ingress") or spec.get("egress"):
                yield "default-deny lets something through"
            return
    yield "nothing denies by default"


def edges(cluster: Cluster) -> Iterator[str]:
    """Check that every pod may reach, and be reached at, exactly the ports that it uses."""
    for one in cluster.workloads():
        allowed, needed = _allowed(cluster, one), _needed(cluster, one)
        yield from (f"{one.name}: {edge} is allowed, and nothing uses it" for edge in sorted(allowed - needed))
        yield from (f"{one.name}: {edge} is needed, and not allowed" for edge in sorted(needed - allowed))
        if _calls(one) and not _let_in(cluster, one):
            yield f"{one.name} calls the coordinator, which lets in others only"
    for policy in cluster.of("NetworkPolicy"):
        name = policy["metadata"]["name"]
        if not cluster.selected(policy["spec"]["podSelector"]):
            yield f"policy {name} is for no pod"
        for rule in [*policy["spec"].get("ingress", ()), *policy["spec"].get("egress", ())]:
            if not rule.get("ports") or not (rule.get("from") or rule.get("to")):
                yield f"policy {name} has a rule for every port or every peer"


def _needed(cluster: Cluster, one: Workload) -> set[str]:
    needed = {"to kube-system/kube-dns 53"}
    environment, arguments = one.environment, one.arguments()
    if environment.get("SLIPWAY_STATE", "").startswith("postgresql:"):
        needed.add(f"to {cluster.database}")
    if one.kind == "Job":
        return needed
    if _calls(one):
        needed.add(f"to coordinator {port_of(arguments.coordinator)}")
    else:
        needed |= _needed_by_callers(cluster, one)
    if environment.get("SLIPWAY_STORE", "").startswith("s3://"):
        needed.add(f"to {place_of(environment.get('AWS_ENDPOINT_URL_S3', 'https://s3.amazonaws.com'))}")
        if "AWS_SHARED_CREDENTIALS_FILE" not in environment:
            needed |= {f"to {agent} 80" for agent in CREDENTIAL_AGENTS}
    if one.program == "worker" and IMPORT in stages_of(one):
        needed.add("to outside 443")
    if environment.get("SLIPWAY_TRACING") == "otlp" and arguments.listen:
        needed.add(f"to {place_of(environment['OTEL_EXPORTER_OTLP_ENDPOINT'])}")
    if arguments.metrics:
        needed.add(f"from monitoring {port_of(arguments.metrics)}")
    return needed


def _needed_by_callers(cluster: Cluster, one: Workload) -> set[str]:
    """Return the peers that must reach a coordinator, also through a standby: at its main port, and those for tokens and HTTP."""
    arguments = one.arguments()
    addresses = (arguments.listen, arguments.token_listen, arguments.http)
    main, *more = (port_of(address) for address in addresses if address)
    needed = {f"from worker {main}", *(f"from client {port}" for port in (main, *more))}
    if one.object["spec"]["replicas"] > 1:
        needed |= {f"{way} coordinator {port}" for way in ("from", "to") for port in (main, *more)}
    if arguments.engine == "kubernetes":
        needed |= {f"to outside {port}" for port in API_SERVER_PORTS}
    if cluster.of("ScaledObject"):
        needed.add(f"from keda/keda-operator {main}")
    return needed


def _allowed(cluster: Cluster, one: Workload) -> set[str]:
    found = set()
    for policy in cluster.of("NetworkPolicy"):
        spec = policy["spec"]
        if not matches(spec["podSelector"], one.labels):
            continue
        for way, rules, side in (("from", "ingress", "from"), ("to", "egress", "to")):
            for rule in spec.get(rules, ()):
                for peer in rule.get(side, [{}]):
                    found |= {f"{way} {_peer(peer)} {port['port']}" for port in rule.get("ports", [{"port": "*"}])}
    return found


def _calls(one: Workload) -> bool:
    """Return whether it calls the coordinator."""
    return bool(getattr(one.arguments(), "coordinator", ""))


def _let_in(cluster: Cluster, one: Workload) -> bool:
    """Return whether the coordinator admits its pods."""
    (coordinator,) = (other for other in cluster.workloads() if other.name == "slipway-coordinator")
    policies = [p["spec"] for p in cluster.of("NetworkPolicy") if matches(p["spec"]["podSelector"], coordinator.labels)]
    peers = [peer for spec in policies for rule in spec.get("ingress", ()) for peer in rule["from"]]
    near = [peer for peer in peers if "podSelector" in peer and not peer.get("namespaceSelector")]
    return any(matches(peer["podSelector"], one.labels) for peer in near)


def _peer(peer: Object) -> str:
    """Return ``NAMESPACE/APPLICATION``, the component of this namespace, a single address, or ``outside``."""
    if "ipBlock" in peer:
        cidr = str(peer["ipBlock"]["cidr"])
        return cidr if cidr.endswith(("/32", "/128")) else "outside"
    pods = peer.get("podSelector", {}).get("matchLabels", {})
    if pods.get("slipway.dev/client") == "true":
        return "client"
    if "namespaceSelector" not in peer:
        return str(pods.get("app.kubernetes.io/component", "*"))
    namespace = peer["namespaceSelector"].get("matchLabels", {}).get("kubernetes.io/metadata.name", "*")
    return "/".join([namespace, *pods.values()])


def references(cluster: Cluster) -> Iterator[str]:
    """Check that every object referred to by name exists, or is provided from outside as documented."""
    made = {one["spec"]["secretName"]: CERTIFICATE_KEYS for one in cluster.of("Certificate")}
    secrets = {**made, **EXTERNAL_SECRETS}
    for one in cluster.objects:
        where = f"{one['kind']} {one['metadata']['name']}"
        for inner in walk(one.get("spec", {})):
            for name, key in _secret_keys(inner):
                if name not in secrets or key not in {"", *secrets[name]}:
                    yield f"{where}: no Secret {name} {key}"
            for key, kind in REFERENCES.items():
                wanted = inner.get(key)
                wanted = wanted["name"] if isinstance(wanted, dict) else wanted
                if wanted and wanted not in {*cluster.names(kind), EVERY_NAMESPACE_HAS}:
                    yield f"{where}: no {kind} {wanted}"


def _secret_keys(inner: Object) -> list[tuple[str, str]]:
    """Yield the Secrets that a mapping names, with the key if it names one."""
    references = [inner["secretKeyRef"]] if "secretKeyRef" in inner else inner.get("secretTargetRef", [])
    whole = [(inner["secretName"], "")] if "secretName" in inner else []
    return [*whole, *((reference["name"], reference["key"]) for reference in references)]


def secrets_by_reference(cluster: Cluster) -> Iterator[str]:
    yield from (f"Secret {name} is written out" for name in sorted(cluster.names("Secret")))
    telling = re.compile(r"(SECRET|PASSWORD|TOKEN|ACCESS_KEY|CREDENTIAL)", re.IGNORECASE)
    for one in cluster.workloads():
        for name, value in one.environment.items():
            if value.startswith("secret:"):
                yield f"{one.name}: a new value of {name} needs a restart; mount {value} as a file"
            elif telling.search(name) and not name.endswith("_FILE"):
                yield f"{one.name}: {name} is written out"
            if re.search(r"://[^/@]*:[^/@]*@", value):
                yield f"{one.name}: {name} has a password in it"
        named = re.compile(r"--[a-z-]+-(file|listen)=")  # what a file or an address is for
        given = [argument for argument in one.container.get("args", ()) if not named.match(argument)]
        if any("://" in argument or telling.search(argument) for argument in given):
            yield f"{one.name}: ps would show a secret"


def ports(cluster: Cluster) -> Iterator[str]:
    for one in cluster.workloads():
        arguments = one.arguments()
        listening = {port_of(address) for address in _listened(arguments) if one.kind == "Deployment"}
        if set(one.ports.values()) != listening:
            yield f"{one.name} declares {sorted(one.ports.values())} and listens on {sorted(listening)}"
        scrape = one.template["metadata"].get("annotations", {}).get("prometheus.io/port")
        if (scrape or "") != arguments.metrics.rpartition(":")[2]:
            yield f"{one.name}: Prometheus is sent to {scrape}"
    addresses = {one.arguments().coordinator for one in cluster.workloads() if _calls(one)}
    addresses |= {trigger["metadata"]["scalerAddress"] for trigger in _triggers(cluster)}
    addresses |= {
        f"{service['metadata']['name']}.{NAMESPACE}.svc:{port['port']}"
        for service in cluster.of("Service")
        for port in service["spec"]["ports"]
    }
    certified = {name for one in cluster.of("Certificate") for name in one["spec"].get("dnsNames", ())}
    for address in sorted(addresses):
        host, _, domain = host_of(address).partition(".")
        services = [one for one in cluster.of("Service") if one["metadata"]["name"] == host]
        if domain not in {"", f"{NAMESPACE}.svc"} or port_of(address) not in _service_ports(cluster, services):
            yield f"no service answers at {address}"
        if certified and host_of(address) not in certified:
            yield f"no certificate is for {host_of(address)}"


_LISTENING = ("listen", "metrics", "health_listen", "token_listen", "http")


def _listened(arguments: argparse.Namespace) -> list[str]:
    """Return the addresses at which a program listens."""
    named = [getattr(arguments, name, "") for name in _LISTENING]
    return [address for address in named if address]


def _service_ports(cluster: Cluster, services: list[Object]) -> set[int]:
    """Return the ports on which a pod listens."""
    found = set()
    for service in services:
        selected = cluster.selected({"matchLabels": service["spec"]["selector"]})
        found |= {
            port["port"]
            for port in service["spec"]["ports"]
            if selected and all(one.ports.get(port["targetPort"]) == port["port"] for one in selected)
        }
    return found


def access(cluster: Cluster) -> Iterator[str]:
    """Check that names in the access file are those of client certificates; with an authority, every client has one."""
    from slipway.security.access.access_file import load_access

    clients = {
        name
        for one in cluster.of("Certificate")
        if "client auth" in one["spec"].get("usages", ())
        for name in one["spec"]["dnsNames"]
    }
    for one in cluster.of("ConfigMap"):
        if "access.yaml" not in data_of(one):
            continue
        if one["metadata"]["name"] != "slipway-access":
            yield f"{one['metadata']['name']} has another name with every change, which replaces the coordinators"
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "access.yaml"
            file.write_text(one["data"]["access.yaml"])
            named = {entry.certificate for entry in load_access(file).principals if entry.certificate}
        yield from (f"no certificate has the name {name}" for name in sorted(named - clients))
        yield from (f"nobody is let in as {name}" for name in sorted(clients - named))


def scaling(cluster: Cluster) -> Iterator[str]:
    """Check that every scaled worker is scaled by its own stages and by its GPU."""
    scaled = {one["spec"]["scaleTargetRef"]["name"]: one for one in cluster.of("ScaledObject")}
    if not scaled:
        return
    for one in cluster.workers():
        if one.name not in scaled:
            yield f"{one.name} is not scaled"
            continue
        spec = scaled[one.name]["spec"]
        triggers = [trigger["metadata"] for trigger in spec["triggers"] if trigger["type"] == "external-push"]
        if "replicas" in one.object["spec"]:
            yield f"{one.name}: every apply would set the number of replicas back"
        if spec["minReplicaCount"] != 0 or spec["maxReplicaCount"] < 1:
            yield f"{one.name} does not scale to zero and back"
        # One trigger for all stages: with several, the highest metric counts and not the sum.
        if [sorted(trigger["stage"].split(",")) for trigger in triggers] != [stages_of(one)]:
            yield f"{one.name} is scaled by {[trigger['stage'] for trigger in triggers]}"
        if {trigger.get("gpuArchitecture", "") for trigger in triggers} != {_architecture(one)}:
            yield f"{one.name} runs on {_architecture(one)}, scaled by {triggers}"


def _architecture(one: Workload) -> str:
    if not any(name.startswith("nvidia.com/") for name in one.container["resources"]["limits"]):
        return NO_GPU
    selector = one.pod.get("nodeSelector", {})
    tolerated = any(toleration["key"] == "nvidia.com/gpu" for toleration in one.pod.get("tolerations", ()))
    version = "".join(selector.get(f"nvidia.com/gpu.compute.{part}", "?") for part in ("major", "minor"))
    return f"sm{version}" if tolerated else "untolerated"


def state(cluster: Cluster) -> Iterator[str]:
    """Check that several coordinators share PostgreSQL, whose tables a Job makes, and that a single one has its own file."""
    (coordinator,) = (one for one in cluster.workloads() if one.name == "slipway-coordinator")
    place, spec = coordinator.environment["SLIPWAY_STATE"], coordinator.object["spec"]
    shared, replicas = place.startswith("postgresql:"), spec["replicas"]
    migrations = [one for one in cluster.workloads() if one.kind == "Job" and one.arguments().command == "migrate"]
    if shared != (replicas == 2) or replicas not in {1, 2}:
        yield f"{replicas} coordinators on {place}"
    if [one.environment["SLIPWAY_STATE"] for one in migrations] != [place] * shared:
        yield f"{len(migrations)} migrations for {place}"
    rolling = spec["strategy"].get("rollingUpdate", {})
    if shared and (rolling.get("maxUnavailable") != 0 or not rolling.get("maxSurge")):
        yield "a rollout ends a coordinator before another one is ready"
    pod = [name for name, value in coordinator.environment.items() if value == "field:status.podIP"]
    advertised = f"$({pod[0]}):{port_of(coordinator.arguments().listen)}" if pod else ""
    if shared and coordinator.arguments().advertise != advertised:
        yield "a standby is not led to the pod of the active coordinator, at its port"
    if not shared and spec["strategy"]["type"] != "Recreate":
        yield "two coordinators would use one file while one replaces the other"


def selectors(cluster: Cluster) -> Iterator[str]:
    """Check that selectors match their own pods and no others."""
    for one in cluster.workloads():
        if one.kind == "Deployment":
            names = [other.name for other in cluster.selected(one.object["spec"]["selector"])]
            if names != [one.name]:
                yield f"{one.name} selects {names}"
    for thing in cluster.objects:
        namespaced = thing["kind"] not in {"Namespace", "PriorityClass"}
        if namespaced and thing["metadata"].get("namespace") != NAMESPACE:
            yield f"{thing['kind']} {thing['metadata']['name']} is in no namespace"


def custom_resources(cluster: Cluster) -> Iterator[str]:
    """Check the fields of KEDA's and cert-manager's objects, whose schemas are only in a cluster."""
    fields = {
        "Certificate": (
            "cert-manager.io/v1",
            {"secretName", "issuerRef"},
            {"isCA", "commonName", "duration", "renewBefore", "privateKey", "dnsNames", "usages"},
        ),
        "Issuer": ("cert-manager.io/v1", set(), {"selfSigned", "ca"}),
        "ScaledObject": (
            "keda.sh/v1alpha1",
            {"scaleTargetRef", "triggers", "minReplicaCount", "maxReplicaCount"},
            {"pollingInterval", "cooldownPeriod", "advanced"},
        ),
        "TriggerAuthentication": ("keda.sh/v1alpha1", {"secretTargetRef"}, set()),
    }
    for kind, (version, needed, more) in fields.items():
        for one in cluster.of(kind):
            given, name = set(one["spec"]), one["metadata"]["name"]
            if one["apiVersion"] != version or needed - given or given - needed - more:
                yield f"{kind} {name} of {one['apiVersion']}: {sorted(given)}"
    for one in cluster.of("Certificate"):
        spec = one["spec"]
        if not spec.get("isCA") and not (spec.get("dnsNames") and spec.get("usages")):
            yield f"Certificate {one['metadata']['name']} is for nobody or nothing"
        if hours(spec["renewBefore"]) * 2 > hours(spec["duration"]):
            yield f"Certificate {one['metadata']['name']} is renewed all the time"
    for trigger in _triggers(cluster):
        if set(trigger) != {"type", "metadata", "authenticationRef"}:
            yield f"a trigger has {sorted(trigger)}"
        if not all(isinstance(value, str) for value in trigger["metadata"].values()):
            yield "metadata of triggers are texts"


def hours(text: str) -> int:
    return int(text.removesuffix("h"))


def _triggers(cluster: Cluster) -> list[Object]:
    return [trigger for one in cluster.of("ScaledObject") for trigger in one["spec"]["triggers"]]


RULES: tuple[Rule, ...] = (
    default_deny,
    edges,
    references,
    secrets_by_reference,
    ports,
    access,
    engine,
    scaling,
    state,
    selectors,
    custom_resources,
)
