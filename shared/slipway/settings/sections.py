"""What sections of settings are made of: their base, and the types of their values, checked as they come in."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, NewType

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from slipway.texts import hidden_character, quoted

TEXT_BYTES = 4096
"""Length of a text, as of one in a request."""

LARGEST = 2**31 - 1
"""Of a number that travels in 32 bits."""
LARGEST_BYTES = 2**62
LARGEST_SEED = 2**53 - 1
"""Parameters of a stage travel as doubles."""


class Section(BaseModel):
    """Base of every section: frozen, strict, unknown settings refused, defaults checked."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", validate_default=True, allow_inf_nan=False)


class Listed(Section):
    """Base of a value of several named parts, which may be written as a list of them: ``[1, 1, 8]``.

    Attributes:
        noun: What it is called where a value is none.
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
        details = {"found": quoted(value), "noun": cls.noun, "remedy": f"use [{', '.join(names)}]"}
        raise PydanticCustomError("listed", "{found} is not a {noun}", details)


def as_tuple(value: Any) -> Any:
    """Make a list, as YAML has them, a tuple."""
    return tuple(value) if isinstance(value, list) else value


def lower_case(value: Any) -> Any:
    """Write a text in lower case."""
    return value.lower() if isinstance(value, str) else value


def _plain_text(value: str) -> str:
    """A text as it is; one that a terminal would obey, that hides something, or that no request takes is refused."""
    hidden = hidden_character(value)
    if hidden:
        raise PydanticCustomError(
            "text",
            "{found} has the character {hidden}, which is not shown as it is",
            {"found": quoted(value), "hidden": hidden, "remedy": "rename what it names, without that character"},
        )
    size = len(value.encode())
    if size > TEXT_BYTES:
        raise PydanticCustomError(
            "text",
            "{found} has {size} bytes",
            {"found": quoted(value), "size": size, "remedy": f"use {TEXT_BYTES} at most"},
        )
    return value


Level = NewType("Level", str)
"""Name of a quantization level; which there are follows from the installed formats."""

Text = Annotated[str, AfterValidator(_plain_text)]
Seconds = Annotated[int, Field(ge=1, le=LARGEST)]
Texts = Annotated[tuple[Text, ...], BeforeValidator(as_tuple)]
