"""``genai_config.json``, with which onnxruntime-genai runs the folder of a decoder or of Whisper.

onnxruntime-genai takes Whisper's encoder and decoder as they are, under their own names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from slipway.model.families import DECODER, SPEECH
from slipway.model.model_files import processor_settings
from slipway_onnx_export.packaging.genai_pictures import add_pictures
from slipway_onnx_export.packaging.graphs import Interface, read_interface
from slipway_onnx_export.packaging.kinds import NotPackagedError, Packaged
from slipway_onnx_export.packaging.states import states_by_layer

FILE = "genai_config.json"

_OWN_TYPES = (
    *("ernie4_5", "gemma", "gemma2", "gemma3_text", "granite", "internlm2", "llama", "mistral", "nemotron", "olmo"),
    *("phi", "qwen2", "qwen3", "smollm3"),
)
"""Types that the runtime treats as ``decoder``, except that it finds their tool tokens. For its other types it expects other graphs."""

_MOST_BUFFERED = 4096
"""Tokens of a shared buffer unless an application asks for more: the runtime allocates it whole, 0.2 MB per token for 0.6B in fp32."""

_CONTEXT = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length", "seq_length")
_CACHE = re.compile(r"past_key_values\.(\d+)\.(key|value)")
_CONVOLUTIONS = "lfm2"
"""The runtime's type for decoders with convolutions, or attention, in each layer; it wants to know which."""

AUDIO_FILE = "audio_processor_config.json"

_FRAMES = 3000
"""Frames of sound that the runtime gives to the encoder: 30 seconds."""

_PREPARED = {"sampling_rate": 16000, "chunk_length": 30, "n_fft": 400, "hop_length": 160}
"""Settings for sound that every Whisper has; the runtime makes the frames itself."""

_SESSION = {"log_id": "onnxruntime-genai", "provider_options": []}


def write_genai(model: Packaged) -> str:
    """Write ``genai_config.json`` beside the graph, and for Whisper the preparation of sound; return the name of the first.

    Raises:
        NotPackagedError: The runtime cannot run this model's graph.
    """
    if model.family is DECODER:
        config = genai_config(model, read_interface(model.folder, "model.onnx"))
        if model.reads_pictures:
            add_pictures(model, config["model"], _SESSION)
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
    states = _states(graph, layers)
    return {
        "model": {
            "type": _CONVOLUTIONS if states else named if named in _OWN_TYPES else "decoder",
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
                **states.get("decoder", {}),
                "inputs": {
                    **{name: name for name in ("input_ids", "attention_mask", "position_ids") if name in graph.inputs},
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                    **states.get("inputs", {}),
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                    **states.get("outputs", {}),
                },
            },
        },
        "search": search_of(model, vocabulary) | _buffer_search(model, graph),
    }


def _states(graph: Interface, layers: int) -> dict[str, Any]:
    """Return what the runtime must be told of layers with a convolution alone, for each part of the configuration; empty if there are none.

    It finds recurrent states, with the convolution beside each, by their names in the graph.

    Raises:
        NotPackagedError: Some layers have a recurrent state, and others a convolution alone.
    """
    kinds = states_by_layer(graph.inputs)
    alone = [layer for layer, kept in kinds.items() if kept == {"conv_state"}]
    if not alone:
        return {}
    if len(alone) < len(kinds):
        raise NotPackagedError("onnxruntime-genai takes convolutions, or recurrent states, and its layers have both")
    places = graph.inputs[f"past_key_values.{alone[0]}.conv_state"][-1]
    return {
        "decoder": {
            "layer_types": ["conv" if layer in alone else "full_attention" for layer in range(layers)],
            "conv_cache_size": places,
        },
        "inputs": {"past_conv_names": "past_key_values.%d.conv_state"},
        "outputs": {"present_conv_names": "present.%d.conv_state"},
    }


def _cache(graph: Interface) -> tuple[int, int, int]:
    """Return heads and head size of the first layer with attention, and the number of layers; the runtime reads the others' from the graph."""
    shapes: dict[int, dict[str, tuple[Any, Any]]] = {}
    for name, shape in graph.inputs.items():
        if (part := _CACHE.fullmatch(name)) and len(shape) == 4:
            shapes.setdefault(int(part[1]), {})[part[2]] = (shape[1], shape[3])
    states = states_by_layer(graph.inputs)
    if not shapes or (not states and sorted(shapes) != list(range(len(shapes)))):
        raise NotPackagedError("its layers do not all have a cache of keys and values")
    for layer, sizes in shapes.items():
        if sizes.get("key") != sizes.get("value") or not all(isinstance(each, int) for each in sizes.get("key", ())):
            raise NotPackagedError(
                f"keys and values of layer {layer} have the sizes {sizes.get('key')} and {sizes.get('value')}, "
                "and onnxruntime-genai needs equal ones"
            )
    heads, size = shapes[min(shapes)]["key"]
    return heads, size, 1 + max(shapes.keys() | states)  # layers with experts alone keep nothing


def _context_length(config: Mapping[str, Any]) -> int:
    length = number(config, *_CONTEXT, default=0)
    if length < 1:
        raise NotPackagedError(f"its config.json states no context length ({', '.join(_CONTEXT)})")
    return length


