"""Count what a request would become before it is parsed: a list entry of two bytes becomes an object of a hundred."""

from __future__ import annotations

from functools import cache

from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor

from slipway.security.limits import exceeded

MOST_FIELDS = 200_000
"""Most fields of a request, with those of its parts: facts of a stage of 256 KiB may have 130,000."""
SMALL_BYTES = 1 << 20
"""Up to this size, parsing takes less time than the count."""
_VARINT, _DELIMITED, _FIXED = 0, 2, {1: 8, 5: 4}  # kinds of fields, the last with their sizes


def check_fields(data: bytes, method: str) -> None:
    """Refuse a request of more fields than any real one has.

    Args:
        data: The request.
        method: Full name of its RPC; one that is not described in this process is not counted.

    Raises:
        ServiceError: reason ``LIMIT_EXCEEDED``.
    """
    if len(data) <= SMALL_BYTES:
        return
    described = _request_of(method)
    if described is not None and _has_more_fields(data, described):
        raise exceeded(f"the request has more than {MOST_FIELDS} fields", field="")


@cache
def _request_of(method: str) -> Descriptor | None:
    try:
        found: Descriptor = (
            descriptor_pool.Default().FindMethodByName(method.removeprefix("/").replace("/", ".")).input_type
        )
    except KeyError:
        return None
    return found


@cache
def _parts_of(message: Descriptor) -> dict[int, Descriptor]:
    """Return the types of the fields that are messages, by number."""
    return {field.number: field.message_type for field in message.fields if field.message_type is not None}


def _has_more_fields(data: bytes, message: Descriptor) -> bool:
    """Count until there are too many, or until the data ends or is malformed, where parsing would end too."""
    position, end, parts = 0, len(data), _parts_of(message)
    around: list[tuple[int, dict[int, Descriptor]]] = []  # the messages around this one, each with its end and parts
    try:
        for _ in range(MOST_FIELDS):
            while position >= end:
                if not around:
                    return False
                end, parts = around.pop()
            tag, position = _varint(data, position)
            kind, size = tag & 7, 0
            if kind in {_VARINT, _DELIMITED}:
                size, position = _varint(data, position)
            if kind == _DELIMITED:
                part = parts.get(tag >> 3)
                if part is not None:
                    around.append((end, parts))
                    end, parts = min(position + size, end), _parts_of(part)
                    continue
                position += size
            position += _FIXED.get(kind, 0)
    except IndexError:
        return False
    return position < end or any(position < after for after, _ in around)


def _varint(data: bytes, position: int) -> tuple[int, int]:
    byte = data[position]
    position += 1
    if byte < 0x80:
        return byte, position
    value, shift = byte & 0x7F, 7
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise IndexError
