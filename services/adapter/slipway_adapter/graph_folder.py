"""Write the base's graph with branches, and the adapter's factors in a file of ONNX Runtime's own format.

The branch of ``x @ W`` is ``x @ A @ B`` with two optional inputs, whose defaults have rank 0: without an adapter it adds zero.
So the graph depends on the base alone, and all its fine-tunes share it.

Axes: d_in and d_out = features of the layer, r = rank, which the adapter chooses for each layer.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from google.protobuf.message import DecodeError
from onnx_ir.serde import SerdeError

from slipway.errors import AdapterExportError
from slipway.files.paths import all_files, real_file
from slipway.model.adapters.saved import Pair, Saved
from slipway.stage import Context
from slipway.texts import quoted
from slipway_adapter.base import Modules, fit
from slipway_adapter.factors import scale
from slipway_adapter.peft_folder import copy_tokenizer
from slipway_adapter.rules import check_rules, refusal_error

SUFFIX = ".onnx_adapter"
_OWN_FILES = ("example.py",)
"""Files of the base's export that describe only the base."""

_WEIGHT = ".weight.T"
"""End of the names of weights that onnx_export stores as (d_in, d_out); the beginning is the module's name."""


def write_graph_folder(saved: Saved, inputs: Mapping[str, Path], output: Path, ctx: Context) -> None:
    """Write the folder ``output``, which must not exist.

    Raises:
        AdapterExportError, ModelMergeError, CheckpointValidationError: as this service's README lists.
    """
    if "onnx" not in inputs:
        raise AdapterExportError(
            "the base's graph is missing", reason="INPUT_MISSING", remedy="give the base's export as the input onnx"
        )
    for caution in check_rules(saved, "onnx"):
        ctx.warn(caution)
    pairs = fit(saved, inputs["base"], "onnx").pairs
    output.mkdir()
    graphs = inputs["onnx"]
    for name, _ in sorted(all_files(graphs)):
        target = output / name
        if name in _OWN_FILES or name.endswith(".onnx"):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(real_file(graphs, name), target)
    copied = copy_tokenizer(saved.folder, inputs["base"], output)
    branches = {path.name: _write_graph(path, output / path.name) for path in sorted(graphs.glob("*.onnx"))}
    taken = _match_branches(pairs, [branch for by_module in branches.values() for branch in by_module.values()])
    digests = {}
    for name, by_module in branches.items():
        digests[name] = hashlib.sha256((output / name).read_bytes()).hexdigest()
        of_graph = [(branch, taken[module]) for module, branch in by_module.items() if module in taken]
        _write_factors(of_graph, (output / name).with_suffix(SUFFIX), ctx)
    ctx.record(modules=len(pairs), graphs=digests, copied=copied)


def _write_graph(source: Path, target: Path) -> dict[str, Branch]:
    """Write a graph with branches; its weights stay in the data file beside it."""
    try:
        model = ir.load(source)
    except (OSError, ValueError, DecodeError, SerdeError) as error:
        raise AdapterExportError(
            f"the base's graph {source.name} cannot be read ({error})",
            reason="ONNX_INVALID",
            remedy="export the base again",
        ) from error
    branches = add_branches(model.graph)
    ir.save(model, target)
    return branches


def _match_branches(pairs: Mapping[str, Pair], branches: Sequence[Branch]) -> dict[str, Pair]:
    """Return each pair by the module of its branch. Search all graphs together: names in encoder and decoder may end alike.

    Raises:
        AdapterExportError: ``ADAPTER_NOT_SERVABLE`` if a pair has no branch, or two pairs have the same.
    """
    modules = Modules({branch.module: branch.shape for branch in branches})
    places = {name: modules.find(name) for name in sorted(pairs)}
    taken: dict[str, Pair] = {}
    for name, module in places.items():
        if module is None:
            raise refusal_error("graph", f"the base's graph has no product with the weight of {quoted(name)}")
        if module in taken:
            raise refusal_error("graph", f"the base's graph has one product for {quoted(name)} and another module")
        taken[module] = pairs[name]
    return taken


