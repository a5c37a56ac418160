"""The weights of ONNX graphs: taken from data files into the graph, or left out of it and described.

Each weight left out is an input of its graph, and rows of a tensor of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from slipway.errors import ModelExportError
from slipway.files.json_documents import LARGEST_LIST
from slipway.files.regular_file import read_regular
from slipway.model.weights.reading import DEFERRED, description_error
from slipway.sizes import format_size

if TYPE_CHECKING:
    import onnx_ir as ir


MOST_INLINE_BYTES = (2 << 30) - (64 << 20)
"""protobuf's limit of 2 GiB, less room for the graph itself."""

_STRICT = ConfigDict(frozen=True, strict=True, extra="forbid")


def take_weights_in(model: ir.Model, name: str, *, error: type[ModelExportError]) -> None:
    """Load the weights of a graph into it, in memory.

    Args:
        model: The graph.
        name: Its file's name, for the error.
        error: The caller's kind of error.

    Raises:
        ModelExportError: ``ONNX_TOO_LARGE`` if the graph would exceed the 2 GB that a protobuf file can have.
    """
    import onnx_ir as ir

    tensors = (value.const_value for value in model.graph.initializers.values())
    size = sum(tensor.nbytes for tensor in tensors if tensor is not None)
    if size > MOST_INLINE_BYTES:
        raise error(
            f"{name} has {format_size(size)} of weights, and a graph can hold {format_size(MOST_INLINE_BYTES)}",
            reason="ONNX_TOO_LARGE",
            remedy="set external_data to true",
            about={"file": name, "size_bytes": size},
        )
    ir.external_data.load_to_model(model)


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
    """The weights that the graphs of a folder leave out.

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
