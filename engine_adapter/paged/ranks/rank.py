"""The process of one rank: loads its shard, then computes each step it is sent. Started by the executor only."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import traceback
from types import FrameType
from typing import NoReturn

import msgspec

from kvstrata.engine_adapter.paged.ranks.collective import SharedCollective
from kvstrata.engine_adapter.paged.ranks.rank_messages import (
    EXIT_FAILED,
    FrameSocket,
    FromRank,
    RankFailed,
    RankFds,
    RankReady,
    RunStep,
    StartRank,
    StepDone,
    ToRank,
)
from kvstrata.engine_adapter.paged.ranks.worker import Worker
from kvstrata.proto import logs
from kvstrata.proto.errors import KVError, ProtocolError, Unavailable

EXIT_ORPHAN = 3


def _end_with_parent(channel: int) -> None:
    """A thread that ends this process the moment the executor's end of the channel is closed."""

    def watch() -> NoReturn:
        poller = select.poll()
        poller.register(channel, select.POLLRDHUP)
        poller.poll()
        # There is nobody left to compute for, and the main thread may be anywhere.
        os._exit(EXIT_ORPHAN)

    threading.Thread(target=watch, name="kvstrata-parent-watch", daemon=True).start()


def _stop(signum: int, frame: FrameType | None) -> NoReturn:
    """Leave the step or the wait that the main thread is in, and close."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(0)


class _Rank:
    """The conversation with the executor."""

    def __init__(self, fds: RankFds) -> None:
        self._fds = fds
        self._channel = FrameSocket(socket.socket(fileno=fds.channel), "the executor")
        self._decoder = msgspec.msgpack.Decoder(ToRank)
        self._encoder = msgspec.msgpack.Encoder()

    def run(self) -> int:
        """Serve until SIGTERM; returns an exit status when something failed."""
        try:
            self._serve()
        except Exception as error:  # noqa: BLE001 - whatever it is ends the rank, and the executor is told
            traceback.print_exc()
            return self._failed(error)

    def _serve(self) -> NoReturn:
        start = self._receive()
        if not isinstance(start, StartRank):
            raise ProtocolError(f"{type(start).__name__} before StartRank")
        size = start.config.tensor_parallel
        collective = SharedCollective(start.rank, size, self._fds.memory, self._fds.peers)
        worker = Worker(start.config, start.rank, collective, start.lookup_endpoint)
        try:
            worker.set_waker(lambda: os.eventfd_write(self._fds.wake, 1))
            self._send(RankReady(shape=worker.shape))
            while True:
                step = self._receive()
                if not isinstance(step, RunStep):
                    raise ProtocolError(f"{type(step).__name__} after StartRank")
                self._send(StepDone(output=worker.execute(step.output)))
        finally:
            worker.close()
            collective.close()

    def _failed(self, error: Exception) -> int:
        name = type(error).__name__
        known = isinstance(error, KVError)
        code, message = (name, str(error)) if known else ("", f"{name}: {error}")
        try:
            self._send(RankFailed(code=code, message=message))
        except Unavailable:
            return EXIT_ORPHAN  # nobody to tell; the traceback is on stderr
        return EXIT_FAILED

    def _receive(self) -> ToRank:
        return self._decoder.decode(self._channel.receive())

    def _send(self, message: FromRank) -> None:
        self._channel.send(self._encoder.encode(message))


def main() -> int:
    signal.signal(signal.SIGTERM, _stop)
    logs.configure()
    fds = msgspec.json.decode(sys.argv[1].encode(), type=RankFds)
    _end_with_parent(fds.channel)
    return _Rank(fds).run()


if __name__ == "__main__":
    sys.exit(main())
