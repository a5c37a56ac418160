"""Pictures that are made here: transformers' classes take them, and answer otherwise to another one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as tf

from slipway.proof.pictures import make_picture
from support.models.current_kinds import make_kind
from support.models.image_models import KINDS, make_image_kind


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.slow) if "moe" in each else each for each in KINDS]
)
def test_a_class_takes_its_picture_and_sees_it(name: str, tmp_path: Path) -> None:
    base = make_image_kind(name, tmp_path)
    config = tf.AutoConfig.from_pretrained(base, trust_remote_code=False)
    model = tf.AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32, trust_remote_code=False).eval()
    results = []
    for seed in (1, 2):
        picture = make_picture(config, seed=seed)
        assert picture is not None
        given = {key: torch.from_numpy(value) for key, value in picture.arguments.items()}
        with torch.no_grad():
            features = model.model.get_image_features(**given).pooler_output
            rows = sum(each.numel() // each.shape[-1] for each in features)
            ids = torch.tensor([[5, *[picture.token] * rows, 6]])
            types = {picture.types: (ids == picture.token).long()} if picture.types else {}
            results.append(model(input_ids=ids, **given, **types).logits[0, -1].numpy())
    assert np.isfinite(results[0]).all()
    assert np.abs(results[0] - results[1]).max() > 1e-3


def test_a_model_of_text_takes_none(tmp_path: Path) -> None:
    base = make_kind("qwen3.5", tmp_path).base
    assert make_picture(tf.AutoConfig.from_pretrained(base, trust_remote_code=False), seed=1) is None
