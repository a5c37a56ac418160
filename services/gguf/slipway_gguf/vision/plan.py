"""Plan the ``mmproj`` file of a model: its metadata, and the place of each tensor of the image encoder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gguf import GGMLQuantizationType as Kind

from slipway.errors import GGUFExportError
from slipway.model.dtypes import FLOATS
from slipway.model.safetensors_file import TensorInfo
from slipway_gguf.metadata import Field, field_of
from slipway_gguf.params import LEVELS, Level
from slipway_gguf.vision.entry import Encoder, Key, Place, Rows, Seen
from slipway_gguf.vision.processor import colours
from slipway_gguf.weights.naming import text_name
from slipway_gguf.weights.planned import Part, Planned

_BESIDE = {"f32": "f32", "bf16": "bf16"}
"""Level of the file by the text's; otherwise float16, as llama.cpp's own files have it."""
_EXACT = ("position_embd",)
"""Parts of the names of matrices that are added and not multiplied, and stay in float32 as vectors do."""
_CONVOLVED = ("patch_embd", "input_projection")
"""Parts of the names of matrices that llama.cpp's code takes in float16 or float32."""


_KEYS: Mapping[str, Key] = {
    "vision.patch_size": lambda seen: seen.whole("patch_size"),
    "vision.embedding_length": lambda seen: seen.whole("hidden_size"),
    "vision.feed_forward_length": lambda seen: seen.whole("intermediate_size"),
}
"""Keys whose value an entry may know better."""


@dataclass(frozen=True, slots=True)
class PlannedProjector:
    """The plan of an ``mmproj`` file.

    Attributes:
        tensors: Its tensors.
        fields: Keys of the metadata, without the general ones.
        unused: Names of the model's tensors that the model itself does not use for images.
        others: Names of the tensors of parts for something else.
    """

    tensors: list[Planned]
    fields: tuple[Field, ...]
    unused: tuple[str, ...]
    others: tuple[str, ...]


def level_beside(level: Level) -> Level:
    """Return the level of the file beside a text file of this level."""
    return LEVELS[_BESIDE.get(level.name, "f16")]


def stored_kind(planned: Planned, level: Level) -> Kind:
    """Return the type of a tensor."""
    if len(planned.shape) == 1 or any(part in planned.name for part in _EXACT):
        return Kind.F32
    if any(part in planned.name for part in _CONVOLVED):
        return Kind.F16 if level.type == "F16" else Kind.F32
    return Kind[level.type]


def plan_projector(
    encoder: Encoder, seen: Seen, weights: Mapping[str, TensorInfo], others: Iterable[str], *, hidden: int
) -> PlannedProjector:
    """Plan the file of an encoder.

    Args:
        encoder: The encoder.
        seen: The model's settings for images.
        weights: All tensors of the model by name.
        others: Names of those that the text's file has no place for.
        hidden: Width of the text part's states.

    Raises:
        GGUFExportError: ``GGUF_INVALID`` for a tensor without a place in the file, or a place without a tensor; ``DTYPE_UNSUPPORTED``;
            ``BASE_MODEL_INVALID`` for a wrong number.
    """
    named = {_short(name): weights[name] for name in others}
    places = dict(_expand(encoder.tensors, seen, named))
    places |= {name: (place,) for name, place in encoder.borrowed.items()}
    named |= {own: info for name, info in weights.items() if (own := text_name(name)) in encoder.borrowed}
    lacking = sorted(places.keys() - named.keys())
    if lacking:
        raise _tensor_error(f"the model has no tensor {lacking[0]!r}, which its image encoder needs", lacking[0])
    left = sorted(named.keys() - places.keys())
    unused = [named[name].name for name in left if name.startswith(encoder.unused or "\0")]
    strange = [named[name].name for name in left if name.startswith(encoder.others or "\0")]
    unknown = [named[name].name for name in left if named[name].name not in (*unused, *strange)]
    if unknown:
        raise _tensor_error(f"tensor {unknown[0][:200]!r} has no place in an mmproj file", unknown[0])
    tensors = [_plan(named[name], place, seen) for name, each in places.items() for place in each]
    fields = tuple(
        field_of(f"clip.{key}", value) for key, value in _values(encoder, seen, hidden).items() if value is not None
    )
    return PlannedProjector(sorted(tensors, key=lambda each: each.name), fields, tuple(unused), tuple(strange))


def _short(name: str) -> str:
    """Return a tensor's name without the beginnings that checkpoints of several versions differ in."""
    return name.removeprefix("model.").replace(".vision_model.", ".", 1)


def _expand(
    tensors: Mapping[str, Rows], seen: Seen, named: Mapping[str, TensorInfo]
) -> Iterator[tuple[str, tuple[Place, ...]]]:
    """Yield the places of the tensors that the model must have, by name."""
    for pattern, each in tensors.items():
        numbers = tuple(each.layers(seen)) if "{}" in pattern else (0,)
        names = {pattern.format(index): number for index, number in enumerate(numbers)}
        if each.optional and not names.keys() & named.keys():
            continue
        for name, number in names.items():
            yield (
                name,
                tuple(Place(place.name.format(number), place.piece, place.offset) for place in each.places),
            )


def _plan(info: TensorInfo, place: Place, seen: Seen) -> Planned:
    if info.dtype not in FLOATS:
        raise _tensor_error(f"tensor {info.name!r} is stored as {info.dtype}", info.name, reason="DTYPE_UNSUPPORTED")
    part = Part(info, place.piece(seen))
    try:
        shape = part.shape()
    except (ValueError, IndexError) as error:
        what = f"tensor {info.name!r} has the shape {info.shape}, which is not the one that config.json says ({error})"
        raise _tensor_error(what, info.name) from error
    return Planned(place.name, shape, (part,), place.offset)


def _values(encoder: Encoder, seen: Seen, hidden: int) -> dict[str, Any]:
    """Return the values of the metadata by key."""
    return {
        "has_vision_encoder": True,
        "projector_type": encoder.projector,
        "vision.projection_dim": hidden,
        "vision.block_count": seen.layers,
        "vision.attention.head_count": seen.heads,
        "vision.image_mean": _colours(seen, "image_mean", encoder.mean, unset=0.0),
        "vision.image_std": _colours(seen, "image_std", encoder.deviation, unset=1.0),
        **{key: value(seen) for key, value in {**_KEYS, **encoder.keys}.items()},
    }


def _colours(seen: Seen, key: str, default: tuple[float, ...], *, unset: float) -> tuple[float, ...]:
    """Return a number for each colour; ``unset`` if the processor does not normalize them."""
    if seen.processor.get("do_normalize", True) is False:
        return (unset,) * len(default)
    return colours(seen.processor, key, default) or default


def _tensor_error(what: str, tensor: str, *, reason: str = "GGUF_INVALID") -> GGUFExportError:
    return GGUFExportError(
        what,
        reason=reason,
        remedy="use another format for this model, or report it: its image encoder has a part that llama.cpp's lacks",
        about={"tensor": tensor[:200]},
    )
