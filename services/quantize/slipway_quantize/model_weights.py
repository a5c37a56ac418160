"""Find the linear layers of a transformers folder, and read its weights a few rows at a time, stored or left out."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoConfig
from transformers.pytorch_utils import Conv1D

from slipway.errors import QuantizationError
from slipway.model.configuration import ModelConfig
from slipway.model.dtypes import FLOATS, numpy_dtypes, torch_dtypes
from slipway.model.families import (
    DECODER,
    FAMILIES,
    QUESTION_ANSWERING,
    SEQUENCE_CLASSIFIER,
    TOKEN_CLASSIFIER,
    Comparison,
    Family,
    auto_model,
)
from slipway.model.folder import ModelFolder
from slipway.model.safetensors_file import TensorInfo
from slipway.model.weights import reading
from slipway.model.weights.reading import Weights
from slipway.texts import counted
from slipway_quantize.experts import EXPERT
from slipway_quantize.grid import rounding
from slipway_quantize.levels import is_named
from slipway_quantize.params import unknown_family_reason
from slipway_quantize.sensitive import sensitive_reason

DTYPES = torch_dtypes(*FLOATS, "I64", "I32", "I16", "I8", "U8", "BOOL")
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_MATRIX, _STACK = 2, 3
"""Axes of a matrix, and of a stack of them."""
_WITH_HEADS = (SEQUENCE_CLASSIFIER, TOKEN_CLASSIFIER, QUESTION_ANSWERING)
"""Families whose result comes from a head of a few rows: quantizing it saves almost nothing and costs accuracy."""


def read_tensors(weights: Weights) -> dict[str, TensorInfo]:
    """Return the tensors of a folder by name, file by file and sorted within each; no weight is read.

    Raises:
        QuantizationError: ``DTYPE_UNSUPPORTED`` for 8-bit floats and the like.
    """
    tensors = sorted(weights.tensors.values(), key=lambda tensor: (tensor.file.name, tensor.name))
    for tensor in tensors:
        if tensor.dtype not in DTYPES:
            raise QuantizationError(
                f"tensor {tensor.name!r} in {tensor.file.name} has the data type {tensor.dtype}, which cannot be converted",
                reason="DTYPE_UNSUPPORTED",
                remedy="start from weights in float32, bfloat16 or float16",
                about={"tensor": tensor.name, "file": tensor.file.name},
            )
    return {tensor.name: tensor for tensor in tensors}


def read_rows(weights: Weights, tensor: TensorInfo, first: int, count: int) -> Tensor:
    """Return rows of a tensor; a scalar is one row."""
    values = np.ascontiguousarray(weights.rows(tensor.name, first, count))
    return torch.from_numpy(values.reshape(-1).view(np.uint8)).view(DTYPES[tensor.dtype]).reshape(values.shape)


def map_tensor(tensor: TensorInfo) -> Tensor:
    """Return a stored tensor whose values are read from its file when they are used."""
    raw = torch.from_numpy(reading.mapped(tensor).reshape(-1).view(np.uint8))
    return raw.view(DTYPES[tensor.dtype]).reshape(tensor.shape)


def as_array(values: Tensor) -> NDArray[Any]:
    """Return a float tensor as an array of the same memory."""
    if values.dtype == torch.bfloat16:
        return values.view(torch.uint16).numpy().view(numpy_dtypes("BF16")["BF16"])
    array: NDArray[Any] = values.numpy()
    return array


def require_finite(values: Tensor, name: str) -> None:
    """Refuse NaN and infinity.

    Raises:
        QuantizationError: ``NON_FINITE_WEIGHTS``.
    """
    if values.is_floating_point() and not bool(torch.isfinite(values).all()):
        rounding.require_finite(as_array(values), name)


def cast_to_half(values: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Convert finite ``values`` to ``dtype``; a value beyond its range is an error and never becomes infinity.

    Raises:
        QuantizationError: ``NON_FINITE_WEIGHTS`` or ``WEIGHT_OVERFLOW``.
    """
    require_finite(values, name)
    cast = values.to(dtype)
    if not bool(torch.isfinite(cast).all()):
        largest = float(values.abs().max())
        raise QuantizationError(
            f"tensor {name!r} holds {largest:.6g}, beyond the range of {dtype} (at most {torch.finfo(dtype).max:.6g})",
            reason="WEIGHT_OVERFLOW",
            remedy="use bf16, which has the range of float32, or int8",
            about={"tensor": name, "largest": largest, "dtype": str(dtype).removeprefix("torch.")},
        )
    return cast


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """One linear layer's weight.

    Attributes:
        module: Name of the module in the loaded model.
        source: Tensor of the checkpoint that holds the weight; that of another module if the two are tied.
        tied: Whether it is that of another module.
    """

    module: str
    source: str
    tied: bool = False

    @property
    def stored(self) -> str:
        """Return the module's name in the checkpoint, which transformers may change while it loads."""
        return self.module if self.tied else self.source.removesuffix(".weight")

    def is_among(self, names: Collection[str]) -> bool:
        """Return whether it is among names of layers, which may be transformers' or the checkpoint's."""
        return is_named(self.module, names) or is_named(self.stored, names)


