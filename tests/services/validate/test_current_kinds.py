"""Models of this year: a right merge passes, every adapted matrix is compared, and faults of experts fail by name."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file, save_file

from slipway.stage import Context
from slipway.validation.findings import OutputValidation, ValidationReport
from slipway.validation.survival import AdapterSurvival
from slipway_merge.params import MergeParams
from slipway_merge.stage import STAGE as MERGE
from slipway_prepare.params import PrepareParams
from slipway_prepare.stage import STAGE as PREPARE
from slipway_validate.judging.distances import LIMITS
from slipway_validate.judging.evaluate import Evaluator
from slipway_validate.params import ValidateParams
from slipway_validate.runner.runtime_reference import load
from slipway_validate.stage import STAGE
from support.models.current_kinds import KINDS, Kind, expert_adapter, make_kind, text_adapter
from support.models.saved_adapters import edit
from support.models.stored_survival import survival_of
from support.models.validated_here import PARAMS, Validated

WEIGHTS = "model.safetensors"
FAST = ("gpt-oss-mxfp4", "mamba2", "qwen3-next", "qwen3-vl", "qwen3.5-moe-vision")
Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors, Tensors], None]


def some(names: tuple[str, ...]) -> list[object]:
    """Mark all but the first as slow: they show the same of another kind."""
    return [name if place == 0 else pytest.param(name, marks=pytest.mark.slow) for place, name in enumerate(names)]


def merged(
    name: str, folder: Path, *, dtype: torch.dtype, adapter: Callable[[Kind, Path], Path] | None = None
) -> tuple[Kind, Path]:
    """Make a kind, with another adapter if one is asked for, and merge it."""
    kind = make_kind(name, folder, dtype=dtype)
    if KINDS[name].packed:
        (folder / "prepared").mkdir()
        prepared = PREPARE.run({"base": kind.base}, PrepareParams(), Context(workdir=folder / "prepared"))["base"]
        kind = Kind(name, prepared, kind.adapter)
    if adapter is not None:
        kind = Kind(name, kind.base, adapter(kind, folder / "other"))
    (folder / "merged").mkdir()
    inputs = {"base": kind.base, "adapter": kind.adapter}
    return kind, MERGE.run(inputs, MergeParams(verify="spot"), Context(workdir=folder / "merged"))["pytorch"]


def judge(
    kind: Kind, right: Path, outputs: Mapping[str, Path], work: Path
) -> tuple[dict[str, OutputValidation], dict[str, AdapterSurvival]]:
    """Return the verdicts on outputs, and what their stored weights hold of the adapter."""
    work.mkdir()
    run = Validated(kind.base, kind.adapter, work, merged=right)
    held = survival_of(kind.base, kind.adapter, outputs)
    family = run.prepared.family
    run.evaluator = Evaluator(run.reference, family, LIMITS, decode=lambda _: "", survival=lambda: held)
    return {name: run.output(name, folder) for name, folder in outputs.items()}, held


def check_right(kind: Kind, output: Path, work: Path) -> None:
    """Check that an output passes, and that every pair of factors was compared."""
    verdicts, held = judge(kind, output, {"pytorch": output}, work)
    verdict, found = verdicts["pytorch"], held["pytorch"]
    assert verdict.passed, verdict.failed_checks
    assert not found.left_out
    assert not found.not_run
    factors = load_file(kind.adapter / "adapter_model.safetensors")
    assert len(found.modules) >= sum("lora_" in name for name in factors) / 2


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in sorted(KINDS)]
)
def test_a_right_merge_passes_and_every_matrix_is_compared(tmp_path: Path, name: str) -> None:
    kind, output = merged(name, tmp_path, dtype=torch.bfloat16)
    check_right(kind, output, tmp_path / "work")


@pytest.mark.parametrize("name", some(("qwen3.5-moe-vision", "mistral3", "gemma4-vision", "qwen2.5-vl")))
def test_an_adapter_of_the_text_model_alone_is_compared_on_the_whole_model(tmp_path: Path, name: str) -> None:
    kind, output = merged(name, tmp_path, dtype=torch.bfloat16, adapter=text_adapter)
    check_right(kind, output, tmp_path / "work")


def test_scalings_by_name_in_the_text_model_are_those_of_the_training(tmp_path: Path) -> None:
    kind = make_kind("qwen3.5-moe-vision", tmp_path)
    adapter = text_adapter(kind, tmp_path / "text")
    modules = [f"model.layers.3.{name}" for name in ("self_attn.q_proj", "mlp.experts.down_proj")]
    edit(adapter, alpha_pattern={modules[0]: 40, modules[1]: 30})
    tuned = load(kind.base, adapter, threads=1).module
    layers = {name: module for name, module in tuned.named_modules() if isinstance(module, BaseTunerLayer)}
    scalings = {name: layer.scaling["default"] for name, layer in layers.items()}
    prefix = "base_model.model.model.language_model.layers.3"
    assert {name: scaling for name, scaling in scalings.items() if scaling != 2.5} == {
        f"{prefix}.self_attn.q_proj": 10,
        f"{prefix}.mlp.experts": 7.5,
    }


def test_a_stack_is_compared_as_the_base_stores_it_or_left_out_by_name(tmp_path: Path) -> None:
    """Qwen3-VL's experts are published transposed; any other shape could only be guessed at."""
    kind, right = merged("gpt-oss", tmp_path, dtype=torch.float32)
    name = f"{OSS}.gate_up_proj"

    def store(change: Change) -> AdapterSurvival:
        for folder in (kind.base, right):
            tensors = load_file(folder / WEIGHTS)
            change(tensors, tensors)
            save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        return survival_of(kind.base, kind.adapter, {"pytorch": right})["pytorch"]

    turned = store(turn(name))
    assert not turned.left_out
    strengths = [module.strength for module in turned.modules if module.module.startswith(name)]
    assert len(strengths) == 4
    assert strengths == pytest.approx([1] * 4, abs=1e-3)
    odd = store(lambda tensors, _: tensors.update({name: tensors[name].flatten(1).unsqueeze(2)}))
    assert odd.left_out == {name: "the base stores the parameter in another form"}
    assert len(odd.modules) == len(turned.modules) - 4


