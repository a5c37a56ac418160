"""Codes of a calibration: every format stores exactly these values, and a calibration that does not fit is refused by name."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from slipway.errors import QuantizationError
from slipway.stage import Context
from slipway_onnx_export.params import OnnxExportParams
from slipway_onnx_export.stage import STAGE as EXPORT
from slipway_quantize.params import QuantizeParams
from slipway_quantize.stage import STAGE
from support.models.calibrations import Arrays, values, write_calibration
from support.models.family_models import make_family_model
from support.models.quantize_models import (
    divergence,
    onnx_logits,
    onnx_session,
    onnx_step,
    prompt,
    save_tiny,
    torch_logits,
)

Quantize = Callable[..., tuple[Path, Context]]
GRIDS = [(4, True), (4, False), pytest.param(8, False, marks=pytest.mark.slow)]


@pytest.fixture
def quantize(tmp_path: Path) -> Quantize:
    """Runs the stage with a calibration in a work folder of its own."""
    runs = iter(range(100))

    def call(source: Path, calibration: Path, **params: Any) -> tuple[Path, Context]:
        workdir = tmp_path / f"attempt-{next(runs)}"
        workdir.mkdir()
        ctx = Context(workdir=workdir, log=logging.getLogger("test"), input_digests={"calibration": "sha256:c"})
        inputs = {"model": source, "calibration": calibration}
        return STAGE.run(inputs, QuantizeParams(**params), ctx)["model"], ctx

    return call


@pytest.fixture(scope="module")
def serving(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The graph in the form for serving, whose projections are joined."""
    params = OnnxExportParams(parity="never", past_present_share_buffer=True)
    return EXPORT.run({"pytorch": tiny}, params, Context(workdir=tmp_path_factory.mktemp("serving")))["onnx"]


def stored(folder: Path) -> dict[str, Arrays]:
    """The arrays of each weight of a calibration."""
    found: dict[str, Arrays] = {}
    for name, tensor in load_file(folder / "weights.safetensors").items():
        weight, _, kind = name.rpartition(".")
        found.setdefault(weight, {})[kind] = tensor.numpy()
    return found


def report(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "quantization.json").read_text())


