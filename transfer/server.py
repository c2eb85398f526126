"""The framed channel, accepting side: a thread a connection, progress frames, sessions, bounds.

Owners give handlers by frame kind; a handler runs in its connection's thread and may block on memory,
disk or the socket. Whatever it raises as :class:`KVError` travels back as a Failure frame; anything
else is logged, counted, and travels as a Failure too. A malformed frame ends its connection only.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto import wire
from kvstrata.proto.errors import ConfigError, KVError, ProtocolError, Unavailable, VersionMismatch
from kvstrata.proto.logs import get_logger
from kvstrata.transfer.frames import Frame, Silence
from kvstrata.transfer.greeting import Greeter
from kvstrata.transfer.identity import parse_address
from kvstrata.transfer.loops import Loop, Loops
from kvstrata.transfer.security.admission import Admission
from kvstrata.transfer.sessions import STALL_S, ServerConnection, Session, SessionBook
from kvstrata.transfer.versions import RefusedVersions

log = get_logger(__name__)

#: Of those that have been let in.
CONNECTIONS_MAX: Final = 2048
#: A whole header and message must arrive within this, however slowly they trickle.
FRAME_S: Final = 20.0
PROGRESS_S: Final = 0.1
#: While nobody asks anything nobody is owed progress: after so long, the loop that sends it sleeps until it is woken.
AWAKE_S: Final = 1.0
DOZE_S: Final = 0.9
DOZE_BOUND_S: Final = 2.0
#: Kinds that nobody waits for an answer to: one would be taken for that of another request.
ONE_WAY: Final = frozenset((wire.Kind.RELEASE, wire.Kind.MISS_REPORT, wire.Kind.TOUCHED))


class Reply(msgspec.Struct, frozen=True):
    """An answer. ``raw`` follows the message; ``after`` runs once it is sent or has failed to be."""

    kind: int
    message: bytes = b""
    raw: Sequence[memoryview] = ()
    fds: Sequence[int] = ()
    after: Callable[[], None] | None = None


Handler = Callable[[ServerConnection, Frame], "Reply | None"]


class ChannelServer:
    """Serves one process's channel on TCP and, for nodes, a unix socket.

    ``hello`` answers a newcomer; ``ended`` is told, once, of each session's end. ``admission`` says who is let in and
    to what; without one, everybody to everything.
    """

    def __init__(
        self,
        handlers: Mapping[int, Handler],
        hello: Callable[[Session], pb.HelloOk],
        ended: Callable[[Session], None],
        loops: Loops,
        admission: Admission | None = None,
    ) -> None:
        self._admission = admission if admission is not None else Admission()
        self.counts: Counter[str] = self._admission.counts
        self.refused_versions = RefusedVersions()
        self.book = SessionBook(ended)
        self._handlers = {**handlers, wire.Kind.PROVE: self._prove}
        self._greeter = Greeter(hello, self.book, self._admission, lambda name: self.refused_versions.add(name))
        self._lock = threading.Lock()
        self._connections: set[ServerConnection] = set()
        self._listeners: list[socket.socket] = []
        self._unix_paths: list[Path] = []
        self._stopping = False
        self._awake_until = 0.0
        self._dozing = False
        self._progress = loops.add(Loop("channel-progress", PROGRESS_S, self._send_progress, bound_s=DOZE_BOUND_S))
        loops.add(Loop("session-deaths", 0.0, self.book.watch_deaths, bound_s=5.0))

    @property
    def sessions(self) -> dict[bytes, Session]:
        """Live sessions by their key."""
        return self.book.sessions

    # ------------------------------------------------------------------ listening

    def listen_tcp(self, address: str) -> str:
        """Listen on ``HOST:PORT`` (port 0 picks one); returns the real address."""
        family, where = parse_address(address)
        listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(where)
        except OSError as error:
            listener.close()
            raise ConfigError(bind_advice(address, error)) from error
        host, port = listener.getsockname()[:2]
        self._serve(listener, local=False)
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def listen_unix(self, path: Path) -> None:
        """Listen on a unix socket; a leftover file of a dead process is replaced."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        path.unlink(missing_ok=True)
        try:
            listener.bind(str(path))
        except OSError as error:
            listener.close()
            raise ConfigError(f"cannot listen on {path}: {error.strerror or error}") from error
        path.chmod(0o600)
        self._unix_paths.append(path)
        self._serve(listener, local=True)

    def _serve(self, listener: socket.socket, *, local: bool) -> None:
        listener.listen(512)
        self._listeners.append(listener)
        name = "kvstrata-accept-unix" if local else "kvstrata-accept-tcp"
        threading.Thread(target=self._accept, args=(listener, local), name=name, daemon=True).start()

    def _accept(self, listener: socket.socket, local: bool) -> None:
        while not self._stopping:
            try:
                sock, _ = listener.accept()
            except OSError as error:
                if self._stopping:
                    return
                log.error("accept failed", error=str(error))
                if error.errno not in (errno.ECONNABORTED, errno.EINTR):
                    time.sleep(0.05)  # out of descriptors: do not spin
                continue
            with self._lock:
                full = len(self._connections) - self._greeter.unproved >= CONNECTIONS_MAX
            if full:
                self.counts["refused_connections"] += 1
                sock.close()
                continue
            threading.Thread(target=self._run, args=(sock, local), name="kvstrata-connection", daemon=True).start()

    # ------------------------------------------------------------------ one connection

    def _run(self, sock: socket.socket, local: bool) -> None:
        try:
            connection = ServerConnection(sock, local=local)
        except OSError:
            sock.close()
            return
        with self._lock:
            self._connections.add(connection)
        try:
            if not local:
                _keep_alive(sock)
            self._greeter.greet(connection)
            while not self._stopping:
                self._serve_one(connection)
        except (Unavailable, Silence):
            self.counts["connections_ended"] += 1
        except ProtocolError as error:
            self.counts["malformed_frames"] += 1
            log.warning("connection closed", reason=str(error))
            self._try_fail(connection, 0, error)
        except VersionMismatch as error:
            self.counts["version_mismatches"] += 1
            log.warning("client refused", reason=str(error))
            self._try_fail(connection, 0, error)
        except KVError as error:
            self.counts["refused_hellos"] += 1
            self._admission.count(error)
            log.warning("peer refused", reason=str(error), peer=connection.peer())
            self._try_fail(connection, 0, error)
        finally:
            with self._lock:
                self._connections.discard(connection)
            self._greeter.leave(connection)
            connection.stream.close()

    def _serve_one(self, connection: ServerConnection) -> None:
        frame = self._next_frame(connection)
        stream, session, account = connection.stream, connection.session, connection.account
        assert session is not None and account is not None
        session.requests += 1
        now = connection.busy_since = session.used_at = time.monotonic()
        if self._dozing:
            self._rouse()
        reply: Reply | None = None
        try:
            handler = self._handlers.get(frame.kind)
            if handler is None:
                raise ProtocolError(f"frame kind {frame.kind} has no meaning here")
            self._admission.admit(connection.rights, account, frame.kind, now, connection.signature)
            reply = handler(connection, frame)
            if stream.raw_left:
                stream.skip_raw(time.monotonic() + STALL_S)
            connection.busy_since = None
            if reply is not None:
                stream.send(reply.kind, frame.request, reply.message, reply.raw, reply.fds)
        except (ProtocolError, Unavailable, Silence):
            raise
        except KVError as error:
            self._admission.count(error)
            self._fail(connection, frame, error)
        except Exception as error:
            self.counts["handler_errors"] += 1
            log.error("handler failed", kind=frame.kind, exc_info=True)
            self._fail(connection, frame, KVError(f"internal error: {type(error).__name__}: {error}"))
        finally:
            connection.busy_since = None
            if stream.fds:
                stream.close_fds()  # no handler asked for them
            if reply is not None and reply.after is not None:
                reply.after()

    def _prove(self, connection: ServerConnection, frame: Frame) -> Reply:
        return Reply(wire.Kind.PROVE_OK, self._greeter.renew(connection, frame.message))

    def _next_frame(self, connection: ServerConnection) -> Frame:
        """Wait, however long, for a frame to begin; once begun it must come in time."""
        stream = connection.stream
        while True:
            try:
                return stream.receive(within_s=FRAME_S)
            except Silence:
                if stream.mid_frame() or self._stopping:
                    raise

    def _fail(self, connection: ServerConnection, frame: Frame, error: KVError) -> None:
        connection.busy_since = None
        if connection.stream.raw_left:
            connection.stream.skip_raw(time.monotonic() + STALL_S)
        if frame.kind in ONE_WAY:
            log.warning("a message was refused", kind=frame.kind, reason=str(error), client=connection.owner.hello.name)
            return
        message = pb.Failure(code=type(error).__name__, message=str(error)).SerializeToString()
        connection.stream.send(wire.Kind.FAILURE, frame.request, message)

    def _try_fail(self, connection: ServerConnection, request: int, error: KVError) -> None:
        message = pb.Failure(code=type(error).__name__, message=str(error)).SerializeToString()
        with contextlib.suppress(Unavailable):
            connection.stream.send(wire.Kind.FAILURE, request, message)

    def _send_progress(self) -> float | None:
        """Seconds for which nothing is due when nothing was asked for a while: who asks then wakes the loop."""
        now = time.monotonic()
        if not self._dozing and now >= self._awake_until:
            self._dozing = True  # before looking: who is not seen below sees it
        with self._lock:
            busy = [(c, since) for c in self._connections if (since := c.busy_since) is not None]
        due = now - PROGRESS_S * 0.9
        for connection, since in busy:
            if since < due:
                with contextlib.suppress(Unavailable):
                    connection.progress()
        if busy:
            self._dozing, self._awake_until = False, now + AWAKE_S
        return DOZE_S if self._dozing else None

    def _rouse(self) -> None:
        self._awake_until, self._dozing = time.monotonic() + AWAKE_S, False
        self._progress.wake()

    # ------------------------------------------------------------------ end

    def stop(self, timeout_s: float = 2.0) -> None:
        """Close listeners and connections; requests in progress get ``timeout_s`` to finish."""
        self._stopping = True
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and any(c.busy_since is not None for c in list(self._connections)):
            time.sleep(0.01)
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.stream.sock.shutdown(socket.SHUT_RDWR)
        for path in self._unix_paths:
            path.unlink(missing_ok=True)


def _keep_alive(sock: socket.socket) -> None:
    """A peer that vanished without a word ends within half a minute."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)


def bind_advice(address: str, error: OSError) -> str:
    """What to tell the operator when ``address`` cannot be bound."""
    if error.errno == errno.EADDRINUSE:
        return f"{address} is in use: stop what listens there, or choose another port (0 picks a free one)"
    return f"cannot listen on {address}: {error.strerror or error}"
