"""Load the quantizer that a format names, and define its interface."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from slipway.errors import QuantizationError
from slipway.formats.registry import load_format
from slipway.stage import Context
from slipway_quantize.report import Outcome
from slipway_quantize.request import QuantizeRequest


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
    """Adds to an output at a level what the unquantized output was asked to have beside its weights."""

    def __call__(self, folder: Path, *, level: str, ctx: Context) -> None:
        """Complete the folder of a quantized output."""
        ...


def load_quantizer(format_name: str) -> Quantizer:
    """Load the quantizer of an installed format.

    Raises:
        QuantizationError: ``QUANTIZATION_UNSUPPORTED``: the format has none, or its quantizer cannot be imported.
    """
    found: Quantizer | None = _load(format_name, load_format(format_name).quantizer, "quantizer")
    if found is None:
        raise _impossible(format_name, "names no quantizer")
    return found


def load_packager(format_name: str) -> Packager | None:
    """Load the function that completes an output of an installed format; None if the format has none.

    Raises:
        QuantizationError: ``QUANTIZATION_UNSUPPORTED``: it cannot be imported.
    """
    found: Packager | None = _load(format_name, load_format(format_name).packager, "packager")
    return found


def _load(format_name: str, reference: str, what: str) -> Any:
    module, _, attribute = reference.partition(":")
    if not module:
        return None
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise _impossible(format_name, f"names a {what} that cannot be loaded: {error}") from error


def _impossible(format_name: str, why: str) -> QuantizationError:
    return QuantizationError(
        f"the quantize stage cannot make the format {format_name}: it {why}",
        reason="QUANTIZATION_UNSUPPORTED",
        remedy="install the format again, or leave its levels out",
        about={"format": format_name},
    )
