"""Give nodes names that are the same in every process."""

from __future__ import annotations

import re

from slipway_openvino.library import ov

_NUMBERED = re.compile(r"(\w+?)_\d+")


def number_nodes(model: ov.Model) -> None:
    """Give the nodes that OpenVINO named by a counter of the process a number by their place in the model, in place."""
    for place, node in enumerate(model.get_ordered_ops()):
        found = _NUMBERED.fullmatch(node.get_friendly_name())
        if found and found[1] == node.get_type_name():
            node.set_friendly_name(f"{found[1]}_{place}")
