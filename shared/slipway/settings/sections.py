"""Sections of settings: their base, the types of their values, the meanings of their fields, and their variables.

Values are checked as they are read. Meanings are read from docstrings, for help, tables and documentation.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from types import UnionType
from typing import Annotated, Any, ClassVar, NewType, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.annotated_handlers import GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from slipway.texts import hidden_character, quoted

TEXT_BYTES = 4096
"""Longest text in bytes, as in a request."""

LARGEST = 2**31 - 1
"""Largest number in a field of 32 bits."""
LARGEST_BYTES = 2**62
LARGEST_SEED = 2**53 - 1
"""Largest seed: parameters of a stage are sent as doubles."""

Level = NewType("Level", str)
"""Name of a quantization level; the installed formats define the levels."""

Seconds = Annotated[int, Field(ge=1, le=LARGEST)]

EXPORT_VARIABLES: Mapping[str, str] = {
    "EXPORT_CHECKPOINT_PATH": "checkpoint.path",
    "EXPORT_AUTO_DETECT_LATEST": "checkpoint.auto_detect_latest",
    "EXPORT_CHECKPOINT_SELECT": "checkpoint.select",
    "EXPORT_COMBINE_ADAPTERS": "combination.adapters",
    "EXPORT_COMBINE_WEIGHTS": "combination.weights",
    "EXPORT_COMBINE_TYPE": "combination.type",
    "EXPORT_COMBINE_DENSITY": "combination.density",
    "EXPORT_COMBINE_MAJORITY_SIGN": "combination.majority_sign",
    "EXPORT_COMBINE_SEED": "combination.seed",
    "EXPORT_BASE_MODEL": "base_model.name",
    "EXPORT_LOAD_IN_4BIT": "base_model.load_in_4bit",
    "EXPORT_MERGE_ONTO": "base_model.merge_onto",
    "EXPORT_BASE_MODEL_TRUST": "base_model.trust",
    "EXPORT_BASE_MODEL_TYPE": "base_model.model_type",
    "EXPORT_QUANTIZATION_LEVEL": "optimization.quantization",
    "EXPORT_GROUP_SIZE": "optimization.group_size",
    "EXPORT_QUANTIZATION_METHOD": "optimization.method",
    "EXPORT_QUANTIZATION_SYMMETRIC": "optimization.symmetric",
    "EXPORT_QUANTIZATION_WIDE_SHARE": "optimization.wide_share",
    "EXPORT_QUANTIZATION_HEAD_BITS": "optimization.head_bits",
    "EXPORT_QUANTIZATION_TIME_BUDGET": "optimization.time_budget",
    "EXPORT_QUANTIZATION_SIZE_BUDGET": "optimization.size_budget",
    "EXPORT_CALIBRATION_DATA": "optimization.calibration",
    "EXPORT_REMOVE_ARTIFACTS": "optimization.remove_artifacts",
    "EXPORT_COMPRESS_WEIGHTS": "optimization.compress_weights",
    "EXPORT_ENABLE_VALIDATION": "validation.enabled",
    "EXPORT_TEST_SAMPLES": "validation.test_samples",
    "EXPORT_COMPARE_OUTPUTS": "validation.compare_outputs",
    "EXPORT_BENCHMARK_PERFORMANCE": "validation.benchmark_performance",
    "EXPORT_VALIDATION_EFFORT": "validation.effort",
    "EXPORT_CONTINUATION_TOKENS": "validation.continuation_tokens",
    "EXPORT_HELDOUT": "validation.heldout",
    "EXPORT_TEST_INPUT_SAMPLES": "validation.test_input_samples",
    "EXPORT_VALIDATION_LIMITS": "validation.limits",
    "EXPORT_ON_FAILURE": "validation.on_failure",
    "EXPORT_OUTPUT_DIR": "output.directory",
    "EXPORT_NAMING_PATTERN": "output.naming_pattern",
    "EXPORT_TARGET": "output.target",
    "EXPORT_DESTINATIONS": "output.destinations",
    "EXPORT_LICENSE": "output.license",
    "EXPORT_RECOVERY_PROFILE": "recovery.profile",
    "EXPORT_MAX_ATTEMPTS": "recovery.max_attempts",
    "EXPORT_MAX_MEMORY_BYTES": "resources.max_memory_bytes",
    "EXPORT_THREADS": "resources.threads",
    "EXPORT_STAGE_TIMEOUT_SECONDS": "resources.stage_timeout_seconds",
    "EXPORT_STAGE_TIMEOUTS": "resources.stage_timeouts",
    "EXPORT_SPLIT_BYTES": "execution.split_bytes",
    "EXPORT_SHARD_BYTES": "execution.shard_bytes",
    "EXPORT_LOG_LEVEL": "log.level",
}
"""Setting of each ``EXPORT_*`` variable that every export has; those of formats come from the formats."""


def wrong_value(value: Any, fault: str, remedy: str) -> PydanticCustomError:
    """Return the error of a check of a setting: the value with its fault, such as ``is not a range``, and a value that works."""
    return PydanticCustomError("wrong_value", "{text}", {"text": f"{quoted(value)} {fault}", "remedy": remedy})


class Section(BaseModel):
    """Base of every section: frozen and strict; unknown settings are refused and defaults checked."""

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", validate_default=True, allow_inf_nan=False, defer_build=True
    )


class Listed(Section):
    """Base of a value with several named parts, which may be written as a list: ``[1, 1, 8]``.

    Attributes:
        noun: Name of the kind of value in messages about a wrong one.
    """

    noun: ClassVar[str] = "list"

    @model_validator(mode="before")
    @classmethod
    def _from_list(cls, value: Any) -> Any:
        names = list(cls.model_fields)
        if isinstance(value, list | tuple) and len(value) == len(names):
            return dict(zip(names, value, strict=True))
        if isinstance(value, dict | cls):
            return value
        raise wrong_value(value, f"is not a {cls.noun}", f"use [{', '.join(names)}]")

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Describe both ways to write the value, by name and as a list."""
        reference = handler(core_schema)
        described = handler.resolve_ref_schema(reference)
        by_name = dict(described)
        parts = list(by_name["properties"].values())
        about: dict[str, Any] = {str(name): by_name.pop(name) for name in ("title", "description") if name in by_name}
        in_order: dict[str, Any] = {
            "type": "array",
            "prefixItems": parts,
            "minItems": len(parts),
            "maxItems": len(parts),
        }
        described.clear()
        described.update({"anyOf": [cls.schema_by_name(by_name), in_order], **about})
        return reference

    @classmethod
    def schema_by_name(cls, schema: JsonSchemaValue) -> JsonSchemaValue:
        """Return the JSON Schema of the value written by name, from that of the fields."""
        return schema

    def __str__(self) -> str:
        return f"[{', '.join(str(value) for _, value in self)}]"


