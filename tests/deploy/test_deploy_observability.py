"""What the dashboard and the alerts ask for is what the code counts, and the other way round."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipway import metrics
from slipway.errors import REASONS

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
METRICS = {metric.name: metric for metric in metrics.METRICS}
OTHERS = {"process_resident_memory_bytes", "up"}


def dashboard_queries() -> list[str]:
    dashboard = json.loads((DEPLOY / "grafana" / "dashboards" / "slipway.json").read_text())
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


QUERIES = [*dashboard_queries(), *(alert["expr"] for alert in alerts())]


def family(name: str) -> metrics.Metric:
    """The metric a series belongs to."""
    metric = METRICS.get(re.sub(r"_(bucket|sum|count)$", "", name))
    if isinstance(metric, metrics.Histogram):
        assert name != metric.name, f"{name} is a histogram: ask for its buckets, sum or count"
        return metric
    return METRICS[name]


@pytest.mark.parametrize("query", QUERIES)
def test_every_query_asks_for_metrics_and_labels_that_exist(query: str) -> None:
    names = set(re.findall(r"\b(?:slipway|process)_[a-z_]+|\bup\b", query))
    assert names
    known = {"job", "instance", "le"}
    for name in names - OTHERS:
        known |= set(family(name).labels)
    assert all(name in OTHERS or family(name) for name in names)
    for group in re.findall(r"\b(?:by|on) \(([a-z, ]+)\)", query):
        assert set(group.split(", ")) <= known, query
    for selector in re.findall(r"\{([^}]*)\}", query):
        assert set(re.findall(r"(\w+)[=!]", selector)) <= known, query


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_prometheus_itself_takes_every_query(tmp_path: Path) -> None:
    rules = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(QUERIES)]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", str(tmp_path / "rules.yaml")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"{len(QUERIES)} rules found" in done.stdout


def test_the_dashboard_asks_the_data_source_that_grafana_is_given() -> None:
    given = yaml.safe_load((DEPLOY / "grafana" / "provisioning" / "datasources" / "datasources.yaml").read_text())
    known = {(source["type"], source["uid"]) for source in given["datasources"]}
    dashboard = json.loads((DEPLOY / "grafana" / "dashboards" / "slipway.json").read_text())
    asked = {
        (t["datasource"]["type"], t["datasource"]["uid"]) for p in dashboard["panels"] for t in p.get("targets", ())
    }
    assert asked == {("prometheus", "prometheus")} <= known


def test_every_metric_is_on_the_dashboard() -> None:
    shown = {family(name).name for query in dashboard_queries() for name in re.findall(r"\bslipway_[a-z_]+", query)}
    assert shown == set(METRICS)


def test_reasons_in_alerts_exist() -> None:
    named = {
        reason
        for alert in alerts()
        for text in re.findall(r'reason=~?"([A-Z_|]+)"', alert["expr"])
        for reason in text.split("|")
    }
    assert named
    assert named <= set(REASONS)


def test_the_page_of_operations_has_every_metric_and_every_alert() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    for metric in metrics.METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        assert f"| `{metric.name}` | {labels} | {metric.help} |" in page
    for alert in alerts():
        assert f"`{alert['alert']}`" in page
    assert set(re.findall(r"`(slipway_[a-z_]+)`", page)) <= set(METRICS)