def _buffer_search(model: Packaged, graph: Interface) -> dict[str, Any]:
    """Return the search settings of the buffer: whether past and present share one, and its length, which is allocated at once."""
    if not graph.promise.shared_buffer:
        # The graph returns a cache that is longer than the one it takes, so the two cannot share memory.
        return {"past_present_share_buffer": False}
    return {
        "past_present_share_buffer": True,
        "max_length": min(_context_length(model.config.text), _MOST_BUFFERED),
    }


def speech_config(model: Packaged) -> dict[str, Any]:
    """Return the configuration; sizes come from the graphs, tokens and search from the model's files.

    Raises:
        NotPackagedError: The runtime cannot run the graphs.
    """
    named = model.config.get("model_type")
    if named != "whisper":
        raise NotPackagedError(f"of speech models onnxruntime-genai runs Whisper alone, and this is {named}")
    encoder = read_interface(model.folder, "encoder_model.onnx")
    decoder = read_interface(model.folder, "decoder_model.onnx")
    sound = encoder.inputs.get("input_features", ())
    if sound[-1:] != (_FRAMES,):
        raise NotPackagedError(f"onnxruntime-genai gives Whisper {_FRAMES} frames, and the model takes {sound[-1:]}")
    heads, size, layers = _speech_cache(decoder)
    vocabulary, width = decoder.outputs["logits"][-1], encoder.outputs["last_hidden_state"][-1]
    if not isinstance(vocabulary, int) or not isinstance(width, int):
        raise NotPackagedError("its graphs do not state the sizes of the vocabulary and of the encoder's results")
    length = number(model.config, "max_target_positions", default=0)
    if not length:
        raise NotPackagedError("its config.json states no context length (max_target_positions)")
    sizes = {
        "hidden_size": width, "num_attention_heads": heads, "num_key_value_heads": heads,
        "head_size": size, "num_hidden_layers": layers,
    }  # fmt: skip
    return {
        "model": {
            "type": named,
            "context_length": length,
            "vocab_size": vocabulary,
            **special_tokens(model, vocabulary),
            "encoder": {
                "session_options": _SESSION,
                "filename": "encoder_model.onnx",
                **sizes,
                "inputs": {"audio_features": "input_features"},
                "outputs": {
                    "encoder_hidden_states": "last_hidden_state",
                    "cross_present_key_names": "present.%d.encoder.key",
                    "cross_present_value_names": "present.%d.encoder.value",
                },
            },
            "decoder": {
                "session_options": _SESSION,
                "filename": "decoder_model.onnx",
                **sizes,
                "inputs": {
                    "input_ids": "input_ids",
                    "past_key_names": "past_key_values.%d.decoder.key",
                    "past_value_names": "past_key_values.%d.decoder.value",
                    "cross_past_key_names": "past_key_values.%d.encoder.key",
                    "cross_past_value_names": "past_key_values.%d.encoder.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.decoder.key",
                    "present_value_names": "present.%d.decoder.value",
                },
            },
        },
        # The cache grows, so past and present cannot share memory.
        "search": search_of(model, vocabulary) | {"max_length": length, "past_present_share_buffer": False},
    }


def audio_processor(model: Packaged) -> dict[str, Any]:
    """Return the operations that make frames of a sound file, as the runtime's own builder writes them.

    Raises:
        NotPackagedError: The model's own files prepare sound otherwise.
    """
    given = next(iter(processor_settings(model.folder, "feature_extractor")), {})
    for name, wanted in _PREPARED.items():
        if given.get(name, wanted) != wanted:
            raise NotPackagedError(
                f"its sound is prepared with {name} {given[name]!r}, and by onnxruntime-genai with {wanted}"
            )
    bins = number(model.config, "num_mel_bins", default=80)
    fft, hop, chunk = (_PREPARED[name] for name in ("n_fft", "hop_length", "chunk_length"))
    operations: list[dict[str, Any]] = [
        {"name": "audio_decoder", "type": "AudioDecoder"},
        {"name": "STFT", "type": "STFTNorm", "attrs": {"n_fft": fft, "frame_length": fft, "hop_length": hop}},
        {
            "name": "log_mel_spectrogram",
            "type": "LogMelSpectrum",
            "attrs": {"chunk_size": chunk, "hop_length": hop, "n_fft": fft, "n_mel": bins},
        },
    ]
    return {"feature_extraction": {"sequence": [{"operation": each} for each in operations]}}


def _speech_cache(decoder: Interface) -> tuple[int, int, int]:
    """Return heads, head size and number of layers of the decoder's cache."""
    keys = [shape for name, shape in decoder.inputs.items() if name.endswith(".decoder.key")]
    if not keys:
        raise NotPackagedError("its decoder has no cache")
    _, heads, past, size = keys[0]
    if isinstance(past, int) or not isinstance(heads, int) or not isinstance(size, int):
        raise NotPackagedError("its decoder's cache has a fixed length")
    return heads, size, len(keys)


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
    """Return the token ids of a name: from the generation's configuration, otherwise from the model's."""
    for source in (model.generation, model.config, model.config.text):
        value = source.get(name)
        values = value if isinstance(value, list) else [value]
        tokens = [each for each in values if type(each) is int and each >= 0]
        if tokens:
            return tokens
    return []


def number(source: Mapping[str, Any], *names: str, default: int) -> int:
    """Return the first of the named values that is a number from 0."""
    return next((source[name] for name in names if type(source.get(name)) is int and source[name] >= 0), default)


def _float(model: Packaged, name: str, default: float) -> float:
    value = model.generation.get(name)
    return float(value) if isinstance(value, (int, float)) and value >= 0 else default
