"""Overlays of one's own, as the documents show them: each renders, is what Kubernetes takes, and keeps the rules."""

from __future__ import annotations

import configparser
import copy
import json
import re
import runpy
import tomllib
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import yaml

from slipway.security.server import coordinator_security
from slipway.settings.security import Security
from support.manifests import pod_rules as k8s_pod_rules
from support.manifests import store_rules as k8s_store_rules
from support.manifests import wiring_rules as k8s_wiring_rules
from support.manifests.overlay import (
    EXTERNAL_SECRETS,
    NAMESPACE,
    ROOT,
    Cluster,
    Object,
    Workload,
    place_of,
    render,
    rendered,
)

kubernetes_validate = pytest.importorskip("kubernetes_validate")

RULES = (*k8s_pod_rules.RULES, *k8s_store_rules.RULES, *k8s_wiring_rules.RULES)
DOCS = ROOT / "docs"
SIZING = runpy.run_path(str(DOCS / "generate_sizing.py"))
SIZES = ROOT / "k8s" / "components" / "sizes"


def documented() -> dict[str, str]:
    """Every overlay of the documents, by page and number."""
    found = {}
    for page in ("kubernetes", "sizing"):
        texts = re.findall(r"```yaml\n(# kustomization.yaml\n.*?)```", (DOCS / f"{page}.md").read_text(), re.DOTALL)
        found |= {f"{page}-{number}": text for number, text in enumerate(texts)}
    return found


OVERLAYS = documented()
INSTALL, EKS, REGISTRY, OUTSIDE, HTTP, SPOT, LARGE = OVERLAYS


def documented_service() -> dict[str, str]:
    """The settings of the documented ``pg_service.conf``."""
    (text,) = re.findall(r"```ini\n# pg_service.conf\n(.*?)```", (DOCS / "kubernetes.md").read_text(), re.DOTALL)
    parser = configparser.ConfigParser()
    parser.read_string(text)
    return dict(parser["slipway"])


SERVICE = documented_service()
DATABASE = place_of(f"postgresql://{SERVICE['host']}:{SERVICE.get('port', '5432')}")
WHOLE = (INSTALL, EKS)
"""Overlays that are shown whole, so that they use the documented database; the others show what is changed."""


@cache
def _rendered(text: str, folder: Path) -> list[Object]:
    (folder / "kustomization.yaml").write_text(text)
    return render(folder)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder for an overlay, beside this repository."""
    (tmp_path / "slipway").symlink_to(ROOT)
    return tmp_path


def cluster_of(text: str, folder: Path) -> Cluster:
    objects = _rendered(text, folder)
    return Cluster(objects, DATABASE) if text in {OVERLAYS[name] for name in WHOLE} else Cluster(objects)


def policy(cluster: Cluster, name: str) -> Object:
    found: Object = cluster.named("NetworkPolicy", name)["spec"]
    return found


def with_components(*names: str, overlay: str = "production") -> str:
    lines = [f"- slipway/k8s/components/{name}" for name in names]
    return "\n".join(["namespace: slipway", "resources:", f"- slipway/k8s/overlays/{overlay}", "components:", *lines])


def broken_rules(cluster: Cluster) -> list[str]:
    """What the rules say, but for images of another registry."""
    said = [sentence for rule in RULES for sentence in rule(cluster)]
    return [sentence for sentence in said if ": registry.example.org/" not in sentence]


@cache
def validate(thing: str) -> None:
    """Have Kubernetes judge an object once, though most are of every overlay."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kubernetes_validate.validate(json.loads(thing), "1.33", strict=True)


def eks(cluster: Cluster) -> None:
    """No pod has a key."""
    assert "slipway-s3" in EXTERNAL_SECRETS
    for one in cluster.workloads():
        assert "slipway-s3" not in str(one.object)
        if one.name != "slipway-migrate":
            assert (one.environment["SLIPWAY_STORE"], one.environment["AWS_REGION"]) == (
                "s3://models/slipway",
                "eu-central-1",
            )
        account = cluster.named("ServiceAccount", one.pod["serviceAccountName"])
        needs_role = one.name != "slipway-migrate"
        assert ("eks.amazonaws.com/role-arn" in account["metadata"].get("annotations", {})) == needs_role
    reached = policy(cluster, "artifacts")["egress"]
    addresses = [[peer["ipBlock"]["cidr"] for peer in rule["to"]] for rule in reached]
    assert addresses == [["0.0.0.0/0", "::/0"], ["169.254.170.23/32", "fd00:ec2::23/128"]]
    assert "169.254.0.0/16" in reached[0]["to"][0]["ipBlock"]["except"], "the node's own metadata"


