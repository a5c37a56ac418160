"""The result of a conversion of pickles to safetensors, for each file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

from slipway.files.json_documents import LARGEST_LIST, read_json_object
from slipway.texts import printable

FILE_NAME = "conversion.json"
_FORM = ConfigDict(frozen=True, strict=True, extra="forbid")
Shown = Annotated[str, AfterValidator(printable)]


class ConvertedWeights(BaseModel):
    """One model, adapter or file of weights.

    Attributes:
        source: Its first file, relative to the source.
        target: The first file written, relative to the target; empty if it was refused.
        files: Number of files written.
        tensors: Number of tensors written.
        nbytes: Bytes of tensor data written.
        ties: Names left out because the model's class ties them to others.
        left_out: Entries that are not tensors.
        reason: Stable reason of the refusal; empty if it was converted.
        message: The refusal.
    """

    model_config = _FORM

    source: Shown
    target: Shown = ""
    files: int = 0
    tensors: int = 0
    nbytes: int = 0
    ties: tuple[Shown, ...] = ()
    left_out: tuple[Shown, ...] = ()
    reason: str = ""
    message: Shown = ""


class SkippedFile(BaseModel):
    """A file that was not converted on purpose, and why."""

    model_config = _FORM

    source: Shown
    why: str


class Conversion(BaseModel):
    """The results for everything below a source."""

    model_config = _FORM

    weights: tuple[ConvertedWeights, ...]
    skipped: tuple[SkippedFile, ...] = ()

    def write(self, folder: Path) -> None:
        """Write the result beside what was converted."""
        (folder / FILE_NAME).write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Conversion:
        """Read it back.

        Raises:
            OSError: It cannot be read.
            ValueError: It is not a result of a conversion.
        """
        return cls.model_validate_json(json.dumps(read_json_object(folder / FILE_NAME, largest=LARGEST_LIST)))
