"""JSON data as ``Struct``, texts and times as messages take them, and back."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf import struct_pb2
from google.protobuf.timestamp_pb2 import Timestamp

MAX_FILES = 10_000
"""Files of an artifact that one message lists, and so of one that goes through the coordinator."""


def sendable(text: str) -> str:
    """A text as a message takes it: halves of characters, from a file's name or somebody's JSON, become question marks."""
    return text.encode(errors="replace").decode()


def struct_of(data: Mapping[str, Any]) -> struct_pb2.Struct:
    """JSON-ready data as a Struct. Its numbers are doubles: whole ones come back as integers, and what is no number as null."""
    struct = struct_pb2.Struct()
    struct.update(_plain(data))
    return struct


def dict_of(struct: struct_pb2.Struct) -> dict[str, Any]:
    """The data of a Struct; whole numbers are integers."""
    return {key: _value(value) for key, value in struct.fields.items()}


def _plain(data: Any) -> Any:
    """Data a Struct takes: tuples become lists, texts what can be sent, and numbers that JSON has no word for null."""
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


def _value(value: struct_pb2.Value) -> Any:
    match value.WhichOneof("kind"):
        case "struct_value":
            return dict_of(value.struct_value)
        case "list_value":
            return [_value(item) for item in value.list_value.values]
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
    """Seconds since the epoch as a Timestamp; None stays None (a field that is not set)."""
    if seconds is None:
        return None
    result = Timestamp()
    result.FromNanoseconds(round(seconds * 1e6) * 1000)
    return result


def seconds_of(moment: Timestamp) -> float:
    """A Timestamp as seconds since the epoch."""
    return moment.seconds + moment.nanos / 1e9
