"""Publishes KV events as vLLM does: a PUB socket, and a ROUTER that sends recent batches again.

A message is (topic, sequence, payload). The sequence has the second of the start in its upper half and counts batches
in its lower: a gap tells a reader that it has missed some, another upper half that the publisher is another one.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import zmq

from kvstrata.proto.errors import ConfigError
from kvstrata.proto.logs import get_logger
from kvstrata.transfer.kv_events.events import Batch, Event, encode
from kvstrata.transfer.loops import Loop, Loops

log = get_logger(__name__)

#: Batches that wait to be sent. Past it new ones are dropped, and leave a gap in the sequence.
WAITING_MAX: Final = 4096
#: Sent batches that can be asked for again: so many, and so many bytes.
KEPT_MAX: Final = 10_000
KEPT_BYTES_MAX: Final = 64 << 20
#: Messages that wait for one slow subscriber. Past it it misses some.
SUBSCRIBER_MAX: Final = 1000
POLL_MS: Final = 500
HEARTBEAT_MS: Final = 1000
SILENCE_MS: Final = 5000
#: A turn ends within this when the publisher is closed.
STOP_S: Final = 2.0
#: The end of an answer on the replay socket.
END: Final = (-1).to_bytes(8, "big", signed=True)
EPOCH_SHIFT: Final = 32
#: Of data parallelism, in each batch: there is one publisher an engine or master.
RANK: Final = 0
_WHERE: Final = re.compile(r"(?:tcp://)?(?:(?P<host>[^/:\s]+|\[[0-9a-fA-F:]+\]):)?(?P<port>\d{1,5}|\*)")


def endpoint_of(text: str) -> str:
    """A ZMQ endpoint to listen on, of ``PORT``, ``HOST:PORT`` or ``tcp://HOST:PORT`` (or ``ipc://PATH``).

    Loopback where no host is named; port 0 picks a free one. Raises :class:`ConfigError`.
    """
    text = str(text)
    if text.startswith("ipc://") and len(text) > len("ipc://"):
        return text
    found = _WHERE.fullmatch(text)
    if found is None or (found["port"] != "*" and int(found["port"]) > 65535):
        raise ConfigError(f"{text!r} is no place for KV events: write tcp://127.0.0.1:7403, or the port alone")
    return f"tcp://{found['host'] or '127.0.0.1'}:{'*' if found['port'] == '0' else found['port']}"


class Publisher:
    """Owns its sockets and a loop among ``loops``. :meth:`publish` never waits.

    ``clock`` gives Unix seconds. Raises :class:`ConfigError` for endpoints that cannot be listened on.
    """

    def __init__(
        self, loops: Loops, endpoint: str, replay: str = "", *, clock: Callable[[], float] = time.time
    ) -> None:
        self.dropped = 0  #: batches that found the queue full
        self.published = 0
        self._clock = clock
        self._lock = threading.Lock()
        self._sequence = int(clock()) << EPOCH_SHIFT
        self._waiting: deque[tuple[bytes, int, Batch]] = deque()
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._context = zmq.Context()
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._closed = False
        self._turning = False  #: the loop uses the sockets
        self._ending = False  #: they are let go of: now, or at the end of the turn
        self._replays: zmq.Socket[bytes] | None = None
        self.replay = ""
        try:
            self._socket, self.endpoint = self._listen(zmq.PUB, endpoint, SUBSCRIBER_MAX)
            if replay:
                self._replays, self.replay = self._listen(zmq.ROUTER, replay, KEPT_MAX + 1)
        except BaseException:
            self._context.destroy(linger=0)
            os.close(self._event)
            raise
        self._poller = zmq.Poller()
        self._poller.register(self._event, zmq.POLLIN)
        if self._replays is not None:
            self._poller.register(self._replays, zmq.POLLIN)
        self._loop = loops.add(Loop("kv events", 0.0, self._turn, bound_s=10.0))

    def publish(self, events: Sequence[Event], topic: str = "") -> None:
        """Have a batch sent, from any thread; nothing for no events, or after :meth:`close`."""
        if not events:
            return
        batch = Batch(self._clock(), list(events), RANK)
        with self._lock:
            if self._closed:
                return
            sequence = self._sequence
            self._sequence += 1
            if len(self._waiting) >= WAITING_MAX:
                self.dropped += 1
                return
            self._waiting.append((topic.encode(), sequence, batch))
            os.eventfd_write(self._event, 1)

    def skip(self, count: int) -> None:
        """Something was lost before it came here: readers see a gap."""
        with self._lock:
            self._sequence += count
            self.dropped += count

    def full(self) -> bool:
        """Whether the next batch may be dropped: who can wait should."""
        with self._lock:
            return len(self._waiting) >= WAITING_MAX // 2

    def close(self) -> None:
        """Send what waits, and end. Bounded; safe twice. Sockets are never taken from under a turn: one that does not
        end in time keeps them, and lets them go at its end."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            os.eventfd_write(self._event, 1)
        self._loop.stop(STOP_S)
        with self._lock:
            self._ending, turning = True, self._turning
        if turning:
            log.error("the publisher of KV events did not end in time", seconds=STOP_S)
        else:
            self._let_go()

    def _let_go(self) -> None:
        self._context.destroy(linger=200)
        os.close(self._event)

    # ------------------------------------------------------------------ the loop

    def _turn(self) -> None:
        with self._lock:
            if self._ending:
                return
            self._turning = True
        try:
            self._pass_on()
        finally:
            with self._lock:
                self._turning, ending = False, self._ending
            if ending:
                self._let_go()

    def _pass_on(self) -> None:
        ready = dict(self._poller.poll(POLL_MS))
        if self._event in ready:
            os.eventfd_read(self._event)
        self._send()
        if self._replays is not None and self._replays in ready:
            self._answer(self._replays)

    def _send(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    return
                topic, sequence, batch = self._waiting.popleft()
            payload = encode(batch)
            self._socket.send_multipart((topic, sequence.to_bytes(8, "big"), payload))
            self.published += 1
            self._kept.append((sequence, payload))
            self._kept_bytes += len(payload)
            while len(self._kept) > KEPT_MAX or self._kept_bytes > KEPT_BYTES_MAX:
                self._kept_bytes -= len(self._kept.popleft()[1])

    def _answer(self, replays: zmq.Socket[bytes]) -> None:
        asked = replays.recv_multipart()
        if len(asked) != 3 or len(asked[2]) != 8:
            log.warning("a request for KV events is malformed", frames=len(asked))
            return
        start = int.from_bytes(asked[2], "big")
        for sequence, payload in self._kept:
            if sequence >= start:
                replays.send_multipart((asked[0], b"", sequence.to_bytes(8, "big"), payload))
        replays.send_multipart((asked[0], b"", END, b""))

    def _listen(self, kind: int, endpoint: str, waiting_max: int) -> tuple[zmq.Socket[bytes], str]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, waiting_max)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, 1 << 10)  # of what comes in: subscriptions and requests
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
        socket.setsockopt(zmq.IPV6, 1 if "[" in endpoint else 0)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"cannot listen on {endpoint} for KV events ({error}): stop what listens there, or choose another port"
            ) from error
        return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)
