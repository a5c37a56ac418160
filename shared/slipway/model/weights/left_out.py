"""Describe the weights that the graphs of a folder leave out: each is an input of its graph, and rows of a tensor of the model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from slipway.files.json_documents import LARGEST_LIST
from slipway.files.regular_file import read_regular
from slipway.model.weights.reading import DEFERRED, description_error

_STRICT = ConfigDict(frozen=True, strict=True, extra="forbid")


class LeftOut(BaseModel):
    """A matrix that a graph leaves out.

    Attributes:
        tensor: The model's tensor.
        first: Its first row that belongs to the matrix.
        rows: Number of its rows that belong to the matrix.
        transposed: Whether the graph has the matrix transposed.
        index: Place of the matrix among the graph's initializers, so that the graph is the same with it.
    """

    model_config = _STRICT

    tensor: str
    first: int = Field(ge=0)
    rows: int = Field(ge=1)
    transposed: bool
    index: int = Field(default=0, ge=0)


class LeftOutWeights(BaseModel):
    """The description.

    Attributes:
        stage: The stage that made the graphs.
        model: Name of its input with the model.
        graphs: By file of a graph, the weights that it leaves out, by the graph's name for each.
    """

    model_config = _STRICT

    stage: str
    model: str
    graphs: Mapping[str, Mapping[str, LeftOut]]

    def write(self, folder: Path) -> None:
        """Write the description into the folder of the graphs."""
        (folder / DEFERRED).write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> LeftOutWeights:
        """Read the description in a folder.

        Raises:
            CheckpointValidationError: ``BASE_MODEL_INVALID``.
        """
        try:
            return cls.model_validate_json(read_regular(folder / DEFERRED, largest=LARGEST_LIST))
        except (OSError, ValidationError) as error:
            raise description_error(f"it cannot be read ({str(error).splitlines()[0]})") from error
