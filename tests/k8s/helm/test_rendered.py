"""The chart as Helm takes it: linted, packaged, installed as far as that goes without a cluster; its objects as Kubernetes takes them."""

from __future__ import annotations

import re
import shutil
import tarfile
import tomllib
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.manifests.chart import (
    CHART,
    NEEDED,
    PRODUCTION,
    VERSION,
    Refusal,
    call_helm,
    changed,
    needs_helm,
    render_chart,
)
from support.manifests.checkers import (
    checkov_complaints,
    exceptions,
    has_schema,
    needs_checkov,
    needs_schemas,
    schema_problems,
)
from support.manifests.overlay import ROOT, Object

kubernetes_validate = pytest.importorskip("kubernetes_validate")
pytestmark = needs_helm

GPU = {"resource": "nvidia.com/gpu", "count": 2, "architecture": "sm120", "runtimeClassName": "nvidia"}
EVERYTHING: Object = changed(
    PRODUCTION,
    {
        "image": {"registry": "registry.example.org", "pullSecrets": ["registry"]},
        "import": {"from": ["hf://Qwen"]},
        "workers": {"validate": {"gpu": GPU}},
        "pools": {"merge-2": {"worker": "merge", "volume": {"size": "1Ti", "storageClass": "fast"}}},
        "clients": {"from": [{"ipBlock": {"cidr": "203.0.113.0/24"}}], "service": {"type": "LoadBalancer"}},
        "ingress": {"enabled": True, "className": "nginx", "host": "slipway.example.org", "tlsSecret": "public"},
        "gateway": {
            "enabled": True,
            "parentRefs": [{"name": "public"}],
            "hostnames": ["slipway.example.org"],
            "backendTls": {"authority": {"name": "authority"}},
        },
        "http": {
            "enabled": True,
            "ingress": {"enabled": True, "className": "nginx", "host": "console.example.org", "tlsSecret": "public"},
            "gateway": {"enabled": True, "parentRefs": [{"name": "public"}], "hostnames": ["console.example.org"]},
        },
    },
)
"""Values with which each template writes all that it can."""


def test_every_object_is_what_kubernetes_takes() -> None:
    things = render_chart(EVERYTHING)
    known = [thing for thing in things if not has_schema(thing)]
    assert {"Ingress", "CronJob", "Job", "PriorityClass", "NetworkPolicy"} <= {thing["kind"] for thing in known}
    for thing in known:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a kind without a schema would pass unseen
            kubernetes_validate.validate(thing, "1.33", strict=True)


@needs_schemas
def test_custom_resources_are_as_their_schemas_have_them(tmp_path: Path) -> None:
    things = [thing for thing in render_chart(EVERYTHING) if has_schema(thing)]
    kinds = {
        "BackendTLSPolicy",
        "Certificate",
        "GRPCRoute",
        "HTTPRoute",
        "Issuer",
        "ScaledObject",
        "TriggerAuthentication",
    }
    assert {thing["kind"] for thing in things} == kinds
    assert schema_problems(things, tmp_path) == []


@needs_checkov
@pytest.mark.slow
def test_checkov_complains_of_the_exceptions_alone(tmp_path: Path) -> None:
    assert set(checkov_complaints(render_chart(PRODUCTION), tmp_path)) <= exceptions()


NAMES: Object = {
    "store": {"existingSecret": "n1", "endpoint": "http://minio.n2.svc", "prefix": ""},
    "database": {"existingSecret": "n3", "urlKey": "n4"},
    "image": {"pullSecrets": ["n5"]},
    "tls": {"source": "secrets", "secrets": {"coordinator": "n6", "worker": "n7", "cleanup": "n8", "keda": "n9"}},
    "access": {"existingSecret": "n10"},
    "keda": {"namespace": "n11"},
    "metrics": {"namespace": "n12"},
    "priorityClasses": {"create": False, "coordinator": "n13", "worker": "n14"},
    "workers": {"validate": {"gpu": {**GPU, "runtimeClassName": "n15"}}},
    "worker": {"volume": {"storageClass": "n16"}},
    "ingress": {"className": "n17", "host": "n18", "tlsSecret": "n19"},
    "gateway": {"backendTls": {"authority": {"name": "n20"}}},
    "http": {"ingress": {"className": "n22", "host": "n23.example.org", "tlsSecret": "n24"}},
}
"""Values that are names, each another one."""


