"""Compare two model folders: kind and sizes by their configurations, shapes by headers, then sampled weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from slipway.base_match.recorded import read_known_json
from slipway.base_match.weights import Outcome, compare_weights, same_files
from slipway.errors import CheckpointValidationError
from slipway.model.configuration import ModelConfig
from slipway.model.model_files import CONFIG, has_safetensors
from slipway.model.safetensors_file import TensorInfo, read_weights

_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_experts",
    "num_local_experts",
)
"""Settings that no copy, conversion or quantization of a model changes. (The vocabulary's size can change.)"""

_BUFFER = re.compile(r".*\.(?:rotary_emb\.inv_freq|masked_bias|position_ids)")
_CAUSAL_MASK = re.compile(r".*\.(?:attn|attention)\.bias")
_SHOWN = 200
"""Characters of a tensor's name in a message."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The outcome and its evidence, as part of a sentence about the model in use."""

    outcome: Outcome
    what: str


def compare_models(used: Path, recorded: Path, *, contents: bool) -> Comparison:
    """Compare the model in use with the one that the adapter names.

    The same weights in another type, other shards, a tied head that is stored or not, and a vocabulary with more rows do not make
    another model. Quantized and pickled models are compared by their configuration only.

    Args:
        used: The model in use.
        recorded: The model that the adapter names.
        contents: Whether the weights of ``used`` can be read, not only their headers.
    """
    settings = [read_known_json(folder / CONFIG) for folder in (used, recorded)]
    if not all(isinstance(each, dict) for each in settings):
        return Comparison(Outcome.UNKNOWN, f"{CONFIG} of one of them cannot be read")
    ours, theirs = map(ModelConfig, settings)
    if other := _other_kind(ours, theirs):
        return Comparison(Outcome.OTHER, other)
    if contents and same_files(used, recorded):
        return Comparison(Outcome.SAME, "their weights are the same files")
    if why := _incomparable_reason(ours, theirs) or _pickle_reason(used, recorded):
        return Comparison(Outcome.UNKNOWN, why)
    try:
        weights = read_weights(used), read_weights(recorded)
    except (CheckpointValidationError, OSError):
        return Comparison(Outcome.UNKNOWN, "the weights of one of them cannot be read")
    return _compare_tensors(*weights, contents=contents, vocabularies={vocabulary_size(ours), vocabulary_size(theirs)})


def _compare_tensors(
    ours: Mapping[str, TensorInfo], theirs: Mapping[str, TensorInfo], *, contents: bool, vocabularies: set[int]
) -> Comparison:
    ours = {name: info for name, info in ours.items() if not _is_buffer(info)}
    common = [(info, theirs[name]) for name, info in ours.items() if name in theirs]
    for one, other in common:
        if one.shape != other.shape and not _is_resized(one, other, vocabularies):
            return Comparison(Outcome.OTHER, f"{one.name[:_SHOWN]!r} has the shape {one.shape} and not {other.shape}")
    if not contents:
        return Comparison(Outcome.UNKNOWN, "their shapes agree, and the weights lie in a bucket")
    in_vocabulary = partial(_is_in_vocabulary, vocabularies=vocabularies)
    of_layers = sum(
        info.nbytes for info in ours.values() if not in_vocabulary(info)
    )  # no vocabulary: a tied head may be stored or not
    if 10 * sum(one.nbytes for one, _ in common if not in_vocabulary(one)) < 9 * of_layers:
        return Comparison(Outcome.UNKNOWN, "most of their weights have other names")
    result = compare_weights(common, in_vocabulary=in_vocabulary)
    match result.outcome:
        case Outcome.SAME:
            return Comparison(Outcome.SAME, f"their weights agree, in samples of {result.tensors} tensors")
        case Outcome.OTHER:
            return Comparison(Outcome.OTHER, f"{result.name[:_SHOWN]!r} has other values")
    what = (
        f"only rows of the vocabulary differ ({result.name[:_SHOWN]!r})"
        if result.name
        else "their weights are stored in types that are not compared"
    )
    return Comparison(Outcome.UNKNOWN, what)


def _is_buffer(info: TensorInfo) -> bool:
    """Return whether a tensor is a buffer that some versions of the model's code save and others compute."""
    return bool(_BUFFER.fullmatch(info.name)) or (len(info.shape) == 4 and bool(_CAUSAL_MASK.fullmatch(info.name)))


def _incomparable_reason(ours: ModelConfig, theirs: ModelConfig) -> str:
    """Return why the weights of two related models cannot be compared; empty when they can."""
    if _type_of(ours) != _type_of(theirs):  # one is the text part of a composite model
        return f"one of them is a {_type_of(ours)}, the other a {_type_of(theirs)}"
    if ours.quantization or theirs.quantization:
        return "one of them is quantized, so that their weights cannot be compared"
    return ""


def _pickle_reason(used: Path, recorded: Path) -> str:
    if has_safetensors(used) and has_safetensors(recorded):
        return ""
    return "the weights of one of them are a pickle, which is not opened here"


def _other_kind(ours: ModelConfig, theirs: ModelConfig) -> str:
    """Return the difference that makes a configuration another model's; empty if there is none."""
    one, other = _type_of(ours), _type_of(theirs)
    if one != other and one and other and one not in _parts(theirs) and other not in _parts(ours):
        return f"model_type is {one!r} ({_classes(ours)}) and not {other!r} ({_classes(theirs)})"
    text, their_text = ours.text, theirs.text
    for key in _SIZES:
        size, their_size = text.get(key), their_text.get(key)
        if isinstance(size, int) and isinstance(their_size, int) and size != their_size:
            return f"{key} is {size} and not {their_size}"
    return ""


def _type_of(config: Mapping[str, Any]) -> str:
    kind = config.get("model_type")
    return kind[:100] if isinstance(kind, str) else ""


def _parts(config: Mapping[str, Any]) -> set[str]:
    """Return the model types of the parts of a composite model."""
    return {_type_of(part) for part in config.values() if isinstance(part, dict)}


def _classes(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    return ", ".join(str(name)[:100] for name in names[:3]) if isinstance(names, list) and names else "no architectures"


def _is_in_vocabulary(info: TensorInfo, *, vocabularies: set[int]) -> bool:
    """Return whether a tensor has one row per token, like the embedding and the head."""
    return bool(info.shape) and info.shape[0] in vocabularies


def _is_resized(one: TensorInfo, other: TensorInfo, vocabularies: set[int]) -> bool:
    """Return whether two tensors differ only in the number of vocabulary rows; an unknown size (0) allows any number."""
    rows = {info.shape[0] for info in (one, other) if info.shape}
    return one.shape[1:] == other.shape[1:] and len(rows) == 2 and (0 in vocabularies or bool(rows & vocabularies))


def vocabulary_size(config: ModelConfig) -> int:
    """Return the number of embedding rows by the configuration of the text part; 0 if it does not say."""
    size = config.text.get("vocab_size")
    return size if isinstance(size, int) else 0
