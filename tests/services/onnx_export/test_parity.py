"""Every engine computes what PyTorch computes, judged here by code of the test's own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipway.model.folder import ModelFolder
from support.models.onnx_models import Exported

FAMILIES = ("qwen3-tied", "qwen3", "qwen2", "llama", "mistral", "gpt2")
LIMIT = 1e-4


def _reference(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _worst(source: Path, exported: Exported, pads: list[int], calls: list[int]) -> float:
    """Largest difference of logits over a conversation, where every row is compared with itself run alone, unpadded."""
    import onnxruntime
    import torch

    model = _reference(source)
    session = onnxruntime.InferenceSession(str(exported.folder / "model.onnx"), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    shapes = {value.name: value.shape for value in session.get_inputs()}
    total = sum(calls)
    tokens = np.random.default_rng(5).integers(3, 60, size=(len(pads), total))
    mask = (np.arange(total) >= np.array(pads)[:, None]).astype(np.int64)
    cache = {
        name: np.zeros((len(pads), shape[1], 0, shape[3]), np.float32)
        for name, shape in shapes.items()
        if name.startswith("past_key_values.")
    }
    pieces, past = [], 0
    for new in calls:
        end = past + new
        feed = {
            "input_ids": tokens[:, past:end],
            "attention_mask": mask[:, :end],
            "position_ids": np.maximum(mask.cumsum(1) - 1, 0)[:, past:end],
        }
        out = dict(zip(names, session.run(names, feed | cache), strict=True))
        pieces.append(out.pop("logits"))
        cache = {name.replace("present.", "past_key_values."): value for name, value in out.items()}
        past = end
    logits = np.concatenate(pieces, axis=1)
    worst = 0.0
    for row, pad in enumerate(pads):
        with torch.no_grad():
            alone = model(input_ids=torch.from_numpy(tokens[row : row + 1, pad:])).logits.numpy()
        worst = max(worst, float(np.abs(logits[row, pad:] - alone[0]).max()))
    return worst


@pytest.mark.parametrize(
    ("stored", "mapped"), [({"BF16"}, True), ({"F16"}, True), ({"F32"}, False), ({"BF16", "F32"}, False)]
)
def test_weights_of_one_short_type_stay_as_they_are_stored(
    family: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: set[str], mapped: bool
) -> None:
    """The configuration names bfloat16 in each case: where weights are wider, it would round them."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    from slipway.model.dtypes import torch_dtypes
    from slipway.model.pytorch import wide_layers
    from slipway_onnx_export.parity.check import _load_in_float32

    monkeypatch.setattr(wide_layers, "SMALLEST_VALUES", 1 << 6)
    folder = Path(shutil.copytree(family("qwen3-tied"), tmp_path / "model"))
    first, last = (torch_dtypes(*stored)[name] for name in (min(stored), max(stored)))
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: value.to(last if "norm" in name else first) for name, value in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    model, ids = _load_in_float32(ModelFolder.open(folder), AutoModelForCausalLM), torch.arange(3, 15)[None]
    assert any(type(layer) is wide_layers.WideLinear for layer in model.modules()) == mapped
    with torch.no_grad():
        assert (model(ids).logits - _reference(folder)(ids).logits).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("name", "params"),
    [
        pytest.param(name, params, marks=pytest.mark.slow if params and name not in {"qwen3-tied", "gpt2"} else ())
        for name in FAMILIES
        for params in ({}, {"opset": 14}, {"runtime": "tensorrt"})
    ],
    ids=str,
)
def test_mobius(
    family: Callable[[str], Path], export: Callable[..., Exported], name: str, params: dict[str, Any]
) -> None:
    exported = export(family(name), **params)
    assert exported.opset == {"{}": 23, "{'opset': 14}": 14}.get(str(params), 20)
    assert _worst(family(name), exported, [0, 5, 2], [8, 1, 1]) < LIMIT
    assert _worst(family(name), exported, [3, 0], [4, 3, 1]) < LIMIT
    assert _worst(family(name), exported, [0], [1, 1]) < LIMIT


@pytest.mark.parametrize(
    ("name", "opset"), [("qwen3-tied", 14), pytest.param("mistral-window", 14, marks=pytest.mark.slow), ("gpt2", 17)]
)
def test_legacy(family: Callable[[str], Path], export: Callable[..., Exported], name: str, opset: int) -> None:
    exported = export(family(name), engine="legacy", opset=opset)
    assert exported.opset == opset
    assert _worst(family(name), exported, [0, 5, 2], [8, 1, 1]) < LIMIT
    assert _worst(family(name), exported, [3, 0], [24, 3, 1]) < LIMIT


@pytest.mark.slow
@pytest.mark.parametrize(("name", "params"), [("mistral-window", {}), ("gpt2", {"runtime": "tensorrt"})], ids=str)
def test_dynamo(
    family: Callable[[str], Path], export: Callable[..., Exported], name: str, params: dict[str, Any]
) -> None:
    exported = export(family(name), engine="dynamo", **params)
    assert exported.opset == {"mistral-window": 23, "gpt2": 20}[name]
    assert _worst(family(name), exported, [0, 5, 2], [8, 1, 1]) < LIMIT
    assert _worst(family(name), exported, [3, 0], [24, 3, 1]) < LIMIT
    assert _worst(family(name), exported, [0], [1, 1]) < LIMIT


