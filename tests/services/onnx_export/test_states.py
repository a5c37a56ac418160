"""Decoders whose layers keep states: gated delta rule, Mamba 2 and short convolutions, alternating with attention or beside it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from slipway.errors import ModelExportError
from slipway.model.configuration import ModelConfig
from slipway.stage import Context
from slipway_coordinator.lifecycle.recovery import recover
from slipway_coordinator.lifecycle.rules import Profile
from slipway_onnx_export.forms.cache import Kept, cache_of
from slipway_onnx_export.params import OnnxExportParams
from slipway_onnx_export.parity.check import check_parity
from slipway_onnx_export.source import open_source
from slipway_onnx_export.stage import STAGE
from slipway_openvino.params import refusal_reason as why_no_ir
from slipway_quantize.params import QuantizeParams
from slipway_quantize.stage import STAGE as QUANTIZE
from slipway_tensorrt_build.stage import refusal_reason as why_no_engine
from support.commands.transformers_js import run_pipeline
from support.models.current_kinds import KINDS, make_kind
from support.models.genai_runs import genai_continuations
from support.models.onnx_calls import assert_same
from support.models.onnx_models import Exported

Export = Callable[..., Exported]
Base = Callable[[str], Path]

LIMIT = 1e-4
ATTENTION, RECURRENT, CONVOLUTION = {"key", "value"}, {"conv_state", "recurrent_state"}, {"conv_state"}
KEPT: dict[str, dict[int, set[str]]] = {
    "lfm2": {0: CONVOLUTION, 1: ATTENTION, 2: CONVOLUTION},
    "qwen3.5": {0: RECURRENT, 1: RECURRENT, 2: RECURRENT, 3: ATTENTION},
    "qwen3.5-moe": {0: RECURRENT, 1: RECURRENT, 2: RECURRENT, 3: ATTENTION},
    "qwen3-next": {0: RECURRENT, 1: RECURRENT, 2: RECURRENT, 3: ATTENTION},
    "granite4": {0: RECURRENT, 1: ATTENTION, 2: RECURRENT},
    "granite4-moe": {0: RECURRENT, 1: ATTENTION, 2: RECURRENT},
    "falcon-h1": {0: ATTENTION | RECURRENT, 1: ATTENTION | RECURRENT},
    "nemotron-h": {0: RECURRENT, 1: ATTENTION},
    "nemotron-h-moe": {0: RECURRENT, 1: ATTENTION},
    "bamba": {0: RECURRENT, 1: ATTENTION},
    "lfm2-moe": {0: CONVOLUTION, 1: ATTENTION, 2: CONVOLUTION},
    "mamba2": {0: RECURRENT, 1: RECURRENT},
}
"""What each layer of a kind keeps."""
QUICK = ("granite4",)


def kinds(*names: str) -> list[Any]:
    """Return parameters of a test: all but two quick kinds are slow."""
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in names]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    """The base of a kind; treat it as read-only."""
    root = tmp_path_factory.mktemp("kinds")

    def folder(name: str) -> Path:
        if not (root / name).is_dir():
            make_kind(name, root / name)
        return root / name / "base"

    return folder


@pytest.fixture(scope="module")
def exported(base: Base, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Exported]:
    """The graph of a kind, made once; treat it as read-only."""
    made: dict[str, Exported] = {}

    def export(name: str) -> Exported:
        if name not in made:
            context = Context(workdir=tmp_path_factory.mktemp(name.replace(".", "-")))
            params = OnnxExportParams(packaging=("genai", "transformers_js", "optimum"))
            made[name] = Exported(STAGE.run({"pytorch": base(name)}, params, context)["onnx"], context.facts)
        return made[name]

    return export


@pytest.mark.parametrize("name", kinds(*KEPT))
def test_any_calls_of_padded_rows_give_what_each_row_alone_gives(
    name: str, base: Base, exported: Callable[[str], Exported]
) -> None:
    source, made = base(name), exported(name)
    assert made.facts["parity"] == "passed"
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    assert_same(made.folder, model)


@pytest.mark.parametrize("name", kinds(*KEPT))
def test_each_layer_has_inputs_and_outputs_for_what_it_keeps(name: str, exported: Callable[[str], Exported]) -> None:
    graph = ir.load(exported(name).folder / "model.onnx").graph
    for values, prefix in ((graph.inputs, "past_key_values."), (graph.outputs, "present.")):
        kept: dict[int, set[str]] = {}
        for value in values:
            if str(value.name).startswith(prefix):
                layer, kind = str(value.name).removeprefix(prefix).split(".")
                kept.setdefault(int(layer), set()).add(kind)
                varying = [axis for axis in value.shape or () if not isinstance(axis, int)]
                assert len(varying) == (2 if kind in ATTENTION else 1), value.name
        assert kept == KEPT[name]
    operators = {node.op_type for node in graph}
    assert ("LinearAttention" in operators) is any("recurrent_state" in kinds for kinds in KEPT[name].values())
    assert not operators & {"Loop", "Scan", "If"}


@pytest.mark.parametrize("states", [(), (Kept(0, "conv_state", (8, 3)),)])
def test_layers_that_keep_nothing_do_not_hide_the_past(states: tuple[Kept, ...]) -> None:
    """Nemotron-H has networks and experts before its first layer with attention."""
    layout = (*states, Kept(2, "key", (2, 4)), Kept(2, "value", (2, 4)))
    cache = cache_of(layout, [*(torch.zeros(1, 8, 3) for _ in states), *[torch.zeros(1, 2, 5, 4)] * 2], layers=4)
    assert cache.get_seq_length() == 5
    assert cache.get_mask_sizes(3, layer_idx=0) == (8, 0)
    keys, _ = cache.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 2)
    assert keys.shape == (1, 2, 8, 4)


@pytest.mark.slow
@pytest.mark.parametrize("types", [["mamba", "mlp", "attention", "moe"], ["mlp", "attention", "mlp", "attention"]])
def test_attention_behind_layers_that_keep_nothing(types: list[str], tmp_path: Path, export: Export) -> None:
    recipe = KINDS["nemotron-h-moe"]
    model = replace(recipe, settings={**recipe.settings, "layers_block_type": types}).build().eval()
    model.save_pretrained(tmp_path / "base")
    exported = export(tmp_path / "base")
    assert exported.facts["parity"] == "passed"
    assert_same(exported.folder, model)


@pytest.mark.parametrize("state", ["conv_state", "recurrent_state"])
def test_a_state_that_is_not_carried_on_is_found(
    state: str, base: Base, exported: Callable[[str], Exported], tmp_path: Path
) -> None:
    folder = exported("granite4").folder
    shutil.copytree(folder, tmp_path / "wrong")
    model = ir.load(folder / "model.onnx")
    graph = model.graph
    given = {str(value.name): value for value in graph.inputs}
    for place, value in enumerate(graph.outputs):
        if str(value.name).endswith(state):
            name = str(value.name)
            value.name = f"{name}.lost"
            same = ir.node("Identity", [given[name.replace("present.", "past_key_values.")]])
            same.outputs[0].name, same.outputs[0].type, same.outputs[0].shape = name, value.type, value.shape
            graph.append(same)
            graph.outputs[place] = same.outputs[0]
    ir.save(model, tmp_path / "wrong" / "model.onnx")
    source = open_source(base("granite4"))
    check_parity(source, folder, tolerance=LIMIT)
    with pytest.raises(ModelExportError, match="decode") as caught:
        check_parity(source, tmp_path / "wrong", tolerance=LIMIT)
    assert caught.value.reason == "EXPORT_PARITY_FAILED"
    assert f"2 states are not carried on, first present.0.{state}" in caught.value.message


@pytest.mark.parametrize(
    ("params", "reason", "said"),
    [
        ({"shapes": "static"}, "SHAPES_UNSUPPORTED", "the unused places of a static cache would change it"),
        ({"runtime": "tensorrt"}, "FAMILY_UNSUPPORTED", "tensorrt does not have it"),
        ({"layered": True}, "EXPORT_ENGINE_UNSUPPORTED", "graphs in layers cannot have them"),
        ({"engine": "mobius"}, "EXPORT_ENGINE_UNSUPPORTED", "engine mobius cannot have them"),
        ({"opset": 17}, "EXPORT_ENGINE_UNSUPPORTED", "engine legacy cannot have them"),
    ],
)
def test_forms_that_would_compute_something_else_are_refused(
    params: dict[str, Any], reason: str, said: str, base: Base, export: Export
) -> None:
    with pytest.raises(ModelExportError, match=said) as caught:
        export(base("granite4"), **params)
    assert caught.value.reason == reason


def test_an_old_opset_is_raised(base: Base, export: Export) -> None:
    with pytest.raises(ModelExportError) as caught:
        export(base("granite4"), opset=14)
    params = OnnxExportParams(opset=14).model_dump(mode="json")
    found = recover(
        caught.value.failure(),
        "onnx_export",
        params=params,
        history=[],
        profile=Profile.BALANCED,
        facts={},
        max_attempts=6,
    )
    assert found is not None
    assert (found.params["engine"], found.params["opset"]) == ("dynamo", 18)


def test_formats_that_are_made_of_a_graph_and_lack_the_operator_say_so(base: Base) -> None:
    config = ModelConfig.read(base("granite4"))
    assert "layers that keep a state" in why_no_ir(config)
    assert "layers that keep a state" in why_no_engine(config)


@pytest.mark.slow
@pytest.mark.parametrize(("level", "most"), [("fp16", 0.01), ("int8", 0.05)])
def test_levels_of_a_graph_with_states_stay_near_it(
    level: str, most: float, base: Base, exported: Callable[[str], Exported], tmp_path: Path
) -> None:
    params = QuantizeParams(format="onnx", level=level, group_size=16)
    context = Context(workdir=tmp_path)
    folder = QUANTIZE.run({"model": exported("granite4").folder}, params, context)["model"]
    assert context.facts["check"].startswith("passed")
    model = AutoModelForCausalLM.from_pretrained(base("granite4"), dtype=torch.float32).eval()
    assert_same(folder, model, limit=most)


@pytest.mark.slow
def test_graphs_without_a_cache_and_with_the_last_logits_compute_the_same(base: Base, export: Export) -> None:
    assert export(base("granite4"), cache=False).facts["parity"] == "passed"
    assert export(base("granite4"), logits_to_keep=1).facts["parity"] == "passed"


def _continuation(source: Path, prompt: list[int], count: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    tokens = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=None)
    found: list[int] = tokens[0, len(prompt) :].tolist()
    return found[: found.index(2)] if 2 in found else found


@pytest.mark.slow
@pytest.mark.parametrize("name", kinds("lfm2", "qwen3.5", "qwen3-next", "granite4", "falcon-h1", "nemotron-h"))
def test_genai_continues_as_transformers_does(name: str, base: Base, exported: Callable[[str], Exported]) -> None:
    prompt = [5, 9, 33, 120, 7, 44]
    found = genai_continuations(exported(name).folder, [prompt], 12)
    assert found == [_continuation(base(name), prompt, 12)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "package", "why"),
    [
        ("granite4", "optimum", "optimum's classes have keys and values in their cache, and no states"),
        ("qwen3.5", "transformers_js", "transformers.js runs models of type qwen3_5_text with their vision part only"),
    ],
)
def test_a_package_that_has_no_such_layers_says_so(
    name: str, package: str, why: str, exported: Callable[[str], Exported]
) -> None:
    assert exported(name).facts["packages"][package] == f"not packaged: {why}"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lfm2", "qwen3-next", "granite4", "falcon-h1", "nemotron-h"])
def test_transformers_js_continues_as_transformers_does(
    name: str, base: Base, exported: Callable[[str], Exported], modules: Path
) -> None:
    source, text = base(name), "the weights of"
    asked = {"max_new_tokens": 10, "do_sample": False}
    [found] = run_pipeline(
        exported(name).folder, modules, task="text-generation", dtype="fp32", text=text, options=asked
    )
    tokenizer = AutoTokenizer.from_pretrained(source)
    prompt = tokenizer(text)["input_ids"]
    continued = prompt + _continuation(source, prompt, 10)
    assert found["generated_text"] == tokenizer.decode(continued, skip_special_tokens=True)
