"""A channel server that asks for tickets, on real sockets; keys in a file; tickets for whoever a test wants to be."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.wire import Kind
from kvstrata.transfer.frames import Frame, FrameStream
from kvstrata.transfer.identity import Identity, parse_address
from kvstrata.transfer.loops import Loops
from kvstrata.transfer.security.admission import Admission
from kvstrata.transfer.security.key_file import KeyFile
from kvstrata.transfer.security.minted import MintedTickets
from kvstrata.transfer.security.rates import Bounds
from kvstrata.transfer.security.rights import Rights, Role
from kvstrata.transfer.security.tickets import greeting_of
from kvstrata.transfer.server import ChannelServer, Handler, Reply
from kvstrata.transfer.sessions import ServerConnection, Session

SILENCE_S = 5.0


def write_keys(path: Path, *names: str) -> KeyFile:
    """A key file with these keys, the first one signs; a name always has the same secret."""
    path.touch(mode=0o600)
    path.chmod(0o600)
    path.write_text("".join(f"{name}:{name.encode().ljust(32, b'.')[:32].hex()}\n" for name in names))
    return KeyFile(path)


def someone(
    name: str = "engine", role: Role = Role.CLIENT, salts: tuple[str, ...] = ("*",), groups: tuple[str, ...] = ("*",)
) -> Rights:
    return Rights(name, role, salts, groups)


class Clock:
    """Unix seconds that a test moves on."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead


class Door:
    """A running server. ``seen`` are the kinds that came through to a handler."""

    def __init__(
        self, keys: KeyFile | None, bounds: Bounds | None = None, handlers: Mapping[int, Handler] | None = None
    ) -> None:
        self.clock = Clock()
        self.seen: list[int] = []
        self.ended: list[Session] = []
        self.hellos = 0
        self.admission = Admission(keys, bounds or Bounds(), self.clock)
        self.loops = Loops()
        answers = {
            Kind.PING: Kind.PONG,
            Kind.LOOKUP: Kind.LOOKUP_OK,
            Kind.HEARTBEAT: Kind.HEARTBEAT_OK,
            Kind.COMMIT: Kind.COMMIT_OK,
        }
        mine: dict[int, Handler] = {kind: self._answering(kind, answer) for kind, answer in answers.items()}
        mine[Kind.RELEASE] = self._silent
        self.server = ChannelServer(
            {**mine, **(handlers or {})}, self._hello, self.ended.append, self.loops, self.admission
        )
        self.address = self.server.listen_tcp("127.0.0.1:0")

    def _hello(self, session: Session) -> pb.HelloOk:
        self.hellos += 1
        return pb.HelloOk(role="node", node_id="n1", incarnation=7, channel=session.reached_at())

    def _answering(self, kind: int, answer: int) -> Handler:
        def handle(_: ServerConnection, frame: Frame) -> Reply:
            self.seen.append(kind)
            return Reply(answer)

        return handle

    def _silent(self, _: ServerConnection, frame: Frame) -> None:
        self.seen.append(frame.kind)

    def dial(self, silence_s: float = SILENCE_S) -> FrameStream:
        """A socket to it, with nothing said yet."""
        return FrameStream(socket.create_connection(parse_address(self.address)[1]), silence_s)  # type: ignore[arg-type]

    def greeted(self, session: bytes | None = None) -> tuple[FrameStream, pb.HelloOk, bytes]:
        """A connection after its hello: (stream, the answer, both hellos as proofs are about them)."""
        hello = Identity(session or os.urandom(16)).hello().SerializeToString()
        stream = self.dial()
        stream.send(Kind.HELLO, 1, hello)
        answer = stream.receive().message
        return stream, pb.HelloOk.FromString(answer), greeting_of(hello, answer)

    def stop(self) -> None:
        self.server.stop()
        self.loops.stop()
        self.admission.check()


def failure(stream: FrameStream) -> str:
    """The code of the failure that comes next."""
    frame = stream.receive()
    assert frame.kind == Kind.FAILURE, frame
    return pb.Failure.FromString(frame.message).code


class Drip:
    """Sends bytes one by one, each in time to count as progress, until the other side has had enough."""

    def __init__(self, stream: FrameStream, data: bytes, every_s: float) -> None:
        self.sent = 0
        self._stream, self._data, self._every_s = stream, data, every_s
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        pause = threading.Event()
        for value in self._data:
            try:
                self._stream.sock.send(bytes([value]))
            except OSError:
                return
            self.sent += 1
            pause.wait(self._every_s)


class Forced(MintedTickets):
    """Tickets that a test changes by hand, and counts refusals of."""

    def __init__(self, keys: KeyFile, rights: Rights) -> None:
        super().__init__(keys, rights)
        self.refusals = 0
        self.now: pb.Ticket | None = None

    def current(self) -> pb.Ticket:
        return self.now if self.now is not None else super().current()

    def refused(self, ticket: pb.Ticket) -> None:
        self.refusals += 1
        if self.now is ticket:
            self.now = None
        super().refused(ticket)
