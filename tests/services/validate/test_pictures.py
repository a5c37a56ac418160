"""Models that take images are compared behind pictures too: right merges pass, faults that only a picture shows fail by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from slipway.errors import ValidationError
from slipway.proof.runtime import LanguageModel, NotRunnable
from slipway.proof.sights import Sight, read_sights
from slipway.proof.stored_weights import NotUnderstoodError
from slipway.stage import Context
from slipway.validation.findings import OutputValidation, ValidationReport
from slipway.validation.pictures import PictureComparison, PictureEffect, Sense
from slipway.validation.speed import Engine
from slipway.validation.verdicts import Answer
from slipway_merge.params import MergeParams
from slipway_merge.stage import STAGE as MERGE
from slipway_quantize.params import QuantizeParams
from slipway_quantize.stage import STAGE as QUANTIZE
from slipway_validate.judging import pictures
from slipway_validate.judging.yardsticks import ReferenceRun
from slipway_validate.params import SampleParams, ValidateParams
from slipway_validate.protocol.pictures import ENDED, Looked
from slipway_validate.reference.files import read_reference
from slipway_validate.reference.stage import STAGE as REFERENCE
from slipway_validate.runner.pictures.making import NoPicturesError, make_sights, read_colours
from slipway_validate.runner.yardsticks.weights import Products
from slipway_validate.stage import STAGE as VALIDATE
from support.models.current_kinds import Kind, make_kind, text_adapter
from support.models.pictured_kinds import NAMES, make_pictured_kind
from support.models.validated_here import PARAMS, Validated

WEIGHTS = "model.safetensors"
FAST = "qwen3-vl"
EYE = SimpleNamespace(image_size=16, patch_size=4)
Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors, Tensors], None]


def merge(kind: Kind, folder: Path) -> Path:
    folder.mkdir()
    inputs = {"base": kind.base, "adapter": kind.adapter}
    return MERGE.run(inputs, MergeParams(verify="spot"), Context(workdir=folder))["pytorch"]


def judge(
    kind: Kind, right: Path, work: Path, outputs: Mapping[str, Path], *, params: Mapping[str, Any] = {}
) -> dict[str, OutputValidation]:
    """Return the verdicts on outputs, measured by what they store."""
    work.mkdir()
    run = Validated(kind.base, kind.adapter, work, merged=right, params=params)
    run.read_weights(outputs)
    return {name: run.output(name, folder) for name, folder in outputs.items()}


def behind(verdict: OutputValidation) -> PictureComparison:
    assert verdict.pictures is not None
    return verdict.pictures


def edited(right: Path, folder: Path, change: Change, base: Path) -> Path:
    shutil.copytree(right, folder)
    tensors = load_file(folder / WEIGHTS)
    change(tensors, load_file(base / WEIGHTS))
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    "name",
    [name if name in (FAST, "llava", "internvl") else pytest.param(name, marks=pytest.mark.slow) for name in NAMES],
)
def test_a_right_merge_passes_behind_pictures(name: str, tmp_path: Path) -> None:
    kind = make_pictured_kind(name, tmp_path / "kind", dtype=torch.bfloat16)
    right = merge(kind, tmp_path / "merged")
    verdict = judge(kind, right, tmp_path / "work", {"pytorch": right})["pytorch"]
    found = behind(verdict)
    assert verdict.passed, verdict.explanation
    assert not found.not_run
    assert (found.pictures, found.tokens) == (4, 96)
    assert found.fit.answer is Answer.PASSED
    assert found.kept is not None
    assert found.kept > 0.99
    if "moe" not in name:  # nothing rounds a stack of experts there, so the limit is not known
        assert found.faithful.answer is Answer.PASSED
        assert {"pictures.mean_kl", "pictures.kept"} <= {check.name for check in verdict.checks}


@pytest.mark.parametrize("name", [FAST, pytest.param("gemma3-vision", marks=pytest.mark.slow)])
def test_levels_of_a_right_merge_pass_behind_pictures(name: str, tmp_path: Path) -> None:
    kind = make_pictured_kind(name, tmp_path / "kind", dtype=torch.bfloat16)
    outputs = {"pytorch": (right := merge(kind, tmp_path / "merged"))}
    for level in ("int8", "int4", "fp8", "fp16"):
        (work := tmp_path / level).mkdir()
        params = QuantizeParams(format="pytorch", level=level)
        outputs[f"pytorch-{level}"] = QUANTIZE.run({"model": right}, params, Context(workdir=work))["model"]
    for name, verdict in judge(kind, right, tmp_path / "work", outputs).items():
        found = behind(verdict)
        assert not [each.name for each in verdict.failed_checks if each.question == "faithful"], verdict.explanation
        assert found.pictures == 4
        assert found.kept is not None
        assert found.kept > (0.5 if name == "pytorch-int4" else 0.9)
        assert found.faithful.answer in (Answer.PASSED, Answer.NOT_JUDGED)


def test_an_adapter_alone_is_compared_behind_pictures(tmp_path: Path) -> None:
    kind = make_pictured_kind(FAST, tmp_path / "kind", dtype=torch.bfloat16)
    right = merge(kind, tmp_path / "merged")
    verdict = judge(kind, right, tmp_path / "work", {"pytorch": right, "adapter": kind.adapter})["adapter"]
    assert verdict.passed, verdict.explanation
    assert behind(verdict).faithful.answer is Answer.PASSED
    assert behind(verdict).to_reference.mean_kl < 1e-9  # type: ignore[union-attr, operator]


def test_a_graph_of_the_text_part_is_not_run_with_the_reason(tmp_path: Path) -> None:
    class Text(LanguageModel):
        engine = Engine(runtime="onnxruntime")

    with pytest.raises(NotRunnable, match=r"^onnxruntime is given no pictures here$"):
        Text().look(SimpleNamespace(features=4))  # type: ignore[abstract, arg-type]


@pytest.mark.slow
def test_the_stages_themselves_compare_pictures(tmp_path: Path) -> None:
    kind = make_pictured_kind(FAST, tmp_path / "kind", dtype=torch.bfloat16)
    right = merge(kind, tmp_path / "merged")
    inputs = {"base": kind.base, "adapter": kind.adapter}
    (tmp_path / "reference").mkdir()
    params = {name: value for name, value in PARAMS.items() if name != "benchmark_performance"}
    ctx = Context(workdir=tmp_path / "reference")
    reference = REFERENCE.run(inputs, SampleParams(**params), ctx)["reference"]
    assert [each.name for each in sorted((reference / Sense.PICTURES).iterdir())] == [
        "base_logits.npy",
        "logits.npy",
        "pictures.json",
    ]
    swapped = edited(right, tmp_path / "swapped", exchange_layers, kind.base)
    (tmp_path / "work").mkdir()
    inputs |= {"reference": reference, "pytorch": right, "pytorch-swapped": swapped}
    made = VALIDATE.run(inputs, ValidateParams(**params), Context(workdir=tmp_path / "work"))["validation"]
    report = ValidationReport.read(made)
    assert report.reference.pictures is not None
    assert report.reference.pictures.pictures == 4
    assert report.output("pytorch").passed
    assert report.output("pytorch").speed is not None
    assert not report.output("pytorch-swapped").passed
    assert not any("text alone" in warning for warning in report.warnings)
    shutil.rmtree(reference / Sense.PICTURES)
    with pytest.raises(ValidationError, match="prompts with a picture have results of 0"):
        read_it(reference, inputs, tmp_path / "other")
    shutil.rmtree(reference / "samples" / Sense.PICTURES)
    run = read_it(reference, inputs, tmp_path / "earlier")
    assert pictures.describe_effect(Looked.read(run.folder), None, expected=Sense.PICTURES) == PictureEffect(
        not_run=pictures.EARLIER[Sense.PICTURES]
    )


def read_it(reference: Path, inputs: Mapping[str, Path], work: Path) -> ReferenceRun:
    work.mkdir()
    given = {name: inputs[name] for name in ("base", "adapter")}
    ctx = Context(workdir=work)
    return read_reference(reference, inputs=given, merged_level="float32", tokenizer=inputs["base"], ctx=ctx)[0]


def lose(name: str) -> Change:
    def change(tensors: Tensors, base: Tensors) -> None:
        tensors[name] = base[name].clone()

    return change


def scale(name: str) -> Change:
    def change(tensors: Tensors, _: Tensors) -> None:
        tensors[name] = tensors[name] * 1.05

    return change


def exchange_layers(tensors: Tensors, _: Tensors) -> None:
    for name in [name for name in tensors if ".blocks.0." in name]:
        other = name.replace(".blocks.0.", ".blocks.1.")
        tensors[name], tensors[other] = tensors[other], tensors[name]


LOST = "model.visual.blocks.1.mlp.linear_fc1.weight"
SCALED = "model.visual.merger.norm.weight"
PLANTED: Mapping[str, tuple[Change, str]] = {
    "lost": (lose(LOST), LOST.removesuffix(".weight")),
    "scaled": (scale(SCALED), "visual.merger.norm.weight"),
    "swapped": (exchange_layers, "model.visual.blocks.0."),
}


def test_faults_that_only_a_picture_shows_fail_by_name(tmp_path: Path) -> None:
    kind = make_pictured_kind(FAST, tmp_path / "kind", dtype=torch.bfloat16)
    right = merge(kind, tmp_path / "merged")
    outputs = {"pytorch": right}
    for fault, (change, _) in PLANTED.items():
        outputs[f"pytorch-{fault}"] = edited(right, tmp_path / fault, change, kind.base)
    verdicts = judge(kind, right, tmp_path / "work", outputs)
    assert verdicts["pytorch"].passed
    for fault, (_, named) in PLANTED.items():
        verdict = verdicts[f"pytorch-{fault}"]
        assert not verdict.passed, fault
        assert named in verdict.explanation, (fault, verdict.explanation)
        of_results = {each.name for each in verdict.failed_checks if not each.name.startswith("module_")}
        assert of_results == {"pictures.mean_kl"}, fault
        assert behind(verdict).faithful.answer is Answer.FAILED
        assert verdict.faithful.answer is Answer.FAILED


def test_layers_that_a_text_adapter_leaves_alone_are_named_by_their_bytes(tmp_path: Path) -> None:
    kind = make_pictured_kind(FAST, tmp_path / "kind", dtype=torch.bfloat16)
    kind = Kind(kind.name, kind.base, text_adapter(kind, tmp_path / "text"))
    right = merge(kind, tmp_path / "merged")
    outputs = {"pytorch": right, "pytorch-swapped": edited(right, tmp_path / "swapped", exchange_layers, kind.base)}
    verdict = judge(kind, right, tmp_path / "work", outputs)["pytorch-swapped"]
    assert not verdict.passed
    assert "first visual.blocks.0.attn.proj.bias (it holds visual.blocks.1.attn.proj.bias)" in verdict.explanation
    assert pictures.CAUSES["pictures"] in verdict.explanation


def test_a_weak_adapter_is_said_to_be_weak_behind_pictures(tmp_path: Path) -> None:
    kind = make_pictured_kind(FAST, tmp_path / "kind", dtype=torch.bfloat16)
    file = kind.adapter / "adapter_model.safetensors"
    save_file({name: tensor * 0.02 for name, tensor in load_file(file).items()}, file)
    right = merge(kind, tmp_path / "merged")
    run_folder = tmp_path / "work"
    run_folder.mkdir()
    run = Validated(kind.base, kind.adapter, run_folder, merged=right)
    run.read_weights({"pytorch": right})
    verdict = run.output("pytorch", right)
    assert "the adapter changes little behind pictures" in behind(verdict).fit.said
    effect = run.evaluator.beside[Sense.PICTURES]
    assert effect is not None
    assert effect.effect_kl is not None
    assert effect.effect_kl < 1e-3
    [said] = pictures.list_warnings(run.config, run.evaluator.beside)
    assert said.startswith("the adapter has almost no effect behind pictures")


def test_a_model_of_text_is_untouched(tmp_path: Path) -> None:
    kind = make_kind("qwen3.5", tmp_path / "kind", dtype=torch.bfloat16)
    right = merge(kind, tmp_path / "merged")
    verdict = judge(kind, right, tmp_path / "work", {"pytorch": right})["pytorch"]
    assert verdict.passed
    assert verdict.pictures is None
    assert not any(check.name.startswith(pictures.PREFIXES) for check in verdict.checks)
    assert not list((tmp_path / "work").rglob(f"{Sense.PICTURES}/*.json"))


def _set(base: Path, name: str, value: Any, part: str = "") -> None:
    path = base / "config.json"
    config = json.loads(path.read_text())
    (config[part] if part else config)[name] = value
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("part", "setting", "value", "words"),
    [
        ("", "image_token_id", None, "does not compute a picture of its own"),
        ("text_config", "max_position_embeddings", 32, "reads 32 tokens at most, and a picture of it takes 24"),
    ],
)
def test_what_cannot_take_a_picture_is_not_run_by_name(
    part: str, setting: str, value: int | None, words: str, tmp_path: Path
) -> None:
    """Without the setting, the class has a token of its own, which is not in this vocabulary."""
    kind = make_pictured_kind(FAST, tmp_path / "kind", dtype=torch.bfloat16)
    right = merge(kind, tmp_path / "merged")
    for folder in (kind.base, right):
        config = json.loads((folder / "config.json").read_text())
        (config[part] if part else config).pop(setting)
        if value is not None:
            config[part][setting] = value
        (folder / "config.json").write_text(json.dumps(config))
    verdict = judge(kind, right, tmp_path / "work", {"pytorch": right})["pytorch"]
    assert verdict.passed, verdict.explanation
    assert words in behind(verdict).not_run
    assert not read_sights(tmp_path / "work" / "samples")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model_type": "qwen3_vl"}, "names no token that stands for an image"),
        ({"model_type": "ovis", "image_token_id": 3}, "how a model of the type ovis takes pictures is not known"),
        ({"model_type": "llava", "image_token_id": 3}, "does not say how large a picture is"),
        ({"model_type": "llava", "image_token_id": 3, "vision_config": EYE}, "does not take a picture that is made"),
    ],
)
def test_a_model_that_no_picture_is_made_for_says_why(settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    model = SimpleNamespace(config=SimpleNamespace(**settings))
    with pytest.raises(NoPicturesError, match=words):
        make_sights(model, tmp_path, np.zeros((2, 16), np.int64), count=2, longest=64)


def test_colours_are_those_of_the_models_processor(tmp_path: Path) -> None:
    assert not read_colours(tmp_path)[2]
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps({"image_mean": [0.1, 0.2, 0.3], "image_std": 0.5}))
    assert read_colours(tmp_path) == ((0.1, 0.2, 0.3), (0.5, 0.5, 0.5), True)
    path.write_text(json.dumps({"do_normalize": False}))
    assert read_colours(tmp_path) == ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0), True)
    for wrong in ({"image_mean": "x", "image_std": [1]}, {"image_mean": 0.5, "image_std": 0}, {"image_mean": 1e9}):
        path.write_text(json.dumps(wrong))
        assert not read_colours(tmp_path)[2]


def test_a_prompt_with_a_picture_from_elsewhere_is_checked(tmp_path: Path) -> None:
    sight = Sight(
        np.arange(9), 2, 5, 3, 1, {"pixel_values": np.zeros((1, 3, 4, 4))}, "", np.zeros((4, 4, 3), np.uint8), *((0.5,) * 3,) * 2
    )  # fmt: skip
    sight.write(tmp_path / Sense.PICTURES / "00")
    [read] = read_sights(tmp_path)
    assert (read.compared, read.features, read.colours_known) == (4, 3, True)
    meta = tmp_path / Sense.PICTURES / "00" / "sight.json"
    right = json.loads(meta.read_text())
    for wrong in ({"begin": 6}, {"end": 9}, {"continued": 5}, {"types": "a b"}, {"mean": [1]}, {"token": "x"}):
        meta.write_text(json.dumps(right | wrong))
        with pytest.raises(ValueError, match="is no prompt with a picture"):
            read_sights(tmp_path)


def test_a_process_that_ended_with_a_picture_leaves_what_text_gave(tmp_path: Path) -> None:
    assert Looked.read(tmp_path) is None
    (tmp_path / Sense.PICTURES).mkdir()
    assert Looked.read(tmp_path) == Looked(not_run=ENDED)


def test_convolutions_and_positions_of_an_encoder_do_not_hide_products() -> None:
    """Those of real sizes were taken for stacks of experts, so that nothing was measured."""
    model = torch.nn.Module()
    model.visual = torch.nn.Module()
    model.visual.patch = torch.nn.Conv3d(3, 64, (2, 16, 16))
    model.visual.positions = torch.nn.Parameter(torch.zeros(1, 1025, 128))
    model.head = torch.nn.Linear(4, 4)
    assert set(Products(model).layers) == {"head.weight"}
    model.experts = torch.nn.Parameter(torch.zeros(4, 256, 128))
    with pytest.raises(NotUnderstoodError, match="experts holds several matrices"):
        Products(model)
