"""Count what a request would become before it is parsed: a list entry of two bytes becomes an object of a hundred."""

from __future__ import annotations

from functools import cache

from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor

from slipway.security.limits import exceeded

MOST_FIELDS = 200_000
"""Most fields of a request, with those of its parts: facts of a stage of 256 KiB may have 130,000."""
_SMALL_BYTES = 1 << 20  # whose parsing takes less time than the count
_VARINT, _DELIMITED, _FIXED = 0, 2, {1: 8, 5: 4}  # kinds of fields, the last with their sizes


def check_fields(data: bytes, method: str) -> None:
    """Refuse a request of more fields than any real one has.

    Args:
        data: The request.
        method: Full name of its RPC; one that is not described in this process is not counted.

    Raises:
        ServiceError: reason ``LIMIT_EXCEEDED``.
    """
    if len(data) <= _SMALL_BYTES:
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


def _has_more_fields(data: bytes, message: Descriptor) -> bool:
    """Count until there are too many, or until the data ends or is malformed, where parsing would end too."""
    position, parts = 0, [(len(data), message)]  # the parts around a position, each with its end
    try:
        for _ in range(MOST_FIELDS):
            while parts and position >= parts[-1][0]:
                parts.pop()
            if not parts:
                return False
            tag, position = _varint(data, position)
            size = 0
            if tag & 7 in {_VARINT, _DELIMITED}:
                size, position = _varint(data, position)
            if tag & 7 == _DELIMITED:
                field = parts[-1][1].fields_by_number.get(tag >> 3)
                if field is not None and field.message_type is not None:
                    parts.append((min(position + size, parts[-1][0]), field.message_type))
                    continue
                position += size
            position += _FIXED.get(tag & 7, 0)
    except IndexError:
        return False
    return any(position < end for end, _ in parts)


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise IndexError
