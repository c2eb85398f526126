"""What an executor and its rank processes say to each other: msgpack messages over a unix socket.

::

    executor                                   rank
       |  StartRank (its config)  ------------>  |  loads its shard
       |  <---------------------  RankReady      |
       |  RunStep (one step)      ------------>  |
       |  <---------------------  StepDone       |
       |              or          RankFailed     |  and the rank ends
       |  SIGTERM, or end of file ------------>  |  it closes and ends

A frame is its length as a little-endian u32 and the message. Nothing else than these types is ever decoded.
"""

from __future__ import annotations

import socket
import struct
from typing import Final

import msgspec

from kvstrata.engine_adapter.connector.layout import PoolLayout
from kvstrata.engine_adapter.paged.cache.kv_cache_spec import KVCacheConfig
from kvstrata.engine_adapter.paged.config import EngineConfig
from kvstrata.engine_adapter.paged.outputs import ModelRunnerOutput, SchedulerOutput
from kvstrata.proto.errors import ProtocolError, Unavailable

#: How a rank ends after a :class:`RankFailed`.
EXIT_FAILED: Final = 1
MESSAGE_BYTES_MAX: Final = 1 << 28
_READ_BYTES: Final = 1 << 18
_LENGTH: Final = struct.Struct("<I")


class RankFds(msgspec.Struct, frozen=True, kw_only=True):
    """Descriptors that a rank inherits; told on its command line. ``peers``: other rank -> socket."""

    channel: int
    wake: int
    memory: int
    peers: dict[int, int]


class StartRank(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    config: EngineConfig
    rank: int
    lookup_endpoint: str


class RunStep(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    output: SchedulerOutput


class EngineShape(msgspec.Struct, frozen=True, kw_only=True):
    """What the scheduler must know of the model and its cache; the same for all ranks."""

    kv_config: KVCacheConfig
    layout: PoolLayout
    vocab_size: int
    eos_token_id: int | None
    max_model_len: int


class RankReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    shape: EngineShape


class StepDone(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    output: ModelRunnerOutput


class RankFailed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """``code``: the class of a :class:`KVError`, empty for a defect. The rank ends with ``EXIT_FAILED`` after it."""

    code: str
    message: str


ToRank = StartRank | RunStep
FromRank = RankReady | StepDone | RankFailed


class FrameSocket:
    """Frames over a stream socket, which it owns. ``name`` the other end, for errors; ``send_s`` bounds a send."""

    def __init__(self, sock: socket.socket, name: str, send_s: float | None = None) -> None:
        self._socket = sock
        self._name = name
        self._buffer = bytearray()
        sock.settimeout(send_s)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: bytes) -> None:
        """Raises :class:`Unavailable` when the other end is gone, or does not take it in time."""
        if len(message) > MESSAGE_BYTES_MAX:
            raise ProtocolError(f"a message of {len(message)} bytes: at most {MESSAGE_BYTES_MAX}")
        try:
            self._socket.sendall(_LENGTH.pack(len(message)) + message)
        except OSError as error:
            raise Unavailable(f"{self._name} does not take a message: {error}") from error

    def read(self) -> bytes | None:
        """One read of the socket; a frame when that completed one. Raises :class:`Unavailable` at the end."""
        frame = self._frame()
        if frame is not None:
            return frame
        try:
            piece = self._socket.recv(_READ_BYTES)
        except OSError as error:
            raise Unavailable(f"{self._name} is lost: {error}") from error
        if not piece:
            raise Unavailable(f"{self._name} closed its end")
        self._buffer += piece
        return self._frame()

    def receive(self) -> bytes:
        """The next frame; waits for it."""
        while (frame := self.read()) is None:
            pass
        return frame

    def close(self) -> None:
        self._socket.close()

    def _frame(self) -> bytes | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > MESSAGE_BYTES_MAX:
            raise ProtocolError(f"{self._name} announces {length} bytes: at most {MESSAGE_BYTES_MAX}")
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        frame = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        return frame