def named(value: Any, name: str) -> Any:
    """Return a value with a name in the place of n1, n2, … in each text."""
    match value:
        case dict():
            return {key: named(inner, name) for key, inner in value.items() if key != "checksum/settings"}
        case list():
            return [named(inner, name) for inner in value]
        case str():
            return re.sub(r"\bn[0-9]+\b", name, value)
    return value


@pytest.mark.parametrize("name", ["2024", "0x1f", "true", "null"])
def test_a_name_is_a_text_whatever_it_looks_like(name: str) -> None:
    """YAML reads these without quotes as a number, a truth value or nothing."""
    letters = named(render_chart(changed(EVERYTHING, NAMES), namespace="n21"), name)
    assert letters == named(render_chart(changed(EVERYTHING, named(NAMES, name)), namespace=name), name)


def test_helm_lints_it() -> None:
    """Strictly; without values too, where what is missing is no fault of the chart."""
    calls = [
        {"do": "lint", "path": str(CHART), "values": values, "strict": True, "namespace": "slipway"}
        for values in ({}, EVERYTHING)
    ]
    for report in call_helm(calls):
        assert report["errors"] == []
        assert [said["error"] for said in report["messages"]] == ["icon is recommended"]


def test_helm_packages_it_with_its_files(tmp_path: Path) -> None:
    (archive,) = call_helm([{"do": "package", "path": str(CHART), "destination": str(tmp_path)}])
    with tarfile.open(archive) as opened:
        packed = {name.removeprefix("slipway/") for name in opened.getnames()}
    files = {path.relative_to(CHART).as_posix() for path in CHART.rglob("*") if path.is_file()}
    assert packed == files
    assert {"files/workers.yaml", "files/sizes.yaml", "values.schema.json"} <= packed
    from_archive = render_chart(NEEDED, chart=Path(archive))
    assert from_archive == render_chart(NEEDED)


def test_helm_installs_it_in_a_dry_run() -> None:
    """With what the command line does before it calls a cluster: hooks are apart, and the notes are shown."""
    call = {"do": "install", "chart": str(CHART), "values": NEEDED, "name": "models", "namespace": "ml"}
    refused, release = call_helm([{**call, "values": {}}, call])
    assert isinstance(refused, Refusal)
    manifest = [thing for thing in yaml.load_all(release["manifest"], Loader=yaml.CSafeLoader) if thing]
    assert "Job" not in {thing["kind"] for thing in manifest}
    assert "models-slipway-merge" in {thing["metadata"]["name"] for thing in manifest}
    assert "models-slipway-clients.ml.svc" in release["notes"]
    assert "Artifacts are in s3://slipway/artifacts at http://minio.minio.svc:9000." in release["notes"]
    assert "Give this place to no other release" in release["notes"]


def test_the_notes_say_where_the_console_is() -> None:
    """Its port is a value; names outside are those of the Ingress and of the route."""
    call = {"do": "install", "chart": str(CHART), "name": "slipway", "namespace": "ml"}
    values = changed(EVERYTHING, {"http": {"port": 7443, "gateway": {"hostnames": ["a.example.org"]}}})
    without, release = call_helm([{**call, "values": PRODUCTION}, {**call, "values": values}])
    assert "/ui/" not in without["notes"]
    assert "JSON over HTTP is at https://slipway-clients.ml.svc:7443." in release["notes"]
    lines = [line.strip() for line in release["notes"].splitlines()]
    named = {"https://console.example.org/ui/", "https://a.example.org/ui/"}
    assert named | {"kubectl -n ml port-forward service/slipway-clients 7443"} <= set(lines)


def test_the_chart_has_the_version_of_the_distribution() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (version, version)


