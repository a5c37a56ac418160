"""Build the beginning of a GGUF file, version 3: metadata and the index of tensors.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import gguf
from gguf import GGMLQuantizationType as Kind

from slipway.errors import GGUFExportError
from slipway_gguf.metadata import Field
from slipway_gguf.weights.ggml import row_bytes

ALIGNMENT = gguf.GGUF_DEFAULT_ALIGNMENT
_LONGEST_NAME = 63
"""Longest name of a tensor in bytes (``GGML_MAX_NAME`` includes the NUL behind it)."""
_KIND = gguf.GGUFValueType
_FORMATS = {
    _KIND.UINT8: "<B",
    _KIND.INT8: "<b",
    _KIND.UINT16: "<H",
    _KIND.INT16: "<h",
    _KIND.UINT32: "<I",
    _KIND.INT32: "<i",
    _KIND.FLOAT32: "<f",
    _KIND.UINT64: "<Q",
    _KIND.INT64: "<q",
    _KIND.FLOAT64: "<d",
    _KIND.BOOL: "<?",
}


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in the index.

    Attributes:
        name: GGUF's name.
        shape: Its shape, columns last.
        kind: Its type.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind

    @property
    def nbytes(self) -> int:
        """Return the size of its values."""
        return math.prod(self.shape[:-1]) * row_bytes(self.kind, self.shape[-1])


def padding(size: int) -> int:
    """Return the number of bytes up to the next aligned place."""
    return -size % ALIGNMENT


def header(fields: Sequence[Field], entries: Sequence[Entry]) -> bytes:
    """Return the bytes before the first tensor.

    Raises:
        GGUFExportError: ``GGUF_INVALID`` for a key that occurs twice, or a value that its type cannot hold.
    """
    keys = [each.key for each in fields]
    if len(set(keys)) != len(keys):
        raise _metadata_error(next(key for key in keys if keys.count(key) > 1), "occurs twice in the metadata")
    made = bytearray(struct.pack("<IIQQ", gguf.GGUF_MAGIC, gguf.GGUF_VERSION, len(entries), len(fields)))
    for each in fields:
        try:
            made += _text(each.key) + struct.pack("<I", each.kind) + _value(each.value, each.kind, each.item)
        except (struct.error, TypeError, AttributeError, UnicodeError) as error:
            raise _metadata_error(each.key, f"cannot be stored as {each.kind.name} ({error})") from error
    offset = 0
    for entry in entries:
        if len(entry.name.encode()) > _LONGEST_NAME:
            raise _metadata_error(entry.name, f"is longer than the {_LONGEST_NAME} bytes that llama.cpp reads")
        sizes = tuple(reversed(entry.shape))
        made += _text(entry.name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, entry.kind, offset)
        offset += entry.nbytes + padding(entry.nbytes)
    return bytes(made) + bytes(padding(len(made)))


def _value(value: Any, kind: gguf.GGUFValueType, item: gguf.GGUFValueType | None) -> bytes:
    if kind is _KIND.STRING:
        return _text(value)
    if kind is _KIND.ARRAY:
        if item is None:
            raise TypeError("an array without the type of its elements")
        return struct.pack("<IQ", item, len(value)) + _elements(value, item)
    return struct.pack(_FORMATS[kind], value)


def _elements(values: Iterable[Any], item: gguf.GGUFValueType) -> bytes:
    if item is _KIND.STRING:
        return b"".join(map(_text, values))
    each = list(values)
    return struct.pack(f"<{len(each)}{_FORMATS[item][1:]}", *each)


def _text(value: str | bytes) -> bytes:
    encoded = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _metadata_error(key: str, what: str) -> GGUFExportError:
    return GGUFExportError(f"{key!r} {what}", remedy="report it: Slipway made it", about={"key": key})
