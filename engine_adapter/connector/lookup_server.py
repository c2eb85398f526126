"""Answers the scheduler side's lookups: a ROUTER socket, one thread that owns it, a few that ask the pool."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import zmq

from kvstrata.engine_adapter.connector.lookup_messages import LOOKUP_BYTES_MAX, LookupAnswer, LookupAsk
from kvstrata.engine_adapter.connector.workers import Workers
from kvstrata.proto.errors import InvalidArgument
from kvstrata.proto.logs import get_logger
from kvstrata.transfer.loops import Loop

log = get_logger(__name__)

#: One slow answer must not hold up the others.
THREADS: Final = 4
QUEUE_MAX: Final = 256
POLL_MS: Final = 200
IPC_PREFIX: Final = "ipc://"
STOP_S: Final = 2.0
#: What libzmq takes from a peer before it ends the connection; between this and LOOKUP_BYTES_MAX is counted.
FRAME_BYTES_MAX: Final = 2 * LOOKUP_BYTES_MAX


class _Asked(NamedTuple):
    peer: bytes
    ask: LookupAsk


class LookupServer:
    """Serves ``answer(ask)`` at a ZMQ endpoint until :meth:`close`.

    ``answer`` is called from several threads and must be bounded in time (``bound_s``). Past ``QUEUE_MAX``
    waiting questions the oldest is dropped: who asked has a deadline. What is no question is counted and ignored.
    """

    def __init__(self, endpoint: str, answer: Callable[[LookupAsk], LookupAnswer], *, bound_s: float) -> None:
        self._answer = answer
        self._encoder = msgspec.msgpack.Encoder()
        self._lock = threading.Lock()
        self._asked: deque[_Asked] = deque()
        self._answered: deque[tuple[bytes, bytes]] = deque()
        self._counts = {"asked": 0, "answered": 0, "dropped": 0, "garbage": 0, "unsent": 0}
        self._context = zmq.Context(1)
        self._socket = self._bind(endpoint)
        self._file = Path(endpoint.removeprefix(IPC_PREFIX)) if endpoint.startswith(IPC_PREFIX) else None
        self._inode = self._file.stat().st_ino if self._file is not None else 0
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_fd, zmq.POLLIN)
        self._workers = Workers("connector-lookup", THREADS, self._step, bound_s=bound_s)
        self._loop = Loop("connector-lookups", 0.0, self._turn, bound_s=5.0).start()
        self._closed = False

    def stats(self) -> dict[str, float]:
        """Messages since the start: ``lookups_asked`` and what became of them, ``lookups_garbage`` ignored."""
        return {f"lookups_{name}": float(count) for name, count in self._counts.items()}

    def ages_s(self) -> dict[str, float]:
        return {self._loop.name: self._loop.age_s(), **self._workers.ages_s()}

    def failures(self) -> int:
        return self._loop.failures + self._workers.failures()

    def problems(self) -> list[str]:
        return [problem for problem in (self._loop.problem(), *self._workers.problems()) if problem]

    def close(self) -> None:
        """Bounded; the socket's file is gone when it returns. Safe twice."""
        if self._closed:
            return
        self._closed = True
        self._loop.stop(0.0)
        self._signal()
        self._loop.stop(STOP_S)
        self._workers.stop(STOP_S)
        self._socket.close(0)
        self._context.term()
        self._remove_file()
        with self._lock:
            os.close(self._wake_fd)
            self._wake_fd = -1

    def _bind(self, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            socket.close(0)
            self._context.term()
            raise InvalidArgument(f"lookup endpoint {endpoint!r}: {error.strerror or error}") from error
        return socket

    def _remove_file(self) -> None:
        """libzmq leaves it behind. Another server may have bound the path since: that one's file stays."""
        if self._file is not None:
            with suppress(FileNotFoundError):
                if self._file.stat().st_ino == self._inode:
                    self._file.unlink()

    # ------------------------------------------------------------------ the socket's thread

    def _turn(self) -> None:
        ready = dict(self._poller.poll(POLL_MS))
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
        self._send_all()
        if self._socket in ready:
            self._receive_all()

    def _receive_all(self) -> None:
        """What is there now, up to a queue's worth, so that answers get their turn."""
        for _ in range(QUEUE_MAX):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._receive(frames)

    def _receive(self, frames: list[bytes]) -> None:
        ask = decoded(frames)
        if ask is None:
            self._counts["garbage"] += 1
            return
        self._counts["asked"] += 1
        with self._lock:
            self._asked.append(_Asked(frames[0], ask))
            if len(self._asked) > QUEUE_MAX:
                self._asked.popleft()
                self._counts["dropped"] += 1
        self._workers.wake()

    def _send_all(self) -> None:
        while self._answered:
            peer, message = self._answered.popleft()
            try:
                self._socket.send_multipart([peer, message], zmq.NOBLOCK)
                self._counts["answered"] += 1
            except zmq.ZMQError as error:
                # Its queue is full, or it is gone: it does not read, and its deadline is its own.
                self._counts["unsent"] += 1
                log.warning("lookup answer not sent", reason=error.strerror or str(error))

    # ------------------------------------------------------------------ the asking threads

    def _step(self) -> bool:
        with self._lock:
            if not self._asked:
                return False
            peer, ask = self._asked.popleft()
        answer = LookupAnswer(lookup_id=ask.lookup_id, present=[b""] * len(ask.hashes), answered=False)
        try:
            answer = self._answer(ask)
        finally:
            self._answered.append((peer, self._encoder.encode(answer)))
            self._signal()
        return True

    def _signal(self) -> None:
        with self._lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)


_decoder = msgspec.msgpack.Decoder(LookupAsk)


def decoded(frames: list[bytes]) -> LookupAsk | None:
    """The question in a message of [peer, question]; None when it is none."""
    if len(frames) != 2 or len(frames[1]) > LOOKUP_BYTES_MAX:
        return None
    try:
        return _decoder.decode(frames[1])
    except msgspec.MsgspecError:
        return None
