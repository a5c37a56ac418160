"""Give the tensors of a model the names that the table of architectures knows, and find those that a file has no place for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from slipway.errors import GGUFExportError
from slipway.model.safetensors_file import TensorInfo
from slipway_gguf.architectures.entry import Architecture, Heads

_NO_WEIGHTS = re.compile(r"rotary_emb\.inv_freq$|\.(attn|attention)\.(masked_)?bias$")
"""Tensors in old checkpoints that are weights of no class."""
_MOST_HEADS = 8


@dataclass(frozen=True, slots=True)
class NamedTensors:
    """A model's tensors.

    Attributes:
        tensors: Those that belong into the file, by the name that a model of text alone gives them.
        heads: Number of layers behind the last one among them.
        left_out: Names of tensors that the file has no place for, although they are weights of the text part.
        others: Names of tensors of the other parts.
    """

    tensors: Mapping[str, TensorInfo]
    heads: int
    left_out: tuple[str, ...]
    others: tuple[str, ...]


def name_tensors(
    weights: Mapping[str, TensorInfo], found: Architecture, layers: int, *, has_parts: bool
) -> NamedTensors:
    """Return the tensors by name.

    Args:
        weights: All tensors of the model.
        found: Its architecture.
        layers: Number of its layers, without those that predict further tokens.
        has_parts: Whether the model has parts beside that for text.

    Raises:
        GGUFExportError: ``GGUF_INVALID``: two names stand for one tensor.
    """
    names = {name: text_name(name) if has_parts else name for name in weights}
    if found.rename:
        renamed = {name: found.rename(name) for name in weights}
        names = {name: own for name, own in renamed.items() if own}
    texts = {name: own.replace("model.mtp.", "mtp.", 1) for name, own in names.items() if own}
    named: dict[str, TensorInfo] = {}
    left = []
    for name, own in texts.items():
        if _NO_WEIGHTS.search(name):
            continue
        target = _head_name(own, found.heads, layers)
        if target is None:
            left.append(name)
        elif target in named:
            raise _twice_error(named[target].name, name)
        else:
            named[target] = weights[name]
    others = sorted(name for name in names if name not in texts)
    return NamedTensors(named, _count_heads(texts, found.heads, layers), tuple(sorted(left)), tuple(others))


def _twice_error(one: str, other: str) -> GGUFExportError:
    return GGUFExportError(
        f"tensors {one[:200]!r} and {other[:200]!r} are the same one of the model",
        reason="GGUF_INVALID",
        remedy="keep that one of the two in the checkpoint whose values the model computes with",
        about={"tensor": other[:200]},
    )


_TEXT_PREFIXES = {
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "backbone.": "model.",
    **{
        each: each for each in ("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.", "mtp.", "model.mtp.")
    },
}
"""Beginnings of the names of tensors of a text part, as checkpoints of several parts have them, and in a model of text alone."""


def text_name(name: str) -> str:
    """Return the name that a tensor of the text part would have in a model of text alone; an empty text for other tensors."""
    prefix = next((each for each in _TEXT_PREFIXES if name.startswith(each)), None)
    return "" if prefix is None else _TEXT_PREFIXES[prefix] + name.removeprefix(prefix)


def _expanded(heads: Heads, layers: int) -> list[tuple[int, str, str]]:
    """Return the number of a head, the beginning of a tensor's name, and what stands in its place.

    Names without a number belong to the first head.
    """
    return [
        (index, source.format(index=index, layer=layers + index), target.format(index=index, layer=layers + index))
        for source, target in heads.names.items()
        for index in range(_MOST_HEADS if "{" in source else 1)
    ]


def _count_heads(names: Mapping[str, str], heads: Heads | None, layers: int) -> int:
    """Return how many heads with a place in the file the tensors have."""
    if heads is None:
        return 0
    numbered = _expanded(heads, layers)
    return len({index for index, source, _ in numbered for own in names.values() if own.startswith(source)})


def _head_name(own: str, heads: Heads | None, layers: int) -> str | None:
    """Return the name of a tensor in the file's order of layers; None if it is of a head that the file has no place for."""
    if heads is None:
        return own
    for _, source, target in _expanded(heads, layers):
        if own.startswith(source):
            return target + own.removeprefix(source)
    beginnings = (each.format(layer=layers + index) for each in heads.prefixes for index in range(_MOST_HEADS))
    return None if own.startswith(tuple(beginnings)) else own


def names_in(left_out: Iterable[str], most: int = 3) -> str:
    """Return some names for a message."""
    names = list(left_out)
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")
