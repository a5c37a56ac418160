"""Families beside decoders: the stage finds their blocks, their heads and what is compared."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from slipway.stage import Context
from slipway_quantize.calibration.streaming.model import StreamedModel
from slipway_quantize.calibration.streaming.walk import BlockWalk
from slipway_quantize.calibration.windows import Windows
from support.models.calibrated_models import Material

Calibrate = Callable[..., tuple[Path, Context]]
BERT: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
MARIAN: dict[str, Any] = {
    "vocab_size": 1024,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
}
T5: dict[str, Any] = {"vocab_size": 1024, "d_model": 64, "d_kv": 32, "d_ff": 128, "num_layers": 2, "num_heads": 2}
QWEN: dict[str, Any] = {**BERT, "num_key_value_heads": 2, "head_dim": 32}
MODELS: dict[str, Callable[[], Any]] = {
    "bert classifier": lambda: tf.BertForSequenceClassification(tf.BertConfig(**BERT, num_labels=3)),
    "bert token classifier": lambda: tf.BertForTokenClassification(tf.BertConfig(**BERT, num_labels=3)),
    "bert question answering": lambda: tf.BertForQuestionAnswering(tf.BertConfig(**BERT)),
    "bert masked language model": lambda: tf.BertForMaskedLM(tf.BertConfig(**BERT)),
    "bert feature extraction": lambda: tf.BertModel(tf.BertConfig(**BERT)),
    "distilbert classifier": lambda: tf.DistilBertForSequenceClassification(
        tf.DistilBertConfig(vocab_size=1024, dim=64, hidden_dim=128, n_layers=2, n_heads=2, num_labels=3)
    ),
    "qwen3 classifier": lambda: tf.Qwen3ForSequenceClassification(tf.Qwen3Config(**QWEN, num_labels=3)),
    "gemma3": lambda: tf.Gemma3ForCausalLM(
        tf.Gemma3TextConfig(**{**QWEN, "num_key_value_heads": 1, "sliding_window": 16})
    ),
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**{**BERT, "num_key_value_heads": 1})),
    "marian": lambda: tf.MarianMTModel(tf.MarianConfig(**MARIAN)),
    "bart": lambda: tf.BartForConditionalGeneration(tf.BartConfig(**MARIAN)),
    "t5": lambda: tf.T5ForConditionalGeneration(tf.T5Config(**T5, decoder_start_token_id=0)),
    "phi3": lambda: tf.Phi3ForCausalLM(tf.Phi3Config(**{**BERT, "num_key_value_heads": 2})),
}


def save(name: str, folder: Path) -> Path:
    torch.manual_seed(1)
    model = MODELS[name]()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.1)  # results that differ, unlike those of a fresh model
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ["bart", "gemma3", "marian", "t5"])
def test_blocks_one_by_one_compute_what_the_model_does(name: str, tmp_path: Path) -> None:
    """An encoder's results reach all of the decoder's blocks, beside what these give to each other."""
    model = StreamedModel(save(name, tmp_path / "model"), group_size=32, head=True)
    first = torch.arange(1, 25) * 37 % 1024
    batches = [Windows((), (), "", 0, model.start).batch([first, first[:9] + 5])]
    walk = BlockWalk(model, batches, tmp_path)
    for index in range(len(walk.names) - 1):
        walk.keep(index, [0])
        walk.drop(index)
    ((_, found),) = walk.compute(len(walk.names) - 1, [0])
    with torch.no_grad():
        torch.testing.assert_close(found["0"], model.outputs(batches[0]))
    mine = getattr(tf, model.family.auto_class).from_pretrained(tmp_path / "model").eval()
    given = {"decoder_input_ids": torch.cat([torch.tensor([0]), first])[None]} if model.start else {}
    with torch.no_grad():
        exact = mine(input_ids=first[None], **given).logits[0]
    torch.testing.assert_close(found["0"][: len(exact)], exact, rtol=1e-4, atol=1e-4)
    walk.drop(len(walk.names) - 1)
    assert not list(tmp_path.glob("inputs-*"))


@pytest.mark.parametrize("name", [name for name in sorted(MODELS) if name.endswith(" classifier")])
def test_a_classifier_of_texts_is_tuned_by_the_states_of_its_tokens(name: str, tmp_path: Path) -> None:
    model = StreamedModel(save(name, tmp_path / "model"), group_size=32, head=True)
    batch = Windows((), (), "", 0, None).batch([torch.arange(1, 25), torch.arange(1, 10)])
    with torch.no_grad():
        found = model.tuned_results(batch)
        results = model.outputs(batch)
    assert len(found) == 24 + 9
    if name == "bert token classifier":  # has classes for each token anyway
        torch.testing.assert_close(found, results)
        return
    mine = tf.AutoModel.from_pretrained(tmp_path / "model").eval()
    with torch.no_grad():
        exact = mine(input_ids=batch.tokens, attention_mask=batch.mask).last_hidden_state[batch.mask == 1]
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_family_is_calibrated(name: str, material: Material, tmp_path: Path, calibrate: Calibrate) -> None:
    save(name, tmp_path / "model")
    for path in material.model.glob("tokenizer*"):
        shutil.copyfile(path, tmp_path / "model" / path.name)
    folder, ctx = calibrate(tmp_path / "model", material.data, time_budget_seconds=2)
    measured = ctx.facts["divergence"]
    assert measured["gptq"] < measured["rtn"]
    weights = json.loads((folder / "calibration.json").read_text())["weights"]
    assert len(weights) >= 8
    best = min(measured, key=measured.__getitem__)
    assert ({each["method"] for each in weights.values()} == {best}) or best == "best of each layer"
    assert not any(name.startswith(("classifier", "score", "qa_outputs")) for name in weights)


@pytest.mark.parametrize(
    "make",
    [
        lambda few: tf.MarianMTModel(tf.MarianConfig(**MARIAN | few)),
        lambda few: tf.BertForMaskedLM(tf.BertConfig(**BERT | few)),
    ],
    ids=["marian", "bert"],
)
def test_windows_are_no_longer_than_a_table_of_positions(
    make: Any, material: Material, tmp_path: Path, calibrate: Calibrate
) -> None:
    make({"max_position_embeddings": 24}).save_pretrained(tmp_path / "model")
    for path in material.model.glob("tokenizer*"):
        shutil.copyfile(path, tmp_path / "model" / path.name)
    _, ctx = calibrate(tmp_path / "model", material.data, method="gptq", window_tokens=64)
    assert ctx.facts["divergence"]["gptq"] > 0
