"""``genai_config.json``, with which onnxruntime-genai runs the folder of a decoder."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from slipway.models.families import DECODER
from slipway_onnx_export.packaging.graphs import Interface, read_interface
from slipway_onnx_export.packaging.kinds import NotPackagedError, Packaged

FILE = "genai_config.json"

_OWN_TYPES = (
    *("ernie4_5", "gemma", "gemma2", "gemma3_text", "granite", "internlm2", "llama", "mistral", "nemotron", "olmo"),
    *("phi", "qwen2", "qwen3", "smollm3"),
)
"""Types that the runtime treats as ``decoder`` except that it finds their tool tokens. It expects other graphs of the others it knows."""

_MOST_BUFFERED = 4096
"""Tokens of a shared buffer unless an application asks for more: the runtime allocates it whole, 0.2 MB per token for 0.6B in fp32."""

_CONTEXT = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length", "seq_length")
_CACHE = re.compile(r"past_key_values\.(\d+)\.(key|value)")


def write_genai(model: Packaged) -> str:
    """Write ``genai_config.json`` beside the graph; return its name.

    Raises:
        NotPackagedError: The runtime cannot run this model's graph.
    """
    if model.family is not DECODER:
        raise NotPackagedError(
            f"onnxruntime-genai runs decoders of this interface, and the model's family is {model.family.name}"
        )
    text = json.dumps(genai_config(model, read_interface(model.folder, "model.onnx")), indent=2)
    (model.folder / FILE).write_text(text + "\n", encoding="utf-8")
    return FILE


def genai_config(model: Packaged, graph: Interface) -> dict[str, Any]:
    """Return the configuration; sizes come from the graph, tokens and search from the model's files.

    Raises:
        NotPackagedError: The runtime cannot run the graph.
    """
    heads, size, layers = _cache(graph)
    vocabulary = graph.outputs.get("logits", ("",))[-1]
    if not isinstance(vocabulary, int):
        raise NotPackagedError("its graph does not state the size of the vocabulary")
    config = model.text_config
    ends = [token for token in _tokens(model, "eos_token_id") if token < vocabulary]
    padding = [token for token in _tokens(model, "pad_token_id") if token < vocabulary] or ends[:1]
    starts = _tokens(model, "bos_token_id")
    named = str(config.get("model_type", ""))
    return {
        "model": {
            "type": named if named in _OWN_TYPES else "decoder",
            "context_length": _context_length(config),
            "vocab_size": vocabulary,
            **({"bos_token_id": starts[0]} if starts else {}),
            **({"eos_token_id": ends if len(ends) > 1 else ends[0]} if ends else {}),
            **({"pad_token_id": padding[0]} if padding else {}),
            "decoder": {
                "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
                "filename": "model.onnx",
                "hidden_size": _number(config, "hidden_size", "n_embd", default=heads * size),
                "num_attention_heads": _number(config, "num_attention_heads", "n_head", default=heads),
                "num_key_value_heads": heads,
                "head_size": size,
                "num_hidden_layers": layers,
                "inputs": {
                    **{name: name for name in ("input_ids", "attention_mask", "position_ids") if name in graph.inputs},
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
            },
        },
        "search": _search(model, vocabulary) | _buffer_search(model, graph),
    }


def _cache(graph: Interface) -> tuple[int, int, int]:
    """Return heads and head size of the first layer, and the number of layers; the runtime reads further layers' from the graph."""
    found: dict[int, dict[str, tuple[Any, Any]]] = {}
    for name, shape in graph.inputs.items():
        if (part := _CACHE.fullmatch(name)) and len(shape) == 4:
            found.setdefault(int(part[1]), {})[part[2]] = (shape[1], shape[3])
    if not found or sorted(found) != list(range(len(found))):
        raise NotPackagedError("its layers do not all have a cache of keys and values")
    for layer, sizes in found.items():
        if sizes.get("key") != sizes.get("value") or not all(isinstance(each, int) for each in sizes.get("key", ())):
            raise NotPackagedError(
                f"keys and values of layer {layer} have the sizes {sizes.get('key')} and {sizes.get('value')}, "
                "and onnxruntime-genai needs equal ones"
            )
    heads, size = found[0]["key"]
    return heads, size, len(found)


def _context_length(config: Mapping[str, Any]) -> int:
    length = _number(config, *_CONTEXT, default=0)
    if length < 1:
        raise NotPackagedError(f"its config.json states no context length ({', '.join(_CONTEXT)})")
    return length


def _search(model: Packaged, vocabulary: int) -> dict[str, Any]:
    """Return the search that ``generation_config.json`` asks for: greedy unless it says otherwise, as transformers does."""
    sampled = model.generation.get("do_sample") is True
    return {
        "do_sample": sampled,
        "temperature": _float(model, "temperature", 1.0),
        # transformers samples from the 50 best tokens unless told otherwise; the runtime refuses more than there are.
        "top_k": min(_number(model.generation, "top_k", default=50), vocabulary),
        "top_p": _float(model, "top_p", 1.0),
        "repetition_penalty": _float(model, "repetition_penalty", 1.0),
        "length_penalty": _float(model, "length_penalty", 1.0),
        "no_repeat_ngram_size": _number(model.generation, "no_repeat_ngram_size", default=0),
        "min_length": _number(model.generation, "min_length", default=0),
        "num_beams": 1 if sampled else max(1, _number(model.generation, "num_beams", default=1)),
        "num_return_sequences": 1,
        "early_stopping": True,
    }


def _buffer_search(model: Packaged, graph: Interface) -> dict[str, Any]:
    """Return whether past and present share memory; if so, how long the buffers are that the runtime allocates at once."""
    if not graph.promise.shared_buffer:
        # The graph returns a cache that is longer than the one it takes, so the two cannot share memory.
        return {"past_present_share_buffer": False}
    return {
        "past_present_share_buffer": True,
        "max_length": min(_context_length(model.text_config), _MOST_BUFFERED),
    }


def _tokens(model: Packaged, name: str) -> list[int]:
    """Return token ids by name: those of the generation, otherwise those of the model."""
    for source in (model.generation, model.config, model.text_config):
        value = source.get(name)
        values = value if isinstance(value, list) else [value]
        found = [each for each in values if type(each) is int and each >= 0]
        if found:
            return found
    return []


def _number(source: Mapping[str, Any], *names: str, default: int) -> int:
    return next((source[name] for name in names if type(source.get(name)) is int and source[name] >= 0), default)


def _float(model: Packaged, name: str, default: float) -> float:
    value = model.generation.get(name)
    return float(value) if isinstance(value, (int, float)) and value >= 0 else default
