"""The packages that a folder of ONNX graphs can get, the facts that each is made from, and an estimate of its size.

A package's weights are second names of the graphs' files; copied are nodes, companions, and what a decoder's graph needs of the
encoder's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipway.model.configuration import ModelConfig
from slipway.model.families import Family
from slipway.model.graphs.pictures import VISION_ENCODER
from slipway.sizes import GRAPH_BYTES, ModelSize
from slipway_onnx_export.params import PackageKind

ENTRIES: Mapping[PackageKind, tuple[str, ...]] = {
    "genai": ("genai_config.json", "audio_processor_config.json", "vision_processor.json"),
    "transformers_js": ("transformers_js",),
    "optimum": ("optimum",),
    "triton": ("triton",),
    "kserve": ("kserve.yaml", "triton"),
}
"""Files and folders of a package, each made for its level."""

OTHER_GRAPHS: Mapping[PackageKind, str] = {
    "transformers_js": "transformers.js puts features among embeddings itself, and expects other graphs of a model that takes images",
    "optimum": "optimum has no class for such graphs of a model that takes images",
}
"""Why a package takes no model with graphs for images."""
RAW_SOUND: Mapping[PackageKind, str] = {
    "transformers_js": "transformers.js gives an encoder of raw sound no mask, and its graphs take one",
    "optimum": "optimum has other graphs of a model that takes raw sound",
}
"""Why a package takes no model of raw sound."""

_GRAPHS = 3
"""Most graphs of a package: an encoder, a decoder, and one with a cache."""
_CROSSED = 8
"""A merged decoder copies the projections of the encoder's result: at most one of this many weights of the model."""
_CONFIGURATION_BYTES = 64 << 10


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

    @property
    def reads_pictures(self) -> bool:
        """Return whether the folder has graphs for images beside those for text."""
        return (self.folder / VISION_ENCODER).is_file()


def package_bytes(kinds: Collection[PackageKind], graph: int, size: ModelSize) -> int:
    """Estimate, from above, how many bytes packages take beside the graphs.

    Args:
        kinds: The packages.
        graph: Size of the graphs that they are made from.
        size: Size of the model.
    """
    folders = {"triton" if kind == "kserve" else kind for kind in kinds} - {"genai"}  # KServe runs the folder of Triton
    nodes = _GRAPHS * GRAPH_BYTES + size.companion_bytes
    crossed = graph // _CROSSED if "transformers_js" in folders else 0
    return len(folders) * nodes + len(kinds) * _CONFIGURATION_BYTES + crossed
