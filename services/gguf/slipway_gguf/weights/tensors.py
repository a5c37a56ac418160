"""Plan the file of a model from its tensors: their names, shapes and types, and the source of their values.

Views of mapped files describe each tensor, so planning reads no values, and writing holds only a few rows.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from slipway.errors import GGUFExportError
from slipway.model.configuration import ModelConfig
from slipway.model.dtypes import FLOATS
from slipway.model.safetensors_file import TensorInfo, read_weights
from slipway.model.weights.reading import mapped
from slipway_gguf.architectures import architecture_of, refusal_reason
from slipway_gguf.metadata import Parameters, parameters_of

Array = NDArray[Any]
View = Callable[[Array], Array]
_NO_WEIGHTS = re.compile(r"rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$")
"""Tensors in old checkpoints that are weights of no class."""
_EXPERT = re.compile(r"^(.*\.mlp\.experts\.)(\d+)(\.(?:gate|up|down)_proj\.weight)$")
_FUSED_EXPERTS = re.compile(r"^(.*\.mlp\.experts)\.(gate_up_proj|down_proj)$")
_BLOCK = re.compile(r"^blk\.(\d+)\.(.*)$")
HEAD, EMBEDDING = "output.weight", "token_embd.weight"
_NEEDED = (EMBEDDING, "output_norm.weight")
_MODEL_HEAD, _ROWS = "lm_head.weight", 4096
_EMBEDDINGS = ("model.embed_tokens.weight", "transformer.wte.weight")


@dataclass(frozen=True, slots=True)
class Part:
    """Values from a tensor of the model.

    Attributes:
        tensor: The tensor.
        view: Selects and orders its values.
    """

    tensor: TensorInfo
    view: View


@dataclass(frozen=True, slots=True)
class Planned:
    """A tensor of the file.

    Attributes:
        name: GGUF's name.
        shape: Its shape, columns last.
        parts: Sources of its values, one behind the other.
        offset: Number to add to each value.
        factor: Number to multiply each value by.
        values: The values, if they come from no tensor.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...] = ()
    offset: float = 0.0
    factor: float = 1.0
    values: NDArray[np.float32] | None = None

    def samples(self) -> Iterator[tuple[int, Array]]:
        """Yield blocks at the beginning, in the middle and at the end, each with the number of its first row."""
        if self.values is not None:
            yield 0, self.values[None]
            return
        wholes = [part.view(mapped(part.tensor)) for part in self.parts]
        wholes = [whole[None] for whole in wholes] if len(self.shape) == 1 else wholes
        last = len(wholes) - 1
        places = [(0, 0), (last // 2, wholes[last // 2].shape[0] // 2), (last, wholes[last].shape[0] - 1)]
        for index, first in dict.fromkeys(places):
            before = sum(whole.size for whole in wholes[:index]) + wholes[index][:first].size
            yield before // self.shape[-1], wholes[index][first : first + 1]

    def blocks(self, most: int) -> Iterator[tuple[Part | None, Array]]:
        """Yield views of blocks of whole rows, in order, each with its part.

        A block has at most ``most`` values, or one index of the first axis.
        """
        if self.values is not None:
            yield None, self.values
        for part in self.parts:
            whole = part.view(mapped(part.tensor))
            whole = whole[None] if len(self.shape) == 1 else whole
            step = max(1, most // max(1, math.prod(whole.shape[1:])))
            for first in range(0, whole.shape[0], step):
                yield part, whole[first : first + step]


def plan_tensors(tensors: Mapping[str, TensorInfo], parameters: Parameters, *, tied: bool) -> list[Planned]:
    """Plan the tensors of a file, in the order of layers.

    Args:
        tensors: The model's tensors.
        parameters: The model's numbers.
        tied: Whether the embedding is the head too.

    Raises:
        GGUFExportError: ``GGUF_INVALID`` for a tensor without a place in the file, or a place without a tensor; ``DTYPE_UNSUPPORTED``.
    """
    names = names_of(parameters)
    planned = [Planned(name, values.shape, values=values) for name, values in parameters.factors.items()]
    experts: dict[str, dict[int, TensorInfo]] = defaultdict(dict)
    for name, info in tensors.items():
        if _NO_WEIGHTS.search(name) or (tied and name == _MODEL_HEAD):
            continue
        if info.dtype not in FLOATS:
            raise _tensor_error(f"tensor {name!r} is stored as {info.dtype}", name, reason="DTYPE_UNSUPPORTED")
        if expert := _EXPERT.match(name):
            experts[expert[1] + expert[3][1:]][int(expert[2])] = info
        elif fused := _FUSED_EXPERTS.match(name):
            planned += _plan_unfused(fused[1], fused[2], info, names)
        else:
            planned.append(_plan_single(name, info, parameters, names))
    planned += [_plan_stacked(name, each, parameters, names) for name, each in experts.items()]
    _check_complete(planned, parameters, tied=tied)
    return sorted(planned, key=_sort_key)


def is_tied(parameters: Parameters, weights: Mapping[str, TensorInfo]) -> bool:
    """Return whether the embedding is the head too: the configuration says so, and no other head is stored."""
    return parameters.decoder.tied and _head_is_embedding(weights)


def _head_is_embedding(weights: Mapping[str, TensorInfo]) -> bool:
    """Return whether the stored weights have no head, or the embedding again as head."""
    if _MODEL_HEAD not in weights:
        return True
    head = weights[_MODEL_HEAD]
    embedding = next((weights[name] for name in _EMBEDDINGS if name in weights), None)
    if embedding is None or (head.shape, head.dtype) != (embedding.shape, embedding.dtype):
        return False
    one, other = mapped(head), mapped(embedding)
    pieces = (slice(first, first + _ROWS) for first in range(0, len(one), _ROWS))
    return all(np.array_equal(one[piece], other[piece]) for piece in pieces)


def _plan_single(name: str, info: TensorInfo, parameters: Parameters, names: gguf.TensorNameMap) -> Planned:
    architecture, shape = parameters.architecture, info.shape
    view: View = keep
    counts = {".self_attn.q_proj.": parameters.decoder.heads, ".self_attn.k_proj.": parameters.decoder.kv_heads}
    heads = next((count for part, count in counts.items() if architecture.paired and part in name), 0)
    if heads and (not shape or shape[0] != heads * parameters.decoder.width):
        raise _tensor_error(f"tensor {name!r} has the shape {shape}, which config.json's heads do not divide", name)
    if heads:
        view = partial(_join_pairs, heads)
    elif name.endswith(architecture.transposed or ("\0",)):
        view, shape = transpose, shape[::-1]
    offset = architecture.kind.norm_offset if name.endswith("norm.weight") else 0.0
    return Planned(_map_name(name, names), shape or (1,), (Part(info, view),), offset)


def names_of(parameters: Parameters) -> gguf.TensorNameMap:
    """Return GGUF's names of a model's tensors."""
    return gguf.get_tensor_name_map(gguf.MODEL_ARCH[parameters.architecture.name.upper()], parameters.decoder.layers)


def _plan_unfused(prefix: str, which: str, info: TensorInfo, names: gguf.TensorNameMap) -> list[Planned]:
    """Plan the tensors of a layer's experts, which the model stores as one tensor. info: (experts, rows, columns)."""
    if len(info.shape) != 3 or (which == "gate_up_proj" and info.shape[1] % 2):
        raise _tensor_error(f"tensor {info.name!r} has the shape {info.shape}, which is not that of experts", info.name)
    experts, rows, columns = info.shape
    if which == "down_proj":
        name = _map_name(f"{prefix}.down_proj.weight", names)
        return [Planned(name, info.shape, (Part(info, keep),))]
    half = rows // 2
    return [
        Planned(
            _map_name(f"{prefix}.{part}_proj.weight", names),
            (experts, half, columns),
            (Part(info, partial(_take_rows, first, first + half)),),
        )
        for part, first in (("gate", 0), ("up", half))
    ]


def _plan_stacked(
    name: str, experts: Mapping[int, TensorInfo], parameters: Parameters, names: gguf.TensorNameMap
) -> Planned:
    """Plan one tensor for a weight that the model stores once for each expert."""
    parts = [experts.get(index) for index in range(parameters.experts)]
    shapes = {each.shape for each in parts if each is not None}
    if None in parts or len(parts) != len(experts) or len(shapes) != 1:
        raise _tensor_error(
            f"the experts of {name!r} are {len(experts)} of {parameters.experts}, of shapes {shapes}", name
        )
    [shape] = shapes
    stacked = tuple(Part(each, keep) for each in parts if each is not None)
    return Planned(_map_name(name, names), (len(parts), *shape), stacked)


def _check_complete(planned: list[Planned], parameters: Parameters, *, tied: bool) -> None:
    """Refuse names that occur twice, and layers that lack a tensor that others have."""
    names = [each.name for each in planned]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise _tensor_error(f"two tensors of the model are {twice[0]!r} of the file", twice[0])
    layers: dict[str, set[int]] = defaultdict(set)
    for name in names:
        if match := _BLOCK.match(name):
            layers[match[2]].add(int(match[1]))
    expected = set(range(parameters.decoder.layers))
    lacking = [f"blk.{min(expected - have)}.{part}" for part, have in sorted(layers.items()) if expected - have]
    lacking += [name for name in (*_NEEDED, *(() if tied else (HEAD,))) if name not in names]
    if not layers:
        lacking.append("blk.0.attn_norm.weight")
    if lacking:
        raise _tensor_error(f"the model has no tensor for {lacking[0]!r} of the file", lacking[0])


def _sort_key(planned: Planned) -> tuple[int, str]:
    match = _BLOCK.match(planned.name)
    if match:
        return int(match[1]), planned.name
    return (-1 if planned.name == EMBEDDING else 1 << 30), planned.name


def _map_name(name: str, names: gguf.TensorNameMap) -> str:
    target = names.get_name(name, try_suffixes=(".weight", ".bias"))
    if target is None:
        raise _tensor_error(f"tensor {name[:200]!r} has no place in a GGUF file of this architecture", name)
    return target


def _tensor_error(what: str, tensor: str, *, reason: str = "GGUF_INVALID") -> GGUFExportError:
    return GGUFExportError(
        what,
        reason=reason,
        remedy="use another format for this model, or report it: the model has a part that llama.cpp's graph lacks",
        about={"tensor": tensor[:200]},
    )


def keep(whole: Array) -> Array:
    """Return a tensor as it is."""
    return whole


def transpose(whole: Array) -> Array:
    """Return a tensor with its axes exchanged."""
    return whole.T


def _take_rows(first: int, end: int, whole: Array) -> Array:
    """Return rows of each expert. whole: (experts, rows, columns)."""
    return whole[:, first:end]


def _join_pairs(heads: int, whole: Array) -> Array:
    """Reorder the rows of each head so that the two values of a pair, which the rotary embedding turns together, are neighbours.

    transformers has the first values of all pairs in a head's first half, and the second values in its second half.
    whole: (heads · width, …) → (heads, width / 2, 2, …).
    """
    return whole.reshape(heads, 2, -1, *whole.shape[1:]).swapaxes(1, 2)


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """The plan of a model's file.

    Attributes:
        parameters: The model's numbers.
        tied: Whether the embedding is the head too.
        tensors: The tensors.
    """

    parameters: Parameters
    tied: bool
    tensors: list[Planned]


def plan_file(model: Path) -> PlannedFile:
    """Plan the file of a model from its configuration and the headers of its weights.

    Raises:
        GGUFExportError: ``FAMILY_UNSUPPORTED``, ``BASE_MODEL_INVALID``, ``GGUF_INVALID`` or ``DTYPE_UNSUPPORTED``.
        CheckpointValidationError: A file cannot be read.
    """
    config = ModelConfig.read(model)
    architecture = architecture_of(config)
    if architecture is None or refusal_reason(config):
        raise GGUFExportError(
            refusal_reason(config),
            reason="FAMILY_UNSUPPORTED",
            remedy="use another format for this model",
            about={"model_type": str(config.get("model_type", ""))[:100]},
        )
    parameters, weights = parameters_of(architecture, config), read_weights(model)
    tied = is_tied(parameters, weights)
    return PlannedFile(parameters, tied, plan_tensors(weights, parameters, tied=tied))
