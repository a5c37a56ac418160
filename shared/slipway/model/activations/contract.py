"""The contract that describes the activations of a folder's graphs.

``activations.json`` in an output says what the additional outputs hold; ``ACTIVATIONS_CONTRACT.md`` says the same to people. A stage
that changes a graph's types writes both again, and ``slipway inspect`` compares a graph with them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from slipway.counts import counted
from slipway.errors import ConfigurationError
from slipway.files.json_documents import read_json_object
from slipway.model.activations.request import KINDS, MOST_LAYERS, Kind
from slipway.texts import one_line

CONTRACT, CONTRACT_PAGE = "activations.json", "ACTIVATIONS_CONTRACT.md"
NUMBERING = "layers count from 0, as in transformers' list of layers"
_MOST_BYTES = 4 << 20


class ContractOutput(BaseModel):
    """One output of the contract.

    Attributes:
        name: Its name in the graph.
        kind: Key of :data:`KINDS`.
        layer: Number of the layer; None if it belongs to none.
        module: The module of transformers' model whose input or output it is.
        dtype: ``float32`` or ``float16``.
        shape: Its axes: the name of one that varies, or a size.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    name: str = Field(max_length=200)
    kind: Kind
    layer: int | None = Field(default=None, ge=0, lt=MOST_LAYERS)
    module: str = Field(max_length=400)
    dtype: Literal["float32", "float16"]
    shape: tuple[str | int, ...] = Field(max_length=8)


class GraphContract(BaseModel):
    """What the additional outputs of one graph hold.

    Attributes:
        file: The graph.
        layers: Number of the layers of the model, or of the part of it that the graph computes.
        outputs: The outputs.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    file: str = Field(max_length=200)
    layers: int = Field(ge=1, le=MOST_LAYERS)
    outputs: tuple[ContractOutput, ...] = Field(max_length=5 * MOST_LAYERS)

    def rows(self) -> list[str]:
        """Return the outputs as a table in Markdown."""
        return [
            "| output | shape | dtype | module in transformers |",
            "|---|---|---|---|",
            *(
                f"| `{each.name}` | {', '.join(map(str, each.shape))} | {each.dtype} | `{each.module}` |"
                for each in self.outputs
            ),
            "",
        ]


class ActivationContract(GraphContract):
    """The contract of all graphs of a folder.

    Attributes:
        version: Version of this form.
        numbering: How layers are numbered.
        further: Contracts of further graphs: the decoder's, if the model is an encoder–decoder.
    """

    version: Literal[1] = 1
    numbering: str = NUMBERING
    further: tuple[GraphContract, ...] = Field(default=(), max_length=1)

    @property
    def graphs(self) -> tuple[GraphContract, ...]:
        """Return the contract of each graph."""
        return (self, *self.further)

    def with_dtypes(self, dtypes: Mapping[str, str]) -> ActivationContract:
        """Return the contract of graphs whose outputs have these types by name; checked like any other contract."""
        made = self.model_dump(mode="json")
        for graph in (made, *made["further"]):
            for output in graph["outputs"]:
                output["dtype"] = dtypes.get(output["name"], output["dtype"])
        return ActivationContract.model_validate_json(json.dumps(made))

    def write(self, folder: Path) -> None:
        """Write both files into a folder."""
        text = self.model_dump_json(indent=2, exclude=None if self.further else {"further"})
        (folder / CONTRACT).write_text(text + "\n", encoding="utf-8")
        (folder / CONTRACT_PAGE).write_text(self.page(), encoding="utf-8")

    def page(self) -> str:
        """Return the contract as Markdown."""
        kinds = dict.fromkeys(each.kind for graph in self.graphs for each in graph.outputs)
        meant = [f"- `{kind}{'' if kind == 'embeddings' else '.N'}`: {KINDS[kind]}." for kind in kinds]
        tables: list[str] = []
        for graph in self.graphs:
            about = f"Outputs beside its results. The graph has {counted(graph.layers, 'layer')}; {self.numbering}."
            tables += [f"## `{graph.file}`", "", about, "", *graph.rows()]
        named = ["Names begin with the part of the model, `encoder_` or `decoder_`.", ""] if self.further else []
        return "\n".join(
            [
                "# Activations contract",
                "",
                *meant,
                "",
                *named,
                *tables,
                "Values at padding tokens mean nothing. The axis `total_sequence` counts the tokens of the cache and the new ones.",
                f"`{CONTRACT}` has the same for programs; `slipway inspect FOLDER` compares the graph with it.",
                "",
            ]
        )


def read_contract(path: Path) -> ActivationContract:
    """Read a contract's JSON file.

    Raises:
        ConfigurationError: ``CONTRACT_INVALID``: it cannot be read, or is not a contract.
    """
    try:
        return ActivationContract.model_validate_json(json.dumps(read_json_object(path, largest=_MOST_BYTES)))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        fault = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    except (OSError, ValueError) as error:
        fault = one_line(str(error))
    raise ConfigurationError(
        f"{path.name} is not a contract of activations: {fault}",
        reason="CONTRACT_INVALID",
        remedy=f"give the {CONTRACT} of an export",
        about={"file": path.name},
    )
