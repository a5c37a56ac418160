"""The configuration of an export."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator
from pydantic_core import PydanticCustomError

from slipway.configuration.conflicts import conflicts
from slipway.configuration.sections import Sections


class ExportConfiguration(Sections):
    """The configuration of an export: its checkpoint and base model, its formats, its validation and its output folder."""

    @model_validator(mode="after")
    def _no_conflicts(self) -> Self:
        found = conflicts(self)
        if found:
            raise PydanticCustomError(
                "conflict", "{text}", {"text": "; ".join(str(problem) for problem in found), "problems": found}
            )
        return self
