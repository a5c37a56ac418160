"""What writes a format's levels: named by the format, found and used by the quantize stage."""

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
    """Writes the weights of a folder at a level, and runs what was written."""

    def write(self, source: Path, target: Path, params: QuantizeParams, ctx: Context) -> Outcome:
        """Write the weights of ``source`` at ``params.level`` into ``target``, where everything else is already.

        Raises:
            QuantizationError: With the reasons the package's README lists.
        """
        ...

    def run(self, target: Path, ctx: Context) -> Any:
        """Load ``target`` and return its logits for a few tokens, a numpy array.

        Raises:
            QuantizationError: ``QUANTIZATION_FAILED``: it does not load.
            NotRunnableError: It is not known how such a model is run (``slipway_quantize.check``).
        """
        ...


def quantizer_of(format_name: str) -> Quantizer:
    """Return the quantizer of an installed format.

    Raises:
        QuantizationError: ``QUANTIZATION_UNSUPPORTED``: it has none, or the one that it names cannot be imported.
    """
    module, _, attribute = load_format(format_name).quantizer.partition(":")
    why = "names no quantizer"
    try:
        if module:
            found: Quantizer = getattr(import_module(module), attribute)
            return found
    except (ImportError, AttributeError) as error:
        why = f"names one that cannot be loaded: {error}"
    raise QuantizationError(
        f"the format {format_name} is not made by the quantize stage: it {why}",
        reason="QUANTIZATION_UNSUPPORTED",
        remedy="install the format again, or leave its levels out",
        about={"format": format_name},
    )
