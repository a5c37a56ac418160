"""Keys of the metadata that describe a file and its origin."""

from __future__ import annotations

import math

import gguf

from slipway.distribution.installed import own_version
from slipway_gguf.metadata import Field
from slipway_gguf.params import GGUFParams, Level, NamedParams
from slipway_gguf.weights.tensors import Planned

_KIND = gguf.GGUFValueType
_HUB = "https://huggingface.co/"


def general_fields(
    architecture: str, params: GGUFParams, level: Level, tensors: list[Planned], *, experts: int, lineage: str
) -> tuple[Field, ...]:
    """Return the keys.

    Args:
        architecture: GGUF's name of the architecture.
        params: Parameters of the stage.
        level: The level.
        tensors: The file's tensors.
        experts: Number of experts; 0 for none.
        lineage: Digest of the model's artifact; empty if it is not known.
    """
    size = _size_label(tensors, experts=experts)
    texts = _texts(architecture, gguf.GGUFType.MODEL, params, lineage, size=size)
    numbers = {
        "general.file_type": int(gguf.LlamaFileType[level.file_type]),
        "general.quantization_version": gguf.GGML_QUANT_VERSION,
    }
    return _fields(texts, numbers, params)


def adapter_fields(architecture: str, params: NamedParams, *, alpha: float, lineage: str) -> tuple[Field, ...]:
    """Return the keys of an adapter's file.

    Args:
        architecture: GGUF's name of the base's architecture, which llama.cpp compares with that of the base's file.
        params: Parameters of the stage.
        alpha: Alpha of all factors.
        lineage: Digest of the adapter's artifact; empty if it is not known.
    """
    texts = {**_texts(architecture, gguf.GGUFType.ADAPTER, params, lineage), "adapter.type": "lora"}
    return (*_fields(texts, {}, params), Field("adapter.lora.alpha", alpha, _KIND.FLOAT32))


def _texts(architecture: str, kind: str, params: NamedParams, lineage: str, *, size: str = "") -> dict[str, str]:
    texts = {
        "general.architecture": architecture,
        "general.type": kind,
        "general.name": params.name,
        "general.size_label": size,
        "general.quantized_by": f"slipway {own_version()}".strip(),
        "slipway.lineage": lineage,
    }
    if params.base_model:
        organization, _, name = params.base_model.partition("/")
        texts |= {
            "general.base_model.0.name": name,
            "general.base_model.0.organization": organization,
            "general.base_model.0.repo_url": f"{_HUB}{params.base_model}",
        }
    return texts


def _fields(texts: dict[str, str], numbers: dict[str, int], params: NamedParams) -> tuple[Field, ...]:
    numbers = {**numbers, **({"general.base_model.count": 1} if params.base_model else {})}
    return (
        *(Field(key, str(value), _KIND.STRING) for key, value in texts.items() if value),
        *(Field(key, value, _KIND.UINT32) for key, value in numbers.items()),
    )


def _size_label(tensors: list[Planned], *, experts: int) -> str:
    """Return the size as it appears in names of models: ``0.6B``, or ``128x0.2B`` with experts."""
    each = sum(math.prod(planned.shape) for planned in tensors if "_exps." in planned.name)
    total = sum(math.prod(planned.shape) for planned in tensors)
    return gguf.size_label(total, total - each, each // max(1, experts), experts)
