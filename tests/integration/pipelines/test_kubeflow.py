"""The component of Kubeflow Pipelines: what kfp compiles, and the pipeline, run as kfp runs pipelines on a machine, at a real coordinator."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.commands.cli import SLIPWAY
from support.commands.platforms import DRIVERS, EXAMPLES, Platform
from support.coordinators.pipeline_site import PipelineSite

pytestmark = pytest.mark.slow
COMMITTED = EXAMPLES / "kubeflow" / "export.yaml"


@pytest.fixture(scope="module")
def kubeflow(platforms: Callable[[str], Platform]) -> Platform:
    return platforms("kubeflow")


def documents(path: Path) -> list[dict[str, Any]]:
    found = list(yaml.safe_load_all(path.read_text()))
    found[0].pop("sdkVersion")
    return found


def run(kubeflow: Platform, site: PipelineSite, folder: Path, **parameters: str) -> tuple[int, str]:
    given = {"checkpoint": site.checkpoint, "base_model": site.base, "formats": "pytorch", **parameters}
    path = os.pathsep.join([str(Path(SLIPWAY).parent), os.environ["PATH"]])
    variables = {**site.environment(), "SLIPWAY_HOME": str(folder / "home"), "PATH": path}
    words = (DRIVERS / "run_kubeflow.py", folder, json.dumps(given))
    return kubeflow.run(*words, **variables, PYTHONPATH_OF_STEPS=os.environ["PYTHONPATH"])


def test_the_yaml_is_what_kfp_compiles(kubeflow: Platform, tmp_path: Path) -> None:
    code, output = kubeflow.run(DRIVERS / "run_kubeflow.py", tmp_path, "{}")
    assert code == 0, output
    assert documents(tmp_path / "compiled.yaml") == documents(COMMITTED), "python pipeline.py"


def test_a_pipeline_returns_the_digests(kubeflow: Platform, site: PipelineSite, tmp_path: Path) -> None:
    before = site.names()
    code, output = run(kubeflow, site, tmp_path)
    assert code == 0, output + site.logs()
    export = site.wait_for_export("SUCCEEDED", besides=before)
    (digests,) = re.findall(r"^digests (.*)$", output, re.MULTILINE)
    assert json.loads(digests) == {"pytorch": export["outputs"]["pytorch"]}


def test_a_pipeline_fails_with_the_reason(kubeflow: Platform, site: PipelineSite, tmp_path: Path) -> None:
    code, output = run(kubeflow, site, tmp_path, base_model=site.other_base)
    assert code != 0
    assert "ADAPTER_BASE_MISMATCH" in output, output
