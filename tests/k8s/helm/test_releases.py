"""Several releases in one cluster, and upgrades of one: nothing is shared, and nothing is changed that cannot or need not be."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from support.manifests.chart import CHART, NEEDED, PRODUCTION, call_helm, changed, needs_helm, render_chart
from support.manifests.overlay import Cluster, Object, Workload, matches

pytestmark = needs_helm

OF_THE_CLUSTER = {"PriorityClass", "Namespace", "ClusterRole", "ClusterRoleBinding", "ClusterIssuer"}
PLACES = [
    ("slipway", "a"),
    ("slipway", "a-slipway"),
    ("slipway", "b"),
    ("models", "a"),
    ("models.two", "a"),
    ("a-slipway", "slipway"),
]
"""Releases by name and namespace, with names that would be the same if both were only joined."""


def key(thing: Object) -> tuple[str, str, str]:
    metadata = thing["metadata"]
    return thing["kind"], metadata.get("namespace", ""), metadata["name"]


def test_releases_share_no_object() -> None:
    seen: dict[tuple[str, str, str], tuple[str, str]] = {}
    for name, namespace in PLACES:
        for thing in render_chart(PRODUCTION, name=name, namespace=namespace):
            assert ("namespace" not in thing["metadata"]) == (thing["kind"] in OF_THE_CLUSTER), key(thing)
            assert key(thing) not in seen, (seen[key(thing)], (name, namespace))
            seen[key(thing)] = (name, namespace)
    shared = [kind for kind, namespace, _ in seen if not namespace]
    assert set(shared) == {"PriorityClass"}
    assert len(shared) == 2 * len(PLACES)


def test_releases_with_one_bucket_have_stores_of_their_own() -> None:
    """A cleanup asks the coordinator of its own release what is in use, and would remove what only another one knows."""
    values = changed(PRODUCTION, {"store": {"prefix": ""}})
    stores = [
        {
            one.environment["SLIPWAY_STORE"]
            for one in Cluster(render_chart(values, name=name, namespace=namespace)).workloads()
            if one.kind != "Job"
        }
        for name, namespace in PLACES
    ]
    assert [len(each) for each in stores] == [1] * len(PLACES)
    assert len(set.union(*stores)) == len(PLACES)
    assert stores[0] == {"s3://slipway/a/slipway"}


def test_a_release_needs_no_object_of_the_cluster() -> None:
    things = render_chart(changed(PRODUCTION, {"priorityClasses": {"create": False}}))
    assert {thing["kind"] for thing in things} & OF_THE_CLUSTER == set()


def test_nothing_is_of_the_namespace_slipway() -> None:
    """But names of what is slipway's by its nature: images, labels, commands, the prefix of variables."""
    for thing in render_chart(PRODUCTION, name="models", namespace="ml"):
        assert thing["metadata"].get("namespace", "ml") == "ml"
        texts = list(texts_of(thing.get("spec", {})))
        assert [text for text in texts if ".slipway" in text or "slipway.svc" in text] == [], key(thing)
    addresses = {text for text in texts if text.endswith(":7070")}
    assert addresses <= {"models-slipway-coordinator:7070", "models-slipway-coordinator.ml.svc:7070"}


def texts_of(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for inner in value.values() for text in texts_of(inner)]
    if isinstance(value, list):
        return [text for inner in value for text in texts_of(inner)]
    return [value] if isinstance(value, str) else []


def selectors(thing: Object) -> list[Object]:
    """Return the selectors by which an object takes pods of its own namespace."""
    spec = thing.get("spec", {})
    match thing["kind"]:
        case "Service":
            return [{"matchLabels": spec["selector"]}]
        case "Deployment" | "PodDisruptionBudget":
            return [spec["selector"]]
        case "NetworkPolicy":
            peers = [peer for rule in spec.get("ingress", ()) for peer in rule["from"]]
            peers += [peer for rule in spec.get("egress", ()) for peer in rule["to"]]
            near = [peer["podSelector"] for peer in peers if "podSelector" in peer and "namespaceSelector" not in peer]
            return [spec["podSelector"], *near]
        case _:
            return []