def registry(cluster: Cluster) -> None:
    """Every pod pulls with the secret of the registry."""
    for one in cluster.workloads():
        account = cluster.named("ServiceAccount", one.pod["serviceAccountName"])
        assert account["imagePullSecrets"] == [{"name": "registry"}]
        assert "imagePullSecrets" not in one.pod


def outside(cluster: Cluster) -> None:
    """Clients outside reach the port for tokens alone."""
    published = [one["metadata"]["name"] for one in cluster.of("Service") if one["spec"].get("type") == "LoadBalancer"]
    assert published == ["slipway-clients"]
    assert "slipway.example.org" in cluster.named("Certificate", "slipway-coordinator")["spec"]["dnsNames"]
    for thing in cluster.of("NetworkPolicy"):
        for rule in thing["spec"].get("ingress", ()):
            if any("ipBlock" in peer for peer in rule["from"]):
                assert [port["port"] for port in rule["ports"]] == [7072]


def spot(cluster: Cluster) -> None:
    """A worker on a spot node hands back within its notice."""
    for one in cluster.workers():
        assert one.pod["terminationGracePeriodSeconds"] <= 30
        assert one.arguments().drain_seconds < one.pod["terminationGracePeriodSeconds"] - 15
        assert "nodeSelector" in one.pod
    (coordinator,) = (one for one in cluster.workloads() if one.name == "slipway-coordinator")
    assert "nodeSelector" not in coordinator.pod


def over_http(cluster: Cluster) -> None:
    """Both Services have the port, the certificate has their names, and an Ingress controller reaches that port alone."""
    for name in ("slipway-coordinator", "slipway-clients"):
        assert {"name": "http", "port": 7080, "targetPort": "http"} in cluster.named("Service", name)["spec"]["ports"]
    others = [
        ([port["port"] for port in rule["ports"]], thing["metadata"]["name"])
        for thing in cluster.of("NetworkPolicy")
        for rule in thing["spec"].get("ingress", ())
        if any("ingress-nginx" in str(peer) for peer in rule["from"])
    ]
    assert others == [([7080], "http")]


PROMISES: dict[str, Callable[[Cluster], None]] = {
    EKS: eks,
    REGISTRY: registry,
    OUTSIDE: outside,
    HTTP: over_http,
    SPOT: spot,
}
"""What the page says of an overlay."""


@pytest.mark.slow
@pytest.mark.parametrize("name", OVERLAYS)
def test_an_overlay_of_the_documents_keeps_the_rules_and_what_the_page_says(own: Path, name: str) -> None:
    cluster = cluster_of(OVERLAYS[name], own)
    known = {
        # Clients outside are let in by addresses; that nothing in the cluster comes from there is as it should be.
        OUTSIDE: ["slipway-coordinator: from outside 7072 is allowed, and nothing uses it"],
        # Nor is the Ingress controller one of the overlay's pods.
        HTTP: ["slipway-coordinator: from ingress-nginx 7080 is allowed, and nothing uses it"],
    }
    assert [said for said in broken_rules(cluster) if said not in known.get(name, ())] == []
    for thing in cluster.objects:
        if thing["apiVersion"].partition("/")[0] not in {"cert-manager.io", "keda.sh"}:
            validate(json.dumps(thing))
    if name in PROMISES:
        PROMISES[name](cluster)


def test_store_and_database_of_the_install_example_can_be_reached(own: Path) -> None:
    """Their policies let through what their addresses lead to; without the patches the rule says so."""
    text = OVERLAYS[INSTALL]
    cluster = cluster_of(text, own)
    assert container_image(cluster) == "registry.example.org/slipway-merge:0.1.0"
    environment = next(one for one in cluster.workers() if one.name == "slipway-merge").environment
    assert environment["SLIPWAY_STORE"] == "s3://models/slipway"
    assert environment["AWS_ENDPOINT_URL_S3"] == "https://s3.example.org"
    assert environment["AWS_REGION"] == "us-east-1"
    blocked = list(k8s_wiring_rules.edges(Cluster(_rendered(text.partition("patches:")[0], own), DATABASE)))
    assert "slipway-merge: to outside 443 is needed, and not allowed" in blocked
    assert "slipway-coordinator: to outside 5432 is needed, and not allowed" in blocked
    assert "slipway-migrate: to outside 5432 is needed, and not allowed" in blocked


