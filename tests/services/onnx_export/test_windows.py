"""A graph that does not keep to the attention window of its model is found, whatever the window's length, or a warning says that it was not looked for."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipway.errors import ONNXExportError
from slipway.model.limits import window_of
from slipway_onnx_export.engines import legacy
from slipway_onnx_export.parity import lengths
from slipway_onnx_export.source import open_source
from support.models.onnx_models import Exported
from support.models.table_models import ROWS, Row, make_row

_LEGACY = {"engine": "legacy", "opset": 17, "tracer_warnings": "prove"}
_KINDS = ["sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("config", "settings", "window"),
    [
        ("Mistral", {"sliding_window": 4096}, 4096),
        ("Mistral", {"sliding_window": None}, 0),
        ("Qwen2", {"sliding_window": 4096, "use_sliding_window": False}, 0),
        ("Gemma3Text", {"sliding_window": 512, "layer_types": _KINDS, "num_hidden_layers": 2}, 512),
        ("Gemma3Text", {"sliding_window": 512, "layer_types": _KINDS[1:], "num_hidden_layers": 1}, 0),
        ("Llama4Text", {"attention_chunk_size": 64}, 64),
        ("GPTNeo", {}, 256),
        ("GPTNeo", {"attention_types": [[["global"], 24]]}, 0),
        ("ModernBert", {}, 64),
        ("Longformer", {"attention_window": [8, 16], "num_hidden_layers": 2}, 16),
        ("LongT5", {}, 127),
        ("BigBird", {"block_size": 16}, 176),
        ("BigBird", {"attention_type": "original_full"}, 0),
        ("GPT2", {}, 0),
        ("Bert", {}, 0),
    ],
)
def test_the_window_of_a_configuration(config: str, settings: dict[str, Any], window: int) -> None:
    import transformers

    assert window_of(getattr(transformers, f"{config}Config")(**settings)) == window


def _model(row: str, folder: Path, **settings: Any) -> Path:
    found = next(each for each in ROWS if each.name == row)
    return make_row(Row(row, found.model, {**found.settings, "max_position_embeddings": 2048, **settings}), folder)


def _forget(monkeypatch: pytest.MonkeyPatch, **changed: Any) -> None:
    """Let the engine trace a model with other settings, as an engine does that drops the window."""
    build = legacy.build_weightless

    def build_other(source: Any, **how: Any) -> Any:
        config = copy.deepcopy(source.config)
        for name, value in changed.items():
            setattr(config, name, value)
        return build(replace(source, config=config), **how)

    monkeypatch.setattr(legacy, "build_weightless", build_other)


@pytest.mark.parametrize(
    ("row", "settings", "traced"),
    [
        *(("Mistral, window", {}, traced) for traced in (None, 601, 599)),
        pytest.param("Gemma 3, window", {"layer_types": _KINDS}, 601, marks=pytest.mark.slow),
    ],
)
def test_a_long_window_that_a_graph_does_not_keep_to(
    tmp_path: Path,
    export: Callable[..., Exported],
    monkeypatch: pytest.MonkeyPatch,
    row: str,
    settings: dict[str, Any],
    traced: int | None,
) -> None:
    """No text of so many tokens is computed: the cache is made up."""
    source = _model(row, tmp_path / "model", sliding_window=600, **settings)
    _forget(monkeypatch, sliding_window=traced or 1 << 20)
    with pytest.raises(ONNXExportError) as caught:
        export(source, **_LEGACY)
    assert caught.value.reason == "EXPORT_PARITY_FAILED"
    assert "beyond the sliding window, of a made-up past" in caught.value.about["case"]
    assert float(caught.value.about["max_abs_diff"]) > 0.1


def test_a_long_window_that_a_graph_keeps_to(tmp_path: Path, export: Callable[..., Exported]) -> None:
    """Activations too: attention maps reach back to the first token, transformers' only to the window."""
    source = _model("Mistral, window", tmp_path / "model", sliding_window=600)
    watched = {"layers": ("0", "1"), "kinds": ("attentions", "hidden_states")}
    exported = export(source, activations=watched, **_LEGACY)
    assert exported.facts["window"] == "compared"
    assert exported.facts["parity_activations"] < 1e-4
    assert json.loads((exported.folder / "onnx_export.json").read_text())["window"] == "compared"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "settings", "forgotten"),
    [
        ("GPT-Neo", {"window_size": 256}, {"window_size": 2048}),
        ("ModernBERT, masked", {"local_attention": 128}, {"local_attention": 2048}),
    ],
)
def test_windows_of_other_names(
    tmp_path: Path,
    export: Callable[..., Exported],
    monkeypatch: pytest.MonkeyPatch,
    row: str,
    settings: dict[str, Any],
    forgotten: dict[str, Any],
) -> None:
    source = _model(row, tmp_path / "model", **settings)
    assert export(source, **_LEGACY).facts["window"] == "compared"
    _forget(monkeypatch, **forgotten)
    with pytest.raises(ONNXExportError) as caught:
        export(source, **_LEGACY)
    assert "beyond the sliding window" in caught.value.about["case"]


def test_a_window_that_is_not_compared_is_said_so(
    tmp_path: Path, export: Callable[..., Exported], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = _model("Mistral, window", tmp_path / "model", sliding_window=600)
    exported = export(source, cache=False, **_LEGACY)
    assert exported.facts["window"] == "not compared: a text beyond the window of 600 tokens would take too long"
    assert any("beyond its attention window" in warning for warning in exported.facts["warnings"])
    monkeypatch.setattr(lengths, "_SMALL", 0)
    exported = export(source, **_LEGACY)
    assert "for keys and values of the window of 600 tokens" in exported.facts["window"]
    assert lengths.reach_of(open_source(source), room=2048, spare_bytes=0).past == 0
    assert any("beyond its attention window" in warning for warning in exported.facts["warnings"])


def test_a_window_that_no_text_passes_needs_no_warning(tmp_path: Path, export: Callable[..., Exported]) -> None:
    source = _model("Mistral, window", tmp_path / "model", sliding_window=600, max_position_embeddings=512)
    exported = export(source, **_LEGACY)
    assert not {"window", "warnings"} & set(exported.facts)
    source = _model("Mistral, window", tmp_path / "longer", sliding_window=600)
    found = lengths.reach_of(open_source(source), room=512)
    assert (found.record, found.matters) == ("not compared: no text of 512 tokens at most is beyond 600", False)