def plain_type(annotation: Any) -> Any:
    """Return a type without ``None`` and annotations."""
    if get_origin(annotation) is Annotated:
        return plain_type(get_args(annotation)[0])
    if get_origin(annotation) in {Union, UnionType}:
        return plain_type(next(kind for kind in get_args(annotation) if kind is not type(None)))
    return annotation


def is_section(kind: Any) -> bool:
    """Return whether a type is a section of settings instead of a single setting."""
    return isinstance(kind, type) and issubclass(kind, BaseModel) and not issubclass(kind, Listed)


def as_tuple(value: Any) -> Any:
    """Make a list from YAML a tuple."""
    return tuple(value) if isinstance(value, list) else value


def lower_case(value: Any) -> Any:
    """Write a text in lower case."""
    return value.lower() if isinstance(value, str) else value


def _plain_text(value: str) -> str:
    """Return a text unchanged; refuse control and invisible characters, and a text too long for a request."""
    hidden = hidden_character(value)
    if hidden:
        remedy = "remove that character, and rename the file or folder if it has it"
        raise wrong_value(value, f"contains the invisible character {hidden}", remedy)
    size = len(value.encode())
    if size > TEXT_BYTES:
        raise wrong_value(value, f"has {size} bytes", f"use at most {TEXT_BYTES}")
    return value


Text = Annotated[str, AfterValidator(_plain_text)]
Texts = Annotated[tuple[Text, ...], BeforeValidator(as_tuple)]


def field_meanings(model: type[BaseModel]) -> dict[str, str]:
    """Return the meaning of each field: its description, otherwise its entry under ``Attributes:`` in the docstring of the model or a base."""
    docstrings = [base.__dict__.get("__doc__") for base in reversed(model.__mro__) if issubclass(base, BaseModel)]
    said = {
        name: text
        for docstring in docstrings
        for name, text in _documented_attributes(inspect.cleandoc(docstring or "")).items()
    }
    said = {name: text for name, text in said.items() if name in model.model_fields}
    described = {name: info.description for name, info in model.model_fields.items() if info.description}
    return {**said, **described}


def _documented_attributes(docstring: str) -> dict[str, str]:
    entries: dict[str, str] = {}
    name = ""
    for line in docstring.partition("Attributes:\n")[2].splitlines():
        field = re.match(r"    (\w+): (.*)", line)
        if field is not None:
            name, entries[field[1]] = field[1], field[2]
        elif line.strip() and name:
            entries[name] += f" {line.strip()}"
    return entries
