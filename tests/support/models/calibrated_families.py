"""Models of two blocks, of the families that a calibration knows, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as tf

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
    "bert feature extraction": lambda: tf.BertModel(tf.BertConfig(**BERT)),
    "distilbert classifier": lambda: tf.DistilBertForSequenceClassification(
        tf.DistilBertConfig(vocab_size=1024, dim=64, hidden_dim=128, n_layers=2, n_heads=2, num_labels=3)
    ),
    "qwen3 classifier": lambda: tf.Qwen3ForSequenceClassification(tf.Qwen3Config(**QWEN, num_labels=3)),
    "gemma3": lambda: tf.Gemma3ForCausalLM(
        tf.Gemma3TextConfig(**{**QWEN, "num_key_value_heads": 1, "sliding_window": 16})
    ),
    "marian": lambda: tf.MarianMTModel(tf.MarianConfig(**MARIAN)),
    "bart": lambda: tf.BartForConditionalGeneration(tf.BartConfig(**MARIAN)),
    "t5": lambda: tf.T5ForConditionalGeneration(tf.T5Config(**T5, decoder_start_token_id=0)),
    "phi3": lambda: tf.Phi3ForCausalLM(tf.Phi3Config(**{**BERT, "num_key_value_heads": 2})),
}


def save(name: str, folder: Path) -> Path:
    """Save one of the models; return its folder."""
    torch.manual_seed(1)
    model = MODELS[name]()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.1)  # results that differ, unlike those of a fresh model
    model.save_pretrained(folder)
    return folder
