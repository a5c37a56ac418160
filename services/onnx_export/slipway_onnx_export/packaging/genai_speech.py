"""Whisper for onnxruntime-genai: it takes the encoder and the decoder as they are, under their own names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipway.files.json_documents import read_json_object
from slipway_onnx_export.packaging.genai_search import number, search_of, special_tokens
from slipway_onnx_export.packaging.graphs import Interface, read_interface
from slipway_onnx_export.packaging.kinds import NotPackagedError, Packaged

AUDIO_FILE = "audio_processor_config.json"

_FRAMES = 3000
"""Frames of sound that the runtime gives to the encoder: 30 seconds."""

_PREPARED = {"sampling_rate": 16000, "chunk_length": 30, "n_fft": 400, "hop_length": 160}
"""What every Whisper does with sound; the runtime makes the frames itself."""

_SESSION = {"log_id": "onnxruntime-genai", "provider_options": []}


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
    heads, size, layers = _cache(decoder)
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
    """Return how the runtime makes frames of a sound file, as its own builder says it.

    Raises:
        NotPackagedError: The model's own files prepare sound otherwise.
    """
    given = _preprocessing(model)
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


def _preprocessing(model: Packaged) -> Mapping[str, Any]:
    """Return what the model's files say of sound; transformers 5 keeps that within the processor's file."""
    for name, part in (("preprocessor_config.json", ""), ("processor_config.json", "feature_extractor")):
        try:
            document = read_json_object(model.folder / name, lenient=True)
        except (OSError, ValueError):
            continue
        found = document.get(part) if part else document
        if isinstance(found, dict):
            return found
    return {}


def _cache(decoder: Interface) -> tuple[int, int, int]:
    """Return heads, head size and number of layers of the decoder's cache."""
    keys = [shape for name, shape in decoder.inputs.items() if name.endswith(".decoder.key")]
    if not keys:
        raise NotPackagedError("its decoder has no cache")
    _, heads, past, size = keys[0]
    if isinstance(past, int) or not isinstance(heads, int) or not isinstance(size, int):
        raise NotPackagedError("its decoder's cache has a fixed length")
    return heads, size, len(keys)
