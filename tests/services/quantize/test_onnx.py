"""ONNX levels: run by ONNX Runtime, equal to the dequantized graph, one tensor for a tied embedding."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from slipway.errors import ModelExportError, QuantizationError
from slipway.model.graphs import weights
from slipway.stage import Context
from slipway_onnx_export.params import OnnxExportParams
from slipway_onnx_export.stage import STAGE as EXPORT
from slipway_quantize.params import QuantizeParams
from slipway_quantize.stage import STAGE
from support.models.quantize_models import divergence, onnx_logits, onnx_session, onnx_step, prompt, save_tiny

Quantize = Callable[..., tuple[Path, Context]]


def operators(folder: Path) -> list[str]:
    return [node.op_type for node in onnx.load(folder / "model.onnx", load_external_data=False).graph.node]


@pytest.mark.parametrize("level", ["int8", "int4"])
def test_integers_compute_exactly_what_the_dequantized_graph_does(
    quantize: Quantize, tiny_onnx: Path, level: str
) -> None:
    packed, ctx = quantize(tiny_onnx, format="onnx", level=level, accuracy_level=1)
    dense, _ = quantize(tiny_onnx, format="onnx", level=level, packed=False)
    tokens = prompt(batch=3)
    expected = onnx_logits(dense, tokens)
    np.testing.assert_allclose(onnx_logits(packed, tokens), expected, atol=1e-5)
    assert np.abs(expected - onnx_logits(tiny_onnx, tokens)).max() > 1e-3
    assert ctx.facts["check"] == "passed"
    assert "MatMul" not in operators(packed)


@pytest.mark.parametrize("level", ["int8", "int4"])
def test_pytorch_and_onnx_round_to_the_same_weights(
    quantize: Quantize, tiny: Path, tiny_onnx: Path, level: str
) -> None:
    from safetensors.torch import load_file

    torch_dense, _ = quantize(tiny, format="pytorch", level=level, packed=False)
    onnx_dense, _ = quantize(tiny_onnx, format="onnx", level=level, packed=False)
    expected = load_file(torch_dense / "model.safetensors")["model.layers.1.mlp.down_proj.weight"].numpy()
    model = onnx.load(onnx_dense / "model.onnx")
    found = [t for t in model.graph.initializer if "layers.1.mlp.down_proj.weight" in t.name]
    assert len(found) == 1
    values = onnx.numpy_helper.to_array(found[0])
    assert (values == expected).all() if values.shape == expected.shape else (expected == values.T).all()


def test_tied_embedding_and_lm_head_share_one_tensor(quantize: Quantize, tiny_onnx: Path) -> None:
    packed, _ = quantize(tiny_onnx, format="onnx", level="int4")
    graph = onnx.load(packed / "model.onnx", load_external_data=False).graph
    lookup = next(node for node in graph.node if node.op_type == "GatherBlockQuantized")
    users = [node.op_type for node in graph.node if lookup.input[0] in node.input]
    assert sorted(users) == ["GatherBlockQuantized", "MatMulNBits"]
    big = [t.name for t in graph.initializer if t.data_type == onnx.TensorProto.UINT8 and t.dims[0] == 512]
    assert big == [lookup.input[0]]
    assert (packed / "model.onnx.data").stat().st_size < 0.3 * (tiny_onnx / "model.onnx.data").stat().st_size


def test_untied_model_quantizes_both(quantize: Quantize, tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "untied", tied=False)
    exported = EXPORT.run({"pytorch": source}, OnnxExportParams(parity="never"), Context(workdir=tmp_path))["onnx"]
    packed, _ = quantize(exported, format="onnx", level="int8", accuracy_level=1)
    dense, _ = quantize(exported, format="onnx", level="int8", packed=False)
    np.testing.assert_allclose(onnx_logits(packed, prompt()), onnx_logits(dense, prompt()), atol=1e-5)
    assert "GatherBlockQuantized" in operators(packed)
    assert "MatMul" not in operators(packed)


@pytest.mark.slow
def test_traced_graphs_are_quantized_alike(quantize: Quantize, traced: dict[str, Path]) -> None:
    for runtime, source in traced.items():
        for level in ("fp16", "int8"):
            result, _ = quantize(source, format="onnx", level=level)
            kl, _ = divergence(onnx_logits(source, prompt()), onnx_logits(result, prompt()))
            assert kl < 1e-3, (runtime, level)
            assert onnx_session(result).get_inputs()[0].name == "input_ids"


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of one layer traced by torch, for both runtimes (norms in single operators, and spelt out)."""
    source, made = save_tiny(tmp_path_factory.mktemp("one-layer") / "model", num_hidden_layers=1), {}
    for runtime in ("onnxruntime", "tensorrt"):
        params = OnnxExportParams(engine="dynamo", runtime=runtime, parity="never")
        workdir = tmp_path_factory.mktemp(runtime)
        made[runtime] = EXPORT.run({"pytorch": source}, params, Context(workdir=workdir))["onnx"]
    return made


