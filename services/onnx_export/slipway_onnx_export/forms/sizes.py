"""The setting of fixed sizes, by the names of axes; light, because a client checks it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from pydantic import Field, model_validator

from slipway.formats import wrong_value
from slipway.settings.sections import Listed
from slipway_onnx_export.names import (
    BATCH,
    FEATURES,
    IDS,
    MASK,
    PAST,
    POSITIONS,
    SEQUENCE,
    SOURCE,
    SOURCE_MASK,
    TOTAL,
    TYPES,
)

_INPUTS = (IDS, MASK, POSITIONS, TYPES, SOURCE_MASK, FEATURES, "past_key_values")
_FIELDS = {BATCH: "batch", SEQUENCE: "sequence", SOURCE: "sequence", PAST: "past", "past": "past"}
"""Field of the size of an axis; a source has as many tokens as a call."""
_AXES = (BATCH, SEQUENCE, PAST, TOTAL, SOURCE)


class StaticShape(Listed):
    """Fixed sizes of a graph; ``[batch, sequence, past]`` is taken too, and sizes by the axes' names, of all inputs or of each."""

    noun: ClassVar[str] = "shape"

    batch: int = Field(default=1, ge=1, le=1024)
    sequence: int = Field(default=0, ge=0, le=1 << 20)
    past: int = Field(default=0, ge=0, le=1 << 20)

    @model_validator(mode="before")
    @classmethod
    def _from_names(cls, value: Any) -> Any:
        return _sizes_by_field(value) if isinstance(value, dict) else value


def _sizes_by_field(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return sizes by field. Inputs have the same axes, so an axis may not have two sizes."""
    sizes: dict[str, Any] = {}
    for place, axis, size in _flatten(value):
        if axis not in (*_FIELDS, TOTAL):
            raise wrong_value(place, "is no axis of a graph", f"use {', '.join(_AXES)}")
        field = _FIELDS.get(axis, TOTAL)
        if sizes.setdefault(field, size) != size:
            raise wrong_value(
                size, f"as {place} contradicts {sizes[field]!r} of the same axis", "give each axis one size"
            )
    total = sizes.pop(TOTAL, 0)
    if total:
        sequence = sizes.setdefault("sequence", 1)
        past = sizes.setdefault("past", total - sequence if isinstance(total, int) and isinstance(sequence, int) else 0)
        if sequence + past != total or past < 1:
            raise wrong_value(total, f"as {TOTAL} is not {SEQUENCE} and {PAST} together", f"leave {TOTAL} out")
    return sizes


def _flatten(value: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    for name, size in value.items():
        owner, dot, axis = str(name).partition(".")
        if not isinstance(size, Mapping) and (not dot or owner in _INPUTS):
            yield str(name), axis or owner, size
        elif isinstance(size, Mapping) and name in _INPUTS:
            yield from ((f"{name}.{axis}", str(axis), each) for axis, each in size.items())
        else:
            raise wrong_value(name, "is no input of a graph, or no axis of one", f"use {', '.join(_INPUTS)}")
