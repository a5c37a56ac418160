"""Rules about the artifact store: all pods use the same one, and a job cleans it up without removing artifacts in use."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from support.manifests.overlay import Cluster, Object, Workload, data_of

Rule = Callable[[Cluster], Iterator[str]]

_DAY_SECONDS = 86_400


def one_store(cluster: Cluster) -> Iterator[str]:
    """Check that coordinator, workers and cleanup use the same artifacts."""
    places: dict[str, list[str]] = {}
    for one in cluster.workloads():
        if one.kind != "Job":
            places.setdefault(_store(one), []).append(one.name)
    if len(places) != 1:
        yield f"there are several stores: {places}"
    yield from (f"{names} have no store that outlasts a pod" for names in [places.get("", [])] if names)


def cleanup(cluster: Cluster) -> Iterator[str]:
    """Check that one job a day removes unused artifacts, asks the coordinator which are in use, and never overlaps or hangs."""
    jobs = [one for one in cluster.workloads() if one.kind == "CronJob"]
    if len(jobs) != 1:
        yield f"{len(jobs)} jobs clean up"
        return
    (one,) = jobs
    spec, arguments = one.object["spec"], one.arguments()
    seconds = spec["jobTemplate"]["spec"].get("activeDeadlineSeconds", _DAY_SECONDS)
    good = {
        "does something else": getattr(arguments, "command", "") == "cache gc" and not arguments.dry_run,
        "does not ask the coordinator what is whose": bool(arguments.coordinator),
        "removes what was used lately": arguments.max_size is None and _days(arguments.older_than) >= 7,
        "does not run once a day": [part.isdigit() for part in spec["schedule"].split()] == [True, True, *[False] * 3],
        "may run twice at once": spec.get("concurrencyPolicy") == "Forbid",
        "may run into the next day": seconds < _DAY_SECONDS,
        "keeps the pods of all its runs": {"successfulJobsHistoryLimit", "failedJobsHistoryLimit"} <= set(spec),
        "stays suspended": not spec.get("suspend"),
        "sees only some projects": _sees_everything(cluster, one),
    }
    yield from (f"{one.name} {problem}" for problem, fine in good.items() if not fine)


def _store(one: Workload) -> str:
    """Return the bucket, or the claim and the folder in it; empty for a store that ends with the pod."""
    environment = one.environment
    if environment.get("SLIPWAY_STORE"):
        return environment["SLIPWAY_STORE"]
    claims = {volume["name"]: volume.get("persistentVolumeClaim", {}).get("claimName") for volume in one.pod["volumes"]}
    home = environment.get("SLIPWAY_HOME", "")
    for mount in one.container["volumeMounts"]:
        path, claim = mount["mountPath"], claims[mount["name"]]
        if claim and (home == path or home.startswith(f"{path}/")):
            return f"{claim}:{home.removeprefix(path)}"
    return ""


def _days(age: str | None) -> float:
    from slipway.cli.artifacts.cache_work import age as seconds

    return seconds(age) / _DAY_SECONDS if age else float("inf")


def _sees_everything(cluster: Cluster, one: Workload) -> bool:
    """Return whether the access file, if there is one, lets it read the artifacts of all projects and nothing more."""
    files = [data_of(file)["access.yaml"] for file in cluster.of("ConfigMap") if "access.yaml" in data_of(file)]
    return all(_views_all(text, _certificates(cluster, one)) for text in files)


def _views_all(text: str, names: set[str]) -> bool:
    from slipway.security.access.access_file import load_access
    from slipway.security.access.principals import ALL_PROJECTS, Role

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "access.yaml"
        file.write_text(text)
        found = [entry for entry in load_access(file).principals if entry.certificate in names]
    return [(Role(entry.role), ALL_PROJECTS in entry.projects) for entry in found] == [(Role.VIEWER, True)]


def _certificates(cluster: Cluster, one: Workload) -> set[str]:
    """Return the names in the certificates that are mounted in its pods."""
    mounted = {volume["secret"]["secretName"] for volume in one.pod["volumes"] if "secret" in volume}
    specs: list[Object] = [certificate["spec"] for certificate in cluster.of("Certificate")]
    return {name for spec in specs if spec["secretName"] in mounted for name in spec.get("dnsNames", ())}


RULES: tuple[Rule, ...] = (one_store, cleanup)
