"""``slipway export`` from bases that have to be prepared, and onto the NF4 round trip: planned, shared, and compared with that base."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from support.commands.cli import Done, slipway
from support.models import tiny_models

pytestmark = [pytest.mark.slow]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, two runs on it, and the same base as a pickle."""
    root = tmp_path_factory.mktemp("prepared")
    base = tiny_models.make_base(root / "base")
    tiny_models.make_checkpoint(base, root / "run")
    tiny_models.make_checkpoint(base, root / "other", seed=5)
    tensors = load_file(base / "model.safetensors")
    shutil.copytree(base, root / "pickle")
    (root / "pickle" / "model.safetensors").unlink()
    torch.save(tensors, root / "pickle" / "pytorch_model.bin")
    return root


def export(project: Path, base: str, run: str, *more: str | Path) -> Done:
    where = ("--base-model", project / base, "--checkpoint", project / run, "--out", project / "out")
    fast = ("formats.onnx.enabled=false", "validation.benchmark_performance=false", "validation.test_samples=2")
    assignments = [part for each in fast for part in ("--set", each)]
    return slipway("export", "--json", *where, *assignments, *more, home=project / "home")


def attempts(done: Done) -> dict[str, bool]:
    assert done.code == 0, done.err
    return {attempt["task"]: attempt["reused"] for attempt in done.json["attempts"]}


def test_a_base_is_prepared_once_for_all_exports_from_it(project: Path) -> None:
    first, second = (export(project, "pickle", run, "--set", "validation.enabled=false") for run in ("run", "other"))
    assert attempts(first) == {"prepare": False, "merge": False}
    assert attempts(second) == {"prepare": True, "merge": False}


def test_the_adapter_is_merged_onto_the_nf4_round_trip_where_asked(project: Path) -> None:
    nf4 = ("--set", "base_model.load_in_4bit=true", "--set", "base_model.merge_onto=nf4")
    done = export(project, "base", "run", *nf4)
    assert attempts(done)["prepare"] is False
    assert done.json["validation_passed"]
    assert any("NF4 round trip" in warning for warning in done.json["warnings"])
    lineage = json.loads((Path(done.json["output_directory"]) / "lineage.json").read_text())
    (prepared,) = [task for task in lineage["tasks"] if task["stage"] == "prepare"]
    assert prepared["params"]["merge_onto"] == "nf4"


def test_nf4_without_4bit_training_is_a_conflict(project: Path) -> None:
    done = export(project, "base", "run", "--set", "base_model.merge_onto=nf4")
    assert (done.code, done.json["reason"]) == (3, "CONFIGURATION_INVALID")
    assert "base_model.load_in_4bit" in done.json["error_message"]
