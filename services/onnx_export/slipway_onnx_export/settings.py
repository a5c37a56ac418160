"""Settings of ``formats.onnx``: activations, with their size as ``config.json`` predicts it, and fixed sizes.

This module imports nothing heavy, because a client checks these settings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeGuard

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator
from pydantic.json_schema import JsonSchemaValue

from slipway.errors import ConfigurationError
from slipway.formats import Text, wrong_value
from slipway.model.activations import CROSS, KINDS, MOST_LAYERS, ActivationRequest, Part, is_layer
from slipway.model.configuration import ModelConfig
from slipway.settings.problems import did_you_mean
from slipway.settings.sections import Listed
from slipway.sizes import FLOAT32_BYTES, format_size
from slipway.texts import counted
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
    VALUES,
)

if TYPE_CHECKING:
    from slipway_onnx_export.params import OnnxExportParams


_NAMES = ("layers", "kinds")

_EXAMPLE_TOKENS = 512
_SIZES = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "decoder_layers", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads", "num_heads"),
    "width": ("hidden_size", "n_embd", "d_model", "dim"),
}
_OF_PART: Mapping[Part, Mapping[str, tuple[str, ...]]] = {
    "": _SIZES,
    "encoder": {
        **_SIZES,
        "layers": ("encoder_layers", "num_layers", "encoder_num_hidden_layers"),
        "heads": ("encoder_attention_heads", "num_heads", "encoder_num_attention_heads"),
    },
    "decoder": {
        **_SIZES,
        "layers": ("decoder_layers", "num_decoder_layers", "num_layers", "decoder_num_hidden_layers"),
        "heads": ("decoder_attention_heads", "num_heads", "decoder_num_attention_heads"),
    },
}
"""Names of the sizes of each part of a model in ``config.json``."""

_INPUTS = (IDS, MASK, POSITIONS, TYPES, SOURCE_MASK, FEATURES, VALUES, "past_key_values")
_FIELD_OF_AXIS = {BATCH: "batch", SEQUENCE: "sequence", SOURCE: "sequence", PAST: "past", "past": "past"}
"""Field of the size of an axis; a source has as many tokens as a call."""
_AXES = (BATCH, SEQUENCE, PAST, TOTAL, SOURCE)


def _check_activations(value: Any) -> Any:
    """Return the table with tuples of texts; refuse unknown names, layers and kinds."""
    if not isinstance(value, Mapping):
        raise wrong_value(value, "is not a table", "write it like {layers: [0, 5, 11], kinds: [attentions]}")
    for name in value:
        if name not in _NAMES:
            raise wrong_value(name, "is not a part of activations", did_you_mean(str(name), _NAMES))
    parts = {name: tuple(dict.fromkeys(map(_as_text, _as_list(part)))) for name, part in value.items()}
    for layer in parts.get("layers", ()):
        if not is_layer(layer):
            raise wrong_value(layer, "is not a layer", f"use numbers from 0 to {MOST_LAYERS - 1}, last or all")
    for kind in parts.get("kinds", ()):
        if kind not in KINDS:
            raise wrong_value(kind, "is not a kind of activations", did_you_mean(kind, tuple(KINDS)))
    return parts


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _as_text(value: Any) -> str:
    """Return a layer's number as text; a request has it as a float."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value).lower() if isinstance(value, bool | int) else str(value)


def _one_or_more(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "array", "items": schema}]}


_LAYER = {
    "anyOf": [
        {"type": "integer", "minimum": 0, "maximum": MOST_LAYERS - 1},
        {"type": "string", "pattern": "^([0-9]{1,4}|last|all)$"},
    ]
}
_ACTIVATIONS = {
    "type": "object",
    "properties": {"layers": _one_or_more(_LAYER), "kinds": _one_or_more({"type": "string", "enum": list(KINDS)})},
    "additionalProperties": False,
}
"""JSON Schema of the table as it may be written."""

