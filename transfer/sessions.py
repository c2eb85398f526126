"""Sessions: all connections of one client process, and how its end is noticed.

A session ends once: when its last connection closes, or when its process dies, though a forked child may
still hold the sockets. On one host the kernel vouches for the process by a pidfd.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto import wire
from kvstrata.proto.errors import Unavailable
from kvstrata.transfer.frames import FrameStream, Silence
from kvstrata.transfer.security.rates import Account
from kvstrata.transfer.security.rights import EVERYTHING, Rights

#: No progress within a frame, or no reader for an answer, for this long ends a connection.
STALL_S: Final = 5.0
DEATHS_S: Final = 0.25
SO_PEERPIDFD: Final = 77


@dataclass(eq=False, slots=True)
class Session:
    """All connections of one client process. Ends when the last closes, or the process dies."""

    key: bytes
    hello: pb.Hello
    subject: str = ""  #: whose tickets its connections prove; "" where tickets are off
    pid: int = 0  #: as the kernel says (unix sockets), 0 when unknown
    pidfd: int = -1
    opened_at: float = field(default_factory=time.monotonic)
    used_at: float = field(default_factory=time.monotonic)
    requests: int = 0
    connections: set[ServerConnection] = field(default_factory=set)
    over: bool = False  #: set before ``ended`` is told; a handler that is still at work may look

    @property
    def shown(self) -> str:
        """What it is called in lists: 8 hexadecimal digits that do not tell the key."""
        return hashlib.blake2b(self.key, digest_size=4).hexdigest()

    def reached_at(self) -> str:
        """The address of ours that it came by over TCP; "" when it came otherwise, or has gone already."""
        for connection in list(self.connections):
            if not connection.local:
                with contextlib.suppress(OSError):
                    return str(connection.stream.sock.getsockname()[0])
        return ""


class ServerConnection:
    """One accepted connection, as its handlers see it."""

    def __init__(self, sock: socket.socket, *, local: bool) -> None:
        self.stream = FrameStream(sock, STALL_S, passes_fds=local)
        self.local = local
        self.busy_since: float | None = None
        self.session: Session | None = None
        #: What the peer may do: all, where tickets are off.
        self.rights: Rights = EVERYTHING
        self.client = ("", b"")  #: whom it is of: a ticket's subject, "" where they are off, and the session's id
        self.account: Account | None = None  #: what that one has here, once it has been let in
        self.challenge = b""  #: that its hello was answered with; empty where they are off
        self.greeting = b""  #: the hellos that they are about
        self.signature = ("", b"")  #: of the ticket: the key that it was made with

    @property
    def owner(self) -> Session:
        """The session; handlers run after the hello only."""
        assert self.session is not None
        return self.session

    def peer(self) -> str:
        """The host that it comes from, for logs; "" when it is this one's unix socket, or gone."""
        with contextlib.suppress(OSError):
            name = self.stream.sock.getpeername()
            return str(name[0]) if isinstance(name, tuple) else ""
        return ""

    def receive_raw(
        self,
        views: Sequence[memoryview],
        deadline: float | None = None,
        filled: Callable[[int], None] | None = None,
    ) -> None:
        """Fill ``views`` with the request's raw bytes; a stalled sender raises :class:`Unavailable`."""
        try:
            self.stream.receive_raw(views, deadline, filled)
        except Silence as error:
            raise Unavailable(f"the writer sent nothing for {STALL_S:.0f} s") from error

    def progress(self) -> None:
        """Tell the waiting peer that its request is being worked on."""
        self.stream.send_if_idle(wire.Kind.PROGRESS)


class SessionBook:
    """Who is connected. ``ended`` is told, once, of each session's end, outside the lock."""

    def __init__(self, ended: Callable[[Session], None]) -> None:
        self.sessions: dict[bytes, Session] = {}
        self._ended = ended
        self._lock = threading.Lock()
        self._deaths = select.epoll()
        self._watched: dict[int, Session] = {}

    def join(self, connection: ServerConnection, hello: pb.Hello, subject: str = "") -> Session:
        """Enter a connection that has said hello, and has proved a ticket of ``subject`` where tickets are on.

        Subjects that give one id have a session each: who knows or guesses another's id neither joins it nor is in
        its way.
        """
        key = session_key(hello.session, subject)
        pid, pidfd = _peer_process(connection) if connection.local else (0, -1)
        with self._lock:
            session = self.sessions.get(key)
            if session is None:
                session = self.sessions[key] = Session(key, hello, subject)
            session.connections.add(connection)
            connection.session = session
            watch = pidfd >= 0 and session.pidfd < 0
            if watch:
                session.pid, session.pidfd = pid, pidfd
                self._watched[pidfd] = session
                self._deaths.register(pidfd, select.EPOLLIN)
        if pidfd >= 0 and not watch:
            os.close(pidfd)
        return session

    def leave(self, connection: ServerConnection) -> None:
        """A connection has closed; with the last one its session ends."""
        session = connection.session
        if session is None:
            return
        with self._lock:
            session.connections.discard(connection)
            over = not session.connections and self.sessions.get(session.key) is session
            if over:
                self._forget(session)
        if over:
            self._ended(session)

    def watch_deaths(self) -> None:
        """End the sessions of processes that died; waits at most ``DEATHS_S``."""
        for fd, _ in self._deaths.poll(DEATHS_S):
            with self._lock:
                session = self._watched.get(fd)
                connections = list(session.connections) if session else []
                if session is not None:
                    self._forget(session)
            if session is not None:
                self._ended(session)
            for connection in connections:
                connection.stream.close()

    def _forget(self, session: Session) -> None:
        session.over = True
        del self.sessions[session.key]
        if session.pidfd >= 0:
            self._watched.pop(session.pidfd, None)
            self._deaths.unregister(session.pidfd)
            os.close(session.pidfd)
            session.pidfd = -1


def session_key(session: bytes, subject: str) -> bytes:
    """16 bytes: the id that a client chose, or where tickets are on a hash of it with whose the tickets are."""
    if not subject:
        return session
    return hashlib.blake2b(session + subject.encode(), digest_size=16, person=b"kvstrata session").digest()


def _peer_process(connection: ServerConnection) -> tuple[int, int]:
    """(pid, pidfd) of a unix peer; pid 0 or pidfd -1 when the kernel will not say."""
    sock = connection.stream.sock
    pid, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    if pid <= 0:
        return 0, -1
    try:
        return pid, sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError:
        pass  # before Linux 6.5: by number, which is only safe while the peer is connected, as it is now
    try:
        return pid, os.pidfd_open(pid)
    except OSError:
        return pid, -1
