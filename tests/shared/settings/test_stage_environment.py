"""A stage's process gets only the variables that it needs, and no secret under any name."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from slipway.errors import ConfigurationError
from slipway.execution.execution import Execution
from slipway.execution.supervisor import execute
from slipway.settings import Settings
from slipway.settings.stage_environment import VARIABLE, stage_environment
from slipway.stage_call import StageCall

NEEDED = {
    "HOME": "/home/somebody",
    "LANG": "C.UTF-8",
    "LC_ALL": "C.UTF-8",
    "TMPDIR": "/fast/tmp",
    "CUDA_VISIBLE_DEVICES": "1",
    "NVIDIA_VISIBLE_DEVICES": "all",
    "OMP_PROC_BIND": "true",
    "MKL_DYNAMIC": "false",
    "HF_HOME": "/models/hub",
    "PYTHONHASHSEED": "7",
}
SECRET = {
    "SLIPWAY_STATE": "postgresql://slipway:canary-state@db/slipway",
    "SLIPWAY_TOKEN": "canary-token",
    "PGPASSWORD": "canary-database",
    "DATABASE_DSN": "canary-dsn",
    "GH_PAT": "canary-pat",
    "PRIVATE_KEY": "canary-key",
    "HF_TOKEN": "canary-hub",
    "NVIDIA_API_KEY": "canary-gpu",
    "AWS_SECRET_ACCESS_KEY": "canary-store",
    "HTTPS_PROXY": "http://me:canary-proxy@proxy:3128",
    "OTEL_EXPORTER_OTLP_HEADERS": "authorization=canary-trace",
    "MYSQL_PWD": "canary-pwd",
    "ANYTHING": "canary-else",
    "PYTHONSTARTUP": "canary.py",
    "NVIDIA_NGC_KEY": "canary-registry",
    "TRITON_URL": "https://me:canary-triton@inference",
    "TRITON_REMOTE_CACHE_BACKEND": "canary-cache",
    "TORCHINDUCTOR_REDIS_URL": "redis://:canary-redis@cache",
    "TORCH_NCCL_STORE": "canary-torch",
    "LC_SECRET": "canary-locale",
    "OMP_LICENSE": "canary-omp",
    "CUDA_VISIBLE_DEVICES_KEY": "canary-cuda",
    "MKL_": "canary-mkl",
    "ORT_ENDPOINT": "canary-ort",
    "PYTORCH_DSN": "canary-pytorch",
}


def given_to_a_stage(workdir: Path) -> dict[str, str]:
    """Return the environment of a real stage's process."""
    workdir.mkdir()
    outcome = asyncio.run(execute(Execution(StageCall("support.stages.plain:ENVIRONMENT", {}, {}), workdir)))
    found: dict[str, str] = json.loads((outcome.outputs["out"] / "environment.json").read_text())
    return found


def test_a_stage_gets_what_it_needs_and_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (NEEDED | SECRET).items():
        monkeypatch.setenv(name, value)
    found = given_to_a_stage(tmp_path / "work")
    assert {name: found.get(name) for name in NEEDED} == NEEDED
    assert {name: value for name, value in found.items() if "canary" in value} == {}
    assert found["PYTHONSAFEPATH"] == "1"


def test_an_operator_adds_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRET.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(VARIABLE, f"{os.environ[VARIABLE]}, ANYTHING,HF_TOKEN,NOT_SET")
    found = given_to_a_stage(tmp_path / "work")
    assert {name for name, value in found.items() if "canary" in value} == {"ANYTHING", "HF_TOKEN"}
    assert "NOT_SET" not in found
    assert Settings.from_environment(os.environ).stage_environment[-3:] == ("ANYTHING", "HF_TOKEN", "NOT_SET")


def test_what_a_stage_starts_gets_no_more_than_the_stage() -> None:
    around = {**NEEDED, **SECRET, VARIABLE: "ANYTHING", "PATH": "/usr/bin"}
    once = stage_environment(around)
    assert once["ANYTHING"] == "canary-else"
    assert stage_environment(once) == once


@pytest.mark.parametrize("value", ["A B", "NAME=value", "slipway_0123/456", "FINE,-"])
def test_names_alone_are_taken_and_nothing_else_is_repeated(value: str) -> None:
    with pytest.raises(ConfigurationError, match="not names of variables") as caught:
        Settings.from_environment({VARIABLE: value})
    assert caught.value.failure().exit_code == 3
    assert value not in str(caught.value)


def test_no_search_path_has_the_current_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    found = stage_environment(
        {
            "PATH": ":/usr/bin::/bin:",
            "PYTHONPATH": ":.:src:./:/opt/stages:src/..",
            "LD_LIBRARY_PATH": ":/usr/local/cuda/lib64:$ORIGIN/lib",
            "DYLD_LIBRARY_PATH": ":",
        }
    )
    assert found == {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": f"{tmp_path}/src:/opt/stages",
        "LD_LIBRARY_PATH": "/usr/local/cuda/lib64:$ORIGIN/lib",
        "PYTHONSAFEPATH": "1",
    }
