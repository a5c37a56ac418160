"""Find the linear layers of a transformers folder by the model's own code, built without weights. Imports torch and transformers."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from transformers import AutoConfig
from transformers.pytorch_utils import Conv1D

from slipway.errors import QuantizationError
from slipway.model.dtypes import FLOATS, torch_dtypes
from slipway.model.families import (
    DECODER,
    QUESTION_ANSWERING,
    SEQUENCE_CLASSIFIER,
    TOKEN_CLASSIFIER,
    Comparison,
    Family,
    auto_model,
)
from slipway.model.folder import ModelFolder
from slipway.model.safetensors_file import TensorInfo
from slipway.texts import counted
from slipway_quantize.experts import EXPERT
from slipway_quantize.layers.structure import LinearWeight, Structure
from slipway_quantize.sensitive import sensitive_reason

_MATRIX, _STACK = 2, 3
"""Axes of a matrix, and of a stack of them."""
_WITH_HEADS = (SEQUENCE_CLASSIFIER, TOKEN_CLASSIFIER, QUESTION_ANSWERING)
"""Families whose result comes from a head of a few rows: quantizing it saves almost nothing and costs accuracy."""
_FLOAT_NAMES = {dtype: name for name, dtype in torch_dtypes(*FLOATS).items()}


def model_config(model: ModelFolder) -> Any:
    """Return transformers' configuration of a model.

    Raises:
        QuantizationError: ``BASE_MODEL_INVALID`` for an unknown architecture.
    """
    try:
        return AutoConfig.from_pretrained(model.path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the model's own code may raise anything
        raise QuantizationError(
            f"config.json does not describe a model that transformers knows ({_first_line(error)})",
            reason="BASE_MODEL_INVALID",
            remedy="give a folder written by save_pretrained",
            about={"file": "config.json"},
        ) from error


def find_linear_layers(
    config: Any, family: Family, tensors: Mapping[str, TensorInfo], *, stacks: Mapping[str, TensorInfo] | None = None
) -> Structure:
    """Find the linear layers of ``config``'s model whose weights are in ``tensors``, directly or through a tie.

    Args:
        config: transformers' configuration.
        family: The model's family.
        tensors: The tensors of the checkpoint, in which the experts of stacks may be tensors of their own.
        stacks: The stacks that these are parts of, by name.

    Raises:
        QuantizationError: ``QUANTIZATION_UNSUPPORTED`` if transformers rearranges the weights of linear layers when it loads them.
    """
    model = _meta_model(config, family)
    ties: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    converted, renamed = _converted_names(model, {**tensors, **(stacks or {})}, ties)
    _require_known_names(config, model, tensors, ties, converted=converted, renamed=renamed, split=bool(stacks))
    linear, kept = [], []
    layers = [(path, layer) for path, layer in model.named_modules() if isinstance(layer, torch.nn.Linear | Conv1D)]
    transposed = any(isinstance(layer, Conv1D) for _, layer in layers)
    for module, layer in layers:
        name = f"{module}.weight"
        own = renamed.get(name, name)
        tie = ties.get(name, name)
        source = own if own in tensors else renamed.get(tie, tie)
        if source not in tensors or tensors[source].shape != tuple(layer.weight.shape):
            continue
        if _is_kept(module, family, model, tied=name in ties, transposed=transposed):
            kept.append(module)
        else:
            linear.append(LinearWeight(module=module, source=source, tied=source != own))
    dtype, number = getattr(config, "dtype", None), getattr(config.get_text_config(), "num_hidden_layers", None)
    in_float32 = {*(model._keep_in_fp32_modules or ())}
    mixed = any(in_float32 & {*weight.module.split(".")} for weight in linear)
    known = {name for weight in linear for name in (weight.module, weight.stored)} | {*kept}
    state = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    loaded = {name for name, target in converted.items() if target in state}
    return Structure(
        model_type=config.model_type,
        linear=tuple(linear),
        kept=tuple(kept),
        head=next((path for path, layer in layers if layer is model.get_output_embeddings()), ""),
        unpacked=transposed or mixed or family.comparison in (Comparison.TEACHER_FORCED, Comparison.EMBEDDINGS),
        dtype=_FLOAT_NAMES.get(dtype) if isinstance(dtype, torch.dtype) else None,
        layers=number if isinstance(number, int) else None,
        experts=_find_experts(tensors, loaded, split=bool(stacks)),
        routers=tuple(
            module
            for module in (name.removesuffix(".weight") for name in tensors if name.endswith(".weight"))
            if module not in known and sensitive_reason(module)
        ),
        stacked=any(
            len(parameter.shape) == _STACK and "experts" in name.split(".") and name in tensors
            for name, parameter in model.named_parameters()
        ),
        renamed={
            target: name
            for name, target in converted.items()
            if target not in tensors and name in tensors and tensors[name].shape == state.get(target)
        },
    )


def _find_experts(
    tensors: Mapping[str, TensorInfo], loaded: Collection[str], *, split: bool
) -> tuple[LinearWeight, ...]:
    """Return the matrices of experts that transformers stacks while it loads, or that were cut out of stacks.

    Those of multi-token prediction count layers of their own, and transformers does not load them.
    """
    return tuple(
        LinearWeight(module=name.removesuffix(".weight"), source=name)
        for name, info in tensors.items()
        if len(info.shape) == _MATRIX
        and EXPERT.fullmatch(name.removesuffix(".weight"))
        and name.endswith(".weight")
        and "mtp" not in name.split(".")
        and (name in loaded or split)
    )


def _converted_names(
    model: Any, tensors: Mapping[str, TensorInfo], ties: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return how transformers names stored tensors while it loads them; nothing if the model has all of its own names.

    Returns:
        The new names by the stored ones; and, for weights that it only renames, packed or not, the stored name by the new one.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    state = model.state_dict()
    if all(name in tensors or ties.get(name, name) in tensors for name in state):
        return {}, {}
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    known = {**state, **{_packed(name): value for name, value in state.items()}}

    def rename(name: str) -> str:
        return rename_source_key(name, renamings, converters, model.base_model_prefix, known)[0]

    converted = {name: target for name in tensors if (target := rename(name)) != name}
    alone = {
        target: name
        for name, target in converted.items()
        if target in state and rename(_packed(name)) == _packed(target) and name.endswith(".weight")
    }
    return converted, alone


def _packed(name: str) -> str:
    return f"{name.removesuffix('.weight')}.weight_packed"


def _meta_model(config: Any, family: Family) -> Any:
    """Build the model of ``config`` without storage: names, types and shapes only."""
    try:
        with torch.device("meta"):
            return auto_model(family, config.to_dict()).from_config(config, trust_remote_code=False)
    except Exception as error:  # as above
        raise QuantizationError(
            f"transformers cannot build the {family.name} of model type {config.model_type!r} ({_first_line(error)})",
            reason="BASE_MODEL_INVALID",
            remedy="give a folder written by save_pretrained; level fp16 or bf16 does not need to build the model",
            about={"model_type": config.model_type},
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def _is_kept(module: str, family: Family, model: Any, *, tied: bool, transposed: bool) -> bool:
    """Return whether a linear layer is not quantized.

    Only a decoder's head is tied to nothing but its embedding and can be untied. Other families tie more to it (both
    embeddings of a translator, the bias of a masked language model's head), and a GPT-2's head is large compared with its layers.
    """
    if family in _WITH_HEADS and not module.startswith(f"{model.base_model_prefix}."):
        return True
    return tied and (family is not DECODER or transposed)


def _require_known_names(
    config: Any,
    model: Any,
    tensors: Mapping[str, TensorInfo],
    ties: Mapping[str, str],
    *,
    converted: Mapping[str, str],
    renamed: Mapping[str, str],
    split: bool,
) -> None:
    """Refuse models whose linear layers transformers fuses while loading: it would not find the quantized ones.

    Additional tensors are accepted if no weight is missing: transformers ignores them. What it renames keeps its stored name, and the
    experts that it stacks may be quantized one by one, because its converters unpack them first.
    """
    known = set(model.state_dict())
    layers = {f"{path}.weight" for path, layer in model.named_modules() if isinstance(layer, torch.nn.Linear | Conv1D)}
    made = {target for target in converted.values() if target in known and (target not in layers or target in renamed)}
    optional = [*(model._keys_to_ignore_on_load_missing or ()), *(model._keys_to_ignore_on_save or ())]
    missing = [
        name
        for name in known - made
        if name not in tensors and ties.get(name, name) not in tensors and not any(re.search(k, name) for k in optional)
    ]
    if split:  # the experts of a class that transformers replaces for quantized weights
        missing = [name for name in missing if "experts" not in name.split(".")]
    other = sorted(
        name
        for name, info in tensors.items()
        if len(info.shape) > 1 and name not in known and converted.get(name) not in made
    )
    fused = sorted(name for name, target in converted.items() if target in layers and target in missing)
    if (other or fused) and missing:
        first = (other or fused)[0]
        raise QuantizationError(
            f"transformers fuses {counted(len(other or fused), 'weight')} of this {config.model_type} model while loading, or does not know "
            f"them, first {first!r}; this version cannot quantize them",
            reason="QUANTIZATION_UNSUPPORTED",
            remedy="use level bf16 or fp16",
            about={"tensor": first, "model_type": config.model_type},
        )