@dataclass(frozen=True, slots=True)
class Structure:
    """How a model uses its tensors.

    Attributes:
        linear: Linear layers to quantize whose weight is in the checkpoint, in the model's order.
        kept: Linear layers that are not quantized: heads, and in most families those tied to an embedding.
        head: The layer that makes a language model's results, of the shape of its embedding; empty if there is none.
        unpacked: Whether transformers must unpack the weights while it loads them: compressed-tensors unpacks at the model's first
            run and supports only ``Linear``; T5 reads the type of a weight before that; generating runs an encoder by itself; and
            sentence-transformers calls ``forward``, which is no run that compressed-tensors sees.
        dtype: Data type in which the model is loaded.
        experts: The matrices of a mixture's experts that are tensors of their own; transformers stacks them while it loads.
        routers: Modules of the checkpoint that choose experts and are no ``Linear`` in transformers, though they are in vLLM.
        stacked: Whether experts are stored as stacks, which no level here reads.
        renamed: Stored names of tensors that transformers gives other names, by these.
    """

    linear: tuple[LinearWeight, ...]
    kept: tuple[str, ...]
    head: str
    unpacked: bool
    dtype: torch.dtype | None
    experts: tuple[LinearWeight, ...] = ()
    routers: tuple[str, ...] = ()
    stacked: bool = False
    renamed: Mapping[str, str] = field(default_factory=dict)


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


def require_family(config: ModelConfig) -> Family:
    """Return the family of a model.

    Raises:
        QuantizationError: ``FAMILY_UNSUPPORTED`` if the family is unknown.
    """
    if config.family is None:
        raise QuantizationError(
            unknown_family_reason(config),
            reason="FAMILY_UNSUPPORTED",
            remedy=f"use level fp16 or bf16; integer levels support: {', '.join(one.name for one in FAMILIES)}",
            about={"model_type": config.get("model_type"), "architectures": config.get("architectures")},
        )
    return config.family


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
    dtype = getattr(config, "dtype", None)
    in_float32 = {*(model._keep_in_fp32_modules or ())}
    mixed = any(in_float32 & {*weight.module.split(".")} for weight in linear)
    known = {name for weight in linear for name in (weight.module, weight.stored)} | {*kept}
    state = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    loaded = {name for name, target in converted.items() if target in state}
    return Structure(
        linear=tuple(linear),
        kept=tuple(kept),
        head=next((path for path, layer in layers if layer is model.get_output_embeddings()), ""),
        unpacked=transposed or mixed or family.comparison in (Comparison.TEACHER_FORCED, Comparison.EMBEDDINGS),
        dtype=dtype if isinstance(dtype, torch.dtype) else None,
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