def test_two_releases_in_one_namespace_select_their_own_pods() -> None:
    mine, other = (render_chart(PRODUCTION, name=name, namespace="ml") for name in ("one", "two"))
    pods = [one.labels for one in Cluster(other).workloads()]
    assert pods
    count = 0
    for thing in mine:
        for selector in selectors(thing):
            count += 1
            assert [labels for labels in pods if matches(selector, labels)] == [], key(thing)
            assert Cluster(mine).selected(selector), f"{key(thing)} selects nothing"
    assert count > 40


def test_clients_of_two_releases_have_other_names() -> None:
    """So that one authority for both lets no worker of the one into the other."""
    names = [
        {
            name
            for one in Cluster(render_chart(PRODUCTION, name=name, namespace=namespace)).of("Certificate")
            if "client auth" in one["spec"].get("usages", ())
            for name in one["spec"]["dnsNames"]
        }
        for name, namespace in (("slipway", "a"), ("slipway", "b"), ("models", "a"))
    ]
    assert all(len(each) == 4 for each in names)
    assert len(set.union(*names)) == 12


def templates(things: list[Object]) -> dict[str, Object]:
    return {one.name: one.template for one in Cluster(things).workloads()}


UPGRADES: dict[str, tuple[Object, set[str]]] = {
    "a-setting-of-all": ({"settings": {"SLIPWAY_LOG_LEVEL": "debug"}}, {"coordinator", "workers"}),
    "a-setting-of-coordinators": ({"coordinator": {"settings": {"SLIPWAY_UPLOAD_SIZE": "1TiB"}}}, {"coordinator"}),
    "a-setting-of-workers": ({"worker": {"settings": {"CC": "gcc"}}}, {"workers"}),
    "an-address-to-import-from": ({"import": {"from": ["hf://Qwen"]}}, {"coordinator", "slipway-merge"}),
    "a-principal": ({"access": {"principals": [{"name": "ci", "role": "submitter"}]}}, set()),
    "a-bound": ({"worker": {"scale": {"max": 8}}}, set()),
    "a-size-of-one": ({"workers": {"merge": {"volume": {"size": "128Gi"}}}}, {"slipway-merge"}),
    "more-names": ({"tls": {"extraNames": ["slipway.example.org"]}}, set()),
    "a-port-for-http": ({"http": {"enabled": True}}, {"coordinator"}),
    "an-age": ({"cleanup": {"olderThanDays": 60}}, {"slipway-cleanup"}),
    "fewer-coordinators": ({"coordinator": {"replicas": 1}}, set()),
}


@pytest.mark.parametrize("upgrade", UPGRADES)
def test_an_upgrade_replaces_the_pods_that_read_what_changed(upgrade: str) -> None:
    values, expected = UPGRADES[upgrade]
    before, after = render_chart(PRODUCTION), render_chart(changed(PRODUCTION, values))
    assert before != after
    workers = {one.name for one in Cluster(before).workers()}
    groups = {"coordinator": {"slipway-coordinator"}, "workers": workers}
    replaced = {name for name, template in templates(after).items() if template != templates(before)[name]}
    assert replaced == {name for group in expected for name in groups.get(group, {group})}


def fixed(thing: Object) -> Any:
    """Return the fields of an object that the API server lets nobody change."""
    match thing["kind"]:
        case "Deployment":
            return thing["spec"]["selector"]
        case "PriorityClass":
            return thing["value"], thing.get("preemptionPolicy")
        case "Service":
            return thing["spec"].get("clusterIP")
        case "Job":
            return None  # a hook, which is made anew
        case _:
            return None