def test_the_parity_check_finds_a_wrong_graph(family: Callable[[str], Path], export: Callable[..., Exported]) -> None:
    """A mask that is not read is what exporters get wrong silently: it must not pass."""
    import onnx

    from slipway.errors import ONNXExportError
    from slipway_onnx_export.parity.check import check_parity
    from slipway_onnx_export.source import open_source

    exported = export(family("qwen3-tied"), opset=18, optimization="basic")
    path = exported.folder / "model.onnx"
    source = open_source(family("qwen3-tied"))
    good = check_parity(source, path.parent, tolerance=1e-4)
    assert good.max_abs_diff < LIMIT
    model = exported.onnx
    ones = onnx.helper.make_node("Equal", ["attention_mask", "attention_mask"], ["everything_is_seen"])
    masks = [node for node in model.graph.node if node.op_type == "Cast" and "attention_mask" in node.input]
    assert len(masks) == 1
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            if name == masks[0].output[0]:
                node.input[index] = "everything_is_seen"
    model.graph.node.insert(0, ones)
    onnx.save(model, path)
    with pytest.raises(ONNXExportError) as caught:
        check_parity(source, path.parent, tolerance=1e-4)
    assert caught.value.reason == "EXPORT_PARITY_FAILED"
    assert float(caught.value.about["max_abs_diff"]) > 1e-2
    assert "padding" in caught.value.about["case"]


def _sort_mask(folder: Path, file: str, name: str, *, largest: bool) -> None:
    """Move the padding of every row to one side before the graph reads the mask."""
    import onnx

    model = onnx.load(folder / file, load_external_data=False)
    for node in model.graph.node:
        for index, each in enumerate(node.input):
            if each == name and node.op_type != "Shape":
                node.input[index] = "sorted_mask"
    shape = onnx.helper.make_node("Shape", [name], ["mask_tokens"], start=1, end=2)
    top = onnx.helper.make_node("TopK", [name, "mask_tokens"], ["sorted_mask", "places"], largest=int(largest))
    model.graph.node.insert(0, shape)
    model.graph.node.insert(1, top)
    (folder / file).write_bytes(model.SerializeToString())


def test_a_graph_that_is_right_for_left_padding_only_is_found(
    family: Callable[[str], Path], export: Callable[..., Exported]
) -> None:
    """Graphs that count tokens by the sum of the mask are of this kind."""
    from slipway.errors import ONNXExportError
    from slipway_onnx_export.parity.check import check_parity
    from slipway_onnx_export.source import open_source

    exported = export(family("qwen3-tied"), opset=18, optimization="basic", parity="never")
    _sort_mask(exported.folder, "model.onnx", "attention_mask", largest=False)
    with pytest.raises(ONNXExportError) as caught:
        check_parity(open_source(family("qwen3-tied")), exported.folder, tolerance=1e-4)
    assert "left and right padding" in caught.value.about["case"]


def test_an_encoder_that_is_right_for_right_padding_only_is_found(
    tmp_path: Path, export: Callable[..., Exported]
) -> None:
    from slipway.errors import ONNXExportError
    from slipway_onnx_export.parity.check import check_parity
    from slipway_onnx_export.source import open_source
    from support.models.family_models import make_family_model

    source = make_family_model("marian-two-vocabularies", tmp_path / "model")
    folder = export(source, engine="legacy", opset=17, parity="never").folder
    _sort_mask(folder, "encoder_model.onnx", "attention_mask", largest=True)
    with pytest.raises(ONNXExportError) as caught:
        check_parity(open_source(source), folder, tolerance=1e-4)
    assert "padded on the left" in caught.value.about["case"]


def test_lossy_dtypes_are_exported_exactly(tmp_path: Path, export: Callable[..., Exported]) -> None:
    from support.models.onnx_models import save_model

    source = save_model("qwen3", tmp_path / "bf16", dtype="bfloat16", max_shard_size="100KB")
    assert len(list(source.glob("model-*.safetensors"))) > 1
    exported = export(source)
    assert _worst(source, exported, [0, 2], [6, 1]) < LIMIT


@pytest.mark.slow
def test_a_model_that_rounding_moves_far_is_not_condemned(family, export, monkeypatch) -> None:
    """A trained model's outliers amplify rounding beyond any constant; how far is measured on the model, and a fault is not covered by it."""
    import onnx

    from slipway.errors import ONNXExportError
    from slipway_onnx_export.parity import check
    from slipway_onnx_export.parity.check import check_parity
    from slipway_onnx_export.source import open_source

    folder = export(family("qwen3-tied"), opset=18, optimization="basic").folder
    source = open_source(family("qwen3-tied"))
    found = check_parity(source, folder, tolerance=1e-4).max_abs_diff
    strict = found / 4 / check_parity(source, folder, tolerance=1e-4).scale
    assert check_parity(source, folder, tolerance=strict).max_abs_diff == found
    monkeypatch.setattr(check, "ROOM", 0.0)
    with pytest.raises(ONNXExportError):
        check_parity(source, folder, tolerance=strict)
    monkeypatch.undo()
    model = onnx.load(folder / "model.onnx")
    norm = next(each for each in model.graph.initializer if each.name.endswith("model.norm.weight"))
    values = onnx.numpy_helper.to_array(norm) * np.float32(1.001)
    norm.CopyFrom(onnx.numpy_helper.from_array(values, norm.name))
    onnx.save(model, folder / "model.onnx")
    with pytest.raises(ONNXExportError, match="is allowed"):
        check_parity(source, folder, tolerance=strict)
