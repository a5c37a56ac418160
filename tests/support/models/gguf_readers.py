"""Tiny models that read whole texts and are written as GGUF, with their tokenizers and the files of sentence-transformers. Data, and makers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from support.models.sentence_models import write_dense, write_modules
from support.models.tokenizers_of_readers import byte_pairs, settings_of, unigrams, word_pieces

VOCABULARY = 512
"""More rows than the tokenizers have tokens, as in many models."""
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 160,
}
_BERT: dict[str, Any] = {**_SIZES, "pad_token_id": 0}
_ROBERTA: dict[str, Any] = {**_SIZES, "type_vocab_size": 1, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
_QWEN: dict[str, Any] = {**_SIZES, "num_key_value_heads": 2, "head_dim": 32, "bos_token_id": None, "eos_token_id": 3}
_MODERN: dict[str, Any] = {
    **_SIZES,
    "num_hidden_layers": 5,
    "local_attention": 16,
    "global_attn_every_n_layers": 2,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "cls_token_id": 2,
    "sep_token_id": 3,
}
_GEMMA: dict[str, Any] = {
    **_QWEN,
    "num_hidden_layers": 7,
    "sliding_window": 16,
    "query_pre_attn_scalar": 32,
    "use_bidirectional_attention": True,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Reader:
    """A kind of model.

    Attributes:
        config: Its class of configuration.
        model: Its class.
        settings: Settings of the configuration.
        tokenizer: Makes its tokenizer.
        pooling: Its pooling, by sentence-transformers' name; empty for a model that makes a score.
        normalized: Whether its vectors get the length 1.
        dense: Widths of the linear layers behind the pooling.
    """

    config: str
    model: str
    settings: Mapping[str, Any]
    tokenizer: Callable[[], Tokenizer]
    pooling: str = ""
    normalized: bool = True
    dense: tuple[int, ...] = ()


READERS: Mapping[str, Reader] = {
    "qwen3": Reader("Qwen3Config", "Qwen3Model", _QWEN, byte_pairs, "lasttoken"),
    "bert-mean": Reader("BertConfig", "BertModel", _BERT, word_pieces, "mean"),
    "bert-cls": Reader("BertConfig", "BertModel", _BERT, word_pieces, "cls", normalized=False),
    "roberta": Reader("RobertaConfig", "RobertaModel", _ROBERTA, byte_pairs, "mean", normalized=False),
    "xlm-roberta": Reader("XLMRobertaConfig", "XLMRobertaModel", _ROBERTA, unigrams, "cls"),
    "modernbert": Reader("ModernBertConfig", "ModernBertModel", _MODERN, byte_pairs, "mean"),
    "gemma": Reader("Gemma3TextConfig", "Gemma3TextModel", _GEMMA, byte_pairs, "mean"),
    "gemma-dense": Reader("Gemma3TextConfig", "Gemma3TextModel", _GEMMA, byte_pairs, "mean", dense=(128, 64)),
    "xlm-roberta-score": Reader(
        "XLMRobertaConfig", "XLMRobertaForSequenceClassification", {**_ROBERTA, "num_labels": 1}, unigrams
    ),
    "bert-score": Reader(
        "BertConfig",
        "BertForSequenceClassification",
        {**_BERT, "num_labels": 1, "type_vocab_size": 1},
        word_pieces,
    ),
    "modernbert-score": Reader(
        "ModernBertConfig", "ModernBertForSequenceClassification", {**_MODERN, "num_labels": 1}, byte_pairs
    ),
    "modernbert-score-mean": Reader(
        "ModernBertConfig",
        "ModernBertForSequenceClassification",
        {**_MODERN, "num_labels": 1, "classifier_pooling": "mean"},
        byte_pairs,
    ),
    "qwen3-score": Reader(
        "Qwen3Config",
        "Qwen3ForSequenceClassification",
        {**_QWEN, "num_labels": 1, "pad_token_id": 0},
        byte_pairs,
    ),
}
"""Kinds by name."""


def save_reader(name: str, folder: Path, *, dtype: torch.dtype = torch.float32) -> Any:
    """Save a model in which every weight matters, with its tokenizer and modules, and return it."""
    reader = READERS[name]
    model = _save(reader, folder, dtype)
    if reader.pooling:
        write_pooling(folder, reader)
    return model


def _save(reader: Reader, folder: Path, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    model = getattr(tf, reader.model)(getattr(tf, reader.config)(**reader.settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.dim() == 1 else 0.08))
    model.to(dtype).save_pretrained(folder)
    tokenizer = reader.tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(dict(settings_of(tokenizer))))
    return model


JUDGE = (
    '<s>{{ messages | selectattr("role", "eq", "system") | map(attribute="content") | first | default("Judge.") }}\n'
    'Query: {{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}\n'
    'Document: {{ messages | selectattr("role", "eq", "document") | map(attribute="content") | first }}\nAnswer:'
)
"""A chat template as rerankers have it, and the tokens whose logits make a score."""
YES, NO = 77, 88


def save_judge(folder: Path, *, tied: bool = True, no: int | None = NO) -> Any:
    """Save a decoder that makes a score by the logits of two tokens, as Qwen3-Reranker, and return it."""
    settings = {**_QWEN, "tie_word_embeddings": tied}
    model = _save(Reader("Qwen3Config", "Qwen3ForCausalLM", settings, byte_pairs), folder, torch.float32)
    (folder / "chat_template.jinja").write_text(JUDGE)
    kinds = ("base.modules.transformer.Transformer", "cross_encoder.modules.logit_score.LogitScore")
    listed = [
        {"idx": at, "name": str(at), "path": "1_LogitScore" if at else "", "type": f"sentence_transformers.{kind}"}
        for at, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_LogitScore").mkdir()
    tokens = {"true_token_id": YES, "false_token_id": no}
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps(tokens))
    return model


def write_pooling(folder: Path, reader: Reader) -> None:
    """Write the files of sentence-transformers."""
    layers = ["Dense"] * len(reader.dense)
    names = ["Transformer", "Pooling", *layers, *(["Normalize"] if reader.normalized else [])]
    activation = {"activation_function": "torch.nn.modules.linear.Identity"}
    write_modules(folder, modules=names, settings={"pooling_mode": reader.pooling}, dense=activation)
    if not layers:
        return
    listed = json.loads((folder / "modules.json").read_text())
    width = int(reader.settings["hidden_size"])
    for each in (each for each in listed if each["type"].endswith("Dense")):
        each["path"] = f"{each['idx']}_Dense"
        place = folder / each["path"]
        place.mkdir(exist_ok=True)
        size = reader.dense[each["idx"] - 2]
        (place / "config.json").write_text(
            json.dumps({"in_features": width, "out_features": size, "bias": False, **activation})
        )
        write_dense(place, (width, size), bias=False, seed=each["idx"])
        width = size
    (folder / "modules.json").write_text(json.dumps(listed))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the tensors of a saved model."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