@pytest.mark.parametrize("level", ["fp16", "int8", "int4"])
def test_decoding_with_the_cache_equals_one_prompt(quantize: Quantize, tiny_onnx: Path, level: str) -> None:
    result, _ = quantize(tiny_onnx, format="onnx", level=level, accuracy_level=1)
    session = onnx_session(result)
    tokens = prompt(batch=2, sequence=7)
    whole, _ = onnx_step(session, tokens)
    _, past = onnx_step(session, tokens[:, :5])
    for position in (5, 6):
        logits, past = onnx_step(session, tokens[:, position : position + 1], past)
    np.testing.assert_allclose(logits[:, 0], whole[:, -1], atol=5e-3 if level == "fp16" else 1e-4)


def test_fp16_has_half_precision_inputs_outputs_and_weights(quantize: Quantize, tiny_onnx: Path) -> None:
    half, ctx = quantize(tiny_onnx, format="onnx", level="fp16")
    before, after = onnx_session(tiny_onnx), onnx_session(half)
    assert [v.name for v in before.get_inputs()] == [v.name for v in after.get_inputs()]
    assert [v.name for v in before.get_outputs()] == [v.name for v in after.get_outputs()]
    for value in (*after.get_inputs(), *after.get_outputs()):
        expected = (
            "tensor(int64)" if value.name in ("input_ids", "attention_mask", "position_ids") else "tensor(float16)"
        )
        assert value.type == expected, value.name
    assert 0.45 < ctx.facts["reduction"] < 0.55
    np.testing.assert_allclose(onnx_logits(half, prompt()), onnx_logits(tiny_onnx, prompt()), atol=5e-3)


@pytest.mark.slow
def test_fp16_keeps_squares_and_angles_in_float32(quantize: Quantize, tmp_path: Path, traced: dict[str, Path]) -> None:
    """Embeddings of a thousand overflow when squared in half precision, and position 9001 is no float16."""
    model = onnx.load(traced["tensorrt"] / "model.onnx")
    table = next(t for t in model.graph.initializer if list(t.dims) == [512, 64])
    table.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(table) * 5e4, table.name))
    source = tmp_path / "loud"
    source.mkdir()
    onnx.save(model, source / "model.onnx")
    (source / "config.json").write_bytes((traced["tensorrt"] / "config.json").read_bytes())
    half, _ = quantize(source, format="onnx", level="fp16", check=False)
    feeds = {"input_ids": prompt(1, 4), "attention_mask": np.ones((1, 4), np.int64)}
    feeds["position_ids"] = np.arange(9001, 9005)[None]
    keys = []
    for folder, dtype in ((source, np.float32), (half, np.float16)):
        session = onnx_session(folder)
        past = {v.name: np.zeros((1, 2, 0, 32), dtype) for v in session.get_inputs() if "past" in v.name}
        keys.append(session.run(["present.0.key"], {**feeds, **past})[0].astype(np.float32))
    assert np.isfinite(keys[1]).all()
    np.testing.assert_allclose(keys[1], keys[0], atol=2e-2)


def test_fp16_runs_values_whose_type_an_attribute_has(quantize: Quantize, tmp_path: Path) -> None:
    """Older graphs of T5 make a mask by ``ConstantOfShape``, whose attribute says that it is float32."""
    folder = tmp_path / "made"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    rows = np.random.default_rng(3).standard_normal((64, 32)).astype(np.float32)
    ones = onnx.helper.make_tensor("value", onnx.TensorProto.FLOAT, [1], [1.0])
    nodes = [
        onnx.helper.make_node("Gather", ["rows", "input_ids"], ["found"]),
        onnx.helper.make_node("Shape", ["found"], ["shape"]),
        onnx.helper.make_node("ConstantOfShape", ["shape"], ["made"], value=ones),
        onnx.helper.make_node("Add", ["found", "made"], ["out"]),
    ]
    ids = onnx.helper.make_tensor_value_info("input_ids", onnx.TensorProto.INT64, ["batch", "sequence"])
    out = onnx.helper.make_tensor_value_info("out", onnx.TensorProto.FLOAT, ["batch", "sequence", 32])
    graph = onnx.helper.make_graph(nodes, "g", [ids], [out], [onnx.numpy_helper.from_array(rows, "rows")])
    opset = [onnx.helper.make_opsetid("", 17)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opset, ir_version=8), folder / "model.onnx")
    output, _ = quantize(folder, format="onnx", level="fp16", check=False)
    tokens = np.array([[3, 1, 63]])
    (given,) = onnx_session(output).run(None, {"input_ids": tokens})
    assert given.dtype == np.float16
    np.testing.assert_allclose(given, rows[tokens] + 1, atol=2e-3)


