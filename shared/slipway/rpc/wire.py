"""Between Slipway's own values and what travels: failures and ``google.rpc.Status``, JSON data and ``Struct``,
configurations and their message.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import grpc
from google.protobuf import struct_pb2
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from google.rpc import code_pb2, error_details_pb2, status_pb2

from slipway.errors import MOST_TEXT, REASONS, Failure, ServiceError
from slipway.texts import shortened
from slipway_protos.v1 import configuration_pb2

if TYPE_CHECKING:
    from slipway.configuration import ExportConfiguration

DOMAIN = "slipway"
RETRY_AFTER = "retry_after_seconds"
"""Entry of a failure's ``about`` that travels as ``RetryInfo`` too, which every gRPC client understands."""

_LONGEST_RETRY_SECONDS = 86_400.0

STATUS_KEY = "grpc-status-details-bin"

_NO_TLS = re.compile(r"CERTIFICATE_VERIFY_FAILED: [^:]+|WRONG_VERSION_NUMBER|Hostname Verification Check failed")
_HUNG_UP = re.compile(r"Socket closed|Failed parsing HTTP/2")
# TLS stood, and the server hung up before its first frame: what gRPC's servers do to a certificate they do not take.
_REFUSED_CERTIFICATE = re.compile(r"failed to connect to all addresses; last error: [A-Z]+: \S+ Socket closed")

# Names of the parts of a failure within ErrorInfo.metadata; everything else there is ``about``.
_PARTS = ("error_type", "remedy", "retryable")

# gRPC carries a status in HTTP/2 headers, 8 KiB in all by default: longer texts end the call with an unrelated error.
MAX_TEXT = 2000
MAX_METADATA = 4000

MAX_FILES = 10_000
"""Files of an artifact that one message lists, and so of one that goes through the coordinator."""


_REASON = re.compile(r"[A-Z][A-Z0-9_]{0,63}")
_MOST_ABOUT = 64
"""Entries of what a failure is about."""


def sendable(text: str) -> str:
    """A text as a message takes it: halves of characters, from a file's name or somebody's JSON, become question marks."""
    return text.encode(errors="replace").decode()


def status_of(failure: Failure) -> status_pb2.Status:
    """A failure as a status: code by category, reason and everything else in an ``ErrorInfo``."""
    category = REASONS[failure.reason].category if failure.reason in REASONS else REASONS["INTERNAL"].category
    info = error_details_pb2.ErrorInfo(reason=failure.reason, domain=DOMAIN)
    info.metadata.update({sendable(key): sendable(value) for key, value in failure.about.items()})
    info.metadata["error_type"] = failure.error_type
    info.metadata["retryable"] = str(failure.retryable).lower()
    if failure.remedy:
        info.metadata["remedy"] = sendable(failure.remedy)
    status = status_pb2.Status(code=code_pb2.Code.Value(category.status_code), message=sendable(failure.message))
    status.details.add().Pack(info)
    seconds = _retry_seconds(failure)
    if seconds is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(int(1000 * seconds))
        status.details.add().Pack(retry)
    return status


def _retry_seconds(failure: Failure) -> float | None:
    """When to try again, if the failure says so; it may be of somebody else's making."""
    try:
        seconds = float(failure.about[RETRY_AFTER])
    except (KeyError, ValueError):
        return None
    return seconds if 0 <= seconds <= _LONGEST_RETRY_SECONDS else None


def failure_of_status(status: status_pb2.Status) -> Failure:
    """The failure that :func:`status_of` wrote, its texts no longer than they are made here; a status from elsewhere becomes
    INTERNAL.
    """
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info) and info.domain == DOMAIN:
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


def call_status(failure: Failure) -> tuple[grpc.StatusCode, str, bytes]:
    """Code, text and serialized status with which a call fails; long parts are cut to what gRPC carries."""
    room = MAX_METADATA
    about: dict[str, str] = {}
    for key, value in sorted(failure.about.items(), key=lambda item: len(item[1])):
        if len(key) + len(value) <= room:
            about[key] = value
            room -= len(key) + len(value)
    short = Failure(
        reason=failure.reason,
        message=failure.message[:MAX_TEXT],
        remedy=failure.remedy[:MAX_TEXT],
        error_type=failure.error_type,
        about=about,
        retryable=failure.retryable,
    )
    status = status_of(short)
    code = grpc.StatusCode[code_pb2.Code.Name(status.code)]
    return code, short.message, status.SerializeToString()


