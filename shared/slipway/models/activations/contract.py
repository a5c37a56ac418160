"""The contract that describes the activations of a graph.

``activations.json`` in an output says what its additional outputs hold; ``ACTIVATIONS_CONTRACT.md`` says the same to people. A stage
that changes the graph's types writes both again, and ``slipway inspect`` compares a graph with them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from slipway.errors import ConfigurationError
from slipway.files.json_documents import read_json_object
from slipway.models.activations.request import KINDS, MOST_LAYERS, Kind
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


class ActivationContract(BaseModel):
    """What the additional outputs of a graph hold.

    Attributes:
        version: Version of this form.
        file: The graph.
        layers: Number of the model's layers.
        numbering: How layers are numbered.
        outputs: The outputs.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    version: Literal[1] = 1
    file: str = Field(max_length=200)
    layers: int = Field(ge=1, le=MOST_LAYERS)
    numbering: str = NUMBERING
    outputs: tuple[ContractOutput, ...] = Field(max_length=4 * MOST_LAYERS)

    def with_dtypes(self, dtypes: Mapping[str, str]) -> ActivationContract:
        """Return the contract of a graph whose outputs have these types by name; checked like any other contract."""
        made = self.model_dump(mode="json")
        for output in made["outputs"]:
            output["dtype"] = dtypes.get(output["name"], output["dtype"])
        return ActivationContract.model_validate_json(json.dumps(made))

    def write(self, folder: Path) -> None:
        """Write both files into a folder."""
        (folder / CONTRACT).write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")
        (folder / CONTRACT_PAGE).write_text(self.page(), encoding="utf-8")

    def page(self) -> str:
        """Return the contract as Markdown."""
        rows = [
            f"| `{each.name}` | {', '.join(map(str, each.shape))} | {each.dtype} | `{each.module}` |"
            for each in self.outputs
        ]
        meant = [f"- `{kind}{'' if kind == 'embeddings' else '.N'}`: {KINDS[kind]}." for kind in self.kinds()]
        return "\n".join(
            [
                "# Activations contract",
                "",
                f"Outputs of `{self.file}` beside its results. The model has {self.layers} layers; {self.numbering}.",
                "",
                *meant,
                "",
                "| output | shape | dtype | module in transformers |",
                "|---|---|---|---|",
                *rows,
                "",
                "Values at padding tokens mean nothing. The axis `total_sequence` counts the tokens of the cache and the new ones.",
                f"`{CONTRACT}` has the same for programs; `slipway inspect FOLDER` compares the graph with it.",
                "",
            ]
        )

    def kinds(self) -> tuple[Kind, ...]:
        """Return the kinds of the outputs, each once."""
        return tuple(dict.fromkeys(each.kind for each in self.outputs))


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
