"""A changed setting replaces the pods that read it and no others; an overlay's settings count, wherever they are written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from support.manifests.overlay import ROOT, Cluster, render

SHARED, IMPORT = "slipway-settings", "slipway-import-settings"
COORDINATOR, MIGRATION = "slipway-coordinator", "slipway-migrate"


def overlay(
    folder: Path,
    settings: Mapping[str, Mapping[str, str]],
    *,
    resource: str = "overlays/gpu-pools",
    components: tuple[str, ...] = ("import",),
) -> Cluster:
    """Render an overlay of one's own with settings by ConfigMap."""
    (folder / "slipway").symlink_to(ROOT)
    generators = [
        {"name": name, "behavior": "merge", "literals": [f"{key}={value}" for key, value in values.items()]}
        for name, values in settings.items()
    ]
    text = {
        "namespace": "slipway",
        "resources": [f"slipway/k8s/{resource}"],
        "components": [f"slipway/k8s/components/{name}" for name in components],
        "configMapGenerator": generators,
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(text))
    return Cluster(render(folder))


@pytest.fixture(scope="session")
def unchanged(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    return overlay(tmp_path_factory.mktemp("unchanged"), {})


def replaced(config_map: str, workers: set[str]) -> set[str]:
    """Return the workloads that docs/kubernetes.md promises to replace for a change of a ConfigMap."""
    return {
        "slipway-coordinator-settings": {COORDINATOR},
        "slipway-worker-settings": workers,
        IMPORT: {COORDINATOR, "slipway-merge"},
        SHARED: {COORDINATOR, "slipway-cleanup", *workers},
    }[config_map]


@pytest.mark.parametrize(
    ("config_map", "variable", "value"),
    [
        ("slipway-coordinator-settings", "SLIPWAY_UPLOAD_SIZE", "1TiB"),
        ("slipway-worker-settings", "SLIPWAY_STAGE_ENVIRONMENT", "CC"),
        pytest.param(IMPORT, "SLIPWAY_IMPORT_FROM", "s3://training/{project}", marks=pytest.mark.slow),
        pytest.param(SHARED, "SLIPWAY_LOG_LEVEL", "debug", marks=pytest.mark.slow),
    ],
)
def test_a_changed_setting_replaces_what_reads_it(
    tmp_path: Path, unchanged: Cluster, config_map: str, variable: str, value: str
) -> None:
    workers = {one.name for one in unchanged.workers()}
    assert len(workers) > 10
    before = {one.name: one.template for one in unchanged.workloads()}
    changed = overlay(tmp_path, {config_map: {variable: value}}).workloads()
    assert {one.name for one in changed if one.template != before[one.name]} == replaced(config_map, workers)
    reading = {one.name for one in changed if one.environment.get(variable) == value}
    assert reading == replaced(config_map, workers)


@pytest.mark.slow
def test_a_setting_of_some_processes_counts_more_than_that_of_all(tmp_path: Path) -> None:
    settings = {SHARED: {"SLIPWAY_LOG_LEVEL": "warning"}, f"{COORDINATOR}-settings": {"SLIPWAY_LOG_LEVEL": "debug"}}
    levels = {one.name: one.environment["SLIPWAY_LOG_LEVEL"] for one in overlay(tmp_path, settings).workloads()}
    assert levels.pop(COORDINATOR) == "debug"
    assert levels.pop(MIGRATION) == "info", "it reads no settings but its own"
    assert set(levels.values()) == {"warning"}


@pytest.mark.parametrize("store", ["aws", pytest.param("s3", marks=pytest.mark.slow)])
def test_settings_count_more_than_the_defaults_of_components_beside_them(tmp_path: Path, store: str) -> None:
    """kustomize applies components after the settings of the same file, so theirs must not be of the same ConfigMap."""
    own = {
        "SLIPWAY_STORE": "s3://models/slipway",
        "AWS_REGION": "eu-central-1",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://traces.monitoring.svc:4317",
        "SLIPWAY_IMPORT_FROM": "s3://models/{project}",
    }
    components = ("postgresql", store, "mtls", "keda", "observability", "import")
    for one in overlay(tmp_path, {SHARED: own}, resource="base", components=components).workloads():
        if one.name != MIGRATION:
            assert {name: one.environment[name] for name in own} == own, one.name


def test_nothing_may_be_imported_until_an_overlay_names_addresses(unchanged: Cluster) -> None:
    assert not [one.name for one in unchanged.workloads() if "SLIPWAY_IMPORT_FROM" in one.environment]
