"""Framing of the channel: a fixed header, one protobuf message, raw bytes.

::

     0        2         3      4              8                12                   20
     +--------+---------+------+--------------+----------------+--------------------+
     | "KV"   | version | kind | request u32  | message bytes  | raw bytes u64      |
     +--------+---------+------+--------------+----------------+--------------------+
     | message (protobuf, by kind) ...                         | raw ...

Little-endian. Every length is checked against its bound before anything is allocated.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from kvstrata.proto.errors import ProtocolError

MAGIC = b"KV"
FRAME_VERSION = 1
#: Protocol spoken by this build, and the oldest it accepts.
PROTOCOL = 1
PROTOCOL_MIN = 1

HEADER = struct.Struct("<2sBBIIQ")
HEADER_BYTES = HEADER.size
MESSAGE_BYTES_MAX = 8 << 20
RAW_BYTES_MAX = 1 << 36
#: A client tells of reads several times a second: of one read no more repeats at a time.
REPEATS_MAX = 1 << 16


class Kind(IntEnum):
    """What a frame's message is. Values are wire format: never renumber."""

    HELLO = 1
    HELLO_OK = 2
    FAILURE = 3
    PING = 4
    PONG = 5
    PROGRESS = 6
    OPEN_NAMESPACE = 7
    NAMESPACE_HANDLE = 8
    PROVE = 9
    PROVE_OK = 10

    LOOKUP = 20
    LOOKUP_OK = 21
    PLACE = 22
    PLACE_OK = 23
    MISS_REPORT = 24  # one-way
    REMOVE = 25
    REMOVE_OK = 26
    HEARTBEAT = 27
    HEARTBEAT_OK = 28

    ACQUIRE = 40
    ACQUIRE_OK = 41
    RELEASE = 42  # one-way
    RENEW = 43
    RENEW_OK = 44
    MAP_SLABS = 45
    MAP_SLABS_OK = 46
    REGISTER_REGION = 47
    REGISTER_REGION_OK = 48
    UNREGISTER_REGION = 49
    RESERVE = 50
    RESERVE_OK = 51
    WRITE = 52
    PULL = 53
    COMMIT = 54
    COMMIT_OK = 55
    ABORT = 56
    OK = 57
    NODE_INFO = 58
    NODE_INFO_OK = 59
    HINT = 60
    HINT_OK = 61
    NODE_CHECK = 62
    NODE_CHECK_OK = 63
    OPEN_RAILS = 64
    OPEN_RAILS_OK = 65
    TEST_RAIL = 66
    TEST_RAIL_OK = 67
    MAP_INDEX = 68
    MAP_INDEX_OK = 69
    TOUCHED = 70  # one-way


_KNOWN = frozenset(int(kind) for kind in Kind)
#: Kinds that carry block bytes after the message.
WITH_RAW = frozenset({Kind.ACQUIRE_OK, Kind.WRITE})


class Header(NamedTuple):
    """A frame's header, checked."""

    kind: int
    request: int
    message_bytes: int
    raw_bytes: int


def encode_header(kind: int, request: int, message_bytes: int, raw_bytes: int = 0) -> bytes:
    """Pack a header. The caller's own lengths must respect the bounds (asserted)."""
    assert message_bytes <= MESSAGE_BYTES_MAX and raw_bytes <= RAW_BYTES_MAX
    return HEADER.pack(MAGIC, FRAME_VERSION, kind, request, message_bytes, raw_bytes)


def decode_header(buffer: bytes | bytearray | memoryview, offset: int = 0) -> Header:
    """Unpack and check a header; raises :class:`ProtocolError` naming what is wrong."""
    magic, version, kind, request, message_bytes, raw_bytes = HEADER.unpack_from(buffer, offset)
    if magic != MAGIC:
        raise ProtocolError(f"not a kvstrata frame: it starts with {bytes(magic)!r}; is this the channel port?")
    if version != FRAME_VERSION:
        raise ProtocolError(f"frame version {version}: this side speaks {FRAME_VERSION}")
    if kind not in _KNOWN:
        raise ProtocolError(f"frame kind {kind} is unknown")
    if message_bytes > MESSAGE_BYTES_MAX:
        raise ProtocolError(f"message of {message_bytes} bytes: the bound is {MESSAGE_BYTES_MAX}")
    if raw_bytes > RAW_BYTES_MAX or (raw_bytes and kind not in WITH_RAW):
        raise ProtocolError(f"{raw_bytes} raw bytes after a frame of kind {kind} are not allowed")
    return tuple.__new__(Header, (kind, request, message_bytes, raw_bytes))  # a fraction of a named tuple's own call
