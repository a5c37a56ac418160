"""Read the metrics of a process as Prometheus does."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator

from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Exemplar, Sample

PROMETHEUS_ACCEPTS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,application/openmetrics-text;version=0.0.1;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
"""The formats that Prometheus 3 asks for."""


def page(port: int) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return every sample by its name and labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in samples}


def exemplars(port: int, metric: str) -> list[tuple[Sample, Exemplar]]:
    """Scrape as Prometheus does; return the samples of a metric that have an exemplar, each with it."""
    samples = [sample for sample in _openmetrics(port) if sample.name.startswith(metric)]
    return [(sample, sample.exemplar) for sample in samples if sample.exemplar is not None]


def _openmetrics(port: int) -> Iterator[Sample]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": PROMETHEUS_ACCEPTS})
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
        text = answer.read().decode()
    for family in openmetrics_families(text):
        yield from family.samples