@pytest.mark.parametrize(("bits", "symmetric"), [*GRIDS, (3, True)])
def test_pytorch_has_the_values_of_the_codes(quantize: Quantize, tmp_path: Path, bits: int, symmetric: bool) -> None:
    model = save_tiny(tmp_path / "model", dtype=torch.bfloat16)
    calibration = write_calibration(model, tmp_path / "calibration", bits=bits, symmetric=symmetric)
    result, ctx = quantize(model, calibration, format="pytorch", level=f"int{bits}")
    loaded = AutoModelForCausalLM.from_pretrained(result)
    loaded(torch.zeros((1, 2), dtype=torch.int64))
    weights = dict(loaded.named_parameters())
    for name, arrays in stored(calibration).items():
        expected = torch.from_numpy(values(arrays)).to(torch.bfloat16)
        assert torch.equal(weights[name].data, expected), name
    methods = report(result)["tensors"]["methods"]
    assert set(methods.values()) == {"gptq"}
    assert ctx.facts["weights_by_method"] == {"gptq": len(methods)}
    assert report(result)["calibration"] == "sha256:c"
    scheme = json.loads((result / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    assert scheme["weights"]["symmetric"] == symmetric


def identity_values(folder: Path, initializer: str) -> np.ndarray:
    """What the operators of a graph make of one of its weights: MatMulNBits of the unit matrix, (N, K)."""
    import onnxruntime as ort

    graph = ir.load(folder / "model.onnx").graph
    node = next(
        node
        for node in graph
        if node.op_type == "MatMulNBits" and str(node.inputs[1].name).startswith(f"{initializer}.q")
    )
    features = node.attributes["K"].value
    x = ir.Value(name="x", shape=ir.Shape([features, features]), type=ir.TensorType(ir.DataType.FLOAT))
    constants = [value for value in node.inputs[1:] if value is not None]
    inside = []
    for value in constants:
        copy = ir.Value(name=value.name, shape=value.shape, type=value.type)
        copy.const_value = ir.tensor(value.const_value.numpy(), name=value.name)
        inside.append(copy)
    kept = {name: node.attributes[name].value for name in ("bits", "block_size", "K", "N")}
    new = ir.node("MatMulNBits", [x, *inside], {**kept, "accuracy_level": 1}, domain="com.microsoft")
    new.outputs[0].name, new.outputs[0].type = "y", ir.TensorType(ir.DataType.FLOAT)
    made = ir.Graph(
        [x], new.outputs, nodes=[new], initializers=inside, opset_imports={"": 21, "com.microsoft": 1}, name="g"
    )
    session = ort.InferenceSession(ir.to_proto(ir.Model(made, ir_version=10)).SerializeToString())
    return session.run(None, {"x": np.eye(features, dtype=np.float32)})[0].T


@pytest.mark.parametrize(("bits", "symmetric"), GRIDS)
def test_onnx_has_the_values_of_the_codes(
    quantize: Quantize, tiny: Path, tiny_onnx: Path, tmp_path: Path, bits: int, symmetric: bool
) -> None:
    calibration = write_calibration(tiny, tmp_path / "calibration", bits=bits, symmetric=symmetric)
    result, ctx = quantize(tiny_onnx, calibration, format="onnx", level=f"int{bits}", accuracy_level=1)
    arrays = stored(calibration)
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"):
        assert np.array_equal(identity_values(result, f"{name}.T"), values(arrays[name])), name
    assert np.array_equal(identity_values(result, "model.embed_tokens.weight"), values(arrays["lm_head.weight"]))
    assert set(ctx.facts["weights_by_method"]) == {"gptq"}
    # the whole graph, the lookup of tokens among it, computes what the values give in PyTorch
    dense = torch_model_with(tiny, arrays, tmp_path / "dense")
    logits, _ = onnx_step(onnx_session(result), prompt())
    np.testing.assert_allclose(logits, torch_logits(dense, prompt()), atol=2e-5)


def torch_model_with(model: Path, arrays: dict[str, Arrays], target: Path) -> Path:
    """The model with the weights that the codes stand for; the head's are the tied embedding's too."""
    shutil.copytree(model, target)
    weights = load_file(model / "model.safetensors")
    for name, each in arrays.items():
        own = name if name in weights else "model.embed_tokens.weight"
        weights[own] = torch.from_numpy(values(each)).to(weights[own].dtype)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "dense"])
def test_joined_projections_have_the_codes_of_their_parts(
    quantize: Quantize, tiny: Path, serving: Path, tmp_path: Path, symmetric: bool, packed: bool
) -> None:
    calibration = write_calibration(tiny, tmp_path / "calibration", symmetric=symmetric)
    result, ctx = quantize(serving, calibration, format="onnx", level="int4", packed=packed, check=False)
    arrays = stored(calibration)
    block = "model.layers.1.self_attn."
    name = f"{block}q_proj+k_proj+v_proj.weight.T"
    expected = np.concatenate([values(arrays[f"{block}{part}_proj.weight"]) for part in "qkv"])
    if packed:
        found = identity_values(result, name)
    else:
        found = ir.load(result / "model.onnx").graph.initializers[name].const_value.numpy().T
    assert np.array_equal(found, expected)
    assert set(ctx.facts["weights_by_method"]) == {"gptq"}


