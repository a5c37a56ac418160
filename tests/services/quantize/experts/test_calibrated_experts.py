"""Calibration of mixtures: each expert sees its own inputs, and those that the text never reached are named and rounded plainly."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipway.errors import QuantizationError
from slipway.model.configuration import ModelConfig
from slipway.model.folder import ModelFolder
from slipway.stage import Context
from slipway_quantize.calibration.importance.stage import STAGE as IMPORTANCE
from slipway_quantize.calibration.params import CalibrateParams, ImportanceParams
from slipway_quantize.calibration.rounding import rounds
from slipway_quantize.calibration.stage import STAGE as CALIBRATE
from slipway_quantize.calibration.streaming.model import StreamedModel
from slipway_quantize.calibration.streaming.walk import BlockWalk
from slipway_quantize.calibration.windows import Windows
from slipway_quantize.params import QuantizeParams, calibration_refusal_reason
from slipway_quantize.stage import STAGE as QUANTIZE
from support.models.calibrated_models import write_data
from support.models.current_kinds import make_kind
from support.models.quantize_mixtures import QuantizedFolder, load, save_model

KINDS = (
    "qwen3-moe",
    "qwen3.5-moe",
    "qwen3-next",
    "deepseek-v3",
    "glm4-moe",
    "granite-moe",
    "granite4-moe",
    "lfm2-moe",
    "mixtral",
    "nemotron-h-moe",
)
UNREACHED = 3
TEXT = ["the weights of the model are the weights of the file, and each token takes a few of the experts " * 20] * 12


def runs(workdir: Path, stage: Any, inputs: dict[str, Path], params: Any) -> tuple[Path, Context]:
    workdir.mkdir()
    ctx = Context(workdir=workdir, log=logging.getLogger("test"), threads=1)
    return next(iter(stage.run(inputs, params, ctx).values())), ctx


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A mixture in which no token ever goes to one expert of each layer."""
    folder = make_kind("lfm2-moe", tmp_path / "kind", dtype=torch.bfloat16).base
    tensors = load_file(folder / "model.safetensors")
    for name, bias in tensors.items():
        if name.endswith("expert_bias"):
            bias[UNREACHED] = -100
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_data(tmp_path / "data", TEXT)


SMALL: dict[str, Any] = {"windows": 12, "window_tokens": 32, "threads": 1}


