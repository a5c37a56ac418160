"""Workers with libraries of different versions, or on different GPUs, share a store and never each other's wrong results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slipway.artifacts import LocalStore

LIBRARY = "slipway-test-library"

WORKER = """
import asyncio, json, sys
from pathlib import Path
from slipway.artifacts import LocalStore
from slipway.execution.runner import TaskRunner
from slipway.stage_call import StageCall
from slipway.worker.machine import probe
store, scratch, architecture, *stages = sys.argv[1:]
runner = TaskRunner(LocalStore(Path(store)), Path(scratch), gpu_architecture=architecture)
found = {"versions": dict(probe(Path(scratch), stages).capabilities(slots=1).versions)}
for stage in stages:
    result = asyncio.run(runner.run(StageCall(stage, {}, {})))
    assert result.failure is None, result.failure
    found[stage.rpartition(":")[2]] = {"reused": result.reused, "output": result.outputs["out"], **result.facts}
print(json.dumps(found))
"""


def install(folder: Path, version: str) -> Path:
    """A library of this version, in a folder for the Python path."""
    information = folder / f"slipway_test_library-{version}.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {LIBRARY}\nVersion: {version}\n")
    (folder / "slipway_test_library.py").write_text(f"VERSION = {version!r}\n")
    return folder


def work(tmp_path: Path, library: Path | None, *stages: str, architecture: str = "") -> dict[str, Any]:
    """What a worker process with this library makes of the stages."""
    path = os.pathsep.join([*([str(library)] if library else []), os.environ["PYTHONPATH"]])
    names = [f"support.stages.plain:{stage}" for stage in stages]
    command = [sys.executable, "-c", WORKER, str(tmp_path / "store"), str(tmp_path / "scratch"), architecture, *names]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_each_version_of_a_library_has_results_of_its_own(tmp_path: Path) -> None:
    old, new = install(tmp_path / "old", "1.0"), install(tmp_path / "new", "2.0")
    first = work(tmp_path, old, "LIBRARY")
    assert first["versions"] == {LIBRARY: "1.0"}
    assert (first["LIBRARY"]["version"], first["LIBRARY"]["reused"]) == ("1.0", False)
    second = work(tmp_path, new, "LIBRARY")
    assert second["versions"] == {LIBRARY: "2.0"}
    assert (second["LIBRARY"]["version"], second["LIBRARY"]["reused"]) == ("2.0", False)
    # And back: both results are there, each for whoever would make the same.
    assert work(tmp_path, old, "LIBRARY")["LIBRARY"] == {**first["LIBRARY"], "reused": True}
    assert work(tmp_path, new, "LIBRARY")["LIBRARY"] == {**second["LIBRARY"], "reused": True}
    texts = [
        (LocalStore(tmp_path / "store").fetch(made["LIBRARY"]["output"], tmp_path / name) / "version").read_text()
        for name, made in (("a", first), ("b", second))
    ]
    assert texts == ["1.0", "2.0"]


@pytest.mark.slow
def test_results_that_depend_on_the_gpu_or_a_library_are_not_taken_from_another(tmp_path: Path) -> None:
    """A library that is missing is a version too."""
    stages = ("DEVICE", "SOURCE", "LIBRARY")
    first = work(tmp_path, None, *stages, architecture="sm89")
    other = work(tmp_path, install(tmp_path / "old", "1.0"), *stages, architecture="sm90")
    again = work(tmp_path, None, *stages, architecture="sm89")
    assert (first["versions"], other["versions"]) == ({}, {LIBRARY: "1.0"})
    assert [made["LIBRARY"]["version"] for made in (first, other, again)] == ["", "1.0", ""]
    assert [made["LIBRARY"]["reused"] for made in (first, other, again)] == [False, False, True]
    assert first["LIBRARY"]["output"] != other["LIBRARY"]["output"]
    assert [made["DEVICE"]["reused"] for made in (first, other, again)] == [False, False, True]
    assert [made["SOURCE"]["reused"] for made in (first, other, again)] == [False, True, True]


@pytest.mark.parametrize("stage", ["tensorrt_build", "validate"])
def test_what_runs_on_the_gpu_is_bound_to_it(stage: str) -> None:
    from slipway.registry import load_stage

    assert load_stage(stage).hardware.device_bound
    assert {"tensorrt", "tensorrt-rtx"} <= set(load_stage(stage).libraries)
