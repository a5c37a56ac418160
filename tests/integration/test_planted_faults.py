"""Faults that people report of other tools, planted into the stages' processes: a whole export names each, by the command a user types."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from support.commands.cli import Done, slipway
from support.faults.seeded import seeded
from support.models import gguf_faults, saved_adapters, tiny_models

needs_llama = pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="llama.cpp runs the files")

_IN_A_FILE = """
_export_model = export_model
def export_model(inputs, params, ctx):
    from support.models.gguf_faults import plant
    return plant(_export_model(inputs, params, ctx), params.type, ctx)
"""
_IN_A_MERGE = """
_merge = merge
def merge(base, adapter, output, *, params, ctx):
    _merge(base, adapter, output, params=params, ctx=ctx)
    from support.faults.merging import swap_layers
    swap_layers(output)
    ctx.digests.clear()  # the merge's own would be those of the faulty files
"""
_IN_A_BRANCH = """
from support.faults.branching import long_texts_differ_uncompiled
Qwen3MLP.forward = long_texts_differ_uncompiled
"""
NAMED = {
    "gguf-bf16": ("kept", "the rows of queries and keys are not in llama.cpp's order but in transformers'"),
    "gguf-q8_0": ("tokens", "get other tokens than by transformers"),
    "gguf-q6_k": ("chat_template", "no chat template"),
    "gguf-q4_0": ("kept", "its head is lost"),
}
"""What fails, and what is said, by output."""


def export(root: Path, base: Path, adapter: Path, *, enabled: str, path: str = "", **settings: str) -> Done:
    asked = {f"formats.{name}.enabled": str(name == enabled).lower() for name in ("pytorch", "onnx", enabled)}
    asked |= {"optimization.quantization": "none", "validation.benchmark_performance": "false"}
    asked |= {"validation.test_samples": "2", "validation.on_failure": "fail"} | settings
    words = [word for name, value in asked.items() for word in ("--set", f"{name}={value}")]
    where = ("--base-model", base, "--checkpoint", adapter, "--out", root / "out")
    return slipway("export", "--json", *where, *words, home=root / "home", **({"PYTHONPATH": path} if path else {}))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("tiny")
    return tiny_models.make_base(root / "base"), tiny_models.make_checkpoint(root / "base", root / "run")


@pytest.mark.slow
def test_a_fault_of_a_merge(tiny: tuple[Path, Path], tmp_path: Path) -> None:
    """Named for every output that has it, and no rule makes the quantized one again: the fault is not its rounding."""
    (base, adapter), said = tiny, "holds the weight of model.layers."
    path = seeded(tmp_path / "fault", {"slipway_merge.merge": _IN_A_MERGE})
    settings = {"formats.pytorch.quantization": "int4", "optimization.group_size": "16"}
    settings |= {"validation.on_failure": "fallback"}
    done = export(tmp_path, base, adapter, enabled="pytorch", path=path, **settings)
    assert done.code == 4, done.err[-3000:]
    report = json.loads((Path(done.json["output_directory"]) / "report.json").read_text())
    found: dict[str, Any] = {each["name"]: each for each in report["validation"]["outputs"]}
    assert found.keys() == {"pytorch", "pytorch-int4"}
    for name, output in found.items():
        assert output["status"] == "failed", name
        assert said in output["explanation"], name
    assert said in done.json["error_message"] + json.dumps(done.json["warnings"])
    tried = [each for each in done.json["attempts"] if each["stage"] == "quantize"]
    assert len(tried) == 1


@needs_llama
@pytest.mark.slow
def test_faults_of_a_gguf_file(tmp_path: Path) -> None:
    """The base ties its head, the adapter has one of its own, and a tool that reads the base's config leaves it out."""
    base, adapter, _ = gguf_faults.save_models(tmp_path / "models", tied=True, own_head=True)
    levels = {"formats.gguf.quantization": ",".join(name.removeprefix("gguf-") for name in NAMED)}
    path = seeded(tmp_path / "fault", {"slipway_gguf.export": _IN_A_FILE})
    settings = {"formats.pytorch.enabled": "true", **levels}
    done = export(tmp_path, base, adapter, enabled="gguf", path=path, **settings)
    assert done.code == 4, done.err[-3000:]
    report = json.loads((Path(done.json["output_directory"]) / "report.json").read_text())
    found: dict[str, Any] = {each["name"]: each for each in report["validation"]["outputs"]}
    assert found.keys() - {"pytorch"} == {"gguf", *NAMED}
    assert found["gguf"]["status"] == "passed", found["gguf"]["explanation"]
    for name, (check, said) in NAMED.items():
        assert found[name]["status"] == "failed"
        failed = {each["name"].removeprefix("native_dtype.") for each in found[name]["checks"] if not each["passed"]}
        assert check in failed, (name, failed)
        assert said in found[name]["explanation"]
        assert said in done.json["error_message"] + done.err + json.dumps(done.json["warnings"]), name


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "lm_head"),
        ({"bias": "all"}, "bias"),
    ],
    ids=["dora", "modules_to_save", "bias"],
)
def test_an_adapter_that_vllm_refuses(
    tiny: tuple[Path, Path], tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    base, run = tiny
    adapter = shutil.copytree(run, tmp_path / "run")
    saved_adapters.edit(adapter, **settings)
    done = export(tmp_path, base, adapter, enabled="adapter")
    assert (done.code, done.json["reason"]) == (6, "ADAPTER_NOT_SERVABLE"), done.err[-3000:]
    assert said in done.json["error_message"]
    assert "vLLM" in done.json["error_message"]
    assert "merged model" in done.json["error_message"] + done.err


@pytest.mark.slow
def test_a_lost_branch_that_cannot_be_kept(tiny: tuple[Path, Path], tmp_path: Path) -> None:
    """The format is refused, with the line of the model's code that the trace would fix."""
    base, adapter = tiny
    path = seeded(tmp_path / "fault", {"transformers.models.qwen3.modeling_qwen3": _IN_A_BRANCH})
    done = export(tmp_path, base, adapter, enabled="torchscript", path=path)
    assert done.code, done.out
    failed = [each for each in done.json["attempts"] if each["stage"] == "torchscript"]
    assert {each["reason"] for each in failed} == {
        "TRACER_WARNING",
        "TORCHSCRIPT_UNSCRIPTABLE",
        "EXPORT_PARITY_FAILED",
    }, failed
    assert "branching.py" in json.dumps(done.json)
    assert "torchscript" not in done.json["paths"]
