"""Read a written package back; compare its interface and every weight with the traced program and the constants it implies.

Core ML runs on Apple's systems only, so the package itself is not run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import torch
from coremltools.converters.mil.frontend.milproto.load import load as load_program
from coremltools.converters.mil.mil import types
from coremltools.proto import FeatureTypes_pb2

from slipway.errors import CoreMLExportError
from slipway_coreml.conversion import TARGET
from slipway_coreml.params import Precision

_WEIGHTS = Path("Data", "com.apple.CoreML", "weights")
_SUFFIXES = ("_to_fp16", "_cast_fp16", "_quantized", "_palettized")
_HALF, _SINGLE = 2.0**-11, 2.0**-22
"""Largest relative error of half precision, and of single precision for a constant computed from several weights."""
_TINY, _LEAST = 2.0**-25, 2.0**-149
"""Largest absolute error of subnormal numbers, in half and in single precision."""
_MARGIN = 1.001
_SHIFTED = "constexpr_blockwise_shift_scale"
Array = np.ndarray[Any, Any]

_LARGEST = 1 << 16
"""Most elements of a value that is computed here: only norms and tables are computed from weights alone."""

_CHECKS = (torch.ops.aten._assert_tensor_metadata.default,)
"""Operations without a result."""


@dataclass(frozen=True)
class Expected:
    """The interface that a package must have.

    Attributes:
        inputs: Names of inputs, in order.
        outputs: Names of outputs, in order.
        states: Shapes of states by name.
        call_length: Most tokens of a call.
        precision: Type of the outputs.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    states: Mapping[str, tuple[int, ...]]
    call_length: int
    precision: Precision


def check_package(package: Path, traced: Any, expected: Expected) -> dict[str, Any]:
    """Check a package's interface and weights; return facts about them.

    Raises:
        CoreMLExportError: ``COREML_INVALID``: they differ from the traced program's.
    """
    spec = ct.utils.load_spec(str(package))
    _check_interface(spec, expected)
    program = load_program(spec, spec.specificationVersion, str(package / _WEIGHTS))
    operations = [each for function in program.functions.values() for each in function.operations]
    packaged = _PackagedConstants(operations)
    constants = TracedConstants(traced)
    for name, value in constants.weights.items():
        packaged.check(name, value, constants)
    return {
        "specification_version": spec.specificationVersion,
        "operations": sum(not each.op_type.startswith("const") for each in operations),
        "weights_checked": len(constants.weights),
        "rounded_weights": len(packaged.rounded),
        "largest_weight_error": round(packaged.worst, 3),
    }


def _check_interface(spec: Any, expected: Expected) -> None:
    described = spec.description
    if spec.specificationVersion != TARGET.value or spec.WhichOneof("Type") != "mlProgram":
        raise _invalid_error(
            f"it is a {spec.WhichOneof('Type')} of version {spec.specificationVersion}, and not a program of {TARGET.name}"
        )
    kinds = FeatureTypes_pb2.ArrayFeatureType
    number = kinds.FLOAT16 if expected.precision == "float16" else kinds.FLOAT32
    inputs = {each.name: each.type.multiArrayType for each in described.input}
    outputs = {each.name: each.type.multiArrayType.dataType for each in described.output}
    states = {each.name: each.type.stateType.arrayType for each in described.state}
    if tuple(inputs) != expected.inputs or any(each.dataType != kinds.INT32 for each in inputs.values()):
        raise _invalid_error(f"its inputs are {', '.join(inputs)}, and not the integers {', '.join(expected.inputs)}")
    for name, array in inputs.items():
        ranges = [(each.lowerBound, each.upperBound) for each in array.shapeRange.sizeRanges]
        if ranges[-1:] != [(1, expected.call_length)] or any(each != (1, 1) for each in ranges[:-1]):
            raise _invalid_error(f"its input {name} has sizes {ranges}, and not 1 to {expected.call_length} tokens")
    if tuple(outputs) != expected.outputs or any(each != number for each in outputs.values()):
        raise _invalid_error(
            f"its outputs are {', '.join(outputs)}, and not {', '.join(expected.outputs)} in {expected.precision}"
        )
    if {name: tuple(each.shape) for name, each in states.items()} != dict(expected.states):
        raise _invalid_error(
            f"its states are {', '.join(states) or 'none'}, and not {', '.join(expected.states) or 'none'} in the model's shapes"
        )
    if any(each.dataType != kinds.FLOAT16 for each in states.values()):
        raise _invalid_error("its states are not of float16")


class _PackagedConstants:
    """The constants of a package.

    Attributes:
        rounded: Names of weights that are integers.
        worst: Largest error of a weight, in units of the error that rounding to its type explains.
    """

    def __init__(self, operations: list[Any]) -> None:
        self._constants = {
            _plain_name(each.outputs[0].name): each for each in operations if each.op_type.startswith("const")
        }
        self._operations = {_plain_name(each.name): each for each in operations}
        self.rounded: set[str] = set()
        self.worst = 0.0

    def check(self, name: str, value: torch.Tensor, constants: TracedConstants) -> None:
        """Check a weight wherever it is stored: under its own name, as an input of an operation, or as a constant computed from it.

        Raises:
            CoreMLExportError: It is missing or has other values.
        """
        there = name in self._constants
        if there:
            self._accept(name, _errors(value, self._constants[name]))
        for user in constants.users(name):
            if user in constants.computed:
                if user in self._constants:
                    self._accept(user, _errors(constants.computed[user], self._constants[user]))
                elif not there:
                    self.check(user, constants.computed[user], constants)
                continue
            taken = [_errors(value, each) for each in self._inputs(user) if _fits(each, value)]
            if taken:  # an operation may take several constants of the same size, such as a norm's weight and bias
                self._accept(name, min(taken, key=lambda each: each.worst))
            elif not there:
                raise _invalid_error(f"it lacks the weight {name}, which {user} takes")

    def _inputs(self, name: str) -> list[Any]:
        """Return the constants that an operation takes."""
        operation = self._operations.get(name)
        given = operation.inputs.values() if operation is not None else ()
        return [
            each.op for each in given if getattr(each, "op", None) is not None and each.op.op_type.startswith("const")
        ]

    def _accept(self, name: str, errors: _Errors) -> None:
        if not errors.worst <= 1:
            raise _invalid_error(f"its weight {name} {errors.sentence}")
        self.worst = max(self.worst, errors.worst)
        if errors.rounded:
            self.rounded.add(name)


