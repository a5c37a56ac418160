"""What the dashboard and the alerts ask for is what the code counts, and the other way round."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

from slipway.observability import metrics
from slipway.reasons import REASONS
from support.manifests.prometheus_rules import (
    ALERTS,
    DEPLOY,
    alerts,
    dashboard,
    dashboard_queries,
    dashboard_variable,
    needs_promtool,
)

ROOT = Path(__file__).parents[2]
METRICS = {metric.name: metric for metric in metrics.METRICS}
OTHERS = {"process_resident_memory_bytes", "up"}


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
    known = {"cluster", "namespace", "job", "instance", "le"}
    for name in names - OTHERS:
        known |= set(family(name).labels)
    assert all(name in OTHERS or family(name) for name in names)
    for group in re.findall(r"\b(?:by|on) \(([a-z, ]+)\)", query):
        assert set(group.split(", ")) <= known, query
    for selector in re.findall(r"\{([^}]*)\}", query):
        assert set(re.findall(r"(\w+)[=!]", selector)) <= known, query


@needs_promtool
def test_prometheus_itself_takes_every_query(tmp_path: Path) -> None:
    rules = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(QUERIES)]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", str(tmp_path / "rules.yaml")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"{len(QUERIES)} rules found" in done.stdout


def test_the_dashboard_asks_the_data_source_and_the_installation_that_are_chosen() -> None:
    variables = {variable["name"]: variable for variable in dashboard()["templating"]["list"]}
    assert set(variables) == {"datasource", "tracing", "cluster", "namespace"}
    assert (variables["datasource"]["type"], variables["datasource"]["query"]) == ("datasource", "prometheus")
    targets = [target for panel in dashboard()["panels"] for target in panel.get("targets", ())]
    asked = {(one["datasource"]["type"], one["datasource"]["uid"]) for one in targets}
    labels = (variables["cluster"], variables["namespace"])
    asked |= {(one["datasource"]["type"], one["datasource"]["uid"]) for one in labels}
    assert asked == {("prometheus", "${datasource}")}
    for target in targets:
        names = re.findall(r"\b(?:slipway|process)_[a-z_]+", target["expr"])
        chosen = re.findall(
            r'\b(?:slipway|process)_[a-z_]+\{cluster="\$cluster", namespace="\$namespace"', target["expr"]
        )
        assert len(chosen) == len(names) > 0, target["expr"]


def test_grafana_is_given_a_data_source_of_that_kind() -> None:
    given = yaml.safe_load((DEPLOY / "grafana" / "provisioning" / "datasources" / "datasources.yaml").read_text())
    assert [source["type"] for source in given["datasources"] if source.get("isDefault")] == ["prometheus"]


def test_an_exemplar_leads_to_its_trace() -> None:
    """Grafana takes this link from the data source, not from the dashboard."""
    given = yaml.safe_load((DEPLOY / "grafana" / "provisioning" / "datasources" / "datasources.yaml").read_text())
    sources = {source["uid"]: source for source in given["datasources"]}
    (metrics_source,) = (source for source in sources.values() if source["type"] == "prometheus")
    (destination,) = metrics_source["jsonData"]["exemplarTraceIdDestinations"]
    assert destination["name"] == "trace_id"
    assert sources[destination["datasourceUid"]]["type"] == dashboard_variable("tracing")["query"] == "jaeger"
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert "--enable-feature=exemplar-storage" in compose["services"]["prometheus"]["command"]


def test_histograms_with_exemplars_are_shown_with_them() -> None:
    shown = {
        family(name).name
        for panel in dashboard()["panels"]
        for target in panel.get("targets", ())
        if target.get("exemplar")
        for name in re.findall(r"\bslipway_[a-z_]+", target["expr"])
    }
    assert shown == {
        metrics.CALL_SECONDS.name,
        metrics.QUEUE_SECONDS.name,
        metrics.EXPORT_SECONDS.name,
        metrics.ATTEMPT_SECONDS.name,
        metrics.STAGE_SECONDS.name,
        metrics.STAGE_PEAK.name,
    }


LINKED = [panel for panel in dashboard()["panels"] if panel.get("fieldConfig", {}).get("defaults", {}).get("links")]
LABELS = {"stage": "onnx_export", "state": "failed", "reason": "OUT_OF_MEMORY", "outcome": "failed"}
SPANS = {"slipway-coordinator": {"export run", "onnx_export attempt"}, "slipway-worker": {"stage onnx_export"}}


def filled_in(text: str, *, labels: str) -> str:
    """Fill in a link's variables as Grafana does for a line with some labels; no other variable is known."""
    known = {f"__field.labels.{label}": LABELS[label] for label in labels.split(", ")}
    known |= {"tracing": "uid-of-jaeger", "__from": "1000", "__to": "2000"}
    return re.sub(r"\$\{([^}]+)\}", lambda variable: known[variable[1]], text)


@pytest.mark.parametrize("panel", LINKED, ids=lambda panel: panel["title"])
def test_a_line_leads_to_a_search_for_its_traces(panel: Any) -> None:
    (link,), (target,) = panel["fieldConfig"]["defaults"]["links"], panel["targets"]
    (labels,) = re.findall(r"\bby \((?:le, )?([a-z, ]+)\)", target["expr"])
    assert "$" not in filled_in(link["title"], labels=labels)
    address = urlsplit(filled_in(link["url"], labels=labels))
    assert address.path == "/explore"
    (pane,) = json.loads(parse_qs(address.query)["panes"][0]).values()
    assert (pane["datasource"], pane["range"]) == ("uid-of-jaeger", {"from": "1000", "to": "2000"})
    (query,) = pane["queries"]
    assert query["datasource"] == {"type": dashboard_variable("tracing")["query"], "uid": "uid-of-jaeger"}
    assert query["queryType"] == "search"
    assert query["operation"] in SPANS[query["service"]]
    tags = dict(tag.split("=") for tag in query.get("tags", "").split())
    assert tags.items() <= {f"slipway.{name}": value for name, value in LABELS.items()}.items()


def test_exports_attempts_and_tasks_lead_to_their_traces() -> None:
    assert [panel["title"] for panel in LINKED] == [
        "Duration of exports, 95 %",
        "Duration of attempts, 95 %",
        "Failed attempts per hour, by reason",
        "Tasks, 95 % of their duration",
    ]


def test_every_metric_is_on_the_dashboard() -> None:
    shown = {family(name).name for query in dashboard_queries() for name in re.findall(r"\bslipway_[a-z_]+", query)}
    assert shown == set(METRICS)


def test_every_aggregation_keeps_the_installation() -> None:
    for alert in alerts():
        for aggregation in ("sum", "max", "min", "group"):
            assert f"{aggregation}(" not in alert["expr"], alert["alert"]
        assert alert["expr"].count(" by (") == alert["expr"].count(" by (cluster, namespace"), alert["alert"]
        assert alert["expr"].count(" on (") == alert["expr"].count(" on (cluster, namespace"), alert["alert"]


def test_the_rules_are_those_that_compose_is_given() -> None:
    assert ALERTS.name in (ALERTS.parent / "prometheus.yaml").read_text()


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
