"""Alerts and the dashboard as Prometheus itself sees them, through its own tool for testing rules."""

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
    """The queries of all panels, with an installation chosen."""
    queries = [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", ())]
    return [query.replace("$cluster", cluster).replace("$namespace", namespace) for query in queries]


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def series(name: str, labels: Labels, values: str) -> dict[str, str]:
    """A series of a test: its name with labels, and its values minute by minute in promtool's own notation."""
    return {"series": named(name, labels), "values": values}


def named(name: str, labels: Labels) -> str:
    shown = ",".join(f'{key}="{value}"' for key, value in labels.items())
    return f"{name}{{{shown}}}"


def fired(name: str, labels: Labels) -> dict[str, Any]:
    """An alert that is firing: with its labels, and its text about them."""
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
    """Let Prometheus evaluate alerts and queries over some series.

    Args:
        folder: An empty folder.
        given: As :func:`series` makes them, one value a minute.
        at: Time of the look, such as ``25m``.
        firing: The alerts of each name that are firing then, all of them.
        queries: Queries with what they give, in promtool's form.
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
