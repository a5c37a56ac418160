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
    from support.faults.merging import plant
    plant({name!r}, base=base, merged=output)
    ctx.digests.clear()  # the merge's own would be those of the faulty files
"""
_IN_A_BRANCH = """
from support.faults.branching import {name}
Qwen3MLP.forward = {name}
"""
NAMED = {
    "gguf-bf16": ("mean_kl", "the rows of queries and keys are not in llama.cpp's order but in transformers'"),
    "gguf-q8_0": ("tokens", "get other tokens than by transformers"),
    "gguf-q6_k": ("chat_template", "no chat template"),
    "gguf-q4_0": ("mean_kl", "its head is lost"),
}
"""What fails, and what is said, by output."""
OF_A_TIED_HEAD = {"gguf-q5_k_m": ("mean_kl", "its head is not the model's: the model's is token_embd.weight")}


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
@pytest.mark.parametrize(
    ("fault", "said", "outputs"),
    [
        ("a lost layer", "layer 1 has lost the adapter in 7 modules", {"pytorch", "pytorch-int4"}),
        ("swapped layers", "holds the weight of model.layers.", {"pytorch", "pytorch-int4"}),
        ("nothing merged", "none of 14 adapted modules holds the adapter", {"pytorch", "pytorch-int4"}),
        ("NaN", "model.layers.1.mlp.down_proj.weight has 1 NaN", {"pytorch"}),
    ],
)
def test_faults_of_a_merge(tiny: tuple[Path, Path], tmp_path: Path, fault: str, said: str, outputs: set[str]) -> None:
    """Each is named for every output that has it, and no rule makes a quantized one again: the fault is not its rounding."""
    base, adapter = tiny
    path = seeded(tmp_path / "fault", {"slipway_merge.merge": _IN_A_MERGE.format(name=fault)})
    settings = {"formats.pytorch.quantization": "int4", "optimization.group_size": "16"}
    settings |= {"validation.on_failure": "fallback"}
    done = export(tmp_path, base, adapter, enabled="pytorch", path=path, **settings)
    assert done.code == 4, done.err[-3000:]
    report = json.loads((Path(done.json["output_directory"]) / "report.json").read_text())
    found: dict[str, Any] = {each["name"]: each for each in report["validation"]["outputs"]}
    assert found.keys() == outputs
    for name, output in found.items():
        assert output["status"] == "failed", name
        assert said in output["explanation"], name
    assert said in done.json["error_message"] + json.dumps(done.json["warnings"])
    tried = [each for each in done.json["attempts"] if each["stage"] == "quantize"]
    assert len(tried) == 1
    if fault == "NaN":
        assert "model.layers.1.mlp.down_proj.weight" in tried[0]["error_message"]


@needs_llama
@pytest.mark.slow
def test_faults_of_a_gguf_file(tmp_path: Path) -> None:
    base, adapter, _ = gguf_faults.save_models(tmp_path / "models")
    assert_named(tmp_path, base, adapter, NAMED)


@needs_llama
@pytest.mark.slow
@pytest.mark.parametrize("pytorch", [True, False], ids=["merged", "base"])
def test_a_wrong_head_of_a_model_that_ties_it(tmp_path: Path, pytorch: bool) -> None:
    """Found beside the merged model and, where the export delivers none, beside the base."""
    base, adapter, _ = gguf_faults.save_models(tmp_path / "models", tied=True)
    assert json.loads((base / "config.json").read_text())["tie_word_embeddings"]
    more = {"formats.pytorch.enabled": str(pytorch).lower()}
    assert_named(tmp_path, base, adapter, OF_A_TIED_HEAD, **more)


@needs_llama
@pytest.mark.slow
def test_the_head_that_a_training_untied_is_lost(tmp_path: Path) -> None:
    """The base ties its head, the adapter has one of its own, and a tool that reads the base's config leaves it out."""
    base, adapter, _ = gguf_faults.save_models(tmp_path / "models", tied=True, own_head=True)
    assert_named(tmp_path, base, adapter, {"gguf-q4_0": NAMED["gguf-q4_0"]}, **{"formats.pytorch.enabled": "true"})


def assert_named(root: Path, base: Path, adapter: Path, named: dict[str, tuple[str, str]], **settings: str) -> None:
    """Plant the faults of these outputs; each must fail its check and be named, and the one without a fault must pass."""
    levels = {"formats.gguf.quantization": ",".join(name.removeprefix("gguf-") for name in named)}
    path = seeded(root / "fault", {"slipway_gguf.export": _IN_A_FILE})
    done = export(root, base, adapter, enabled="gguf", path=path, **levels, **settings)
    assert done.code == 4, done.err[-3000:]
    report = json.loads((Path(done.json["output_directory"]) / "report.json").read_text())
    found: dict[str, Any] = {each["name"]: each for each in report["validation"]["outputs"]}
    assert found.keys() - {"pytorch"} == {"gguf", *named}
    assert found["gguf"]["status"] == "passed", found["gguf"]["explanation"]
    for name, (check, said) in named.items():
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
def test_a_trace_that_lost_a_branch(tiny: tuple[Path, Path], tmp_path: Path) -> None:
    """The loss is named, and the branch kept by compiling it: the stage compares calls on both sides of it.

    Nothing is validated, because this model itself computes otherwise with a cache than without.
    """
    base, adapter = tiny
    path = seeded(tmp_path / "fault", branching("long_texts_differ"))
    done = export(tmp_path, base, adapter, enabled="torchscript", path=path, **{"validation.enabled": "false"})
    assert done.code == 0, done.err[-3000:]
    reasons = [each["reason"] for each in done.json["attempts"] if each["stage"] == "torchscript"]
    assert reasons[0] == "TRACER_WARNING"
    described = json.loads((Path(done.json["paths"]["torchscript"]) / "torchscript.json").read_text())
    assert described["control_flow"] == "script"
    assert max(described["differences"].values()) < 1e-5


@pytest.mark.slow
def test_a_lost_branch_that_cannot_be_kept(tiny: tuple[Path, Path], tmp_path: Path) -> None:
    """The format is refused, with the line of the model's code that the trace would fix."""
    base, adapter = tiny
    path = seeded(tmp_path / "fault", branching("long_texts_differ_uncompiled"))
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


def branching(name: str) -> dict[str, str]:
    return {"transformers.models.qwen3.modeling_qwen3": _IN_A_BRANCH.format(name=name)}