def test_what_a_calibration_lacks_is_rounded_as_always(
    quantize: Quantize, tiny: Path, tiny_onnx: Path, tmp_path: Path
) -> None:
    lacks = ["model.layers.0.self_attn.q_proj.weight", "lm_head.weight"]
    calibration = write_calibration(tiny, tmp_path / "calibration", symmetric=False, leave_out=lacks)
    plain = {name: _without(tmp_path, source, name) for name, source in (("pytorch", tiny), ("onnx", tiny_onnx))}
    result, _ = quantize(tiny, calibration, format="pytorch", level="int4", head_bits=4)
    assert {name for name, how in report(result)["tensors"]["methods"].items() if how == "rtn"} == set(lacks)
    one, other = (load_file(folder / "model.safetensors") for folder in (result, plain["pytorch"]))
    assert torch.equal(one["lm_head.weight_packed"], other["lm_head.weight_packed"])
    torch_logits(result, prompt())
    graph, _ = quantize(tiny_onnx, calibration, format="onnx", level="int4", head_bits=4)
    methods = report(graph)["tensors"]["methods"]
    assert {name for name, how in methods.items() if how == "rtn"} == {f"{lacks[0]}.T", "model.embed_tokens.weight"}
    first = f"{lacks[0]}.T"
    assert np.array_equal(identity_values(graph, first), identity_values(plain["onnx"], first))


@pytest.mark.parametrize("kept", ["mlp.down_proj", "self_attn.q_proj"])
def test_layers_that_keep_their_type_leave_the_others_their_codes(
    quantize: Quantize, tiny: Path, serving: Path, tmp_path: Path, kept: str
) -> None:
    """The mixed attempt of a fallback: the calibration's codes of a kept layer, or of one joined with it, are not missed."""
    calibration = write_calibration(tiny, tmp_path / "calibration")
    keep = (f"model.layers.0.{kept}",)
    _, ctx = quantize(serving, calibration, format="onnx", level="int4", keep=keep, check=False)
    assert set(ctx.facts["weights_by_method"]) == {"gptq"}
    assert not ctx.facts.get("warnings")


def _without(tmp_path: Path, source: Path, name: str) -> Path:
    workdir = tmp_path / f"plain-{name}"
    workdir.mkdir()
    return STAGE.run(
        {"model": source}, QuantizeParams(format=name, level="int4", head_bits=4), Context(workdir=workdir)
    )["model"]


def test_the_same_calibration_gives_the_same_bytes(quantize: Quantize, tiny: Path, tmp_path: Path) -> None:
    calibration = write_calibration(tiny, tmp_path / "calibration", symmetric=False)
    first, again = (quantize(tiny, calibration, format="pytorch", level="int4")[0] for _ in range(2))
    assert (first / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()


def _change(folder: Path, **changes: Any) -> None:
    path = folder / "calibration.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "weights.safetensors")
    change(tensors)
    save_file(tensors, folder / "weights.safetensors")


Q = "model.layers.0.self_attn.q_proj.weight"
FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "other bits": (lambda folder: _change(folder, bits=8), "it has 8 bits in groups of 32"),
    "other groups": (lambda folder: _change(folder, group_size=64), "in groups of 64"),
    "other version": (lambda folder: _change(folder, schema_version=2), "schema version 2"),
    "no description": (lambda folder: (folder / "calibration.json").unlink(), "calibration.json cannot be read"),
    "no object": (lambda folder: (folder / "calibration.json").write_text("[]"), "calibration.json cannot be read"),
    "no weights": (lambda folder: (folder / "weights.safetensors").unlink(), "cannot read"),
    "cut off": (lambda folder: (folder / "weights.safetensors").write_bytes(b"abc"), "not a valid safetensors"),
    "other shape": (
        lambda folder: _rewrite(
            folder,
            lambda t: t.update(
                {f"{Q}.codes": t[f"{Q}.codes"][:8].clone(), f"{Q}.scales": t[f"{Q}.scales"][:8].clone()}
            ),
        ),
        "have the shape",
    ),
    "no scales": (lambda folder: _rewrite(folder, lambda t: t.pop(f"{Q}.scales")), "no codes or no scales"),
    "odd part": (
        lambda folder: _rewrite(folder, lambda t: t.update({"x.order": torch.zeros(2, 2)})),
        "no part of a weight",
    ),
    "wide codes": (lambda folder: _rewrite(folder, lambda t: t[f"{Q}.codes"].fill_(8)), "are not of 4 bits"),
    "NaN": (lambda folder: _rewrite(folder, lambda t: t[f"{Q}.scales"].fill_(torch.nan)), "is not finite"),
    "other model": (
        lambda folder: _rewrite(folder, lambda t: t[f"{Q}.codes"].copy_(t[f"{Q}.codes"].flip(0))),
        "of another weight",
    ),
    "other digest": (
        lambda folder: _change(folder, model="sha256:other"),
        "is of the model sha256:other…, and sha256:mine",
    ),
    "other name": (
        lambda folder: _rewrite(
            folder, lambda t: t.update({f"y.{kind}": t.pop(f"{Q}.{kind}") for kind in ("codes", "scales")})
        ),
        "no linear layer with the weight 'y'",
    ),
}


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_a_calibration_that_does_not_fit_is_refused_by_name(tiny: Path, tmp_path: Path, fault: str) -> None:
    calibration = write_calibration(tiny, tmp_path / "calibration")
    spoil, said = FAULTS[fault]
    spoil(calibration)
    ctx = Context(workdir=tmp_path / "work", input_digests={"model": "sha256:mine"})
    ctx.workdir.mkdir()
    params = QuantizeParams(format="pytorch", level="int4")
    with pytest.raises(QuantizationError, match=said) as caught:
        STAGE.run({"model": tiny, "calibration": calibration}, params, ctx)
    assert caught.value.reason == "CALIBRATION_MISMATCH"
    assert "calibrat" in caught.value.remedy


