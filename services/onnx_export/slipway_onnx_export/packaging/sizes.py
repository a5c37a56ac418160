"""Estimate what packages take beside the graphs, before anything is written.

Their weights are second names of the graphs' files; copied are nodes, companions, and what a decoder's graph needs of the encoder's.
"""

from __future__ import annotations

from collections.abc import Collection

from slipway.estimates import GRAPH_BYTES, ModelSize
from slipway_onnx_export.params import PackageKind

_GRAPHS = 3
"""Most graphs of a package: an encoder, a decoder, and one with a cache."""
_CROSSED = 8
"""The projections of an encoder's result, which a merged decoder copies, have at most one in so many weights of the model."""
_CONFIGURATION_BYTES = 64 << 10


def package_bytes(kinds: Collection[PackageKind], graph: int, size: ModelSize) -> int:
    """Return, from above, what packages take beside the graphs.

    Args:
        kinds: The packages.
        graph: Size of the graphs that they are made from.
        size: Size of the model.
    """
    folders = {"triton" if kind == "kserve" else kind for kind in kinds} - {"genai"}  # KServe runs the folder of Triton
    nodes = _GRAPHS * GRAPH_BYTES + size.companion_bytes
    crossed = graph // _CROSSED if "transformers_js" in folders else 0
    return len(folders) * nodes + len(kinds) * _CONFIGURATION_BYTES + crossed
