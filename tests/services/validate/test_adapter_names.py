"""An adapter whose names peft does not look for is the same reference; one that cannot be placed is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from slipway.proof.runtime import UnplacedTensors, Unusable, padded, run_segments
from slipway_validate.runner.main import _to_result
from slipway_validate.runner.runtime_reference import load, match_names
from support.models import tiny_models

PREFIX = "base_model.model."
NAMES: dict[str, Callable[[str], str]] = {
    "compiled": lambda name: name.replace(PREFIX, f"{PREFIX}_orig_mod."),
    "unprefixed": lambda name: name.removeprefix(PREFIX),
    "wrapped": lambda name: f"module.{name}",
    "older": lambda name: name.replace(f"{PREFIX}model.", f"{PREFIX}model.decoder."),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make_base(tmp_path_factory.mktemp("names") / "base")


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    torch.manual_seed(2)
    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=["q_proj", "embed_tokens"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(
        tmp_path / "adapter", save_embedding_layers=False
    )
    return tmp_path / "adapter"


def rename(adapter: Path, name_of: Callable[[str], str]) -> None:
    weights = adapter / "adapter_model.safetensors"
    tensors = {name_of(name): tensor.clone() for name, tensor in load_file(weights).items()}
    save_file(tensors, weights, metadata={"format": "pt"})


def logits(base: Path, adapter: Path, *, alone: bool = False) -> np.ndarray:
    ids, mask = padded([np.arange(1, 11)], side="left", token=0)
    model = load(base, adapter, threads=1)
    if alone:
        with model.without_adapter():
            return next(iter(run_segments(model, ids, mask, (10,))))[1]
    return next(iter(run_segments(model, ids, mask, (10,))))[1]


@pytest.mark.parametrize("names", NAMES)
def test_other_names_give_the_same_reference(base: Path, adapter: Path, names: str) -> None:
    expected = logits(base, adapter)
    assert np.abs(expected - logits(base, adapter, alone=True)).max() > 1e-3
    rename(adapter, NAMES[names])
    assert np.array_equal(logits(base, adapter), expected)


def test_names_that_say_nothing_make_no_reference(base: Path, adapter: Path) -> None:
    rename(adapter, lambda name: name.replace("q_proj", "query"))
    with pytest.raises(
        Unusable, match=r"ignores 4 tensors of the adapter 'adapter', first .*layers\.0\.self_attn\.query"
    ):
        load(base, adapter, threads=1)


def test_layers_of_the_same_number_are_told_apart() -> None:
    """Both ends are the same from the layer on; what comes before says which is the picture's."""
    shape = (4, 8)
    old = {"language_model.model.layers.0.q.lora_A.weight": shape, "vision.encoder.layers.0.q.lora_A.weight": shape}
    new = {
        "model.language_model.layers.0.q.lora_A.weight": shape,
        "model.vision.encoder.layers.0.q.lora_A.weight": shape,
    }
    assert match_names(old, new) == dict(zip(old, new, strict=True))
    # One alone could be either.
    assert match_names({"language_model.model.layers.0.q.lora_A.weight": shape}, new) == {}
    # Another shape is another tensor.
    assert match_names(old, dict.fromkeys(new, (8, 8))) == {}


def test_resized_embeddings_under_other_names_are_taken_too(base: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(model.get_input_embeddings().num_embeddings + 3, mean_resizing=False)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    torch.nn.init.normal_(model.get_input_embeddings().weight)
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    expected = logits(base, tmp_path / "adapter")
    rename(tmp_path / "adapter", NAMES["wrapped"])
    assert np.array_equal(logits(base, tmp_path / "adapter"), expected)


def test_a_reference_without_a_tensors_place_is_not_run_by_name() -> None:
    found = _to_result(UnplacedTensors("2 factors of the adapter 'adapter', first 'x', reach no layer of the model"))
    assert found.status == "not_run"
    assert found.message.startswith("the reference was not run: 2 factors of the adapter 'adapter', first 'x'")
    assert found.reason == "VALIDATION_IMPOSSIBLE"
