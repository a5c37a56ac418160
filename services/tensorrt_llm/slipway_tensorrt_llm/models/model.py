"""A model's numbers, and what of them TensorRT-LLM cannot compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipway.errors import TensorRTLLMExportError
from slipway.model.configuration import ModelConfig
from slipway.model.decoders.decoder import Decoder, decoder_of, kinds_of_layers, settings_of
from slipway.texts import quoted
from slipway_tensorrt_llm.models.rope import rope_fields
from slipway_tensorrt_llm.models.settings import VALUES, flag, positive, unsupported
from slipway_tensorrt_llm.models.table import KNOWN, Architecture, architecture_of


@dataclass(frozen=True, slots=True)
class Model:
    """A model that TensorRT-LLM computes.

    Attributes:
        architecture: Its architecture.
        decoder: Its sizes.
        epsilon: Number below the root of the norms.
        qkv_bias: Whether queries, keys and values have biases.
        dense_bias: Whether the matrix behind attention has one.
        mlp_bias: Whether the matrices of the MLP have some.
        norm_bias: Whether norms have biases.
        rope: Fields of the rotary embedding.
    """

    architecture: Architecture
    decoder: Decoder
    epsilon: float
    qkv_bias: bool
    dense_bias: bool
    mlp_bias: bool
    norm_bias: bool
    rope: Mapping[str, Any]


def model_of(config: ModelConfig) -> Model:
    """Return the model with this ``config.json``.

    Raises:
        TensorRTLLMExportError: ``FAMILY_UNSUPPORTED`` if TensorRT-LLM does not compute it, ``BASE_MODEL_INVALID``.
    """
    found = architecture_of(config.class_name)
    if found is None:
        raise unsupported(f"the model is {config.description}, and TensorRT-LLM checkpoints are written of {KNOWN}")
    settings = settings_of(config)
    for key, values in found.assumes.items():
        if settings.get(key) is not None and settings[key] not in values:
            expected = " or ".join(map(quoted, values)) or "no such setting"
            raise _assumed(found, key, settings[key], expected)
    decoder = decoder_of(config, VALUES)
    if found.graph in ("phi3", "gpt") and decoder.width * decoder.heads != decoder.hidden:
        raise _assumed(found, "head_dim", decoder.width, f"heads that share the hidden size of {decoder.hidden}")
    kinds, period = settings.get("layer_types"), found.kind.period
    windowed = found.qk_norms and period and settings.get("sliding_window") is not None
    if windowed and kinds not in (None, kinds_of_layers(found.kind, settings, VALUES, decoder.layers)):
        raise _assumed(found, "layer_types", kinds, f"full attention in every layer number {period}")
    gpt, bias = found.graph == "gpt", flag(settings, "attention_bias")
    return Model(
        architecture=found,
        decoder=decoder,
        epsilon=positive(settings, "layer_norm_epsilon" if gpt else "rms_norm_eps"),
        qkv_bias=gpt or bias or found.class_name == "Qwen2ForCausalLM",
        dense_bias=gpt or (bias and found.graph == "llama"),
        mlp_bias=gpt or (found.graph == "llama" and flag(settings, "mlp_bias")),
        norm_bias=gpt,
        rope=rope_fields(found, decoder),
    )


def check_division(model: Model, *, tp: int, pp: int) -> None:
    """Refuse numbers of GPUs that the model cannot be divided among.

    Raises:
        TensorRTLLMExportError: ``FAMILY_UNSUPPORTED``.
    """
    found, decoder = model.architecture, model.decoder
    for what, count in (("attention heads", decoder.heads), ("values within an MLP", decoder.inner)):
        if count % tp:
            raise _undivided("tp", tp, f"the model's {count} {what} cannot be divided by it")
    if decoder.kv_heads % tp and tp % decoder.kv_heads:
        what = (
            f"the model's {decoder.kv_heads} heads of keys and values can neither be divided by it nor repeated evenly"
        )
        raise _undivided("tp", tp, what)
    if found.splits_embedding and decoder.vocabulary % tp:
        raise _undivided("tp", tp, f"the model's vocabulary of {decoder.vocabulary} cannot be divided by it")
    each, kv_each = decoder.heads // tp, max(1, decoder.kv_heads // tp)
    if found.qk_norms and each == kv_each > 1:
        # Attention.forward then takes the joined matrix for one with queries, keys and values of each head in turn.
        what = (
            f"each GPU has {each} heads of queries and of keys, whose norms TensorRT-LLM 1.2 applies to the wrong rows"
        )
        raise _undivided("tp", tp, what)
    if pp > 1 and not found.pipelines:
        raise _undivided("pp", pp, f"TensorRT-LLM does not divide the layers of {found.class_name}")
    if decoder.layers % pp:
        raise _undivided("pp", pp, f"the model's {decoder.layers} layers cannot be divided by it")


def refusal_reason(params: Mapping[str, Any], config: ModelConfig) -> str:
    """Return why no checkpoint is written of the model with this ``config.json`` with these parameters; empty if one is."""
    try:
        check_division(model_of(config), tp=int(params.get("tp", 1)), pp=int(params.get("pp", 1)))
    except TensorRTLLMExportError as error:
        return error.message if error.reason == "FAMILY_UNSUPPORTED" else ""
    return ""


def _undivided(name: str, value: int, why: str) -> TensorRTLLMExportError:
    return unsupported(f"{name} is {value}, and {why}", key=name)


def _assumed(found: Architecture, key: str, value: object, expected: str) -> TensorRTLLMExportError:
    what = (
        f"{key} is {quoted(value)[:200]} in config.json, and TensorRT-LLM computes {found.class_name} with {expected}"
    )
    return unsupported(what, key=key)
