"""Give nodes and ports names that are the same in every process."""

from __future__ import annotations

import re

from slipway_openvino.library import ov

_NUMBERED = re.compile(r"([A-Z][A-Za-z0-9]*)_\d+(?:\.\d+)?")
"""Name that OpenVINO makes from an operator's type and a counter of the process. A folded constant keeps its operator's name."""


def number_nodes(model: ov.Model) -> None:
    """Renumber, by position in the model, everything that OpenVINO named by a counter of the process. Works in place."""
    for place, node in enumerate(model.get_ordered_ops()):
        node.set_friendly_name(_number_name(node.get_friendly_name(), place))
        for port in node.outputs():
            port.set_names({_number_name(name, place) for name in port.get_names()})


def _number_name(name: str, place: int) -> str:
    match = _NUMBERED.fullmatch(name)
    return f"{match[1]}_{place}" if match else name
