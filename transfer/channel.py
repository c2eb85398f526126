"""The framed channel, connecting side: one connection, and a bounded pool of them to one peer.

A connection carries one request at a time. The peer sends progress frames while it works, so silence
for ``silence_s`` means it is dead, stopped or cut off: the connection is closed, the peer's breaker
opens, and every further call fails at once until a probe gets through.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from google.protobuf.message import DecodeError, Message

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto import wire
from kvstrata.proto.errors import Busy, Closed, InvalidArgument, ProtocolError, Unavailable, from_code
from kvstrata.transfer.breaker import Breaker
from kvstrata.transfer.frames import Disconnected, Frame, FrameStream, Late, Silence, Silent

SILENCE_S: Final = 0.25
CONNECT_S: Final = 0.25
CONNECTIONS_MAX: Final = 16
#: An answer is polled for this long before the thread sleeps: waking up costs more than most answers take.
SPIN_S: Final = 50e-6
SOFTWARE: Final = "kvstrata 0.1.0"
UNIX_PREFIX: Final = "unix:"

M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True)
class Identity:
    """Who connects: goes into every Hello. ``session`` is 16 random bytes for one client process."""

    session: bytes
    role: str = "client"
    name: str = ""
    ticket: bytes = b""

    @classmethod
    def new(cls, role: str = "client", name: str = "", ticket: bytes = b"") -> Identity:
        return cls(os.urandom(16), role, name or f"{socket.gethostname()}:{os.getpid()}", ticket)

    def hello(self) -> pb.Hello:
        return pb.Hello(
            protocol=wire.PROTOCOL,
            protocol_min=wire.PROTOCOL_MIN,
            software=SOFTWARE,
            role=self.role,
            session=self.session,
            name=self.name,
            host=socket.gethostname(),
            boot_id=boot_id(),
            pid=os.getpid(),
            ticket=self.ticket,
        )


def boot_id() -> str:
    """This machine's boot id: two processes with the same one share a kernel."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def parse_address(address: str) -> tuple[socket.AddressFamily, str | tuple[str, int]]:
    """``HOST:PORT``, ``[v6]:PORT`` or ``unix:PATH``; raises :class:`InvalidArgument`."""
    if address.startswith(UNIX_PREFIX):
        return socket.AF_UNIX, address[len(UNIX_PREFIX) :]
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise InvalidArgument(f"address {address!r} is not HOST:PORT or unix:PATH")
    host = host.removeprefix("[").removesuffix("]")
    return (socket.AF_INET6 if ":" in host else socket.AF_INET), (host, int(port))


def expect(message: type[M], frame: Frame, kind: int) -> M:
    """Decode a frame's message; raises :class:`ProtocolError` for another kind or garbage."""
    if frame.kind != kind:
        raise ProtocolError(f"expected a frame of kind {wire.Kind(kind).name}, got {wire.Kind(frame.kind).name}")
    try:
        return message.FromString(frame.message)
    except DecodeError as error:
        raise ProtocolError(f"a {wire.Kind(kind).name} message that does not decode") from error


