"""A channel server in this process, on a real socket, with whatever handlers a test gives it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.wire import Kind
from kvstrata.transfer.frames import Frame
from kvstrata.transfer.loops import Loops
from kvstrata.transfer.server import ChannelServer, Handler, Reply
from kvstrata.transfer.sessions import ServerConnection, Session


class Running:
    """A started server, its TCP address, and what it was told."""

    def __init__(self, handlers: Mapping[int, Handler], unix: Path, incarnation: int) -> None:
        self.ended: list[Session] = []
        self.loops = Loops()
        self.server = ChannelServer(
            {Kind.PING: self._pong, **handlers},
            lambda _: pb.HelloOk(role="node", node_id="n1", incarnation=incarnation),
            self.ended.append,
            self.loops,
        )
        self.unix = unix
        self.address = self.server.listen_tcp("127.0.0.1:0")
        self.server.listen_unix(unix)

    @staticmethod
    def _pong(_: ServerConnection, frame: Frame) -> Reply:
        return Reply(Kind.PONG, frame.message)

    def stop(self) -> None:
        self.server.stop()
        self.loops.stop()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    running: list[Running] = []

    def start(handlers: Mapping[int, Handler] | None = None, incarnation: int = 7) -> Running:
        running.append(Running(handlers or {}, tmp_path / f"s{len(running)}", incarnation))
        return running[-1]

    yield start
    for one in running:
        one.stop()
