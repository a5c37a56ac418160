"""Exports in parts on clusters: the artifacts are those of one piece in one process, and a part that is killed is made again alone."""

from __future__ import annotations

import os
import signal
from collections import Counter
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.commands.cli import Done, slipway, start
from support.commands.divided_exports import PARTS, SHARDS, attempts, delivered, make_project, printed, words
from support.coordinators.harness import wait_for
from support.servers.job_nodes import job_nodes
from support.servers.jobs_api import JobsApi, worker_deployment
from support.servers.ray_cluster import ray_cluster
from support.servers.s3_server import BUCKET, S3Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

SECONDS = 600.0
"""What takes seconds on an idle machine takes minutes on a busy one."""
KILLED = "merge.part-2"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_project(tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="module")
def whole(project: Path) -> Any:
    """What an export in one piece printed, whose tasks ran in the command."""
    result = printed(slipway(*words(project, "whole", **SHARDS), home=project / "home-whole"))
    assert attempts(result) == {"merge": 1, "quantize-pytorch-bf16": 1}
    return result


def export_in_parts(project: Path, name: str, **variables: str) -> Any:
    """Export in parts on an engine, kill the process that makes a part, and return what the command printed."""
    process = start(words(project, name, **PARTS), project / f"home-{name}", **variables)
    try:
        wait_for(lambda: kill_stage_of(KILLED) or process.poll() is not None, seconds=SECONDS)
        out, err = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
        process.wait()
    return printed(Done(process.returncode, out, err))


def kill_stage_of(task: str) -> bool:
    """Kill the process of a task's first attempt, a child of the worker that an engine started for it; return whether there was one."""
    for worker in psutil.process_iter(["cmdline"]):
        if f":{task}:1" in " ".join(worker.info["cmdline"] or ()):
            with suppress(psutil.NoSuchProcess):
                for child in worker.children():
                    if "slipway.execution.child_main" in child.cmdline():
                        os.kill(child.pid, signal.SIGKILL)
                        return True
    return False


def check(parts: Any, whole: Any) -> None:
    assert attempts(parts) == {
        **dict.fromkeys((f"{task}.part-{number}" for task in ("merge", "quantize-pytorch-bf16") for number in (1, 2, 3)), 1),
        "merge": 1, "quantize-pytorch-bf16": 1, KILLED: 2,
    }  # fmt: skip
    (again,) = [attempt for attempt in parts["attempts"] if attempt["number"] == 2]
    assert again["rule"] == "killed-again"
    assert all(attempt["worker"].startswith("engine/") for attempt in parts["attempts"])
    assert parts["formats"] == whole["formats"], "with the digests of all outputs"
    assert delivered(parts) == delivered(whole)


@pytest.mark.skipif(find_spec("lightkube") is None, reason="pip install 'slipway-ml[kubernetes]'")
def test_jobs_with_volumes_of_their_own_make_parts_through_a_bucket(
    project: Path, whole: Any, tmp_path: Path, api: JobsApi, s3: S3Server
) -> None:
    api.put("deployments", worker_deployment("slipway-merge", stages="merge"))
    api.put("deployments", worker_deployment("slipway-quantize", stages="quantize"))
    store = {"SLIPWAY_STORE": f"s3://{BUCKET}/jobs-in-parts", **s3.environment()}
    with job_nodes(api, tmp_path / "pods", SLIPWAY_HOME=str(tmp_path / "volumes" / "{pod}")) as nodes:
        parts = export_in_parts(project, "jobs", SLIPWAY_ENGINE="kubernetes:tests", **store)
    check(parts, whole)
    jobs = Counter(name.rpartition("-")[0] for name in nodes.started)
    assert sorted(jobs.values()) == [1] * 9, "a Job for each attempt"
    cached = {name: cached_bytes(tmp_path / "volumes" / name) for name in nodes.started}
    joins = [size for name, size in cached.items() if "-part-" not in name]
    assert len(joins) == 2
    assert max(joins) < 200_000, "a join fetches and stores no weights"
    assert min(size for name, size in cached.items() if "-part-" in name and "quantize" in name) > 4_000_000


def cached_bytes(home: Path) -> int:
    """Return the bytes that a pod's own volume has in the end: its cache."""
    return sum(path.stat().st_size for path in home.rglob("*") if path.is_file())


@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: pip install 'slipway-ml[ray]'")
def test_a_ray_cluster_makes_parts_through_a_bucket(project: Path, whole: Any, tmp_path: Path, s3: S3Server) -> None:
    store = {"SLIPWAY_STORE": f"s3://{BUCKET}/ray-in-parts", **s3.environment()}
    with ray_cluster(tmp_path, nodes=2, SLIPWAY_HOME=str(tmp_path / "home")) as cluster:
        parts = export_in_parts(project, "ray", SLIPWAY_ENGINE=f"ray:{cluster.address}", **store)
        assert cluster.named_actors() == []
    check(parts, whole)
    assert (tmp_path / "home" / "cache").is_dir(), "the nodes had a cache of the bucket"
