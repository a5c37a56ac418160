"""Exports whose tasks are Jobs: the pods are processes of this machine, and the artifacts are those of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightkube", reason="pip install 'slipway-ml[kubernetes]'")

from slipway.contracts.engine import WorkerStart
from slipway.engines.kubernetes.service import SERVICE
from slipway.planning.references import AttemptKey
from slipway_coordinator.broker.submitter import EngineSetup
from support import TINY_STAGES
from support.cluster import on_engine
from support.cluster.reference import reference
from support.coordinators.harness import Harness, TinyStages, state, states, tiny_export, tiny_task, wait_for
from support.harness.unhurried import unhurried
from support.servers.job_nodes import NODE, JobNodes, job_nodes
from support.servers.jobs_api import JobsApi, worker_deployment

KEEPING = "support.stages.plain:KEEPING"
ALL = "merge,calibration_data,calibrate,quantize,onnx_export,reference,validate"


@dataclass
class Place:
    """A coordinator in this process, and the cluster that runs its tasks."""

    harness: Harness
    api: JobsApi
    nodes: JobNodes


@contextmanager
def coordinator(home: Path, *, cancels_at_stop: bool = True) -> Iterator[Harness]:
    def setup(_: int) -> EngineSetup:
        worker = WorkerStart("me", f"unix:{home / 's'}", str(home / "store"))
        return EngineSetup("kubernetes", SERVICE.open("tests", worker), "me", cancels_at_stop=cancels_at_stop)

    with Harness(home, with_worker=False, options={"workers_gone": False}, engine=setup) as harness:
        yield harness


@contextmanager
def cluster(home: Path, api: JobsApi, stages: str) -> Iterator[JobNodes]:
    variables = [{"name": "SLIPWAY_STORE", "value": str(home / "store")}]
    api.put("deployments", worker_deployment(stages=stages, env=variables))
    with job_nodes(api, home / "pods", SLIPWAY_HOME=str(home), SLIPWAY_SCRATCH=str(home / "scratch")) as nodes:
        yield nodes


@contextmanager
def place(home: Path, api: JobsApi, stages: str) -> Iterator[Place]:
    with cluster(home, api, stages) as nodes, coordinator(home) as harness:
        yield Place(harness, api, nodes)


@pytest.mark.slow
def test_a_preempted_job_goes_on_with_what_its_attempt_kept(tmp_path: Path, api: JobsApi) -> None:
    told = tmp_path / "told"
    told.write_text("hang")
    with place(tmp_path, api, KEEPING) as on:
        task = tiny_task("m", stage=KEEPING)
        task = task.model_copy(update={"params": {"told": str(told)}, "inputs": {}})
        name = on.harness.submit(tiny_export("x", task, base=on.harness.base()))
        wait_for(lambda: list((tmp_path / "scratch").glob(".keeping*/attempts")))
        told.write_text("")
        (job,) = on.nodes.started
        on.nodes.preempt(job)
        export = on.harness.finished(name)
        assert state(export) == "succeeded"
        assert len(export.tasks[0].attempts) == 1  # the same one, so no recovery rule changed anything
        record = on.harness.run(lambda: on.harness.server.coordinator.load(name))
        assert record.tasks[0].facts["attempts"] == 2
        assert (record.tasks[0].attempts[0].losses, len(on.nodes.started)) == (0, 2)


@pytest.mark.slow
def test_cancelling_frees_the_place_within_seconds(tmp_path: Path, api: JobsApi) -> None:
    stage = "support.stages.watched:STAGE"
    with place(tmp_path, api, stage) as on:
        name = on.harness.submit(tiny_export("x", tiny_task("m", sleep_seconds=60), base=on.harness.base()))
        wait_for(lambda: states(on.harness.client.get_export(name))["m"] == "running")
        limit, began = unhurried(5.0), time.monotonic()
        on.harness.client.cancel_export(name)
        wait_for(lambda: not api.names("jobs") and not api.names("pods"))
        assert time.monotonic() - began < limit
        assert state(on.harness.finished(name)) == "cancelled"


@pytest.mark.slow
def test_a_restarted_coordinator_finds_its_jobs(tmp_path: Path, api: JobsApi) -> None:
    free = tmp_path / "free"
    task = tiny_task("m", sleep_seconds=120, unless=str(free), runs=str(tmp_path / "runs"))
    with cluster(tmp_path, api, "support.stages.watched:STAGE") as nodes:
        with coordinator(tmp_path, cancels_at_stop=False) as first:
            name = first.submit(tiny_export("x", task, base=first.base()))
            wait_for(lambda: states(first.client.get_export(name))["m"] == "running")
        with coordinator(tmp_path) as second:
            key = AttemptKey.parse(f"{name}:m:1")
            wait_for(lambda: key in second.server.coordinator.broker.board.held)
            free.touch()
            assert state(second.finished(name)) == "succeeded"
        assert len(nodes.started) == 1
    assert (tmp_path / "runs").read_text() == "m\n"


@pytest.mark.slow
def test_a_container_that_is_ended_for_its_memory_fails_the_attempt(tmp_path: Path, api: JobsApi) -> None:
    stage, free = "support.stages.watched:STAGE", tmp_path / "free"
    with place(tmp_path, api, stage) as on:
        task = tiny_task("m", sleep_seconds=60, unless=str(free))
        name = on.harness.submit(tiny_export("x", task, base=on.harness.base()))
        wait_for(lambda: states(on.harness.client.get_export(name))["m"] == "running")
        on.nodes.kill(on.nodes.started[0], "OOMKilled")
        wait_for(lambda: len(on.nodes.started) == 2)
        free.touch()
        export = on.harness.finished(name)
        assert [bool(one.error.message) for one in export.tasks[0].attempts] == [True, False]
        assert "ended at 8Gi" in export.tasks[0].attempts[0].error.message


@pytest.mark.slow
def test_an_export_runs_as_jobs_with_the_digests_of_one_process(tmp_path: Path, api: JobsApi) -> None:
    home = tmp_path / "home"
    home.mkdir()
    held = TinyStages(home).hold("quantize")
    undisturbed = reference(tmp_path / "reference", ["x"])["x"]
    path = os.pathsep.join([str(TINY_STAGES), os.environ["PYTHONPATH"]])
    variables = {"PYTHONPATH": path, "SLIPWAY_TEST_STAGES": str(home), "SLIPWAY_HOME": str(home)}
    api.put("deployments", worker_deployment(stages=ALL))
    engine = {"SLIPWAY_ENGINE": "kubernetes:tests", "KUBECONFIG": str(tmp_path / "config")}
    with job_nodes(api, tmp_path / "pods", **variables) as nodes, (tmp_path / "log").open("wb") as log:
        command = [sys.executable, "-P", on_engine.__file__, "x"]
        process = subprocess.Popen(
            command, env={**os.environ, **variables, **engine}, cwd=home, stdout=subprocess.PIPE, stderr=log, text=True
        )
        wait_for(lambda: "quantize" in TinyStages(home).runs(), seconds=300)
        assert len(api.names("secrets")) == 1
        nodes.preempt(next(name for name in nodes.started if "quantize" in name))
        held.unlink()
        out, _ = process.communicate(timeout=300)
    lines: list[dict[str, Any]] = [json.loads(line) for line in out.splitlines()]
    assert "result" in lines[-1], (tmp_path / "log").read_text()
    assert lines[-1]["result"] == asdict(undisturbed)
    assert any(f"runs on {NODE}" in str(line.get("line")) for line in lines)
    assert all(errors == [""] for errors in lines[-1]["attempts"].values())
    assert api.names("secrets") == []
