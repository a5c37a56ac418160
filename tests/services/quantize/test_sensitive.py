"""What keeps its type by default: the parts of recurrences and routers that one table names, in both formats, unless ``keep`` says otherwise."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from safetensors.torch import load_file

from slipway.stage import Context
from slipway_quantize.sensitive import SENSITIVE, sensitive_reason
from support.models.quantize_mixtures import QuantizedFolder, load, logits, save_model

Quantize = Callable[..., tuple[Path, Context]]
HYBRIDS = ("qwen3.5", "qwen3-next", "granite4", "lfm2", "falcon-h1", "bamba", "mamba2")
KEPT = {"qwen3.5": ("in_proj_a", "in_proj_b"), "qwen3-next": ("in_proj_ba",)}
ROUNDED = {
    "qwen3.5": ("in_proj_qkv", "in_proj_z", "out_proj"),
    "qwen3-next": ("in_proj_qkvz", "out_proj"),
    "granite4": ("mamba.in_proj", "mamba.out_proj"),
    "lfm2": ("conv.in_proj", "conv.out_proj"),
    "falcon-h1": ("mamba.in_proj", "mamba.out_proj"),
    "bamba": ("mamba.in_proj", "mamba.out_proj"),
    "mamba2": ("mixer.in_proj", "mixer.out_proj"),
}
WEIGHTS_ALONE = ("int8", "int4", "int3", "mxfp4", "nvfp4")
_OF_MIXTURES = {("qwen3-next", level) for level in ("nvfp4", "fp8", "w8a8")}
"""Levels whose experts transformers does not read, or whose rounded inputs send tokens to other experts: tests of experts look at the weights."""
LEVELS = [
    pytest.param(kind, level, marks=() if kind == "qwen3.5" or level == "int4" else pytest.mark.slow)
    for kind in HYBRIDS
    for level in (*WEIGHTS_ALONE, "fp8", "w8a8")
    if (kind, level) not in _OF_MIXTURES
]


@pytest.mark.parametrize(("kind", "level"), LEVELS)
def test_every_level_of_a_hybrid_model_computes_with_its_grid(
    quantize: Quantize, tmp_path: Path, kind: str, level: str
) -> None:
    source = save_model(kind, tmp_path / "source")
    output, ctx = quantize(source, format="pytorch", level=level, group_size=16 if level.startswith("int") else 32)
    assert ctx.facts["check"] == "passed"
    folder, model = QuantizedFolder(output), load(source)
    modules = dict(model.named_modules())
    with torch.no_grad():
        for name in sorted(folder.rounded()):
            if name in modules:
                modules[name].weight.copy_(folder.matrix(name)[0])
        _copy_experts(folder, model)
    if level not in WEIGHTS_ALONE:
        for name in folder.rounded() & modules.keys():
            modules[name].register_forward_pre_hook(partial(_round_inputs, level))
    found, wanted, exact = logits(load(output)), logits(model), logits(load(source))
    assert (found - wanted).abs().max() < (0.02 if level in WEIGHTS_ALONE else 0.1) * exact.std()
    assert (found - exact).abs().max() > 0
    stems = {name.split(".", 3)[-1] for name in folder.rounded()}
    assert all(any(stem.endswith(end) for stem in stems) for end in ROUNDED[kind])
    assert not any(stem.endswith(KEPT.get(kind, ("conv1d",))) for stem in stems)


def _round_inputs(level: str, _: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Round a layer's inputs as its scheme says: with a scale of each token."""
    values = inputs[0]
    scale = values.abs().amax(-1, keepdim=True) / (448 if level == "fp8" else 127.5)
    codes = (values / scale).to(torch.float8_e4m3fn) if level == "fp8" else (values / scale).round().clamp(-128, 127)
    return (codes.to(values.dtype) * scale,)


def _copy_experts(folder: QuantizedFolder, model: torch.nn.Module) -> None:
    for path, module in model.named_modules():
        if path.endswith(".experts"):
            for expert in range(len(module.gate_up_proj)):
                parts = [folder.matrix(f"{path}.{expert}.{name}_proj")[0] for name in ("gate", "up", "down")]
                module.gate_up_proj[expert], module.down_proj[expert] = torch.cat(parts[:2]), parts[2]


@pytest.mark.parametrize("kind", sorted(KEPT))
@pytest.mark.parametrize("level", ["int4", "fp8", "mxfp4"])
def test_what_a_recurrence_adds_up_keeps_its_type_and_is_named_in_ignore(
    quantize: Quantize, tmp_path: Path, kind: str, level: str
) -> None:
    source = save_model(kind, tmp_path / "source")
    output, _ = quantize(source, format="pytorch", level=level, check=False)
    before, after = load_file(source / "model.safetensors"), load_file(output / "model.safetensors")
    names = {
        f"model.layers.{layer}.linear_attn.{name}" for layer in range(3) for name in KEPT[kind]
    }  # the fourth layer is attention
    assert all(torch.equal(before[f"{name}.weight"], after[f"{name}.weight"]) for name in names)
    assert names <= set(json.loads((output / "config.json").read_text())["quantization_config"]["ignore"])
    kept = json.loads((output / "quantization.json").read_text())["tensors"]["kept"]
    assert all("recurrent state" in kept[f"{name}.weight"] for name in names)