Activations = Annotated[
    Mapping[str, tuple[Text, ...]], BeforeValidator(_check_activations), WithJsonSchema(_ACTIVATIONS)
]


def activation_params(settings: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """Return the stage's parameter; none without activations, so that plans made without them stay the same."""
    return {"activations": {name: list(part) for name, part in settings.items()}} if settings else {}


def describe_activations(params: OnnxExportParams, config: ModelConfig) -> tuple[str, str] | None:
    """Return the name of the check and the predicted size of a task's activations; None without activations.

    Raises:
        ConfigurationError: ``PARAMS_INVALID``: the model has no such layer, or no cross-attention.
    """
    request = ActivationRequest.of(params.activations)
    if request is None:
        return None
    text = config.text
    parts: tuple[Part, ...] = ("encoder", "decoder") if text.get("is_encoder_decoder") is True else ("",)
    if CROSS in request.kinds and "decoder" not in parts:
        raise ConfigurationError(
            f"{CROSS} are asked for, and the model is not made of an encoder and a decoder",
            reason="PARAMS_INVALID",
            remedy=f"leave {CROSS} out",
            about={"key": "activations.kinds"},
        )
    sizes = [_sizes_of_part(text, _OF_PART[part]) for part in parts]
    if not all(all(each.values()) for each in sizes):
        return "activations", "their size is not known, because config.json has other names for the model's sizes"
    most = max(each["layers"] for each in sizes)
    count = token = pair = 0
    for part, size in zip(parts, sizes, strict=True):
        outputs = request.outputs(size["layers"], part, most=most)
        maps = sum(output.kind in ("attentions", CROSS) for output in outputs)
        count += len(outputs)
        token += FLOAT32_BYTES * size["width"] * (len(outputs) - maps)
        pair += FLOAT32_BYTES * size["heads"] * maps
    said = [f"{format_size(token)} for each token"] if token else []
    said += [f"{format_size(pair)} for each pair of tokens"] if pair else []
    length = config.get("max_source_positions") if len(parts) > 1 else None
    tokens = length if _is_count(length) else _EXAMPLE_TOKENS
    whole = tokens * token + tokens**2 * pair
    texts = "a text and its result" if len(parts) > 1 else "a text"
    return "activations", (
        f"{counted(count, 'output')} with {' and '.join(said)}: {format_size(whole)} for {texts} of {tokens} tokens"
        f"{' each' if len(parts) > 1 else ''}; the folder grows by less than 1 MB"
    )


def _sizes_of_part(text: Mapping[str, Any], names: Mapping[str, tuple[str, ...]]) -> dict[str, int]:
    """Return the sizes of a part of a model; 0 where none of its names is there."""
    return {name: next((text[key] for key in keys if _is_count(text.get(key))), 0) for name, keys in names.items()}


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


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

    @classmethod
    def schema_by_name(cls, schema: JsonSchemaValue) -> JsonSchemaValue:
        """Return the JSON Schema of sizes by field or axis, of all inputs or of each."""
        size = {"type": "integer", "minimum": 0, "maximum": 1 << 20}
        axes = {axis: schema["properties"].get(axis, size) for axis in (*_FIELD_OF_AXIS, TOTAL)}
        of_input = {"type": "object", "properties": axes, "additionalProperties": False}
        pattern = rf"^({'|'.join(_INPUTS)})\.({'|'.join(axes)})$"
        return {
            **schema,
            "properties": {**schema["properties"], **axes, **dict.fromkeys(_INPUTS, of_input)},
            "patternProperties": {pattern: size},
        }


def _sizes_by_field(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return sizes by field. Inputs have the same axes, so an axis may not have two sizes."""
    sizes: dict[str, Any] = {}
    for place, axis, size in _flatten(value):
        if axis not in (*_FIELD_OF_AXIS, TOTAL):
            raise wrong_value(place, "is no axis of a graph", f"use {', '.join(_AXES)}")
        field = _FIELD_OF_AXIS.get(axis, TOTAL)
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
