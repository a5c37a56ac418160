"""Graphs return activations: the values that hooks of the test's own record in transformers, and a contract that describes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipway.errors import ModelExportError
from slipway.model.activations import CONTRACT, CONTRACT_PAGE, KINDS, Activation, read_contract
from slipway.stage import Context
from support.models.family_models import CASES, make_family_model
from support.models.onnx_models import Exported

SLOW = pytest.mark.slow
LIMIT = 1e-4
EVERY = {"layers": ("all",), "kinds": tuple(kind for kind in KINDS if kind != "cross_attentions")}
LEGACY = {"engine": "legacy", "opset": 17}
FEED_FORWARD = {"bert": "output.dense", "distilbert": "ffn"}
"""Module in a layer whose output is the feed-forward part's, by model type; ``mlp`` for the others."""
ATTENTION = {"bert": "attention.self", "distilbert": "attention", "gpt2": "attn"}
LAYERS = {"bert": "encoder.layer", "distilbert": "transformer.layer", "gpt2": "h"}


def recorded(model: Any, feed: dict[str, Any]) -> dict[str, Any]:
    """Run transformers' model and return what its modules return, by the names of the contract."""
    import torch

    kind = model.config.model_type
    layers = model.base_model.get_submodule(LAYERS.get(kind, "layers"))
    found: dict[str, Any] = {}

    def keep(name: str, part: int) -> Any:
        def hook(_module: Any, _given: Any, output: Any) -> None:
            found[name] = (output if isinstance(output, tuple) else (output,))[part]

        return hook

    def first(_module: Any, given: Any, named: dict[str, Any]) -> None:
        found["embeddings"] = given[0] if given else named["hidden_states"]

    handles = [layers[0].register_forward_pre_hook(first, with_kwargs=True)]
    for index, layer in enumerate(layers):
        parts = {
            f"hidden_states.{index}": (layer, 0),
            f"mlp.{index}": (layer.get_submodule(FEED_FORWARD.get(kind, "mlp")), 0),
            f"attentions.{index}": (layer.get_submodule(ATTENTION.get(kind, "self_attn")), 1),
        }
        handles += [module.register_forward_hook(keep(name, part)) for name, (module, part) in parts.items()]
    with torch.no_grad():
        model(**{name: torch.from_numpy(value) for name, value in feed.items()})
    for handle in handles:
        handle.remove()
    return {name: value.numpy() for name, value in found.items()}


def rows_of_text() -> dict[str, Any]:
    ids = np.random.default_rng(3).integers(3, 48, size=(3, 9))
    mask = np.ones_like(ids)
    for row, end in ((1, 7), (2, 5)):
        ids[row, end:], mask[row, end:] = 1, 0
    return {"input_ids": ids, "attention_mask": mask}


def compared(exported: Exported, model: Any) -> None:
    """Compare all activations of a graph at tokens that are not padding."""
    import onnxruntime

    feed = rows_of_text()
    graph = onnxruntime.InferenceSession(str(exported.folder / "model.onnx"), providers=["CPUExecutionProvider"])
    given = dict(feed)
    for value in graph.get_inputs():
        if value.name.startswith("past_key_values."):
            given[value.name] = np.zeros((3, value.shape[1], 0, value.shape[3]), np.float32)
        elif value.name == "position_ids":
            given[value.name] = np.maximum(feed["attention_mask"].cumsum(1) - 1, 0)
    given = {value.name: given[value.name] for value in graph.get_inputs()}
    contract = read_contract(exported.folder / CONTRACT)
    names = [output.name for output in contract.outputs]
    found = dict(zip(names, graph.run(names, given), strict=True))
    wanted, mask = recorded(model, feed), feed["attention_mask"].astype(bool)
    assert sorted(found) == sorted(wanted)
    sizes = {"batch": 3, "sequence": 9, "total_sequence": 9}
    for output in contract.outputs:
        value, reference = found[output.name], wanted[output.name]
        assert value.shape == tuple(sizes.get(axis, axis) for axis in output.shape)  # type: ignore[call-overload]
        if output.kind == "attentions":
            value, reference = value.transpose(0, 2, 1, 3), reference.transpose(0, 2, 1, 3)
            assert np.allclose(value[mask].sum(-1), 1, atol=1e-5)
        scale = max(1.0, float(np.abs(reference[mask]).max()))
        assert np.abs(value[mask] - reference[mask]).max() < LIMIT * scale, output.name


@pytest.mark.parametrize(
    ("name", "params"),
    [
        pytest.param("bert-classes", LEGACY, id="bert-legacy"),
        *(pytest.param(name, LEGACY, id=f"{name}-legacy", marks=SLOW) for name in ("gpt2", "distilbert-classes")),
        *(pytest.param(name, {}, id=f"{name}-dynamo", marks=SLOW) for name in ("bert-features", "qwen3")),
    ],
)
def test_activations_are_those_of_hooks(
    tmp_path: Path, export: Callable[..., Exported], name: str, params: dict[str, Any]
) -> None:
    source = make_family_model(name, tmp_path / "model")
    exported = export(source, activations=EVERY, **params)
    assert exported.facts["parity"] == "passed"
    assert exported.facts["parity_activations"] < 1e-5
    model = type(CASES[name].model()).from_pretrained(source, attn_implementation="eager").eval()
    compared(exported, model)
    page = (exported.folder / CONTRACT_PAGE).read_text()
    contract = read_contract(exported.folder / CONTRACT)
    assert contract.layers == 2
    assert all(output.dtype == "float32" and f"`{output.module}`" in page for output in contract.outputs)
    assert {output.module for output in contract.outputs} <= {path for path, _ in model.named_modules()}