def test_a_graph_of_another_model_refuses_a_calibration(quantize: Quantize, tiny_onnx: Path, tmp_path: Path) -> None:
    other = save_tiny(tmp_path / "other", intermediate_size=192)
    calibration = write_calibration(other, tmp_path / "calibration", head=False)
    with pytest.raises(QuantizationError, match="have the shape"):
        quantize(tiny_onnx, calibration, format="onnx", level="int4")
    _rewrite(calibration, lambda tensors: [tensors.update({f"x.{key}": tensors.pop(key)}) for key in list(tensors)])
    with pytest.raises(QuantizationError, match="the model has none of its 14 weights"):
        quantize(tiny_onnx, calibration, format="onnx", level="int4")


def test_a_graph_that_was_made_from_another_model_refuses_a_calibration(
    quantize: Quantize, tiny: Path, tiny_onnx: Path, tmp_path: Path
) -> None:
    graph = shutil.copytree(tiny_onnx, tmp_path / "graph")
    model = onnx.load(graph / "model.onnx", load_external_data=False)
    model.metadata_props.add(key="lineage", value="sha256:mine")
    onnx.save(model, graph / "model.onnx")
    calibration = write_calibration(tiny, tmp_path / "calibration")
    _change(calibration, model="sha256:other")
    with pytest.raises(QuantizationError, match="is of the model sha256:other…, and sha256:mine"):
        quantize(graph, calibration, format="onnx", level="int4")
    _change(calibration, model="sha256:mine")
    quantize(graph, calibration, format="onnx", level="int4")


def test_levels_without_integers_take_no_calibration(quantize: Quantize, tiny: Path, tmp_path: Path) -> None:
    calibration = write_calibration(tiny, tmp_path / "calibration")
    with pytest.raises(QuantizationError, match="pytorch at level bf16 takes none"):
        quantize(tiny, calibration, format="pytorch", level="bf16")
    result, _ = quantize(tiny, calibration, format="pytorch", level="bf16", calibrated=False)
    assert "methods" not in report(result)["tensors"]


