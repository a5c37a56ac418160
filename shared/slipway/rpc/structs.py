"""Convert JSON data, texts and times to the values of messages, and back."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf import struct_pb2
from google.protobuf.timestamp_pb2 import Timestamp

MAX_FILES = 10_000
"""Most files that one message lists, and so most files of an artifact that goes through the coordinator."""


def sendable(text: str) -> str:
    """Return a text that a message can hold: halves of surrogate pairs, from file names or JSON, become question marks."""
    return text.encode(errors="replace").decode()


def struct_of(data: Mapping[str, Any]) -> struct_pb2.Struct:
    """Convert JSON-ready data to a Struct. Its numbers are doubles: whole ones come back as integers, NaN and infinity as null."""
    struct = struct_pb2.Struct()
    struct.update(_plain(data))
    return struct


def dict_of(struct: struct_pb2.Struct) -> dict[str, Any]:
    """Return the data of a Struct; whole numbers become integers."""
    return {key: data_of(value) for key, value in struct.fields.items()}


def value_of(data: Any) -> struct_pb2.Value:
    """Convert JSON-ready data to a Value, as :func:`struct_of`."""
    return struct_of({"": data}).fields[""]


def _plain(data: Any) -> Any:
    """Return data that a Struct can hold: tuples become lists, texts sendable, and numbers that JSON cannot express null."""
    match data:
        case str():
            return sendable(data)
        case Mapping():
            return {sendable(str(key)): _plain(value) for key, value in data.items()}
        case Sequence():
            return [_plain(item) for item in data]
        case bool():
            return data
        case int() | float():
            return data if abs(data) <= sys.float_info.max else None
    return data


def data_of(value: struct_pb2.Value) -> Any:
    """Return the data of a Value; whole numbers become integers."""
    match value.WhichOneof("kind"):
        case "struct_value":
            return dict_of(value.struct_value)
        case "list_value":
            return [data_of(item) for item in value.list_value.values]
        case "number_value":
            return _number(value.number_value)
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case _:
            return None


def _number(number: float) -> int | float | None:
    if not math.isfinite(number):
        return None
    return int(number) if number.is_integer() and abs(number) < 2**53 else number


def timestamp(seconds: float | None) -> Timestamp | None:
    """Convert seconds since the epoch to a Timestamp; None stays None (an unset field)."""
    if seconds is None:
        return None
    result = Timestamp()
    result.FromNanoseconds(round(seconds * 1e6) * 1000)
    return result