class Connection:
    """One connection after its hello. Not thread-safe: its holder has it alone."""

    def __init__(self, stream: FrameStream, silence_s: float) -> None:
        self.stream = stream
        self.hello = pb.HelloOk()
        self.silence_s = silence_s
        self.broken = False
        self.spins = (os.cpu_count() or 1) > 1 and not stream.passes_fds  # spinning reads take no descriptors
        self._request = 0
        _open_connections.add(self)

    @classmethod
    def open(
        cls,
        address: str,
        identity: Identity,
        *,
        silence_s: float = SILENCE_S,
        connect_s: float = CONNECT_S,
        passes_fds: bool = False,
    ) -> Connection:
        """Connect and say hello, within ``connect_s`` + ``silence_s``.

        Raises :class:`Unavailable`, or the peer's refusal (:class:`VersionMismatch`, ...).
        """
        family, where = parse_address(address)
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            sock.settimeout(connect_s)
            sock.connect(where)
            stream = FrameStream(sock, silence_s, passes_fds=passes_fds)
        except TimeoutError as error:
            sock.close()
            raise Silent(f"no answer from {address} for {connect_s * 1e3:.0f} ms") from error
        except OSError as error:
            sock.close()
            raise Disconnected(f"cannot connect to {address}: {error.strerror or error}") from error
        connection = cls(stream, silence_s)
        try:
            reply = connection.call(wire.Kind.HELLO, identity.hello().SerializeToString())
            connection.hello = expect(pb.HelloOk, reply, wire.Kind.HELLO_OK)
        except BaseException:
            connection.close()
            raise
        return connection

    def call(
        self,
        kind: int,
        message: bytes,
        deadline: float | None = None,
        *,
        raw: Sequence[memoryview] = (),
        fds: Sequence[int] = (),
        meanwhile: Callable[[], None] | None = None,
    ) -> Frame:
        """Send one request and read its answer; raw bytes of the answer stay in ``stream``.

        ``meanwhile`` runs between the two, while the peer is at work. Raises :class:`Unavailable` on
        silence, a broken connection or a passed ``deadline`` (monotonic seconds), and whatever error
        a Failure frame names.
        """
        self._request = (self._request + 1) & 0xFFFFFFFF
        left = self.silence_s if deadline is None else deadline - time.monotonic()
        if left < self.silence_s:
            return self._call_shortly(kind, message, left, raw, fds)
        try:
            self.stream.send(kind, self._request, message, raw, fds)
            if meanwhile is not None:
                meanwhile()
            elif self.spins and not raw:
                self.stream.spin(SPIN_S)
            return self._answer(deadline)
        except Silence as error:
            raise self._silent() from error
        except (Disconnected, Silent, Late, ProtocolError):
            self.broken = True
            raise

    def tell(self, kind: int, message: bytes) -> None:
        """Send a one-way frame."""
        try:
            self.stream.send(kind, 0, message)
        except Unavailable:
            self.broken = True
            raise

    def receive_raw(
        self,
        views: Sequence[memoryview],
        deadline: float | None = None,
        filled: Callable[[int], None] | None = None,
    ) -> None:
        """Fill ``views`` with the last answer's raw bytes; silence counts as in :meth:`call`."""
        try:
            self.stream.receive_raw(views, deadline, filled)
        except Silence as error:
            raise self._silent() from error
        except (Disconnected, Silent, Late, ProtocolError):
            self.broken = True
            raise

    def _silent(self) -> Silent:
        self.broken = True
        return Silent(f"silent for {self.silence_s * 1e3:.0f} ms")

    def _call_shortly(
        self, kind: int, message: bytes, left_s: float, raw: Sequence[memoryview], fds: Sequence[int]
    ) -> Frame:
        """A call whose deadline is nearer than the silence bound: running out says nothing of the peer."""
        if left_s <= 0:
            raise Late("the deadline passed before the request was sent")
        self.stream.set_silence(left_s)
        try:
            self.stream.send(kind, self._request, message, raw, fds)
            return self._answer(time.monotonic() + left_s)  # progress frames do not stretch it
        except (Silence, Silent) as error:
            self.broken = True
            raise Late(f"no answer within the {left_s * 1e3:.0f} ms that were left") from error
        except (Disconnected, Late, ProtocolError):
            self.broken = True
            raise
        finally:
            if not self.broken:  # also after a refusal: the connection goes on to other calls
                self.stream.set_silence(self.silence_s)

    def _answer(self, deadline: float | None) -> Frame:
        while True:
            frame = self.stream.receive(deadline)
            if frame.request == self._request and frame.kind != wire.Kind.FAILURE:
                return frame
            if frame.kind == wire.Kind.PROGRESS:
                if deadline is not None and time.monotonic() > deadline:
                    raise Late("still at work when the deadline passed")
                continue
            if frame.kind == wire.Kind.FAILURE:
                failure = expect(pb.Failure, frame, wire.Kind.FAILURE)
                raise from_code(failure.code, failure.message)
            raise ProtocolError(f"answer to request {frame.request}, expected {self._request}")

    def close(self) -> None:
        self.broken = True
        self.stream.close()