@pytest.mark.parametrize("name", some(("deepseek-v3", "nemotron-h-moe", "lfm2-moe", "qwen3.5-moe")))
def test_a_pair_for_each_projection_of_each_expert_is_compared(tmp_path: Path, name: str) -> None:
    kind, output = merged(name, tmp_path, dtype=torch.bfloat16, adapter=expert_adapter)
    check_right(kind, output, tmp_path / "work")


def lose(first: str, number: int | None = None) -> Change:
    """Give one expert the base's values again."""

    def change(tensors: Tensors, base: Tensors) -> None:
        if number is None:
            tensors[first] = base[first].clone()
        else:
            tensors[first][number] = base[first][number]

    return change


def turn(name: str) -> Change:
    def change(tensors: Tensors, _: Tensors) -> None:
        tensors[name] = tensors[name].transpose(-1, -2).contiguous()

    return change


def exchange(first: str, second: str) -> Change:
    def change(tensors: Tensors, _: Tensors) -> None:
        tensors[first], tensors[second] = tensors[second], tensors[first]

    return change


def exchange_halves(name: str) -> Change:
    """Exchange the halves of each expert's rows: gate and up."""

    def change(tensors: Tensors, _: Tensors) -> None:
        tensors[name] = tensors[name].roll(tensors[name].shape[1] // 2, dims=1)

    return change


def exchange_columns(name: str) -> Change:
    """Exchange gate and up where they take turns: gpt-oss."""

    def change(tensors: Tensors, _: Tensors) -> None:
        tensors[name] = tensors[name].unflatten(-1, (-1, 2)).flip(-1).flatten(-2).contiguous()

    return change


OSS, QWEN, GRANITE = "model.layers.1.mlp.experts", "model.layers.2.mlp.experts", "model.layers.0.block_sparse_moe"
PLANTED: dict[str, dict[str, tuple[Change, str]]] = {
    "gpt-oss": {
        "lost": (lose(f"{OSS}.gate_up_proj", 2), f"{OSS}.gate_up_proj.2"),
        "turned": (turn(f"{OSS}.down_proj"), f"{OSS}.down_proj."),
        "exchanged": (exchange_columns(f"{OSS}.gate_up_proj"), f"{OSS}.gate_up_proj."),
    },
    "qwen3.5-moe": {
        "lost": (lose(f"{QWEN}.3.down_proj.weight"), f"{QWEN}.3.down_proj"),
        "exchanged": (exchange(f"{QWEN}.1.gate_proj.weight", f"{QWEN}.1.up_proj.weight"), f"{QWEN}.1.gate_proj"),
        "of another": (exchange(f"{QWEN}.1.up_proj.weight", f"{QWEN}.2.up_proj.weight"), f"{QWEN}.1.up_proj"),
    },
    "granite-moe": {
        "lost": (lose(f"{GRANITE}.output_linear.weight", 1), f"{GRANITE}.output_linear.weight.1"),
        "exchanged": (exchange_halves(f"{GRANITE}.input_linear.weight"), f"{GRANITE}.input_linear.weight."),
    },
}
"""By kind and fault: the change of the merged weights, and the beginning of the name that the verdict has to say."""


@pytest.mark.parametrize("name", some(tuple(PLANTED)))
def test_faults_of_experts_fail_by_name(tmp_path: Path, name: str) -> None:
    kind, right = merged(name, tmp_path, dtype=torch.bfloat16)
    base, outputs = load_file(kind.base / WEIGHTS), {}
    for fault, (change, _) in PLANTED[name].items():
        folder = outputs[f"pytorch-{fault}"] = Path(shutil.copytree(right, tmp_path / fault))
        tensors = load_file(folder / WEIGHTS)
        change(tensors, base)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    verdicts, held = judge(kind, right, outputs, tmp_path / "work")
    for fault, (_, named) in PLANTED[name].items():
        verdict = verdicts[f"pytorch-{fault}"]
        assert not verdict.passed, fault
        assert named in verdict.explanation, (fault, verdict.explanation)
    assert held.keys() == outputs.keys()


@pytest.mark.slow
def test_the_stage_itself_passes_a_model_of_text_and_images(tmp_path: Path) -> None:
    kind, output = merged("qwen3.5-vision", tmp_path, dtype=torch.bfloat16)
    (tmp_path / "work").mkdir()
    inputs = {"base": kind.base, "adapter": kind.adapter, "pytorch": output}
    folder = STAGE.run(inputs, ValidateParams(**PARAMS), Context(workdir=tmp_path / "work"))["validation"]
    report = ValidationReport.read(folder)
    assert report.inputs.family == "decoder"
    assert report.output("pytorch").passed


def test_a_single_logit_has_no_limit_where_the_noise_of_arithmetic_is_not_known(tmp_path: Path) -> None:
    """With quick effort one shape is tried; a deep model may differ from itself in it, and a right merge by more than shallow models do."""
    kind, output = merged("ministral3", tmp_path, dtype=torch.float32)
    (tmp_path / "work").mkdir()
    run = Validated(kind.base, kind.adapter, tmp_path / "work", merged=output)
    names = []
    for reference in (run.reference, replace(run.reference, noise=None, unsteady_cases={"decode_left_padded": "x"})):
        run.evaluator = Evaluator(reference, run.prepared.family, LIMITS, decode=lambda _: "")
        verdict = run.output(f"pytorch{'-fp32' * len(names)}", output)
        assert verdict.passed, verdict.failed_checks
        names.append({check.name for check in verdict.checks})
    assert "max_abs_diff" in names[0]
    assert "mean_kl" in names[1]
    assert not any(name.endswith("max_abs_diff") for name in names[1])
