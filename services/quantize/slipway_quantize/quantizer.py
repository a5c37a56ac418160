"""Load the quantizer that a format names, and define its interface."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from slipway.errors import QuantizationError
from slipway.formats.registry import load_format
from slipway.stage import Context
from slipway_quantize.params import QuantizeParams
from slipway_quantize.report import Outcome


class Quantizer(Protocol):
    """Writes the weights of a folder at a level, and runs the result."""

    def write(self, source: Path, target: Path, params: QuantizeParams, ctx: Context) -> Outcome:
        """Write the weights of ``source`` at ``params.level`` into ``target``, which already holds all other files.

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


def load_quantizer(format_name: str) -> Quantizer:
    """Load the quantizer of an installed format.

    Raises:
        QuantizationError: ``QUANTIZATION_UNSUPPORTED``: the format has none, or its quantizer cannot be imported.
    """
    module, _, attribute = load_format(format_name).quantizer.partition(":")
    why = "names no quantizer"
    try:
        if module:
            found: Quantizer = getattr(import_module(module), attribute)
            return found
    except (ImportError, AttributeError) as error:
        why = f"names a quantizer that cannot be loaded: {error}"
    raise QuantizationError(
        f"the quantize stage cannot make the format {format_name}: it {why}",
        reason="QUANTIZATION_UNSUPPORTED",
        remedy="install the format again, or leave its levels out",
        about={"format": format_name},
    )
