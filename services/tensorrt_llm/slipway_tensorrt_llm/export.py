"""Write a model's folder as a TensorRT-LLM checkpoint: plan, write, check, and copy other files.

Sources of ``config.json``: "TensorRT-LLM Checkpoint", https://nvidia.github.io/TensorRT-LLM/legacy/architecture/checkpoint.html, section
Config. The fields of each graph are from ``config.py`` of TensorRT-LLM 1.2 in ``tensorrt_llm/models/{llama,qwen,gemma,phi3,gpt}``;
``runtime_defaults`` is from ``PretrainedConfig``.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slipway.distribution import installed_version, own_version
from slipway.errors import TensorRTLLMExportError
from slipway.files.paths import real_file
from slipway.model.configuration import ModelConfig
from slipway.model.dtypes import DTYPES
from slipway.model.model_files import CONFIG, companion_files
from slipway.model.safetensors_file import read_weights
from slipway.stage import Context
from slipway_tensorrt_llm.models.model import Model, check_division, model_of, positive
from slipway_tensorrt_llm.params import TensorRTLLMParams
from slipway_tensorrt_llm.weights.checks import check_checkpoint
from slipway_tensorrt_llm.weights.planning import Plan
from slipway_tensorrt_llm.weights.writing import Written, file_bytes, rank_file, write_rank

DESCRIPTION = "tensorrt_llm.json"
_LIBRARIES = ("ml_dtypes", "numpy")
_TYPES = {DTYPES[name].torch: name for name in ("F16", "BF16", "F32")}


def export_model(source: Path, params: TensorRTLLMParams, ctx: Context) -> Path:
    """Write a model's folder to ``ctx.workdir / "tensorrt_llm"`` and return that folder.

    Raises:
        TensorRTLLMExportError: With the reasons that the README lists.
        CheckpointValidationError: A file of the model cannot be read.
    """
    started = time.monotonic()
    model, tensors = model_of(ModelConfig.read(source)), read_weights(source)
    check_division(model, tp=params.tp, pp=params.pp)
    plan = Plan(model, tensors, tp=params.tp, pp=params.pp)
    dtype = params.dtype if params.dtype != "auto" else _own_dtype(plan)
    folder = ctx.workdir / "tensorrt_llm"
    folder.mkdir()
    fields = checkpoint_fields(model, dtype=dtype, tp=params.tp, pp=params.pp)
    (folder / CONFIG).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    total = sum(file_bytes(planned, _TYPES[dtype]) for planned in plan.ranks)
    report = _progress_counter(ctx, "weights", total)
    written = [
        write_rank(folder / rank_file(rank), planned, plan.sources, dtype=_TYPES[dtype], on_bytes=report)
        for rank, planned in enumerate(plan.ranks)
    ]
    for each in written:
        ctx.digest(each.path, each.sha256)
    checks = check_checkpoint(folder, plan, dtype=_TYPES[dtype], on_bytes=_progress_counter(ctx, "checking", total))
    _copy_companions(source, folder)
    _warn(model, ctx)
    facts = _facts(written, fields, plan, ctx.input_digests.get("pytorch", "")) | checks
    (folder / DESCRIPTION).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    ctx.record(
        **facts, size_after_bytes=sum(each.size for each in written), seconds=round(time.monotonic() - started, 3)
    )
    return folder


def _own_dtype(plan: Plan) -> str:
    """Return the type that most of the model's weights have."""
    counts: dict[str, int] = {}
    for source in plan.sources.values():
        counts[source.info.dtype] = counts.get(source.info.dtype, 0) + source.info.numel
    most = max(sorted(counts), key=lambda name: counts[name])
    if most not in _TYPES.values():
        raise TensorRTLLMExportError(
            f"most weights are {DTYPES[most].torch}, which TensorRT-LLM does not compute in",
            reason="DTYPE_UNSUPPORTED",
            remedy="use dtype bfloat16",
            about={"dtype": most},
        )
    return DTYPES[most].torch


def _copy_companions(source: Path, target: Path) -> None:
    """Copy the tokenizer and other files beside the weights, but not ``config.json``, because the checkpoint has its own."""
    for path in companion_files(source):
        name = path.relative_to(source)
        if name != Path(CONFIG):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(real_file(source, name), target / name)


def _progress_counter(ctx: Context, phase: str, total: int) -> Callable[[int], None]:
    done = 0

    def count(size: int) -> None:
        nonlocal done
        done += size
        ctx.progress(phase, done=done, total=total)

    return count


def _warn(model: Model, ctx: Context) -> None:
    architecture = model.architecture
    if model.decoder.windows:
        ctx.warn(
            f"the graph of {architecture.class_name} has no sliding window: engines take it from runtime_defaults of the checkpoint's config.json; "
            "releases that do not know this field need max_attention_window where the engine is run"
        )
    if architecture.qk_norms and abs(model.epsilon - 1e-5) > 1e-9:
        ctx.warn(
            f"TensorRT-LLM computes the norms of queries and keys of {architecture.class_name} with an epsilon of 1e-05, whatever the checkpoint "
            f"says; the model's is {model.epsilon:g}"
        )


def _facts(written: list[Written], fields: Mapping[str, Any], plan: Plan, lineage: str) -> dict[str, Any]:
    return {
        "precision": fields["dtype"],
        "architecture": fields["architecture"],
        "tp": plan.tp,
        "pp": plan.pp,
        "files": {
            each.path.name: {"sha256": each.sha256, "tensors": each.tensors, "size_bytes": each.size}
            for each in written
        },
        "lineage": lineage,
        "tools": {"slipway": own_version(), **{name: installed_version(name) for name in _LIBRARIES}},
    }


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
        **_FIELDS_OF_GRAPHS[architecture.graph](model),
    }


def _llama_fields(model: Model) -> dict[str, Any]:
    return {"hidden_act": "silu", "attn_bias": model.qkv_bias, "mlp_bias": model.mlp_bias}


def _qwen_fields(model: Model) -> dict[str, Any]:
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


def _gemma_fields(model: Model) -> dict[str, Any]:
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


def _phi3_fields(model: Model) -> dict[str, Any]:
    del model
    return {"hidden_act": "swiglu"}


def _gpt_fields(model: Model) -> dict[str, Any]:
    del model
    return {
        "hidden_act": "gelu_new",
        "gpt_variant": "gpt2",
        "bias": True,
        "q_scaling": 1.0,
        "embedding_scale": None,
        "apply_query_key_layer_scaling": False,
    }


_FIELDS_OF_GRAPHS: Mapping[str, Callable[[Model], dict[str, Any]]] = {
    "llama": _llama_fields,
    "qwen": _qwen_fields,
    "gemma": _gemma_fields,
    "phi3": _phi3_fields,
    "gpt": _gpt_fields,
}
