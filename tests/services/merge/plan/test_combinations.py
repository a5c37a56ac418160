"""Options that are right alone and meet: ties, biases, squares, rows, repeated layers and initialisations.

The reference is the trained model in memory, so neither what peft saves nor how it loads that is taken for granted.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from slipway.errors import ModelMergeError
from support.models.merge_cases import SMALL, TOKENS, VOCAB, Case, make_model, randomise

BERT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
PAIR: dict[str, Any] = {
    "vocab_size": VOCAB, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "pad_token_id": 0, "eos_token_id": 1,
    "decoder_start_token_id": 0, "max_position_embeddings": 32,
}  # fmt: skip
MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}


def moved(model: Any) -> Any:
    """The model, with no value left at what it begins with (biases at 0, norms at 1)."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def bert(**options: Any) -> Any:
    return moved(tf.BertForMaskedLM(tf.BertConfig(**BERT, **options)))


def outputs(model: Any) -> torch.Tensor:
    more = {"decoder_input_ids": TOKENS} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(input_ids=TOKENS, **more).logits
    return logits


def train(folder: Path, model: Any, config: peft.PeftConfig) -> tuple[Case, Any]:
    """A base and an adapter, and the model in memory that they stand for, in float32."""
    model.save_pretrained(folder / "base")
    model.name_or_path = str(folder / "base")
    tuned = peft.get_peft_model(model, config)
    randomise(tuned)
    tuned.save_pretrained(folder / "adapter")
    (folder / "work").mkdir()
    return Case(folder / "base", folder / "adapter", folder / "work"), tuned.float().get_base_model()


