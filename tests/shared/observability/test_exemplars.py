"""Exemplars: the trace of a value, for a scraper that asks for OpenMetrics as Prometheus does."""

from __future__ import annotations

import time
import urllib.request

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from slipway.observability import metrics
from slipway.observability.telemetry import recording, span
from support.servers.metrics_page import exemplars, page

NAME = metrics.STAGE_SECONDS.name


def observe(seconds: float, traceparent: str = "") -> None:
    metrics.STAGE_SECONDS.observe(seconds, traceparent=traceparent, stage="merge", outcome="succeeded")


def trace(digits: str, *, flags: str) -> str:
    return f"00-{digits * 16}-{'cd' * 8}-{flags}"


def test_the_last_traced_value_of_each_range_has_its_trace() -> None:
    with metrics.serving("127.0.0.1:0") as port, recording(InMemorySpanExporter()):
        with span("stage merge") as recorded:
            pass
        observe(2, trace("ab", flags="01"))
        observe(3, recorded.traceparent)
        observe(4)
        observe(40, trace("ef", flags="03"))
        first, second = exemplars(port, NAME)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            older = answer.read().decode()
            assert answer.headers["Content-Type"].startswith("text/plain")
    assert [sample.labels["le"] for sample, _ in (first, second)] == ["5.0", "60.0"]
    assert [exemplar.labels for _, exemplar in (first, second)] == [
        {"trace_id": recorded.traceparent.split("-")[1]},
        {"trace_id": "ef" * 16},
    ]
    assert [exemplar.value for _, exemplar in (first, second)] == [3, 40]
    for _, exemplar in (first, second):
        assert abs(float(exemplar.timestamp or 0) - time.time()) < 600
        assert sum(len(name) + len(value) for name, value in exemplar.labels.items()) <= 128  # OpenMetrics' limit
    assert "ef" * 16 not in older, "that format has no exemplars"


def test_what_is_not_sampled_or_not_recorded_has_none() -> None:
    nothing = ("", "nonsense", trace("ab", flags="00"), trace("ab", flags="02"), trace("00", flags="01"))
    with metrics.serving("127.0.0.1:0") as port:
        observe(2, trace("ab", flags="01"))  # this process records no spans
        with recording(InMemorySpanExporter()):
            for traceparent in nothing:
                observe(2, traceparent)
        assert exemplars(port, NAME) == []
        assert page(port)[f"{NAME}_count", (("outcome", "succeeded"), ("stage", "merge"))] == 1 + len(nothing)
