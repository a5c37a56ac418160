"""The results of an inspection of graphs, and their differences from a contract of activations."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict

from slipway.files.json_documents import LARGEST_LIST, read_json_object
from slipway.model.activations.contract import GraphContract
from slipway.texts import printable

_FILE = "inspection.json"
_FORM = ConfigDict(frozen=True, strict=True, extra="forbid")
Shown = Annotated[str, AfterValidator(printable)]


class InspectedValue(BaseModel):
    """An input or output of a graph.

    Attributes:
        name: Its name.
        dtype: Its declared type, as numpy names it.
        shape: Its declared axes: the name of one that varies, or a size.
        found: Its shape in the run; None for an input, or without a run.
        found_dtype: Its type in the run; empty without one.
    """

    model_config = _FORM

    name: Shown
    dtype: str
    shape: tuple[str | int, ...]
    found: tuple[int, ...] | None = None
    found_dtype: str = ""


class GraphReport(BaseModel):
    """One graph.

    Attributes:
        file: Its file.
        metadata: Properties that its file names, such as architecture, tools and lineage.
        inputs: Its inputs, in order.
        outputs: Its outputs, in order.
        axes: Size of each named axis in the run.
        ran: Whether it ran.
        not_run: Why not; empty if it ran.
    """

    model_config = _FORM

    file: Shown
    metadata: dict[Shown, Shown] = {}
    inputs: tuple[InspectedValue, ...]
    outputs: tuple[InspectedValue, ...]
    axes: dict[str, int] = {}
    ran: bool = False
    not_run: str = ""

    def breaches(self, contract: GraphContract) -> Iterator[str]:
        """Yield one text for each difference from a contract; shapes are compared if the graph ran."""
        outputs = {value.name: value for value in self.outputs}
        sizes = dict(self.axes)
        for wanted in contract.outputs:
            output = outputs.get(wanted.name)
            if output is None:
                yield f"{self.file} has no output {wanted.name}"
                continue
            dtype = output.found_dtype or output.dtype
            if dtype != wanted.dtype:
                yield f"{self.file}: {wanted.name} is {dtype}, and the contract says {wanted.dtype}"
            if output.found is None:
                continue
            if not _fits(wanted.shape, output.found, sizes):
                shape = ", ".join(map(str, wanted.shape))
                yield f"{self.file}: {wanted.name} has the shape {list(output.found)}, and the contract says ({shape})"


def _fits(axes: tuple[str | int, ...], shape: tuple[int, ...], sizes: dict[str, int]) -> bool:
    """Compare a shape with axes; a name that is new gets its size here."""
    return len(axes) == len(shape) and all(
        size == (sizes.setdefault(axis, size) if isinstance(axis, str) else axis)
        for axis, size in zip(axes, shape, strict=True)
    )


class Inspection(BaseModel):
    """All graphs of a folder."""

    model_config = _FORM

    graphs: tuple[GraphReport, ...]

    def write(self, folder: Path) -> None:
        """Write the inspection into a folder."""
        (folder / _FILE).write_text(self.model_dump_json() + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Inspection:
        """Read what :meth:`write` wrote."""
        document: dict[str, Any] = read_json_object(folder / _FILE, largest=LARGEST_LIST)
        return cls.model_validate_json(json.dumps(document))
