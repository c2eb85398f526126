"""A real node and a client's rails to it: both agents are fakes over this process's memory, and do as told."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvstrata.proto.status import BlockStatus
from kvstrata.storage.node import StorageNode
from kvstrata.transfer.base import Endpoint, Fetch, Push
from kvstrata.transfer.identity import Identity, boot_id
from kvstrata.transfer.memory import HOST, Memory
from kvstrata.transfer.rdma.client_rails import ClientRails
from kvstrata.transfer.rdma.engine import Job, Pieces, Registration
from kvstrata.transfer.rdma.peer import RdmaPeer
from kvstrata.transfer.rdma.rails import RailOptions
from kvstrata.transfer.rdma.session import RailState
from kvstrata.transfer.rdma.transport import RdmaTransport
from kvstrata.transfer.regions import BlockView, Region
from tests.storage.conftest import keys, payload
from tests.storage.fake_engine import CMA, FakeEngine, FakeJob
from tests.storage.railed_node import BLOCK_BYTES, NAMESPACE, railed

S = BlockStatus
COUNT = 8
NAMES = range(COUNT)
HASHES = keys(NAMES)


class ClientEngine(FakeEngine):
    """The client's: what it reads that is larger than generation words is ``behave``'s; all else is done at once."""

    def register(
        self, address: int, nbytes: int, memory: Memory = HOST, *, within_s: float | None = None
    ) -> Registration:
        made = super().register(address, nbytes, memory, within_s=within_s)
        made.metadata = self.metadata()
        return made

    def read(self, peer: str, local: Pieces, remote: Pieces) -> Job:
        behave = self.behave
        if int(local.length.max()) < 512:
            self.behave = FakeJob.finish
        try:
            return super().read(peer, local, remote)
        finally:
            self.behave = behave


class World:
    """One node, one client's rails to it, and blocks in memory of the client's."""

    def __init__(self, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.theirs, self.ours = FakeEngine(name="node"), ClientEngine(name="client")
        self.node: StorageNode = railed(base, self.theirs, monkeypatch)
        self.found = CMA
        self.transports: list[RdmaTransport] = []
        self._peer: RdmaPeer | None = None
        self.data = np.frombuffer(b"".join(payload(keys([n]), 0, BLOCK_BYTES) for n in NAMES), np.uint8).copy()

    def connect(self, *, only: bool = True) -> RdmaPeer:
        identity = Identity.new()
        own = ClientRails("c", RailOptions(), find=lambda _: self.found, opener=lambda *_: self.ours)
        self.transports.append(RdmaTransport(identity, RailOptions(), only=only, own=own))
        endpoint = Endpoint("n", self.node.identity.incarnation, self.node.channel, "", boot_id())
        assert self.transports[-1].reaches(endpoint)
        return self.transports[-1].connect(endpoint)

    def peer(self) -> RdmaPeer:
        """The same at each call."""
        if self._peer is None:
            self._peer = self.connect()
        return self._peer

    def region(self, memory: npt.NDArray[np.uint8]) -> Region:
        region = Region(memory, memory)
        self.transports[-1].register(region)
        return region

    def rows(self, memory: npt.NDArray[np.uint8]) -> BlockView:
        return self.region(memory).rows(NAMESPACE)

    def stored(self, peer: RdmaPeer) -> None:
        assert push(peer, self.rows(self.data)) == [S.STORED] * COUNT

    def end(self) -> None:
        for transport in self.transports:
            transport.close()
        self.node.stop()


def push(peer: RdmaPeer, rows: BlockView, seconds: float = 5.0) -> list[int]:
    return peer.push(Push(NAMESPACE, "", HASHES, rows, time.monotonic() + seconds)).status.tolist()


def asked(rows: BlockView, seconds: float = 5.0) -> Fetch:
    return Fetch(NAMESPACE, "", HASHES, rows, time.monotonic() + seconds, "always")


def up(peer: RdmaPeer) -> bool:
    return peer.rails.state is RailState.UP


def corrupting(job: FakeJob) -> None:
    job.finish()
    ctypes.memset(int(job.local.address[0]) + 100, 0x5A, 3)
