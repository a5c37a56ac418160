"""``genai_config.json``, with which onnxruntime-genai runs the folder of a decoder or of Whisper."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from slipway.model.families import DECODER, SPEECH
from slipway_onnx_export.packaging.genai_search import number, search_of, special_tokens
from slipway_onnx_export.packaging.genai_speech import AUDIO_FILE, audio_processor, speech_config
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
    """Write ``genai_config.json`` beside the graph, of Whisper also how sound is prepared; return the former's name.

    Raises:
        NotPackagedError: The runtime cannot run this model's graph.
    """
    if model.family is DECODER:
        config = genai_config(model, read_interface(model.folder, "model.onnx"))
    elif model.family is SPEECH:
        config = speech_config(model)
        (model.folder / AUDIO_FILE).write_text(json.dumps(audio_processor(model), indent=2) + "\n", encoding="utf-8")
    else:
        raise NotPackagedError(
            f"onnxruntime-genai runs decoders and Whisper, and the model's family is {model.family.name}"
        )
    (model.folder / FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
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
    config = model.config.text
    named = str(config.get("model_type", ""))
    return {
        "model": {
            "type": named if named in _OWN_TYPES else "decoder",
            "context_length": _context_length(config),
            "vocab_size": vocabulary,
            **special_tokens(model, vocabulary),
            "decoder": {
                "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
                "filename": "model.onnx",
                "hidden_size": number(config, "hidden_size", "n_embd", default=heads * size),
                "num_attention_heads": number(config, "num_attention_heads", "n_head", default=heads),
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
        "search": search_of(model, vocabulary) | _buffer_search(model, graph),
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
    length = number(config, *_CONTEXT, default=0)
    if length < 1:
        raise NotPackagedError(f"its config.json states no context length ({', '.join(_CONTEXT)})")
    return length


def _buffer_search(model: Packaged, graph: Interface) -> dict[str, Any]:
    """Return whether past and present share memory; if so, how long the buffers are that the runtime allocates at once."""
    if not graph.promise.shared_buffer:
        # The graph returns a cache that is longer than the one it takes, so the two cannot share memory.
        return {"past_present_share_buffer": False}
    return {
        "past_present_share_buffer": True,
        "max_length": min(_context_length(model.config.text), _MOST_BUFFERED),
    }