_open_connections: weakref.WeakSet[Connection] = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked child must not hold the parent's connections open: their end is the parent's death."""
    for connection in list(_open_connections):
        connection.broken = True
        with contextlib.suppress(OSError):
            os.close(connection.stream.sock.detach())


os.register_at_fork(after_in_child=_close_in_child)


class Channel:
    """Connections to one peer: a bounded pool, a breaker, and calls from any thread.

    ``addresses`` are tried in order (a unix socket before the same node's TCP port). A call made on an
    idle connection that turns out closed is repeated once on a fresh one: the request never reached a
    living peer. ``accept`` may refuse a peer by its hello (another incarnation). With
    ``self_probing`` a caller makes the probe that closes an open breaker; without it the owner must
    call :meth:`probe` now and then, and no caller ever waits for a dead peer.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        identity: Identity,
        *,
        accept: Callable[[pb.HelloOk], None] = lambda _: None,
        silence_s: float = SILENCE_S,
        connections_max: int = CONNECTIONS_MAX,
        self_probing: bool = True,
    ) -> None:
        self.addresses = tuple(addresses)
        self.identity = identity
        self.silence_s = silence_s
        self.breaker = Breaker()
        self.hello: pb.HelloOk | None = None
        self.address = self.addresses[0]
        self._accept = accept
        self._self_probing = self_probing
        self._connections_max = connections_max
        self._free: list[Connection] = []
        self._in_use = 0
        self._waiting = 0
        self._lock = threading.Lock()
        self._freed = threading.Condition(self._lock)
        self._closed = False
        self._pid = os.getpid()

    # ------------------------------------------------------------------ calls

    def call(self, kind: int, message: bytes, deadline: float, *, meanwhile: Callable[[], None] | None = None) -> Frame:
        """One request, one answer without raw bytes. Raises as :meth:`Connection.call`."""
        connection, reused = self._checkout(deadline)
        try:
            return self._attempt(connection, reused, kind, message, deadline, (), meanwhile)
        except (Disconnected, Silent) as error:
            self.failed(str(error))
            raise
        finally:
            self._checkin(connection)

    def tell(self, kind: int, message: bytes, deadline: float) -> None:
        """A one-way message."""
        connection, _ = self._checkout(deadline)
        try:
            connection.tell(kind, message)
        except (Disconnected, Silent) as error:
            self.failed(str(error))
            raise
        finally:
            self._checkin(connection)

    @contextlib.contextmanager
    def exchange(
        self, kind: int, message: bytes, deadline: float, raw: Sequence[memoryview] = ()
    ) -> Iterator[tuple[Connection, Frame]]:
        """One request; yields (connection, answer) with the answer's raw bytes unread.

        The connection is the caller's until the block ends. Raw bytes left unread close it.
        """
        connection, reused = self._checkout(deadline)
        try:
            yield connection, self._attempt(connection, reused, kind, message, deadline, raw, None)
        except (Disconnected, Silent) as error:
            self.failed(str(error))
            raise
        finally:
            self._checkin(connection)

    def _attempt(
        self,
        connection: Connection,
        reused: bool,
        kind: int,
        message: bytes,
        deadline: float,
        raw: Sequence[memoryview],
        meanwhile: Callable[[], None] | None,
    ) -> Frame:
        try:
            return connection.call(kind, message, deadline, raw=raw, meanwhile=meanwhile)
        except Disconnected:
            if not reused:
                raise
        connection.stream.close()
        self._replace(connection)
        return connection.call(kind, message, deadline, raw=raw, meanwhile=meanwhile)

    # ------------------------------------------------------------------ health

    def failed(self, reason: str) -> None:
        """Open the breaker; idle connections are closed (they lead to the same peer)."""
        self.breaker.failed(time.monotonic(), reason)
        with self._lock:
            idle, self._free = self._free, []
        for connection in idle:
            connection.close()

    def probe(self) -> bool:
        """If the breaker is open and a probe is due, try the peer on a new connection."""
        if self._closed or not self.breaker.due(time.monotonic()):
            return self.breaker.closed
        try:
            connection = self._open()
        except Exception as error:  # noqa: BLE001  any refusal keeps the breaker open, with its reason
            self.breaker.failed(time.monotonic(), str(error))
            return False
        self.breaker.succeeded()
        connection.close()
        return True

    # ------------------------------------------------------------------ connections

    def _checkout(self, deadline: float) -> tuple[Connection, bool]:
        """Take an idle connection, or open one; (connection, whether it was idle)."""
        if self._closed or self._pid != os.getpid():
            self._refuse_use()
        breaker = self.breaker
        if breaker.open_since is not None and not (self._self_probing and breaker.due(time.monotonic())):
            raise Unavailable(f"{self.address}: {breaker.reason} (breaker open)")
        with self._lock:
            while self._in_use >= self._connections_max:
                self._waiting += 1
                freed = self._freed.wait(deadline - time.monotonic())
                self._waiting -= 1
                if not freed:
                    raise Busy(f"{self.address}: all connections are in use; the deadline passed waiting for one")
            self._in_use += 1
            if self._free:
                return self._free.pop(), True
        try:
            connection = self._open()
        except BaseException as error:
            self._give_back(None)
            if isinstance(error, Disconnected | Silent):
                self.failed(str(error))
            raise
        breaker.succeeded()
        return connection, False

    def _checkin(self, connection: Connection) -> None:
        keep = not (connection.broken or connection.stream.raw_left or self._closed)
        self._give_back(connection if keep else None)
        if not keep:
            connection.close()

    def _give_back(self, connection: Connection | None) -> None:
        with self._lock:
            if connection is not None:
                self._free.append(connection)
            self._in_use -= 1
            if self._waiting:
                self._freed.notify()

    def _open(self) -> Connection:
        """Try each address; a silent peer is not tried again at another of its addresses."""
        problem: Unavailable | None = None
        for address in self.addresses:
            try:
                connection = Connection.open(address, self.identity, silence_s=self.silence_s)
            except Silent:
                raise
            except Unavailable as error:
                problem = error
                continue
            try:
                self._accept(connection.hello)
            except BaseException:
                connection.close()
                raise
            self.address, self.hello = address, connection.hello
            return connection
        assert problem is not None
        raise problem

    def _replace(self, connection: Connection) -> None:
        """Give a dead idle connection a fresh stream; its holder keeps the object."""
        fresh = self._open()
        connection.stream, connection.hello, connection.broken = fresh.stream, fresh.hello, False
        connection._request = fresh._request

    def _refuse_use(self) -> None:
        if self._pid != os.getpid():
            raise Closed("this channel belongs to the parent process: open a new client after fork")
        raise Closed(f"the channel to {self.address} is closed")

    def close(self) -> None:
        """Close idle connections now, those in use as they come back. Safe twice."""
        with self._lock:
            self._closed = True
            idle, self._free = self._free, []
        for connection in idle:
            connection.close()
