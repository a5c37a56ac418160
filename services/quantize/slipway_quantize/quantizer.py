"""Load the quantizer that a format names, and define its interface and the request to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from slipway.errors import QuantizationError
from slipway.formats.registry import load_format
from slipway.model.folder import ModelFolder
from slipway.stage import Context
from slipway_quantize.calibrated import Calibration
from slipway_quantize.divided import PartWork
from slipway_quantize.levels import SizeBudget
from slipway_quantize.params import QuantizeParams
from slipway_quantize.report import Outcome


class Quantizer(Protocol):
    """Writes the weights of a folder at a level, and runs the result."""

    def write(self, request: QuantizeRequest) -> Outcome:
        """Write the requested weights.

        Raises:
            QuantizationError: With the reasons listed in the package's README.
        """
        ...

    def run(self, target: Path, ctx: Context) -> Any:
        """Load ``target`` and return its logits for a few tokens, a numpy array.

        Raises:
            QuantizationError: ``QUANTIZATION_FAILED``: the model does not load.
            NotRunnableError: The check does not know how to run such a model (``slipway_quantize.check``).
        """
        ...


class Packager(Protocol):
    """Adds to a quantized output the files beside the weights that the unquantized output has."""

    def __call__(self, folder: Path, *, level: str, ctx: Context) -> None:
        """Complete the folder of a quantized output."""
        ...


def load_quantizer(format_name: str) -> Quantizer:
    """Load the quantizer of an installed format.

    Raises:
        QuantizationError: ``QUANTIZATION_UNSUPPORTED``: the format has none, or its quantizer cannot be imported.
    """
    quantizer: Quantizer | None = _load(format_name, load_format(format_name).quantization.quantizer, "quantizer")
    if quantizer is None:
        raise _format_error(format_name, "names no quantizer")
    return quantizer


def load_packager(format_name: str) -> Packager | None:
    """Load the function that completes an output of an installed format; None if the format has none.

    Raises:
        QuantizationError: ``QUANTIZATION_UNSUPPORTED``: it cannot be imported.
    """
    packager: Packager | None = _load(format_name, load_format(format_name).quantization.packager, "packager")
    return packager


def _load(format_name: str, reference: str, what: str) -> Any:
    module, _, attribute = reference.partition(":")
    if not module:
        return None
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise _format_error(format_name, f"names a {what} that cannot be loaded: {error}") from error


def _format_error(format_name: str, why: str) -> QuantizationError:
    return QuantizationError(
        f"the quantize stage cannot make the format {format_name}: it {why}",
        reason="QUANTIZATION_UNSUPPORTED",
        remedy="install the format again, or leave its levels out",
        about={"format": format_name},
    )


@dataclass(frozen=True, slots=True)
class QuantizeRequest:
    """One quantization.

    Attributes:
        model: The model, stored with its weights or without.
        target: Folder that receives them; it already holds all other files.
        params: The stage's parameters.
        ctx: Context of the stage.
        inputs: All inputs of the stage, from which Slipway's own formats read text, and weights that ``source`` leaves out.
        work: The part of the weights to write, and where; None for all of them, into ``target``.
        calibration: Integers that were chosen by text; only for a format that takes them (:attr:`slipway.formats.Quantization.calibrated`).
    """

    model: ModelFolder
    target: Path
    params: QuantizeParams
    ctx: Context
    inputs: Mapping[str, Path]
    calibration: Calibration | None = None
    work: PartWork | None = None

    @property
    def source(self) -> Path:
        """The model's folder."""
        return self.model.path

    @property
    def size_budget(self) -> SizeBudget | None:
        """The budget within which weights get more bits; None also if no size is asked for and a calibration has chosen the bits."""
        budget = self.params.size_budget
        return budget if budget is not None and (budget.is_asked or self.calibration is None) else None
