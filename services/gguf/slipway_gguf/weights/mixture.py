"""Choose each tensor's type at a level as llama.cpp's quantizer does (``src/llama-quant.cpp``), because users expect it.

ggml weighs the errors of rounding by the importance of inputs, which is read here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from slipway.errors import GGUFExportError
from slipway.model.safetensors_file import read_safetensors
from slipway.model.weights.reading import mapped
from slipway_gguf.metadata import Parameters
from slipway_gguf.params import Level
from slipway_gguf.weights.planned import Planned

_BLOCK = re.compile(r"blk\.(\d+)\.")
_FLOAT32 = (
    *("_norm.weight", "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight"),
    *("token_types.weight", "cls.weight", "cls.output.weight"),
    *(".ssm_conv1d.weight", ".shortconv.conv.weight", ".altup_correct_coef.weight", ".altup_predict_coef.weight"),
)
"""Ends of the names of tensors that llama.cpp uses only in float32, and of small ones that make a score."""
_UNQUANTIZED = ("altup", "laurel", "per_layer_model_proj")
"""Parts of the names of small tensors that stay in 16 bits at every level."""
_VALUES = (".attn_v.weight", ".attn_qkv.weight", ".attn_kv_b.weight")
_EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight")
_POSITIONS = ("position_embd.weight", "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_NARROWER = {Kind.Q4_K: Kind.Q5_0, Kind.Q5_K: Kind.Q5_1, Kind.Q6_K: Kind.Q8_0, Kind.IQ4_XS: Kind.IQ4_NL}
"""Type with blocks of 32 weights for rows that blocks of 256 do not divide."""
_MIXED = ("q4_k_m", "q5_k_m")
_LARGE_LAYERS, _EIGHT = 80, 8
"""Number of layers of models with 70 billion weights (Llama, Qwen2), and number of experts for which llama.cpp widens small tensors."""

_FALCON = "falcon"
"""llama.cpp gives its head more bits, and its last projections fewer."""

FILE = "importance.safetensors"
_LEAST = 1e-6
"""Least importance, as a share of a tensor's mean: an input that the text never uses may still matter."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Facts about a model that decide the types of its tensors.

    Attributes:
        architecture: GGUF's name of the architecture.
        layers: Number of layers.
        heads: Number of attention heads.
        kv_heads: Number of heads of keys and values in the first layer; 0 if it has no attention.
        experts: Number of experts; 0 for none.
        tied: Whether the embedding is the head too.
        with_values: Numbers of the layers with a projection of values, if not all have one.
        with_down: Numbers of the layers with a last projection, if not all have one.
    """

    architecture: str
    layers: int
    heads: int
    kv_heads: int
    experts: int
    tied: bool
    with_values: tuple[int, ...] = ()
    with_down: tuple[int, ...] = ()


def sizes_of(parameters: Parameters, tensors: Sequence[Planned], *, tied: bool) -> Sizes:
    """Return the facts about a model that decide the types of its tensors."""
    architecture, decoder = parameters.architecture.name, parameters.decoder
    values = {field.key: field.value for field in parameters.fields}
    kv_heads = values[f"{architecture}.attention.head_count_kv"]
    return Sizes(
        architecture,
        layers=parameters.blocks,
        heads=decoder.heads,
        kv_heads=kv_heads[0] if isinstance(kv_heads, tuple) else kv_heads,
        experts=parameters.experts,
        tied=tied,
        with_values=_layers_with(_VALUES, tensors),
        with_down=_layers_with((".ffn_down.weight",), tensors),
    )


def _layers_with(ends: tuple[str, ...], tensors: Sequence[Planned]) -> tuple[int, ...]:
    """Return the numbers of the layers that have a tensor with one of these ends, in order."""
    found = {int(match[1]) for each in tensors if each.name.endswith(ends) and (match := _BLOCK.match(each.name))}
    return tuple(sorted(found))


def stored_kind(name: str, shape: tuple[int, ...], level: Level, sizes: Sizes, *, weighed: bool = False) -> Kind:
    """Return the type of a tensor.

    Args:
        name: GGUF's name.
        shape: Its shape, columns last.
        level: The level.
        sizes: Sizes of the model.
        weighed: Whether importance weights the rounding.
    """
    if len(shape) < 2 or not name.endswith(".weight") or name.endswith(_FLOAT32) or name in _POSITIONS:
        return Kind.F32
    base = Kind[level.type]
    if base in (Kind.F32, Kind.F16, Kind.BF16):
        return base
    if any(part in name for part in _UNQUANTIZED):
        return Kind.F16
    chosen = _choose_kind(name, shape[-1], level, sizes, base, weighed=weighed)
    return _fit_kind(chosen, shape[-1])


def _choose_kind(name: str, columns: int, level: Level, sizes: Sizes, base: Kind, *, weighed: bool) -> Kind:
    """Return the type that a level has for a tensor, whatever the length of its rows."""
    if name == "output.weight" or (sizes.tied and name in _EMBEDDINGS):
        wide = base is Kind.Q8_0 or sizes.architecture == _FALCON or columns % gguf.GGML_QUANT_SIZES[base][0]
        return Kind.Q8_0 if wide else Kind.Q6_K
    match = _BLOCK.match(name)
    layer = int(match[1]) if match else 0
    if name.endswith(_VALUES):
        number = sizes.with_values.index(layer) if layer in sizes.with_values else layer
        return _values_kind(number, level, sizes, base)
    if ".ffn_down" in name:
        # llama.cpp counts these tensors, unless there are experts.
        counted = not sizes.experts and layer in sizes.with_down
        number = sizes.with_down.index(layer) if counted else layer
        return _down_kind(number, level, sizes, base, weighed=weighed)
    of_eight = {".attn_k.": Kind.Q8_0, ".attn_output.": Kind.Q5_K if level.name in ("q4_k_m", "iq4_xs") else base}
    return next((kind for part, kind in of_eight.items() if part in name and sizes.experts == _EIGHT), base)


def _down_kind(layer: int, level: Level, sizes: Sizes, base: Kind, *, weighed: bool) -> Kind:
    """Return the type of the last projection of a layer, whose inputs have outliers."""
    if level.name == "q4_k_m" and sizes.architecture == _FALCON:
        more = Kind.Q5_K if _gets_more_bits(layer, sizes.layers) else base
        return Kind.Q6_K if layer < sizes.layers // 16 else more
    if level.name in _MIXED:
        return Kind.Q6_K if _gets_more_bits(layer, sizes.layers) else base
    if layer >= sizes.layers // 8:
        return base
    if level.name == "iq4_xs" and not weighed:
        return Kind.Q5_K
    return Kind.Q4_1 if level.name == "q4_0" and weighed else base


def _values_kind(layer: int, level: Level, sizes: Sizes, base: Kind) -> Kind:
    """Return the type of the projection of values, which is sensitive, and small if heads share values."""
    grouped = sizes.kv_heads > 0 and sizes.heads // sizes.kv_heads >= 4
    count = len(sizes.with_values) or sizes.layers
    if sizes.experts == _EIGHT:
        return Kind.Q8_0
    if level.name in _MIXED and _gets_more_bits(layer, count):
        return Kind.Q6_K
    if level.name == "iq4_xs" and grouped:
        return Kind.Q5_K
    shared = sizes.architecture == "qwen2" or (sizes.architecture == "llama" and sizes.heads != sizes.kv_heads)
    return Kind.Q5_K if shared and sizes.layers == _LARGE_LAYERS and base is Kind.Q4_K else base


def _gets_more_bits(layer: int, layers: int) -> bool:
    """Return whether a layer is in the first or last eighth, or every third one between them."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def _fit_kind(kind: Kind, columns: int) -> Kind:
    """Return the type, or a wider one if its blocks do not divide the rows."""
    if columns % gguf.GGML_QUANT_SIZES[kind][0] == 0:
        return kind
    narrower = _NARROWER.get(kind, Kind.F16)
    return narrower if columns % gguf.GGML_QUANT_SIZES[narrower][0] == 0 else Kind.F16


def read_importance(folder: Path, tensors: Sequence[Planned]) -> dict[str, NDArray[np.float32]]:
    """Return the measured importance of each column, by name of the file's tensor; leave out tensors without one.

    Raises:
        GGUFExportError: ``CALIBRATION_MISMATCH``: it was measured with another model.
    """
    measured = read_safetensors(folder / FILE).tensors
    importance = {}
    for planned in tensors:
        sources = {part.tensor.name for part in planned.parts}
        name = min(sources) if len(sources) == 1 else ""
        if name not in measured or len(planned.shape) != 2:
            continue
        info = measured[name]
        values = np.array(mapped(info)) if info.dtype == "F32" else np.empty(0, np.float32)
        if values.shape != planned.shape[1:] or not np.isfinite(values).all() or (values < 0).any():
            raise GGUFExportError(
                f"the importance of {name!r} is {info.dtype} {info.shape}, and not {planned.shape[1]} numbers from 0",
                reason="CALIBRATION_MISMATCH",
                remedy="measure it with this model",
                about={"tensor": name},
            )
        values = planned.parts[0].piece.columns(values).reshape(-1)  # in the file's order
        importance[planned.name] = np.maximum(values, np.float32(_LEAST) * values.mean() or np.float32(1.0))
    return importance
