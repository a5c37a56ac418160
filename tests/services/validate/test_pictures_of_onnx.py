"""ONNX outputs with graphs for pictures are compared behind pictures: right ones pass, and a fault of a graph fails by name."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from slipway.stage import Context
from slipway.validation.findings import OutputValidation
from slipway.validation.pictures import Sense
from slipway.validation.verdicts import Answer
from slipway_merge.params import MergeParams
from slipway_merge.stage import STAGE as MERGE
from slipway_onnx_export.params import OnnxExportParams
from slipway_onnx_export.stage import STAGE as ONNX_EXPORT
from slipway_quantize.params import QuantizeParams
from slipway_quantize.stage import STAGE as QUANTIZE
from slipway_validate.judging.distances import FLOOR
from slipway_validate.judging.yardsticks import _passes, read_measured, rounding_pass
from slipway_validate.protocol.messages import Pass, Yardsticks
from slipway_validate.reference.running import RUNTIME
from slipway_validate.runner.yardsticks.computing import compute_yardsticks
from support.models.current_kinds import Kind
from support.models.pictured_kinds import make_pictured_kind
from support.models.validated_here import Validated

QUICK = "internvl"
ENCODER = ("vision_encoder.onnx", "vision_encoder.onnx.data")


def merge(kind: Kind, folder: Path) -> Path:
    folder.mkdir()
    inputs = {"base": kind.base, "adapter": kind.adapter}
    return MERGE.run(inputs, MergeParams(verify="spot"), Context(workdir=folder))["pytorch"]


def export(model: Path, folder: Path, *, parts: str) -> Path:
    folder.mkdir()
    params = OnnxExportParams.model_validate({"parts": parts, "parity": "never"})
    return ONNX_EXPORT.run({"pytorch": model}, params, Context(workdir=folder))["onnx"]


@dataclass(frozen=True)
class Made:
    """A kind of model, its right merge, and the graphs of that; treat all as read-only."""

    kind: Kind
    right: Path
    onnx: Path


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(QUICK, tmp_path_factory.mktemp(QUICK))


def make(name: str, folder: Path) -> Made:
    kind = make_pictured_kind(name, folder / "kind", dtype=torch.bfloat16)
    right = merge(kind, folder / "merged")
    return Made(kind, right, export(right, folder / "onnx", parts="all"))


def halve(onnx: Path, folder: Path) -> Path:
    folder.mkdir()
    params = QuantizeParams(format="onnx", level="fp16", check=False)
    return QUANTIZE.run({"model": onnx}, params, Context(workdir=folder))["model"]


def judge(made: Made, onnx: Path, work: Path, *, name: str = "onnx") -> OutputValidation:
    """Return the verdict on graphs, beside the merged model."""
    outputs = {"pytorch": made.right, name: onnx}
    work.mkdir()
    run = Validated(made.kind.base, made.kind.adapter, work, merged=made.right)
    run.read_weights(outputs)
    return {each: run.output(each, folder) for each, folder in outputs.items()}[name]


def assert_right(made: Made, work: Path) -> None:
    verdict = judge(made, made.onnx, work)
    assert verdict.passed, verdict.explanation
    assert verdict.pictures is not None
    assert (verdict.pictures.pictures, verdict.pictures.not_run, verdict.pictures.failed) == (4, "", "")
    assert verdict.pictures.faithful.answer is Answer.PASSED
    assert verdict.pictures.kept is not None
    assert verdict.pictures.kept > 0.99


def test_right_graphs_pass_behind_pictures(quick: Made, tmp_path: Path) -> None:
    assert_right(quick, tmp_path / "work")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["qwen3-vl", "qwen2.5-vl", "gemma3-vision", "gemma4-vision", "mistral3", "qwen3.5-vision"]
)
def test_right_graphs_of_each_kind_pass_behind_pictures(name: str, tmp_path: Path) -> None:
    assert_right(make(name, tmp_path), tmp_path / "work")


@pytest.mark.slow
def test_an_encoder_of_the_base_fails_by_name_though_text_is_right(quick: Made, tmp_path: Path) -> None:
    onnx = shutil.copytree(quick.onnx, tmp_path / "onnx")
    before = export(quick.kind.base, tmp_path / "before", parts="all")
    for name in ENCODER:
        shutil.copyfile(before / name, onnx / name)
    verdict = judge(quick, onnx, tmp_path / "work")
    failed = {check.name for check in verdict.failed_checks}
    assert any(name.startswith("pictures.") for name in failed)
    assert "mean_kl" not in failed
    assert "behind pictures" in verdict.explanation


@pytest.mark.slow
def test_the_noise_of_16_bits_is_measured_behind_pictures(quick: Made, tmp_path: Path) -> None:
    """A right graph is further away than float32 may be, and within what its own arithmetic explains there; one with the base's encoder is not."""
    half = halve(quick.onnx, tmp_path / "half")
    verdict = judge(quick, half, tmp_path / "work", name="onnx-fp16")
    assert verdict.passed, verdict.explanation
    (check,) = (each for each in verdict.checks if each.name == "pictures.mean_kl")
    assert check.value > 1e-8
    assert check.limit > FLOOR
    before = halve(export(quick.kind.base, tmp_path / "before", parts="all"), tmp_path / "half_before")
    for name in ENCODER:
        shutil.copyfile(before / name, half / name)
    verdict = judge(quick, half, tmp_path / "wrong", name="onnx-fp16")
    failed = {each.name for each in verdict.failed_checks}
    assert any(name.startswith("pictures.") for name in failed)
    assert "mean_kl" not in failed