def leaves(values: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Return the values that a user sets, by their key with dots; a group that is set as one thing is one."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{path}.{key}".lstrip(".")
        if isinstance(value, dict) and value and key not in {"settings", "resources", "scale"}:
            found |= leaves(value, name)
        else:
            found[name] = value
    return found


PLACED = {"nodeSelector", "tolerations", "affinity", "podLabels", "podAnnotations", "serviceAccount"}


def test_the_page_has_every_value_with_its_default() -> None:
    page = (CHART / "README.md").read_text().partition("## Values\n")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `([\w.]+)` \|(.*?)\|", page, re.MULTILINE))
    values = leaves(yaml.safe_load((CHART / "values.yaml").read_text()))
    named = {name: value for name, value in values.items() if name.rpartition(".")[2] not in PLACED}
    assert sorted(rows) == sorted(named)
    for name, value in named.items():
        if not name.endswith(".resources"):
            shown = rows[name].strip().strip("`")
            assert ("" if shown == "" else yaml.safe_load(shown)) == value, name
    for name in PLACED:
        assert f"`{name}`" in page


def documented() -> list[str]:
    pages = (CHART / "README.md", ROOT / "docs" / "kubernetes.md")
    return [
        text for page in pages for text in re.findall(r"```yaml\n# values.yaml\n(.*?)```", page.read_text(), re.DOTALL)
    ]


@pytest.mark.parametrize("number", range(5))
def test_documented_values_are_taken(number: int) -> None:
    assert len(documented()) == 5
    values = yaml.safe_load(documented()[number])
    names = {thing["metadata"]["name"] for thing in render_chart(values)}
    assert "slipway-coordinator" in names
    assert set(values.get("pools", {})) <= {name.removeprefix("slipway-") for name in names}


@pytest.mark.parametrize("size", ["", "8b"])
def test_a_row_of_the_table_is_a_worker_without_another_line(tmp_path: Path, size: str) -> None:
    """Of a service that no size knows, too."""
    chart = tmp_path / "slipway"
    shutil.copytree(CHART, chart)
    row = yaml.safe_load((chart / "files" / "workers.yaml").read_text())["gguf"]
    with (chart / "files" / "workers.yaml").open("a") as table:
        table.write(yaml.safe_dump({"npz": {**row, "stages": "npz_pack"}}))
    values = changed(PRODUCTION, {"size": size, "workers": {"npz": {"scale": {"max": 2}}}})
    made = [thing for thing in render_chart(values, chart=chart) if thing["metadata"]["name"] == "slipway-npz"]
    kinds = {thing["kind"] for thing in made}
    assert kinds == {"Deployment", "PodDisruptionBudget", "ScaledObject", "ServiceAccount"}
    (container,) = next(t for t in made if t["kind"] == "Deployment")["spec"]["template"]["spec"]["containers"]
    assert container["image"] == f"slipway-npz:{VERSION}"
    assert container["args"][0] == "--stage=npz_pack"
    assert container["resources"]["limits"]["memory"] == row["memory"]


def test_the_page_says_what_runs_at_first() -> None:
    """The sums of the table are those of what is rendered."""
    running = [
        thing["spec"]
        for thing in render_chart(NEEDED)
        if thing["kind"] == "Deployment" and thing["spec"]["replicas"] and "worker" in str(thing["spec"]["selector"])
    ]
    containers = [spec["template"]["spec"]["containers"][0] for spec in running]
    assert {spec["replicas"] for spec in running} == {1}
    cpu = sum(int(one["resources"]["requests"]["cpu"]) for one in containers)
    requested, limits = (
        sum(int(one["resources"][side]["memory"].removesuffix("Gi")) for one in containers)
        for side in ("requests", "limits")
    )
    page = (CHART / "README.md").read_text()
    assert f"reserves {cpu + 0.5} processors and {requested + 1}Gi of memory" in page
    assert f"| **together, without KEDA** | | | {cpu} | {requested}Gi | {limits}Gi |" in page
    assert len(running) == 4
    assert "Four workers and two coordinators." in page
