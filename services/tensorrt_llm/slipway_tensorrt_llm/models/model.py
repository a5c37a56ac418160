"""A model's numbers, and what of them TensorRT-LLM cannot compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipway.errors import TensorRTLLMExportError
from slipway.model.config.limits import MOST_LAYERS, MOST_PARTS
from slipway.model.configuration import ModelConfig
from slipway.texts import quoted
from slipway_tensorrt_llm.models.rope import rope_fields
from slipway_tensorrt_llm.models.settings import flag, invalid, positive, unsupported, whole
from slipway_tensorrt_llm.models.table import KNOWN, Architecture, architecture_of

_LOCAL, _FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, slots=True)
class Model:
    """A model that TensorRT-LLM computes.

    Attributes:
        architecture: Its architecture.
        settings: Its ``config.json``, with its class's defaults.
        layers: Number of layers.
        hidden: Width of the states between layers.
        heads: Number of attention heads.
        kv_heads: Number of heads of keys and values.
        width: Width of a head.
        inner: Width of the states within an MLP.
        vocabulary: Rows of the embedding.
        positions: Most tokens of a text.
        epsilon: Number below the root of the norms.
        qkv_bias: Whether queries, keys and values have biases.
        dense_bias: Whether the matrix behind attention has one.
        mlp_bias: Whether the matrices of the MLP have some.
        norm_bias: Whether norms have biases.
        tied: Whether the embedding is the head too, unless a head is stored.
        rope: Fields of the rotary embedding.
        windows: Tokens that each layer looks back; empty if all layers see the whole text.
    """

    architecture: Architecture
    settings: Mapping[str, Any]
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    width: int
    inner: int
    vocabulary: int
    positions: int
    epsilon: float
    qkv_bias: bool
    dense_bias: bool
    mlp_bias: bool
    norm_bias: bool
    tied: bool
    rope: Mapping[str, Any]
    windows: tuple[int, ...]


def model_of(config: ModelConfig) -> Model:
    """Return the model with this ``config.json``.

    Raises:
        TensorRTLLMExportError: ``FAMILY_UNSUPPORTED`` if TensorRT-LLM does not compute it, ``BASE_MODEL_INVALID``.
    """
    found = architecture_of(config)
    if found is None:
        raise unsupported(f"the model is {config.description}, and TensorRT-LLM checkpoints are written of {KNOWN}")
    settings = found.settings(config)
    for key, values in found.assumes.items():
        if settings.get(key) is not None and settings[key] not in values:
            expected = " or ".join(map(quoted, values)) or "no such setting"
            raise _assumed(found, key, settings[key], expected)
    heads = whole(settings, "num_attention_heads", "n_head", most=MOST_PARTS)
    hidden = whole(settings, "hidden_size", "n_embd")
    width = whole(settings, "head_dim", default=found.head_width or max(1, hidden // heads))
    kv_heads = whole(settings, "num_key_value_heads", default=heads, most=heads)
    layers = whole(settings, "num_hidden_layers", "n_layer", most=MOST_LAYERS)
    positions = whole(settings, "max_position_embeddings", "n_positions")
    if heads % kv_heads:
        raise invalid("num_key_value_heads", kv_heads, f"a divisor of the {heads} attention heads")
    if found.kind in ("phi3", "gpt") and width * heads != hidden:
        raise _assumed(found, "head_dim", width, f"heads that share the hidden size of {hidden}")
    gpt, bias = found.kind == "gpt", flag(settings, "attention_bias")
    return Model(
        architecture=found,
        settings=settings,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        width=width,
        inner=whole(settings, "intermediate_size", "n_inner", default=4 * hidden),
        vocabulary=whole(settings, "vocab_size"),
        positions=positions,
        epsilon=positive(settings, "layer_norm_epsilon" if gpt else "rms_norm_eps"),
        qkv_bias=gpt or bias or found.model_class == "Qwen2ForCausalLM",
        dense_bias=gpt or (bias and found.kind == "llama"),
        mlp_bias=gpt or (found.kind == "llama" and flag(settings, "mlp_bias")),
        norm_bias=gpt,
        tied=flag(settings, "tie_word_embeddings"),
        rope=rope_fields(found, settings, width=width, positions=positions),
        windows=_windows(found, settings, layers, positions),
    )


def _windows(found: Architecture, settings: Mapping[str, Any], layers: int, positions: int) -> tuple[int, ...]:
    """Return how far each layer looks back, as ``layer_types`` or the class's own rule says."""
    if settings.get("sliding_window") is None or settings.get("use_sliding_window") is False:
        return ()
    if found.kind == "qwen" and not flag(settings, "use_sliding_window"):
        return ()
    if found.model_class in ("LlamaForCausalLM", "GemmaForCausalLM", "GPT2LMHeadModel"):
        return ()  # these classes have no windows, whatever a configuration says
    window = whole(settings, "sliding_window")
    kinds = settings.get("layer_types")
    by_rule = [_kind(found, settings, layer) for layer in range(layers)]
    if kinds is None:
        kinds = by_rule
    if not isinstance(kinds, list) or len(kinds) != layers or not {*map(str, kinds)} <= {_LOCAL, _FULL}:
        raise invalid("layer_types", kinds, f"a list of {layers} of {_LOCAL} and {_FULL}")
    if found.qk_norms and found.period and kinds != by_rule:
        raise _assumed(found, "layer_types", kinds, f"full attention in every layer number {found.period}")
    reach = tuple(min(window, positions) if kind == _LOCAL else positions for kind in kinds)
    return reach if min(reach) < positions else ()


def _kind(found: Architecture, settings: Mapping[str, Any], layer: int) -> str:
    if found.period:
        return _LOCAL if (layer + 1) % found.period else _FULL
    if found.kind == "qwen":
        return _LOCAL if layer >= whole(settings, "max_window_layers", default=28) else _FULL
    return _LOCAL


def check_division(model: Model, *, tp: int, pp: int) -> None:
    """Refuse numbers of GPUs that the model cannot be divided among.

    Raises:
        TensorRTLLMExportError: ``FAMILY_UNSUPPORTED``.
    """
    found = model.architecture
    for what, count in (("attention heads", model.heads), ("values within an MLP", model.inner)):
        if count % tp:
            raise _undivided("tp", tp, f"the model's {count} {what} cannot be divided by it")
    if model.kv_heads % tp and tp % model.kv_heads:
        what = f"the model's {model.kv_heads} heads of keys and values can neither be divided by it nor repeated evenly"
        raise _undivided("tp", tp, what)
    if found.splits_embedding and model.vocabulary % tp:
        raise _undivided("tp", tp, f"the model's vocabulary of {model.vocabulary} cannot be divided by it")
    each, kv_each = model.heads // tp, max(1, model.kv_heads // tp)
    if found.qk_norms and each == kv_each > 1:
        # Attention.forward then takes the joined matrix for one with queries, keys and values of each head in turn.
        what = (
            f"each GPU has {each} heads of queries and of keys, whose norms TensorRT-LLM 1.2 applies to the wrong rows"
        )
        raise _undivided("tp", tp, what)
    if pp > 1 and not found.pipelines:
        raise _undivided("pp", pp, f"TensorRT-LLM does not divide the layers of {found.model_class}")
    if model.layers % pp:
        raise _undivided("pp", pp, f"the model's {model.layers} layers cannot be divided by it")


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
        f"{key} is {quoted(value)[:200]} in config.json, and TensorRT-LLM computes {found.model_class} with {expected}"
    )
    return unsupported(what, key=key)
