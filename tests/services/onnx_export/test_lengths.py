"""Where a model computes otherwise beyond a length, its graph does too, or the export says that nobody has looked."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import transformers
from safetensors.torch import save_file

from slipway.errors import ModelExportError, ONNXExportError, TracerWarningError
from slipway_onnx_export.engines import legacy
from slipway_onnx_export.interface import room_of
from slipway_onnx_export.loading import weightless
from slipway_onnx_export.parity.lengths import lengths_of, room_beyond
from slipway_onnx_export.source import open_source
from support.models.onnx_models import Exported
from support.models.table_models import ROWS, Row, make_row

_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
_LEGACY = {"engine": "legacy", "opset": 17}
_PROVE = {**_LEGACY, "tracer_warnings": "prove"}


def _model(row: str, folder: Path, **settings: Any) -> Path:
    found = next(each for each in ROWS if each.name == row)
    return make_row(Row(row, found.model, {**found.settings, **settings}), folder)


def _dynamic(folder: Path, *, trained: int = 16) -> Path:
    return _model("Llama", folder, rope_parameters=_DYNAMIC, max_position_embeddings=trained)


def _long(folder: Path, *, original: int = 16, **settings: Any) -> Path:
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": original,
        "long_factor": [4.0] * 4, "short_factor": [1.0] * 4,
    }  # fmt: skip
    sizes = {"max_position_embeddings": 4 * original, "original_max_position_embeddings": original}
    return _model("Phi-3", folder, rope_parameters=rope, sliding_window=None, **sizes, **settings)


def _difference(source: Path, made: Exported, length: int) -> float:
    """Compare with a model that has seen no longer text, whose frequencies transformers would keep."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source, attn_implementation="eager").eval()
    session = onnxruntime.InferenceSession(made.folder / "model.onnx")
    ids = np.random.default_rng(0).integers(3, 60, (1, length))
    feed = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(length)[None]}
    past = {
        port.name: np.zeros([1, port.shape[1], 0, port.shape[3]], np.float32)
        for port in session.get_inputs()
        if port.name.startswith("past_key_values")
    }
    with torch.no_grad():
        right = model(torch.from_numpy(ids)).logits.numpy()
    return float(np.abs(session.run(["logits"], feed | past)[0] - right).max())