def failure_of_call(error: grpc.RpcError, *, address: str, encrypted: bool = False) -> Failure:
    """The failure that a gRPC call ended with; ``encrypted`` says whether the channel speaks TLS."""
    call = cast("grpc.Call", error)
    for key, value in call.trailing_metadata() or ():
        if key == STATUS_KEY:
            return failure_of_status(status_pb2.Status.FromString(cast("bytes", value)))
    code = call.code()
    details = call.details() or ""
    no_tls = _NO_TLS.search(details)
    if code is grpc.StatusCode.UNAVAILABLE and no_tls:
        return ServiceError(
            f"there is no TLS connection to {address}: {no_tls[0]}",
            reason="TLS_INVALID",
            remedy="check that it speaks TLS, and its certificate: the authority (--tls-ca-file), the dates, the names "
            "(SLIPWAY_TLS_SERVER_NAME)",
            about={"address": address},
        ).failure()
    if code is grpc.StatusCode.UNAVAILABLE and encrypted and _REFUSED_CERTIFICATE.search(details):
        return ServiceError(
            f"{address} takes no connection without a certificate of its authority, and was shown none that it takes",
            reason="TLS_INVALID",
            remedy="give one (--tls-cert-file, --tls-key-file) that has not expired, or call the port for those who have "
            "a token (the coordinator's --token-listen)",
            about={"address": address},
        ).failure()
    if code in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}:
        # A server that wants TLS, or a certificate, hangs up on who has none.
        wants = ", and whether it wants TLS (--tls-ca-file) and a certificate (--tls-cert-file)"
        return ServiceError(
            f"the coordinator at {address} does not answer: {details or code.name}",
            reason="COORDINATOR_UNAVAILABLE",
            remedy=f"check the address, and whether it runs{wants if _HUNG_UP.search(details) else ''}",
            about={"address": address},
        ).failure()
    reason = "CANCELLED" if code is grpc.StatusCode.CANCELLED else "INTERNAL"
    return ServiceError(f"the call to {address} failed: {code.name}: {details}", reason=reason).failure()


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


def configuration_message(configuration: ExportConfiguration) -> configuration_pb2.ExportConfiguration:
    """A configuration as its message, every field set."""
    message = configuration_pb2.ExportConfiguration()
    _fill(message, configuration.model_dump(mode="json"))
    return message


def configuration_of(message: configuration_pb2.ExportConfiguration) -> ExportConfiguration:
    """The configuration of a message; fields that are not set take their defaults.

    Raises:
        ConfigurationError: with every problem there is.
    """
    from slipway.configuration import parse  # most of who speaks this protocol reads no configuration

    return parse(_data(message))


def _fill(message: Message, data: Mapping[str, Any]) -> None:
    """Set a message's fields; what it has no field for goes into its Struct ``settings``, as a format's own settings do."""
    fields = message.DESCRIPTOR.fields_by_name
    own = {name for name, field in fields.items() if not _is_struct(field)}
    rest = {name: value for name, value in data.items() if name not in own}
    if rest:
        cast("Any", message).settings.update(_plain(rest))
    for name, value in data.items():
        if name in rest or value is None:
            continue
        field = fields[name]
        if _is_map(field):
            _fill_map(getattr(message, name), value)
        elif field.type != FieldDescriptor.TYPE_MESSAGE:
            if field.is_repeated:
                getattr(message, name).extend(value)
            else:
                setattr(message, name, value)
        elif _type_name(field) == "QuantizationLevels":
            levels = getattr(message, name)
            levels.SetInParent()  # an empty list of levels is not the same as none given
            levels.levels.extend(value)
        else:
            getattr(message, name).SetInParent()
            _fill(getattr(message, name), value)


def _fill_map(rows: Any, data: Mapping[str, Any]) -> None:
    for key, row in data.items():
        if isinstance(row, Mapping):
            _fill(rows[key], row)  # looking a message up makes it
        else:
            rows[key] = row


def _data(message: Message) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for field, value in message.ListFields():
        if _is_map(field):
            data[field.name] = {
                key: _data(row) if isinstance(row, Message) else row for key, row in sorted(value.items())
            }
        elif field.type != FieldDescriptor.TYPE_MESSAGE:
            data[field.name] = list(value) if field.is_repeated else value
        elif _type_name(field) == "QuantizationLevels":
            data[field.name] = list(value.levels)
        elif _is_struct(field):
            data = {**dict_of(value), **data}
        else:
            data[field.name] = _data(value)
    return data


def _is_map(field: Any) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def _is_struct(field: Any) -> bool:
    return field.message_type is not None and field.message_type.full_name == "google.protobuf.Struct"


def _type_name(field: Any) -> str:
    return str(field.message_type.name)


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