@pytest.fixture(scope="module")
def maps(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """A classifier whose graph returns some activations of its last layer."""
    from slipway_onnx_export.params import OnnxExportParams
    from slipway_onnx_export.stage import STAGE

    folder = tmp_path_factory.mktemp("maps")
    source = make_family_model("bert-classes", folder / "model")
    context = Context(workdir=folder / "work")
    context.workdir.mkdir()
    some = OnnxExportParams(activations={"layers": ("last",), "kinds": ("attentions", "mlp")}, **LEGACY)
    return Exported(STAGE.run({"pytorch": source}, some, context)["onnx"], context.facts)


def test_only_what_is_asked_for_is_returned(maps: Exported) -> None:
    assert [value.name for value in maps.onnx.graph.output] == ["logits", "attentions.1", "mlp.1"]
    assert maps.facts["activations"] == ["attentions.1", "mlp.1"]


@pytest.mark.parametrize(("level", "dtype"), [("fp16", "float16"), ("int8", "float32")])
def test_levels_keep_the_activations_and_state_their_types(
    tmp_path: Path, maps: Exported, level: str, dtype: str
) -> None:
    import onnx

    from slipway_quantize.params import QuantizeParams
    from slipway_quantize.stage import STAGE

    (tmp_path / "work").mkdir()
    context = Context(workdir=tmp_path / "work")
    (folder,) = STAGE.run({"model": maps.folder}, QuantizeParams(format="onnx", level=level), context).values()
    contract = read_contract(folder / CONTRACT)
    assert [(output.name, output.dtype) for output in contract.outputs] == [("attentions.1", dtype), ("mlp.1", dtype)]
    page = (folder / CONTRACT_PAGE).read_text()
    assert f"| {dtype} |" in page
    outputs = onnx.load(folder / "model.onnx", load_external_data=False).graph.output
    kinds = {"float32": onnx.TensorProto.FLOAT, "float16": onnx.TensorProto.FLOAT16}
    assert {value.type.tensor_type.elem_type for value in outputs if value.name != "logits"} == {kinds[dtype]}


def test_wrong_activations_fail_the_comparison(maps: Exported, tmp_path: Path) -> None:
    """A graph that returns twice the activations is caught, though its logits are right."""
    import onnx

    from slipway_onnx_export.parity.check import check_parity
    from slipway_onnx_export.source import open_source

    source = make_family_model("bert-classes", tmp_path / "model")
    model = onnx.load(maps.folder / "model.onnx")
    for node in model.graph.node:
        node.output[:] = ["right" if name == "mlp.1" else name for name in node.output]
        node.input[:] = ["right" if name == "mlp.1" else name for name in node.input]
    model.graph.node.append(onnx.helper.make_node("Add", ["right", "right"], ["mlp.1"]))
    (tmp_path / "changed").mkdir()
    onnx.save(model, tmp_path / "changed" / "model.onnx")
    with pytest.raises(ModelExportError) as caught:
        check_parity(
            open_source(source),
            tmp_path / "changed",
            tolerance=LIMIT,
            observed=(Activation("attentions", 1), Activation("mlp", 1)),
        )
    assert caught.value.reason == "EXPORT_PARITY_FAILED"
    assert caught.value.about["output"] == "mlp.1"


@pytest.mark.parametrize(
    ("name", "params", "reason", "said"),
    [
        ("bert-classes", {"activations": {"layers": ("2",)}, **LEGACY}, "PARAMS_INVALID", "layers 0 to 1"),
        ("bart-classes", {"activations": EVERY, **LEGACY}, "FAMILY_UNSUPPORTED", "an encoder and a decoder"),
        (
            "bert-classes",
            {"activations": {"kinds": ("cross_attentions",)}, **LEGACY},
            "FAMILY_UNSUPPORTED",
            "cross-attention",
        ),
        ("marian", {"activations": {"layers": ("1", "2")}, **LEGACY}, "PARAMS_INVALID", "layers 0 to 1"),
        ("qwen3", {"activations": EVERY, "engine": "mobius"}, "EXPORT_ENGINE_UNSUPPORTED", "without activations"),
    ],
)
def test_what_cannot_be_returned_is_refused_by_name(
    tmp_path: Path, export: Callable[..., Exported], name: str, params: dict[str, Any], reason: str, said: str
) -> None:
    with pytest.raises(ModelExportError) as caught:
        export(make_family_model(name, tmp_path / "model"), **params)
    assert caught.value.reason == reason
    assert said in str(caught.value)


def test_a_contract_that_is_none_is_refused(maps: Exported, tmp_path: Path) -> None:
    path = tmp_path / CONTRACT
    document = json.loads((maps.folder / CONTRACT).read_text())
    for wrong in (
        [],
        {},
        {**document, "more": 1},
        {**document, "layers": 10**9},
        {**document, "outputs": [{"name": "x"}]},
    ):
        path.write_text(json.dumps(wrong))
        with pytest.raises(ModelExportError) as caught:
            read_contract(path)
        assert caught.value.reason == "CONTRACT_INVALID"
