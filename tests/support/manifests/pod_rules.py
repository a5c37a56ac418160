"""Rules about pods and the programs in them: each yields one sentence per violation."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator
from functools import cache

from slipway.registry import IMPORT, plays
from slipway.stage import Role
from support.manifests.overlay import (
    CERTIFICATE_KEYS,
    EXTERNAL_SECRETS,
    NAMESPACE,
    ROOT,
    Cluster,
    Workload,
    port_of,
    stages_of,
)

Rule = Callable[[Cluster], Iterator[str]]


def restricted_pods(cluster: Cluster) -> Iterator[str]:
    for namespace in cluster.of("Namespace"):
        if namespace["metadata"]["labels"].get("pod-security.kubernetes.io/enforce") != "restricted":
            yield f"namespace {namespace['metadata']['name']} does not enforce restricted pods"
    if cluster.names("Namespace") != {NAMESPACE}:
        yield f"namespaces are {cluster.names('Namespace')}"
    for one in cluster.workloads():
        pod, own = one.pod.get("securityContext", {}), one.container.get("securityContext", {})
        good = {
            "runs as root": pod.get("runAsNonRoot") is True and pod.get("runAsUser", 0) > 0 and "runAsUser" not in own,
            "has no seccomp profile": pod.get("seccompProfile") == {"type": "RuntimeDefault"},
            "may gain privileges": own.get("allowPrivilegeEscalation") is False and not own.get("privileged"),
            "keeps capabilities": own.get("capabilities") == {"drop": ["ALL"]},
            "writes to its image": own.get("readOnlyRootFilesystem") is True,
            "shares the host": not any(one.pod.get(key) for key in ("hostNetwork", "hostPID", "hostIPC")),
            "has a volume that restricted pods may not have": all(
                set(volume) - {"name"}
                <= {"emptyDir", "configMap", "secret", "ephemeral", "persistentVolumeClaim", "projected"}
                for volume in one.pod.get("volumes", ())
            ),
            "has nowhere to write": any(mount["mountPath"] == "/tmp" for mount in one.container["volumeMounts"]),
            "has other containers": not one.pod.get("initContainers"),
        }
        yield from (f"{one.name} {problem}" for problem, fine in good.items() if not fine)


def images(cluster: Cluster) -> Iterator[str]:
    """Check that deploy/build.sh makes the images, that tags name their version, and that they contain their pod's stage."""
    for one in cluster.workloads():
        image = one.container["image"]
        if image not in built_images():
            yield f"{one.name}: {image} is not one of {', '.join(sorted(built_images()))}"
        elif one.program == "worker":
            lacking = [stage for stage in stages_of(one) if _extras_of_stages().get(stage) not in built_images()[image]]
            yield from (f"{one.name}: image {image} does not have the stage {stage}" for stage in lacking)
        if one.program == "coordinator" and getattr(one.arguments(), "engine", "") not in {
            "",
            *built_images().get(image, ()),
        }:
            yield f"{one.name}: {image} does not have the engine"
        if one.environment.get("SLIPWAY_STORE", "").startswith("s3://") and "s3" not in built_images().get(image, ""):
            yield f"{one.name}: {image} cannot reach the store"


