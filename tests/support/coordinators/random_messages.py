"""Make random protobuf messages of any type, with values that a coordinator is likely to interpret."""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

from support.hostile import texts as hostile_texts

TEXTS = st.one_of(
    st.sampled_from(
        [
            "projects/red",
            "projects/blue",
            "projects/red/exports/ours",
            "projects/blue/exports/theirs",
            "projects/red/exports/ours:merge:1",
            "projects/red/exports/ours:merge:²",
            "projects/red/exports/ours:merge:" + "9" * 5000,
            "sha256:" + "0" * 64,
            "merge",
            "base",
            "../../etc/passwd",
            "projects/red/../blue",
            "\0",
            "%s%n{0}",
            "",
        ]
    ),
    st.sampled_from(hostile_texts.TEXTS).map(
        lambda text: text.encode(errors="replace").decode()
    ),  # without halves of letters
    st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
    st.integers(1, 9000).map(lambda size: "x" * size),
)
_INTS = st.one_of(st.integers(-3, 3), st.integers(-(2**31), 2**31 - 1))
_SCALARS = {
    FieldDescriptor.CPPTYPE_STRING: TEXTS,
    FieldDescriptor.CPPTYPE_INT32: _INTS,
    FieldDescriptor.CPPTYPE_INT64: st.one_of(_INTS, st.integers(-(2**63), 2**63 - 1)),
    FieldDescriptor.CPPTYPE_UINT32: st.integers(0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: st.integers(0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_DOUBLE: st.floats(),
    FieldDescriptor.CPPTYPE_FLOAT: st.floats(width=32),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_ENUM: st.integers(0, 9),
}


@st.composite
def messages(draw: st.DrawFn, descriptor: Descriptor, depth: int = 4) -> Message:
    """Make a message of this type; fields below ``depth`` stay empty."""
    message = GetMessageClass(descriptor)()
    for field in descriptor.fields:
        if draw(st.integers(0, 2)) == 0 or (depth == 0 and field.message_type is not None):
            continue
        if field.is_repeated:
            _fill_repeated(draw, message, field, depth)
        elif field.message_type is not None:
            getattr(message, field.name).CopyFrom(draw(messages(field.message_type, depth - 1)))
        else:
            setattr(message, field.name, draw(_scalar(field)))
    return message


def _fill_repeated(draw: st.DrawFn, message: Message, field: FieldDescriptor, depth: int) -> None:
    target = getattr(message, field.name)
    for _ in range(draw(st.sampled_from([1, 2, 300]) if field.message_type is None else st.integers(1, 3))):
        if field.message_type is None:
            target.append(draw(st.just("x") if field.type == FieldDescriptor.TYPE_STRING else _scalar(field)))
        elif field.message_type.GetOptions().map_entry:
            _fill_entry(draw, target, field.message_type, depth)
        else:
            target.add().CopyFrom(draw(messages(field.message_type, depth - 1)))


def _fill_entry(draw: st.DrawFn, target: Any, entry: Descriptor, depth: int) -> None:
    key, value = draw(_scalar(entry.fields_by_name["key"])), entry.fields_by_name["value"]
    if value.message_type is not None:
        target[key].CopyFrom(draw(messages(value.message_type, depth - 1)))
    else:
        target[key] = draw(_scalar(value))


def _scalar(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=50)
    return _SCALARS[field.cpp_type]
