"""Every family merges exactly, is verified against base and adapter, and a merge that changed nothing is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipway.errors import ModelMergeError
from slipway.model.configuration import ModelConfig
from slipway.model.folder import ModelFolder
from slipway.stage import Context
from slipway_merge.params import MergeParams
from slipway_merge.stage import STAGE
from slipway_merge.verify.reload_check import reload_check
from support.models.family_models import CASES, given_by, make_family_adapter, make_family_model, tuned_model
from support.models.merge_cases import save_case
from support.models.merge_models import make_family

KINDS = sorted(CASES)


def merged(kind: str, folder: Path, *, dtype: torch.dtype = torch.float32, base: str = "", **params: object):
    """Base, adapter, merged model and the context of a merge."""
    model = make_family_model(base or kind, folder / "base", dtype=dtype)
    adapter = make_family_adapter(kind, model, folder / "adapter")
    (folder / "work").mkdir()
    ctx = Context(workdir=folder / "work")
    output = STAGE.run({"base": model, "adapter": adapter}, MergeParams(**params), ctx)["pytorch"]
    return model, adapter, output, ctx


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, torch.float32) for kind in KINDS),
        *(
            (kind, torch.bfloat16)
            for kind in ("marian", "t5", "whisper", "moonshine", "roberta-classes", "qwen3-classes")
        ),
    ],
)
def test_a_merge_is_exact_and_verified(tmp_path, kind, dtype):
    base, adapter, output, ctx = merged(kind, tmp_path, dtype=dtype, verify="full")
    model_class = type(CASES[kind].model())
    assert ModelConfig.read(output).family.name == CASES[kind].family
    ours = given_by(model_class.from_pretrained(output, dtype=torch.float32), kind)
    tuned = given_by(tuned_model(kind, base, adapter), kind)
    change = (tuned - given_by(model_class.from_pretrained(base, dtype=torch.float32), kind)).abs().max()
    assert change > 0.03
    assert (ours - tuned).abs().max() < (1e-5 if dtype is torch.float32 else 0.02 * change)
    verified = ctx.facts["verified"]
    assert verified["loaded"] is True
    assert verified["modules_computed"] > 0
    assert verified["logits_difference"] < verified["logits_change"] / (1000 if dtype is torch.float32 else 30)
    assert "warnings" not in ctx.facts


@pytest.mark.parametrize("kind", KINDS)
def test_a_merge_that_changed_nothing_is_refused(tmp_path, kind):
    base, adapter, output, ctx = merged(kind, tmp_path, dtype=torch.bfloat16, verify="spot")
    for weights in output.glob("*.safetensors"):
        shutil.copyfile(base / weights.name, weights)
    with pytest.raises(ModelMergeError, match="its logits differ from those of base and adapter") as caught:
        reload_check(
            ModelFolder.open(output), ModelFolder.open(base), adapter, names=dict, dtype="BF16", rounded=None, ctx=ctx
        )
    assert caught.value.reason == "MERGE_NOT_VERIFIED"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if CASES[kind].saved])
def test_a_head_that_was_trained_arrives(tmp_path, kind):
    base, _, output, _ = merged(kind, tmp_path, verify="spot")
    before, after = load_file(base / "model.safetensors"), load_file(output / "model.safetensors")
    heads = [name for name in after if name.startswith(CASES[kind].saved)]
    assert heads
    assert not any(torch.equal(before[name], after[name]) for name in heads)


def test_a_tensor_that_the_model_has_no_use_for_travels_along(tmp_path):
    """Checkpoints of BERT on the hub have a head of their first training, too."""
    base = make_family_model("bert-masked", tmp_path / "base")
    adapter = make_family_adapter("bert-masked", base, tmp_path / "adapter")
    tensors = load_file(base / "model.safetensors") | {"cls.seq_relationship.weight": torch.ones(2, 32)}
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "work").mkdir()
    ctx = Context(workdir=tmp_path / "work")
    output = STAGE.run({"base": base, "adapter": adapter}, MergeParams(verify="full"), ctx)["pytorch"]
    assert "logits_difference" in ctx.facts["verified"]
    assert "cls.seq_relationship.weight" in load_file(output / "model.safetensors")


@pytest.mark.parametrize(("kind", "named"), [("vit", "ViTForImageClassification"), ("clip", "CLIPModel")])
def test_a_family_that_is_not_known_is_merged_and_named(tmp_path, kind, named):
    _, ctx = save_case(tmp_path, make_family(kind), target_modules=["q_proj"]).merge(verify="full")
    assert ctx.facts["verified"]["loaded"] is True
    assert ctx.facts["verified"]["logits"] == f"not compared: what a {named} takes and gives is not known"


@pytest.mark.parametrize(("kind", "target"), [("t5 without a head", "q"), ("bart without a head", "q_proj")])
def test_an_encoder_decoder_without_a_head_is_compared_by_its_hidden_states(tmp_path, kind, target):
    _, ctx = save_case(tmp_path, make_family(kind), target_modules=[target]).merge(verify="full")
    verified = ctx.facts["verified"]
    assert verified["logits_difference"] <= verified["logits_tolerance"] < verified["logits_change"]
