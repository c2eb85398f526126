"""Decoding of what clients send: everything malformed is a :class:`ProtocolError`, nothing is believed."""

from __future__ import annotations

from array import array
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from kvstrata.proto.errors import ProtocolError
from kvstrata.transfer.frames import Frame
from kvstrata.transfer.server import Reply

M = TypeVar("M", bound=Message)


def parsed(message: type[M], frame: Frame) -> M:
    """The frame's message; raises :class:`ProtocolError` when it does not decode."""
    try:
        return message.FromString(frame.message)
    except DecodeError as error:
        raise ProtocolError(f"a {message.__name__} message that does not decode") from error


def u64s(packed: bytes) -> array[int]:
    """An array of u64 that travelled packed."""
    return _unpacked("Q", packed)


def u32s(packed: bytes) -> array[int]:
    """An array of u32 that travelled packed."""
    return _unpacked("I", packed)


def _unpacked(code: str, packed: bytes) -> array[int]:
    values = array(code)
    if len(packed) % values.itemsize:
        raise ProtocolError(f"{len(packed)} bytes do not make an array of {values.itemsize}-byte numbers")
    values.frombytes(packed)
    return values


def reply(kind: int, message: Message) -> Reply:
    """An answer without raw bytes."""
    return Reply(kind, message.SerializeToString())