CHANGES: Object = {
    "image": {"tag": "0.2.0", "registry": "registry.example.org"},
    "coordinator": {"replicas": 3},
    "worker": {"volume": {"storageClass": "fast"}, "podLabels": {"team": "models"}},
    "workers": {"validate": {"gpu": {"resource": "nvidia.com/gpu", "count": 1, "architecture": "sm89"}}},
    "size": "70b",
    "keda": {"enabled": False},
    "metrics": {"enabled": False},
    "tls": {"issuer": {"name": "company"}},
}


def test_an_upgrade_changes_no_field_that_cannot_be_changed() -> None:
    before = {key(thing): thing for thing in render_chart(PRODUCTION)}
    after = {key(thing): thing for thing in render_chart(changed(PRODUCTION, CHANGES))}
    both = before.keys() & after.keys()
    assert len(both) > 50
    for one in both:
        assert fixed(before[one]) == fixed(after[one]), one
    kinds = {kind for kind, _, _ in after}
    assert kinds & {"StatefulSet", "PersistentVolumeClaim", "RoleBinding"} == set(), "these have more such fields"


def test_an_upgrade_keeps_the_number_of_workers_that_run(tmp_path: Path) -> None:
    """No cluster is here to be asked, so its answer stands in the template in the place of the question."""
    chart = tmp_path / "slipway"
    shutil.copytree(CHART, chart)
    template = chart / "templates" / "workers.yaml"
    question = 'lookup "apps/v1" "Deployment" $root.Release.Namespace (printf "%s-%s" $fullname $name)'
    assert question in template.read_text()
    answer = '(ternary (dict "spec" (dict "replicas" 3.0)) dict (eq $name "merge"))'
    template.write_text(template.read_text().replace(question, answer))
    values = changed(PRODUCTION, {"keda": {"startAtZero": True}})
    workers = Cluster(render_chart(values, chart=chart)).workers()
    assert {one.name: count for one in workers if (count := one.object["spec"]["replicas"])} == {"slipway-merge": 3}


def test_a_new_version_of_the_chart_alone_replaces_nothing_but_by_its_images() -> None:
    """Labels of pods and selectors have no version in them."""
    text = str(templates(render_chart(changed(NEEDED, {"image": {"tag": "1"}}))))
    assert "helm.sh/chart" not in text
    assert "app.kubernetes.io/version" not in text


def test_the_migration_is_a_hook_with_all_that_it_needs() -> None:
    things = render_chart(NEEDED)
    hooks = {thing["kind"]: thing for thing in things if "helm.sh/hook" in thing["metadata"].get("annotations", {})}
    assert set(hooks) == {"ServiceAccount", "NetworkPolicy", "Job"}
    order = {kind: int(thing["metadata"]["annotations"]["helm.sh/hook-weight"]) for kind, thing in hooks.items()}
    assert order["ServiceAccount"] < order["Job"]
    assert order["NetworkPolicy"] < order["Job"]
    for thing in hooks.values():
        annotations = thing["metadata"]["annotations"]
        assert annotations["helm.sh/hook"] == "pre-install,pre-upgrade"
        assert "before-hook-creation" in annotations["helm.sh/hook-delete-policy"]
    job = Workload(hooks["Job"], {})
    assert job.pod["serviceAccountName"] == hooks["ServiceAccount"]["metadata"]["name"]
    assert matches(hooks["NetworkPolicy"]["spec"]["podSelector"], job.labels)
    names = {thing["metadata"]["name"] for thing in things if thing["kind"] in {"ConfigMap", "PriorityClass"}}
    assert set(texts_of(hooks["Job"]["spec"])) & names == set(), "made after the hook"


def test_the_same_values_are_the_same_objects() -> None:
    """A value made at random would replace pods at every upgrade."""
    call = {"do": "render", "chart": str(CHART), "values": PRODUCTION, "name": "slipway", "namespace": "slipway"}
    first, second = call_helm([call, {**call, "is_upgrade": True, "is_install": False, "revision": 2}])
    assert first == second
