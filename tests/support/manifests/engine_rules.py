"""Rules about a coordinator whose engine makes Jobs: each yields one sentence per violation."""

from __future__ import annotations

from collections.abc import Iterator

from support.manifests.overlay import Cluster


def engine(cluster: Cluster) -> Iterator[str]:
    """Check that only a coordinator with the engine kubernetes has rights, which are for Jobs, and that no worker stands beside it."""
    (coordinator,) = (one for one in cluster.workloads() if one.name == "slipway-coordinator")
    used = coordinator.arguments().engine == "kubernetes"
    granted = {
        f"{resource} {verb}"
        for role in cluster.of("Role")
        for rule in role["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    wanted = {*(f"jobs {verb}" for verb in ("create", "delete", "get", "list", "watch"))}
    wanted |= {"pods list", "pods watch", "deployments list"}
    if granted != (wanted if used else set()):
        yield f"rights are {sorted(granted)}"
    if cluster.of("ClusterRole") or cluster.of("ClusterRoleBinding"):
        yield "there are rights for the whole cluster"
    for binding in cluster.of("RoleBinding"):
        subjects = [(one["kind"], one["name"]) for one in binding["subjects"]]
        if subjects != [("ServiceAccount", coordinator.pod["serviceAccountName"])]:
            yield f"{subjects} have the rights"
        if binding["roleRef"]["name"] not in cluster.names("Role"):
            yield f"there is no Role {binding['roleRef']['name']}"
    tokens = [
        one.name for one in cluster.workloads() if any("projected" in each for each in one.pod.get("volumes", ()))
    ]
    if tokens != [coordinator.name] * used:
        yield f"{tokens} have a token of the API server"
    if used and any(one.object["spec"].get("replicas") != 0 for one in cluster.workers()):
        yield "workers stand beside the engine, and get nothing"
