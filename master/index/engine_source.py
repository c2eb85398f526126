"""One engine's KV events over ZMQ: a SUB socket, its connection's state, and a socket that asks for past batches."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvstrata.master.index.engine_feed import EngineFeed
from kvstrata.proto.errors import ConfigError, InvalidArgument
from kvstrata.transfer.kv_events.events import PAYLOAD_BYTES_MAX, Event, decode
from kvstrata.transfer.kv_events.publisher import END, HEARTBEAT_MS, SILENCE_MS

#: Batches that wait in a socket; past it the publisher's are lost, and leave a gap.
WAITING_MAX: Final = 10_000
#: An answer on the replay socket ends within this, or is done without.
REPLAY_S: Final = 5.0
#: Messages read in one go, so that others have their turn.
READ_MAX: Final = 500
_CONNECTED: Final = zmq.EVENT_HANDSHAKE_SUCCEEDED
_BROKEN: Final = zmq.EVENT_DISCONNECTED


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """``NAME=tcp://HOST:PORT[,replay=tcp://HOST:PORT]``."""

    name: str
    events: str
    replay: str = ""


def parse_engine(text: str) -> EngineAddress:
    """Raises :class:`ConfigError` with an example."""
    name, equals, rest = str(text).partition("=")
    events, *options = rest.split(",")
    named = dict(option.partition("=")[::2] for option in options)
    sockets = [events, *named.values()]
    if not name or not equals or set(named) - {"replay"} or not all("://" in each for each in sockets):
        raise ConfigError(
            f"{text!r} is no engine's events: write NAME=tcp://HOST:5557, or "
            "NAME=tcp://HOST:5557,replay=tcp://HOST:5558"
        )
    return EngineAddress(name, events, named.get("replay", ""))


class EngineSource:
    """The sockets of one engine, for one thread. What comes goes to ``feed``."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: EngineAddress, feed: EngineFeed) -> None:
        self.address = address
        self.feed = feed
        self.live = False
        self.changed_at = time.monotonic()  #: when ``live`` last changed
        self.heard_at = self.changed_at
        self.malformed = 0
        self.problem = ""
        self._context = context
        self._replay: zmq.Socket[bytes] | None = None
        self._replay_ends = 0.0
        self._socket = self._open(zmq.SUB, address.events)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._monitor = self._socket.get_monitor_socket(_CONNECTED | _BROKEN)
        self._connect(self._socket, address.events)

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """What to poll for reading."""
        replay = [] if self._replay is None else [self._replay]
        return [self._socket, self._monitor, *replay]

    def read(self) -> None:
        """Take in what is there; never waits."""
        self._each(self._monitor, lambda frames: None, monitor=True)
        self._each(self._socket, self._published)
        if self._replay is not None:
            self._each(self._replay, self._replayed)
        if self._replay is not None and time.monotonic() >= self._replay_ends:
            self.problem = f"its replay socket {self.address.replay} does not answer"
            self._end_replay()

    def _each(self, socket: zmq.Socket[bytes], take: Callable[[list[bytes]], None], *, monitor: bool = False) -> None:
        for _ in range(READ_MAX):
            if socket.closed or not socket.poll(0):
                return
            if monitor:
                self._moved(recv_monitor_message(socket)["event"])
            else:
                take(socket.recv_multipart())

    def _moved(self, event: int) -> None:
        live = event == _CONNECTED
        if live != self.live:
            self.live, self.changed_at = live, time.monotonic()
        if live:
            self.heard_at = time.monotonic()
            self._ask(self.feed.connected())

    def _published(self, frames: list[bytes]) -> None:
        self.heard_at = time.monotonic()
        if len(frames) != 3 or len(frames[1]) != 8:
            self.malformed += 1
            return
        said = self._decoded(frames[2])
        self._ask(self.feed.batch(int.from_bytes(frames[1], "big"), said, len(frames[2])))

    def _replayed(self, frames: list[bytes]) -> None:
        self.heard_at = time.monotonic()
        if len(frames) != 3 or len(frames[1]) != 8:
            self.malformed += 1
        elif frames[1] == END:
            self.problem = ""
            self._end_replay()
        else:
            self.feed.replay(int.from_bytes(frames[1], "big"), self._decoded(frames[2]))

    def _decoded(self, payload: bytes) -> list[Event]:
        try:
            return decode(payload).events
        except InvalidArgument:
            self.malformed += 1
            return []

    def _ask(self, sequence: int | None) -> None:
        if sequence is None:
            return
        self._close_replay()  # an answer to an earlier question would be taken for this one's
        self._replay = self._open(zmq.DEALER, self.address.replay)
        self._connect(self._replay, self.address.replay)
        self._replay.send_multipart((b"", sequence.to_bytes(8, "big")), zmq.NOBLOCK)
        self._replay_ends = time.monotonic() + REPLAY_S

    def _end_replay(self) -> None:
        self._close_replay()
        self.feed.replayed()

    def _close_replay(self) -> None:
        if self._replay is not None:
            self._replay.close(0)
            self._replay = None

    def _open(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, WAITING_MAX)
        socket.setsockopt(zmq.MAXMSGSIZE, PAYLOAD_BYTES_MAX)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        socket.setsockopt(zmq.IPV6, 1 if "[" in endpoint else 0)
        return socket

    def _connect(self, socket: zmq.Socket[bytes], endpoint: str) -> None:
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"engine {self.address.name}: {endpoint!r} is no ZMQ endpoint ({error})") from error

    def close(self) -> None:
        self._close_replay()
        self._socket.disable_monitor()
        self._socket.close(0)
