"""What programs of others say of the manifests: the schemas of KEDA and cert-manager, and checkov with its exceptions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support.manifests.checkers import (
    EXCEPTIONS,
    checkov_complaints,
    exceptions,
    has_schema,
    needs_checkov,
    needs_schemas,
    schema_problems,
)
from support.manifests.overlay import OVERLAYS, Cluster, Object, rendered


@needs_schemas
@pytest.mark.slow
def test_custom_resources_are_as_their_schemas_have_them(tmp_path: Path) -> None:
    things = [thing for overlay in OVERLAYS for thing in rendered(overlay) if has_schema(thing)]
    kinds = {"Certificate", "Issuer", "ScaledObject", "TriggerAuthentication"}
    assert {thing["kind"] for thing in things} == kinds
    assert schema_problems(things, tmp_path) == []


def scaled(cluster: Cluster) -> Object:
    return cluster.named("ScaledObject", "slipway-merge")["spec"]


def certificate(cluster: Cluster) -> Object:
    return cluster.named("Certificate", "slipway-keda")["spec"]


BREAKS: dict[str, Callable[[Cluster], object]] = {
    "a-name-that-is-none": lambda c: scaled(c).update(maxReplicas=4),
    "deep-within": lambda c: scaled(c)["advanced"]["horizontalPodAutoscalerConfig"].update(behaviour={}),
    "a-text-for-a-number": lambda c: scaled(c).update(pollingInterval="15"),
    "nothing-to-scale": lambda c: scaled(c).pop("scaleTargetRef"),
    "metadata-of-a-trigger": lambda c: scaled(c)["triggers"][0]["metadata"].update(target=1),
    "a-usage-that-is-none": lambda c: certificate(c).update(usages=["client-auth"]),
    "no-secret": lambda c: certificate(c).pop("secretName"),
    "an-algorithm-that-is-none": lambda c: certificate(c)["privateKey"].update(algorithm="ECDH"),
}


@needs_schemas
@pytest.mark.slow
def test_the_schemas_notice(tmp_path: Path) -> None:
    """Each breakage is seen, and nothing else."""
    things, broken = [], set()
    for break_it in BREAKS.values():
        cluster = Cluster(rendered("production"))
        whole = Cluster(rendered("production"))
        break_it(cluster)
        changed = [one for one, other in zip(cluster.objects, whole.objects, strict=True) if one != other]
        (one,) = changed
        things.append(one)
    problems = schema_problems(things, tmp_path)
    for number, name in enumerate(BREAKS):
        if any(line.startswith((f"{number}: ", f"objects.ts({2 * number + 2},")) for line in problems):
            broken.add(name)
    assert broken == set(BREAKS), problems


@needs_checkov
@pytest.mark.slow
@pytest.mark.parametrize("overlay", ["gpu", "jobs", "single-node"])
def test_checkov_complains_of_the_exceptions_alone(tmp_path: Path, overlay: str) -> None:
    """And of each of them, so that none outlives its cause; of the overlay that has everything, of that with rights, and of the one without a cluster."""
    assert set(checkov_complaints(rendered(overlay), tmp_path)) == exceptions()


@needs_checkov
@pytest.mark.slow
def test_checkov_notices(tmp_path: Path) -> None:
    cluster = Cluster(rendered("production"))
    pod = cluster.named("Deployment", "slipway-merge")["spec"]["template"]["spec"]
    pod["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = True
    pod["hostNetwork"] = True
    complaints = checkov_complaints(cluster.objects, tmp_path)
    assert {check for check in complaints if check not in exceptions()} == {"CKV_K8S_19", "CKV_K8S_20"}


def test_every_exception_has_its_reason() -> None:
    lines = EXCEPTIONS.read_text().partition("skip-check:\n")[2].splitlines()
    assert exceptions()
    for number, line in enumerate(lines):
        if line.lstrip().startswith("- "):
            assert number > 0
            assert lines[number - 1].lstrip().startswith("# "), f"{line.strip()} has no reason"
