"""What the coordinator and an engine process say to each other, and the pipe they say it over.

A frame is two u32 lengths (little-endian), a JSON header of one message, and a body of raw bytes.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, TypeVar

from kvstrata.proto.errors import ProtocolError, Unavailable

HEADER_BYTES_MAX = 1 << 20
BODY_BYTES_MAX = 1 << 28

_LENGTHS = struct.Struct("<II")


@dataclass(frozen=True, slots=True)
class Message:
    """Base of the frames; ``body`` travels as raw bytes."""

    kind: ClassVar[str] = ""


@dataclass(frozen=True, slots=True)
class Setup(Message):
    """First frame to an engine: how to reach the pool, and what it serves."""

    kind: ClassVar[str] = "setup"
    engine: int
    masters: str
    group: str
    block_bytes: int
    block_tokens: int
    private_blocks: int
    staging_blocks: int
    settle_s: float


@dataclass(frozen=True, slots=True)
class Ready(Message):
    """The engine has a client and a registered region. ``error`` says why it has not, empty when it has."""

    kind: ClassVar[str] = "ready"
    engine: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class Work(Message):
    """One request: ``body`` is n block numbers (int32), then n hashes (16 bytes each), head first.

    The first ``settled`` blocks were acknowledged by the pool a moment ago: the directory should show them.
    """

    kind: ClassVar[str] = "work"
    index: int
    salt: str
    hit_limit: int
    settled: int
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Outcome(Message):
    """What became of one request: block counts, payload bytes, measured seconds, statuses by name, and the blocks
    loaded by tier.

    ``body`` is one byte a block, 1 where this request stored it. A non-empty ``error`` is a failed request.
    """

    kind: ClassVar[str] = "outcome"
    index: int
    private_blocks: int = 0
    pool_blocks: int = 0
    loaded_bytes: int = 0
    stored_bytes: int = 0
    wrong_bytes: int = 0
    unsettled: bool = False
    lookup_s: float = 0.0
    load_s: float = 0.0
    store_s: float = 0.0
    verify_s: float = 0.0
    reasons: dict[str, int] = field(default_factory=dict)
    tiers: dict[str, int] = field(default_factory=dict)
    error: str = ""
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Finish(Message):
    """No more work: close the client and exit."""

    kind: ClassVar[str] = "finish"


def kinds_of(*messages: type[Message]) -> Mapping[str, type[Message]]:
    """What a :class:`Pipe` understands, by name."""
    return {message.kind: message for message in messages}


KINDS = kinds_of(Setup, Ready, Work, Outcome, Finish)
_M = TypeVar("_M", bound=Message)


class PipeClosed(Unavailable):
    """The process at the other end is gone."""


class Pipe:
    """One end of a stream socket that carries messages; every call has a deadline."""

    def __init__(self, stream: socket.socket, kinds: Mapping[str, type[Message]] = KINDS) -> None:
        self._stream = stream
        self._kinds = kinds

    def fileno(self) -> int:
        """Readable when there is something to receive; -1 when closed."""
        return self._stream.fileno()

    def send(self, message: Message, timeout_s: float) -> None:
        """Send one message. Raises :class:`PipeClosed`, or :class:`Unavailable` past the deadline."""
        record = asdict(message)
        body = record.pop("body", b"")
        header = json.dumps({"kind": message.kind, **record}).encode()
        self._stream.settimeout(timeout_s)
        try:
            self._stream.sendall(_LENGTHS.pack(len(header), len(body)) + header + body)
        except TimeoutError:
            raise Unavailable(f"the other end took no message in {timeout_s:g} s") from None
        except OSError as error:
            raise PipeClosed(f"the other end is gone ({error.strerror})") from None

    def receive(self, expected: type[_M], timeout_s: float) -> _M:
        """The next message, which must be an ``expected``. Raises as :meth:`send`, or :class:`ProtocolError`."""
        message = self.receive_any(timeout_s)
        if not isinstance(message, expected):
            raise ProtocolError(f"expected {expected.kind!r}, got {message.kind!r}")
        return message

    def receive_any(self, timeout_s: float) -> Message:
        """The next message of any kind."""
        until = time.monotonic() + timeout_s
        header_bytes, body_bytes = _LENGTHS.unpack(self._exactly(_LENGTHS.size, until))
        if header_bytes > HEADER_BYTES_MAX or body_bytes > BODY_BYTES_MAX:
            raise ProtocolError(f"a frame of {header_bytes} + {body_bytes} bytes is out of bounds")
        header = self._exactly(header_bytes, until)
        return self._decode(header, self._exactly(body_bytes, until))

    def close(self) -> None:
        self._stream.close()

    def _exactly(self, count: int, until: float) -> bytes:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            self._stream.settimeout(max(0.001, until - time.monotonic()))
            try:
                got = self._stream.recv_into(view)
            except TimeoutError:
                raise Unavailable("the other end sent no whole message in time") from None
            except OSError as error:
                raise PipeClosed(f"the other end is gone ({error.strerror})") from None
            if got == 0:
                raise PipeClosed("the other end is gone")
            view = view[got:]
        return bytes(data)

    def _decode(self, header: bytes, body: bytes) -> Message:
        try:
            record: dict[str, Any] = json.loads(header)
            cls = self._kinds[record.pop("kind")]
            if "body" in {part.name for part in fields(cls)}:
                record["body"] = body
            return cls(**record)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ProtocolError(f"a frame that is no message: {error}") from None
