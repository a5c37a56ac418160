"""What a model's class computes and does not store is float32 in a comparison, also of a model that was loaded in 16 bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as tf
from peft import LoraConfig, get_peft_model

from slipway.model.families import DECODER
from slipway.proof.runtime import Step, positions_of
from slipway.proof.transformers_runtime import TransformersModel, load

SCALE = 48**0.5
ROUNDED = float(torch.tensor(SCALE, dtype=torch.bfloat16))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("gemma")
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**sizes, **heads)).to(torch.bfloat16).save_pretrained(made)
    return made


def results(model: TransformersModel) -> np.ndarray:
    ids = np.arange(3, 15)[None]
    mask = np.ones_like(ids)
    return model.forward(Step(ids, mask, positions_of(mask)))[0]


def scale_of(model: TransformersModel) -> torch.Tensor:
    (scale,) = (value for name, value in model.module.named_buffers() if name.endswith("embed_scale"))
    return scale


def test_a_scale_is_rounded_only_outside_the_comparison(folder: Path) -> None:
    model = load(folder, threads=1)
    served = results(model)
    assert scale_of(model).item() == ROUNDED != SCALE
    weights = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
    model.prepare_comparison()
    assert scale_of(model).item() == pytest.approx(SCALE, abs=1e-6)
    whole = tf.Gemma3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert np.array_equal(results(model), results(TransformersModel(whole, DECODER, stored="bfloat16")))
    model.leave_comparison()
    assert (scale_of(model).dtype, scale_of(model).item()) == (torch.bfloat16, ROUNDED)
    assert np.array_equal(results(model), served)
    for name, tensor in model.module.state_dict().items():
        assert torch.equal(tensor, weights[name]), name


def test_an_adapter_and_its_wrapped_layers_stay_as_they_are(folder: Path) -> None:
    plain = tf.Gemma3ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    lora = LoraConfig(r=2, target_modules=["embed_tokens", "q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = TransformersModel(get_peft_model(plain, lora), DECODER, stored="bfloat16")
    weights = {name: tensor.float() for name, tensor in model.module.state_dict().items()}
    model.prepare_comparison()
    assert scale_of(model).item() == pytest.approx(SCALE, abs=1e-6)
    for name, tensor in model.module.state_dict().items():
        assert torch.equal(tensor.float(), weights[name]), name
