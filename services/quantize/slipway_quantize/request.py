"""What a quantizer is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slipway.stage import Context
from slipway_quantize.calibrated import Calibration
from slipway_quantize.mixed.budget import SizeBudget
from slipway_quantize.params import QuantizeParams


@dataclass(frozen=True, slots=True)
class QuantizeRequest:
    """One quantization.

    Attributes:
        source: Folder with the weights.
        target: Folder that receives them; it already holds all other files.
        params: The stage's parameters.
        ctx: Context of the stage.
        inputs: All inputs of the stage; Slipway's own formats read weights from them that ``source`` leaves out, and text.
        calibration: Integers that were chosen by text; only for a format that takes them (:attr:`slipway.formats.Format.calibrated`).
    """

    source: Path
    target: Path
    params: QuantizeParams
    ctx: Context
    inputs: Mapping[str, Path]
    calibration: Calibration | None = None

    @property
    def size_budget(self) -> SizeBudget | None:
        """The size within which weights get more bits; a calibration has chosen which get them where no size is asked for."""
        found = self.params.size_budget
        return found if found is not None and (found.is_asked or self.calibration is None) else None
