"""Experts of mixtures, one by one: each matrix is where loaders look for it, on the nearest number of its grid, and nothing is lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipway.errors import QuantizationError
from slipway.model.configuration import ModelConfig
from slipway.stage import Context
from slipway_quantize.params import QuantizeParams, refusal_reason
from support.models.quantize_mixtures import (
    QuantizedFolder,
    excess,
    expert_matrices,
    grid_of,
    load,
    logits,
    save_model,
    unpack_floats,
)

Quantize = Callable[..., tuple[Path, Context]]
MLP, NUMBERED = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}, {"gate": "w1", "up": "w3", "down": "w2"}
PLACES = {
    "qwen3-moe": ("model.layers.{}.mlp.experts.{}.{}", MLP),
    "qwen3.5-moe": ("model.layers.{}.mlp.experts.{}.{}", MLP),
    "qwen3-next": ("model.layers.{}.mlp.experts.{}.{}", MLP),
    "deepseek-v3": ("model.layers.{}.mlp.experts.{}.{}", MLP),
    "glm4-moe": ("model.layers.{}.mlp.experts.{}.{}", MLP),
    "llama4": ("model.layers.{}.feed_forward.experts.{}.{}", MLP),
    "lfm2-moe": ("model.layers.{}.feed_forward.experts.{}.{}", NUMBERED),
    "mixtral": ("model.layers.{}.block_sparse_moe.experts.{}.{}", NUMBERED),
    "granite-moe": ("model.layers.{}.block_sparse_moe.experts.{}.{}", NUMBERED),
    "granite4-moe": ("model.layers.{}.block_sparse_moe.experts.{}.{}", MLP),
}
"""The names that vLLM reads of the experts of each kind."""
FOR_VLLM = ("granite-moe", "granite4-moe")
"""Kinds whose experts transformers reads as stacks alone."""
ROUTERS = {
    "qwen3-moe": "mlp.gate", "qwen3.5-moe": "mlp.gate", "qwen3-next": "mlp.gate", "deepseek-v3": "mlp.gate", "glm4-moe": "mlp.gate",
    "llama4": "feed_forward.router", "lfm2-moe": "feed_forward.gate", "mixtral": "block_sparse_moe.gate",
    "granite-moe": "block_sparse_moe.router.layer", "granite4-moe": "block_sparse_moe.router.layer", "gpt-oss": "mlp.router",
    "gemma4-moe": "router.proj",
}  # fmt: skip


def check_experts(source: Path, output: Path, kind: str) -> None:
    """Compare every expert's matrix, read from the output alone, with the source's."""
    pattern, names = PLACES[kind]
    folder, expected = QuantizedFolder(output), dict[str, str]()
    for place, exact in expert_matrices(source):
        layer, expert, part = place.split(".")
        module = expected[place] = pattern.format(layer, expert, names[part])
        rounded, scale = folder.matrix(module)
        assert rounded.shape == exact.shape, module
        assert excess(exact, rounded, scale, grid_of(folder.packing, folder.bits(module))) < 0.02, module
    assert {name for name in folder.rounded() if ".experts." in name} == set(expected.values())
    assert len(expected) == len(set(expected.values())) > 0
    stacks = [name for name, tensor in folder.tensors.items() if tensor.dim() == 3 and "conv" not in name]
    assert all(name.startswith("mtp.") for name in stacks)


@pytest.mark.parametrize("level", ["int4", "int8", "fp8", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("kind", sorted(PLACES))
def test_each_expert_is_the_nearest_on_its_grid_under_the_name_that_vllm_reads(
    quantize: Quantize, tmp_path: Path, kind: str, level: str
) -> None:
    source = save_model(kind, tmp_path / "source")
    output, ctx = quantize(source, format="pytorch", level=level, check=level == "int4" and kind not in FOR_VLLM)
    check_experts(source, output, kind)
    if level == "int4":
        assert kind in FOR_VLLM or ctx.facts["check"] == "passed"


@pytest.mark.parametrize(("kind", "level"), [("granite-moe", "int4"), ("qwen3-moe", "nvfp4"), ("qwen3-moe", "w8a8")])
def test_a_level_whose_experts_nothing_reads_right_is_refused_unless_nobody_asks(
    quantize: Quantize, tmp_path: Path, kind: str, level: str
) -> None:
    source = save_model(kind, tmp_path / "source")
    with pytest.raises(QuantizationError, match="so nothing could be compared") as caught:
        quantize(source, format="pytorch", level=level)
    assert caught.value.reason == "QUANTIZATION_UNSUPPORTED"
    assert "check=false" in caught.value.remedy


@pytest.mark.parametrize("kind", ["qwen3.5-moe", "lfm2-moe"])
def test_experts_that_are_stored_as_stacks_are_cut_apart(quantize: Quantize, tmp_path: Path, kind: str) -> None:
    """Checkpoints of Qwen3.5 on the hub have stacks, and models that transformers saved under its own names."""
    source = save_model(kind, tmp_path / "source", fused=True)
    output, ctx = quantize(source, format="pytorch", level="int4")
    assert ctx.facts["check"] == "passed"
    check_experts(source, output, kind)


def test_an_expert_that_is_stored_twice_is_refused(quantize: Quantize, tmp_path: Path) -> None:
    source, name = save_model("qwen3.5-moe", tmp_path / "source", fused=True), "mlp.experts.0.gate_proj.weight"
    tensors = load_file(source / "model.safetensors") | {f"model.layers.0.{name}": torch.ones(32, 64).bfloat16()}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(QuantizationError, match="is stored by itself and in the stack") as caught:
        quantize(source, format="pytorch", level="int4")
    assert caught.value.reason == "QUANTIZATION_UNSUPPORTED"


@pytest.mark.parametrize("kind", sorted(set(PLACES) - set(FOR_VLLM)))
def test_transformers_computes_with_the_same_weights(quantize: Quantize, tmp_path: Path, kind: str) -> None:
    source = save_model(kind, tmp_path / "source")
    output, _ = quantize(source, format="pytorch", level="int4", check=False)
    folder, model = QuantizedFolder(output), load(source)
    names = {
        PLACES[kind][0].format(*place.split(".")[:2], PLACES[kind][1][place.split(".")[2]]): place
        for place, _ in expert_matrices(source)
    }
    rounded = {names[module]: folder.matrix(module)[0].bfloat16() for module in names}
    with torch.no_grad():
        for module in folder.rounded() - set(names):
            model.get_submodule(module).weight.copy_(folder.matrix(module)[0])
        for path, module in model.named_modules():
            if "gate_up_proj" in dict(module.named_parameters(recurse=False)):
                layer = path.split("layers.")[1].split(".")[0]
                for expert in range(len(module.gate_up_proj)):
                    both = torch.cat([rounded[f"{layer}.{expert}.gate"], rounded[f"{layer}.{expert}.up"]])
                    down = rounded[f"{layer}.{expert}.down"]
                    turned = kind == "llama4"
                    module.gate_up_proj[expert] = both.T if turned else both
                    module.down_proj[expert] = down.T if turned else down
    found, exact = logits(load(output)), logits(load(source))
    assert (found - logits(model)).abs().max() < 0.02 * exact.std()
    assert (found - exact).abs().max() > 0.02 * exact.std()


@pytest.mark.parametrize("level", ["int8", "fp8", "mxfp4"])
@pytest.mark.parametrize("kind", ["qwen3-next", "mixtral"])
def test_transformers_stacks_the_experts_that_the_folder_has(
    quantize: Quantize, tmp_path: Path, kind: str, level: str
) -> None:
    source = save_model(kind, tmp_path / "source")
    output, ctx = quantize(source, format="pytorch", level=level)
    assert ctx.facts["check"] == "passed"
    folder, (pattern, names) = QuantizedFolder(output), PLACES[kind]
    for layer, block in enumerate(load(output).model.layers):
        for expert in range(4):
            gate, up, down = (
                folder.matrix(pattern.format(layer, expert, name))[0].bfloat16() for name in names.values()
            )
            assert torch.equal(block.mlp.experts.gate_up_proj[expert], torch.cat([gate, up]))
            assert torch.equal(block.mlp.experts.down_proj[expert], down)


@pytest.mark.parametrize("kind", sorted(ROUTERS))
def test_routers_keep_their_type_and_are_named_in_ignore(quantize: Quantize, tmp_path: Path, kind: str) -> None:
    source = save_model(kind, tmp_path / "source")
    output, _ = quantize(source, format="pytorch", level="int4", check=False)
    before, after = load_file(source / "model.safetensors"), load_file(output / "model.safetensors")
    ends = (f".{ROUTERS[kind]}.weight", ".shared_expert_gate.weight")
    routers = [name for name in before if name.endswith(ends) and "mtp" not in name]
    assert routers
    assert all(torch.equal(before[name], after[name]) for name in routers)
    packing = json.loads((output / "config.json").read_text())["quantization_config"]
    assert {name.removesuffix(".weight") for name in routers} <= set(packing["ignore"])
    kept = json.loads((output / "quantization.json").read_text())["tensors"]["kept"]
    assert all("experts of each token" in kept[name] or "shared expert" in kept[name] for name in routers)


def test_what_predicts_further_tokens_keeps_its_type_and_is_named_in_ignore(quantize: Quantize, tmp_path: Path) -> None:
    for kind, name in (("deepseek-v3", "model.layers.3.mlp.experts.0.gate_proj"), ("qwen3.5-moe", "mtp.fc")):
        source = save_model(kind, tmp_path / kind)
        output, ctx = quantize(source, format="pytorch", level="int4")
        assert ctx.facts["check"] == "passed"
        assert f"{name}.weight" in load_file(output / "model.safetensors")
        assert name in json.loads((output / "config.json").read_text())["quantization_config"]["ignore"]


def test_experts_that_predict_further_tokens_stay_beside_stacks(quantize: Quantize, tmp_path: Path) -> None:
    """Their layers have numbers of their own, which are those of other layers."""
    source = save_model("qwen3.5-moe", tmp_path / "source", fused=True)
    tensors = load_file(source / "model.safetensors")
    single, stack = "mtp.layers.0.mlp.experts.0.gate_proj.weight", "mtp.layers.0.mlp.experts.down_proj"
    tensors |= {single: torch.ones(32, 64).bfloat16(), stack: torch.ones(4, 64, 32).bfloat16()}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    output, ctx = quantize(source, format="pytorch", level="int4")
    assert ctx.facts["check"] == "passed"
    after = load_file(output / "model.safetensors")
    assert all(torch.equal(after[name], tensors[name]) for name in (single, stack))
    packing = json.loads((output / "config.json").read_text())["quantization_config"]
    assert {"mtp.layers.0.mlp.experts.0.gate_proj", r"re:mtp\.layers\.0\.mlp\.experts(\..*)?$"} <= set(
        packing["ignore"]
    )


def test_layers_that_vllm_joins_have_the_same_bits(quantize: Quantize, tmp_path: Path) -> None:
    for kind, joined in (("qwen3.5", ("in_proj_qkv", "in_proj_z")), ("lfm2", ("w1", "w3"))):
        output, _ = quantize(save_model(kind, tmp_path / kind), format="pytorch", level="int4", wide_share=0.4)
        bits = json.loads((output / "quantization.json").read_text())["tensors"]["bits"]
        assert set(bits.values()) == {4, 8}
        for name, width in bits.items():
            if name.endswith(f"{joined[0]}.weight"):
                assert bits[name.replace(*joined)] == width


def test_experts_have_the_level_s_bits_where_other_layers_have_more(quantize: Quantize, tmp_path: Path) -> None:
    """vLLM has one scheme for the experts of a layer; transformers takes the scheme that names experts."""
    source = save_model("qwen3-moe", tmp_path / "source")
    output, ctx = quantize(source, format="pytorch", level="int4", wide_share=0.3)
    assert ctx.facts["check"] == "passed"
    check_experts(source, output, "qwen3-moe")
    groups = json.loads((output / "config.json").read_text())["quantization_config"]["config_groups"].values()
    assert {group["weights"]["num_bits"] for group in groups} == {4, 8}
    narrow = next(group for group in groups if group["weights"]["num_bits"] == 4)
    assert narrow["targets"] == ["Linear", r"re:.*\.experts\.\d+\..*"]
    down = QuantizedFolder(output).matrix("model.layers.1.mlp.experts.2.down_proj")[0]
    assert torch.equal(load(output).model.layers[1].mlp.experts.down_proj[2], down.bfloat16())


@pytest.mark.parametrize("changes", [{"group_size": 64}, {"keep": ("experts.1.down_proj",)}, {"keep": ("experts",)}])
def test_experts_of_which_some_would_keep_their_type_are_refused(
    quantize: Quantize, tmp_path: Path, changes: dict[str, object]
) -> None:
    source = save_model("qwen3-moe", tmp_path / "source")
    with pytest.raises(QuantizationError, match="experts") as caught:
        quantize(source, format="pytorch", level="int4", **changes)
    assert caught.value.reason == "QUANTIZATION_UNSUPPORTED"


def test_a_mixture_s_dense_weights_lie_on_the_grid(quantize: Quantize, tmp_path: Path) -> None:
    source = save_model("qwen3-moe", tmp_path / "source")
    output, ctx = quantize(source, format="pytorch", level="int8", packed=False)
    assert ctx.facts["check"] == "passed"
    packed, _ = quantize(source, format="pytorch", level="int8")
    assert torch.equal(logits(load(output)), logits(load(packed)))


def test_gpt_oss_is_written_in_mxfp4_as_openai_does(quantize: Quantize, tmp_path: Path) -> None:
    source = save_model("gpt-oss", tmp_path / "source")
    output, ctx = quantize(source, format="pytorch", level="mxfp4")
    assert ctx.facts["check"] == "passed"
    before, after = load_file(source / "model.safetensors"), load_file(output / "model.safetensors")
    grid = unpack_floats(torch.arange(16, dtype=torch.uint8)[:, None]).unique()
    model = load(output)
    for layer in range(2):
        for name in ("gate_up_proj", "down_proj"):
            place = f"model.layers.{layer}.mlp.experts.{name}"
            values, factors = unpack_floats(after[f"{place}_blocks"]), after[f"{place}_scales"].float()
            scale = torch.exp2(factors - 127)[..., None].expand(values.shape)
            exact = (
                before[place].float().transpose(1, 2)
            )  # (E, N, K): columns of gates and what they multiply alternate
            assert excess(exact, (values * scale).flatten(-2), scale.flatten(-2), grid) < 0.02
            assert torch.equal(model.get_parameter(place).float(), (values * scale).flatten(-2).transpose(1, 2))
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items() if not name.endswith("_proj"))
    assert not torch.equal(logits(model), logits(load(source)))


@pytest.mark.parametrize("shape", [(64,), (4, 64), (4, 48, 64)])
def test_a_stack_of_gpt_oss_of_another_shape_is_refused_by_name(
    quantize: Quantize, tmp_path: Path, shape: tuple[int, ...]
) -> None:
    source, name = save_model("gpt-oss", tmp_path / "source"), "model.layers.0.mlp.experts.down_proj"
    tensors = load_file(source / "model.safetensors") | {name: torch.zeros(shape).bfloat16()}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(QuantizationError, match=name) as caught:
        quantize(source, format="pytorch", level="mxfp4")
    assert caught.value.reason == "QUANTIZATION_UNSUPPORTED"


def test_experts_behind_an_exclamation_mark_are_not_kept(quantize: Quantize, tmp_path: Path) -> None:
    source = save_model("qwen3.5-moe", tmp_path / "source", fused=True)
    output, _ = quantize(source, format="pytorch", level="int4", keep=("!mlp.experts",), check=False)
    check_experts(source, output, "qwen3.5-moe")


def test_gpt_oss_keeps_its_experts_where_keep_names_them(quantize: Quantize, tmp_path: Path) -> None:
    source = save_model("gpt-oss", tmp_path / "source")
    output, ctx = quantize(source, format="pytorch", level="int4", keep=("experts",))
    assert ctx.facts["check"] == "passed"
    assert not any("keep names" in warning for warning in ctx.facts.get("warnings", []))
    assert (
        r"re:.*\.experts(\..*)?$" in json.loads((output / "config.json").read_text())["quantization_config"]["ignore"]
    )


@pytest.mark.parametrize(
    ("kind", "level", "keep", "why"),
    [
        ("gpt-oss", "int4", (), "interleaved"),
        ("gpt-oss", "int4", ("experts",), ""),
        ("gpt-oss", "mxfp4", (), ""),
        ("granite4-moe", "int4", (), "as stacks alone"),
        ("granite4", "int4", (), ""),
        ("qwen3.5-moe", "nvfp4", (), "second scale"),
        ("qwen3.5-moe", "w8a8", (), "scale per output feature"),
        ("qwen3.5-moe", "fp8_static", (), "fixed range"),
        ("qwen3.5-moe", "int4", (), ""),
        ("gemma4-moe", "nvfp4", (), ""),
    ],
)
def test_what_no_loader_reads_is_refused_before_anything_runs(
    tmp_path: Path, kind: str, level: str, keep: tuple[str, ...], why: str
) -> None:
    config = ModelConfig.read(save_model(kind, tmp_path / "source"))
    found = refusal_reason(QuantizeParams(format="pytorch", level=level, keep=keep), config)
    assert (why in found) if why else not found
