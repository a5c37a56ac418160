"""Check that a file has each tensor that llama.cpp loads, and no other."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence

from slipway.errors import GGUFExportError
from slipway.model.decoders.decoder import FULL
from slipway_gguf.architectures.refusals import CHUNKED
from slipway_gguf.metadata import Parameters
from slipway_gguf.weights.planned import Planned

HEAD, EMBEDDING = "output.weight", "token_embd.weight"
BLOCK = re.compile(r"^blk\.(\d+)\.(.*)$")
_NEXT = "nextn."
"""Beginning of the names of tensors that only a layer has which predicts a further token."""
_SAME = {CHUNKED: FULL}
"""Kinds of attention whose layers have the tensors of another kind."""
_MIXES = ("attn_", "ssm_", "shortconv.")
"""Beginnings of the names of tensors of attention, a recurrence or a convolution, which do not follow whether a layer has experts."""
Groups = Sequence[set[int]]
_NEXT_NEEDS = ("nextn.eh_proj.weight", "nextn.enorm.weight", "nextn.hnorm.weight")


def check_complete(planned: list[Planned], parameters: Parameters, *, tied: bool, kinds: Sequence[str]) -> None:
    """Refuse names that occur twice, layers that the file does not have, and layers that lack a tensor that others of their kind have.

    llama.cpp loads no file with such a fault.

    Args:
        planned: The tensors of the file.
        parameters: The model's numbers.
        tied: Whether the embedding is the head too.
        kinds: Kind of each layer; layers of one kind have the same tensors.

    Raises:
        GGUFExportError: ``GGUF_INVALID``.
    """
    names = [each.name for each in planned]
    twice = min((name for name, count in Counter(names).items() if count > 1), default="")
    if twice:
        raise tensor_error(f"two tensors of the model are {twice!r} of the file", twice)
    layers: dict[str, set[int]] = defaultdict(set)
    for name in names:
        if match := BLOCK.match(name):
            layers[match[2]].add(int(match[1]))
    layers_there = set().union(*layers.values())
    beyond = max(layers_there, default=0)
    if beyond >= parameters.blocks:
        first = next(name for name in names if name.startswith(f"blk.{beyond}."))
        raise tensor_error(f"the model has a tensor for {first!r}, and the file has {parameters.blocks} layers", first)
    heads = set(range(parameters.decoder.layers, parameters.blocks))
    ways, lacks = _ways_to_group(parameters, kinds), parameters.architecture.lacks
    lacking = [
        name
        for part, have in sorted(layers.items())
        for name in _lacking(part, have, _ways_of(part, heads, ways), lacks)
    ]
    lacking += [f"blk.{layer}.{part}" for layer in sorted(heads) for part in _NEXT_NEEDS if layer not in layers[part]]
    lacking += [f"blk.{layer}.attn_norm.weight" for layer in range(parameters.blocks) if layer not in layers_there][:1]
    lacking += [name for name in (*parameters.architecture.needs, *(() if tied else (HEAD,))) if name not in names]
    if not layers_there:
        lacking.append("blk.0.attn_norm.weight")
    if lacking:
        layer = BLOCK.match(lacking[0])
        whose = "multi-token head" if layer and int(layer[1]) in heads else "model"
        raise tensor_error(f"the {whose} has no tensor for {lacking[0]!r} of the file", lacking[0])


def _ways_of(part: str, heads: set[int], ways: Sequence[Groups]) -> Sequence[Groups]:
    """Return the ways to group layers of which a tensor follows one."""
    if part.startswith(_NEXT):
        return [[heads]]
    return ways[:1] if part.startswith(_MIXES) else ways


def _lacking(part: str, have: set[int], ways: Sequence[Groups], lacks: Sequence[str]) -> list[str]:
    """Return the names of a tensor that layers lack, although others of their group have it; none if it follows one of the ways to group."""
    found = [
        [
            name
            for group in groups
            if have & group
            for layer in sorted(group - have)
            if (name := f"blk.{layer}.{part}") not in lacks
        ]
        for groups in ways
    ]
    return min(found, key=len)


def _ways_to_group(parameters: Parameters, kinds: Sequence[str]) -> tuple[Groups, Groups]:
    """Return the numbers of layers whose attention, or recurrence, has the same tensors, and of those whose feed-forward network has.

    These are layers of a kind, with keys and values of their own or not, and layers with experts or without. A layer that predicts a
    further token has full attention, and experts if there are any.
    """
    architecture, layers = parameters.architecture, parameters.decoder.layers
    numbers, sparse = parameters.numbers, architecture.sparse
    dense = numbers.count(architecture.dense) if architecture.dense else 0
    shared = layers - numbers.count("num_kv_shared_layers")
    attention: dict[tuple[str, bool], set[int]] = defaultdict(set)
    experts: dict[bool, set[int]] = defaultdict(set)
    for layer in range(layers):
        kind = kinds[layer] if layer < len(kinds) and architecture.kind.by_layer else ""
        attention[_SAME.get(kind, kind), layer < shared].add(layer)
        experts[sparse(numbers, layer) if sparse else layer >= dense].add(layer)
    heads = set(range(layers, parameters.blocks))
    attention[FULL if architecture.kind.by_layer else "", True] |= heads
    experts[True] |= heads
    return list(attention.values()), list(experts.values())


def tensor_error(what: str, tensor: str, *, reason: str = "GGUF_INVALID") -> GGUFExportError:
    """Return the error for a tensor that has no place in the file, or for a place that has no tensor."""
    return GGUFExportError(
        what,
        reason=reason,
        remedy="use another format for this model, or report it: the model has a part that llama.cpp's graph lacks",
        about={"tensor": tensor[:200]},
    )
