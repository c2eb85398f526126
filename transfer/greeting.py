"""How a connection begins, accepting side: a hello, and where tickets are on the proof of one.

Whatever comes before that is small, comes in time, and is answered by nothing but where the pool is. Connections that
have not proved anything are bounded in number, apart from all others, and past the bound the oldest one is closed: who
has a ticket proves it in a few milliseconds, so those that hang about do not keep anybody out.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Final

from google.protobuf.message import DecodeError

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto import wire
from kvstrata.proto.errors import ProtocolError, Refused, Unauthenticated, VersionMismatch
from kvstrata.transfer.frames import Frame
from kvstrata.transfer.security.admission import Admission
from kvstrata.transfer.security.rights import ANY_PEER, EVERYTHING, Rights
from kvstrata.transfer.security.tickets import CLAIMS_BYTES_MAX, NONCE_BYTES, greeting_of
from kvstrata.transfer.sessions import STALL_S, ServerConnection, Session, SessionBook

#: A hello, and the proof of a ticket after it, are there within this.
HELLO_S: Final = 5.0
HELLO_BYTES_MAX: Final = 16 << 10
#: Of each name in a hello: lists of clients have them all.
NAME_CHARACTERS_MAX: Final = 1024
PROOF_BYTES_MAX: Final = CLAIMS_BYTES_MAX + 1024


class Greeter:
    """``hello`` answers a newcomer, ``refused_version`` is told of software that speaks no common version."""

    def __init__(
        self,
        hello: Callable[[Session], pb.HelloOk],
        book: SessionBook,
        admission: Admission,
        refused_version: Callable[[str], None],
    ) -> None:
        self._hello = hello
        self._book = book
        self._admission = admission
        self._refused_version = refused_version
        self._unproved: dict[ServerConnection, None] = {}  #: oldest first
        self._lock = threading.Lock()

    @property
    def unproved(self) -> int:
        """Connections that may not ask for anything yet; 0 where tickets are off."""
        return len(self._unproved)

    def greet(self, connection: ServerConnection) -> None:
        """Returns when the connection may ask. Raises :class:`KVError` when it may not."""
        if self._admission.asks:
            self._wait(connection)
        try:
            connection.stream.hurry(time.monotonic() + HELLO_S, HELLO_BYTES_MAX)
            frame = connection.stream.receive()
            hello = self._read(frame)
            if self._admission.asks:
                self._ask(connection, hello, frame)
            else:
                self._enter(connection, hello, ANY_PEER if hello.role == "node" else EVERYTHING)
                self._answer(connection, hello, frame.request, self._hello(connection.owner))
        finally:
            with self._lock:
                self._unproved.pop(connection, None)
        connection.stream.at_ease(STALL_S)

    def leave(self, connection: ServerConnection) -> None:
        """The connection has closed."""
        if connection.account is not None:
            self._admission.leave(*connection.client)
        self._book.leave(connection)

    def renew(self, connection: ServerConnection, message: bytes) -> bytes:
        """A fresh ticket on a connection that has proved one; the answer's message. Raises as :func:`verify`."""
        if not connection.challenge:
            raise Refused("tickets are off here: there is nothing to prove")
        rights, answer, signature = self._admission.prove(message, connection.greeting)
        if rights.subject != connection.owner.subject:
            raise Unauthenticated("the ticket is not good here")
        connection.rights, connection.signature = rights, signature
        return answer.SerializeToString()

    # ------------------------------------------------------------------ the hello

    def _read(self, frame: Frame) -> pb.Hello:
        if frame.kind != wire.Kind.HELLO:
            raise ProtocolError("the first frame must be a hello")
        try:
            hello = pb.Hello.FromString(frame.message)
        except DecodeError as error:
            raise ProtocolError("a hello that does not decode") from error
        if hello.protocol < wire.PROTOCOL_MIN or hello.protocol_min > wire.PROTOCOL:
            self._refused_version(hello.software)
            raise VersionMismatch(
                f"{hello.software or 'the client'} speaks protocol {hello.protocol_min} to {hello.protocol}, "
                f"this side {wire.PROTOCOL_MIN} to {wire.PROTOCOL}: upgrade the older one"
            )
        if len(hello.session) != 16:
            raise ProtocolError("a session id has 16 bytes")
        if max(map(len, (hello.software, hello.role, hello.name, hello.host, hello.boot_id))) > NAME_CHARACTERS_MAX:
            raise ProtocolError(f"a hello with a name of more than {NAME_CHARACTERS_MAX} characters")
        return hello

    def _answer(self, connection: ServerConnection, hello: pb.Hello, request: int, answer: pb.HelloOk) -> bytes:
        """The message, as it was sent."""
        answer.protocol = min(hello.protocol, wire.PROTOCOL)
        answer.challenge = connection.challenge
        message = answer.SerializeToString()
        connection.stream.send(wire.Kind.HELLO_OK, request, message)
        return message

    def _enter(self, connection: ServerConnection, hello: pb.Hello, rights: Rights) -> None:
        """From here on it counts as a client."""
        connection.rights = rights
        connection.client = (rights.subject, hello.session)
        connection.account = self._admission.enter(*connection.client, time.monotonic())
        self._book.join(connection, hello, rights.subject)

    # ------------------------------------------------------------------ the proof

    def _wait(self, connection: ServerConnection) -> None:
        with self._lock:
            self._unproved[connection] = None
            oldest = next(iter(self._unproved)) if len(self._unproved) > self._admission.bounds.unproved else None
            if oldest is not None:
                del self._unproved[oldest]
        if oldest is not None:
            with contextlib.suppress(OSError):
                oldest.stream.sock.shutdown(socket.SHUT_RDWR)  # its thread finds it gone

    def _ask(self, connection: ServerConnection, hello: pb.Hello, asked: Frame) -> None:
        stream = connection.stream
        connection.challenge = self._admission.challenge()
        newcomer = Session(hello.session, hello, connections={connection})
        answered = self._answer(connection, hello, asked.request, self._hello(newcomer))
        connection.greeting = greeting_of(asked.message, answered)
        stream.message_bytes_max = PROOF_BYTES_MAX
        while (frame := stream.receive()).kind == wire.Kind.PING:
            stream.send(wire.Kind.PONG, frame.request)
        if frame.kind != wire.Kind.PROVE:
            raise Unauthenticated("a ticket has to be proved first: give a token (token=..., or --token-file)")
        if len(hello.nonce) != NONCE_BYTES:
            raise Unauthenticated("the ticket is not good here")
        rights, answer, connection.signature = self._admission.prove(frame.message, connection.greeting)
        self._enter(connection, hello, rights)
        stream.close_fds()
        stream.send(wire.Kind.PROVE_OK, frame.request, answer.SerializeToString())
