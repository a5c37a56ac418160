"""The contract of a format, which a distribution provides under the entry point group ``slipway.formats``."""

from slipway.formats.contract import Format, Quantization, RefusedLevel, Runtime, SectionRules, Usage, Variants
from slipway.formats.settings import FormatSettings, LevelSettings
from slipway.formats.targets import TARGETS, Fit
from slipway.formats.tasks import FormatRequest, PlannedTask, one_per_level, quantized
from slipway.levels import LEVELS, QuantizationLevel
from slipway.requirements import Needs, Requirements
from slipway.settings.problems import Problem
from slipway.settings.sections import Section, Text, Texts, as_tuple, wrong_value
from slipway.sizes import FLOAT32_BYTES, GRAPH_BYTES, ModelSize

__all__ = [
    "FLOAT32_BYTES",
    "GRAPH_BYTES",
    "LEVELS",
    "TARGETS",
    "Fit",
    "Format",
    "FormatRequest",
    "FormatSettings",
    "LevelSettings",
    "ModelSize",
    "Needs",
    "PlannedTask",
    "Problem",
    "Quantization",
    "QuantizationLevel",
    "RefusedLevel",
    "Requirements",
    "Runtime",
    "Section",
    "SectionRules",
    "Text",
    "Texts",
    "Usage",
    "Variants",
    "as_tuple",
    "one_per_level",
    "quantized",
    "wrong_value",
]
