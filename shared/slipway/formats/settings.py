"""Base classes for the settings of formats."""

from __future__ import annotations

from typing import Literal, get_args, get_origin

from slipway.settings.sections import Level, Section


class FormatSettings(Section):
    """Base of a format's section under ``formats:``.

    Attributes:
        enabled: Whether the format is delivered.
    """

    enabled: bool = False


def every_choice(settings: type[FormatSettings]) -> dict[str, list[str]]:
    """Return the settings that are lists of known values, each with all of them."""
    lists = {
        name: get_args(each.annotation)
        for name, each in settings.model_fields.items()
        if get_origin(each.annotation) is tuple
    }
    return {name: list(get_args(kind)) for name, (kind, *_) in lists.items() if get_origin(kind) is Literal}


class LevelSettings(FormatSettings):
    """Base of the section of a format that has quantization levels. One whose ``quantization`` is empty by default takes no common levels.

    Attributes:
        unquantized: Deliver the format unquantized too, beside its levels.
        quantization: Levels of this format; if not set, those of ``optimization.quantization``.
    """

    unquantized: bool = True
    quantization: tuple[Level, ...] | None = (
        None  # the configuration checks the names, because only it knows all formats
    )
