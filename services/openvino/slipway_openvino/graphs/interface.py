"""Check the inputs and outputs that a graph needs to become an IR that runtimes can feed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from slipway.errors import OpenVinoExportError
from slipway.model.families import DECODER, SPEECH, Family
from slipway_openvino.graphs.state import ENCODED, GIVEN, PAST, cross_pasts, present_of
from slipway_openvino.library import ov

Axes = tuple[bool, ...]
"""Which axes of an input must take any size; the others are fixed."""
_TEXT: Axes = (True, True)
_CACHE: tuple[Axes, ...] = ((True, False, True, False),)
_SOURCE_CACHE: tuple[Axes, ...] = (*_CACHE, (True, False, False, False))  # sound has one length
_VALUES: tuple[Axes, ...] = ((True, True, False), (True, False, False))


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
