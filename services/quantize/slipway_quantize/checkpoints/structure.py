"""Which tensors of a checkpoint are weights of linear layers, asked of transformers without allocating the model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from slipway.errors import QuantizationError
from slipway.models.base_format import read_config
from slipway_quantize.checkpoints.checkpoint import TensorInfo


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """One linear layer's weight.

    Attributes:
        module: Name of the module, as loaders know it.
        source: Tensor of the checkpoint that holds the weight; another module's where the two are tied.
    """

    module: str
    source: str


@dataclass(frozen=True, slots=True)
class Structure:
    """How a model uses its tensors.

    Attributes:
        linear: Linear layers whose weight is in the checkpoint, in the model's order.
        dtype: Data type the model is loaded in.
    """

    linear: tuple[LinearWeight, ...]
    dtype: torch.dtype | None


def model_config(folder: Path) -> Any:
    """The folder's transformers configuration.

    Raises:
        CheckpointValidationError: ``BASE_MODEL_INVALID`` without a readable config.json.
        QuantizationError: ``BASE_MODEL_INVALID`` for an unknown architecture.
    """
    read_config(folder)  # transformers would read it without a limit
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise QuantizationError(
            f"config.json does not describe a model that transformers knows ({str(error).splitlines()[0]})",
            reason="BASE_MODEL_INVALID",
            remedy="give a folder written by save_pretrained",
            about={"file": "config.json"},
        ) from error


def meta_model(config: Any) -> torch.nn.Module:
    """The model of ``config`` without storage: names, types and shapes only.

    Raises:
        QuantizationError: ``QUANTIZATION_UNSUPPORTED`` if it is no causal language model.
    """
    try:
        with torch.device("meta"):
            model: torch.nn.Module = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except ValueError as error:
        raise QuantizationError(
            f"model type {config.model_type!r} is not a causal language model ({str(error).splitlines()[0]})",
            reason="QUANTIZATION_UNSUPPORTED",
            remedy="use level fp16 or bf16",
            about={"model_type": config.model_type},
        ) from error
    return model


def inspect(config: Any, tensors: dict[str, TensorInfo]) -> Structure:
    """The linear layers of ``config``'s model whose weights ``tensors`` has, directly or through a tie.

    Raises:
        QuantizationError: ``QUANTIZATION_UNSUPPORTED`` if the model is no causal language model, or rearranges the
            checkpoint's weights when it loads them.
    """
    model = meta_model(config)
    _require_same_names(config, model, tensors)
    ties: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    linear = []
    for module, layer in model.named_modules():
        if not isinstance(layer, torch.nn.Linear):
            continue
        name = f"{module}.weight"
        source = name if name in tensors else ties.get(name, name)
        if source in tensors and tensors[source].shape == tuple(layer.weight.shape):
            linear.append(LinearWeight(module=module, source=source))
    dtype = getattr(config, "dtype", None)
    return Structure(linear=tuple(linear), dtype=dtype if isinstance(dtype, torch.dtype) else None)


def _require_same_names(config: Any, model: torch.nn.Module, tensors: dict[str, TensorInfo]) -> None:
    """Refuse models whose weights transformers fuses while loading: it would not find the quantized ones."""
    known = set(model.state_dict())
    fused = sorted(name for name, info in tensors.items() if len(info.shape) > 1 and name not in known)
    if fused:
        raise QuantizationError(
            f"{len(fused)} weights of this {config.model_type} model are fused when it is loaded (experts), first "
            f"{fused[0]!r}; they are not quantized by this version",
            reason="QUANTIZATION_UNSUPPORTED",
            remedy="use level bf16 or fp16",
            about={"tensor": fused[0], "model_type": config.model_type},
        )