def test_a_calibration_says_which_weights_are_wide(
    quantize: Quantize, tiny: Path, tiny_onnx: Path, tmp_path: Path
) -> None:
    """The codes of a wide weight are of 8 bits and have no zero points; beside others with some, where the format takes both."""
    wide = "model.layers.0.self_attn.q_proj.weight"
    calibration = write_calibration(tiny, tmp_path / "symmetric", wide=[wide], head=False)
    result, _ = quantize(tiny, calibration, format="pytorch", level="int4")
    bits = report(result)["tensors"]["bits"]
    assert {name for name, of in bits.items() if of == 8} == {wide}
    stored = load_file(result / "model.safetensors")
    assert stored[f"{wide}_packed"].shape[1] * 4 == stored[f"{wide}_shape"][1]
    schemes = json.loads((result / "config.json").read_text())["quantization_config"]["config_groups"].values()
    assert sorted((each["weights"]["num_bits"], each["weights"]["symmetric"]) for each in schemes) == [
        (4, True),
        (8, True),
    ]
    assert torch_logits(result, prompt()).shape[-1] == 512
    calibration = write_calibration(tiny, tmp_path / "calibration", symmetric=False, wide=[wide], head=False)
    graph, _ = quantize(tiny_onnx, calibration, format="onnx", level="int4")
    bits = report(graph)["tensors"]["bits"]
    assert {name for name, of in bits.items() if of == 8} == {f"{wide}.T", "model.embed_tokens.weight"}
    values = identity_values(graph, f"{wide}.T")
    given = load_file(calibration / "weights.safetensors")
    codes, scales = given[f"{wide}.codes"].float(), given[f"{wide}.scales"]
    expected = (codes.view(len(codes), scales.shape[1], -1) * scales[..., None]).reshape(codes.shape)
    assert np.abs(values - expected.numpy()).max() < 1e-5


def test_wide_weights_beside_zero_points_keep_their_type(quantize: Quantize, tiny: Path, tmp_path: Path) -> None:
    """transformers unpacks every weight of a folder with zero points by the first scheme."""
    wide = "model.layers.0.self_attn.q_proj.weight"
    calibration = write_calibration(tiny, tmp_path / "calibration", symmetric=False, wide=[wide], head=False)
    result, _ = quantize(tiny, calibration, format="pytorch", level="int4")
    assert "same" in report(result)["tensors"]["kept"][wide]
    stored = load_file(result / "model.safetensors")
    assert torch.equal(stored[wide], load_file(tiny / "model.safetensors")[wide])
    loaded = AutoModelForCausalLM.from_pretrained(result).state_dict()
    assert torch.equal(loaded[wide], stored[wide])
    narrow, given = wide.replace("q_proj", "k_proj"), load_file(calibration / "weights.safetensors")
    parts = {part: given[f"{narrow}.{part}"].numpy() for part in ("codes", "scales", "zero_points")}
    assert np.allclose(loaded[narrow].numpy(), values(parts), atol=1e-6)


def test_a_model_of_one_width_whose_layers_are_all_wide_is_refused(quantize: Quantize, tmp_path: Path) -> None:
    source = make_family_model("marian", tmp_path / "source")
    every = [name for name in load_file(source / "model.safetensors") if name.endswith("proj.weight")]
    calibration = write_calibration(source, tmp_path / "calibration", group_size=16, wide=every, head=False)
    with pytest.raises(QuantizationError, match="unpacks all of them with the same") as caught:
        quantize(source, calibration, format="pytorch", level="int4", group_size=16, keep=("fc1", "fc2"))
    assert caught.value.reason == "QUANTIZATION_UNSUPPORTED"
    assert "fewer layers 8 bits" in caught.value.remedy


def test_scales_of_a_model_in_16_bits_are_stored_in_16_bits(
    quantize: Quantize, tiny: Path, tiny_onnx: Path, tmp_path: Path
) -> None:
    source = shutil.copytree(tiny_onnx, tmp_path / "half")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    calibration = write_calibration(tiny, tmp_path / "calibration", head=False)
    made, _ = quantize(source, calibration, format="onnx", level="int4")
    graph = onnx.load(made / "model.onnx", load_external_data=False).graph
    kinds = {each.data_type for each in graph.initializer if each.name.endswith(".scale")}
    assert kinds == {onnx.TensorProto.BFLOAT16}
    other, _ = quantize(tiny_onnx, calibration, format="onnx", level="int4")
    tokens = prompt()
    assert divergence(onnx_logits(other, tokens), onnx_logits(made, tokens))[0] < 1e-3