@pytest.mark.parametrize(
    "params",
    [
        pytest.param({}, marks=pytest.mark.slow),
        _LEGACY,
        pytest.param({"cache": False, **_LEGACY}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_rotary_embeddings_grow_with_the_text(
    export: Callable[..., Exported], tmp_path: Path, params: dict[str, Any]
) -> None:
    """Until now, the trace lost the growth, and texts of the trained length proved that harmless."""
    source = _dynamic(tmp_path / "model")
    made = export(source, **params)
    assert made.facts["thresholds"] == {"16": "compared"}
    assert json.loads((made.folder / "onnx_export.json").read_text())["thresholds"] == {"16": "compared"}
    assert "proven_harmless" not in made.facts
    if params.get("cache", True):
        assert max(_difference(source, made, length) for length in (10, 16, 17, 40, 100)) < 1e-5


def test_rotary_embeddings_that_grow_are_not_built(export: Callable[..., Exported], tmp_path: Path) -> None:
    with pytest.raises(ModelExportError) as caught:
        export(_dynamic(tmp_path / "model"), engine="mobius")
    assert caught.value.reason == "EXPORT_ENGINE_UNSUPPORTED"
    assert "rotary" in caught.value.message


@pytest.mark.parametrize("trained", [16, 600])
def test_a_trace_that_loses_the_growth_is_found(
    export: Callable[..., Exported], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: int
) -> None:
    """No text of 600 tokens is computed: the positions of a few tokens pass the threshold."""
    monkeypatch.setattr(weightless, "compute_frequencies_in_graph", lambda _: None)
    with pytest.raises(ONNXExportError) as caught:
        export(_dynamic(tmp_path / "model", trained=trained), **_PROVE)
    assert caught.value.reason == "EXPORT_PARITY_FAILED"
    assert str(caught.value.about["case"]).startswith(f"past {trained} tokens")


@pytest.mark.parametrize("original", [16, pytest.param(600, marks=pytest.mark.slow)])
def test_a_graph_with_one_of_two_sets_of_frequencies_is_found(
    export: Callable[..., Exported], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, original: int
) -> None:
    source = _long(tmp_path / "model", original=original)
    assert export(source).facts["thresholds"] == {str(original): "compared"}
    build = legacy.build_weightless

    def build_short(source: Any, **how: Any) -> Any:
        config = copy.deepcopy(source.config)
        config.rope_parameters["long_factor"] = config.rope_parameters["short_factor"]
        return build(replace(source, config=config), **how)

    monkeypatch.setattr(legacy, "build_weightless", build_short)
    with pytest.raises(ONNXExportError) as caught:
        export(source, **_PROVE)
    assert str(caught.value.about["case"]).startswith(f"past {original} tokens")


def test_two_sets_of_frequencies_in_old_opsets(export: Callable[..., Exported], tmp_path: Path) -> None:
    """The legacy tracer cannot write the buffer in which transformers' code keeps them."""
    source = _long(tmp_path / "model")
    made = export(source, **_LEGACY)
    assert max(_difference(source, made, length) for length in (10, 16, 17, 40)) < 1e-5


def test_a_branch_is_not_proven_where_nothing_is_compared(
    export: Callable[..., Exported], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An encoder takes no positions, and a text of 600 tokens takes too long."""
    rope = {"full_attention": _DYNAMIC, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    source = _model("ModernBERT, masked", tmp_path / "model", rope_parameters=rope, max_position_embeddings=600)
    made = export(source, **_LEGACY)
    assert made.facts["thresholds"] == {"600": "not compared: a text of more than 600 tokens would take too long"}
    assert any("not compared beyond 600 tokens" in warning for warning in made.facts["warnings"])
    monkeypatch.setattr(weightless, "compute_frequencies_in_graph", lambda _: None)
    with pytest.raises(TracerWarningError) as caught:
        export(source, **_PROVE)
    assert (caught.value.reason, caught.value.about["tokens"]) == ("TRACER_WARNING", "600")
    assert "beyond 600 tokens, where the model computes otherwise" in caught.value.message


@pytest.mark.slow
def test_static_graphs_end_where_positions_count_otherwise(export: Callable[..., Exported], tmp_path: Path) -> None:
    """Calls of a fixed length cut a text, and cached keys keep the rotation of their call."""
    source = _long(tmp_path / "model")
    with pytest.raises(ONNXExportError, match="beyond 16 tokens its positions count otherwise") as caught:
        export(source, shapes="static", sequence=1, past=40)
    assert caught.value.reason == "SHAPES_UNSUPPORTED"
    made = export(source, engine="dynamo", shapes="static")
    assert (made.facts["fixed_sizes"]["sequence"], made.facts["fixed_sizes"]["past_sequence"]) == (1, 15)


def test_how_each_threshold_is_passed(tmp_path: Path) -> None:
    source = open_source(_long(tmp_path / "long", original=600))
    assert lengths_of(source, room=2400).positions == (600,)
    assert lengths_of(source, room=600).record == {}
    assert "too few" in lengths_of(source, room=602).record["600"]
    assert "too long" in lengths_of(source, room=2400, shared=True).record["600"]
    assert room_beyond(source) == 0
    grows = open_source(_dynamic(tmp_path / "dynamic"))
    assert lengths_of(grows, room=room_beyond(grows)).texts == (16,)


@pytest.mark.parametrize(
    ("name", "model", "settings", "room"),
    [
        ("Whisper", "ForConditionalGeneration", {"pad_token_id": 50257}, 448),
        ("Bart", "ForConditionalGeneration", {"pad_token_id": 1}, 1024),
        ("ModernBert", "ForMaskedLM", {"pad_token_id": 50283}, 8192),
        ("Roberta", "ForMaskedLM", {"max_position_embeddings": 514, "pad_token_id": 1}, 512),
    ],
)
def test_only_encoders_that_count_from_their_padding_token_lose_places(
    name: str, model: str, settings: dict[str, Any], room: int, tmp_path: Path
) -> None:
    config = getattr(transformers, f"{name}Config")(architectures=[name + model], **settings)
    config.save_pretrained(tmp_path)
    save_file({"unused": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert room_of(open_source(tmp_path)) == room
