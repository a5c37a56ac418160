"""A head trained on a base that is stored without it: the merge is what peft saves, tensor by tensor, or is refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from slipway.errors import ModelMergeError
from slipway.model.configuration import ModelConfig
from slipway.model.safetensors_file import read_weights
from slipway.stage import Context
from slipway_merge.params import MergeParams
from slipway_merge.stage import STAGE
from slipway_merge.verify import reload_check, spot_check
from support.models.headless_bases import HEADLESS, TASKS, make_headless, trained_with_peft

FAMILIES = {"SEQ_CLS": "sequence classifier", "TOKEN_CLS": "token classifier", "QUESTION_ANS": "question answering"}


def merged(base: Path, adapter: Path, root: Path, **params: object) -> tuple[Path, Context]:
    (root / "work").mkdir()
    ctx = Context(workdir=root / "work")
    return STAGE.run({"base": base, "adapter": adapter}, MergeParams(**params), ctx)["pytorch"], ctx


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def refused(base: Path, adapter: Path, root: Path) -> ModelMergeError:
    with pytest.raises(ModelMergeError) as caught:
        merged(base, adapter, root)
    return caught.value


USUAL = ("qwen3-tied", "bert-masked", "distilbert", "roberta", "bert-tokens", "bert-answers")
UNUSUAL = ("qwen3-sharded", "qwen3-all-linear", "qwen3-embeddings", "qwen3-answers", "qwen3-dora", "qwen3-moe", "gpt2",
           "bert-old-names", "bert-bare", "bert-other-labels", "t5")  # fmt: skip


@pytest.mark.parametrize("kind", [*USUAL, *(pytest.param(kind, marks=pytest.mark.slow) for kind in UNUSUAL)])
def test_it_is_what_peft_saves(tmp_path, kind):
    base, adapter = make_headless(kind, tmp_path)
    output, ctx = merged(base, adapter, tmp_path, verify="full")
    unmerged = trained_with_peft(kind, base, adapter)
    unmerged.merge_and_unload().save_pretrained(tmp_path / "peft")
    ours, theirs = stored(output), stored(tmp_path / "peft")
    assert ours.keys() == theirs.keys()
    moved = {entry["module"] for entry in ctx.facts["modules"]}
    exact = {name for name in ours if name.rpartition(".")[0] not in moved}
    assert set(ctx.facts["head"]) <= exact
    for name, tensor in theirs.items():
        limit = 0 if name in exact else 1e-6
        assert torch.allclose(ours[name], tensor, rtol=0, atol=limit), name
    assert ModelConfig.read(output).family.name == FAMILIES[TASKS[HEADLESS[kind].auto]]
    verified = ctx.facts["verified"]
    assert verified["loaded"] is True
    assert verified["logits_difference"] < verified["logits_change"] / 1000
    config, expected = (tf.AutoConfig.from_pretrained(folder).to_dict() for folder in (output, tmp_path / "peft"))
    different = {key for key in config.keys() | expected.keys() if config.get(key) != expected.get(key)}
    assert different <= {"_name_or_path", "problem_type"}, different


def test_a_16_bit_base_keeps_the_head_as_it_was_saved(tmp_path):
    base, adapter = make_headless("qwen3-tied", tmp_path, dtype=torch.bfloat16)
    output, ctx = merged(base, adapter, tmp_path, verify="full")
    ours, saved = stored(output), load_file(adapter / "adapter_model.safetensors")
    assert ctx.facts["head"]
    for name in ctx.facts["head"]:
        assert torch.equal(ours[name], saved[f"base_model.model.{name}"]), name
    first = read_weights(base)
    untouched = [name for name in ours if name in first and name not in ctx.facts["tensors_replaced"]]
    moved = {f"{entry['module']}.weight" for entry in ctx.facts["modules"]}
    before = stored(base)
    assert moved
    assert all(torch.equal(ours[name], before[name]) != (name in moved) for name in untouched)


def test_a_class_without_a_language_head_drops_it_and_says_so(tmp_path):
    base, adapter = make_headless("bert-pretraining", tmp_path)
    _, ctx = merged(base, adapter, tmp_path)
    dropped = ctx.facts["tensors_dropped"]
    assert "cls.seq_relationship.weight" in dropped
    assert all(name.startswith("cls.") for name in dropped)
    assert ctx.facts["head"] == ["classifier.bias", "classifier.weight"]


def test_a_base_whose_configuration_names_no_class_is_taken_as_its_type(tmp_path):
    base, adapter = make_headless("deberta", tmp_path)
    config = json.loads((base / "config.json").read_text())
    del config["architectures"]
    (base / "config.json").write_text(json.dumps(config))
    output, ctx = merged(base, adapter, tmp_path, verify="full")
    assert json.loads((output / "config.json").read_text())["architectures"] == ["DebertaV2ForSequenceClassification"]
    assert "logits_difference" in ctx.facts["verified"]


def test_labels_are_those_beside_the_adapter(tmp_path):
    base, adapter = make_headless("llama", tmp_path, named=True)
    config = json.loads((adapter / "config.json").read_text()) | {"problem_type": "multi_label_classification"}
    (adapter / "config.json").write_text(json.dumps(config))
    output, ctx = merged(base, adapter, tmp_path)
    found = json.loads((output / "config.json").read_text())
    assert found["architectures"] == ["LlamaForSequenceClassification"]
    assert found["id2label"] == {"0": "kind 0", "1": "kind 1", "2": "kind 2"}
    assert found["label2id"] == {"kind 0": 0, "kind 1": 1, "kind 2": 2}
    assert found["problem_type"] == "multi_label_classification"
    assert found["pad_token_id"] == 1
    assert "warnings" not in ctx.facts


@pytest.mark.parametrize(
    "beside", ["{", "[]", '{"id2label": {"0": "a", "1": "b"}}', '{"id2label": {"0": 1, "1": 2, "2": 3}}']
)
def test_labels_that_fit_no_head_are_not_used(tmp_path, beside):
    base, adapter = make_headless("qwen3-tied", tmp_path)
    (adapter / "config.json").write_text(beside)
    output, ctx = merged(base, adapter, tmp_path)
    found = json.loads((output / "config.json").read_text())
    assert found["id2label"] == {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"}
    assert found["problem_type"] == "single_label_classification"
    assert found["pad_token_id"] == 1  # of the tokenizer
    (warning,) = ctx.facts["warnings"]
    assert "LABEL_0 to LABEL_2" in warning


def test_a_head_that_is_nowhere_is_refused_with_a_way_out(tmp_path):
    """A BertForMaskedLM has no pooler: its classifier trains with a random one, which peft saves only if told to."""
    base, adapter = make_headless("bert-masked", tmp_path)
    tensors = load_file(adapter / "adapter_model.safetensors")
    lost = {name: tensor for name, tensor in tensors.items() if ".pooler." not in name}
    save_file(lost, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = json.loads((adapter / "adapter_config.json").read_text()) | {"modules_to_save": ["classifier", "score"]}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    error = refused(base, adapter, tmp_path)
    assert error.reason == "ADAPTER_BASE_MISMATCH"
    assert "BertForSequenceClassification" in str(error)
    assert "masked language model (BertForMaskedLM)" in str(error)
    assert "'bert.pooler.dense'" in str(error.remedy)
    # A base that was saved with this head has it.
    headed = tf.AutoModelForSequenceClassification.from_pretrained(base, num_labels=3)
    headed.save_pretrained(tmp_path / "headed")
    shutil.rmtree(tmp_path / "work")
    merged(tmp_path / "headed", adapter, tmp_path, verify="full")


def test_an_adapter_without_its_classifier_is_refused(tmp_path):
    base, adapter = make_headless("qwen3-tied", tmp_path)
    tensors = load_file(adapter / "adapter_model.safetensors")
    del tensors["base_model.model.score.weight"]
    save_file(tensors, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    error = refused(base, adapter, tmp_path)
    assert error.reason == "ADAPTER_BASE_MISMATCH"
    assert "'score.weight'" in str(error)


def test_a_head_of_another_width_is_refused(tmp_path):
    base, adapter = make_headless("qwen3-tied", tmp_path)
    tensors = load_file(adapter / "adapter_model.safetensors") | {"base_model.model.score.weight": torch.ones(3, 33)}
    save_file(tensors, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    error = refused(base, adapter, tmp_path)
    assert error.reason == "ADAPTER_BASE_MISMATCH"
    assert "(3, 33)" in str(error)


@pytest.mark.parametrize("shape", [(0, 32), (70_000, 2), ()])
def test_an_impossible_number_of_labels_is_refused(tmp_path, shape):
    base, adapter = make_headless("qwen3-tied", tmp_path)
    tensors = load_file(adapter / "adapter_model.safetensors") | {"base_model.model.score.weight": torch.ones(shape)}
    save_file(tensors, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    assert refused(base, adapter, tmp_path).reason == "ADAPTER_CONFIG_INVALID"


def test_a_base_whose_weights_the_class_does_not_take_is_refused(tmp_path):
    """Qwen3ForQuestionAnswering has its body under another name than Qwen3ForCausalLM: transformers trains a random one."""
    base, adapter = make_headless("qwen3-answers", tmp_path)
    tf.Qwen3ForCausalLM.from_pretrained(base).save_pretrained(base)
    error = refused(base, adapter, tmp_path)
    assert error.reason == "ADAPTER_BASE_MISMATCH"
    assert "transformer.embed_tokens" in str(error)


def test_a_model_type_without_such_a_class_is_refused(tmp_path):
    base, adapter = make_headless("qwen3-tied", tmp_path)
    config = json.loads((base / "config.json").read_text()) | {
        "model_type": "granite",
        "architectures": ["GraniteForCausalLM"],
    }
    (base / "config.json").write_text(json.dumps(config))
    error = refused(base, adapter, tmp_path)
    assert error.reason == "FAMILY_UNSUPPORTED"
    assert "GraniteForCausalLM" in str(error)


WRONG = {
    "zeroed": torch.zeros_like,
    "shuffled": lambda weight: weight.roll(1, 0),
    "scaled": lambda weight: weight * 1.001,
    "negated": torch.neg,
}


@pytest.mark.parametrize("change", WRONG)
def test_a_wrong_head_is_found_by_name(tmp_path, monkeypatch, change):
    base, adapter = make_headless("qwen3-tied", tmp_path)
    damage_before(monkeypatch, spot_check.read_weights, change)
    error = refused(base, adapter, tmp_path)
    assert error.reason == "MERGE_NOT_VERIFIED"
    assert "'score.weight'" in str(error)


def damage_before(monkeypatch, read, change) -> None:
    """Change the written head before the check reads it, as a faulty disk would."""

    def damaged(folder: Path):
        file = folder / "model.safetensors"
        tensors = load_file(file)
        tensors["score.weight"] = WRONG[change](tensors["score.weight"]).contiguous()
        save_file(tensors, file, metadata={"format": "pt"})
        return read(folder)

    monkeypatch.setattr(spot_check, "read_weights", damaged)


def test_a_body_without_the_adapter_is_found_by_its_logits(tmp_path):
    base, adapter = make_headless("qwen3-tied", tmp_path)
    output, ctx = merged(base, adapter, tmp_path, verify="spot")
    tensors = load_file(output / "model.safetensors") | load_file(base / "model.safetensors")
    save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})
    from slipway.model.folder import ModelFolder
    from slipway.model.trained import trained_model

    opened = ModelFolder.open(base)
    trained = trained_model(opened, adapter)

    with pytest.raises(ModelMergeError, match="its logits differ from those of base and adapter"):
        reload_check.reload_check(
            ModelFolder.open(output), opened, adapter, names=dict, dtype="F32", rounded=None, trained=trained, ctx=ctx
        )