def test_bf16_is_refused_with_what_to_use(quantize: Quantize, tiny_onnx: Path) -> None:
    with pytest.raises(ModelExportError) as caught:
        quantize(tiny_onnx, format="onnx", level="bf16")
    assert caught.value.reason == "QUANTIZATION_UNSUPPORTED"
    assert "fp16" in caught.value.remedy


def test_input_with_a_second_hard_link_and_no_write_permission_is_fine(
    quantize: Quantize, tiny_onnx: Path, tmp_path: Path
) -> None:
    """So an artifact store hands its files out."""
    linked = tmp_path / "linked"
    linked.mkdir()
    for path in tiny_onnx.iterdir():
        os.link(path, linked / path.name)
    (linked / "model.onnx.data").chmod(0o444)
    packed, _ = quantize(linked, format="onnx", level="int4")
    half, _ = quantize(linked, format="onnx", level="fp16")
    assert np.isfinite(onnx_logits(packed, prompt())).all()
    assert np.isfinite(onnx_logits(half, prompt())).all()


def copy_onnx(source: Path, target: Path) -> Path:
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def poison(folder: Path) -> None:
    """NaN at the end of the data, where the last weight lies."""
    with (folder / "model.onnx.data").open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(np.array([np.nan], np.float32).tobytes())


def point_outside(folder: Path) -> None:
    model = ir.load(folder / "model.onnx")
    (folder.parent / "outside.data").write_bytes((folder / "model.onnx.data").read_bytes())
    for value in model.graph.initializers.values():
        if isinstance(value.const_value, ir.ExternalTensor):
            old = value.const_value
            value.const_value = ir.ExternalTensor(
                "../outside.data", old.offset, old.length, old.dtype, shape=old.shape, name=old.name
            )
    ir.save(model, folder / "model.onnx")


@pytest.mark.parametrize("level", ["int8", "fp16"])
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (poison, "NON_FINITE_WEIGHTS"),
        (lambda folder: os.truncate(folder / "model.onnx.data", 10_000), "ONNX_INVALID"),
        (lambda folder: (folder / "model.onnx.data").unlink(), "ONNX_INVALID"),
        (lambda folder: (folder / "model.onnx").write_bytes(b"\x00garbage"), "ONNX_INVALID"),
        (lambda folder: (folder / "model.onnx").unlink(), "ONNX_INVALID"),
        (point_outside, "ONNX_INVALID"),
    ],
)
def test_damaged_input_has_its_reason(
    quantize: Quantize, tiny_onnx: Path, tmp_path: Path, level: str, damage: Callable[[Path], Any], reason: str
) -> None:
    folder = copy_onnx(tiny_onnx, tmp_path / "damaged")
    damage(folder)
    with pytest.raises(ModelExportError) as caught:
        quantize(folder, format="onnx", level=level)
    assert caught.value.reason == reason


def test_unaligned_matrices_keep_their_precision_and_are_named(quantize: Quantize, tiny_onnx: Path) -> None:
    packed, ctx = quantize(tiny_onnx, format="onnx", level="int4", group_size=128)
    assert "group size 128" in ctx.facts["warnings"][0]
    report = json.loads((packed / "quantization.json").read_text())
    assert any("down_proj" in name for name in report["tensors"]["quantized"])
    assert any("up_proj" in name for name in report["tensors"]["kept"])
    dense, _ = quantize(tiny_onnx, format="onnx", level="int4", group_size=128, packed=False)
    kl, agreement = divergence(onnx_logits(dense, prompt()), onnx_logits(packed, prompt()))
    assert kl < 1e-5
    assert agreement == 1.0


def test_quantized_model_is_not_quantized_again(quantize: Quantize, tiny_onnx: Path) -> None:
    half, _ = quantize(tiny_onnx, format="onnx", level="fp16")
    with pytest.raises(ModelExportError) as caught:
        quantize(half, format="onnx", level="int8")
    assert caught.value.reason == "QUANTIZATION_UNSUPPORTED"
    assert caught.value.about == {"quantization": "fp16"}


def test_nothing_to_quantize_is_refused(quantize: Quantize, tiny_onnx: Path) -> None:
    with pytest.raises(ModelExportError) as caught:
        quantize(tiny_onnx, format="onnx", level="int4", group_size=256)
    assert caught.value.reason == "QUANTIZATION_UNSUPPORTED"


def test_two_runs_write_the_same_bytes(quantize: Quantize, tiny_onnx: Path) -> None:
    for level in ("fp16", "int4"):
        first, _ = quantize(tiny_onnx, format="onnx", level=level)
        second, _ = quantize(tiny_onnx, format="onnx", level=level)
        for path in sorted(first.iterdir()):
            assert path.read_bytes() == (second / path.name).read_bytes(), path.name


