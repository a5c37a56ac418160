"""Compare two engines that TensorRT-RTX built from one graph: they may differ only in the numbers of their symbolic sizes.

An engine is a table of sections and two sections: the graph, and the weights. The graph's middle, more than nine tenths
of it, is the source of the kernels; the tables before and after it refer to symbolic sizes (batch, sequence, past and
sizes derived from them) by numbers that TensorRT assigns again in every build. The service's README has the measurements.
"""

from __future__ import annotations

import re
import struct
from collections import Counter

_TABLE = 0x40  # where the table of sections begins: name, offset and size of each
_ENTRY = struct.Struct("<4s4xQQ")
_GRAPH, _WEIGHTS = b"NGNE", b"THGW"
_EDGE = 32 << 10  # bytes of the graph's tables, at either end; two layers need 11 KiB, four 16 KiB
_NAME = re.compile(rb"[\x20-\x7e]{5,}")
_NUMBERED = re.compile(rb"\[-\d+\]")


def assert_same_plan(one: bytes, other: bytes) -> None:
    """Check for equal length, sections, weights and kernels, and equal names in the tables."""
    assert len(one) == len(other), "the lengths differ"
    sections = _sections(one)
    graph, weights = sections[_GRAPH], sections[_WEIGHTS]
    assert graph.stop - graph.start > 20 * _EDGE
    assert one[: graph.start] == other[: graph.start], "the tables of sections differ"
    assert 0 <= len(one) - weights.stop < 8, "the weights come last"
    assert one[graph.stop :] == other[graph.stop :], "the weights differ"
    before, after = slice(graph.start, graph.start + _EDGE), slice(graph.stop - _EDGE, graph.stop)
    assert one[before.stop : after.start] == other[before.stop : after.start], "the kernels differ"
    for table in (before, after):
        assert _names(one[table]) == _names(other[table]), "the names differ"


def weights_of(plan: bytes) -> bytes:
    """Return the section of the weights."""
    return plan[_sections(plan)[_WEIGHTS]]


def _sections(plan: bytes) -> dict[bytes, slice]:
    """Return the range of each section; the first begins where the table ends."""
    (_, end, _) = _ENTRY.unpack_from(plan, _TABLE)
    entries = (_ENTRY.unpack_from(plan, at) for at in range(_TABLE, end, _ENTRY.size))
    return {name: slice(offset, offset + size) for name, offset, size in entries}


def _names(table: bytes) -> Counter[bytes]:
    """Count the names of tensors and layers; their order depends on the numbers."""
    return Counter(_NUMBERED.sub(b"[]", name) for name in _NAME.findall(table))
