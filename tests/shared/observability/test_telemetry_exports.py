"""One trace per export, and metrics of all parts: in one process, and in several of which one is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from slipway.artifacts import LocalStore
from slipway.client import Client
from slipway.configuration import parse
from slipway.errors import ModelExportError
from slipway.observability import metrics
from slipway.observability.telemetry import new_trace, span, tracing
from slipway.settings import Settings
from slipway_coordinator.lifecycle.rules import load_rules
from support import TINY_STAGES
from support.commands.cli import SLIPWAY
from support.coordinators.harness import Harness, process, state, tiny_export, tiny_task, wait_for
from support.servers.free_ports import free_port
from support.servers.metrics_page import exemplars, page
from support.servers.otlp_collector import Collector, collecting, facts


@pytest.fixture
def collector() -> Iterator[tuple[Collector, str]]:
    with collecting() as started:
        yield started


def connected(kept: Collector) -> None:
    """Check that every span but one root has a parent within the same trace."""
    spans = list(kept.spans)
    assert len({span.trace_id for span in spans}) == 1
    known = {span.span_id for span in spans}
    roots = {span.name for span in spans if span.parent_span_id not in known}
    assert len(roots) == 1, roots


def test_a_retry_is_linked_to_the_attempt_before(collector: tuple[Collector, str], tmp_path: Path) -> None:
    kept, endpoint = collector
    (tmp_path / "rules.yaml").write_text(
        "rules:\n  - {name: other-engine, reasons: [EXPORT_ENGINE_FAILED], set: {engine: second, fail: ''}, say: again}\n"
        "guidance: {default: [call us]}\n"
    )
    settings = Settings(home=tmp_path, scratch=tmp_path, tracing="otlp", otlp_endpoint=endpoint)
    rules = {"rules": load_rules(tmp_path / "rules.yaml")}
    with (
        tracing(settings),
        metrics.serving("127.0.0.1:0") as port,
        Harness(tmp_path, options=rules) as harness,
    ):
        task = tiny_task("m", engine="first", fail="EXPORT_ENGINE_FAILED")
        record = tiny_export("linked", task, tiny_task("v", needs=("m",)), base=harness.base())
        name = harness.submit(record.with_(traceparent=new_trace()))
        ended = harness.finished(name)
        assert state(ended) == "succeeded"
        wait_for(lambda: exemplars(port, metrics.EXPORT_SECONDS.name))  # counted just after it can be seen
        for metric in (metrics.QUEUE_SECONDS, metrics.ATTEMPT_SECONDS, metrics.STAGE_SECONDS, metrics.EXPORT_SECONDS):
            shown = exemplars(port, metric.name)
            assert {exemplar.labels["trace_id"] for _, exemplar in shown} == {ended.trace_id}, metric.name
    connected(kept)
    stage = "support.stages.watched:STAGE"
    first, second, after = kept.named(f"{stage} attempt")
    assert facts(first.attributes)["slipway.reason"] == "EXPORT_ENGINE_FAILED"
    assert [link.span_id for link in second.links] == [first.span_id]
    assert facts(second.attributes)["slipway.rule"] == "other-engine"
    assert not first.links
    assert not after.links
    run = kept.one("export run")
    assert {first.parent_span_id, second.parent_span_id, after.parent_span_id} == {run.span_id}
    stages = kept.named(f"stage {stage}")
    assert [stage.parent_span_id for stage in stages] == [first.span_id, second.span_id, after.span_id]
    assert [kept.named(f"{stage} {end}") != [] for end in ("granted", "failed", "succeeded")] == [True] * 3


class Parts:
    """Run a coordinator and a worker as processes, with metrics and traces."""

    def __init__(self, home: Path, stack: ExitStack, endpoint: str) -> None:
        self.home, self.stack = home, stack
        self.address = f"127.0.0.1:{free_port()}"
        self.environment = {
            "SLIPWAY_HOME": str(home),
            "SLIPWAY_TEST_STAGES": str(home),
            "SLIPWAY_TRACING": "otlp",
            "SLIPWAY_AUDIT": "otlp",
            "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
            "PYTHONPATH": os.pathsep.join([str(TINY_STAGES), os.environ["PYTHONPATH"]]),
        }

    def coordinator(self) -> subprocess.Popen[bytes]:
        return self._start("coordinator", "--listen", self.address, "--state", str(self.home / "state.db"))

    def worker(self) -> subprocess.Popen[bytes]:
        stages = "merge,quantize,validate"
        return self._start("worker", "--coordinator", self.address, "--stage", stages, "--drain-seconds", "0")

    def _start(self, service: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [SLIPWAY, service, *arguments, "--metrics", "127.0.0.1:0"]
        return self.stack.enter_context(process(command, self.home / f"{service}.log", **self.environment))

    def log(self, module: str) -> list[dict[str, str]]:
        return [json.loads(line) for line in (self.home / f"{module}.log").read_text().splitlines()]

    def metrics_ports(self, module: str) -> list[int]:
        messages = [line["message"] for line in self.log(module)]
        return [int(found[1]) for text in messages if (found := re.fullmatch(r"metrics on port (\d+)", text))]

    def connect(self) -> Client:
        client = self.stack.enter_context(Client(self.address))
        wait_for(lambda: answers(client))
        return client


def answers(client: Client, name: str = "") -> str:
    try:
        return state(client.get_export(name)) if name else str(list(client.list_exports()))
    except ModelExportError as error:
        assert error.reason == "COORDINATOR_UNAVAILABLE"
        return ""


@pytest.mark.slow
def test_processes_share_a_trace_and_show_their_metrics_over_a_crash(
    collector: tuple[Collector, str], tmp_path: Path
) -> None:
    kept, endpoint = collector
    hold = tmp_path / "hold-merge"
    hold.touch()
    (tmp_path / "base").write_text("base")
    digest = LocalStore(tmp_path / "store").put_files({"base": tmp_path / "base"})
    settings = Settings(home=tmp_path, scratch=tmp_path, tracing="otlp", otlp_endpoint=endpoint)
    with ExitStack() as stack:
        parts = Parts(tmp_path, stack, endpoint)
        first, _ = parts.coordinator(), parts.worker()
        client = parts.connect()
        with tracing(settings, service="client"), span("client"):
            configuration = parse({"formats": {"onnx": {"enabled": False}}, "validation": {"compare_outputs": False}})
            export = client.create_export(configuration, sources={"base": digest, "adapter": digest}, export_id="x")
        wait_for((tmp_path / "runs").exists)
        held = page(parts.metrics_ports("coordinator")[0])
        wait_for(lambda: kept.logs)  # what waits is lost with its process
        first.send_signal(signal.SIGKILL)  # spans of the last half second are not sent yet
        first.wait()
        parts.coordinator()
        wait_for(lambda: len(parts.metrics_ports("coordinator")) == 2)
        port = parts.metrics_ports("coordinator")[1]
        wait_for(lambda: page(port).get(("slipway_leased_tasks", (("stage", "merge"),))) == 1)
        hold.unlink()
        wait_for(lambda: answers(client, export.name) == "succeeded")
        ended = ("slipway_exports_ended_total", (("state", "succeeded"),))
        wait_for(lambda: ended in page(port))  # counted just after it can be seen
        coordinator = page(port)
        worker = page(parts.metrics_ports("worker")[0])
        logs = parts.log("coordinator") + parts.log("worker")
    _check_trace(kept)
    assert export.trace_id == kept.spans[0].trace_id.hex()
    _check_metrics(held, coordinator, worker)
    _check_audit(kept, export.trace_id)
    traced = {line["message"].split()[0] for line in logs if line.get("trace_id") == export.trace_id}
    assert traced >= {"leased", "runs"}


def _check_trace(kept: Collector) -> None:
    connected(kept)
    senders = dict(zip([span.name for span in kept.spans], kept.senders, strict=True))
    expected = {"client": "client", "export created": "slipway-coordinator", "export ended": "slipway-coordinator"}
    expected |= {"export run": "slipway-coordinator"}
    for stage in ("merge", "validate"):
        transitions = (f"{stage} granted", f"{stage} attempt", f"{stage} succeeded")
        expected |= dict.fromkeys(transitions, "slipway-coordinator")
        expected |= dict.fromkeys((f"stage {stage}", f"{stage} process"), "slipway-worker")
    phases = dict.fromkeys(("start", "prepare", "holding"), "slipway-worker")
    transfers = {name: sender for name, sender in senders.items() if name.startswith(("fetching ", "storing "))}
    assert transfers
    assert senders == expected | phases | transfers
    for name in expected:
        assert len(kept.named(name)) == 1, name  # what was sent twice is the same span
    merge = kept.one("merge attempt")
    assert kept.one("stage merge").parent_span_id == merge.span_id
    assert kept.one("merge process").parent_span_id == kept.one("stage merge").span_id
    assert kept.one("holding").parent_span_id == kept.one("merge process").span_id
    assert kept.one("export run").parent_span_id == kept.one("client").span_id


def _check_audit(kept: Collector, trace_id: str) -> None:
    # Once or twice: a record may have arrived before the kill, and its answer not.
    said = {(facts(record.attributes)["slipway.audit.action"], record.trace_id.hex()) for record in kept.logs}
    assert said == {("CreateExport", trace_id)}
    assert {sender["service.name"] for sender in kept.log_senders} == {"slipway-coordinator"}


def _check_metrics(held: dict, coordinator: dict, worker: dict) -> None:
    def of(name: str, **labels: str) -> tuple:
        return name, tuple(sorted(labels.items()))

    assert held[of("slipway_leased_tasks", stage="merge")] == 1
    assert held[of("slipway_exports_created_total")] == 1
    assert held[of("slipway_coordinator_active")] == 1
    assert held[of("slipway_leases_granted_total", stage="merge", project="other")] == 1
    assert held[of("slipway_project_tasks", project="other", state="running")] == 1
    assert held[of("slipway_project_exports", project="other")] == 1
    assert coordinator[of("slipway_project_exports", project="other")] == 0
    completed = of("slipway_calls_total", method="slipway.v1.WorkerService/CompleteTask", code="OK")
    assert coordinator[completed] == 2
    for stage in ("merge", "validate"):
        ended = {"stage": stage, "state": "succeeded"}
        assert coordinator[of("slipway_attempts_total", reason="", **ended)] == 1
        assert coordinator[of("slipway_attempt_duration_seconds_count", **ended)] == 1
        assert worker[of("slipway_result_lookups_total", stage=stage, result="miss")] == 1
        assert worker[of("slipway_stage_duration_seconds_count", stage=stage, outcome="succeeded")] == 1
        assert worker[of("slipway_artifact_bytes_total", stage=stage, direction="stored")] > 0
        assert coordinator[of("slipway_queue_tasks", stage=stage)] == 0
        assert coordinator[of("slipway_workers", stage=stage)] == 1
    assert coordinator[of("slipway_exports_ended_total", state="succeeded")] == 1
    assert worker[of("slipway_stage_peak_memory_bytes_count", stage="merge")] == 1
    assert worker[of("slipway_worker_slots")] >= 1
