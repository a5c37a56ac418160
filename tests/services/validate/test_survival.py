"""What stored weights hold of the adapter, module by module: each planted fault is named, and what is not understood is not run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from safetensors.torch import load_file, save_file

from slipway.model.folder import ModelFolder
from slipway.model.limits import MOST_EXPERTS
from slipway.model.safetensors_file import read_weights
from slipway.proof.stored_weights import Names, NotUnderstoodError
from slipway.registry import load_stage
from slipway.stage import Context
from slipway.validation.findings import OutputStatus
from slipway.validation.survival import AdapterSurvival, ModuleSurvival
from slipway_validate.judging import survival
from slipway_validate.judging.distances import LIMITS, level_of
from slipway_validate.judging.evaluate import Evaluator
from slipway_validate.runner.survival.adapted import _build_without_values
from slipway_validate.runner.survival.checkpoints import Checkpoint
from slipway_validate.runner.survival.graphs import Graphs
from support.models.merge_forms import FORMS, save_form
from support.models.stored_survival import said, survival_of
from support.models.validated_here import Validated
from support.models.validation_models import Models, make_base

ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
Change = Callable[[Any], None]


def weights_of(layer: Any) -> list[Any]:
    parts = [*(getattr(layer.self_attn, name) for name in ATTENTION), *(getattr(layer.mlp, name) for name in MLP)]
    return [part.weight for part in parts]


def lose_layer(module: Any) -> None:
    """Give one layer the base's weights again."""
    for weight, plain in zip(weights_of(module.model.layers[1]), weights_of(make_base().model.layers[1]), strict=True):
        weight.copy_(plain)


def swap_attention(module: Any) -> None:
    swap(*(weights_of(layer)[:4] for layer in module.model.layers))


def swap_layers(module: Any) -> None:
    """Leave no adapted module in its place."""
    swap(*map(weights_of, module.model.layers))


def swap(first: list[Any], second: list[Any]) -> None:
    for one, other in zip(first, second, strict=True):
        kept = one.clone()
        one.copy_(other)
        other.copy_(kept)


def swap_updates(module: Any) -> None:
    """Merge the updates of two layers' attention into each other's weights."""
    base = make_base().model.layers
    changed = [weights_of(layer)[:4] for layer in module.model.layers]
    plain = [weights_of(layer)[:4] for layer in base]
    for one, other, own, others in zip(*changed, *plain, strict=True):
        updates = one - own, other - others
        one.copy_(own + updates[1])
        other.copy_(others + updates[0])


def plant_nan(module: Any) -> None:
    module.model.layers[1].mlp.down_proj.weight[3, 5] = float("nan")


FAULTS: Mapping[str, Change] = {
    "lost-layer": lose_layer,
    "swapped": swap_attention,
    "all-swapped": swap_layers,
    "updates": swap_updates,
    "nan-weight": plant_nan,
}


def quantized(source: Path, level: str, kind: str = "pytorch") -> Path:
    """Quantize with the real stage, into a folder beside the source."""
    stage = load_stage("quantize")
    work = source.with_name(f"{source.name}-{level}-work")
    work.mkdir()
    params = stage.params.model_validate({"format": kind, "level": level, "group_size": 16, "check": False})
    return stage.run({"model": source}, params, Context(workdir=work))["model"]


def named_graph(tiny: Models, folder: Path) -> Path:
    """Write the merged model's linear weights as constants of products, by the names that onnx_export gives; q, k and v joined."""
    folder.mkdir()
    nodes, constants = [], []
    state = {name: value.numpy() for name, value in tiny.merged_module.state_dict().items() if "proj" in name}
    for layer in range(2):
        path = f"model.layers.{layer}.self_attn"
        joined = [state.pop(f"{path}.{name}.weight") for name in ATTENTION[:3]]
        state[f"{path}.{'+'.join(ATTENTION[:3])}.weight"] = np.concatenate(joined)
    for name, value in state.items():
        constants.append(numpy_helper.from_array(np.ascontiguousarray(value.T), f"{name}.T"))
        nodes.append(helper.make_node("MatMul", [f"x{value.shape[1]}", f"{name}.T"], [f"{name}.y"]))
    widths = sorted({value.shape[1] for value in state.values()})
    inputs = [helper.make_tensor_value_info(f"x{width}", TensorProto.FLOAT, ["rows", width]) for width in widths]
    outputs = [helper.make_tensor_value_info(node.output[0], TensorProto.FLOAT, None) for node in nodes]
    graph = helper.make_graph(nodes, "tiny", inputs, outputs, constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]), folder / "model.onnx")
    (folder / "config.json").write_bytes((tiny.merged / "config.json").read_bytes())
    return folder


