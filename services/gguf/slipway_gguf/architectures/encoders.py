"""Architectures of models that read a whole text: sentence embedders, and rerankers, whose head makes a score of it. Data, and light.

Sources: llama.cpp's ``conversion/bert.py`` and ``qwen.py``; ``src/models/bert.cpp``, ``modern-bert.cpp``, ``gemma-embedding.cpp`` and ``qwen3.cpp``;
``llama-graph.cpp`` (``build_pooling``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from slipway.model.decoders.classes import CLASSES
from slipway.model.decoders.decoder_class import DecoderClass
from slipway_gguf.architectures.entry import WHOLE, Architecture, Key, Numbers, Piece, Reading, Target
from slipway_gguf.architectures.reading_refusals import (
    another_gemma,
    another_modern_bert,
    modern_period,
    pairs_of_two_types,
    several_labels,
)
from slipway_gguf.architectures.refusals import first_of
from slipway_gguf.architectures.settings import SILU_WITHOUT_BIAS, Assumed
from slipway_gguf.architectures.views import rows

_BERT_SIZES: Mapping[str, Any] = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
}
_MODERN_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 50368,
    "hidden_size": 768,
    "intermediate_size": 1152,
    "num_hidden_layers": 22,
    "num_attention_heads": 12,
    "hidden_activation": "gelu",
    "max_position_embeddings": 8192,
    "norm_eps": 1e-5,
    "local_attention": 128,
    "classifier_pooling": "cls",
    "classifier_activation": "gelu",
}
_BERT_ASSUMES: Assumed = {
    "hidden_act": ("gelu", "gelu_new", "gelu_pytorch_tanh"),
    "position_embedding_type": ("absolute",),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
}
_BERT_NEEDS = ("token_embd.weight", "position_embd.weight", "token_embd_norm.weight", "token_embd_norm.bias")
_HEAD = ("cls.weight", "cls.bias", "cls.output.weight", "cls.output.bias")

_LANGUAGE_HEADS = ("lm_head.", "cls.predictions.", "cls.seq_relationship.", "head.", "decoder.")
_OLD_ENDS = {".gamma": ".weight", ".beta": ".bias"}
"""Ends of the names of norms in checkpoints of TensorFlow's time."""

PAD_AND_NEXT = 1
"""RoBERTa and its kin count positions from behind the padding token's."""


def _as_decoder(name: str) -> str:
    """Return the name that a tensor has in a decoder with a language head."""
    if name.startswith(("lm_head.", "score.")):
        return name if name.startswith("score.") else ""
    return name if name.startswith("model.") else f"model.{name}"


def _without(*beginnings: str) -> Callable[[str], str]:
    """Return a function that takes such beginnings off, and leaves out heads that make no vector."""

    def rename(name: str) -> str:
        own = name
        for beginning in beginnings:
            own = own.removeprefix(beginning)
        for end, modern in _OLD_ENDS.items():
            own = own.removesuffix(end) + modern if own.endswith(end) else own
        return "" if own.startswith(("pooler.", *_LANGUAGE_HEADS)) or own.endswith("position_ids") else own

    return rename


def _scored_by(renamed: Mapping[str, str], *beginnings: str) -> Callable[[str], str]:
    """Return a function that takes beginnings off, and gives the head's layers the names that gguf knows."""
    shorten = _without(*beginnings)  # a pooler that no head reads is in some checkpoints

    def rename(name: str) -> str:
        own = next((new + name.removeprefix(old) for old, new in renamed.items() if name.startswith(old)), None)
        return shorten(name) if own is None else own

    return rename


def _layer_norm(key: str) -> dict[str, Key]:
    return {"attention.layer_norm_epsilon": lambda numbers: numbers.number(key), "attention.causal": lambda _: False}


def _positions(numbers: Numbers) -> int:
    """Return the number of positions behind that of padding."""
    return numbers.decoder.positions - _first_position(numbers)


def _first_position(numbers: Numbers) -> int:
    return numbers.count("pad_token_id") + PAD_AND_NEXT


def _counted_from(numbers: Numbers) -> tuple[Piece, ...]:
    return (Piece(take=rows(_first_position(numbers))),)


_ROBERTA_TENSORS: Mapping[str, tuple[Target, ...]] = {
    "embeddings.position_embeddings.weight": (Target("position_embd.weight", _counted_from, leaves=True),)
}
_ROBERTA_NOTES = "positions from behind the padding token's"
_ROBERTA_KEYS: Mapping[str, Key] = {**_layer_norm("layer_norm_eps"), "context_length": _positions}


def _bert(class_name: str, *beginnings: str, **more: Any) -> Architecture:
    return Architecture(
        **{
            "name": "bert",
            "kind": DecoderClass(class_name, {**_BERT_SIZES, "pad_token_id": 0}),
            "assumes": _BERT_ASSUMES,
            "rope": (),
            "keys": _layer_norm("layer_norm_eps"),
            "needs": _BERT_NEEDS,
            "reading": Reading(approximates=True),
            "rename": _without(*beginnings),
            **more,
        }
    )


def _roberta(class_name: str, **more: Any) -> Architecture:
    kind = DecoderClass(class_name, {**_BERT_SIZES, "pad_token_id": 1})
    given = {"keys": _ROBERTA_KEYS, "tensors": _ROBERTA_TENSORS, "kind": kind, "notes": _ROBERTA_NOTES, **more}
    return _bert(class_name, "roberta.", **given)


