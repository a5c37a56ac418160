"""Evaluate alerts and the dashboard with Prometheus' own tool for testing rules."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

DEPLOY = Path(__file__).parents[3] / "deploy"
ALERTS = DEPLOY / "prometheus" / "alerts.yaml"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "slipway.json"

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian's package prometheus)"
)

Labels = Mapping[str, str]


def dashboard() -> Any:
    return json.loads(DASHBOARD.read_text())


def dashboard_queries(*, cluster: str = "", namespace: str = "") -> list[str]:
    """Return the queries of all panels, with an installation chosen."""
    queries = [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", ())]
    return [query.replace("$cluster", cluster).replace("$namespace", namespace) for query in queries]


def dashboard_variable(name: str) -> dict[str, Any]:
    """Return a variable that the reader of the dashboard chooses."""
    (variable,) = (each for each in dashboard()["templating"]["list"] if each["name"] == name)
    return dict(variable)


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def series(name: str, labels: Labels, values: str) -> dict[str, str]:
    """Make a series of a test: its name with labels, and one value a minute in promtool's notation."""
    return {"series": named(name, labels), "values": values}


def named(name: str, labels: Labels) -> str:
    shown = ",".join(f'{key}="{value}"' for key, value in labels.items())
    return f"{name}{{{shown}}}"


def fired(name: str, labels: Labels) -> dict[str, Any]:
    """Make a firing alert with its labels and its text."""
    (alert,) = (one for one in alerts() if one["alert"] == name)
    prefix = f"{labels['namespace']}: " if labels.get("namespace") else ""
    text = alert["annotations"]["summary"].replace("{{ with $labels.namespace }}{{ . }}: {{ end }}", prefix)
    text = re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda found: labels[found[1]], text)
    return {"exp_labels": {**labels, **alert["labels"]}, "exp_annotations": {"summary": text}}


def prometheus_expects(
    folder: Path,
    given: Sequence[Mapping[str, str]],
    *,
    at: str,
    firing: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    queries: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Evaluate alerts and queries over some series with Prometheus.

    Args:
        folder: An empty folder.
        given: Series from :func:`series`, one value a minute.
        at: Time of the evaluation, such as ``25m``.
        firing: All alerts that fire then, by name.
        queries: Queries with their results, in promtool's form.
    """
    case = {
        "interval": "1m",
        "input_series": list(given),
        "alert_rule_test": [
            {"eval_time": at, "alertname": name, "exp_alerts": list(those)} for name, those in (firing or {}).items()
        ],
        "promql_expr_test": [{"eval_time": at, **query} for query in queries],
    }
    test = folder / "test.yaml"
    test.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "tests": [case]}))
    done = subprocess.run(["promtool", "test", "rules", str(test)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
