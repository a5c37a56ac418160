"""Convert configurations and calls of stages to messages and back, and log lines and progress to messages."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from slipway.rpc.values import data_of, dict_of, sendable, struct_of, value_of
from slipway.stage import Progress
from slipway.stage_call import Limits, StageCall
from slipway_protos.v1 import configuration_pb2, export_pb2, stage_pb2, worker_pb2

if TYPE_CHECKING:
    from slipway.configuration import ExportConfiguration

_LINE_START, _LINE_END = 1000, 3000  # the end of a traceback matters most

MOST_HELD = 2048
"""Artifacts that a worker reports to hold; a coordinator refuses more."""


def configuration_message(configuration: ExportConfiguration) -> configuration_pb2.ExportConfiguration:
    """Return a configuration as its message, with every field set."""
    return recorded_configuration_message(configuration.model_dump(mode="json"))


def asked_configuration_message(configuration: ExportConfiguration) -> configuration_pb2.ExportConfiguration:
    """Return a configuration as the message of a request, with the fields alone that were set: the server knows the defaults."""
    return recorded_configuration_message(configuration.model_dump(mode="json", exclude_unset=True))


def recorded_configuration_message(recorded: Mapping[str, Any]) -> configuration_pb2.ExportConfiguration:
    """Return a recorded configuration as its message, even if it has a format that is no longer installed."""
    message = configuration_pb2.ExportConfiguration()
    _fill(message, recorded)
    return message


def configuration_of(message: configuration_pb2.ExportConfiguration) -> ExportConfiguration:
    """Read the configuration in a message; fields that are not set take their defaults.

    Raises:
        ConfigurationError: All problems at once.
    """
    from slipway.configuration import parse  # imported late, because most users of this module read no configuration

    return parse(_message_data(message))


class _Kind(Enum):
    """How a field of a message is read and written."""

    MAP, LEVELS, STRUCT, VALUE, MESSAGE, LIST, SCALAR = range(7)


@functools.cache
def _kinds(descriptor: Any) -> Mapping[str, _Kind]:
    """Return the kinds of a message's fields by name. They are kept, because asking a descriptor takes longer than converting a value."""
    return {field.name: _kind(field) for field in descriptor.fields}


def _kind(field: Any) -> _Kind:
    if field.type != FieldDescriptor.TYPE_MESSAGE:
        return _Kind.LIST if field.is_repeated else _Kind.SCALAR
    if field.message_type.GetOptions().map_entry:
        return _Kind.MAP
    if field.message_type.name == "QuantizationLevels":
        return _Kind.LEVELS
    special = {"google.protobuf.Struct": _Kind.STRUCT, "google.protobuf.Value": _Kind.VALUE}
    return special.get(field.message_type.full_name, _Kind.MESSAGE)


def _fill(message: Message, data: Mapping[str, Any]) -> None:
    """Set a message's fields; values without a field, such as a format's own settings, go into its Struct ``settings``."""
    kinds = _kinds(message.DESCRIPTOR)
    rest = {name: value for name, value in data.items() if kinds.get(name, _Kind.STRUCT) is _Kind.STRUCT}
    if rest and "settings" in kinds:  # a message without it drops values that another version recorded
        cast("Any", message).settings.MergeFrom(struct_of(rest))
    for name, value in data.items():
        if name in rest or value is None:
            continue
        match kinds[name]:
            case _Kind.MAP:
                _fill_map(getattr(message, name), value)
            case _Kind.VALUE:
                getattr(message, name).MergeFrom(value_of(value))
            case _Kind.LIST:
                getattr(message, name).extend(value)
            case _Kind.SCALAR:
                setattr(message, name, value)
            case _Kind.LEVELS:
                levels = getattr(message, name)
                levels.SetInParent()  # an empty list of levels differs from an unset one
                levels.levels.extend(value)
            case _:
                getattr(message, name).SetInParent()
                _fill(getattr(message, name), value)


def _fill_map(rows: Any, data: Mapping[str, Any]) -> None:
    for key, row in data.items():
        if isinstance(row, Mapping):
            _fill(rows[key], row)  # reading a missing key of a message map creates the message
        else:
            rows[key] = row


def _message_data(message: Message) -> dict[str, Any]:
    data: dict[str, Any] = {}
    kinds = _kinds(message.DESCRIPTOR)
    for field, value in message.ListFields():
        name = field.name
        match kinds[name]:
            case _Kind.MAP:
                data[name] = {
                    key: _message_data(row) if isinstance(row, Message) else row for key, row in sorted(value.items())
                }
            case _Kind.LIST:
                data[name] = list(value)
            case _Kind.SCALAR:
                data[name] = value
            case _Kind.LEVELS:
                data[name] = list(value.levels)
            case _Kind.VALUE:
                data[name] = data_of(value)
            case _Kind.STRUCT:
                data = {**dict_of(value), **data}
            case _:
                data[name] = _message_data(value)
    return data


def put_call(lease: worker_pb2.TaskLease, call: StageCall) -> None:
    """Write a call into a lease."""
    lease.stage, lease.threads = call.stage, call.limits.threads
    lease.max_memory_bytes = call.limits.max_memory_bytes
    lease.params.CopyFrom(struct_of(call.params))
    lease.inputs.update(call.inputs)
    if call.limits.timeout_seconds:
        lease.timeout.FromTimedelta(timedelta(seconds=call.limits.timeout_seconds))


def call_of(message: worker_pb2.TaskLease | stage_pb2.RunRequest) -> StageCall:
    """Read the call in a lease, or in a request, whose limits the worker sets."""
    limits = Limits()
    if isinstance(message, worker_pb2.TaskLease):
        seconds = message.timeout.ToTimedelta().total_seconds()
        limits = Limits(seconds, message.max_memory_bytes, message.threads)
    return StageCall(message.stage, dict_of(message.params), dict(message.inputs), limits)


def log_line(level: str, message: str) -> export_pb2.LogLine:
    """Return a log line as a message; keep only the beginning and the end of a very long one."""
    left_out = len(message) - _LINE_START - _LINE_END
    if left_out > 0:
        message = f"{message[:_LINE_START]} … {left_out} characters … {message[-_LINE_END:]}"
    return export_pb2.LogLine(level=level, message=sendable(message))


def progress_message(progress: Progress, memory_bytes: int) -> export_pb2.TaskProgress:
    """Return progress as a message."""
    return export_pb2.TaskProgress(
        phase=sendable(progress.phase),
        done=progress.done,
        total=progress.total,
        unit=sendable(progress.unit),
        memory_bytes=memory_bytes,
    )