@pytest.mark.parametrize("level", ["fp16", "int8", "int4"])
def test_example_travels_and_description_names_the_level(quantize: Quantize, tiny_onnx: Path, level: str) -> None:
    result, _ = quantize(tiny_onnx, format="onnx", level=level)
    assert (result / "example.py").read_bytes() == (tiny_onnx / "example.py").read_bytes()
    assert json.loads((result / "onnx_export.json").read_text())["precision"] == level
    assert json.loads((result / "quantization.json").read_text())["level"] == level


_MEASURE = """
import os, sys, threading
from pathlib import Path
import slipway_quantize.quantize, slipway_quantize.graphs.integer_graph, slipway_quantize.graphs.half, slipway_quantize.checkpoints.compressed
from slipway.stage import Context
from slipway_quantize.stage import STAGE, QuantizeParams
def anonymous():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))
def measure(source, workdir, form, level):
    before, peak, done = anonymous(), [0], threading.Event()
    def watch():
        while not done.wait(0.002):
            peak[0] = max(peak[0], anonymous())
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    STAGE.run({"model": Path(source)}, QuantizeParams(format=form, level=level, check=False), Context(workdir=Path(workdir)))
    done.set()
    watcher.join()
    print(form, level, (peak[0] - before) // 1024, flush=True)
for given in sys.argv[1:]:  # each in a process of its own, which need not import anything again
    child = os.fork()
    if not child:
        measure(*given.split(","))
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{given} failed")
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """Embedding and lm_head, 64 MiB each, are quantized within half of that together."""
    source = save_tiny(tmp_path / "pytorch", vocab_size=1 << 17, hidden_size=128, num_hidden_layers=1, tied=False)
    exported = EXPORT.run({"pytorch": source}, OnnxExportParams(parity="never"), Context(workdir=tmp_path))["onnx"]
    asked = []
    for form, level in (("pytorch", "int4"), ("pytorch", "bf16"), ("onnx", "int4"), ("onnx", "fp16")):
        workdir = tmp_path / f"{form}-{level}"
        workdir.mkdir()
        asked.append(f"{source if form == 'pytorch' else exported},{workdir},{form},{level}")
    measured = subprocess.run([sys.executable, "-c", _MEASURE, *asked], stdout=subprocess.PIPE, text=True, check=True)
    found = [line.split() for line in measured.stdout.splitlines()]
    assert len(found) == len(asked)
    for form, level, mebibytes in found:
        assert int(mebibytes) < 64, (form, level)


@pytest.mark.parametrize(
    "sizes", [{"shapes": "batch", "batch": 2}, {"shapes": "static", "sequence": 2, "past": 30}], ids=str
)
def test_a_level_of_a_graph_with_fixed_shapes_is_checked(tiny: Path, tmp_path: Path, sizes: dict[str, Any]) -> None:
    """The check runs it in its own shapes, with a masked cache where its length is fixed."""
    params = OnnxExportParams(parity="never", **sizes)
    fixed = EXPORT.run({"pytorch": tiny}, params, Context(workdir=tmp_path))["onnx"]
    workdir = tmp_path / "level"
    workdir.mkdir()
    ctx = Context(workdir=workdir)
    STAGE.run({"model": fixed}, QuantizeParams(format="onnx", level="int8"), ctx)
    assert ctx.facts["check"] == "passed"


@pytest.mark.parametrize("level", ["int4", "fp16", "int8_dynamic"])
def test_a_level_of_one_file_computes_the_same(quantize: Quantize, tiny_onnx: Path, level: str) -> None:
    beside, _ = quantize(tiny_onnx, format="onnx", level=level)
    inside, ctx = quantize(tiny_onnx, format="onnx", level=level, external_data=False)
    assert (beside / "model.onnx.data").is_file()
    assert not (inside / "model.onnx.data").exists()
    assert not any(tensor.external_data for tensor in onnx.load(inside / "model.onnx").graph.initializer)
    tokens = prompt(batch=2)
    assert (onnx_logits(inside, tokens) == onnx_logits(beside, tokens)).all()
    assert ctx.facts["check"] == "passed"


def test_a_level_too_large_for_one_file_says_so(
    quantize: Quantize, tiny_onnx: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "MOST_INLINE_BYTES", 1000)  # instead of a model of 2 GB
    with pytest.raises(QuantizationError, match="and a graph can hold 1") as caught:
        quantize(tiny_onnx, format="onnx", level="int4", external_data=False)
    assert (caught.value.reason, caught.value.remedy) == ("ONNX_TOO_LARGE", "set external_data to true")
