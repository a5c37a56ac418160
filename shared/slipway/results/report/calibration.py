"""What the text of a calibration consisted of, as the task that chose it recorded it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, Field, NonNegativeInt, ValidationError

from slipway.texts import printable

_Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class _Vocabulary(BaseModel):
    coverage: _Share


class _Overlap(BaseModel):
    overlap: _Share
    passages_left_out: NonNegativeInt


class _Lengths(BaseModel):
    shortest: NonNegativeInt
    median: NonNegativeInt | float
    longest: NonNegativeInt


class Profile(BaseModel):
    """The text of a calibration: its origin, amount, languages, and what it has in common with the held-out text (None: not compared)."""

    source: Annotated[str, Field(max_length=500)]
    passages: NonNegativeInt
    tokens: NonNegativeInt
    passage_tokens: _Lengths
    scripts: dict[str, _Share]
    vocabulary: _Vocabulary
    heldout: _Overlap | None = None

    @property
    def languages(self) -> str:
        """Return the scripts with their shares of the letters, for people."""
        return ", ".join(f"{printable(name).capitalize()} {share:.0%}" for name, share in self.scripts.items())


def calibration_profile(lineage: Mapping[str, Any]) -> Profile | None:
    """Return the profile that a task recorded in a form that is known here; None if there is none."""
    for task in lineage.get("tasks", ()):
        try:
            return Profile.model_validate(task["profile"])
        except (KeyError, TypeError, ValidationError):
            continue
    return None
