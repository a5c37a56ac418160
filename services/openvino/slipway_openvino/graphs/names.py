"""Give nodes and ports names that are the same in every process."""

from __future__ import annotations

import re

from slipway_openvino.library import ov

_NUMBERED = re.compile(r"([A-Z][A-Za-z0-9]*)_\d+(?:\.\d+)?")
"""Name that OpenVINO makes of an operator's type and a counter of the process; a constant keeps that of the operator it was folded from."""


def number_nodes(model: ov.Model) -> None:
    """Give everything that OpenVINO named by a counter of the process a number by its place in the model, in place."""
    for place, node in enumerate(model.get_ordered_ops()):
        node.set_friendly_name(_placed(node.get_friendly_name(), place))
        for port in node.outputs():
            port.set_names({_placed(name, place) for name in port.get_names()})


def _placed(name: str, place: int) -> str:
    found = _NUMBERED.fullmatch(name)
    return f"{found[1]}_{place}" if found else name
