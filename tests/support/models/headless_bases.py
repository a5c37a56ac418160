"""Bases stored without the head that the training added, and adapters that peft saved with that head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from support.models.judged_families import _ENCODER, VOCABULARY, save_tokenizer

_DECODER = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 80, "initializer_range": 0.2,
}  # fmt: skip
_DISTIL = {
    "vocab_size": VOCABULARY, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "max_position_embeddings": 80,
    "pad_token_id": 1, "initializer_range": 0.2,
}  # fmt: skip
_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "pad_token_id": 1,
}
CLASSES, TOKENS, ANSWERS = (
    f"AutoModelFor{name}" for name in ("SequenceClassification", "TokenClassification", "QuestionAnswering")
)
TASKS = {CLASSES: "SEQ_CLS", TOKENS: "TOKEN_CLS", ANSWERS: "QUESTION_ANS"}


@dataclass(frozen=True)
class HeadlessCase:
    """A base and what is trained on it.

    Attributes:
        base: Makes the model that the base's folder holds.
        auto: Auto class that the training loads the folder with.
        targets: Layers with a LoRA.
        saved: Modules to save, beside those that peft adds itself.
        padding: Padding token that the training sets.
        labels: Number of labels.
        rename: Changes the stored names.
        shard: Largest file.
    """

    base: Callable[[], Any]
    auto: str
    targets: tuple[str, ...]
    saved: tuple[str, ...] = ()
    padding: int | None = None
    labels: int = 3
    rename: Callable[[str], str] | None = None
    shard: str = "5GB"
    more: dict[str, Any] = field(default_factory=dict)


def _old_names(name: str) -> str:
    return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")


def _qwen3(*, tied: bool, model: str = "Qwen3ForCausalLM") -> Callable[[], Any]:
    return lambda: getattr(tf, model)(tf.Qwen3Config(**_DECODER, tie_word_embeddings=tied))


def _bert(model: str) -> Callable[[], Any]:
    return lambda: getattr(tf, model)(tf.BertConfig(**_ENCODER))


_ALL = ("q_proj", "v_proj", "down_proj")
_QUERY = ("query", "value")
HEADLESS: dict[str, HeadlessCase] = {
    "qwen3-tied": HeadlessCase(_qwen3(tied=True), CLASSES, _ALL, padding=1),
    "qwen3-sharded": HeadlessCase(_qwen3(tied=False), CLASSES, _ALL, padding=1, shard="20KB"),
    "qwen3-all-linear": HeadlessCase(_qwen3(tied=True), CLASSES, ("all-linear",), padding=1),
    "qwen3-embeddings": HeadlessCase(_qwen3(tied=True), CLASSES, ("q_proj", "embed_tokens"), padding=1),
    "qwen3-answers": HeadlessCase(_qwen3(tied=True, model="Qwen3Model"), ANSWERS, _ALL, padding=1, labels=2),
    "qwen3-dora": HeadlessCase(_qwen3(tied=True), CLASSES, _ALL, padding=1, more={"use_dora": True}),
    "qwen3-moe": HeadlessCase(
        lambda: tf.Qwen3MoeForCausalLM(
            tf.Qwen3MoeConfig(**_DECODER, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
        ),
        CLASSES, ("q_proj", "v_proj"), padding=1,
    ),
    "llama": HeadlessCase(
        lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**_DECODER, tie_word_embeddings=False)), CLASSES, _ALL, padding=1
    ),
    "gpt2": HeadlessCase(
        lambda: tf.GPT2LMHeadModel(
            tf.GPT2Config(vocab_size=VOCABULARY, n_positions=80, n_embd=32, n_layer=2, n_head=4, initializer_range=0.2)
        ),
        CLASSES, ("c_attn", "c_proj"), padding=1, more={"fan_in_fan_out": True},
    ),
    "bert-pretraining": HeadlessCase(_bert("BertForPreTraining"), CLASSES, _QUERY),
    "bert-old-names": HeadlessCase(_bert("BertForPreTraining"), CLASSES, _QUERY, rename=_old_names),
    "bert-masked": HeadlessCase(_bert("BertForMaskedLM"), CLASSES, _QUERY, saved=("classifier", "pooler")),
    "bert-bare": HeadlessCase(_bert("BertModel"), CLASSES, _QUERY),
    "bert-tokens": HeadlessCase(_bert("BertForMaskedLM"), TOKENS, _QUERY, labels=5),
    "bert-answers": HeadlessCase(_bert("BertForMaskedLM"), ANSWERS, _QUERY, labels=2),
    "bert-other-labels": HeadlessCase(_bert("BertForTokenClassification"), CLASSES, _QUERY, saved=("pooler",)),
    "roberta": HeadlessCase(lambda: tf.RobertaForMaskedLM(tf.RobertaConfig(**_ENCODER)), CLASSES, _QUERY),
    "distilbert": HeadlessCase(
        lambda: tf.DistilBertForMaskedLM(tf.DistilBertConfig(**_DISTIL)), CLASSES, ("q_lin", "lin1"), saved=("pre_classifier",)
    ),
    "deberta": HeadlessCase(
        lambda: tf.DebertaV2ForMaskedLM(tf.DebertaV2Config(**_ENCODER)), CLASSES, ("query_proj",), saved=("pooler",)
    ),
    "t5": HeadlessCase(
        lambda: tf.T5ForConditionalGeneration(tf.T5Config(**_T5, decoder_start_token_id=1, eos_token_id=2)),
        CLASSES, ("q", "v"), saved=("classification_head",),
    ),
}  # fmt: skip


def make_headless(
    kind: str, root: Path, *, dtype: torch.dtype = torch.float32, named: bool = False
) -> tuple[Path, Path]:
    """Save a base without a head, and an adapter trained on it with one; return their folders."""
    case = HEADLESS[kind]
    base, adapter = root / "base", root / "adapter"
    torch.manual_seed(3)
    model = case.base().to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(base, max_shard_size=case.shard)
    if case.rename:
        stored = load_file(base / "model.safetensors")
        renamed = {case.rename(name): tensor for name, tensor in stored.items()}
        save_file(renamed, base / "model.safetensors", metadata={"format": "pt"})
    save_tokenizer(base)
    torch.manual_seed(5)
    headed = getattr(tf, case.auto).from_pretrained(
        base, num_labels=case.labels, dtype=dtype, ignore_mismatched_sizes=True, **_padding(case)
    )
    targets = case.targets[0] if case.targets == ("all-linear",) else list(case.targets)
    config = peft.LoraConfig(
        r=4, lora_alpha=10, target_modules=targets, task_type=TASKS[case.auto], modules_to_save=list(case.saved) or None,
        init_lora_weights=False, **case.more,
    )  # fmt: skip
    tuned = peft.get_peft_model(headed, config)
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "modules_to_save" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif "lora_A" in name or "lora_B" in name or "lora_embedding" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.15)
    tuned.save_pretrained(adapter)
    save_tokenizer(adapter)
    if named:
        labels = {number: f"kind {number}" for number in range(case.labels)}
        headed.config.id2label, headed.config.label2id = labels, {label: number for number, label in labels.items()}
        headed.config.save_pretrained(adapter)
    return base, adapter


def trained_with_peft(kind: str, base: Path, adapter: Path) -> Any:
    """Load what was trained as peft does: the class with a new head from the base's folder, then the adapter."""
    case = HEADLESS[kind]
    headed = getattr(tf, case.auto).from_pretrained(
        base, num_labels=case.labels, dtype="auto", ignore_mismatched_sizes=True, **_padding(case)
    )
    return peft.PeftModel.from_pretrained(headed, adapter).eval()


def _padding(case: HeadlessCase) -> dict[str, int]:
    return {} if case.padding is None else {"pad_token_id": case.padding}
