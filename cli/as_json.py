"""Messages of the master as plain values for ``--json``: its own field names, numbers as numbers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message


def as_dict(message: Message) -> dict[str, Any]:
    """Every field, defaults too. What is absent (a limit that nobody set) is None; bytes are hex digits."""
    return {field.name: _value(message, field) for field in _fields(message)}


def rows(messages: Iterable[Message]) -> list[dict[str, Any]]:
    return [as_dict(message) for message in messages]


def _fields(message: Message) -> list[FieldDescriptor]:
    return list(message.DESCRIPTOR.fields)  # type: ignore[arg-type]  # the C form of the same class


def _value(message: Message, field: FieldDescriptor) -> Any:
    if field.has_presence and not message.HasField(field.name):
        return None
    value = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return {key: _plain(item) for key, item in value.items()}
    if field.is_repeated:
        return [_plain(item) for item in value]
    return _plain(value)


def _plain(value: Any) -> Any:
    if isinstance(value, Message):
        return as_dict(value)
    return value.hex() if isinstance(value, bytes) else value