@pytest.fixture(scope="module")
def found(tiny: Models) -> dict[str, AdapterSurvival]:
    outputs = {name: tiny.variant(f"survival-{name}", change) for name, change in FAULTS.items()}
    graph = named_graph(tiny, tiny.root / "survival-graph")
    outputs |= {
        "merged": tiny.merged,
        "none": tiny.without_adapter("survival-none"),
        "int4": quantized(tiny.merged, "int4"),
        "int8": quantized(tiny.merged, "int8"),
        "lost-int4": quantized(outputs["lost-layer"], "int4"),
        "graph": graph,
        "graph-int4": quantized(graph, "int4", "onnx"),
        "engine": Path(
            shutil.copytree(tiny.base, tiny.root / "survival-engine", ignore=shutil.ignore_patterns("*.safetensors"))
        ),
    }
    return survival_of(tiny.base, tiny.adapter, outputs)


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """Change the stored tensors of a copy of a folder."""
    copy = Path(shutil.copytree(folder, folder.with_name(f"{folder.name}-{change.__name__}")))
    (path,) = copy.glob("*.safetensors")
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    return copy


def flat_integers(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors.update({name: torch.zeros(64, dtype=torch.int8), f"{name}_scale": torch.ones(4, 0)})


def no_groups(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors.update({name: torch.zeros(4, 64, dtype=torch.int8), f"{name}_scale": torch.ones(4, 0)})


def shape_of_three(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.self_attn.q_proj.weight_shape"] = torch.ones(3, dtype=torch.int64)


def cut_graph(folder: Path) -> Path:
    copy = Path(shutil.copytree(folder, folder.with_name(f"{folder.name}-cut")))
    graph = onnx.load(copy / "model.onnx")
    onnx.save(graph, copy / "model.onnx", save_as_external_data=True, location="data", size_threshold=0)
    os.truncate(copy / "data", 4096)
    return copy


def test_weights_in_an_odd_form_leave_the_other_outputs_as_they_are(tiny: Models) -> None:
    int4 = quantized(tiny.variant("survival-odd", lambda _: None), "int4")
    odd = {
        "flat": edit(tiny.merged, flat_integers),
        "groups": edit(tiny.merged, no_groups),
        "three": edit(int4, shape_of_three),
        "cut": cut_graph(named_graph(tiny, tiny.root / "survival-odd-graph")),
    }
    found = survival_of(tiny.base, tiny.adapter, {**odd, "merged": tiny.merged})
    assert said(found["merged"]) == ""
    assert len(found["merged"].modules) == 14
    for name in ("flat", "groups", "three"):
        assert len(found[name].modules) == 13, name
        assert "model.layers.0.self_attn.q_proj" in found[name].left_out
    assert found["cut"].not_run


def test_infinity_counts_in_weights_and_not_in_the_masks_of_a_graph(tmp_path: Path) -> None:
    """GLM-4's graph has a constant that takes experts out of the choice."""
    infinite, nan = np.float32("-inf"), np.float32("nan")
    constants = {
        "mask_of_experts": np.array(infinite),
        "mask_of_tokens": np.array([[0, infinite], [0, 0]], np.float32),
        "joined": np.array([[1, 2], [infinite, 4]], np.float32),
        "half_a_mask": np.array([0, infinite, nan], np.float32),
        "model.layers.0.norm.weight": np.array([infinite, infinite], np.float32),
        "model.layers.0.q_proj.bias": np.array([0, infinite], np.float32),
    }
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    onnx.save(helper.make_model(graph), tmp_path / "model.onnx")
    assert Graphs(tmp_path, lambda _: 0).non_finite() == {
        "joined": 1,
        "half_a_mask": 2,
        "model.layers.0.norm.weight": 2,
        "model.layers.0.q_proj.bias": 1,
    }


def test_more_matrices_than_any_mixture_has_are_not_listed(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(MOST_EXPERTS + 1, 2, 2, dtype=torch.float16)}, tmp_path / "model.safetensors")
    with pytest.raises(NotUnderstoodError, match=f"hold {MOST_EXPERTS + 1} matrices"):
        Checkpoint(read_weights(tmp_path))


def test_a_base_has_values_only_where_the_adapter_brings_them(tmp_path: Path) -> None:
    for form, expected in (("loha", []), ("modules_to_save", ["lm_head.weight"])):
        case, _ = save_form(tmp_path / form, FORMS[form], torch.float32)
        model = _build_without_values(ModelFolder.open(case.base), case.adapter)
        stored = {name: each.untyped_storage().nbytes() for name, each in model.named_parameters() if each.numel() > 1}
        assert [name for name, size in stored.items() if size > 4] == expected


class TestWhatIsRight:
    @pytest.mark.parametrize(
        ("name", "level"),
        [("merged", "float32"), ("graph", "float32"), ("int8", "int8"), ("int4", "int4"), ("graph-int4", "int4")],
    )
    def test_every_module_holds_its_update(self, found: dict[str, AdapterSurvival], name: str, level: str) -> None:
        output = found[name]
        assert len(output.modules) == 14, output.not_run
        assert not output.left_out
        assert {each.layer for each in output.modules} == {0, 1}
        assert said(output, level) == ""
        assert all(check.passed for check in survival.checks(output, LIMITS[level]))
        assert all(abs((each.strength or 0) - 1) < 0.1 for each in output.modules)

    def test_rounding_shows_in_the_cosine_and_not_in_the_strength(self, found: dict[str, AdapterSurvival]) -> None:
        for exact, coarse in zip(found["merged"].modules, found["int4"].modules, strict=True):
            assert exact.module == coarse.module
            assert exact.cosine == pytest.approx(1, abs=1e-4)
            assert 0.8 < (coarse.cosine or 0) < 0.999
            assert (coarse.noise or 0) > (exact.noise or 0)

    def test_codes_are_compared_on_the_output_s_own_grid(self, found: dict[str, AdapterSurvival]) -> None:
        assert all(each.changed == 0 for each in found["none"].modules)
        changed = [each.changed or 0 for each in found["int4"].modules]
        assert all(0.05 < share < 1 for share in changed)
        lost = [each.changed for each in found["lost-int4"].modules if each.layer == 1]
        assert lost == [0] * 7, "the base's own codes"

    def test_graph_and_folder_have_the_same_codes(self, found: dict[str, AdapterSurvival]) -> None:
        for one, other in zip(found["int4"].modules, found["graph-int4"].modules, strict=True):
            assert one.strength == pytest.approx(other.strength, abs=1e-3)


class TestPlantedFaults:
    @pytest.mark.parametrize(("name", "level"), [("lost-layer", "float32"), ("lost-int4", "int4")])
    def test_a_lost_layer(self, found: dict[str, AdapterSurvival], name: str, level: str) -> None:
        assert said(found[name], level) == "layer 1 has lost the adapter in 7 modules"

    def test_swapped_layers(self, found: dict[str, AdapterSurvival]) -> None:
        judged = survival.add_faults(found["swapped"], LIMITS["float32"])
        other = {each.module: each.weight_of for each in judged.faulty}
        assert other == {
            f"model.layers.{layer}.self_attn.{name}": f"model.layers.{1 - layer}.self_attn.{name}"
            for layer in (0, 1)
            for name in ATTENTION
        }
        assert "holds the weight of model.layers." in said(found["swapped"])

    def test_layers_of_which_none_is_in_its_place(self, found: dict[str, AdapterSurvival]) -> None:
        other = {each.module: each.weight_of for each in found["all-swapped"].modules}
        assert len(other) == 14
        assert all(
            name.replace(".0.", "#").replace(".1.", ".0.").replace("#", ".1.") == of for name, of in other.items()
        )
        assert "holds the weight of model.layers." in said(found["all-swapped"])

    def test_swapped_updates(self, found: dict[str, AdapterSurvival]) -> None:
        other = {each.module: each.update_of for each in found["updates"].modules if each.update_of}
        assert other["model.layers.0.self_attn.o_proj"] == "model.layers.1.self_attn.o_proj"
        assert len(other) == 8

    def test_a_merge_that_did_nothing(self, found: dict[str, AdapterSurvival]) -> None:
        assert said(found["none"]) == "none of 14 adapted modules holds the adapter"

    def test_nan(self, found: dict[str, AdapterSurvival]) -> None:
        assert found["nan-weight"].non_finite == {"model.layers.1.mlp.down_proj.weight": 1}
        assert "model.layers.1.mlp.down_proj.weight has 1 NaN" in said(found["nan-weight"])
        failed = [check.name for check in survival.checks(found["nan-weight"], LIMITS["float32"]) if not check.passed]
        assert failed == ["non_finite_weights"]


class TestWhatIsNotUnderstood:
    def test_a_folder_without_known_weights(self, found: dict[str, AdapterSurvival]) -> None:
        assert "neither in safetensors nor in an ONNX graph" in found["engine"].not_run
        assert survival.checks(found["engine"], LIMITS["float32"]) == []
        assert "was not compared" in survival.notes(found["engine"], LIMITS["float32"])[0]

    def test_an_adapter_that_began_with_a_part_of_the_base(self, tiny: Models, tmp_path: Path) -> None:
        adapter = Path(shutil.copytree(tiny.adapter, tmp_path / "pissa"))
        config = adapter / "adapter_config.json"
        config.write_text(config.read_text().replace('"init_lora_weights": false', '"init_lora_weights": "pissa"'))
        result = survival_of(tiny.base, adapter, {"merged": tiny.merged})
        assert "init_lora_weights is pissa" in result["merged"].not_run

    def test_a_damaged_output(self, tiny: Models, tmp_path: Path) -> None:
        broken = Path(shutil.copytree(tiny.merged, tmp_path / "broken"))
        weights = broken / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
        result = survival_of(tiny.base, tiny.adapter, {"broken": broken})
        assert "truncated" in result["broken"].not_run

    def test_names_with_and_without_a_prefix(self) -> None:
        names = Names(frozenset({"encoder.layers.0.fc.weight", "decoder.layers.0.fc.weight", "head.weight"}))
        assert names.find("model.encoder.layers.0.fc.weight") == "encoder.layers.0.fc.weight"
        assert names.find("layers.0.fc.weight") is None, "encoder or decoder"
        assert names.find("model.head.weight") == "head.weight"
        assert names.find("encoder.layers.1.fc.weight") is None


@pytest.mark.slow
def test_graphs_of_the_real_export_hold_the_adapter_at_every_level(tiny: Models, tmp_path: Path) -> None:
    stage = load_stage("onnx_export")
    params = stage.params.model_validate({"parity": "never"})
    graph = stage.run({"pytorch": tiny.merged}, params, Context(workdir=tmp_path))["onnx"]
    levels = {"fp16": "float16", "int8": "int8", "int4": "int4"}
    outputs = {"onnx": graph, **{level: quantized(graph, level, "onnx") for level in levels}}
    found = survival_of(tiny.base, tiny.adapter, outputs)
    for name, output in found.items():
        assert len(output.modules) == 14, output.not_run
        assert said(output, levels.get(name, "float32")) == ""


def test_a_verdict_names_each_planted_fault(tiny: Models, tmp_path: Path) -> None:
    outputs = {f"pytorch-{name}": tiny.variant(f"verdict-{name}", change) for name, change in FAULTS.items()}
    outputs["pytorch-none"] = tiny.without_adapter("verdict-none")
    run = Validated(tiny.base, tiny.adapter, tmp_path, merged=tiny.merged, params={"test_samples": 3})
    held = survival_of(tiny.base, tiny.adapter, {"pytorch": tiny.merged, **outputs})
    run.evaluator = Evaluator(run.reference, run.prepared.family, LIMITS, decode=lambda _: "", survival=lambda: held)
    right = run.output("pytorch", tiny.merged)
    assert right.status is OutputStatus.PASSED
    assert right.survival is not None
    assert not right.survival.faulty
    found = {name: run.output(name, folder) for name, folder in outputs.items()}
    assert {output.status for output in found.values()} == {OutputStatus.FAILED}
    explained = {name: output.explanation for name, output in found.items()}
    assert "layer 1 has lost the adapter" in explained["pytorch-lost-layer"]
    assert "holds the weight of model.layers." in explained["pytorch-swapped"]
    assert "holds the weight of model.layers." in explained["pytorch-all-swapped"]
    assert "scale" not in explained["pytorch-all-swapped"]
    assert "holds the update of model.layers." in explained["pytorch-updates"]
    assert "model.layers.1.mlp.down_proj.weight has 1 NaN" in explained["pytorch-nan-weight"], (
        "the weight is named, not where it shows"
    )
    assert "none of 14 adapted modules holds the adapter" in explained["pytorch-none"]
    assert torch.get_num_threads() == 1


def test_another_base_of_the_same_shapes_is_named_as_such() -> None:
    """All modules hold weights that are far from base and update: that is one fault, of the base, and not one of each module."""
    far = [
        ModuleSurvival(module=f"layers.{number}.q_proj", layer=number, strength=1.0, noise=0.001, weight_error=0.4)
        for number in range(4)
    ]
    limits = LIMITS[level_of("bfloat16")]
    every = survival.add_faults(AdapterSurvival(modules=tuple(far)), limits)
    said, remedy = survival.explain(every)
    assert (
        "made of another base of the same shapes, or rounded more coarsely than its type: 4 of 4 adapted modules"
        in said
    )
    assert "merge again onto this base" in remedy
    one = survival.add_faults(
        AdapterSurvival(modules=(far[0], *(each.model_copy(update={"weight_error": 1e-4}) for each in far[1:]))),
        limits,
    )
    assert "another base" not in survival.explain(one)[0]
    assert "layers.0.q_proj holds a weight that is 0.4 of its size away" in survival.explain(one)[0]
