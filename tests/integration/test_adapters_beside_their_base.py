"""``slipway export`` of adapters unmerged: proven equal to the trained model, and run as the card says."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("xllamacpp", reason="llama.cpp runs the files: pip install 'slipway-ml[gguf]'")
from slipway.stage import Context
from slipway_validate.params import ValidateParams
from slipway_validate.stage import STAGE as VALIDATE
from support.commands.cli import Done, slipway
from support.commands.usage_examples import usage_examples
from support.models import tiny_models
from support.models.gguf_models import save_family, write_gguf
from support.models.saved_adapters import edit

pytestmark = [pytest.mark.slow]

LIMITS = {"peft": 1e-6, "onnx": 1e-6, "gguf": 1e-4}
"""Largest mean KL from base + adapter by target: llama.cpp has the base in float16."""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("beside")
    save_family("qwen3", root / "base")
    checkpoint = tiny_models.make_checkpoint(root / "base", root / "run", seed=3)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(root / "base" / file, checkpoint / file)
    return root


OUTPUTS = {target: "adapter" if target == "peft" else f"adapter-{target}" for target in LIMITS}


def export(project: Path, *more: str | Path) -> Done:
    where = ("--base-model", project / "base", "--checkpoint", project / "run", "--out", project / "out")
    only = ("formats.pytorch.enabled=false", "formats.onnx.enabled=false", "formats.adapter.enabled=true")
    fast = (
        "validation.benchmark_performance=false",
        "validation.test_samples=2",
        f"formats.adapter.targets={','.join(LIMITS)}",
    )
    assignments = [part for each in (*only, *fast) for part in ("--set", each)]
    return slipway("export", "--json", *where, *assignments, *more, home=project / "home")


@pytest.fixture(scope="module")
def exported(project: Path) -> dict[str, Any]:
    done = export(project)
    assert done.code == 0, done.err[-3000:]
    return done.json


def test_all_forms_are_proven_without_a_merge(project: Path, exported: dict[str, Any]) -> None:
    report = json.loads((Path(exported["output_directory"]) / "report.json").read_text())
    found = {output["name"]: output for output in report["validation"]["outputs"]}
    assert {name: output["status"] for name, output in found.items()} == dict.fromkeys(OUTPUTS.values(), "passed")
    for target, name in OUTPUTS.items():
        assert found[name]["to_reference"]["mean_kl"] < LIMITS[target]
    assert all(output["survival"] is None for output in found.values())  # their weights are the base's
    planned = export(project, "--plan").json
    tasks = [task["id"] for task in planned["tasks"]]
    made = ["adapter", "onnx_export-adapter", "adapter-onnx", "adapter-pairs", "adapter-gguf"]
    assert tasks == [*made, "reference", "validate"]


def test_the_examples_of_the_card_run(project: Path, exported: dict[str, Any]) -> None:
    folder = Path(exported["output_directory"])
    edit(folder / "adapter", base_model_name_or_path=str(project / "base"))
    examples = usage_examples((folder / "README.md").read_text())
    assert set(examples) == set(OUTPUTS.values())
    file, _ = write_gguf(project / "base", project / "file", level="q8_0")
    shutil.copy(file, folder / "adapter-gguf" / "base.gguf")
    for code in examples.values():
        assert subprocess.run(
            [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True
        ).stdout


def test_a_folder_that_means_something_else_fails(project: Path, exported: dict[str, Any], tmp_path: Path) -> None:
    shutil.copytree(exported["paths"]["adapter"], tmp_path / "adapter")
    edit(tmp_path / "adapter", lora_alpha=1)
    (tmp_path / "work").mkdir()
    (checkpoint,) = (project / "run").glob("checkpoint-*")
    inputs = {"base": project / "base", "adapter": checkpoint, "output.adapter": tmp_path / "adapter"}
    ctx = Context(workdir=tmp_path / "work", threads=1)
    VALIDATE.run(inputs, ValidateParams(test_samples=2, benchmark_performance=False), ctx)
    assert ctx.facts["failed_outputs"] == ["adapter"]
    assert "something else than base + adapter" in ctx.facts["outputs"]["adapter"]["explanation"]