@pytest.mark.parametrize(
    ("kind", "fused"), [*((kind, False) for kind in KINDS), ("qwen3.5-moe", True), ("lfm2-moe", True)]
)
def test_experts_one_by_one_compute_what_the_stack_does(tmp_path: Path, kind: str, fused: bool) -> None:
    model = StreamedModel(
        ModelFolder.open(save_model(kind, tmp_path / "model", dtype=torch.float32, fused=fused)),
        group_size=32,
        head=True,
    )
    assert model.experts
    tokens = torch.arange(1, 25) * 37 % 300
    batches = [Windows((), (), "", 0, None).batch([tokens, tokens.flip(0)])]
    walk = BlockWalk(model, batches, tmp_path)
    for index in range(len(walk.names) - 1):
        walk.keep(index, [0])
        walk.drop(index)
    ((_, found),) = walk.compute(len(walk.names) - 1, [0])
    with torch.no_grad():
        exact = load(tmp_path / "model")(torch.stack([tokens, tokens.flip(0)])).logits.flatten(0, 1)
    torch.testing.assert_close(found["0"], exact, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("room", [1 << 30, 1])
def test_an_expert_that_no_text_reaches_is_named_and_rounded_plainly(
    source: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    monkeypatch.setattr(rounds, "_MOMENTS_BYTES", room)  # the passes that a large model takes
    params = CalibrateParams(method="gptq", wide_share=0.2, **SMALL)
    calibration, ctx = runs(tmp_path / "calibrate", CALIBRATE, {"model": source, "data": data}, params)
    described = json.loads((calibration / "calibration.json").read_text())
    assert described["experts"] == 8
    assert described["unreached"] == {"1": [UNREACHED], "2": [UNREACHED]}
    assert ctx.facts["experts_unreached"] == 2
    (warning,) = ctx.facts["warnings"]
    assert "reached 6 of 8 experts, and not layer 1: 3; layer 2: 3" in warning
    assert not any(f".experts.{UNREACHED}." in name for name in described["weights"])
    assert {each["bits"] for name, each in described["weights"].items() if ".experts." in name} == {4}
    assert not any(name.endswith(".gate.weight") for name in described["weights"])
    given = {"model": source, "calibration": calibration}
    made, ctx = runs(tmp_path / "made", QUANTIZE, given, QuantizeParams(format="pytorch", level="int4"))
    plain, _ = runs(tmp_path / "plain", QUANTIZE, {"model": source}, QuantizeParams(format="pytorch", level="int4"))
    assert ctx.facts["check"] == "passed"
    methods = json.loads((made / "quantization.json").read_text())["tensors"]["methods"]
    mine, others = QuantizedFolder(made), QuantizedFolder(plain)
    for layer in (1, 2):
        for expert in range(4):
            for name in ("w1", "w2", "w3"):
                module = f"model.layers.{layer}.feed_forward.experts.{expert}.{name}"
                same = torch.equal(mine.matrix(module)[0], others.matrix(module)[0])
                assert same is (expert == UNREACHED), module
                assert methods[f"{module}.weight"] == ("rtn" if expert == UNREACHED else "gptq")


def test_experts_without_gates_are_rounded_by_their_own_text(data: Path, tmp_path: Path) -> None:
    """Nemotron-H's checkpoints also call their layers otherwise than transformers does."""
    folder = make_kind("nemotron-h-moe", tmp_path / "kind", dtype=torch.bfloat16).base
    tensors = load_file(folder / "model.safetensors")
    tensors["backbone.layers.2.mixer.gate.e_score_correction_bias"][UNREACHED] = -100
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    params = CalibrateParams(method="gptq", **SMALL)
    calibration, ctx = runs(tmp_path / "calibrate", CALIBRATE, {"model": folder, "data": data}, params)
    assert (ctx.facts["experts"], ctx.facts["unreached"]) == (4, {"2": [UNREACHED]})
    given = {"model": folder, "calibration": calibration}
    made, ctx = runs(tmp_path / "made", QUANTIZE, given, QuantizeParams(format="pytorch", level="int4"))
    assert ctx.facts["check"] == "passed"
    methods = json.loads((made / "quantization.json").read_text())["tensors"]["methods"]
    of_experts = {name: method for name, method in methods.items() if ".experts." in name}
    assert len(of_experts) == 8
    assert all((method == "rtn") is (f".{UNREACHED}." in name) for name, method in of_experts.items())
    params = ImportanceParams(windows=8, window_tokens=32, threads=1)
    measured, _ = runs(tmp_path / "importance", IMPORTANCE, {"model": folder, "data": data}, params)
    means = load_file(measured / "importance.safetensors")
    assert means.keys() <= tensors.keys()
    assert len([name for name in means if ".experts." in name]) == 6


def test_experts_that_stay_in_their_stacks_leave_the_calibration_to_the_others(
    source: Path, data: Path, tmp_path: Path
) -> None:
    load(source).save_pretrained(source, save_original_format=False)
    params = CalibrateParams(method="gptq", **SMALL)
    calibration, _ = runs(tmp_path / "calibrate", CALIBRATE, {"model": source, "data": data}, params)
    given = {"model": source, "calibration": calibration}
    asked = QuantizeParams(format="pytorch", level="int4", keep=("experts",))
    made, ctx = runs(tmp_path / "made", QUANTIZE, given, asked)
    assert ctx.facts["check"] == "passed"
    methods = json.loads((made / "quantization.json").read_text())["tensors"]["methods"]
    assert set(methods.values()) == {"gptq"}
    before, after = load_file(source / "model.safetensors"), load_file(made / "model.safetensors")
    stacks = [name for name in before if name.endswith("experts.gate_up_proj")]
    assert stacks
    assert all(torch.equal(before[name], after[name]) for name in stacks)


def test_importance_is_that_of_each_expert_s_own_inputs(source: Path, data: Path, tmp_path: Path) -> None:
    params = ImportanceParams(windows=8, window_tokens=32, threads=1)
    folder, ctx = runs(tmp_path / "importance", IMPORTANCE, {"model": source, "data": data}, params)
    means = load_file(folder / "importance.safetensors")
    own = [means[f"model.layers.1.feed_forward.experts.{expert}.w1.weight"] for expert in range(UNREACHED)]
    assert all(mean.shape == (64,) for mean in own)
    assert not torch.equal(own[0], own[1])
    assert not any(f".experts.{UNREACHED}." in name for name in means)
    assert ctx.facts["experts_unreached"] == 2
    assert any("importance" in warning for warning in ctx.facts["warnings"])


@pytest.mark.parametrize("changes", [{"method": "autoround"}, {"method": "gptq", "symmetric": False}])
def test_what_is_not_calibrated_of_a_mixture_is_said(
    source: Path, data: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    with pytest.raises(QuantizationError, match="mixture of experts") as caught:
        runs(tmp_path / "work", CALIBRATE, {"model": source, "data": data}, CalibrateParams(**changes, **SMALL))
    assert caught.value.reason == "CALIBRATION_UNSUPPORTED"


@pytest.mark.parametrize("kind", ["gemma3n", "gemma4", "gemma4-moe"])
def test_blocks_that_read_keys_and_values_of_others_are_refused(data: Path, tmp_path: Path, kind: str) -> None:
    folder = make_kind(kind, tmp_path / "kind").base
    with pytest.raises(QuantizationError, match="do not simply follow each other") as caught:
        runs(tmp_path / "work", CALIBRATE, {"model": folder, "data": data}, CalibrateParams(method="gptq", **SMALL))
    assert caught.value.reason == "CALIBRATION_UNSUPPORTED"


def test_experts_stored_as_in_and_out_are_refused_before_anything_runs(tmp_path: Path) -> None:
    assert "(in, out)" in calibration_refusal_reason(ModelConfig.read(save_model("llama4", tmp_path / "model")))
    assert calibration_refusal_reason(ModelConfig.read(save_model("mixtral", tmp_path / "other"))) == ""
