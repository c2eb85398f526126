"""Sources in processes of their own: killed, stopped and continued while they are copied from."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstrata.proto import control_pb2 as control
from kvstrata.proto.status import BlockStatus
from kvstrata.storage.copying import intake
from kvstrata.transfer.base import Endpoint, Push
from kvstrata.transfer.identity import Identity
from kvstrata.transfer.regions import Region
from kvstrata.transfer.tcp import TcpTransport
from tests.storage.conftest import key, keys, payload
from tests.storage.copying.nodes import BLOCK_BYTES, NAMESPACE, CopyNode, MakeNode
from tests.waiting import until

DAEMON = """
import json, sys
from pathlib import Path
from kvstrata.storage.daemon import StorageConfig, run
config = StorageConfig((), "127.0.0.1:0", "127.0.0.1:0", Path(sys.argv[1]), 16 << 20, copy_bandwidth=int(sys.argv[2]))
raise SystemExit(run(config, lambda line: print(json.dumps(line), flush=True)))
"""
BLOCKS = range(100)


class Source:
    """A node process that holds ``BLOCKS``."""

    def __init__(self, data: Path, bandwidth: int) -> None:
        command = [sys.executable, "-c", DAEMON, str(data), str(bandwidth)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], 20)
        assert readable, "no ready line"
        self.ready: dict[str, Any] = json.loads(self.process.stdout.readline())
        transport = TcpTransport(Identity.new())
        peer = transport.connect(Endpoint(self.ready["node_id"], self.ready["incarnation"], self.ready["channel"]))
        data_bytes = b"".join(payload(key(n), 0, BLOCK_BYTES) for n in BLOCKS)
        region = Region(np.frombuffer(bytearray(data_bytes), np.uint8), None)
        status = peer.push(Push(NAMESPACE, "", keys(BLOCKS), region.rows(NAMESPACE), time.monotonic() + 10)).status
        assert set(status.tolist()) == {BlockStatus.STORED}
        peer.close()
        transport.close()

    @property
    def ref(self) -> control.CopyCommand:
        command = control.CopyCommand()
        command.source.node_id = self.ready["node_id"]
        command.source.incarnation = self.ready["incarnation"]
        command.source.channel = self.ready["channel"]
        return command

    def signal(self, number: int) -> None:
        self.process.send_signal(number)
        if number == signal.SIGSTOP:
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Source]:
    """Gives 2 MB a second, a few blocks a piece: about two seconds for all."""
    monkeypatch.setattr(intake, "PIECE_BYTES", 5 * BLOCK_BYTES)
    one = Source(tmp_path / "source", 2_000_000)
    yield one
    one.end()


def begun(target: CopyNode, source: Source, order: Callable[..., int] = CopyNode.order) -> int:
    """A copy of everything of which a part has arrived."""
    command = order(target, source, BLOCKS)
    until(lambda: target.node.state.copies.counts.taken_bytes > 20 * BLOCK_BYTES)
    return command


@pytest.mark.parametrize(("number", "bound_s"), [(signal.SIGKILL, 0.6), (signal.SIGSTOP, 1.0)])
def test_a_source_that_dies_ends_its_orders_soon(
    make: MakeNode, source: Source, number: signal.Signals, bound_s: float
) -> None:
    target = make()
    command = begun(target, source)
    waiting = [target.order(source, BLOCKS) for _ in range(20)]  # type: ignore[arg-type]
    source.signal(number)
    at = time.monotonic()
    statuses = list(target.answer(command).status)
    took = time.monotonic() - at
    arrived = [n for n, status in enumerate(statuses) if status == BlockStatus.STORED]
    assert len(arrived) >= 20 and BlockStatus.NODE_LOST in statuses
    assert set(statuses) <= {
        BlockStatus.STORED,
        BlockStatus.ALREADY_PRESENT,
        BlockStatus.NODE_LOST,
        BlockStatus.IN_FLIGHT,
    }
    assert target.present(BLOCKS)[: len(arrived)] == arrived
    for each in waiting:
        assert BlockStatus.NODE_LOST in target.answer(each).status
    assert took < bound_s, f"{took:.2f} s"
    assert time.monotonic() - at < bound_s + 2.0, "each order does not wait for the dead again"
    target.assert_quiet()
    assert target.load(range(len(arrived))) == [BlockStatus.LOADED] * len(arrived)


def test_a_source_that_goes_on_is_asked_again(make: MakeNode, source: Source) -> None:
    target = make()
    command = begun(target, source)
    source.signal(signal.SIGSTOP)
    assert BlockStatus.NODE_LOST in target.answer(command).status
    source.signal(signal.SIGCONT)

    def whole() -> bool:
        return set(target.copy(source, BLOCKS)) <= {BlockStatus.STORED, BlockStatus.ALREADY_PRESENT}  # type: ignore[arg-type]

    until(whole)
    assert target.load(BLOCKS) == [BlockStatus.LOADED] * len(BLOCKS)


def test_a_target_that_stops_in_the_midst_leaves_nothing_at_its_source(make: MakeNode) -> None:
    source, target = make(), make(copy_bandwidth=500_000)
    source.store(range(40))
    command = target.order(source, range(40))
    until(lambda: source.node.state.copies.counts.given > 0)
    target.stop()
    target.answer(command)
    until(lambda: len(source.node.state.leases) == 0)
    assert source.load(range(40)) == [BlockStatus.LOADED] * 40
