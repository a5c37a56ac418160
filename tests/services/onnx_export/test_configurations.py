"""Unusual configurations are exported correctly or refused by name; none ends in an error of a library."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipway.errors import ModelExportError
from support.models.onnx_models import Exported
from support.models.table_models import ROWS, make_row

_LONG_ROPE = {
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16, "long_factor": [4.0] * 4,
        "short_factor": [1.0] * 4,
    },
    "original_max_position_embeddings": 16,
    "sliding_window": 262144,
}  # fmt: skip


def _model(name: str, folder: Path, changes: dict[str, Any]) -> Path:
    """Save a row's model whose configuration is changed afterwards; its weights stay."""
    make_row(next(row for row in ROWS if row.name == name), folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def _built(name: str, folder: Path, changes: dict[str, Any]) -> Path:
    """Save a row's model that is made with changed settings."""
    row = next(row for row in ROWS if row.name == name)
    return make_row(type(row)(row.name, row.model, {**row.settings, **changes}), folder)


@pytest.mark.parametrize(
    ("name", "changes", "word"),
    [
        ("Llama", {"hidden_act": "foo"}, "foo"),
        ("Llama", {"num_attention_heads": 0}, "llama"),
        ("Llama", {"rope_parameters": {"rope_type": "foo", "rope_theta": 1e4}}, "foo"),
        ("Llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "yarn"),
        ("Llama", {"vocab_size": 0}, "LlamaForCausalLM"),
        ("Llama", {"hidden_size": 30}, "llama"),
        ("Mistral, window", {"sliding_window": "8"}, "sliding_window"),
        ("Gemma 3, window", {"layer_types": ["foo", "bar"]}, "gemma3_text"),
        ("Gemma 3, window", {"layer_types": ["sliding_attention"]}, "gemma3_text"),
        ("RoBERTa, questions", {"pad_token_id": 5000}, "RobertaForQuestionAnswering"),
    ],
    ids=str,
)
def test_configurations_of_which_nothing_can_be_built(
    export: Callable[..., Exported], tmp_path: Path, name: str, changes: dict[str, Any], word: str
) -> None:
    with pytest.raises(ModelExportError) as caught:
        export(_model(name, tmp_path / "model", changes), parity="never")
    assert caught.value.reason == "BASE_MODEL_INVALID"
    assert word in caught.value.message


def test_a_number_of_layers_below_zero_is_refused_by_the_engine(
    export: Callable[..., Exported], tmp_path: Path
) -> None:
    with pytest.raises(ModelExportError) as caught:
        export(_model("Llama", tmp_path / "model", {"num_hidden_layers": -1}), parity="never")
    assert caught.value.reason in ("EXPORT_ENGINE_FAILED", "BASE_MODEL_INVALID")


@pytest.mark.parametrize("end", [99999, -1, [2, 99999]], ids=str)
def test_an_end_of_text_beyond_the_vocabulary_is_not_used(
    export: Callable[..., Exported], tmp_path: Path, end: object
) -> None:
    made = export(_model("Llama", tmp_path / "model", {"eos_token_id": end}), parity="never")
    assert {"loads", "caches"} <= {name for name, result in made.facts["checks"].items() if result == "passed"}


@pytest.mark.parametrize("engine", ["mobius", pytest.param("dynamo", marks=pytest.mark.slow)])
def test_factors_for_long_texts_apply_beyond_the_original_length(
    export: Callable[..., Exported], tmp_path: Path, engine: str
) -> None:
    """Phi-3's: its window is wider than its positions, so no text fills it."""
    import onnxruntime
    import torch
    import transformers

    source = _built("Phi-3", tmp_path / "model", _LONG_ROPE)
    made = export(source, engine=engine)
    assert made.facts["parity"] == "passed"
    model = transformers.AutoModelForCausalLM.from_pretrained(source, attn_implementation="eager").eval()
    session = onnxruntime.InferenceSession(str(made.folder / "model.onnx"))
    for length in (10, 40):
        ids = np.random.default_rng(0).integers(3, 60, (1, length))
        feed = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(length)[None]}
        names = {port.name: port for port in session.get_inputs()}
        past = {
            name: np.zeros([1, port.shape[1], 0, port.shape[3]], np.float32)
            for name, port in names.items()
            if name.startswith("past_key_values")
        }
        found = session.run(["logits"], {name: value for name, value in feed.items() if name in names} | past)[0]
        with torch.no_grad():
            right = model(torch.from_numpy(ids)).logits.numpy()
        assert np.abs(found - right).max() < 1e-5
