"""The heartbeat process: light, regular, honest about progress, and the first to say that its node died."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.wire import Kind
from kvstrata.storage.identity import NodeIdentity
from kvstrata.storage.masters.sidecar import Sidecar
from kvstrata.transfer.connection import expect
from kvstrata.transfer.frames import Frame
from kvstrata.transfer.loops import Loops
from kvstrata.transfer.server import ChannelServer, Reply
from kvstrata.transfer.sessions import ServerConnection
from tests.processes import alive
from tests.waiting import until

IDENTITY = NodeIdentity("node-1", 42)


class Listener:
    """A master's ear: keeps every heartbeat."""

    def __init__(self) -> None:
        self.beats: list[tuple[float, pb.Heartbeat]] = []
        self._loops = Loops()
        self._server = ChannelServer(
            {Kind.HEARTBEAT: self._beat}, lambda session: pb.HelloOk(role="master"), lambda session: None, self._loops
        )
        self.address = self._server.listen_tcp("127.0.0.1:0")

    def _beat(self, _: ServerConnection, frame: Frame) -> Reply:
        self.beats.append((time.monotonic(), expect(pb.Heartbeat, frame, Kind.HEARTBEAT)))
        return Reply(Kind.HEARTBEAT_OK, pb.HeartbeatOk(known=True).SerializeToString())

    def stop(self) -> None:
        self._server.stop(0.1)
        self._loops.stop(0.5)


@pytest.fixture
def listener() -> Iterator[Listener]:
    one = Listener()
    yield one
    one.stop()


def test_it_is_light() -> None:
    """It must start fast, stay small, and hold nothing that can block it."""
    heavy = "print([m for m in ('numpy', 'grpc', 'uvicorn', 'xxhash', 'structlog') if m in sys.modules])"
    command = [sys.executable, "-c", f"import sys, kvstrata.storage.masters.heartbeat; {heavy}"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[]\n"


def test_it_beats_carries_the_age_of_progress_and_quits_quietly(listener: Listener) -> None:
    sidecar = Sidecar(IDENTITY, ("127.0.0.1:1", listener.address))
    sidecar.start()
    until(lambda: len(listener.beats) >= 1)
    stalled = time.monotonic()
    until(lambda: len(listener.beats) >= 3)
    for at, beat in listener.beats:
        assert (beat.node_id, beat.incarnation, beat.dying) == ("node-1", 42, False)
        assert at - stalled - 0.2 < beat.progress_age_ms / 1e3 + 1.0
    assert listener.beats[2][1].progress_age_ms > listener.beats[0][1].progress_age_ms + 1000
    sidecar.progress()
    count = len(listener.beats)
    until(lambda: len(listener.beats) > count)
    assert listener.beats[-1][1].progress_age_ms < 1500
    pid = sidecar.pid
    sidecar.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not any(beat.dying for _, beat in listener.beats), "the node left; it did not die"


def test_it_is_started_again_and_its_death_is_a_problem(listener: Listener) -> None:
    sidecar = Sidecar(IDENTITY, (listener.address,))
    sidecar.start()
    until(lambda: len(listener.beats) >= 1)
    os.kill(sidecar.pid, signal.SIGKILL)
    until(lambda: "dead" in sidecar.problem())
    sidecar.tend()
    count = len(listener.beats)
    until(lambda: len(listener.beats) > count)
    assert sidecar.problem() == "" and sidecar.restarts == 1
    sidecar.stop()


PARENT = """
import os, sys, time
from kvstrata.storage.identity import NodeIdentity
from kvstrata.storage.masters.sidecar import Sidecar
sidecar = Sidecar(NodeIdentity("node-1", 42), tuple(sys.argv[1:]))
sidecar.start()
print(sidecar.pid, flush=True)
time.sleep(60)
"""


def parent(listener: Listener) -> tuple[subprocess.Popen[str], int]:
    process = subprocess.Popen([sys.executable, "-c", PARENT, listener.address], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def test_a_killed_node_is_reported_dying_at_once_and_nothing_is_left(listener: Listener) -> None:
    process, pid = parent(listener)
    until(lambda: len(listener.beats) >= 1)
    killed = time.monotonic()
    process.kill()
    until(lambda: any(beat.dying for _, beat in listener.beats))
    assert time.monotonic() - killed < 0.9, "not only with the next beat"
    until(lambda: not alive(pid))
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def test_a_stopped_node_is_alive_without_progress(listener: Listener) -> None:
    process, pid = parent(listener)
    until(lambda: len(listener.beats) >= 1)
    os.kill(process.pid, signal.SIGSTOP)
    count = len(listener.beats)
    until(lambda: len(listener.beats) >= count + 2)
    assert listener.beats[-1][1].progress_age_ms > 1000 and not listener.beats[-1][1].dying
    process.kill()
    until(lambda: not alive(pid))
    process.wait()
    assert process.stdout is not None
    process.stdout.close()
