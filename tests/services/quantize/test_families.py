"""Every family at every PyTorch level: transformers loads it by itself, and it computes what its dequantized weights do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from slipway.errors import ModelExportError
from slipway.stage import Context
from support.models.family_models import CASES, given_by, make_family_model
from support.models.merge_models import make_family

Quantize = Callable[..., tuple[Path, Context]]
KINDS = sorted(CASES)
BY_HEART = ("gpt2", "marian", "t5", "whisper", "roberta-classes")


def given(kind: str, folder: Path) -> torch.Tensor:
    """Return what plain transformers computes with a folder, in float32."""
    model, loading = type(CASES[kind].model()).from_pretrained(folder, output_loading_info=True)
    assert not any(loading.values()), loading
    half = model.dtype in (torch.float16, torch.bfloat16)
    return given_by(model.float() if half else model, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_weights_compute_what_the_dequantized_ones_do(quantize: Quantize, tmp_path: Path, kind: str) -> None:
    source = make_family_model(kind, tmp_path / "source")
    packed, ctx = quantize(source, format="pytorch", level="int8")
    dense, _ = quantize(source, format="pytorch", level="int8", packed=False)
    assert ctx.facts["check"] == "passed"
    ours, exact = given(kind, packed), given(kind, source)
    assert torch.equal(ours, given(kind, dense))
    assert 0 < (ours - exact).abs().max() < 0.1 * exact.std()
    assert (packed / "model.safetensors").stat().st_size < (source / "model.safetensors").stat().st_size


@pytest.mark.parametrize("level", ["int8", "int4"])
def test_an_encoder_runs_where_sentence_transformers_calls_forward_itself(
    quantize: Quantize, tmp_path: Path, level: str
) -> None:
    """No hook of compressed-tensors runs then."""
    source = make_family_model("bert-features", tmp_path / "source")
    output, _ = quantize(source, format="pytorch", level=level)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        found, exact = (
            tf.AutoModel.from_pretrained(folder).eval().forward(ids).last_hidden_state for folder in (output, source)
        )
    assert 0 < (found - exact).abs().max() < (0.1 if level == "int8" else 0.6) * exact.std()


@pytest.mark.parametrize("kind", BY_HEART)
@pytest.mark.parametrize("level", ["fp16", "bf16", "int4"])
def test_other_levels_load_and_compute(quantize: Quantize, tmp_path: Path, kind: str, level: str) -> None:
    source = make_family_model(kind, tmp_path / "source")
    output, ctx = quantize(source, format="pytorch", level=level)
    assert ctx.facts["check"] == "passed"
    ours, exact = given(kind, output), given(kind, source)
    assert 0 < (ours - exact).abs().max() < (0.03 if level != "int4" else 0.6) * exact.std()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if CASES[kind].saved])
def test_heads_stay_as_they_are(quantize: Quantize, tmp_path: Path, kind: str) -> None:
    source = make_family_model(kind, tmp_path / "source")
    output, _ = quantize(source, format="pytorch", level="int4")
    before, after = load_file(source / "model.safetensors"), load_file(output / "model.safetensors")
    heads = [name for name in before if name.startswith(CASES[kind].saved)]
    assert heads
    assert all(torch.equal(before[name], after[name]) for name in heads)
    config = json.loads((output / "config.json").read_text())
    assert {name.removesuffix(".weight") for name in heads if before[name].dim() > 1} <= set(
        config["quantization_config"]["ignore"]
    )


def test_a_tie_is_kept_where_more_than_the_head_depends_on_it(quantize: Quantize, tmp_path: Path) -> None:
    for kind in ("marian", "t5", "bert-masked", "gpt2"):
        output, ctx = quantize(make_family_model(kind, tmp_path / kind), format="pytorch", level="int8")
        assert json.loads((output / "config.json").read_text()).get("tie_word_embeddings", True) is True
        assert ctx.facts["lm_head_untied"] is False


def test_a_tensor_that_the_model_has_no_use_for_travels_along(quantize: Quantize, tmp_path: Path) -> None:
    """Checkpoints of BERT on the hub have a head of their first training, too."""
    source = make_family_model("bert-masked", tmp_path / "source")
    tensors = load_file(source / "model.safetensors") | {"cls.seq_relationship.weight": torch.ones(2, 32)}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    for level in ("fp16", "int8"):
        output, ctx = quantize(source, format="pytorch", level=level)
        assert ctx.facts["check"] == "passed"
        assert "cls.seq_relationship.weight" in load_file(output / "model.safetensors")


def test_a_model_without_its_head_is_refused_at_each_level(quantize: Quantize, tmp_path: Path) -> None:
    source = make_family_model("bert-classes", tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    del tensors["classifier.weight"]
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    for level in ("bf16", "int8"):
        with pytest.raises(ModelExportError, match=r"classifier\.weight") as caught:
            quantize(source, format="pytorch", level=level)
        assert caught.value.reason == "QUANTIZATION_FAILED"


@pytest.mark.parametrize(("kind", "named"), [("vit", "ViTForImageClassification"), ("t5 without a head", "T5Model")])
def test_a_family_that_is_not_known_is_cast_and_not_rounded(
    quantize: Quantize, tmp_path: Path, kind: str, named: str
) -> None:
    source = tmp_path / "source"
    make_family(kind).save_pretrained(source)
    _, ctx = quantize(source, format="pytorch", level="bf16")
    assert ctx.facts["check"] == f"not run: the inputs and outputs of a {named} are unknown"
    with pytest.raises(ModelExportError, match=named) as caught:
        quantize(source, format="pytorch", level="int8")
    assert caught.value.reason == "FAMILY_UNSUPPORTED"
