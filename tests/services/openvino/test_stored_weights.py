"""The weights that an IR stores: read to the values that OpenVINO computes with, and nothing of a file believed."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir
import pytest
import torch

from slipway.model.safetensors_file import read_weights
from slipway.proof.stored_weights import NotUnderstoodError
from slipway_openvino.graphs.lookups import readable_graph
from slipway_openvino.graphs.passes import sign_integers
from slipway_openvino.library import ops, ov
from slipway_openvino.stored import values as description
from slipway_openvino.stored.weights import stored
from slipway_validate.runner.survival.checkpoints import Checkpoint
from support.models.judged_families import make
from support.models.openvino_models import Ir, converted, every_level, exported, rounded, tied_graph
from support.models.stored_survival import survival_of
from support.models.validation_models import Models

ALL = slice(None)
CONFIG = '{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}'
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("bert-classes", tmp_path_factory.mktemp("classifier")).outputs()["pytorch"]


@pytest.fixture(scope="module")
def graphs(tiny: Models, classifier: Path) -> dict[str, tuple[Path, Path]]:
    """The folders of models and their graphs."""
    sources = {"decoder": tiny.merged, "classifier": classifier}
    return {kind: (source, exported(source, source.parent / "graph")) for kind, source in sources.items()}


@pytest.fixture(scope="module")
def outputs(tiny: Models, graphs: dict[str, tuple[Path, Path]]) -> dict[str, Path]:
    return every_level(graphs["decoder"][1], tiny.root / "levels")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the matrices that an IR stores, by the names of the model's, as float32 (N, K)."""
    found = stored(folder, folder, lambda _: 0)
    values = {}
    for name in found.names:
        try:
            values[name] = found.weight(name, turned=False).take(ALL).values
        except NotUnderstoodError as error:
            assert "as (" in str(error)  # a norm, which is no matrix
    return values


def matrices(folder: Path) -> dict[str, torch.Tensor]:
    checkpoint = Checkpoint(read_weights(folder))
    wanted = {name: checkpoint._read(name).take(ALL).values for name in checkpoint.names}
    return {name: values for name, values in wanted.items() if values.dim() == 2}


@pytest.mark.parametrize(("name", "dtype"), [("openvino", torch.float32), ("openvino-fp16", torch.float16)])
def test_floats_are_those_of_the_model(tiny: Models, outputs: dict[str, Path], name: str, dtype: torch.dtype) -> None:
    found = weights(outputs[name])
    wanted = matrices(tiny.merged)
    assert wanted
    for weight, values in wanted.items():
        if weight in found:
            assert torch.equal(found[weight], values.to(dtype).float()), weight
    assert {each for each in wanted if "proj" in each or "embed" in each} <= found.keys()


def dequantized(graph: Path, name: str) -> tuple[torch.Tensor, int]:
    """Return what the quantizer stores of a weight in its graph, with the scales in half precision that the IR has, and its bits."""
    initializers = onnx_ir.load(graph / "model.onnx").graph.initializers
    constants = {each: value.const_value.numpy() for each, value in initializers.items() if value.const_value}
    (stem,) = {each[:-3] for each in constants if re.fullmatch(rf"{re.escape(name)}(\.T)?\.q[48]", each)}
    bits = 4 if f"{stem}.q4" in constants else 8
    codes = constants[f"{stem}.q{bits}"]
    if bits == 4:
        codes = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:2], -1)
    scales = constants[f"{stem}.scale"].astype(np.float16).astype(np.float32).reshape(*codes.shape[:2], 1)
    values = ((codes.astype(np.float32) - (1 << (bits - 1))) * scales).reshape(len(codes), -1)
    return torch.from_numpy(values), bits