def test_the_database_is_known_by_the_authorities_that_the_images_hold() -> None:
    """psycopg's own libcrypto looks elsewhere than Debian's, so that ``system`` finds none."""
    assert SERVICE["sslrootcert"] == str(runpy.run_path(str(ROOT / "deploy" / "check_image.py"))["_AUTHORITIES"])
    final = (ROOT / "deploy" / "Dockerfile.cpu").read_text().rpartition("FROM ")[2]
    assert "ca-certificates" in final


def container_image(cluster: Cluster, name: str = "slipway-merge") -> str:
    return next(str(one.container["image"]) for one in cluster.workers() if one.name == name)


@pytest.mark.slow
def test_roles_of_eks_are_for_every_pool(own: Path) -> None:
    (roles, *_) = yaml.safe_load(OVERLAYS[EKS])["patches"]
    text = yaml.safe_dump({"namespace": "slipway", "resources": ["slipway/k8s/overlays/gpu-pools"], "patches": [roles]})
    cluster = cluster_of(text, own)
    without = {one["metadata"]["name"] for one in cluster.of("ServiceAccount") if "annotations" not in one["metadata"]}
    assert without == {"slipway-migrate"}


@pytest.mark.slow
def test_with_imports_those_workers_alone_reach_what_is_outside(own: Path) -> None:
    cluster = cluster_of(with_components("import"), own)
    assert broken_rules(cluster) == []
    reaching = cluster.selected(policy(cluster, "hub")["podSelector"])
    assert [one.name for one in reaching] == ["slipway-merge"]


def coordinator_of(cluster: Cluster) -> Workload:
    return next(one for one in cluster.workloads() if one.name == "slipway-coordinator")


@pytest.mark.parametrize("overlay", ["single-node", pytest.param("production", marks=pytest.mark.slow)])
def test_the_component_for_http_adds_its_port_and_leaves_the_rest(own: Path, overlay: str) -> None:
    """With certificates and without: it keeps the rules, and a coordinator is ready when it was before."""
    cluster, before = cluster_of(with_components("http", overlay=overlay), own), Cluster(rendered(overlay))
    assert broken_rules(cluster) == []
    one, other = coordinator_of(cluster), coordinator_of(before)
    assert one.arguments().http == "0.0.0.0:7080"
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert one.container[probe] == other.container[probe]
    assert {**other.ports, "http": 7080} == one.ports
    assert (one.environment, one.pod["volumes"]) == (other.environment, other.pod["volumes"])
    assert [each.object for each in cluster.workers()] == [each.object for each in before.workers()]
    for thing in cluster.objects:
        if thing["kind"] in {"Deployment", "Service", "NetworkPolicy"}:
            validate(json.dumps(thing))


def test_without_an_access_file_the_port_for_http_is_called_by_the_names_of_its_service(own: Path) -> None:
    """Those by which pods of this namespace and of others reach it; a page of another site has none of them."""
    cluster = cluster_of(with_components("http", overlay="single-node"), own)
    arguments = coordinator_of(cluster).arguments()
    security = coordinator_security(
        Security(),
        address=arguments.listen,
        http_address=arguments.http,
        http_names=arguments.http_name,
        allow_anonymous=arguments.allow_anonymous,
    )
    names = security.names_over_http()
    assert names is not None
    services = [one for one in cluster.of("Service") if any(port["port"] == 7080 for port in one["spec"]["ports"])]
    assert services
    for one in services:
        name = one["metadata"]["name"]
        assert {name, f"{name}.{NAMESPACE}.svc"} <= names