@cache
def built_images() -> dict[str, tuple[str, ...]]:
    """Return the images that can be built, each with its installed extras."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    rows = re.findall(
        r"^    \[([a-z-]+)\]=\"(cpu|cuda) (.*)\"$", (ROOT / "deploy" / "build.sh").read_text(), re.MULTILINE
    )
    return {
        f"slipway-{name.removesuffix('-cuda')}:{version}{'-cuda' * (base == 'cuda')}": tuple(
            extras.replace("-", "_").split(",")
        )
        for name, base, extras in rows
    }


def every_stage(cluster: Cluster) -> Iterator[str]:
    served = {stage for one in cluster.workers() for stage in stages_of(one)}
    planned = {stage for stage in _services_by_stage() if not plays(stage, Role.CONVERSION, Role.ANSWERING)}
    yield from (f"no worker runs the stage {stage}" for stage in sorted(planned - served))


def resources(cluster: Cluster) -> Iterator[str]:
    for one in cluster.workloads():
        given = one.container.get("resources", {})
        for kind in ("cpu", "memory", "ephemeral-storage"):
            request, limit = (given.get(side, {}).get(kind) for side in ("requests", "limits"))
            if request is None or limit is None:
                yield f"{one.name}: no request or no limit of {kind}"
            elif quantity(request) > quantity(limit):
                yield f"{one.name}: more {kind} requested than allowed"
        for volume in one.pod.get("volumes", ()):
            if "emptyDir" in volume and "sizeLimit" not in volume["emptyDir"]:
                yield f"{one.name}: volume {volume['name']} has no limit"


def probes(cluster: Cluster) -> Iterator[str]:
    for one in cluster.workloads():
        if one.kind != "Deployment":
            continue
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            probe = one.container.get(kind)
            if probe is None:
                yield f"{one.name} has no {kind}"
                continue
            port = probe["grpc"]["port"] if "grpc" in probe else probe.get("tcpSocket", {}).get("port")
            arguments = one.arguments()
            plain = port_of(arguments.health_listen or arguments.listen)
            if one.ports.get(port, port) != plain:
                yield f"{one.name}: {kind} asks port {port}, health is answered on {plain}"
        ready = one.container.get("readinessProbe", {}).get("grpc", {}).get("service")
        if ready not in _services(one.program):
            yield f"{one.name}: readinessProbe asks for {ready}, which its program does not serve"


def service_accounts(cluster: Cluster) -> Iterator[str]:
    used: list[str] = []
    for one in cluster.workloads():
        account = one.pod.get("serviceAccountName", "default")
        used.append(account)
        if one.pod.get("automountServiceAccountToken") is not False:
            yield f"{one.name} mounts a token"
        if account not in cluster.names("ServiceAccount"):
            yield f"{one.name}: there is no ServiceAccount {account}"
    for account in cluster.of("ServiceAccount"):
        name = account["metadata"]["name"]
        if account.get("automountServiceAccountToken") is not False:
            yield f"ServiceAccount {name} mounts its token"
        if used.count(name) != 1:
            yield f"ServiceAccount {name} is used by {used.count(name)} workloads"


def mounts(cluster: Cluster) -> Iterator[str]:
    """Check that every volume is mounted and contains every file or folder that a variable names."""
    for one in cluster.workloads():
        volumes = {volume["name"] for volume in one.pod.get("volumes", ())}
        mounted = {mount["name"]: mount["mountPath"] for mount in one.container.get("volumeMounts", ())}
        if volumes != set(mounted):
            yield f"{one.name}: volumes {sorted(volumes)}, mounts {sorted(mounted)}"
        for name, value in one.environment.items():
            inside = [path for path in mounted.values() if value == path or value.startswith(path + "/")]
            if value.startswith("/") and not inside:
                yield f"{one.name}: {name} is {value}, which nobody can write or read"
        yield from _mounted_files(cluster, one, mounted)


def _mounted_files(cluster: Cluster, one: Workload, mounted: dict[str, str]) -> Iterator[str]:
    for volume in one.pod.get("volumes", ()):
        if "secret" in volume:
            keys = EXTERNAL_SECRETS.get(volume["secret"]["secretName"], CERTIFICATE_KEYS)
        elif "configMap" in volume and volume["configMap"]["name"] in cluster.names("ConfigMap"):
            keys = set(cluster.named("ConfigMap", volume["configMap"]["name"])["data"])
        else:
            continue
        folder = mounted.get(volume["name"], "")
        named = {value for name, value in one.environment.items() if value.startswith(f"{folder}/")}
        if not named or named - {f"{folder}/{key}" for key in keys}:
            yield f"{one.name}: of volume {volume['name']} the files {sorted(named)} are used, there are {sorted(keys)}"


def flags(cluster: Cluster) -> Iterator[str]:
    """Check that every program accepts its arguments, with the program's own parser."""
    for one in cluster.workloads():
        try:
            arguments = one.arguments()
        except SystemExit:
            yield f"{one.name}: {one.program} does not take {one.container['args']}"
            continue
        if one.program == "worker":
            if not set(stages_of(one)) <= _extras_of_stages().keys():
                yield f"{one.name}: there is no stage {arguments.stage}"
        elif arguments.command == "serve" and not (
            arguments.allow_anonymous or "SLIPWAY_ACCESS_FILE" in one.environment
        ):
            yield f"{one.name} lets nobody in"
        if getattr(arguments, "health_listen", "") and "SLIPWAY_TLS_CERT_FILE" not in one.environment:
            yield f"{one.name}: a port for health checks is refused without TLS"


def environment(cluster: Cluster) -> Iterator[str]:
    """Check that every variable is read by a program or used in an argument."""
    for one in cluster.workloads():
        in_arguments = set(re.findall(r"\$\((\w+)\)", " ".join(one.container.get("args", ()))))
        unknown = set(one.environment) - known_variables() - in_arguments
        yield from (f"{one.name}: nothing reads {name}" for name in sorted(unknown))