@pytest.mark.parametrize("level", ["int8", "int4"])
@pytest.mark.parametrize("kind", ["decoder", "classifier"])
def test_integers_are_those_of_the_quantizer(
    graphs: dict[str, tuple[Path, Path]], tmp_path: Path, kind: str, level: str
) -> None:
    source, graph = graphs[kind]
    chosen = rounded(graph, tmp_path / "quantize", level)
    names = [name for name in matrices(source) if re.search(r"layer.*(proj|query|dense)", name)]
    wanted = {name: dequantized(chosen, name) for name in names}
    found = weights(converted(chosen, tmp_path / "ir", level=level, tokenizer=False)[0])
    for name, (values, _) in wanted.items():
        assert torch.equal(found[name], values), name
    assert int(level.removeprefix("int")) in {bits for _, bits in wanted.values()}


def save_product(folder: Path, kind: str, *, zero: str, groups: int) -> np.ndarray:
    """Write an IR of one product with integers of a type; return the weight that OpenVINO multiplies with. (N, K)."""
    rows, size, bits = 6, 4, int(kind[1:])
    random = np.random.default_rng(3)
    low, high = (-(1 << (bits - 1)), 1 << (bits - 1)) if kind[0] == "i" else (0, 1 << bits)
    codes = random.integers(low, high, (rows, groups, size))
    scales = random.random((rows, groups, 1)).astype(np.float16)
    integers = ops.constant(_packed(codes, kind))
    integers.set_friendly_name(f"model.layers.0.q_proj.weight.T.q{bits}")
    wide = ops.convert(integers, "f16")
    if zero:
        points = random.integers(low, high, (rows, groups, 1) if zero == "each" else (1, 1, 1))
        wide = ops.subtract(wide, ops.convert(ops.constant(_packed(points, kind)), "f16"))
    joined = ops.reshape(
        ops.multiply(wide, ops.constant(scales)), ops.constant(np.array([rows, groups * size])), special_zero=False
    )
    given = ops.parameter([-1, groups * size], np.float32, name="x")
    made = ops.matmul(given, ops.convert(joined, "f32"), transpose_a=False, transpose_b=True)
    model = ov.Model([ops.result(made)], [given])
    folder.mkdir()
    ov.save_model(model, folder / "openvino_model.xml", compress_to_fp16=False)
    (folder / "config.json").write_text(CONFIG)
    compiled = ov.Core().compile_model(folder / "openvino_model.xml", "CPU", dict(EXACT))
    return np.asarray(compiled(np.eye(groups * size, dtype=np.float32))[0]).T


def _packed(values: np.ndarray, kind: str) -> Any:
    if kind[1:] == "8":
        return ov.Tensor(values.astype(np.int8 if kind == "i8" else np.uint8))
    flat = np.pad(values.reshape(-1) & 15, (0, values.size % 2)).astype(np.uint8)
    return ov.Tensor(flat[0::2] | (flat[1::2] << 4), values.shape, getattr(ov.Type, kind))


@pytest.mark.parametrize("groups", [1, 3], ids=["rows", "groups"])
@pytest.mark.parametrize("zero", ["", "each", "one"], ids=["symmetric", "zero_points", "one_zero_point"])
@pytest.mark.parametrize("kind", ["i8", "u8", "i4", "u4"])
def test_integers_are_what_openvino_multiplies_with(kind: str, zero: str, groups: int, tmp_path: Path) -> None:
    wanted = save_product(tmp_path / "ir", kind, zero=zero, groups=groups)
    weight = stored(tmp_path / "ir", tmp_path, lambda _: 0).weight("model.layers.0.q_proj.weight", turned=False)
    assert weight.shape == wanted.shape
    found = weight.take(ALL)
    # One rounding to half precision is in OpenVINO's values, where it multiplies before it widens.
    assert np.allclose(found.values.numpy(), wanted, rtol=2**-9, atol=1e-6)
    assert torch.equal(weight.take(slice(1, 6, 2)).values, found.values[1:6:2])
    assert found.changed_from(found.values) == 0
    assert found.changed_from(found.values + 2 * found.scales) > 0  # type: ignore[operator]


