"""Random messages of any protobuf type: every field by its kind, with values at the edges more often than not."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

M = TypeVar("M", bound=Message)

_BITS = {
    FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
}
_FLOATS = (0.0, -1.0, 1e308, -1e308, float("inf"), float("-inf"), float("nan"), 0.5)
_TEXTS = ("", "x", "ä" * 60, "\x00", "s" * 128, "s" * 129, "model", "../..", "{}", "1" * 5000)
_DEPTH_MAX = 4


class Maker:
    """Makes messages from a seed. ``likely``: field name -> values that mean something, taken with ``sense``."""

    def __init__(
        self, chance: random.Random, likely: Mapping[str, list[Any]] | None = None, sense: float = 0.85
    ) -> None:
        self.sense = sense
        self.chance = chance
        self.likely = dict(likely or {})

    def message(self, kind: type[M]) -> M:
        made = kind()
        self.fill(made)
        return made

    def fill(self, message: Message, depth: int = 0) -> None:
        for field in message.DESCRIPTOR.fields:
            if field.containing_oneof is not None and field.name not in self.likely and self.chance.random() < 0.7:
                continue
            if (field.name not in self.likely and self.chance.random() < 0.25) or depth > _DEPTH_MAX:
                continue
            self._set(message, field, depth)

    def _set(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        nested = field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE
        repeated = field.is_repeated
        if nested and repeated and field.message_type.GetOptions().map_entry:
            return
        if nested and repeated:
            for _ in range(self.chance.randrange(3)):
                self.fill(getattr(message, field.name).add(), depth + 1)
        elif nested:
            child = getattr(message, field.name)
            child.SetInParent()
            self.fill(child, depth + 1)
        elif repeated:
            getattr(message, field.name).extend(self._value(field) for _ in range(self.chance.randrange(4)))
        else:
            setattr(message, field.name, self._value(field))

    def _value(self, field: FieldDescriptor) -> Any:
        chance = self.chance
        likely = self.likely.get(field.name)
        if likely and chance.random() < self.sense:
            return chance.choice(likely)
        if field.cpp_type in _BITS:
            low, high = _BITS[field.cpp_type]
            return chance.choice((0, 1, 2, low, high, high - 1, chance.randint(low, high), chance.randrange(100)))
        if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
            return chance.random() < 0.5
        if field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
            return chance.choice(_FLOATS)
        if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
            return chance.choice([value.number for value in field.enum_type.values])
        if field.type == FieldDescriptor.TYPE_BYTES:
            return chance.randbytes(chance.choice((0, 1, 8, 15, 16, 17, 32, 160, 500)))
        return chance.choice(_TEXTS)
