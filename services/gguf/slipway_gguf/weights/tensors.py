"""Plan the file of a model from its tensors: their names, shapes and types, and the source of their values.

Views of mapped files describe each tensor, so planning reads no values, and writing holds only a few rows.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np

from slipway.errors import GGUFExportError
from slipway.model.configuration import ModelConfig
from slipway.model.decoders.decoder import decoder_of
from slipway.model.decoders.layers import layer_kinds
from slipway.model.dtypes import FLOATS
from slipway.model.safetensors_file import TensorInfo, read_weights
from slipway.model.weights.reading import mapped
from slipway_gguf.architectures import architecture_of, refusal_reason, text_part
from slipway_gguf.architectures.entry import CONFIG_VALUES, WHOLE, Architecture, Piece, Target, transpose
from slipway_gguf.architectures.views import half, paired_rows
from slipway_gguf.metadata import Parameters, parameters_of
from slipway_gguf.weights.completeness import BLOCK, EMBEDDING, check_complete, tensor_error
from slipway_gguf.weights.naming import name_tensors
from slipway_gguf.weights.planned import Part, Planned
from slipway_gguf.weights.scalars import take_scalars
from slipway_gguf.weights.sentences import Sentences, read_score, read_sentences

_EXPERT = re.compile(r"^(.*\.experts\.)(\d+)\.(.+\.weight)$")
_FUSED_EXPERTS = re.compile(r"^(.*\.mlp\.experts)\.(gate_up_proj|down_proj)$")
_LAYER = re.compile(r"^(?:\w+\.)*?(?:layers|blocks|h)\.(\d+)\.(.+)$")
_MODEL_HEAD, _ROWS = "lm_head.weight", 4096
_EMBEDDINGS = (
    "model.embed_tokens.weight",
    "transformer.wte.weight",
    "backbone.embeddings.weight",
    "gpt_neox.embed_in.weight",
    "word_embeddings.weight",
    "transformer.word_embeddings.weight",
)


def plan_tensors(
    tensors: Mapping[str, TensorInfo], parameters: Parameters, *, tied: bool, kinds: Sequence[str] = ()
) -> list[Planned]:
    """Plan the tensors of a file, in the order of layers.

    Args:
        tensors: The model's tensors by name.
        parameters: The model's numbers.
        tied: Whether the embedding is the head too.
        kinds: Kind of each layer; layers of one kind have the same tensors.

    Raises:
        GGUFExportError: ``GGUF_INVALID`` for a tensor without a place in the file, or a place without a tensor; ``DTYPE_UNSUPPORTED``.
    """
    names = names_of(parameters)
    planned = [Planned(name, values.shape, fixed=values) for name, values in parameters.factors.items()]
    experts: dict[str, dict[int, TensorInfo]] = defaultdict(dict)
    stacks: dict[str, dict[int, TensorInfo]] = defaultdict(dict)
    for name, info in tensors.items():
        if tied and name == _MODEL_HEAD:
            continue
        if info.dtype not in FLOATS:
            raise tensor_error(f"tensor {name!r} is stored as {info.dtype}", name, reason="DTYPE_UNSUPPORTED")
        targets = _targets(name, parameters.architecture)
        if targets is not None:
            planned += _plan_targets(name, info, targets, parameters)
        elif stack := _stack_of(name, parameters.architecture):
            stacks[stack[0]][stack[1]] = info
        elif expert := _EXPERT.match(name):
            experts[expert[1] + expert[3]][int(expert[2])] = info
        elif fused := _FUSED_EXPERTS.match(name):
            planned += _plan_unfused(fused[1], fused[2], info, names)
        else:
            planned.append(_plan_single(name, info, parameters, names))
    for name, each in experts.items():
        targets = _targets(name, parameters.architecture)
        target = targets[0].name if targets else _map_name(name, names)
        planned.append(_plan_stacked(name, each, parameters.experts, target))
    planned += [_plan_stacked(name, each, max(each) + 1, name) for name, each in stacks.items()]
    planned += _unused(planned, parameters)
    check_complete(planned, parameters, tied=tied, kinds=kinds)
    return sorted(planned, key=_sort_key)


def is_tied(parameters: Parameters, weights: Mapping[str, TensorInfo]) -> bool:
    """Return whether the embedding is the head too: the configuration says so, and no other head is stored."""
    return parameters.decoder.tied and _head_is_embedding(weights)


def _head_is_embedding(weights: Mapping[str, TensorInfo]) -> bool:
    """Return whether the stored weights have no head, or the embedding again as head."""
    if _MODEL_HEAD not in weights:
        return True
    head = weights[_MODEL_HEAD]
    embedding = _embedding_of(weights)
    if embedding is None or (head.shape, head.dtype) != (embedding.shape, embedding.dtype):
        return False
    one, other = mapped(head), mapped(embedding)
    pieces = (slice(first, first + _ROWS) for first in range(0, len(one), _ROWS))
    return all(np.array_equal(one[piece], other[piece]) for piece in pieces)


def _embedding_of(weights: Mapping[str, TensorInfo]) -> TensorInfo | None:
    return next((weights[name] for name in _EMBEDDINGS if name in weights), None)


def _targets(name: str, found: Architecture) -> list[Target] | None:
    """Return what becomes of a tensor by the table, with the whole names of the file; None if the table says nothing of it."""
    if name in found.tensors:
        return list(found.tensors[name])
    layer = _LAYER.match(name)
    targets = found.tensors.get(layer[2]) if layer else None
    if layer is None or targets is None:
        return None
    return [replace(each, name=f"blk.{int(layer[1])}.{each.name}") for each in targets]


def _plan_targets(name: str, info: TensorInfo, targets: Sequence[Target], parameters: Parameters) -> list[Planned]:
    """Plan the tensors of the file that are made from one tensor, of which no value may be lost."""
    made = [_plan_target(name, info, each, parameters) for each in targets]
    values = sum(math.prod(each.shape) for each in made)
    if values < info.numel and not any(each.leaves for each in targets):
        what = f"tensor {name!r} has the shape {info.shape}, of which the numbers in config.json take {values} of {info.numel} values"
        raise tensor_error(what, name)
    return made


def _plan_target(name: str, info: TensorInfo, target: Target, parameters: Parameters) -> Planned:
    parts = tuple(Part(info, piece) for piece in target.pieces(parameters.numbers))
    try:
        shapes = [part.shape() for part in parts]
    except (ValueError, IndexError) as error:
        what = f"tensor {name!r} has the shape {info.shape}, which is not the one that config.json says ({error})"
        raise tensor_error(what, name) from error
    shape = (sum(each[0] for each in shapes), *shapes[0][1:])
    return Planned(target.name, shape, parts, target.offset, target.change)


def _plan_single(name: str, info: TensorInfo, parameters: Parameters, names: gguf.TensorNameMap) -> Planned:
    architecture, shape = parameters.architecture, info.shape
    piece = WHOLE
    counts = {".self_attn.q_proj.": parameters.decoder.heads, ".self_attn.k_proj.": parameters.decoder.kv_heads}
    heads = next((count for part, count in counts.items() if architecture.paired and part in name), 0)
    if heads and (not shape or shape[0] != heads * parameters.decoder.width):
        raise tensor_error(f"tensor {name!r} has the shape {shape}, which config.json's heads do not divide", name)
    if heads:
        piece = Piece(rows=paired_rows(heads))
    elif name.endswith(architecture.transposed or ("\0",)):
        piece, shape = Piece(form=transpose), shape[::-1]
    offset = architecture.kind.norm_offset if name.endswith("norm.weight") else 0.0
    return Planned(_map_name(name, names), shape or (1,), (Part(info, piece),), offset)


def names_of(parameters: Parameters) -> gguf.TensorNameMap:
    """Return GGUF's names of a model's tensors."""
    return gguf.get_tensor_name_map(_ARCHITECTURES[parameters.architecture.name], parameters.blocks)


_ARCHITECTURES = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}


def _plan_unfused(prefix: str, which: str, info: TensorInfo, names: gguf.TensorNameMap) -> list[Planned]:
    """Plan the tensors of a layer's experts, which the model stores as one tensor. info: (experts, rows, columns)."""
    if len(info.shape) != 3 or (which == "gate_up_proj" and info.shape[1] % 2):
        raise tensor_error(f"tensor {info.name!r} has the shape {info.shape}, which is not that of experts", info.name)
    experts, rows, columns = info.shape
    if which == "down_proj":
        return [Planned(_map_name(f"{prefix}.down_proj.weight", names), info.shape, (Part(info),))]
    shape = (experts, rows // 2, columns)
    return [
        Planned(_map_name(f"{prefix}.{part}_proj.weight", names), shape, (Part(info, Piece(take=half(which_half))),))
        for which_half, part in enumerate(("gate", "up"))
    ]


def _stack_of(name: str, found: Architecture) -> tuple[str, int] | None:
    """Return the tensor of the file that this one is a part of, and its number in it; None if the table says nothing of it."""
    layer = _LAYER.match(name)
    named = [(name, ""), *([(layer[2], f"blk.{int(layer[1])}.")] if layer else [])]
    for beginning, target in found.stacks.items():
        for own, block in named:
            number = own.removeprefix(beginning).removesuffix(".weight")
            if own.startswith(beginning) and number.isdecimal():
                return block + target, int(number)
    return None


def _plan_stacked(name: str, each: Mapping[int, TensorInfo], count: int, target: str) -> Planned:
    """Plan one tensor for a weight that the model stores several times, such as once for each expert."""
    shapes = {part.shape for part in each.values()}
    # Numbers come from names of tensors: none is counted up to before there are as many tensors.
    if len(each) != count or max(each) >= count or len(shapes) != 1:
        raise tensor_error(f"the parts of {name!r} are {len(each)} of {count}, of shapes {shapes}", name)
    [shape] = shapes
    return Planned(target, (count, *shape), tuple(Part(each[index]) for index in range(count)))


def _unused(planned: Sequence[Planned], parameters: Parameters) -> list[Planned]:
    """Plan tensors that llama.cpp wants in layers that use none of their own."""
    there = {each.name: each for each in planned}
    return [
        replace(there[f"blk.0.{end}"], name=f"blk.{layer}.{end}")
        for end in parameters.architecture.everywhere
        for layer in range(parameters.decoder.layers)
        if f"blk.0.{end}" in there and f"blk.{layer}.{end}" not in there
    ]


def _sort_key(planned: Planned) -> tuple[int, str]:
    match = BLOCK.match(planned.name)
    if match:
        return int(match[1]), planned.name
    return (-1 if planned.name == EMBEDDING else 1 << 30), planned.name


def _map_name(name: str, names: gguf.TensorNameMap) -> str:
    target = names.get_name(name, try_suffixes=(".weight", ".bias"))
    if target is None:
        raise tensor_error(f"tensor {name[:200]!r} has no place in a GGUF file of this architecture", name)
    return target


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """The plan of a model's file.

    Attributes:
        parameters: The model's numbers.
        tied: Whether the embedding is the head too.
        tensors: The tensors.
        left_out: Names of the model's tensors that the file has no place for.
        others: Names of the tensors of parts that take more than text, such as images.
        sentences: What the model makes of a text; None for a model that predicts tokens alone.
    """

    parameters: Parameters
    tied: bool
    tensors: list[Planned]
    left_out: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    sentences: Sentences | None = None


def plan_file(model: Path) -> PlannedFile:
    """Plan the file of a model from its configuration and the headers of its weights.

    Raises:
        GGUFExportError: ``FAMILY_UNSUPPORTED``, ``BASE_MODEL_INVALID``, ``GGUF_INVALID`` or ``DTYPE_UNSUPPORTED``.
        CheckpointValidationError: A file cannot be read.
    """
    whole = ModelConfig.read(model)
    part = text_part(whole)
    config = part or whole
    architecture = architecture_of(config)
    if architecture is None or refusal_reason(config):
        raise GGUFExportError(
            refusal_reason(whole),
            reason="FAMILY_UNSUPPORTED",
            remedy="use another format for this model",
            about={"model_type": str(whole.get("model_type", ""))[:100]},
        )
    layers = decoder_of(config, CONFIG_VALUES, architecture.kind).layers
    named = name_tensors(read_weights(model), architecture, layers, has_parts=part is not None)
    parameters = parameters_of(architecture, config, heads=named.heads)
    scalars, weights = take_scalars(named.tensors, parameters)
    parameters = replace(parameters, fields=(*parameters.fields, *scalars))
    # llama.cpp's quantizer takes the embedding of a model without a head for one that is the head too.
    tied = architecture.reading is not None or is_tied(parameters, weights)
    if tied and not _head_is_like_embedding(parameters):
        embedding = _embedding_of(weights)  # without one, the plan names what is lacking
        weights |= {_MODEL_HEAD: embedding} if embedding else {}
        tied = False
    head = weights.get(_MODEL_HEAD) or _embedding_of(weights)
    read = read_sentences(model, parameters) if architecture.reading else read_score(model, parameters, head)
    tensors = plan_tensors(weights, parameters, tied=tied, kinds=layer_kinds(config, architecture.kind))
    if read:
        parameters, tensors = replace(parameters, fields=(*parameters.fields, *read.fields)), [*tensors, *read.tensors]
    return PlannedFile(parameters, tied, tensors, named.left_out, named.others, read)


def _head_is_like_embedding(parameters: Parameters) -> bool:
    """Return whether a tied head has the embedding's values in the file too: the table multiplies neither, or both by the same number."""
    pieces = [
        [
            piece
            for target in parameters.architecture.tensors.get(name, ())
            for piece in target.pieces(parameters.numbers)
        ]
        for name in (_MODEL_HEAD, _EMBEDDINGS[0])
    ]
    return pieces[0] == pieces[1]
