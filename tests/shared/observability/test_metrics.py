"""Metrics: free while off, and a page that Prometheus can read while on."""

from __future__ import annotations

import re
import socket
import subprocess
import sys

import pytest

from slipway.errors import ServiceError
from slipway.observability import metrics
from support.servers.metrics_page import page


def test_counting_is_free_while_nobody_looks() -> None:
    code = "import sys; from slipway import metrics; metrics.ATTEMPTS.add(stage='a', state='b', reason='')"
    code += "; print([name for name in sys.modules if name.startswith(('prometheus', 'http.server'))])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_what_is_counted_is_on_the_page() -> None:
    waiting = 3
    with (
        metrics.serving("127.0.0.1:0") as port,
        metrics.reading(lambda: [(metrics.QUEUE_TASKS, {"stage": "merge"}, waiting)]),
    ):
        metrics.ATTEMPTS.add(stage="merge", state="failed", reason="OUT_OF_MEMORY")
        metrics.ATTEMPTS.add(stage="merge", state="failed", reason="OUT_OF_MEMORY")
        metrics.STAGE_PEAK.observe(3 << 30, stage="merge")
        metrics.LEASES_REFUSED.add()
        first = page(port)
        waiting = 4
        second = page(port)
    key = ("slipway_attempts_total", (("reason", "OUT_OF_MEMORY"), ("stage", "merge"), ("state", "failed")))
    assert first[key] == 2
    assert first["slipway_late_results_total", ()] == 1
    assert first["slipway_stage_peak_memory_bytes_bucket", (("le", "4.294967296e+09"), ("stage", "merge"))] == 1
    assert first["slipway_stage_peak_memory_bytes_bucket", (("le", "2.147483648e+09"), ("stage", "merge"))] == 0
    assert first["slipway_queue_tasks", (("stage", "merge"),)] == 3
    assert second["slipway_queue_tasks", (("stage", "merge"),)] == 4
    assert first["process_resident_memory_bytes", ()] > 1 << 20


def test_a_second_page_starts_from_zero_and_the_port_is_free_again() -> None:
    with metrics.serving("127.0.0.1:0") as port:
        metrics.LEASES_REFUSED.add()
    with metrics.serving(f"127.0.0.1:{port}"):
        assert page(port)["slipway_late_results_total", ()] == 0


def test_no_address_means_no_page() -> None:
    with metrics.serving("") as port:
        assert port == 0
        metrics.LEASES_REFUSED.add()


@pytest.mark.parametrize("address", ["9090", "127.0.0.1:", "127.0.0.1:99999", "127.0.0.1:http"])
def test_an_impossible_address_is_refused(address: str) -> None:
    with pytest.raises(ServiceError, match="HOST:PORT") as caught, metrics.serving(address):
        pass
    assert caught.value.reason == "REQUEST_INVALID"


def test_a_taken_port_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ServiceError, match=address), metrics.serving(address):
            pass


def test_names_follow_the_conventions_of_prometheus() -> None:
    names = [metric.name for metric in metrics.METRICS]
    assert len(set(names)) == len(names) > 15
    for metric in metrics.METRICS:
        assert re.fullmatch(r"slipway_[a-z_]+", metric.name)
        assert metric.help.endswith(".")
        assert isinstance(metric, metrics.Counter) == metric.name.endswith("_total"), metric.name
        if isinstance(metric, metrics.Histogram):
            assert metric.name.endswith(("_seconds", "_bytes")), metric.name
