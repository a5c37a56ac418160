"""The ``config.json`` of a checkpoint.

Sources: "TensorRT-LLM Checkpoint", https://nvidia.github.io/TensorRT-LLM/legacy/architecture/checkpoint.html, section Config. The fields of
each graph are from ``config.py`` of TensorRT-LLM 1.2 in ``tensorrt_llm/models/{llama,qwen,gemma,phi3,gpt}``; ``runtime_defaults`` is from
``PretrainedConfig``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from slipway_tensorrt_llm.models.model import Model, positive


def checkpoint_fields(model: Model, *, dtype: str, tp: int, pp: int) -> dict[str, Any]:
    """Return the fields.

    Args:
        model: The model.
        dtype: Type of the weights.
        tp: GPUs that share each layer.
        pp: Groups of layers.

    Raises:
        TensorRTLLMExportError: ``BASE_MODEL_INVALID``.
    """
    architecture = model.architecture
    return {
        "architecture": architecture.class_name,
        "dtype": dtype,
        "logits_dtype": "float32",
        "vocab_size": model.decoder.vocabulary,
        "max_position_embeddings": model.decoder.positions,
        "hidden_size": model.decoder.hidden,
        "num_hidden_layers": model.decoder.layers,
        "num_attention_heads": model.decoder.heads,
        "num_key_value_heads": model.decoder.kv_heads,
        "head_size": model.decoder.width,
        "intermediate_size": model.decoder.inner,
        "norm_epsilon": model.epsilon,
        "tie_word_embeddings": model.decoder.tied,
        "use_parallel_embedding": architecture.splits_embedding and tp > 1,
        "embedding_sharding_dim": 0,
        "mapping": {"world_size": tp * pp, "tp_size": tp, "pp_size": pp},
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
        **(
            {"runtime_defaults": {"max_attention_window": list(model.decoder.windows)}} if model.decoder.windows else {}
        ),
        **model.rope,
        **_OF_GRAPHS[architecture.graph](model),
    }


def _llama(model: Model) -> dict[str, Any]:
    return {"hidden_act": "silu", "attn_bias": model.qkv_bias, "mlp_bias": model.mlp_bias}


def _qwen(model: Model) -> dict[str, Any]:
    return {
        "hidden_act": "silu",
        "attn_bias": model.qkv_bias,
        "mlp_bias": False,
        "qwen_type": "qwen3" if model.architecture.qk_norms else "qwen2",
        "seq_length": 8192,
        "use_logn_attn": False,
        "moe_intermediate_size": 0,
        "moe_shared_expert_intermediate_size": 0,
    }


def _gemma(model: Model) -> dict[str, Any]:
    """Return the fields of Gemma; TensorRT-LLM recognises the two newer graphs by theirs."""
    common = {"hidden_act": "gelu_pytorch_tanh", "attn_bias": False, "mlp_bias": False}
    if not model.decoder.kind.period:
        return common
    settings = model.decoder.settings
    newer: dict[str, Any] = {
        "query_pre_attn_scalar": positive(settings, "query_pre_attn_scalar"),
        "final_logit_softcapping": _cap(settings, "final_logit_softcapping"),
    }
    if not model.architecture.qk_norms:
        return common | newer | {"attn_logit_softcapping": _cap(settings, "attn_logit_softcapping")}
    period = model.decoder.kind.period
    # Releases until 1.0 read the name without the underscore; later ones read the name with it.
    pattern = {"_sliding_window_pattern": period, "sliding_window_pattern": period}
    return common | newer | pattern | {"sliding_window": min(model.decoder.windows, default=model.decoder.positions)}


def _cap(settings: Mapping[str, Any], key: str) -> float | None:
    return None if settings.get(key) is None else positive(settings, key)


def _phi3(model: Model) -> dict[str, Any]:
    del model
    return {"hidden_act": "swiglu"}


def _gpt(model: Model) -> dict[str, Any]:
    del model
    return {
        "hidden_act": "gelu_new",
        "gpt_variant": "gpt2",
        "bias": True,
        "q_scaling": 1.0,
        "embedding_scale": None,
        "apply_query_key_layer_scaling": False,
    }


_OF_GRAPHS: Mapping[str, Callable[[Model], dict[str, Any]]] = {
    "llama": _llama,
    "qwen": _qwen,
    "gemma": _gemma,
    "phi3": _phi3,
    "gpt": _gpt,
}
