"""Activations that a graph returns: those asked for, their contract, and the inspection of graphs by it.

``activations.json`` in an output says what the additional outputs hold; ``ACTIVATIONS_CONTRACT.md`` says the same to people. A stage
that changes a graph's types writes both again, and ``slipway inspect`` compares a graph with them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from slipway.errors import ConfigurationError
from slipway.files.json_documents import LARGEST_LIST, read_json_object
from slipway.texts import counted, one_line, printable

Kind = Literal["hidden_states", "attentions", "cross_attentions", "mlp", "embeddings"]
Part = Literal["", "encoder", "decoder"]
"""Half of an encoder–decoder; empty for a model without halves."""

CROSS: Kind = "cross_attentions"
KINDS: Mapping[Kind, str] = {
    "hidden_states": "output of layer N, before any norm that follows the last layer",
    "attentions": "attention weights of layer N after the softmax, one map per head; a row is a query and sums to 1",
    CROSS: "attention weights of the decoder's layer N to the encoder's results, after the softmax; a row is a token of the decoder",
    "mlp": "output of the feed-forward part of layer N, as the module named below returns it",
    "embeddings": "input of the first layer: the tokens' embeddings, with positions and norms where the model has them",
}
"""Kinds of activations with their meanings."""

ALL, LAST = "all", "last"
MOST_LAYERS = 4096
_NUMBER = re.compile(r"\d{1,4}")

CONTRACT, CONTRACT_PAGE = "activations.json", "ACTIVATIONS_CONTRACT.md"
NUMBERING = "layers count from 0, as in transformers' list of layers"
_MOST_CONTRACT_BYTES = 4 << 20

_INSPECTION_FILE = "inspection.json"
_FORM = ConfigDict(frozen=True, strict=True, extra="forbid")
Shown = Annotated[str, AfterValidator(printable)]


class Activation(NamedTuple):
    """One activation.

    Attributes:
        kind: Key of :data:`KINDS`.
        layer: Number of the layer; None if it belongs to none.
        part: Half of the model; only a decoder has cross-attention.
    """

    kind: Kind
    layer: int | None
    part: Part = ""

    @property
    def name(self) -> str:
        """Return the name of its output: ``attentions.3``, or ``encoder_attentions.3`` in an encoder–decoder, as transformers names them."""
        kind = f"{self.part}_{self.kind}" if self.part and self.kind != CROSS else self.kind
        return kind if self.layer is None else f"{kind}.{self.layer}"


@dataclass(frozen=True, slots=True)
class ActivationRequest:
    """The activations that are asked for.

    Attributes:
        layers: Numbers of layers from 0, ``("all",)`` or ``("last",)``.
        kinds: Keys of :data:`KINDS`.
    """

    layers: tuple[str, ...]
    kinds: tuple[str, ...]

    @classmethod
    def of(cls, table: Mapping[Any, Sequence[str]]) -> ActivationRequest | None:
        """Read the table of a setting or parameter; None if it asks for nothing."""
        if not table:
            return None
        return cls(tuple(table.get("layers") or (ALL,)), tuple(table.get("kinds") or ("hidden_states",)))

    def choose_layers(self, count: int, *, most: int = 0) -> tuple[int, ...]:
        """Return the numbers of the layers in a part with ``count`` of them; another part of the model may have ``most``.

        Raises:
            ConfigurationError: ``PARAMS_INVALID``: the model has no such layer.
        """
        if ALL in self.layers:
            return tuple(range(count))
        numbers, most = {count - 1 if layer == LAST else int(layer) for layer in self.layers}, max(count, most)
        if numbers and max(numbers) >= most:
            raise ConfigurationError(
                f"activations of layer {max(numbers)} are asked for, and the model has {most} layers",
                reason="PARAMS_INVALID",
                remedy=f"use layers 0 to {most - 1}, last or all",
                about={"key": "activations.layers", "layers": most},
            )
        return tuple(sorted(number for number in numbers if number < count))

    def outputs(self, count: int, part: Part = "", *, most: int = 0) -> tuple[Activation, ...]:
        """Return every output of a part with ``count`` layers, in the order of the graph."""
        layers = self.choose_layers(count, most=most)
        activations: list[Activation] = []
        for kind in (kind for kind in KINDS if kind in self.kinds and (kind != CROSS or part == "decoder")):
            activations += [Activation(kind, layer, part) for layer in ((None,) if kind == "embeddings" else layers)]
        return tuple(activations)


def is_layer(value: str) -> bool:
    """Return whether a text names layers: a number, ``last`` or ``all``."""
    return value in (ALL, LAST) or (_NUMBER.fullmatch(value) is not None and int(value) < MOST_LAYERS)


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
        return ActivationContract.model_validate_json(json.dumps(read_json_object(path, largest=_MOST_CONTRACT_BYTES)))
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
        (folder / _INSPECTION_FILE).write_text(self.model_dump_json() + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Inspection:
        """Read what :meth:`write` wrote."""
        document: dict[str, Any] = read_json_object(folder / _INSPECTION_FILE, largest=LARGEST_LIST)
        return cls.model_validate_json(json.dumps(document))
