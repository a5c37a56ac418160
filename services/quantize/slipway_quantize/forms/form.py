"""The interface of a stored form."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from slipway_quantize.pieces import Squares

Part = tuple[str, tuple[int, ...]]
"""Type and shape of a stored tensor."""
FLOAT_GROUPS = {"mxfp4": 32, "nvfp4": 16}
"""Weights that share a scale at the levels of 4-bit floats."""
BEFORE_LOADING = "compressed-tensors unpacks such a model while it loads, and then no activation is rounded"


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Some rows of a weight as they are stored.

    Attributes:
        parts: Rows of each stored tensor, by the end of its name.
        values: Function that returns the weights that a model computes with. float32 (rows, K)
        squares: Sums of squares of the rounding error, and of the weights.
    """

    parts: Mapping[str, NDArray[Any]]
    values: Callable[[], NDArray[Any]]
    squares: Squares


class Form(ABC):
    """A form for all linear weights of a model.

    Attributes:
        format: Its name in compressed-tensors.
        weights: ``weights`` of the scheme in ``quantization_config``.
        activations: ``input_activations`` of the scheme; None if activations are not rounded.
        dequantize: Whether transformers has to unpack the weights while it loads them.
    """

    format: str
    weights: Mapping[str, Any]
    activations: Mapping[str, Any] | None = None
    dequantize: bool = False

    @abstractmethod
    def parts(self, module: str, shape: tuple[int, ...]) -> dict[str, Part]:
        """Return the tensors that are stored for a weight, by the end of their names.

        Args:
            module: The layer.
            shape: (N, K)
        """

    def whole(self, module: str, shape: tuple[int, ...]) -> dict[str, NDArray[Any]]:  # noqa: ARG002 - some forms have none
        """Return the stored tensors that are not made of the weight's rows."""
        return {}

    def schemes(self) -> list[tuple[list[str], Mapping[str, Any]]]:
        """Return the layers of each scheme, and its ``weights``; here one for all linear layers."""
        return [(["Linear"], self.weights)]

    @abstractmethod
    def round_rows(self, weight: NDArray[Any], row: int, *, module: str, name: str) -> StoredRows:
        """Return rows of a layer's weight as they are stored; several threads may call this at once.

        Args:
            weight: The rows, of any float type. (rows, K)
            row: Number of the first row.
            module: The layer.
            name: The weight's name, for errors.

        Raises:
            QuantizationError: ``NON_FINITE_WEIGHTS``, ``WEIGHT_OVERFLOW``, ``CALIBRATION_MISMATCH``.
        """
