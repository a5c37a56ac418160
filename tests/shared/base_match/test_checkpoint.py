"""What an adapter's own files tell of a base: shapes of its factors, the class it was trained on, its tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipway.base_match import BaseMatchStatus
from slipway.errors import CheckpointValidationError
from support.models.matched_models import (
    LAYERS,
    judge,
    make_adapter,
    make_model,
    make_tokenizer,
    weights,
)


@pytest.mark.parametrize(
    ("adapter_has", "says"),
    [({"hidden": 32}, "lora_A.weight"), ({"layers": LAYERS + 2}, "model.layers.3")],
)
def test_an_adapter_of_another_size_is_refused_from_headers(tmp_path: Path, adapter_has: dict, says: str) -> None:
    adapter = make_adapter(tmp_path / "run" / "checkpoint-1", **adapter_has)
    used = make_model(tmp_path / "used")
    with pytest.raises(CheckpointValidationError, match=says) as error:
        judge(used, adapter, contents=False)
    assert error.value.reason == "ADAPTER_BASE_MISMATCH"


@pytest.mark.parametrize(
    "config",
    [
        {"peft_type": "LOHA"},
        {"layer_replication": [[0, 2], [1, 3]]},
        {"use_qalora": True},
        {"target_parameters": ["mlp.experts.gate_up_proj"]},
    ],
)
def test_forms_that_are_not_understood_get_no_verdict(tmp_path: Path, config: dict) -> None:
    adapter = make_adapter(tmp_path / "run" / "checkpoint-1", hidden=32, layers=LAYERS + 2, **config)
    assert judge(make_model(tmp_path / "used"), adapter).status is BaseMatchStatus.UNPROVEN


def test_weights_stored_the_other_way_round_and_from_the_bare_model_fit(tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "run" / "checkpoint-1")
    tensors = {name.removeprefix("model."): tensor.t().contiguous() for name, tensor in weights().items()}
    assert judge(make_model(tmp_path / "used", tensors), adapter).status is BaseMatchStatus.UNPROVEN


@pytest.mark.parametrize(
    ("library", "refused"),
    [
        ("transformers.models.qwen3.modeling_qwen3", False),
        ("transformers.models.gpt2.modeling_gpt2", True),
        ("transformers_modules.mine.modeling_mine", False),
        (["transformers"], False),
    ],
)
def test_the_class_that_was_trained_tells(tmp_path: Path, library: object, refused: bool) -> None:
    mapping = {"base_model_class": "Model", "parent_library": library}
    adapter = make_adapter(tmp_path / "run" / "checkpoint-1", auto_mapping=mapping)
    used = make_model(tmp_path / "used")
    if not refused:
        assert judge(used, adapter).status is BaseMatchStatus.UNPROVEN
        return
    with pytest.raises(CheckpointValidationError, match="gpt2"):
        judge(used, adapter)


def test_added_tokens_make_no_other_tokenizer(tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "run" / "checkpoint-1")
    make_tokenizer(adapter, added=3)
    assert judge(make_model(tmp_path / "used"), adapter).status is BaseMatchStatus.UNPROVEN
