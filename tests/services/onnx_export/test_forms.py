"""Parameters that make a model exportable where the usual form fails: each changes the file, and the file still computes the model."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from slipway.errors import ModelExportError
from slipway_onnx_export.params import OnnxExportParams
from support.models.family_models import make_family_model
from support.models.onnx_models import Exported

SLOW = pytest.mark.slow
LIMIT = 1e-4


def shapes(graph: Any) -> dict[str, list[Any]]:
    return {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in graph.graph.input
    }


def test_a_static_decoder_fixes_every_axis_and_continues_a_text(
    family: Callable[[str], Path], export: Callable[..., Exported]
) -> None:
    import onnxruntime
    import torch
    from transformers import AutoModelForCausalLM

    source = family("qwen3-tied")
    exported = export(source, shapes="static", batch=1, sequence=2, past=30)
    found = shapes(exported.onnx)
    assert found["input_ids"] == found["position_ids"] == [1, 2]
    assert found["attention_mask"] == [1, 32]
    assert found["past_key_values.1.key"] == [1, 2, 30, 32]
    assert exported.facts["parity"] == "passed"
    assert "batch 1, sequence 2, past_sequence 30" in exported.facts["warnings"][0]
    # By hand, as the README says it: the cache is filled from its end, the mask leaves out the rest.
    session = onnxruntime.InferenceSession(str(exported.folder / "model.onnx"), providers=["CPUExecutionProvider"])
    ids = np.random.default_rng(2).integers(3, 100, size=(1, 8))
    past = {name: np.zeros(shape, np.float32) for name, shape in found.items() if name.startswith("past")}
    logits = []
    for start in range(0, 8, 2):
        mask = np.zeros((1, 32), np.int64)
        mask[:, 30 - start :] = 1
        names = [value.name for value in session.get_outputs()]
        feed = {"input_ids": ids[:, start : start + 2], "attention_mask": mask}
        if "position_ids" in {value.name for value in session.get_inputs()}:
            feed["position_ids"] = np.arange(start, start + 2)[None]
        given = dict(zip(names, session.run(names, {**feed, **past}), strict=True))
        logits.append(given["logits"])
        past = {name: given[name.replace("past_key_values", "present")][:, :, 2:] for name in past}
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    with torch.no_grad():
        wanted = model(input_ids=torch.from_numpy(ids)).logits.numpy()
    assert np.abs(np.concatenate(logits, axis=1) - wanted).max() < LIMIT


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("bert-classes", {"sequence": 12, "engine": "legacy", "opset": 17}),
        pytest.param("marian", {"cache": False, "sequence": 10, "batch": 2, "engine": "legacy"}, marks=SLOW),
    ],
    ids=str,
)
def test_static_graphs_of_other_families(
    tmp_path: Path, export: Callable[..., Exported], name: str, params: dict[str, Any]
) -> None:
    exported = export(make_family_model(name, tmp_path / "model"), shapes="static", **params)
    assert exported.facts["parity"] == "passed"
    assert exported.facts["parity_calls"] >= 2
    for file in exported.facts["files"]:
        import onnx

        for axes in shapes(onnx.load(exported.folder / file, load_external_data=False)).values():
            assert all(isinstance(axis, int) and axis > 0 for axis in axes)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("qwen3", {"engine": "legacy"}),
        pytest.param("whisper", {}, marks=SLOW),
    ],
    ids=str,
)
def test_without_a_cache(tmp_path: Path, export: Callable[..., Exported], name: str, params: dict[str, Any]) -> None:
    import onnx

    exported = export(make_family_model(name, tmp_path / "model"), cache=False, **params)
    assert exported.facts["parity"] == "passed"
    assert exported.facts["cache"] is False
    for file in exported.facts["files"]:
        graph = onnx.load(exported.folder / file, load_external_data=False).graph
        assert not [v.name for v in (*graph.input, *graph.output) if v.name.startswith(("past", "present"))]


@pytest.mark.slow
def test_a_static_graph_without_a_cache_uses_every_position(
    family: Callable[[str], Path], export: Callable[..., Exported]
) -> None:
    """Checks run it from its first position: GPT-2 has 128, and the graph is as long."""
    exported = export(family("gpt2"), engine="legacy", opset=17, cache=False, shapes="static")
    assert exported.facts["fixed_sizes"]["sequence"] == 128
    assert exported.facts["checks"]["caches"] == "passed"


@pytest.mark.slow
def test_attention_is_the_one_that_is_asked_for(family: Callable[[str], Path], export: Callable[..., Exported]) -> None:
    fused, plain = (
        export(family("qwen3"), attention=attention, opset=23, engine="dynamo") for attention in ("sdpa", "eager")
    )
    assert [one.facts["attention"] for one in (fused, plain)] == ["sdpa", "eager"]
    assert fused.facts["operators"].get("Softmax", 0) < plain.facts["operators"]["Softmax"] == 2
    assert fused.facts["operators"]["Attention"] == 2


def test_attention_that_a_model_does_not_have(tmp_path: Path, export: Callable[..., Exported]) -> None:
    import transformers

    config = transformers.BloomConfig(vocab_size=64, hidden_size=16, n_layer=1, n_head=2)
    transformers.BloomForCausalLM(config).save_pretrained(tmp_path / "model")
    with pytest.raises(ModelExportError) as caught:
        export(tmp_path / "model", attention="sdpa", opset=14)
    error = caught.value
    assert (error.reason, error.about["attention"]) == ("EXPORT_ENGINE_UNSUPPORTED", "sdpa")
    assert (error.about["family"], error.about["engine"]) == ("decoder", "legacy")


@pytest.mark.slow
def test_optimization_off_leaves_the_traced_graph(
    family: Callable[[str], Path], export: Callable[..., Exported]
) -> None:
    nodes = {
        level: export(family("qwen3"), engine="legacy", optimization=level).facts["nodes"]
        for level in ("none", "basic")
    }
    assert nodes["none"] > nodes["basic"]


@pytest.mark.parametrize(
    ("name", "params"),
    [
        pytest.param("qwen3", {}, id="qwen3-mobius"),
        pytest.param("bert-classes", {"engine": "legacy", "opset": 17}, id="bert-legacy"),
        pytest.param("marian", {"engine": "dynamo"}, id="marian-dynamo", marks=SLOW),
    ],
)
def test_a_portable_graph_has_standard_operators_only(
    tmp_path: Path, export: Callable[..., Exported], name: str, params: dict[str, Any]
) -> None:
    import onnx

    source = make_family_model(name, tmp_path / "model")
    for path in export(source, optimization="basic", parity="never", **params).folder.glob("*.onnx"):
        model = onnx.load(path, load_external_data=False)
        assert {entry.domain for entry in model.opset_import} == {""}
        assert {node.domain for node in model.graph.node} == {""}
        assert not model.functions
    if not params:  # the setting is what makes it so
        whole = export(source, parity="never").facts["operators"]
        assert any(operator.startswith("com.microsoft.") for operator in whole)


def test_weights_within_the_graph(family: Callable[[str], Path], export: Callable[..., Exported]) -> None:
    exported = export(family("qwen3-tied"), external_data=False)
    assert sorted(path.name for path in exported.folder.glob("*.onnx*")) == ["model.onnx"]
    assert exported.facts["parity"] == "passed"
    assert not [tensor for tensor in exported.onnx.graph.initializer if tensor.external_data]


def test_weights_too_large_for_the_graph_are_refused(
    family: Callable[[str], Path], export: Callable[..., Exported], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipway.model.graphs.weights.MOST_INLINE_BYTES", 1000)  # instead of a model of 2 GB
    with pytest.raises(ModelExportError) as caught:
        export(family("qwen3-tied"), external_data=False, parity="never")
    assert (caught.value.reason, caught.value.remedy) == ("ONNX_TOO_LARGE", "set external_data to true")


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"engine": "mobius", "attention": "eager"}, "attention eager needs engine dynamo or legacy"),
        ({"engine": "mobius", "cache": False}, "engine mobius makes graphs with a cache only"),
        ({"runtime": "tensorrt", "cache": False}, "runtime tensorrt makes graphs with a cache only"),
        ({"tracer_warnings": "prove", "parity": "never"}, "tracer_warnings prove needs the comparison"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_parameters_that_do_not_go_together_are_named(params: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        OnnxExportParams(**params)


@pytest.mark.parametrize(
    ("name", "params", "says"),
    [
        ("marian", {}, "counts positions by the length of its cache"),
        ("qwen3", {"sequence": 60, "past": 60}, "has room for 64 tokens"),
    ],
)
def test_static_graphs_that_would_compute_something_else(
    tmp_path: Path, export: Callable[..., Exported], name: str, params: dict[str, Any], says: str
) -> None:
    with pytest.raises(ModelExportError, match=says) as caught:
        export(make_family_model(name, tmp_path / "model"), shapes="static", **params)
    assert caught.value.reason == "SHAPES_UNSUPPORTED"


@pytest.mark.parametrize(
    "params",
    [
        {"shapes": "static", "sequence": 4, "past": 40},
        pytest.param({"shapes": "static", "batch": 2}, marks=SLOW),
        pytest.param({"cache": False, "engine": "legacy", "shapes": "static", "sequence": 40}, marks=SLOW),
    ],
    ids=str,
)
def test_the_example_of_each_form_generates_what_transformers_generates(
    family: Callable[[str], Path], export: Callable[..., Exported], params: dict[str, Any]
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    prompt, source = "the one that was in", family("qwen3-tied")
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    ids = tokenizer(prompt, return_tensors="pt")
    wanted = model.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids["input_ids"].shape[1] :]
    exported = export(source, parity="never", **params)
    words = [sys.executable, "-P", exported.folder / "example.py", prompt, "--max-new-tokens", "12"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.rstrip("\n") == prompt + tokenizer.decode([token for token in wanted if token != 2])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "forms"),
    [
        ("marian", [{"cache": False}, {"cache": False, "shapes": "static", "batch": 2, "sequence": 16}]),
        ("bert-classes", [{"shapes": "static", "sequence": 16}]),
    ],
)
def test_the_example_prints_the_same_for_every_form(
    tmp_path: Path, export: Callable[..., Exported], name: str, forms: list[dict[str, Any]]
) -> None:
    source, said = make_family_model(name, tmp_path / "model"), []
    for choice in ({}, *forms):
        exported = export(source, parity="never", engine="legacy", **choice)
        words = [sys.executable, "-P", exported.folder / "example.py", "a house"]
        words += [] if "classes" in name else ["--max-new-tokens", "8"]
        said.append(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    assert set(said) == {said[0]}
    assert said[0].strip()


def test_validation_runs_a_static_graph_as_any_other(
    family: Callable[[str], Path], export: Callable[..., Exported]
) -> None:
    from slipway.proof.runtime import NotRunnable, run_segments
    from slipway_validate.runner.onnx_graphs.load import load

    source = family("qwen3-tied")
    folders = [export(source, parity="never", **form).folder for form in ({}, {"shapes": "static", "sequence": 3})]
    ids = np.random.default_rng(4).integers(3, 100, size=(2, 11))
    mask = np.ones_like(ids)
    mask[0, :4] = 0
    usual, static = (
        np.concatenate([found for _, found in run_segments(load(folder, threads=1), ids, mask, (7, 1, 3))], axis=1)
        for folder in folders
    )
    assert np.abs((usual - static)[mask.astype(bool)]).max() < LIMIT
    long = np.ones((1, 200), np.int64)
    with pytest.raises(NotRunnable, match="fixed shapes"):
        list(run_segments(load(folders[1], threads=1), long, long, (100, 100)))


@pytest.mark.parametrize(
    "params", [{"engine": "legacy", "opset": 14}, pytest.param({"engine": "dynamo"}, marks=SLOW)], ids=str
)
def test_gelu_is_approximated_on_request(
    tmp_path: Path, export: Callable[..., Exported], params: dict[str, Any]
) -> None:
    """With ONNX Runtime's own operator in place of one, or of the several of an older opset; only after the exact graph was proven."""
    import onnxruntime
    import torch

    from slipway_validate.runner.yardsticks.computing import approximate_gelu
    from support.models.family_models import CASES

    source = make_family_model("bert-classes", tmp_path / "model")
    weights = load_file(source / "model.safetensors")
    larger = {name: 10 * value if value.dim() > 1 else value for name, value in weights.items()}
    save_file(larger, source / "model.safetensors", metadata={"format": "pt"})
    exported = export(source, gelu_approximation=True, **params)
    model = type(CASES["bert-classes"].model()).from_pretrained(source).eval()
    layers = model.config.num_hidden_layers
    assert exported.facts["parity_max_abs_diff"] < exported.facts["gelu_approximation_max_abs_diff"] < 1e-2
    assert exported.facts["operators"]["com.microsoft.FastGelu"] == exported.facts["gelu_approximation"] == layers
    assert exported.facts["checks"]["loads"] == "passed"
    session = onnxruntime.InferenceSession(str(exported.folder / "model.onnx"), providers=["CPUExecutionProvider"])
    ids = np.array([[5, 6, 7, 8, 2]])
    feed = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    (found,) = session.run(["logits"], {each.name: feed[each.name] for each in session.get_inputs()})
    given = {name: torch.from_numpy(value) for name, value in feed.items()}
    with torch.no_grad():
        exact = model(**given).logits.numpy()
        with approximate_gelu(model):
            approximate = model(**given).logits.numpy()
        assert np.array_equal(model(**given).logits.numpy(), exact)
    assert np.abs(found - approximate).max() < 1e-5 < np.abs(found - exact).max()


def test_a_graph_without_a_gelu_says_so(family: Callable[[str], Path], export: Callable[..., Exported]) -> None:
    exported = export(family("qwen3"), gelu_approximation=True)
    assert "no exact GELU" in exported.facts["warnings"][0]
    assert "gelu_approximation" not in exported.facts


@SLOW
def test_an_export_without_tracing_does_not_load_what_tracing_needs() -> None:
    code = (
        "import sys, slipway_onnx_export.export as _;"
        "print(sorted({'torch._dynamo', 'transformers.modeling_utils'} & set(sys.modules)))"
    )
    assert subprocess.check_output([sys.executable, "-P", "-c", code], text=True) == "[]\n"
