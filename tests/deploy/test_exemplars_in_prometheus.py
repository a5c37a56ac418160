"""Prometheus itself scrapes exemplars, and gives them to the queries of the dashboard."""

from __future__ import annotations

import json
import shutil
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import yaml
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from slipway.observability import metrics
from slipway.observability.telemetry import new_trace, recording
from support.coordinators.harness import process, wait_for
from support.manifests.prometheus_rules import DEPLOY, dashboard
from support.servers.free_ports import free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="prometheus is not installed (Debian's package prometheus)"
    ),
]


def answer(port: int, path: str, **parameters: Any) -> Any:
    try:
        url = f"http://127.0.0.1:{port}/api/v1/{path}?{urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=60) as response:
            return json.load(response)["data"]
    except OSError:  # it starts
        return None


@contextmanager
def prometheus(folder: Path, scraped: int) -> Iterator[int]:
    """Run Prometheus with the features of the compose file over one page of metrics; yield its port."""
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    features = [flag for flag in compose["services"]["prometheus"]["command"] if flag.startswith("--enable-feature")]
    target = {"targets": [f"127.0.0.1:{scraped}"], "labels": {"namespace": "red"}}
    job = {"job_name": "slipway-worker", "scrape_interval": "1s", "static_configs": [target]}
    (folder / "prometheus.yaml").write_text(yaml.safe_dump({"scrape_configs": [job]}))
    port = free_port()
    command = ["prometheus", f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'data'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", *features]
    with process(command, folder / "log"):
        yield port


def test_queries_of_the_dashboard_find_the_traces_of_their_values(tmp_path: Path) -> None:
    trace, labels = new_trace(), {"stage": "merge", "state": "succeeded", "outcome": "failed", "method": "GetExport"}
    with metrics.serving("127.0.0.1:0") as page, recording(InMemorySpanExporter()), prometheus(tmp_path, page) as port:
        targets = [target for panel in dashboard()["panels"] for target in panel.get("targets", ())]
        queries = [target["expr"] for target in targets if target.get("exemplar")]
        for metric in metrics.METRICS:
            if isinstance(metric, metrics.Histogram) and any(metric.name in query for query in queries):
                metric.observe(70, traceparent=trace, **{name: labels[name] for name in metric.labels})
        assert len(queries) == 6
        for query in queries:
            chosen = query.replace("$cluster", "").replace("$namespace", "red")
            period = {"start": time.time() - 600, "end": time.time() + 600}
            (shown,) = wait_for(
                lambda chosen=chosen, period=period: answer(port, "query_exemplars", query=chosen, **period)
            )
            (exemplar,) = shown["exemplars"]
            assert (exemplar["labels"], float(exemplar["value"])) == ({"trace_id": trace.split("-")[1]}, 70)
