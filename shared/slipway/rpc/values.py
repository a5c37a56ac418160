"""Convert values of messages: JSON data, texts and times; failures as ``google.rpc.Status``; names of states.

States are named as people and JSON see them.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf import any_pb2, struct_pb2
from google.protobuf.message import DecodeError, Message
from google.protobuf.timestamp_pb2 import Timestamp
from google.rpc import code_pb2, error_details_pb2, status_pb2

from slipway.errors import MOST_TEXT, Failure, ServiceError
from slipway.reasons import REASONS
from slipway.texts import shortened
from slipway_protos.v1 import export_pb2 as pb

MAX_FILES = 10_000
"""Most files that one message lists, and so most files of an artifact that goes through the coordinator."""

_ERROR_DOMAIN = "slipway"
RETRY_AFTER = "retry_after_seconds"
"""Entry of a failure's ``about`` that is also sent as ``RetryInfo``, which every gRPC client understands."""

_FIELD = "field"
"""Entry of a failure's ``about`` that names a field of a request, which is sent as ``BadRequest`` too."""
_MOST_DESCRIPTION = 300

_LONGEST_RETRY_SECONDS = 86_400.0

# Names of the failure's own fields within ErrorInfo.metadata; all other entries are ``about``.
_PARTS = ("error_type", "remedy", "retryable")

_REASON = re.compile(r"[A-Z][A-Z0-9_]{0,63}")
_MOST_ABOUT = 64
"""Most entries of a received failure's ``about``."""
_MOST_DETAILS = 64

ENDED_STATES = frozenset({pb.EXPORT_STATE_SUCCEEDED, pb.EXPORT_STATE_FAILED, pb.EXPORT_STATE_CANCELLED})
"""States in which an export stays until it is retried."""


def sendable(text: str) -> str:
    """Return a text that a message can hold: halves of surrogate pairs, from file names or JSON, become question marks."""
    return text.encode(errors="replace").decode()


def struct_of(data: Mapping[str, Any]) -> struct_pb2.Struct:
    """Convert JSON-ready data to a Struct. Its numbers are doubles: whole ones come back as integers, NaN and infinity as null."""
    struct = struct_pb2.Struct()
    struct.update(_plain(data))
    return struct


def dict_of(struct: struct_pb2.Struct) -> dict[str, Any]:
    """Return the data of a Struct, sorted by key, because messages have no order; whole numbers become integers."""
    return {key: data_of(value) for key, value in sorted(struct.fields.items())}


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


def status_of(failure: Failure) -> status_pb2.Status:
    """Convert a failure to a status: the code follows from the category; the reason and the rest are in an ``ErrorInfo``.

    A refused field of a request is in a ``BadRequest`` too, and the time until a retry in a ``RetryInfo``.
    """
    category = REASONS[failure.reason].category if failure.reason in REASONS else REASONS["INTERNAL"].category
    info = error_details_pb2.ErrorInfo(reason=failure.reason, domain=_ERROR_DOMAIN)
    info.metadata.update({sendable(key): sendable(value) for key, value in failure.about.items()})
    info.metadata["error_type"] = failure.error_type
    info.metadata["retryable"] = str(failure.retryable).lower()
    if failure.remedy:
        info.metadata["remedy"] = sendable(failure.remedy)
    status = status_pb2.Status(code=code_pb2.Code.Value(category.status_code), message=sendable(failure.message))
    status.details.add().Pack(info)
    if status.code == code_pb2.INVALID_ARGUMENT and failure.about.get(_FIELD):
        refused = error_details_pb2.BadRequest()
        what = shortened(sendable(failure.remedy or failure.message), _MOST_DESCRIPTION)
        refused.field_violations.add(field=sendable(failure.about[_FIELD]), description=what, reason=failure.reason)
        status.details.add().Pack(refused)
    seconds = retry_seconds(failure)
    if seconds is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(int(1000 * seconds))
        status.details.add().Pack(retry)
    return status


def retry_seconds(failure: Failure) -> float | None:
    """Return the seconds until a retry; None if the failure has none, or an impossible one from a peer."""
    try:
        seconds = float(failure.about[RETRY_AFTER])
    except (KeyError, ValueError):
        return None
    return seconds if 0 <= seconds <= _LONGEST_RETRY_SECONDS else None


def failure_of_status(status: status_pb2.Status) -> Failure:
    """Return the failure that :func:`status_of` wrote, with texts cut to the usual lengths.

    A status from another program, or one with unreadable details, becomes ``INTERNAL``.
    """
    for detail in status.details[:_MOST_DETAILS]:
        info = error_details_pb2.ErrorInfo()
        if _unpack(detail, info) and info.domain == _ERROR_DOMAIN:
            about = [(key, value) for key, value in sorted(info.metadata.items()) if key not in _PARTS]
            return Failure(
                reason=info.reason if _REASON.fullmatch(info.reason) else "INTERNAL",
                message=shortened(status.message, MOST_TEXT),
                remedy=shortened(info.metadata.get("remedy", ""), MOST_TEXT),
                error_type=shortened(info.metadata.get("error_type", "ModelExportError")),
                about={shortened(key): shortened(value, MOST_TEXT) for key, value in about[:_MOST_ABOUT]},
                retryable=info.metadata.get("retryable") == "true",
            )
    return ServiceError(status.message or code_pb2.Code.Name(status.code), reason="INTERNAL").failure()


def failure_of_bytes(data: bytes) -> Failure:
    """Return the failure of a serialized status; ``INTERNAL`` if the data is not a status."""
    try:
        return failure_of_status(status_pb2.Status.FromString(data))
    except DecodeError:
        return ServiceError("the peer sent an unreadable status", reason="INTERNAL").failure()


def _unpack(detail: any_pb2.Any, into: Message) -> bool:
    try:
        return detail.Unpack(into)
    except DecodeError:
        return False


def export_state(number: int) -> str:
    """Return the name of an export's state, such as ``running``; ``state 9`` for one that only a newer peer knows."""
    return _state_name(pb.ExportState, "EXPORT_STATE_", number)


def task_state(number: int) -> str:
    """Return the name of a task's state, likewise."""
    return _state_name(pb.TaskState, "TASK_STATE_", number)


def _state_name(states: Any, prefix: str, number: int) -> str:
    known = states.DESCRIPTOR.values_by_number.get(number)
    return f"state {number}" if known is None else known.name.removeprefix(prefix).lower()
