"""``slipway export`` of several runs at once: combined first, then merged and compared as one adapter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.commands.cli import Done, slipway
from support.models import tiny_models

pytestmark = [pytest.mark.slow]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("combined")
    base = tiny_models.make_base(root / "base")
    for seed, name in enumerate(("first", "second"), 3):
        tiny_models.make_checkpoint(base, root / name, seed=seed)
    return root


def export(project: Path, *more: str | Path) -> Done:
    where = ("--base-model", project / "base", "--checkpoint", project / "first", "--out", project / "out")
    fast = ("formats.onnx.enabled=false", "validation.benchmark_performance=false", "validation.test_samples=2")
    combined = (f"combination.adapters={project / 'second'}", "combination.weights=0.75,0.5")
    assignments = [part for each in (*fast, *combined) for part in ("--set", each)]
    return slipway("export", "--json", *where, *assignments, *more, home=project / "home")


def test_two_runs_become_one_model_that_is_compared_with_both(project: Path) -> None:
    planned = export(project, "--plan").json
    assert [task["id"] for task in planned["tasks"]] == ["combine", "merge", "reference", "validate"]
    done = export(project)
    assert done.code == 0, done.err
    assert done.json["validation_passed"]
    output = Path(done.json["output_directory"])
    lineage = json.loads((output / "lineage.json").read_text())
    assert {"adapter", "adapter-02", "base"} <= lineage["sources"].keys()
    (combine,) = [task for task in lineage["tasks"] if task["stage"] == "combine"]
    assert combine["params"]["weights"] == [0.75, 0.5]


def test_a_run_that_is_not_there_is_named_before_anything_runs(project: Path) -> None:
    done = export(project, "--set", "combination.adapters=nowhere")
    assert done.code == 3
    assert "nowhere" in done.err
    assert not any((project / "out").glob("nowhere*"))