_SCORE: Mapping[str, Any] = {
    "reading": Reading(scores=True, approximates=True),
    "rename": _scored_by({}, "roberta."),
    "needs": (*_BERT_NEEDS, *_HEAD),
    "refuses": several_labels,
    "notes": f"one label; {_ROBERTA_NOTES}",
}

_MODERN_NEEDS = ("token_embd.weight", "token_embd_norm.weight", "output_norm.weight")
_MODERN_ASSUMES: Assumed = {
    "hidden_activation": ("gelu",),
    "norm_bias": (False,),
    "attention_bias": (False,),
    "mlp_bias": (False,),
}


def _base_of(numbers: Numbers, kind: str, older: str, default: float) -> float:
    """Return the base of the rotary embedding in layers of a kind, which older files name otherwise."""
    given = numbers.decoder.settings.get("rope_parameters") or {}
    own = given.get(kind) if isinstance(given, Mapping) else None
    named = own.get("rope_theta") if isinstance(own, Mapping) else None
    return float(named) if isinstance(named, int | float) else numbers.number(older, default)


_MODERN_KEYS: Mapping[str, Key] = {
    **_layer_norm("norm_eps"),
    "attention.sliding_window": lambda numbers: numbers.whole("local_attention"),
    "attention.sliding_window_pattern": lambda numbers: modern_period(numbers.decoder.settings),
    "hidden_activation": lambda numbers: str(numbers.decoder.settings["hidden_activation"] or "gelu"),
    "rope.dimension_count": lambda numbers: numbers.decoder.width,
    "rope.freq_base": lambda numbers: _base_of(numbers, "full_attention", "global_rope_theta", 160_000.0),
    "rope.freq_base_swa": lambda numbers: _base_of(numbers, "sliding_attention", "local_rope_theta", 10_000.0),
}


def _modern_bert(class_name: str, **more: Any) -> Architecture:
    return Architecture(
        **{
            "name": "modern-bert",
            "kind": DecoderClass(class_name, _MODERN_DEFAULTS),
            "assumes": _MODERN_ASSUMES,
            "rope": (),
            "keys": _MODERN_KEYS,
            "needs": _MODERN_NEEDS,
            "lacks": ("blk.0.attn_norm.weight",),
            "reading": Reading(),
            "rename": _without("model."),
            "refuses": another_modern_bert,
            "notes": "period of the layers without a window",
            **more,
        }
    )


_POOLINGS = {"mean": 1, "cls": 2}
"""llama.cpp's numbers of poolings before a head."""


def _score_and_zero(_: Numbers) -> tuple[Piece, ...]:
    """Return the row of the score, and one of zeros: llama.cpp gives the shares of two rows, of which the first is then the score's sigmoid."""
    return (WHOLE, Piece(factor=0.0))


ENCODERS: tuple[Architecture, ...] = (
    Architecture(
        "qwen3",
        replace(CLASSES["Qwen3ForCausalLM"], name="Qwen3Model"),
        assumes=SILU_WITHOUT_BIAS,
        reading=Reading(),
        rename=_as_decoder,
    ),
    Architecture(
        "gemma-embedding",
        replace(CLASSES["Gemma3ForCausalLM"], name="Gemma3TextModel"),
        assumes={
            "hidden_activation": ("gelu_pytorch_tanh",),
            "attention_bias": (False,),
            "attn_logit_softcapping": (),
        },
        rope=("default",),
        has_windows=True,
        keys={"attention.causal": lambda _: False},
        reading=Reading(layers=2),
        rename=_as_decoder,
        refuses=another_gemma,
        notes="with `use_bidirectional_attention`; two linear layers behind the pooling or none",
    ),
    _bert("BertModel", "bert."),
    _roberta("RobertaModel"),
    _roberta("XLMRobertaModel"),
    _modern_bert("ModernBertModel"),
    _bert(
        "BertForSequenceClassification",
        **{
            **_SCORE,
            "rename": _scored_by(
                {"bert.pooler.dense.": "classifier.dense.", "classifier.": "classifier.out_proj."}, "bert."
            ),
            "refuses": first_of(several_labels, pairs_of_two_types),
            "notes": "one label, one type of tokens",
        },
    ),
    _modern_bert(
        "ModernBertForSequenceClassification",
        assumes={**_MODERN_ASSUMES, "classifier_activation": ("gelu",), "classifier_pooling": tuple(_POOLINGS)},
        keys={
            **_MODERN_KEYS,
            "classifier.pooling_type": lambda numbers: _POOLINGS[
                numbers.decoder.settings["classifier_pooling"] or "cls"
            ],
        },
        needs=(*_MODERN_NEEDS, "cls.weight", "cls.norm.weight", "cls.output.weight"),
        reading=Reading(scores=True),
        rename=_scored_by({"classifier.": "classifier.out_proj.", "head.": "head."}, "model."),
        refuses=first_of(several_labels, another_modern_bert),
        notes="one label; first token or mean before the head",
    ),
    _roberta("RobertaForSequenceClassification", **_SCORE),
    _roberta("XLMRobertaForSequenceClassification", **_SCORE),
    Architecture(
        "qwen3",
        replace(CLASSES["Qwen3ForCausalLM"], name="Qwen3ForSequenceClassification"),
        assumes=SILU_WITHOUT_BIAS,
        tensors={"score.weight": (Target("cls.output.weight", _score_and_zero),)},
        needs=("token_embd.weight", "output_norm.weight", "cls.output.weight"),
        reading=Reading(scores=True),
        rename=_as_decoder,
        refuses=several_labels,
        notes="one label",
    ),
)
"""In the order in which they are named to users."""
