"""Check that runtimes can feed a graph, and keep its keys and values inside the model as variables.

OpenVINO's runtimes expect a decoder that gets what the encoder computed, and keeps its keys and values of it. The ONNX export's
encoder returns keys and values of the cross-attention too, which each call of its decoder takes. So the encoder–decoder is divided anew.

Axes of a cache: batch, heads, tokens, head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from slipway.errors import OpenVinoExportError
from slipway.model.families import DECODER, SPEECH, Family
from slipway_openvino.library import apply_make_stateful_transformation, ops, ov

PAST, PRESENT = "past_key_values.", "present."
BEAM = "beam_idx"
"""Input: for each row, the row of the previous call that it continues."""

ENCODED, GIVEN = "last_hidden_state", "encoder_hidden_states"
"""The encoder's output, and the decoder's input for it."""

Axes = tuple[bool, ...]
"""Which axes of an input must take any size; the others are fixed."""
_TEXT: Axes = (True, True)
_CACHE: tuple[Axes, ...] = ((True, False, True, False),)
_SOURCE_CACHE: tuple[Axes, ...] = (*_CACHE, (True, False, False, False))  # sound has one length
_VALUES: tuple[Axes, ...] = ((True, True, False), (True, False, False))


def present_of(past: str) -> str:
    """Return the output that has the next value of a cache input; empty for any other input."""
    return PRESENT + past.removeprefix(PAST) if past.startswith(PAST) else ""


def make_stateful(model: ov.Model) -> None:
    """Turn each pair of a past and a present into a variable, in place; a graph without a cache stays as it is.

    ``beam_idx`` selects rows of the variables before they are used, for runtimes with beam search. A reset gives each variable the
    batch size of ``input_ids`` and no tokens.
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
    """Initialize each variable with this call's batch size and no tokens."""
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


def cross_pasts(decoder: ov.Model) -> list[str]:
    """Return the inputs with keys and values of the source: pasts without a present."""
    outputs = {name for port in decoder.outputs for name in port.names}
    pasts = [name for port in decoder.inputs for name in port.names if name.startswith(PAST)]
    return [name for name in pasts if present_of(name) not in outputs]


def drop_cross_attention(encoder: ov.Model) -> ov.Model:
    """Return the encoder without keys and values of the cross-attention."""
    result = encoder.output(ENCODED).get_node()
    return ov.Model([result], encoder.get_parameters(), encoder.get_friendly_name())


def attend_to_encoded(decoder: ov.Model, encoder: ov.Model) -> ov.Model:
    """Move the end of ``encoder``, which computes keys and values of the source, into the decoder; both arguments are unusable afterwards.

    The keys and values are variables: plugins compute them once after a reset, and later calls read them. ``beam_idx`` does not reorder
    their rows, because beam search exchanges only rows of one source.
    """
    names = cross_pasts(decoder)
    if not names:
        return decoder
    encoded = encoder.output(ENCODED).get_node().input_value(0)
    given = ops.parameter(encoded.get_partial_shape(), encoded.get_element_type().to_dtype(), name=GIVEN)
    given.output(0).set_names({GIVEN})
    for reader in encoded.get_target_inputs():
        if reader.get_node().get_type_name() != "Result":
            reader.replace_source_output(given.output(0))
    _measure(encoder, given)
    parameters = {name: port.get_node() for port in decoder.inputs for name in port.names}
    kept = []
    for name in names:
        computed = encoder.output(present_of(name)).get_node().input_value(0)
        value = ops.read_value(_with_heads(computed, parameters[name].get_output_partial_shape(0)), name)
        for reader in parameters[name].output(0).get_target_inputs():
            reader.replace_source_output(value.output(0))
        kept.append(ops.assign(value, name))
    inputs = [port.get_node() for port in decoder.inputs if not port.names & set(names)]
    sinks = [*decoder.get_sinks(), *kept]
    return ov.Model(decoder.get_results(), sinks, [*inputs, given], decoder.get_friendly_name())


def _with_heads(computed: ov.Output, shape: ov.PartialShape) -> ov.Output:
    """Reshape a value to the sizes that ``shape`` fixes: the encoder's graph may leave the number of heads dynamic."""
    sizes = [axis.get_length() if axis.is_static else 0 for axis in shape]  # 0 keeps the size
    return ops.reshape(computed, ops.constant(np.array(sizes, np.int64)), special_zero=True).output(0)


