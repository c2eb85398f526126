"""One connection of the framed channel, connecting side: hello, the proof of a ticket, then one request at a time.

The peer sends progress frames while it works, so silence for ``silence_s`` means that it is dead, stopped
or cut off.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from google.protobuf.message import DecodeError, Message

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto import wire
from kvstrata.proto.errors import (
    KVError,
    ProtocolError,
    TicketExpired,
    TicketNotYetValid,
    Unauthenticated,
    Unavailable,
    from_code,
)
from kvstrata.transfer.cores import usable_cores
from kvstrata.transfer.frames import Disconnected, Frame, FrameStream, Late, Silence, Silent
from kvstrata.transfer.identity import Identity, parse_address
from kvstrata.transfer.security.tickets import TicketSource, check_answer, greeting_of, prove

#: A stopped or cut-off peer is to be a miss within 250 ms: what is not this wait is for threads to wake and to report.
SILENCE_S: Final = 0.22
CONNECT_S: Final = 0.22
#: An answer is polled for this long before the thread sleeps: waking up costs more than most answers take.
SPIN_S: Final = 50e-6
#: Where answers take longer than that, or the peer has no core of its own, so many calls go by between two attempts.
UNPOLLED_MAX: Final = 63

_FAILURE: Final = int(wire.Kind.FAILURE)

M = TypeVar("M", bound=Message)


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
        self.spins = usable_cores() > 1 and not stream.passes_fds  # spinning reads take no descriptors
        self.tickets: TicketSource | None = None  #: what is proved here; None where nothing is asked for
        self.ticket: pb.Ticket | None = None  #: the one that was proved last
        self.greeting = b""  #: both hellos: what is proved is about them
        self._request = 0
        self._vain = 0  #: calls that the last poll in vain kept from being polled for
        self._calls_unpolled = 0
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
        hello_only: bool = False,
        accept: Callable[[pb.HelloOk], None] = lambda _: None,
    ) -> Connection:
        """Connect, say hello, and prove the identity's ticket, within ``connect_s`` + 2 ``silence_s``.

        ``hello_only``: the caller wants the answer to the hello and perhaps a ping; nothing is proved.
        ``accept`` raises when the hello is not that of the peer that is meant: then nothing is proved to it either.
        What it is given is what the peer says, and is only known to be so once this returns.

        Raises :class:`Unavailable`, the peer's refusal (:class:`VersionMismatch`, ...), or :class:`Unauthenticated`:
        the peer asks for a ticket and there is none, it does not take this one, or it has not got the ticket keys
        itself. A side that has tickets talks to nobody who does not ask for one.
        """
        tickets = identity.tickets if not hello_only else None
        ticket = tickets.current() if tickets is not None else None  # without one there is no need to connect
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
            hello = identity.hello().SerializeToString()
            reply = connection.call(wire.Kind.HELLO, hello)
            connection.hello = expect(pb.HelloOk, reply, wire.Kind.HELLO_OK)
            connection.greeting = greeting_of(hello, reply.message)
            accept(connection.hello)
            if not hello_only:
                connection._authenticate(address, tickets, ticket)
        except BaseException:
            connection.close()
            raise
        return connection

    def _authenticate(self, address: str, tickets: TicketSource | None, ticket: pb.Ticket | None) -> None:
        asked = bool(self.hello.challenge)
        if ticket is None:
            if asked:
                raise Unauthenticated(
                    f"{address} wants a ticket: give a token (Client(token=...), --token-file or KVSTRATA_TOKEN_FILE), "
                    "and a node --ticket-keys"
                )
            return
        if not asked:
            raise Unauthenticated(
                f"{address} asks for no ticket, and this side has one: is it one of the pool? Give it --ticket-keys"
            )
        self.tickets = tickets
        self.prove(ticket)

    def prove(self, ticket: pb.Ticket, deadline: float | None = None) -> None:
        """Show that this side was given ``ticket``, and have the other one show that it has the ticket keys.

        Raises :class:`Unauthenticated` or :class:`TicketExpired` when it is not taken, :class:`Unavailable` where it
        is not good yet, and as :meth:`call`.
        """
        assert self.tickets is not None
        proof = prove(ticket, self.greeting)
        try:
            frame = self.call(wire.Kind.PROVE, proof.SerializeToString(), deadline)
            check_answer(ticket, self.greeting, expect(pb.ProveOk, frame, wire.Kind.PROVE_OK))
        except (Unauthenticated, TicketExpired) as error:
            self.broken |= isinstance(error, Unauthenticated)
            self.tickets.refused(ticket)
            raise
        except TicketNotYetValid as error:  # another one would be so, too
            self.broken = True
            raise Unavailable(str(error)) from error
        self.ticket = ticket

    def refresh(self, deadline: float | None = None) -> None:
        """Prove a fresh ticket, if there is one: to be called before a request. Raises as :meth:`prove`.

        While there is none the one that was proved stands, and the other side says how long.
        """
        if self.tickets is None:
            return
        try:
            ticket = self.tickets.current()
        except KVError:
            return
        if ticket is not self.ticket:
            self.prove(ticket, deadline)

    def take_over(self, fresh: Connection) -> None:
        """Go on with another connection's stream, in place of one that has ended; its holder keeps this object."""
        self.stream, self.hello, self.broken = fresh.stream, fresh.hello, False
        self.tickets, self.ticket, self.greeting = fresh.tickets, fresh.ticket, fresh.greeting
        self._request = fresh._request

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
            return self._call_shortly(kind, message, left, raw, fds, meanwhile)
        try:
            self.stream.send(kind, self._request, message, raw, fds)
            if meanwhile is not None:
                meanwhile()
            elif self.spins and not raw:
                self._spin()
            frame = self.stream.receive(deadline)
            if frame.request == self._request and frame.kind != _FAILURE:
                return frame
            return self._answer(deadline, frame)
        except Silence as error:
            raise self._silent() from error
        except (Disconnected, Silent, Late, ProtocolError):
            self.broken = True
            raise

    def _spin(self) -> None:
        """Poll for the answer, unless that was in vain lately: then ever less often, and soon again where it pays."""
        if self._calls_unpolled:
            self._calls_unpolled -= 1
            return
        if self.stream.spin(SPIN_S):
            self._vain = 0
        else:
            self._vain = min(2 * self._vain + 1, UNPOLLED_MAX)
            self._calls_unpolled = self._vain

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
        self,
        kind: int,
        message: bytes,
        left_s: float,
        raw: Sequence[memoryview],
        fds: Sequence[int],
        meanwhile: Callable[[], None] | None,
    ) -> Frame:
        """A call whose deadline is nearer than the silence bound: running out says nothing of the peer."""
        if left_s <= 0:
            raise Late("the deadline passed before the request was sent")
        deadline = time.monotonic() + left_s  # progress frames do not stretch it
        self.stream.set_silence(left_s)
        try:
            self.stream.send(kind, self._request, message, raw, fds)
            if meanwhile is not None:
                meanwhile()
            return self._answer(deadline, self.stream.receive(deadline))
        except (Silence, Silent) as error:
            self.broken = True
            raise Late(f"no answer within the {left_s * 1e3:.0f} ms that were left") from error
        except (Disconnected, Late, ProtocolError):
            self.broken = True
            raise
        finally:
            if not self.broken:  # also after a refusal: the connection goes on to other calls
                self.stream.set_silence(self.silence_s)

    def _answer(self, deadline: float | None, frame: Frame) -> Frame:
        """The answer, of which ``frame`` is what came first: itself, a sign of work before it, or a failure."""
        while frame.request != self._request or frame.kind == _FAILURE:
            if frame.kind == _FAILURE:
                failure = expect(pb.Failure, frame, wire.Kind.FAILURE)
                raise from_code(failure.code, failure.message)
            if frame.kind != wire.Kind.PROGRESS:
                raise ProtocolError(f"answer to request {frame.request}, expected {self._request}")
            if deadline is not None and time.monotonic() > deadline:
                raise Late("still at work when the deadline passed")
            frame = self.stream.receive(deadline)
        return frame

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
