"""An export of levels alone: neither the merged model nor the float32 graph is stored, and the levels are the same to the bit."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from support.commands.cli import Done, slipway
from support.models import tiny_models

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

LOOSE = (
    "int8.mean_kl=9,int8.max_abs_diff=99,int8.top1_agreement=0,int8.perplexity_ratio=99,int8.adapter_strength_error=99"
)
QUICK = ("validation.test_samples=1", "validation.benchmark_performance=false", f"validation.limits={LOOSE}")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("project")
    tiny_models.make_base(root / "base", hidden=256)
    tiny_models.make_checkpoint(root / "base", root / "run", step=5)
    return root


def export(project: Path, home: Path, *settings: str) -> Done:
    words = [
        "export",
        "--json",
        "--base-model",
        project / "base",
        "--checkpoint",
        project / "run",
        "--out",
        home / "out",
    ]
    for setting in ("optimization.quantization=int8", *QUICK, *settings):
        words += ["--set", setting]
    return slipway(*words, home=home, timeout=500)


def level_files(done: Done) -> dict[str, bytes]:
    """Return the graph and the weights of the levels; a graph's file also names the artifact that it was made of."""
    graph = Path(done.json["paths"]["onnx-int8"]) / "model.onnx"
    weights = (graph.with_name("model.onnx.data"), Path(done.json["paths"]["pytorch-int8"]) / "model.safetensors")
    found = {path.name: path.read_bytes() for path in weights}
    return found | {graph.name: onnx.load(graph, load_external_data=False).graph.SerializeToString()}


def test_levels_alone_leave_no_copies_and_are_the_same(project: Path, tmp_path: Path) -> None:
    both = ("formats.pytorch.unquantized=false", "formats.onnx.unquantized=false")
    alone = export(project, tmp_path / "alone", *both)
    whole = export(project, tmp_path / "whole", "validation.enabled=false")
    assert (alone.code, whole.code) == (0, 0), alone.err[-2000:] + whole.err[-2000:]
    assert sorted(alone.json["paths"]) == ["onnx-int8", "pytorch-int8"]
    assert level_files(alone) == level_files(whole)
    base = (project / "base" / "model.safetensors").stat().st_size
    largest = max(len(data) for data in level_files(alone).values())
    sizes = {
        path: path.stat().st_size for path in (tmp_path / "alone" / "store" / "blobs").rglob("*") if path.is_file()
    }
    assert sum(size >= base - 4096 for size in sizes.values()) == 1, "the base, and no other copy of the model"
    assert sorted(sizes.values())[-2] <= max(
        largest, (project / "run" / "checkpoint-5" / "adapter_model.safetensors").stat().st_size
    )
    original = alone.json["original_size_bytes"]
    assert abs(original - whole.json["original_size_bytes"]) < 50_000  # the description of the merge is counted too
    tasks = {attempt["task"]: attempt["params"] for attempt in alone.json["attempts"]}
    assert tasks["merge"]["weights"] == tasks["onnx_export"]["weights"] == "deferred"
    again = export(project, tmp_path / "alone", *both)
    assert again.code == 0
    assert level_files(again) == level_files(alone)