def disruptions(cluster: Cluster) -> Iterator[str]:
    """Check that workers end one at a time with enough time, and that nothing blocks a drain for ever."""
    protected: list[str] = []
    for budget in cluster.of("PodDisruptionBudget"):
        selected = [one.name for one in cluster.selected(budget["spec"]["selector"])]
        protected += selected
        name = budget["metadata"]["name"]
        if len(selected) != 1:
            yield f"budget {name} is for {selected}"
        if budget["spec"].get("maxUnavailable", 0) == 0 or "minAvailable" in budget["spec"]:
            yield f"budget {name} can stop a drain for ever"
    coordinators = [one for one in cluster.workloads() if one.program == "coordinator"]
    has_engine = any(getattr(one.arguments(), "engine", "") for one in coordinators)
    for one in cluster.workloads():
        if one.program == "worker":
            # A budget would count the pods of an engine's Jobs, which no budget can, and stop every drain.
            if (one.name in protected) == has_engine:
                yield f"{one.name} has no budget, or one beside an engine"
            if one.pod["terminationGracePeriodSeconds"] < one.arguments().drain_seconds + 20:
                yield f"{one.name} is killed before it has drained"
        replicas = one.object["spec"].get("replicas", 1)
        if one.program == "coordinator" and one.kind == "Deployment" and (replicas > 1) != (one.name in protected):
            yield f"{one.name}: a budget is for several pods, of which one may go"
        if replicas > 1 and not one.pod.get("topologySpreadConstraints"):
            yield f"{one.name}: its pods may all be on one node"


def rollouts(cluster: Cluster) -> Iterator[str]:
    """Check that a rollout waits long enough for a new worker that needs its predecessor's room."""
    for one in cluster.workers():
        deadline = one.object["spec"].get("progressDeadlineSeconds", 600)
        if deadline < one.pod["terminationGracePeriodSeconds"] + 600:
            yield f"{one.name}: a rollout has failed after {deadline} s, while its old pod still drains"


def scratch(cluster: Cluster) -> Iterator[str]:
    """Check that a worker's cache of the bucket leaves half of its volume to the running task."""
    for one in cluster.workers():
        claims = [volume["ephemeral"]["volumeClaimTemplate"] for volume in one.pod["volumes"] if "ephemeral" in volume]
        for claim in claims:
            room = quantity(claim["spec"]["resources"]["requests"]["storage"])
            kept = one.environment.get("SLIPWAY_CACHE_SIZE", "50GB").removesuffix("B")
            if not 0 < quantity(kept) <= room / 2:
                yield f"{one.name} keeps {kept}B on a volume of {room / 2**30:g} GiB"


def quantity(value: str | int) -> float:
    """Convert a Kubernetes quantity to a number."""
    found = re.fullmatch(r"(\d+)(m|Ki|Mi|Gi|Ti|G)?", str(value))
    assert found is not None, value
    scale = {"m": 1e-3, None: 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "G": 1e9}
    return int(found[1]) * scale[found[2]]


@cache
def _services_by_stage() -> dict[str, str]:
    """Return the service of each stage, from which its image is built; a service may have several stages."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["slipway.stages"]
    return {stage: target.partition(".")[0].removeprefix("slipway_") for stage, target in points.items()}


def _extras_of_stages() -> dict[str, str]:
    """Return the extra that each stage needs; services that read buckets import the sources."""
    return {**_services_by_stage(), IMPORT: "s3"}


def _services(program: str) -> tuple[str, ...]:
    if program == "worker":
        from slipway.worker.main import SERVICE

        return (SERVICE,)
    from slipway_coordinator.server import SERVICES

    return SERVICES


@cache
def known_variables() -> frozenset[str]:
    """Return every variable that the sources name, and those that libraries read."""
    from slipway.settings.security import Security

    sources = [path for folder in ("shared", "services") for path in (ROOT / folder).rglob("*.py")]
    words = {word for path in sources for word in re.findall(r"\b[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+\b", path.read_text())}
    return frozenset({"HOME", "PGSERVICEFILE", *(f"SLIPWAY_{name.upper()}" for name in Security.model_fields), *words})


RULES: tuple[Rule, ...] = (
    restricted_pods,
    images,
    every_stage,
    resources,
    probes,
    service_accounts,
    mounts,
    flags,
    environment,
    disruptions,
    rollouts,
    scratch,
)
