"""The packages that a folder of ONNX graphs can get, and the facts that each is made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipway.model.configuration import ModelConfig
from slipway.model.families import Family
from slipway_onnx_export.params import PackageKind

ENTRIES: Mapping[PackageKind, tuple[str, ...]] = {
    "genai": ("genai_config.json", "audio_processor_config.json"),
    "transformers_js": ("transformers_js",),
    "optimum": ("optimum",),
    "triton": ("triton",),
    "kserve": ("kserve.yaml", "triton"),
}
"""Files and folders of a package, each made for its level."""


class NotPackagedError(Exception):
    """The model has no form that the runtime takes; the text says why."""


@dataclass(frozen=True, slots=True)
class Packaged:
    """A folder that gets a package.

    Attributes:
        folder: Folder with the graphs, the configuration and the tokenizer.
        family: Family of the model.
        level: Quantization level; empty if unquantized.
        config: Content of ``config.json``.
        generation: Content of ``generation_config.json``; empty if there is none.
    """

    folder: Path
    family: Family
    level: str
    config: ModelConfig
    generation: Mapping[str, Any]