def check(case: Case, trained: Any, **params: Any) -> dict[str, torch.Tensor]:
    """The merged folder computes what was trained, with no weight missing; answers its weights."""
    expected = outputs(trained)
    out, _ = case.merge(**{"verify": "spot", **params})
    model, info = getattr(tf, type(trained).__name__).from_pretrained(
        out, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.allclose(outputs(model), expected, atol=1e-5 * float(expected.abs().max()))
    return load_file(out / "model.safetensors")


def refused(case: Case, *words: str) -> None:
    with pytest.raises(ModelMergeError) as caught:
        case.merge(verify="spot")
    assert caught.value.reason == "ADAPTER_UNSUPPORTED"
    for word in words:
        assert word in caught.value.message


def lora(*targets: str, **options: Any) -> peft.LoraConfig:
    return peft.LoraConfig(r=4, lora_alpha=10, target_modules=list(targets), **options)


def test_a_square_conv1d_beside_a_linear_head(tmp_path):
    """peft leaves fan_in_fan_out at what the last layer it met was: the head is none of ``Conv1D``."""
    case, trained = train(tmp_path, make_model("gpt2"), lora("attn.c_proj", "lm_head", fan_in_fan_out=True))
    assert '"fan_in_fan_out": false' in (case.adapter / "adapter_config.json").read_text()
    check(case, trained)


def test_what_else_was_tied_is_written_once_the_weights_are_not(tmp_path):
    """tie_word_embeddings is about the bias of the head, too."""
    case, trained = train(tmp_path, bert(), lora("query", "cls.predictions.decoder"))
    weights = check(case, trained)
    assert torch.equal(weights["cls.predictions.decoder.bias"], weights["cls.predictions.bias"])


@pytest.mark.parametrize("kind", ["lora", "trainable_tokens"])
def test_rows_of_a_head_that_peft_trained_without_its_bias(tmp_path, kind):
    config = lora("query", trainable_token_indices=[1, 5])
    if kind == "trainable_tokens":
        config = peft.TrainableTokensConfig(target_modules=["word_embeddings"], token_indices=[1, 5])
    case, _ = train(tmp_path, bert(), config)
    refused(case, "'cls.predictions.decoder.weight'", "'cls.predictions.bias'")


def test_rows_of_a_head_whose_bias_is_zero(tmp_path):
    model = bert()
    torch.nn.init.zeros_(model.cls.predictions.bias)
    check(*train(tmp_path, model, lora("query", trainable_token_indices=[1, 5])))


def test_rows_that_are_named_and_were_saved_for_another_weight_alone(tmp_path):
    """peft trains rows of the encoder and of the decoder, and gives the head those of one of them."""
    tokens = {"embed_tokens": [1, 5], "lm_head": [1, 5]}
    model = moved(tf.MarianMTModel(tf.MarianConfig(**PAIR)))
    case, _ = train(tmp_path, model, lora("q_proj", trainable_token_indices=tokens))
    refused(case, "'lm_head'", "tied")


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_a_head_that_began_with_a_part_of_it_taken_out(tmp_path, init):
    """peft saves that head as it was left then, so the part must not be taken out again."""
    config = lora("q_proj", "lm_head", init_lora_weights=init)
    check(*train(tmp_path / "untied", make_model("qwen3"), config))


def test_a_tied_head_that_began_with_a_part_of_it_taken_out(tmp_path):
    case, _ = train(tmp_path, make_model("qwen3-tied"), lora("q_proj", "lm_head", init_lora_weights="pissa"))
    refused(case, "init_lora_weights", "'lm_head.weight'")


def test_a_bias_that_repeated_layers_share(tmp_path):
    """It is trained with the one layer that has an adapter, and the others have it, too."""
    config = tf.LlamaConfig(**SMALL, attention_bias=True)
    options = {"layer_replication": [[0, 1], [0, 2]], "layers_to_transform": [1], "bias": "lora_only"}
    check(*train(tmp_path, moved(tf.LlamaForCausalLM(config)), lora("k_proj", **options)))


def test_repeated_layers_of_two_kinds(tmp_path):
    config = tf.Qwen3MoeConfig(**SMALL, **MOE, mlp_only_layers=[0])
    case, trained = train(
        tmp_path, moved(tf.Qwen3MoeForCausalLM(config)), lora("q_proj", layer_replication=[[0, 2], [0, 2]])
    )
    check(case, trained)


def test_repeated_layers_that_a_model_only_has_at_their_first_place(tmp_path):
    """The first layer of ModernBERT has no norm before its attention, and every other layer has."""
    config = tf.ModernBertConfig(**BERT, **dict.fromkeys(("pad_token_id", "cls_token_id", "sep_token_id"), 0))
    model = moved(tf.ModernBertForMaskedLM(config))
    case, _ = train(tmp_path, model, lora("Wo", layer_replication=[[0, 2], [0, 2]]))
    refused(case, "layer_replication", "attn_norm")


def test_repeated_layers_that_began_with_a_part_taken_out(tmp_path):
    config = lora("q_proj", layer_replication=[[0, 2], [0, 2]], init_lora_weights="olora")
    case, _ = train(tmp_path, make_model("llama"), config)
    refused(case, "layer_replication", "init_lora_weights")


def test_what_was_trained_in_float32_is_not_rounded_to_the_type_of_the_base(tmp_path):
    model = make_model("qwen3")
    case, trained = train(tmp_path, model, peft.LNTuningConfig(target_modules=["input_layernorm"]))
    path = case.base / "model.safetensors"
    halves = {name: weight.bfloat16() for name, weight in load_file(path).items()}
    save_file(halves, path, metadata={"format": "pt"})
    weights = trained.state_dict()
    merged = load_file(case.merge(verify="spot", dtype="float32")[0] / "model.safetensors")
    layer = "model.layers.0.input_layernorm"
    assert torch.equal(merged[f"{layer}.weight"], weights[f"{layer}.ln_tuning_layers.default.weight"])


@pytest.mark.parametrize("form", ["dora", "road"])
def test_a_form_on_a_tied_head_whose_bias_is_tied_too(tmp_path, form):
    config = lora("query", "cls.predictions.decoder", use_dora=True)
    if form == "road":
        config = peft.RoadConfig(target_modules=["query", "cls.predictions.decoder"], group_size=8)
    weights = check(*train(tmp_path, bert(), config), verify="full")
    same = torch.equal(weights["cls.predictions.decoder.bias"], weights["cls.predictions.bias"])
    assert same == (form == "dora")  # RoAd turns the bias, too


def test_what_peft_saves_under_two_names(tmp_path):
    """An embedding that it does not know by its name is saved with all that is in it."""
    case, trained = train(tmp_path, make_model("qwen3"), lora("q_proj", "model.embed_tokens", use_dora=True))
    peft.PeftModel.from_pretrained(tf.AutoModelForCausalLM.from_pretrained(case.base), case.adapter).save_pretrained(
        case.adapter, save_embedding_layers=True
    )
    names = load_file(case.adapter / "adapter_model.safetensors").keys()
    assert len([name for name in names if "embed_tokens.lora_magnitude_vector" in name]) == 2
    check(case, trained, verify="full")


def test_an_embedding_that_peft_does_not_tie_whatever_it_is_asked(tmp_path):
    """It looks for embed_tokens and lm_head alone."""
    check(
        *train(tmp_path, make_model("gpt2"), lora("c_attn", "wte", ensure_weight_tying=True, fan_in_fan_out=True)),
        verify="full",
    )


@pytest.mark.parametrize("options", [{"modules_to_save": ["lm_head"]}, {"use_dora": True}], ids=["saved", "dora"])
@pytest.mark.parametrize("wrapper", ["_orig_mod.", "module."])
def test_a_tied_head_of_a_model_that_was_wrapped(tmp_path, wrapper, options):
    """A tied weight is not among the base's tensors, so its name cannot be found there."""
    targets = ["q_proj"] if "modules_to_save" in options else ["q_proj", "lm_head"]
    case, trained = train(tmp_path, make_model("qwen3-tied"), lora(*targets, **options))
    path = case.adapter / "adapter_model.safetensors"
    prefix = "base_model.model."
    tensors = {name.replace(prefix, prefix + wrapper, 1): tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    check(case, trained, verify="full")


def test_repeated_layers_of_targeted_parameters(tmp_path):
    config = tf.Qwen3MoeConfig(**SMALL, **MOE)
    more = {"target_parameters": ["experts.down_proj"], "layer_replication": [[0, 2], [0, 2]]}
    case, _ = train(tmp_path, moved(tf.Qwen3MoeForCausalLM(config)), lora("q_proj", **more))
    refused(case, "layer_replication", "target_parameters")


@pytest.mark.parametrize("config", [peft.HiraConfig, peft.TinyLoraConfig])
@pytest.mark.parametrize("kind", ["gemma3", "bart"])
def test_an_embedding_that_scales_its_output(tmp_path, kind, config):
    """These add to what the embedding puts out, and peft merges them into what it scales."""
    bart = tf.BartConfig(**PAIR, scale_embedding=True, tie_word_embeddings=False)
    model = make_model(kind) if kind == "gemma3" else moved(tf.BartForConditionalGeneration(bart))
    case, _ = train(tmp_path, model, config(r=4, target_modules=["embed_tokens"]))
    refused(case, "is not what was trained")


def test_dora_on_an_embedding_that_scales_its_output(tmp_path):
    check(*train(tmp_path, make_model("gemma3"), lora("q_proj", "embed_tokens", use_dora=True)))


def test_layers_of_one_kind_that_a_form_takes_in_two_ways(tmp_path):
    """IA³ scales the input of feed-forward layers and the output of others, their bias included."""
    config = peft.IA3Config(target_modules=["key", "output.dense"], feedforward_modules=["key"])
    check(*train(tmp_path, bert(), config))


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (peft.FrodConfig(target_modules=["q_proj"]), "frod"),
        (lora("q_proj", init_lora_weights="pissa"), "pissa"),
        (lora("q_proj", use_dora=True), None),
    ],
    ids=["frod", "pissa", "dora"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_start_that_depends_on_an_unknown_type_is_warned_of(tmp_path, config, name, dtype):
    case, _ = train(tmp_path, make_model("qwen3").to(dtype), copy.deepcopy(config))
    _, ctx = case.merge(verify="spot")
    said = [warning for warning in ctx.facts.get("warnings", []) if "splits the base's weights" in warning]
    assert [warning.partition(" ")[0] for warning in said] == ([name] if name and dtype is torch.bfloat16 else [])
