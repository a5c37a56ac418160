"""Base classes for the settings of formats."""

from __future__ import annotations

from slipway.settings.sections import Level, Section


class FormatSettings(Section):
    """Base of a format's section under ``formats:``.

    Attributes:
        enabled: Whether the format is delivered.
    """

    enabled: bool = False


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