def test_an_encoder_that_is_lost_fails_by_name(quick: Made, tmp_path: Path) -> None:
    onnx = shutil.copytree(quick.onnx, tmp_path / "onnx")
    for name in ENCODER:
        (onnx / name).unlink()
    verdict = judge(quick, onnx, tmp_path / "work")
    assert "pictures.unreadable" in {check.name for check in verdict.failed_checks}
    assert ENCODER[0] in verdict.explanation


@pytest.mark.slow
def test_the_text_part_alone_is_not_run_behind_pictures(quick: Made, tmp_path: Path) -> None:
    verdict = judge(quick, export(quick.right, tmp_path / "text", parts="text"), tmp_path / "work")
    assert verdict.passed, verdict.explanation
    assert verdict.pictures is not None
    assert verdict.pictures.not_run.startswith("it has the text part alone: set formats.onnx.parts to all")


def test_the_noise_of_integers_in_the_text_leaves_the_encoder_alone(quick: Made, tmp_path: Path) -> None:
    """ONNX Runtime computes the graph that reads pictures in float32 at every level; llama.cpp computes it in float16."""
    run = Validated(quick.kind.base, quick.kind.adapter, tmp_path, merged=quick.right)
    (folder := tmp_path / "measured").mkdir()
    exact, halved = (
        Pass(name=rounding_pass("float32", halves_encoder=each), rounding="float32", halves_encoder=each)
        for each in (False, True)
    )
    asked = Yardsticks(
        base=quick.kind.base,
        adapter=quick.kind.adapter,
        run=run.spec(RUNTIME, quick.kind.base),
        windows=1,
        threads=1,
        passes=(exact, halved),
    )
    compute_yardsticks(asked, folder, report=lambda *_: None)
    found = read_measured(folder, asked, run.reference).behind[Sense.PICTURES]
    assert found.noise("float32") == pytest.approx(0.0, abs=1e-9)
    assert (found.noise("float32", halves_encoder=True) or 0.0) > 1e-9


def test_runtimes_are_asked_how_they_compute_an_encoder(quick: Made, tmp_path: Path) -> None:
    (tmp_path / "file.gguf").touch()
    outputs = {"onnx": quick.onnx, "onnx-int8": quick.onnx, "gguf-q8_0": tmp_path}
    passes = {each.name: each for each in _passes(outputs, "float32")}
    assert {name: each.weights for name, each in passes.items() if each.output} == {
        "onnx": "",
        "onnx-int8": "",
        "gguf-q8_0": "float16",
    }
    assert [each.halves_encoder for each in passes.values() if each.rounding == "int8/32"] == [False, True]
    assert {each.halves_encoder for each in passes.values() if each.rounding not in ("", "int8/32")} <= {True}
