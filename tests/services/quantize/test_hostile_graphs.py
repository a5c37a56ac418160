"""A graph that contradicts itself, its data file or its folder ends with a reason before anything is computed from it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from slipway.errors import ModelExportError
from slipway.stage import Context
from slipway_quantize.stage import STAGE
from support.hostile.json_grammar import answer
from support.models import tiny_models


@pytest.fixture(scope="module")
def descriptions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tiny_models.make_base(folder / "base")
    (folder / "base" / "model.safetensors").unlink()
    return folder / "base"


def graph(weight: TensorProto, *, shape: tuple[object, ...] = (None, 4)) -> onnx.ModelProto:
    """Multiply an input by a weight."""
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("x", "logits")]
    made = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["logits"])], "g", ends[:1], ends[1:], [weight])
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    return model


def inline(*dims: int, data: bytes = b"1234") -> TensorProto:
    return TensorProto(name="w", data_type=TensorProto.FLOAT, dims=dims, raw_data=data)


def outside(
    location: str = "model.onnx.data",
    *,
    offset: object = 0,
    length: int = 64,
    dims: tuple[int, ...] = (4, 4),
    kind: int = 1,
) -> TensorProto:
    weight = TensorProto(name="w", data_type=kind, dims=dims, data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        weight.external_data.add(key=key, value=str(value))
    return weight


WEIGHTS: dict[str, Callable[[], TensorProto]] = {
    "inline-too-short": lambda: inline(2**31, 2**31),
    "inline-negative": lambda: inline(-4, -4),
    "absolute": lambda: outside("/etc/passwd"),
    "above": lambda: outside("../secret"),
    "long-name": lambda: outside("x" * 5000),
    "nul": lambda: outside("a\0b"),
    "folder": lambda: outside("."),
    "no-name": lambda: outside(""),
    "huge-shape": lambda: outside(dims=(2**62, 2**62)),
    "huge-empty-shape": lambda: outside(dims=(2**62, 0, 2**62)),
    "negative-shape": lambda: outside(dims=(-4, -4)),
    "huge-length": lambda: outside(length=10**18),
    "short-length": lambda: outside(length=1),
    "huge-offset": lambda: outside(offset=10**30),
    "negative-offset": lambda: outside(offset=-64),
    "no-offset": lambda: outside(offset="abc"),
    "texts": lambda: outside(kind=TensorProto.STRING),
    "unknown-type": lambda: outside(kind=99),
}


@pytest.mark.parametrize("level", ["int8", "fp16"])
@pytest.mark.parametrize("kind", sorted(WEIGHTS))
def test_a_weight_that_cannot_be_is_named(descriptions: Path, tmp_path: Path, kind: str, level: str) -> None:
    folder = shutil.copytree(descriptions, tmp_path / "model")
    (folder / "model.onnx").write_bytes(graph(WEIGHTS[kind]()).SerializeToString())
    (folder / "model.onnx.data").write_bytes(bytes(64))
    (tmp_path / "secret").write_bytes(bytes(64))
    (tmp_path / "work").mkdir()
    params = STAGE.params(level=level, format="onnx")  # type: ignore[call-arg]
    found = answer(lambda: STAGE.run({"model": folder}, params, Context(workdir=tmp_path / "work")))
    assert isinstance(found, ModelExportError)
    assert found.reason == "ONNX_INVALID", found


@pytest.mark.parametrize("shape", [(None, 4), (1, 2**40, 0, 2**40), (None, None, None, 4)])
def test_a_graph_of_unknown_inputs_is_not_run(descriptions: Path, tmp_path: Path, shape: tuple[object, ...]) -> None:
    folder = shutil.copytree(descriptions, tmp_path / "model")
    weight = numpy_helper.from_array(np.ones((shape[-1] if shape[-1] == 4 else 1, 4), np.float32), "w")
    (folder / "model.onnx").write_bytes(graph(weight, shape=shape).SerializeToString())
    (tmp_path / "work").mkdir()
    ctx, params = Context(workdir=tmp_path / "work"), STAGE.params(level="fp16", format="onnx")  # type: ignore[call-arg]
    try:
        STAGE.run({"model": folder}, params, ctx)
    except ModelExportError as error:
        assert error.reason == "QUANTIZATION_FAILED"
        assert shape[1] == 2**40
    else:
        assert "not run: the graph's input 'x'" in str(ctx.facts["check"])