@pytest.mark.parametrize("groups", [4, 3], ids=["even", "odd"])
@pytest.mark.parametrize("zeros", [False, True], ids=["signed", "zero_points"])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_table_that_is_looked_up_and_multiplied_is_read(bits: int, zeros: bool, groups: int, tmp_path: Path) -> None:
    """In the form that the conversion gives it, also with the zero points of a calibration."""
    (work := tmp_path / "work").mkdir()
    data = f"model.embed_tokens.weight.q{bits}"
    wanted = tied_graph(tmp_path / "model.onnx", bits=bits, groups=groups, zeros=zeros, data=data)
    model = ov.Core().read_model(readable_graph(tmp_path / "model.onnx", work))
    memory = sign_integers(model, work)
    (tmp_path / "ir").mkdir()
    ov.save_model(model, tmp_path / "ir" / "openvino_model.xml", compress_to_fp16=False)
    del memory
    (tmp_path / "ir" / "config.json").write_text(CONFIG)
    found = stored(tmp_path / "ir", tmp_path, lambda _: 0).weight("model.embed_tokens.weight", turned=False).take(ALL)
    assert np.array_equal(found.values.numpy(), wanted)


@pytest.mark.parametrize(("kind", "dtype"), [("bf16", torch.bfloat16), ("f64", torch.float64)])
def test_other_floats_at_any_byte(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Writers put a constant right behind the one before, whatever its size."""
    values = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)).to(dtype)
    raw = values.view(torch.int16).numpy().view(np.float16) if kind == "bf16" else values.numpy()
    table = ops.constant(ov.Tensor(np.ascontiguousarray(raw), values.shape, getattr(ov.Type, kind)))
    table.set_friendly_name("layers.0.q_proj.weight")
    given = ops.parameter([-1, 6], np.float32, name="x")
    product = ops.matmul(given, ops.convert(table, "f32"), transpose_a=False, transpose_b=True)
    model = ov.Model([ops.result(product)], [given])
    ov.save_model(model, tmp_path / "openvino_model.xml", compress_to_fp16=False)
    (tmp_path / "config.json").write_text(CONFIG)
    path, raw_file = tmp_path / "openvino_model.xml", tmp_path / "openvino_model.bin"
    raw_file.write_bytes(bytes(3) + raw_file.read_bytes())
    path.write_text(re.sub(r'offset="(\d+)"', lambda found: f'offset="{int(found[1]) + 3}"', path.read_text()))
    model_weights = stored(tmp_path, tmp_path, lambda _: 0)
    name = "layers.0.q_proj.weight"
    assert torch.equal(model_weights.weight(name, turned=False).take(slice(1, 4)).values, values[1:4].float())
    assert torch.equal(model_weights.weight(name, turned=True).take(slice(1, 4)).values, values.T[1:4].float())


def test_weights_that_arithmetic_changes_are_not_read(outputs: dict[str, Path], tmp_path: Path) -> None:
    """A graph that halves a weight does not compute with what is stored, so that is no yardstick."""
    model = ov.Core().read_model(outputs["openvino"] / "openvino_model.xml")
    (weight,) = (node for node in model.get_ops() if node.get_friendly_name() == f"{DOWN}.T")
    halved = ops.multiply(weight, ops.constant(np.array([[0.5]], np.float32)))
    for reader in weight.output(0).get_target_inputs():
        if reader.get_node() != halved:
            reader.replace_source_output(halved.output(0))
    ov.save_model(model, tmp_path / "openvino_model.xml", compress_to_fp16=False)
    (tmp_path / "config.json").write_bytes((outputs["openvino"] / "config.json").read_bytes())
    found = stored(tmp_path, tmp_path, lambda _: 0)
    with pytest.raises(NotUnderstoodError, match="read by 'Multiply'"):
        found.weight(DOWN, turned=False)
    assert found.weight(DOWN.replace("down", "up"), turned=False).shape == (64, 32)


def test_integers_with_two_scales_are_not_read(outputs: dict[str, Path], tmp_path: Path) -> None:
    model = ov.Core().read_model(outputs["openvino-int8"] / "openvino_model.xml")
    (integers,) = (node for node in model.get_ops() if node.get_friendly_name() == f"{DOWN}.T.q8")
    other = ops.multiply(ops.convert(integers, "f16"), ops.constant(np.full((32, 4, 1), 0.5, np.float16)))
    given = ops.parameter([-1, 16], np.float16, name="x")
    product = ops.matmul(given, other, transpose_a=False, transpose_b=True)
    model.add_parameters([given])
    model.add_results([ops.result(product)])
    ov.save_model(model, tmp_path / "openvino_model.xml", compress_to_fp16=False)
    (tmp_path / "config.json").write_bytes((outputs["openvino"] / "config.json").read_bytes())
    with pytest.raises(NotUnderstoodError, match="several scales"):
        stored(tmp_path, tmp_path, lambda _: 0).weight(DOWN, turned=False)


@pytest.mark.parametrize(
    ("name", "where"), [("openvino", ""), ("openvino-fp16", "_compressed"), ("openvino-int8", ".q8")]
)
def test_what_is_no_number_is_named(
    tiny: Models, outputs: dict[str, Path], tmp_path: Path, name: str, where: str
) -> None:
    """Also a scale; masks hold infinity rightly."""

    def plant(values: np.ndarray) -> None:
        values.reshape(-1)[5] = np.nan

    ir = Ir(outputs[name], tmp_path / "ir")
    ir.change(ir.scale(f"{DOWN}.T.q8") if name.endswith("int8") else ir.constant(f"{DOWN}.T{where}"), plant)
    held = survival_of(tiny.base, tiny.adapter, {name: ir.folder, "right": outputs[name]})
    assert held[name].non_finite == {f"{DOWN}.T{where.removesuffix('_compressed')}": 1}
    assert not held["right"].non_finite


def place(**changed: str) -> tuple[str, str]:
    """Return the description of the place of a matrix, and a changed one."""
    first = {"element_type": "f32", "shape": "64, 32"} | {key: "{" + key + "}" for key in ("offset", "size")}
    text = " ".join(f'{key}="{value}"' for key, value in first.items())
    return text, " ".join(f'{key}="{value}"' for key, value in (first | changed).items())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"offset": "1000000000"}, r"constant 'model.layers.0.mlp.down_proj.weight.T' ends at byte 1000008192 of .*\.bin, which has"),
        ({"offset": str(2**63 - 1)}, "is no number, size or offset"),
        ({"offset": "-4"}, "'-4' is no number"),
        ({"offset": "1e3"}, "'1e3' is no number"),
        ({"size": "8188"}, r"has 8188 bytes for the shape \(64, 32\) of f32"),
        ({"shape": "64, 33"}, r"has 8192 bytes for the shape \(64, 33\)"),
        ({"shape": "4294967296, 4294967296"}, "has 8192 bytes for the shape"),
        ({"shape": "64,,32"}, "'' is no number"),
        ({"shape": ",".join(["1"] * 50)}, "more than 8 axes"),
    ],
)  # fmt: skip
def test_a_place_beyond_the_file_is_named(
    tiny: Models, outputs: dict[str, Path], tmp_path: Path, changed: dict[str, str], message: str
) -> None:
    ir = Ir(outputs["openvino"], tmp_path / "ir")
    constant = ir.constant(f"{DOWN}.T")
    own = {"offset": str(constant.offset), "size": str(constant.size)}
    old, new = place(**changed)
    ir.replace(*(text.format(**own) for text in (old, new)))
    with pytest.raises(NotUnderstoodError, match=message):
        stored(ir.folder, tiny.base, lambda _: 0)
    held = survival_of(tiny.base, tiny.adapter, {"openvino": ir.folder, "pytorch": tiny.merged})
    assert re.search(message, held["openvino"].not_run)
    assert len(held["pytorch"].modules) == 14


def test_a_cut_file_of_weights_is_named(tiny: Models, outputs: dict[str, Path], tmp_path: Path) -> None:
    for name in ("openvino", "openvino-int8"):
        ir = Ir(outputs[name], tmp_path / name)
        os.truncate(ir.weights, ir.weights.stat().st_size - 100)
        held = survival_of(tiny.base, tiny.adapter, {"openvino": ir.folder})
        assert re.search(
            r"constant '.+' ends at byte \d+ of openvino_model.bin, which has \d+", held["openvino"].not_run
        )
        ir.weights.write_bytes(b"")
        with pytest.raises(NotUnderstoodError, match="which has 0"):
            stored(ir.folder, tiny.base, lambda _: 0)
        ir.weights.unlink()
        with pytest.raises(NotUnderstoodError, match=r"has no openvino_model\.xml, or not the \.bin"):
            stored(ir.folder, tiny.base, lambda _: 0)


def test_a_link_out_of_the_folder_is_not_followed(tiny: Models, outputs: dict[str, Path], tmp_path: Path) -> None:
    ir = Ir(outputs["openvino"], tmp_path / "ir")
    ir.weights.rename(tmp_path / "outside.bin")
    ir.weights.symlink_to(tmp_path / "outside.bin")
    held = survival_of(tiny.base, tiny.adapter, {"openvino": ir.folder})
    assert "openvino_model.bin" in held["openvino"].not_run


LAYER = '<layer id="{}" name="{}" type="Const"/>'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no element found"),
        ("PK\x03\x04", "not well-formed"),
        ('<!DOCTYPE net [<!ENTITY a "b">]><net/>', "document type"),
        ("<net>" + "<a>" * 1000 + "</a>" * 1000 + "</net>", "more than 64 elements"),
        (f"<net><layers>{LAYER.format(1, 'a') * 2}</layers></net>", "two layers of number 1"),
        (f"<net><layers>{LAYER.format('x', 'a')}</layers></net>", "'x' is no number"),
        (f"<net><layers>{LAYER.format(1, 'a' * 5000)}</layers></net>", "has 5000 characters"),
        ('<net><edges><edge from-layer="1" to-layer="2" to-port="0"/></edges></net>', "one of them is missing"),
        (f'<net><layers>{LAYER.format(1, "a")}</layers><edges>{2 * """<edge from-layer="1" to-layer="1" to-port="0"/>"""}</edges></net>', "two edges"),
    ],
)  # fmt: skip
def test_a_file_that_describes_no_model_is_refused(
    outputs: dict[str, Path], tmp_path: Path, text: str, message: str
) -> None:
    ir = Ir(outputs["openvino"], tmp_path / "ir")
    ir.path.write_text(text)
    with pytest.raises(NotUnderstoodError, match=message):
        stored(ir.folder, tmp_path, lambda _: 0)


def test_more_than_a_description_holds_is_refused(
    outputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limits are far above every model's: lower ones stand in for a larger file."""
    for limit in ("LARGEST_DESCRIPTION_BYTES", "MOST_LAYERS", "MOST_EDGES"):
        with monkeypatch.context() as lower:
            lower.setattr(description, limit, 10)
            with pytest.raises(NotUnderstoodError, match="more than 10"):
                stored(outputs["openvino"], tmp_path, lambda _: 0)


def test_conversions_in_a_circle_end(outputs: dict[str, Path], tmp_path: Path) -> None:
    ir = Ir(outputs["openvino-int8"], tmp_path / "ir")
    circle = "".join(f'<layer id="{n}" name="c{n}" type="Convert"/>' for n in (90000, 90001))
    number = next(number for number, each in ir._layers.items() if each.attrib["name"] == f"{DOWN}.T.q8")
    edges = "".join(
        f'<edge from-layer="{source}" to-layer="{target}" to-port="{port}"/>'
        for source, target, port in ((number, 90000, 0), (90000, 90001, 0), (90001, 90000, 1))
    )
    ir.replace("</layers>", f"{circle}</layers>").replace("</edges>", f"{edges}</edges>")
    weight = stored(ir.folder, tmp_path, lambda _: 0).weight(DOWN, turned=False)
    assert weight.shape == (32, 64)
