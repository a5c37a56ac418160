"""Make one small model of each family with random weights, and an adapter with a visible effect, saved as training saves them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import torch
import transformers as tf

from support.models.tiny_models import save_tokenizer

VOCABULARY = 64
_SPECIAL = {"pad_token_id": 1, "eos_token_id": 2, "bos_token_id": 0}
_ENCODER = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 64, "type_vocab_size": 1, "num_labels": 3, **_SPECIAL,
}  # fmt: skip
_DECODER = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "num_labels": 3, **_SPECIAL,
}  # fmt: skip
_PAIR = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "decoder_start_token_id": 1,
    "max_position_embeddings": 64, **_SPECIAL,
}  # fmt: skip
_T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
_DISTIL = {
    "vocab_size": VOCABULARY, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "max_position_embeddings": 64,
    "num_labels": 3, "pad_token_id": 1,
}  # fmt: skip
_WHISPER = {
    **{name: value for name, value in _PAIR.items() if name != "max_position_embeddings"},
    "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 64,
}  # fmt: skip

_MOONSHINE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "encoder_num_hidden_layers": 2,
    "decoder_num_hidden_layers": 2, "encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4,
    "pad_head_dim_to_multiple_of": 16, "max_position_embeddings": 64, "decoder_start_token_id": 1, **_SPECIAL,
}  # fmt: skip


@dataclass(frozen=True)
class FamilyCase:
    """A model and the part of it that LoRA trains.

    Attributes:
        model: Function that makes the model.
        family: The name of its family.
        targets: Layers with a LoRA.
        task: peft's name of the task.
        saved: Modules trained in full.
    """

    model: Callable[[], Any]
    family: str
    targets: tuple[str, ...]
    task: str | None
    saved: tuple[str, ...] = field(default=())


CASES: dict[str, FamilyCase] = {
    "qwen3": FamilyCase(
        lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**_DECODER, tie_word_embeddings=True)),
        "decoder", ("q_proj", "down_proj"), "CAUSAL_LM",
    ),
    "gpt2": FamilyCase(
        lambda: tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, **_SPECIAL)),
        "decoder", ("c_attn", "c_proj"), "CAUSAL_LM",
    ),
    "bart-decoder": FamilyCase(
        lambda: tf.BartForCausalLM(tf.BartConfig(**_PAIR)), "decoder", ("q_proj", "fc1"), "CAUSAL_LM"
    ),
    "marian": FamilyCase(
        lambda: tf.MarianMTModel(tf.MarianConfig(**_PAIR)), "encoder-decoder", ("q_proj", "fc1"), "SEQ_2_SEQ_LM"
    ),
    "marian-two-vocabularies": FamilyCase(
        lambda: tf.MarianMTModel(
            tf.MarianConfig(
                **_PAIR, decoder_vocab_size=48, share_encoder_decoder_embeddings=False, tie_word_embeddings=False
            )
        ),
        "encoder-decoder", ("q_proj", "fc1"), "SEQ_2_SEQ_LM",
    ),
    "t5": FamilyCase(
        lambda: tf.T5ForConditionalGeneration(
            tf.T5Config(**_T5, decoder_start_token_id=1, pad_token_id=1, eos_token_id=2)
        ),
        "encoder-decoder", ("q", "wi"), "SEQ_2_SEQ_LM",
    ),
    "bart": FamilyCase(
        lambda: tf.BartForConditionalGeneration(tf.BartConfig(**_PAIR)),
        "encoder-decoder", ("v_proj", "fc2"), "SEQ_2_SEQ_LM",
    ),
    "whisper": FamilyCase(
        lambda: tf.WhisperForConditionalGeneration(tf.WhisperConfig(**_WHISPER)),
        "speech encoder-decoder", ("q_proj", "fc1"), "SEQ_2_SEQ_LM",
    ),
    "moonshine": FamilyCase(
        lambda: tf.MoonshineForConditionalGeneration(tf.MoonshineConfig(**_MOONSHINE)),
        "raw speech encoder-decoder", ("q_proj", "v_proj", "fc1"), "SEQ_2_SEQ_LM",
    ),
    "bert-classes": FamilyCase(
        lambda: tf.BertForSequenceClassification(tf.BertConfig(**_ENCODER)),
        "sequence classifier", ("query", "dense"), "SEQ_CLS", ("classifier",),
    ),
    "roberta-classes": FamilyCase(
        lambda: tf.RobertaForSequenceClassification(tf.RobertaConfig(**_ENCODER)),
        "sequence classifier", ("query", "value"), "SEQ_CLS", ("classifier",),
    ),
    "distilbert-classes": FamilyCase(
        lambda: tf.DistilBertForSequenceClassification(tf.DistilBertConfig(**_DISTIL)),
        "sequence classifier", ("q_lin", "lin1"), "SEQ_CLS", ("pre_classifier", "classifier"),
    ),
    "qwen3-classes": FamilyCase(
        lambda: tf.Qwen3ForSequenceClassification(tf.Qwen3Config(**_DECODER)),
        "sequence classifier", ("q_proj", "down_proj"), "SEQ_CLS", ("score",),
    ),
    "llama-classes-unpadded": FamilyCase(
        lambda: tf.LlamaForSequenceClassification(tf.LlamaConfig(**_DECODER | {"pad_token_id": None})),
        "sequence classifier", ("q_proj", "down_proj"), "SEQ_CLS", ("score",),
    ),
    "bart-classes": FamilyCase(
        lambda: tf.BartForSequenceClassification(tf.BartConfig(**_PAIR, num_labels=3)),
        "sequence classifier", ("q_proj", "fc1"), "SEQ_CLS", ("classification_head",),
    ),
    "bert-tokens": FamilyCase(
        lambda: tf.BertForTokenClassification(tf.BertConfig(**_ENCODER)),
        "token classifier", ("query", "dense"), "TOKEN_CLS", ("classifier",),
    ),
    "roberta-questions": FamilyCase(
        lambda: tf.RobertaForQuestionAnswering(tf.RobertaConfig(**_ENCODER | {"num_labels": 2})),
        "question answering", ("query", "value"), "QUESTION_ANS", ("qa_outputs",),
    ),
    "bert-masked": FamilyCase(
        lambda: tf.BertForMaskedLM(tf.BertConfig(**_ENCODER)), "masked language model", ("query", "dense"), None
    ),
    "bert-features": FamilyCase(
        lambda: tf.BertModel(tf.BertConfig(**_ENCODER)), "feature extraction", ("query", "dense"), "FEATURE_EXTRACTION"
    ),
}  # fmt: skip


def make_family_model(kind: str, folder: Path, *, dtype: torch.dtype = torch.float32) -> Path:
    """Save the model of a case: its weights are spread widely, so that each of them affects the results."""
    torch.manual_seed(7)
    model = CASES[kind].model().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.to(dtype).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def make_family_adapter(kind: str, base: Path, folder: Path) -> Path:
    """Save a LoRA of scaling 2.5 whose factors are all random, and whole modules that differ from the base's."""
    case = CASES[kind]
    torch.manual_seed(11)
    model = type(case.model()).from_pretrained(base, dtype=torch.float32)
    config = peft.LoraConfig(
        r=4, lora_alpha=10, target_modules=list(case.targets), task_type=case.task, init_lora_weights=False,
        modules_to_save=list(case.saved) or None, fan_in_fan_out=kind == "gpt2",
    )  # fmt: skip
    tuned = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "modules_to_save" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    tuned.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def tuned_model(kind: str, base: Path, adapter: Path) -> Any:
    """Load base and adapter, unmerged."""
    model = type(CASES[kind].model()).from_pretrained(base, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(model, adapter).get_base_model().eval()


def inputs_of(kind: str) -> dict[str, torch.Tensor]:
    """Make inputs for the model of a case, with one end of text in each row."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(3, 48, (1 if "unpadded" in kind else 3, 9), generator=generator)
    tokens[:, -1] = 2
    if CASES[kind].family == "speech encoder-decoder":
        return {"input_features": torch.randn(3, 8, 32, generator=generator), "decoder_input_ids": tokens}
    if CASES[kind].family == "raw speech encoder-decoder":
        return {"input_values": torch.randn(3, 6000, generator=generator), "decoder_input_ids": tokens}
    if CASES[kind].family == "encoder-decoder":
        return {"input_ids": tokens, "decoder_input_ids": tokens.flip(1)}
    return {"input_ids": tokens}


def given_by(model: Any, kind: str) -> torch.Tensor:
    """Return a model's results for :func:`inputs_of`, in double precision."""
    with torch.no_grad():
        found = model.eval()(**inputs_of(kind))
    names = ("logits", "start_logits", "end_logits", "last_hidden_state")
    return torch.cat([found[name].double().flatten() for name in names if name in found])
