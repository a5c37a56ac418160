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


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize(
    ("job", "ever_up", "ours", "alerted"),
    [
        ("slipway-coordinator", False, "slipway_coordinator_active", True),
        ("kubernetes-pods", True, "slipway_coordinator_active", True),
        ("kubernetes-pods", True, "slipway_worker_slots", True),
        ("kubernetes-pods", True, "somebody_else_s_metric", False),
    ],
)
def test_a_part_that_is_down_is_one_of_ours_whatever_its_job(
    tmp_path: Path, job: str, ever_up: bool, ours: str, alerted: bool
) -> None:
    """Up for ten minutes, if ever, then down; Prometheus evaluates the alert and the panel itself."""
    labels = {"job": job, "instance": "10.0.0.7:9464"}
    shown = ",".join(f'{name}="{value}"' for name, value in labels.items())
    names = ("process_resident_memory_bytes", ours)
    series = [{"series": f"up{{{shown}}}", "values": f"{int(ever_up)}x10 0x20"}]
    series += [{"series": f"{name}{{{shown}}}", "values": "5x10 stale"} for name in names if ever_up]
    alert = next(one for one in alerts() if one["alert"] == "SlipwayPartDown")
    text = {"summary": alert["annotations"]["summary"].replace("{{ $labels.instance }}", labels["instance"])}
    fired = [{"exp_labels": {**labels, **alert["labels"]}, "exp_annotations": text}] if alerted else []
    panel = next(query for query in dashboard_queries() if "process_resident_memory_bytes" in query)
    memory = [{"labels": f"process_resident_memory_bytes{{{shown}}}", "value": 5}] if alerted and ever_up else []
    case = {
        "interval": "1m",
        "input_series": series,
        "alert_rule_test": [{"eval_time": "25m", "alertname": "SlipwayPartDown", "exp_alerts": fired}],
        "promql_expr_test": [{"expr": panel, "eval_time": "5m", "exp_samples": memory}],
    }
    rules = str(DEPLOY / "prometheus" / "alerts.yaml")
    (tmp_path / "test.yaml").write_text(yaml.safe_dump({"rule_files": [rules], "tests": [case]}))
    done = subprocess.run(["promtool", "test", "rules", str(tmp_path / "test.yaml")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


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