def _measure(encoder: ov.Model, given: ov.Node) -> None:
    """Read batch size and length from the encoder's output where the graph reads them from its inputs."""
    first_two = ops.constant(np.array([0, 1], np.int64))
    for parameter in encoder.get_parameters():
        for reader in parameter.output(0).get_target_inputs():
            node = reader.get_node()
            if node.get_type_name() != "ShapeOf" or len(parameter.get_output_partial_shape(0)) != 2:
                continue
            kind = node.get_output_element_type(0).get_type_name()
            sizes = ops.gather(ops.shape_of(given, output_type=kind), first_two, ops.constant(0, dtype=np.int64))
            for other in node.output(0).get_target_inputs():
                other.replace_source_output(sizes.output(0))


@dataclass(frozen=True, slots=True)
class Interface:
    """Inputs and outputs of a graph.

    Attributes:
        what: The graph in messages.
        needed: Inputs that it must have.
        known: Further inputs that it may have.
        outputs: Outputs that it must have.
        axes: Allowed axes of inputs that are not text.
    """

    what: str
    needed: frozenset[str]
    known: frozenset[str]
    outputs: frozenset[str]
    axes: Mapping[str, tuple[Axes, ...]] = field(default_factory=dict)

    def check(self, model: ov.Model, file: str) -> None:
        """Refuse a graph with another interface.

        Raises:
            OpenVinoExportError: ``ONNX_INVALID``.
        """
        inputs = {name for port in model.inputs for name in port.names}
        outputs = {name for port in model.outputs for name in port.names}
        missing = sorted((self.needed - inputs) | (self.outputs - outputs))
        unknown = sorted(inputs - self.needed - self.known)
        strange = sorted(port.any_name for port in model.inputs if not self._fits(port))
        if missing or unknown or strange:
            raise OpenVinoExportError(
                f"the graph is not that of {self.what}: missing {missing[:3]}, unknown {unknown[:3]}, of another shape {strange[:3]}",
                reason="ONNX_INVALID",
                remedy="give the folder that onnx_export wrote, with a cache and shapes that vary",
                about={"file": file},
            )

    def _fits(self, port: ov.Output) -> bool:
        shape = port.get_partial_shape()
        varying = () if shape.rank.is_dynamic else tuple(shape[axis].is_dynamic for axis in range(len(shape)))
        return varying in self.axes.get(port.any_name, (_TEXT,))


def text_interface(model: ov.Model, family: Family) -> Interface:
    """Return the interface of a decoder, or of a model that reads a whole text in one call."""
    pasts = _pasts(model) if family is DECODER else frozenset()
    own = {"position_ids"} if family is DECODER else {"token_type_ids"}  # what runtime.py feeds
    return Interface(
        f"a {family.name}",
        needed=frozenset({"input_ids"}),
        known=frozenset({"attention_mask", *own, *pasts}),
        outputs=frozenset({*family.outputs, *map(present_of, pasts)}),
        axes=dict.fromkeys(pasts, _CACHE),
    )


def pair_interfaces(decoder: ov.Model, family: Family) -> tuple[Interface, Interface]:
    """Return the interfaces of an encoder and its decoder."""
    crossed = frozenset(cross_pasts(decoder))
    own = _pasts(decoder) - crossed
    source, masks = (
        ("input_features", frozenset()) if family is SPEECH else ("input_ids", frozenset({"attention_mask"}))
    )
    encoder = Interface(
        f"an encoder ({family.name})",
        needed=frozenset({source}),
        known=masks,
        outputs=frozenset({ENCODED, *map(present_of, crossed)}),
        axes={} if source == "input_ids" else {source: _VALUES},
    )
    given = frozenset() if crossed else frozenset({GIVEN})  # without a cache
    return encoder, Interface(
        f"a decoder ({family.name})",
        needed=frozenset({"input_ids"}) | given,
        known=frozenset({"encoder_attention_mask"}) | own | crossed,
        outputs=frozenset({*family.outputs, *map(present_of, own)}),
        axes={**dict.fromkeys(own, _CACHE), **dict.fromkeys(crossed, _SOURCE_CACHE), GIVEN: _VALUES},
    )


def _pasts(model: ov.Model) -> frozenset[str]:
    return frozenset(name for port in model.inputs for name in port.names if name.startswith(PAST))
