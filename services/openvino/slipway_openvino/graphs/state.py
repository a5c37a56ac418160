"""Keep keys and values inside the model: inputs and outputs of the cache become variables.

Axes of a cache: batch, heads, tokens, head size.
"""

from __future__ import annotations

import numpy as np

from slipway_openvino.library import apply_make_stateful_transformation, ops, ov

PAST, PRESENT = "past_key_values.", "present."
BEAM = "beam_idx"
"""Input with the row of the previous call that each row continues."""


def present_of(past: str) -> str:
    """Return the output that gives the next value of an input of the cache."""
    return PRESENT + past.removeprefix(PAST) if past.startswith(PAST) else ""


def make_stateful(model: ov.Model) -> None:
    """Turn each pair of a past and a present into a variable, in place; a graph without a cache stays as it is.

    ``beam_idx`` chooses rows of the variables before they are used, as runtimes that search by beams do. A reset gives each variable
    the batch of ``input_ids`` and no tokens.
    """
    outputs = {name for port in model.outputs for name in port.names}
    names = {name: port for port in model.inputs for name in port.names if present_of(name) in outputs}
    if not names:
        return
    beam = ops.parameter([-1], np.int32, name=BEAM)
    beam.output(0).set_names({BEAM})
    for port in names.values():
        readers = port.get_target_inputs()
        chosen = ops.gather(port.get_node(), beam, ops.constant(0, dtype=np.int64))
        for reader in readers:
            reader.replace_source_output(chosen.output(0))
    model.add_parameters([beam])
    apply_make_stateful_transformation(model, {name: present_of(name) for name in names})
    _initialize(model)
    model.validate_nodes_and_infer_types()


def _initialize(model: ov.Model) -> None:
    """Let each variable begin with the batch of this call and no tokens."""
    shape = ops.shape_of(model.input("input_ids").get_node(), output_type="i64")
    first = ops.constant(np.array([0], np.int64))
    batch = ops.gather(shape, first, ops.constant(0, dtype=np.int64))
    for node in model.get_ordered_ops():
        if node.get_type_name() != "ReadValue":
            continue
        _, *others = (dimension.min_length for dimension in node.get_output_partial_shape(0))
        sizes = ops.concat([batch, ops.constant(np.array(others, np.int64))], axis=0)
        nothing = ops.constant(0.0, dtype=node.get_output_element_type(0).to_dtype())
        node.set_arguments([ops.broadcast(nothing, sizes).output(0)])