HTTP_BREAKS: list[tuple[str, Callable[[Cluster], object]]] = [
    ("edges", lambda c: c.objects.remove(c.named("NetworkPolicy", "http"))),
    ("edges", lambda c: policy(c, "standby")["egress"][0]["ports"].pop()),
    ("edges", lambda c: policy(c, "standby")["ingress"][0]["ports"].pop()),
    ("edges", lambda c: coordinator_of(c).container["args"].remove("--http=0.0.0.0:7080")),
    ("ports", lambda c: coordinator_of(c).container["args"].remove("--http=0.0.0.0:7080")),
    ("ports", lambda c: coordinator_of(c).container["ports"].pop()),
    ("ports", lambda c: c.named("Service", "slipway-clients")["spec"]["ports"][-1].update(port=443)),
    ("flags", lambda c: coordinator_of(c).container["args"].append("--http-names=a")),
]
"""What is broken of the component for HTTP, and the rule that has to notice."""


def test_rules_notice_a_port_for_http_that_nobody_reaches_or_opens(own: Path) -> None:
    objects = cluster_of(with_components("http"), own).objects
    rules = {rule.__name__: rule for rule in RULES}
    assert list(rules["edges"](Cluster(objects))) == list(rules["ports"](Cluster(objects))) == []
    for name, break_it in HTTP_BREAKS:
        cluster = Cluster(copy.deepcopy(objects))
        break_it(cluster)
        assert list(rules[name](cluster)), f"the break in line {break_it.__code__.co_firstlineno}"


def test_the_page_about_sizes_is_up_to_date() -> None:
    assert SIZING["page"]() == (DOCS / "sizing.md").read_text(), "run python docs/generate_sizing.py > docs/sizing.md"


def test_the_sizes_of_the_chart_are_up_to_date() -> None:
    file = ROOT / "k8s" / "helm" / "slipway" / "files" / "sizes.yaml"
    assert SIZING["chart"]() == file.read_text(), f"run python docs/generate_sizing.py chart > {file}"


def test_a_worker_reserves_what_a_small_model_needs() -> None:
    """As docs/sizing.md says; a row without a figure reserves all that it may use."""
    table = tomllib.loads((ROOT / "services" / "services.toml").read_text())
    given = {name.replace("_", "-"): row.get("worker", {}).get("reserved") for name, row in table.items()}
    needs = SIZING["needs"](SIZING["SMALL"].size())
    reserved = {stage: figure for stage, figure in given.items() if figure}
    assert len(reserved) > 10
    assert reserved == {stage: f"{needs[stage].memory_gib}Gi" for stage in reserved}


@pytest.mark.parametrize(("name", "billions"), [("8b", 8.19), ("30b", 30.53), ("70b", 70.55)])
def test_the_component_of_a_size_is_up_to_date(name: str, billions: float) -> None:
    component = (SIZES / name / "kustomization.yaml").read_text()
    assert SIZING["component"](name) == component, f"run python docs/generate_sizing.py {name}"
    weights = SIZING["MODELS"][name].size().weights
    assert weights / 1e9 == pytest.approx(billions, rel=0.002), "as the model's own card has it"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["8b", "70b"])
def test_the_component_of_a_size_gives_workers_what_the_page_says(own: Path, name: str) -> None:
    """The smallest, which needs less than what is given without it, and the largest."""
    size = SIZING["MODELS"][name].size()
    cluster = cluster_of(with_components(f"sizes/{name}", overlay="gpu-pools"), own)
    assert broken_rules(cluster) == []
    before = {worker.name: worker for worker in Cluster(rendered("gpu-pools")).workers()}
    assert "slipway-tensorrt-build-sm90" in before
    for worker in cluster.workers():
        need = SIZING["needs"](size)[worker.name.removeprefix("slipway-").removesuffix("-sm90")]
        for side in ("requests", "limits"):
            assert memory_of(worker, side) * SIZING["MEMORY_SHARE"] >= need.task_memory
            assert memory_of(worker, side) >= memory_of(before[worker.name], side), "no less than without it"
        assert volume_of(worker) >= (need.reads + need.writes) * 1.1
        assert volume_of(worker) >= volume_of(before[worker.name]), "no less than without it"
        assert k8s_pod_rules.quantity(worker.environment["SLIPWAY_CACHE_SIZE"].removesuffix("B")) * 2 == volume_of(
            worker
        )


def memory_of(worker: Workload, side: str) -> float:
    return k8s_pod_rules.quantity(worker.container["resources"][side]["memory"])


def volume_of(worker: Workload) -> float:
    (claim,) = (one["ephemeral"] for one in worker.pod["volumes"] if "ephemeral" in one)
    return k8s_pod_rules.quantity(claim["volumeClaimTemplate"]["spec"]["resources"]["requests"]["storage"])