@dataclass(frozen=True)
class _Errors:
    """Errors of a constant against its weight.

    Attributes:
        worst: Largest error, in units of the error that rounding to its type explains.
        sentence: What is wrong if ``worst`` is above 1; follows "its weight NAME".
        rounded: Whether it is stored as integers.
    """

    worst: float
    sentence: str
    rounded: bool


def _errors(value: torch.Tensor, constant: Any) -> _Errors:
    values, step = _value_and_step(constant)
    rounded = constant.op_type == _SHIFTED
    wanted = value.double().numpy()
    if values.shape != wanted.shape and values.T.shape == wanted.shape:
        values, step = values.T, step.T
    if values.size != wanted.size:
        return _Errors(float("inf"), f"has the shape {values.shape}, and not {wanted.shape}", rounded)
    values, step = values.reshape(wanted.shape), np.broadcast_to(step, values.shape).reshape(wanted.shape)
    # For integers, the scale and the product with it are rounded too.
    single = constant.outputs[0].dtype is types.fp32
    half = np.maximum(np.abs(wanted) * (_SINGLE if single else _HALF), _LEAST if single else _TINY) * (
        3 if rounded else 1
    )
    off = np.abs(values - wanted) / (step / 2 + half * _MARGIN)
    place = int(np.argmax(off)) if off.size else 0
    worst = float(off.flat[place]) if off.size else 0.0
    shown = f"is {values.flat[place]:.6g} where the model has {wanted.flat[place]:.6g}" if off.size else ""
    return _Errors(
        float("inf") if np.isnan(worst) else worst, f"{shown}, {worst:.1f} times as far as rounding explains", rounded
    )


def _plain_name(name: str) -> str:
    """Return the name that the operation had in the trace."""
    for suffix in (*_SUFFIXES, *_SUFFIXES):
        name = name.removesuffix(suffix)
    return name


def _fits(constant: Any, value: torch.Tensor) -> bool:
    return int(np.prod(constant.outputs[0].shape)) == value.numel() > 1


def _value_and_step(constant: Any) -> tuple[Array, Array]:
    """Return a constant's values, and the step between two of its integers (0 for floats)."""
    if constant.op_type == _SHIFTED:
        values = np.asarray(constant.materialized_val_inference(), dtype=np.float64)
        scale = np.asarray(constant.scale.val, dtype=np.float64)
        for axis, (many, few) in enumerate(zip(values.shape, scale.shape, strict=True)):
            scale = np.repeat(scale, many // few, axis=axis)
        return values, scale
    values = np.asarray(constant.outputs[0].val, dtype=np.float64)
    return values, np.zeros(())


def _invalid_error(fault: str) -> CoreMLExportError:
    return CoreMLExportError(
        f"the package that coremltools {ct.__version__} wrote is not what the model is: {fault}",
        reason="COREML_INVALID",
        remedy="leave the Core ML format out for this model, or use another version of coremltools",
    )


class TracedConstants:
    """Weights of a trace, and the values that its operations compute from weights alone.

    Attributes:
        weights: Values of the weights that the trace uses, by input name. Single numbers are left out, because the converter folds them.
        computed: Values of operations on weights alone, by name.
    """

    def __init__(self, traced: Any) -> None:
        signature = traced.graph_signature
        stored = {**traced.state_dict, **traced.constants}
        changed = set(signature.buffers_to_mutate.values())
        named = {
            **signature.inputs_to_parameters,
            **signature.inputs_to_buffers,
            **signature.inputs_to_lifted_tensor_constants,
        }
        nodes = {node.name: node for node in traced.graph.nodes}
        self._nodes = nodes
        self.weights = {
            name: stored[source].detach()
            for name, source in named.items()
            if source not in changed
            and _users(nodes[name])
            and stored[source].is_floating_point()
            and stored[source].numel() > 1
        }
        self.computed: dict[str, torch.Tensor] = {}
        known: dict[Any, torch.Tensor] = {nodes[name]: value for name, value in self.weights.items()}
        for node in traced.graph.nodes:
            if node.op != "call_function" or not node.all_input_nodes:
                continue
            if all(each in known and known[each].numel() <= _LARGEST for each in node.all_input_nodes):
                result = node.target(*_fill(node.args, known), **_fill(node.kwargs, known))
                if isinstance(result, torch.Tensor):
                    self.computed[node.name] = known[node] = result

    def users(self, name: str) -> list[str]:
        """Return the names of the operations that take a value."""
        return _users(self._nodes[name])


def _users(node: torch.fx.Node) -> list[str]:
    return [user.name for user in node.users if user.target not in _CHECKS]


def _fill(given: Any, known: dict[Any, torch.Tensor]) -> Any:
    return torch.fx.node.map_arg(given, lambda node: known[node])