def _write_factors(taken: list[tuple[Branch, Pair]], target: Path, ctx: Context) -> None:
    """Write a file of factors, with each scaling multiplied into B.

    Raises:
        AdapterExportError: ``ADAPTER_BASE_MISMATCH``, ``NON_FINITE_WEIGHTS``.
    """
    factors = {}
    for number, (branch, pair) in enumerate(taken):
        ctx.progress("factors", done=number, total=len(taken), unit="modules")
        a, b = scale(pair)
        if (a.shape[1], b.shape[0]) != branch.shape:
            raise AdapterExportError(
                f"the adapter's pair for {quoted(branch.module)} updates a weight of shape {(b.shape[0], a.shape[1])}, and the "
                f"graph's, transposed, has {branch.shape}",
                reason="ADAPTER_BASE_MISMATCH",
                remedy="use the base model that the adapter was trained on",
            )
        for name, values in ((branch.a, a.T), (branch.b, b.T)):
            factors[name] = ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(values))
    if not factors:
        return
    file = ort.AdapterFormat()
    file.set_adapter_version(1)
    file.set_model_version(1)
    file.set_parameters(factors)
    file.export_adapter(str(target.absolute()))


@dataclass(frozen=True, slots=True)
class Branch:
    """The inputs of one branch.

    Attributes:
        module: Name of the module.
        shape: Shape of its constant, (d_in, d_out).
    """

    module: str
    shape: tuple[int, int]

    @property
    def a(self) -> str:
        """Return the name of the input A, (d_in, r)."""
        return f"{self.module}.lora_A{_WEIGHT}"

    @property
    def b(self) -> str:
        """Return the name of the input B, (r, d_out)."""
        return f"{self.module}.lora_B{_WEIGHT}"


def add_branches(graph: ir.Graph) -> dict[str, Branch]:
    """Add a branch to every product with a float32 weight that no other node uses; return the branches by module."""
    branches: dict[str, Branch] = {}
    for node in list(graph):
        weight = node.inputs[1] if node.op_type == "MatMul" and len(node.inputs) == 2 else None
        if weight is None or not _is_weight(graph, weight):
            continue
        assert weight.name is not None
        assert weight.const_value is not None
        d_in, d_out = (int(size) for size in weight.const_value.shape.numpy())
        branch = Branch(weight.name.removesuffix(_WEIGHT), (d_in, d_out))
        _add_branch(graph, node, branch)
        branches[branch.module] = branch
    return branches


def _is_weight(graph: ir.Graph, value: ir.Value) -> bool:
    tensor = value.const_value
    named = value.name is not None and value.name.endswith(_WEIGHT) and value.name in graph.initializers
    single = tensor is not None and len(tensor.shape) == 2 and len(value.uses()) == 1
    return named and single and tensor is not None and tensor.dtype == ir.DataType.FLOAT


def _add_branch(graph: ir.Graph, node: ir.Node, branch: Branch) -> None:
    d_in, d_out = branch.shape
    rank = f"{branch.module}.rank"
    a = _add_optional_input(graph, branch.a, (d_in, rank), (d_in, 0))
    b = _add_optional_input(graph, branch.b, (rank, d_out), (0, d_out))
    [product] = node.outputs
    users = list(product.uses())
    low = ir.node("MatMul", [node.inputs[0], a], name=f"{branch.module}.lora_A")
    update = ir.node("MatMul", [low.outputs[0], b], name=f"{branch.module}.lora_B")
    added = ir.node("Add", [product, update.outputs[0]], name=f"{branch.module}.lora")
    low.outputs[0].name, update.outputs[0].name = f"{branch.module}.lora_A.output", f"{branch.module}.lora_B.output"
    [whole] = added.outputs
    whole.shape, whole.type, whole.name = product.shape, product.type, product.name
    product.name = f"{branch.module}.base.output"
    for user, place in users:
        user.replace_input_with(place, whole)
    for place, output in enumerate(graph.outputs):
        if output is product:
            graph.outputs[place] = whole
    graph.insert_after(node, [low, update, added])


def _add_optional_input(
    graph: ir.Graph, name: str, declared: tuple[int | str, int | str], default: tuple[int, int]
) -> ir.Value:
    """Add an input to the graph, with a default value."""
    value = ir.Value(
        name=name,
        shape=ir.Shape(declared),
        type=ir.TensorType(ir.DataType.FLOAT),
        const_value=ir.tensor(np.zeros(default, np.float32), name=name),
    )
    graph.inputs.append(value)
    graph.register_initializer(value)
    return value
