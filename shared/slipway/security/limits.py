"""Limits that hold for every call, whoever makes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from slipway.errors import ServiceError
from slipway.texts import quoted, shortened


@dataclass(frozen=True, slots=True)
class Limits:
    """What one client may use.

    Attributes:
        streams: Streams that one principal (or one host without an identity) has open at a time.
        write_seconds: How long one message of a stream may wait for a reader that does not read.
        items: Entries of a list or map in a request.
        labels: Labels and sources of an export.
        text_bytes: Length of a text in a request.
        name_bytes: Length of a name, a key or a page token.
    """

    streams: int = 256
    write_seconds: float = 60.0
    items: int = 256
    labels: int = 64
    text_bytes: int = 4096
    name_bytes: int = 256


_NAMES = frozenset({"name", "parent", "export_id", "page_token", "request_id", "etag", "stage", "service", "key"})
_FEW = frozenset({"labels", "sources", "inputs"})


def check_request(request: Any, limits: Limits) -> None:
    """Refuse texts and lists that are longer than anything sensible, and texts that no database takes.

    Raises:
        ServiceError: reason ``LIMIT_EXCEEDED`` or ``REQUEST_INVALID``, naming the field.
    """
    if isinstance(request, Message):
        _check(request, limits, path="")


def check_size(request: bytes, max_bytes: int) -> None:
    """Refuse a request that is larger than its RPC takes.

    Raises:
        ServiceError: reason ``LIMIT_EXCEEDED``.
    """
    if len(request) > max_bytes:
        raise exceeded(f"the request has {len(request)} bytes, this call takes {max_bytes}", field="")


def _check(message: Message, limits: Limits, *, path: str) -> None:
    for field, value in message.ListFields():
        name = f"{path}{field.name}"
        items: Sequence[Any] = [value]
        if field.is_repeated:
            most = limits.labels if field.name in _FEW else limits.items
            if len(value) > most:
                raise exceeded(f"{name} has {len(value)} entries, {most} are allowed", field=name)
            items = _entries(field, value)
        for item in items:
            if isinstance(item, str):
                _check_text(item, limits.name_bytes if field.name in _NAMES else limits.text_bytes, name=name)
            elif isinstance(item, Message):
                _check(item, limits, path=f"{name}.")
            elif isinstance(item, tuple):
                _check_text(item[0], limits.name_bytes, name=f"{name} key")
                _check_text(item[1], limits.text_bytes, name=f"{name}[{shortened(item[0])}]")


def _entries(field: FieldDescriptor, value: Any) -> Sequence[Any]:
    """Items of a list; of a map from texts, its values or, when they are texts too, pairs."""
    if field.message_type is None or not field.message_type.GetOptions().map_entry:
        return list(value)
    of = field.message_type.fields_by_name["value"]
    if of.type == FieldDescriptor.TYPE_STRING:
        return list(value.items())
    return list(value.values())


def _check_text(text: str, most: int, *, name: str) -> None:
    size = len(text.encode())
    if size > most:
        raise exceeded(f"{name} has {size} bytes, {most} are allowed", field=name)
    if "\0" in text:  # PostgreSQL has no way to store it, or to compare with it
        raise ServiceError(
            f"{quoted(name)} has a NUL character",
            reason="REQUEST_INVALID",
            remedy="leave it out",
            about={"field": name},
        )


def exceeded(what: str, *, field: str) -> ServiceError:
    """The refusal of what is over a limit."""
    about = {"field": field} if field else None
    return ServiceError(what, reason="LIMIT_EXCEEDED", remedy="ask for less", about=about)


class OpenStreams:
    """Counts the streams each client has open."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: Counter[str] = Counter()

    @contextmanager
    def one(self, client: str) -> Iterator[None]:
        """Hold one of a client's streams.

        Raises:
            ServiceError: reason ``LIMIT_EXCEEDED``.
        """
        if self._open[client] >= self._most:
            raise exceeded(f"{client} has {self._most} streams open already", field="")
        self._open[client] += 1
        try:
            yield
        finally:
            self._open[client] -= 1
            if not self._open[client]:
                del self._open[client]
