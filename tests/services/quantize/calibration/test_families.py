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

from slipway.model.folder import ModelFolder
from slipway.stage import Context
from slipway_quantize.calibration.streaming.model import StreamedModel
from slipway_quantize.calibration.streaming.walk import BlockWalk
from slipway_quantize.calibration.windows import Windows
from support.models.calibrated_families import BERT, MARIAN, MODELS, save
from support.models.calibrated_models import Material

Calibrate = Callable[..., tuple[Path, Context]]


@pytest.mark.parametrize("name", ["bart", "gemma3", "marian", "t5"])
def test_blocks_one_by_one_compute_what_the_model_does(name: str, tmp_path: Path) -> None:
    """An encoder's results reach all of the decoder's blocks, beside what these give to each other."""
    model = StreamedModel(ModelFolder.open(save(name, tmp_path / "model")), group_size=32, head=True)
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
    model = StreamedModel(ModelFolder.open(save(name, tmp_path / "model")), group_size=32, head=True)
    batch = Windows((), (), "", 0, None).batch([torch.arange(1, 25), torch.arange(1, 10)])
    with torch.no_grad():
        found = model.tuning_results(batch)
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
@pytest.mark.parametrize(
    "name", ["bert feature extraction", "bert question answering", "distilbert classifier", "gemma3", "t5"]
)
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
    assert not any(name.startswith(("classifier", "pre_classifier", "qa_outputs")) for name in weights)


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
    assert abs(ctx.facts["divergence"]["gptq"]) < 1e-3  # a position beyond the table would have ended it