def test_a_name_behind_an_exclamation_mark_is_rounded_all_the_same(quantize: Quantize, tmp_path: Path) -> None:
    source = save_model("qwen3.5", tmp_path / "source")
    keep = ("!linear_attn.in_proj_a", "layers.0.mlp.down_proj")
    output, ctx = quantize(source, format="pytorch", level="int8", keep=keep)
    rounded = QuantizedFolder(output).rounded()
    assert {f"model.layers.{layer}.linear_attn.in_proj_a" for layer in range(3)} <= rounded
    assert "model.layers.0.linear_attn.in_proj_b" not in rounded
    assert "model.layers.0.mlp.down_proj" not in rounded
    assert ctx.facts.get("warnings", []) == []


@pytest.mark.parametrize("level", ["int4", "int8", "int8_dynamic"])
@pytest.mark.parametrize("allowed", [False, True])
def test_the_same_layers_of_a_graph_stay_products(
    quantize: Quantize, tmp_path: Path, level: str, allowed: bool
) -> None:
    source = make_graph(tmp_path / "graph")
    keep = ("!linear_attn.in_proj_b",) if allowed else ()
    output, _ = quantize(source, format="onnx", level=level, keep=keep)
    graph = onnx.load(output / "model.onnx", load_external_data=False).graph
    left = {tensor.name for tensor in graph.initializer if tensor.data_type == TensorProto.FLOAT}
    kept = {
        f"model.layers.0.{name}.weight.T" for name in (*GRAPH_KEPT, *(() if allowed else ("linear_attn.in_proj_b",)))
    }
    assert kept <= left
    assert not left & {f"model.layers.0.{name}.weight.T" for name in GRAPH_ROUNDED}
    assert ("model.layers.0.linear_attn.in_proj_b.weight.T" in left) is not allowed
    reasons = json.loads((output / "quantization.json").read_text())["tensors"]["kept"]
    assert {name for name, why in reasons.items() if "recurrent" in why or "expert" in why} == kept


GRAPH_KEPT = ("linear_attn.in_proj_a", "mlp.gate", "mlp.shared_expert_gate")
GRAPH_ROUNDED = ("linear_attn.in_proj_qkv", "mlp.shared_expert.gate_proj")


def make_graph(folder: Path) -> Path:
    """Write a graph with products of the names that exports of Qwen3.5 have."""
    folder.mkdir()
    random = np.random.default_rng(3)
    table = numpy_helper.from_array(random.standard_normal((64, 32)).astype(np.float32), "model.embed_tokens.weight")
    initializers, nodes, results = [table], [helper.make_node("Gather", [table.name, "input_ids"], ["hidden"])], []
    for name in (*GRAPH_KEPT, "linear_attn.in_proj_b", *GRAPH_ROUNDED):
        weight = f"model.layers.0.{name}.weight.T"
        values = random.standard_normal((32, 1 if name.endswith("expert_gate") else 8)).astype(np.float32)
        initializers.append(numpy_helper.from_array(values, weight))
        results.append(f"{name}.result")
        nodes.append(helper.make_node("MatMul", ["hidden", weight], [results[-1]]))
    nodes.append(helper.make_node("Concat", results, ["logits"], axis=-1))
    graph = helper.make_graph(
        nodes,
        "hybrid",
        [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "sequence"])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "sequence", None])],
        initializers,
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), folder / "model.onnx"
    )
    config = {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "vocab_size": 64}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    "name",
    ["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.down_proj", "model.layers.0.linear_attn.in_proj_qkv",
     "model.layers.0.mamba.in_proj", "model.layers.0.conv.in_proj", "h.0.attn.c_attn", "lm_head", "model.layers.0.mlp.shared_expert.up_proj"],
)  # fmt: skip
def test_other_layers_are_not_in_the_table(name: str) -> None:
    assert sensitive_reason(name) == ""


@pytest.mark.parametrize(
    "name",
    [
        "model.visual.blocks.0.attn.qkv",
        "model.vision_tower.encoder.layers.0.self_attn.q_proj",
        "model.multi_modal_projector.linear_1",
        "model.audio_tower.layers.0.fc1",
    ],
)
def test_parts_for_images_and_sound_keep_their_type_unless_asked(name: str) -> None:
    assert "images or sound" in sensitive_reason(name)
    assert sensitive_reason(name, keep=[f"!{name}"]) == ""


def test_each_row_of_the_table_has_a_reason_and_a_source() -> None:
    assert all(row.why and row.source and row.ends for row in SENSITIVE)
    ends = [end for row in SENSITIVE for end in row.ends]
    assert len(ends) == len(set(ends))
