"""Asks the worker side of rank 0 what the pool has, over ZMQ IPC, without ever blocking the scheduler.

Every question ends: with the worker's answer, or by the deadline as "nothing is there". A worker that is gone,
slow or sends nonsense costs hits, never time.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

import msgspec
import zmq

from kvstrata.client.arguments import REQUEST_CHARACTERS_MAX
from kvstrata.engine_adapter.connector.lookup_messages import LOOKUP_BYTES_MAX, LookupAnswer, LookupAsk

#: Questions under way; further ones are answered "nothing" at once.
OUTSTANDING_MAX: Final = 1024
#: Messages queued in the socket, each way.
QUEUE_MAX: Final = 1024
#: What could not be sent, or was answered "not yet", is asked again after so long.
RETRY_S: Final = 0.02


class LookupReason(Enum):
    """How a lookup ended. Only ``ANSWERED`` says anything about the pool."""

    ANSWERED = "answered"
    ABSENT = "absent"  #: the worker side could not ask the pool
    NOT_YET = "not_yet"  #: until the deadline
    LATE = "late"  #: no answer by the deadline
    SHED = "shed"  #: too many under way
    GARBLED = "garbled"  #: an answer of another shape than the question
    TOO_LARGE = "too_large"


@dataclass(frozen=True, slots=True)
class LookupEnd:
    """The end of one lookup. ``present``: one byte a hash and group, all 0 unless it was answered."""

    lookup_id: int
    present: tuple[bytes, ...]
    reason: LookupReason


class Lookups(Protocol):
    """What the scheduler side needs of a lookup client."""

    def ask(
        self, cache_salt: str, hashes: Sequence[bytes], *, prefetch: bool, request: str = "", trace: str = ""
    ) -> int: ...
    def poll(self) -> list[LookupEnd]: ...
    def fileno(self) -> int: ...
    def stats(self) -> dict[str, float]: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class _Pending:
    message: bytes
    counts: tuple[int, ...]
    deadline: float
    reason: LookupReason = LookupReason.LATE  # why, should it end now
    again: bool = False  # waits to be sent again


class LookupClient:
    """One DEALER socket. Used from one thread.

    ``hash_bytes``: of one hash. ``deadline_ms``: a lookup ends by then, counted from :meth:`ask`, at the next
    :meth:`poll`.
    """

    def __init__(
        self, endpoint: str, *, hash_bytes: int, deadline_ms: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._hash_bytes = hash_bytes
        self._deadline_s = deadline_ms / 1000
        self._clock = clock
        self._next_id = 1
        self._pending: dict[int, _Pending] = {}  # in the order of their deadlines
        self._retries: deque[tuple[float, int]] = deque()
        self._ended: list[LookupEnd] = []
        self._counts: Counter[str] = Counter()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(LookupAnswer)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(QUEUE_MAX)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, LOOKUP_BYTES_MAX)
        # Queue for a connected peer only: a worker that comes late is not flooded with questions long ended.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.connect(endpoint)
        # A socket's descriptor is readable for its *events*, and reading them once may consume the signal: what
        # was taken from the socket outside of poll() is signalled by a descriptor of our own.
        self._ready = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll(flags=select.EPOLL_CLOEXEC)
        self._epoll.register(self._ready, select.EPOLLIN)
        descriptor = self._socket.getsockopt(zmq.FD)
        assert isinstance(descriptor, int)
        self._epoll.register(descriptor, select.EPOLLIN)

    def ask(
        self, cache_salt: str, hashes: Sequence[bytes], *, prefetch: bool, request: str = "", trace: str = ""
    ) -> int:
        """Send a lookup of packed hashes, one entry a group. Its end comes from a later :meth:`poll`.

        ``request``: the name of who asks, cut to what the pool remembers of one; ``trace``: what it is traced under."""
        lookup_id = self._next_id
        self._next_id += 1
        self._counts["lookups"] += 1
        counts = tuple(len(packed) // self._hash_bytes for packed in hashes)
        name = request[:REQUEST_CHARACTERS_MAX]
        ask = LookupAsk(
            lookup_id=lookup_id,
            cache_salt=cache_salt,
            hashes=list(hashes),
            prefetch=prefetch,
            request=name,
            trace=trace,
        )
        pending = _Pending(self._encoder.encode(ask), counts, self._clock() + self._deadline_s)
        if len(self._pending) >= OUTSTANDING_MAX:
            self._end(lookup_id, pending, LookupReason.SHED)
        elif len(pending.message) > LOOKUP_BYTES_MAX:
            self._end(lookup_id, pending, LookupReason.TOO_LARGE)
        else:
            self._pending[lookup_id] = pending
            self._send(lookup_id, pending)
            self._receive()
        return lookup_id

    def poll(self) -> list[LookupEnd]:
        """Lookups that ended since the last call, each once. Never blocks."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._ready)
        self._receive()
        now = self._clock()
        while self._pending:
            lookup_id, pending = next(iter(self._pending.items()))
            if now < pending.deadline:
                break
            self._end(lookup_id, pending, pending.reason)
        while self._retries and self._retries[0][0] <= now:
            lookup_id = self._retries.popleft()[1]
            if pending_again := self._pending.get(lookup_id):
                pending_again.again = False
                self._send(lookup_id, pending_again)
        ended, self._ended = self._ended, []
        return ended

    def fileno(self) -> int:
        """Readable when :meth:`poll` has an answer (or, rarely, nothing). Deadlines do not make it readable."""
        return self._epoll.fileno()

    def _send(self, lookup_id: int, pending: _Pending) -> None:
        try:
            self._socket.send(pending.message, zmq.NOBLOCK)
        except zmq.Again:  # nobody is connected, or its queue is full
            self._send_again_later(lookup_id, pending)

    def _send_again_later(self, lookup_id: int, pending: _Pending) -> None:
        if not pending.again:
            pending.again = True
            self._counts["lookup_retries"] += 1
            self._retries.append((self._clock() + RETRY_S, lookup_id))

    def _receive(self) -> None:
        """Take what has arrived, until the socket says that there is nothing more: else it would not signal again."""
        for _ in range(QUEUE_MAX):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(frames)
        os.eventfd_write(self._ready, 1)  # a flood: the rest at the next call

    def _take(self, frames: list[bytes]) -> None:
        try:
            answer = self._decoder.decode(frames[0] if len(frames) == 1 else b"")
        except msgspec.DecodeError:
            self._counts["lookup_garbage"] += 1
            return
        pending = self._pending.get(answer.lookup_id)
        if pending is None:
            self._counts["lookup_answers_late"] += 1
        elif answer.not_yet:
            pending.reason = LookupReason.NOT_YET
            self._send_again_later(answer.lookup_id, pending)
        elif not answer.answered:
            self._end(answer.lookup_id, pending, LookupReason.ABSENT)
        elif tuple(map(len, answer.present)) != pending.counts:
            self._end(answer.lookup_id, pending, LookupReason.GARBLED)
        else:
            self._end(answer.lookup_id, pending, LookupReason.ANSWERED, tuple(answer.present))

    def _end(
        self, lookup_id: int, pending: _Pending, reason: LookupReason, present: tuple[bytes, ...] | None = None
    ) -> None:
        self._pending.pop(lookup_id, None)
        self._counts[f"lookups_{reason.value}"] += 1
        self._ended.append(LookupEnd(lookup_id, present or tuple(map(bytes, pending.counts)), reason))
        os.eventfd_write(self._ready, 1)

    def stats(self) -> dict[str, float]:
        """Lookups by how they ended, messages that made no sense, and how many are under way."""
        names = ("lookups", "lookup_retries", "lookup_garbage", "lookup_answers_late")
        counts = {name: float(self._counts[name]) for name in names}
        ended = {f"lookups_{reason.value}": float(self._counts[f"lookups_{reason.value}"]) for reason in LookupReason}
        return counts | ended | {"lookups_pending": float(len(self._pending))}

    def close(self) -> None:
        """At once; what is under way is forgotten. The second time it does nothing."""
        if not self._socket.closed:
            self._epoll.close()
            os.close(self._ready)
            self._socket.close(linger=0)
            self._context.term()
