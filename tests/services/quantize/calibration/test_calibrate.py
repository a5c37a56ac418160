"""The stage as a whole, on a trained model of one layer."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from torch.optim.optimizer import register_optimizer_step_pre_hook

from slipway.errors import ModelExportError
from slipway.stage import Context
from slipway_quantize.calibration.params import CalibrateParams
from slipway_quantize.calibration.stage import STAGE
from support.models.calibrated_models import SMALL, Material, rounded_divergence, shortened, write_data
from support.models.quantize_models import save_tiny

Calibrate = Callable[..., tuple[Path, Context]]
LINEAR = 7


def description(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "calibration.json").read_text())
    return found


def test_each_method_is_nearer_than_the_simpler_one(material: Material, calibrate: Calibrate) -> None:
    """On text that the stage has not seen, by transformers' own model; ``auto`` takes the best of those that do not tune."""
    found, _ = calibrate(material.model, material.data, head=False, method="gptq")
    simple, _ = calibrate(material.model, material.data, head=False, method="rtn")
    weighed, _ = calibrate(material.model, material.data, head=False, method="awq")
    auto, _ = calibrate(material.model, material.data, head=False)
    _, ctx = calibrate(material.model, material.data, head=False, method="autoround")
    rtn, awq, gptq, best = (
        rounded_divergence(material.model, each, material.other) for each in (simple, weighed, found, auto)
    )
    assert gptq < 0.7 * rtn
    assert awq < rtn
    assert {each["method"] for each in description(weighed)["weights"].values()} == {"awq"}
    assert best <= gptq
    measured = ctx.facts["divergence"]
    assert measured["autoround"] < measured["gptq"] < measured["rtn"]
    assert {each["method"] for each in description(auto)["weights"].values()} <= {"rtn", "awq", "gptq"}
    assert all(
        each["held_out_error"] < each["held_out_error_before"] for each in description(found)["weights"].values()
    )


def test_threads_that_share_windows_share_the_moving_of_weights(material: Material, calibrate: Calibrate) -> None:
    """The thread that waits for them has nothing to do, and starts no threads of its own that would take their cores."""
    movers: dict[str, int] = {}

    def note(*_: object) -> None:
        name = threading.current_thread().name
        movers[name] = movers.get(name, 0) + 1

    hook = register_optimizer_step_pre_hook(note)
    try:
        calibrate(material.model, material.data, head=False, method="autoround", threads=2)
    finally:
        hook.remove()
    assert len(movers) == 2
    assert threading.main_thread().name not in movers
    assert max(movers.values()) <= 1.5 * min(movers.values())


def test_the_artifact_is_as_agreed(material: Material, calibrate: Calibrate) -> None:
    folder, _ = calibrate(material.model, material.data, method="gptq", bits=3, group_size=64, symmetric=False)
    weights, described = load_file(folder / "weights.safetensors"), description(folder)
    names = {name.removesuffix(".codes") for name in weights if name.endswith(".codes")}
    assert len(names) == LINEAR + 1
    assert names == set(described["weights"])
    assert described["tied_embedding"] == "model.embed_tokens.weight"
    for name in names:
        codes, scales, zeros = (weights[f"{name}.{part}"] for part in ("codes", "scales", "zero_points"))
        assert codes.dtype == zeros.dtype == torch.int8
        assert scales.dtype == torch.float32
        assert scales.shape == zeros.shape == (codes.shape[0], codes.shape[1] // 64)
        for part in (codes, zeros):
            assert part.min() >= -4
            assert part.max() <= 3
    assert (described["schema_version"], described["bits"], described["group_size"]) == (1, 3, 64)
    assert not described["symmetric"]
    assert len(described["data_sha256"]) == 64


@pytest.mark.slow
@pytest.mark.parametrize("method", ["auto", "awq"])
def test_a_second_run_gives_the_same_bytes(material: Material, calibrate: Calibrate, method: str) -> None:
    """Whatever share of the machine a worker gives it; times are facts of the attempt, not of the artifact."""
    params = {"method": method, "time_budget_seconds": 1, "threads": 2}
    runs = [calibrate(material.model, material.data, granted=granted, **params) for granted in (1, 3)]
    for name in ("weights.safetensors", "calibration.json"):
        first, second = ((folder / name).read_bytes() for folder, _ in runs)
        assert first == second
    assert all(ctx.facts["seconds"] > 0 for _, ctx in runs)


@pytest.mark.slow
def test_scales_are_exact_in_the_type_of_the_model(
    sample: Path, material: Material, tmp_path: Path, calibrate: Calibrate
) -> None:
    model = shortened(sample, tmp_path / "half", dtype=torch.bfloat16)
    folder, _ = calibrate(model, material.data, method="autoround", time_budget_seconds=1)
    for name, values in load_file(folder / "weights.safetensors").items():
        if name.endswith(".scales"):
            assert torch.equal(values, values.bfloat16().float())


@pytest.mark.slow
def test_torn_inputs_of_an_interrupted_attempt_are_computed_again(
    material: Material, tmp_path: Path, calibrate: Calibrate
) -> None:
    """As a power cut leaves them: the record of the block is there, and the inputs of the next one are not whole."""
    params = {**SMALL, "method": "gptq"}
    undisturbed, _ = calibrate(material.model, material.data, **params)
    kept = tmp_path / "kept"
    kept.mkdir()
    stopping = Context(workdir=tmp_path / "stopped", kept=kept)
    stopping.workdir.mkdir()
    stopping.on_progress = lambda now: (
        stopping.cancelled.set() if now.phase == "blocks" and next(kept.rglob("block-0.json"), None) else None
    )
    with pytest.raises(ModelExportError) as error:
        STAGE.run({"model": material.model, "data": material.data}, CalibrateParams.model_validate(params), stopping)
    assert error.value.reason == "CANCELLED"
    assert next(kept.rglob("block-0.json"))
    for chain in ("inputs", "exact"):
        damaged = shutil.copytree(kept, tmp_path / chain)
        torn = list(damaged.rglob(f"{chain}-*.safetensors"))
        for path in torn:
            os.truncate(path, path.stat().st_size // 2)
        assert torn
        again, ctx = calibrate(material.model, material.data, kept=damaged, **params)
        assert ctx.facts["blocks_resumed"] == 0
        assert (again / "weights.safetensors").read_bytes() == (undisturbed / "weights.safetensors").read_bytes()


def test_a_cancelled_tuning_stops(material: Material, tmp_path: Path) -> None:
    """While it moves weights, not only when it judges them afterwards."""
    stopping = Context(workdir=tmp_path)
    stopping.on_progress = lambda now: stopping.cancelled.set() if now.phase == "tune" else None
    params = CalibrateParams.model_validate({**SMALL, "method": "autoround", "head": False})
    with pytest.raises(ModelExportError) as error:
        STAGE.run({"model": material.model, "data": material.data}, params, stopping)
    assert error.value.reason == "CANCELLED"
    assert any("tuning" in Path(entry.path).parts for entry in error.traceback)


def refused(calibrate: Calibrate, model: Path, data: Path, **params: Any) -> ModelExportError:
    with pytest.raises(ModelExportError) as error:
        calibrate(model, data, **params)
    assert error.value.remedy
    return error.value


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("", "0 windows"),
        ('{"text": "too little"}\n', "0 windows"),
        ("not JSON\n", "line 1 .* is not JSON"),
        ('{"text": "a"}\n{"prompt": "a"}\n', "line 2 .* has no text"),
        ('{"text": 7}\n', "line 1 .* has no text"),
        ('["text"]\n', "line 1 .* has no text"),
        ("[" * 200 + "]" * 200 + "\n", "line 1 .* is not JSON"),
    ],
)
def test_bad_text_is_refused(material: Material, tmp_path: Path, calibrate: Calibrate, lines: str, said: str) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "calibration.jsonl").write_text(lines)
    error = refused(calibrate, material.model, data)
    assert error.reason == "CALIBRATION_DATA_INVALID"
    assert re.search(said, error.message)


