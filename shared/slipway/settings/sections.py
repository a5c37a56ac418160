"""The base of sections of settings, and the types of their values, which are checked as they are read."""

from __future__ import annotations

from types import UnionType
from typing import Annotated, Any, ClassVar, NewType, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from slipway.texts import hidden_character, quoted

TEXT_BYTES = 4096
"""Longest text in bytes, as in a request."""

LARGEST = 2**31 - 1
"""Largest number in a field of 32 bits."""
LARGEST_BYTES = 2**62
LARGEST_SEED = 2**53 - 1
"""Largest seed: parameters of a stage are sent as doubles."""


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


Level = NewType("Level", str)
"""Name of a quantization level; the installed formats define the levels."""

Text = Annotated[str, AfterValidator(_plain_text)]
Seconds = Annotated[int, Field(ge=1, le=LARGEST)]
Texts = Annotated[tuple[Text, ...], BeforeValidator(as_tuple)]
