"""What a model's files say of tokens and of the search for a text, as ``genai_config.json`` has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipway_onnx_export.packaging.kinds import Packaged


def special_tokens(model: Packaged, vocabulary: int) -> dict[str, int | list[int]]:
    """Return the tokens that begin, end and pad a text; the runtime refuses one outside of the vocabulary."""
    ends = [token for token in _tokens(model, "eos_token_id") if token < vocabulary]
    padding = [token for token in _tokens(model, "pad_token_id") if token < vocabulary] or ends[:1]
    starts = _tokens(model, "bos_token_id")
    return {
        **({"bos_token_id": starts[0]} if starts else {}),
        **({"eos_token_id": ends if len(ends) > 1 else ends[0]} if ends else {}),
        **({"pad_token_id": padding[0]} if padding else {}),
    }


def search_of(model: Packaged, vocabulary: int) -> dict[str, Any]:
    """Return the search that ``generation_config.json`` asks for: greedy unless it says otherwise, as transformers does."""
    sampled = model.generation.get("do_sample") is True
    return {
        "do_sample": sampled,
        "temperature": _float(model, "temperature", 1.0),
        # transformers samples from the 50 best tokens unless told otherwise; the runtime refuses more than there are.
        "top_k": min(number(model.generation, "top_k", default=50), vocabulary),
        "top_p": _float(model, "top_p", 1.0),
        "repetition_penalty": _float(model, "repetition_penalty", 1.0),
        "length_penalty": _float(model, "length_penalty", 1.0),
        "no_repeat_ngram_size": number(model.generation, "no_repeat_ngram_size", default=0),
        "min_length": number(model.generation, "min_length", default=0),
        "num_beams": 1 if sampled else max(1, number(model.generation, "num_beams", default=1)),
        "num_return_sequences": 1,
        "early_stopping": True,
    }


def _tokens(model: Packaged, name: str) -> list[int]:
    """Return token ids by name: those of the generation, otherwise those of the model."""
    for source in (model.generation, model.config, model.config.text):
        value = source.get(name)
        values = value if isinstance(value, list) else [value]
        found = [each for each in values if type(each) is int and each >= 0]
        if found:
            return found
    return []


def number(source: Mapping[str, Any], *names: str, default: int) -> int:
    """Return the first of the named values that is a number from 0."""
    return next((source[name] for name in names if type(source.get(name)) is int and source[name] >= 0), default)


def _float(model: Packaged, name: str, default: float) -> float:
    value = model.generation.get(name)
    return float(value) if isinstance(value, (int, float)) and value >= 0 else default