def test_missing_text_and_tokenizer_are_refused(material: Material, tmp_path: Path, calibrate: Calibrate) -> None:
    (tmp_path / "empty").mkdir()
    assert refused(calibrate, material.model, tmp_path / "empty").reason == "CALIBRATION_DATA_INVALID"
    bare = tmp_path / "bare"
    shutil.copytree(material.model, bare)
    for path in bare.glob("tokenizer*"):
        path.unlink()
    assert refused(calibrate, bare, material.data).reason == "CALIBRATION_DATA_INVALID"


def test_weights_that_are_not_finite_are_refused(material: Material, tmp_path: Path, calibrate: Calibrate) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(material.model, broken)
    weights = load_file(broken / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    error = refused(calibrate, broken, material.data, method="gptq")
    assert error.reason == "NON_FINITE_WEIGHTS"
    assert "model.layers.0.mlp.up_proj.weight" in error.message


def test_models_that_cannot_be_calibrated_are_named(tmp_path: Path, material: Material, calibrate: Calibrate) -> None:
    config = tf.WhisperConfig(
        vocab_size=64,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 0),
    )
    tf.WhisperForConditionalGeneration(config).save_pretrained(tmp_path / "whisper")
    error = refused(calibrate, tmp_path / "whisper", material.data)
    assert error.reason == "CALIBRATION_UNSUPPORTED"
    assert "sound" in error.message
    gpt2 = tf.GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=1, n_head=2)
    tf.GPT2LMHeadModel(gpt2).save_pretrained(tmp_path / "gpt2")
    assert refused(calibrate, tmp_path / "gpt2", material.data).reason == "CALIBRATION_UNSUPPORTED"


def test_layers_whose_width_no_group_divides_are_left_out(
    tmp_path: Path, material: Material, calibrate: Calibrate
) -> None:
    tiny = save_tiny(tmp_path / "tiny", hidden_size=96, vocab_size=1024)
    for path in material.model.glob("tokenizer*"):
        shutil.copyfile(path, tiny / path.name)
    folder, _ = calibrate(tiny, material.data, method="gptq", group_size=128)
    assert {name.split(".")[-2] for name in description(folder)["weights"]} == {"o_proj", "down_proj"}
    error = refused(calibrate, tiny, material.data, method="gptq", group_size=256)
    assert error.reason == "QUANTIZATION_UNSUPPORTED"


def test_text_with_unknown_tokens_is_refused(tmp_path: Path, material: Material, calibrate: Calibrate) -> None:
    tiny = save_tiny(tmp_path / "tiny")
    for path in material.model.glob("tokenizer*"):
        shutil.copyfile(path, tiny / path.name)
    error = refused(calibrate, tiny, write_data(tmp_path / "data", ["def f(): return 1\n" * 400]))
    assert error.reason == "CALIBRATION_DATA_INVALID"
    assert "512" in error.message
