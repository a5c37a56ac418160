"""Refuse requests of clients that are newer than this program."""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from slipway.errors import ServiceError


def check_understood(request: Message) -> None:
    """Refuse a request with fields that this program does not know: ignoring them would be silently wrong.

    Raises:
        ServiceError: reason ``REQUEST_INVALID``.
    """
    unknown = next(_unknown(request, type(request).DESCRIPTOR.name), None)
    if unknown is not None:
        where, number = unknown
        raise ServiceError(
            f"{where} has a field that this coordinator does not know (number {number})",
            reason="REQUEST_INVALID",
            remedy="leave out the new field, or upgrade the coordinator before its clients",
            about={"message": where, "number": number},
        )


def _unknown(message: Message, where: str) -> Iterator[tuple[str, int]]:
    """Yield each unknown field: the path of the message that has it, and its number."""
    unknown = UnknownFieldSet(message)
    for index in range(len(unknown)):
        yield where, unknown[index].field_number
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        inner = f"{where}.{field.name}"
        if not field.is_repeated:
            yield from _unknown(value, inner)
        elif not field.message_type.GetOptions().map_entry:
            for item in value:
                yield from _unknown(item, inner)
        elif field.message_type.fields_by_name["value"].message_type is not None:
            for item in value.values():
                yield from _unknown(item, inner)
