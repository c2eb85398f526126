"""A node whose rails are a fake engine over this process's memory, and a writer that speaks to it by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import xxhash

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.keys import Namespace
from kvstrata.proto.status import BlockStatus
from kvstrata.proto.wire import Kind
from kvstrata.storage import node as node_module
from kvstrata.storage.config import StorageConfig
from kvstrata.storage.node import StorageNode
from kvstrata.storage.serving.rails import NodeRails
from kvstrata.transfer.connection import Connection, expect
from kvstrata.transfer.identity import Identity

from .conftest import keys, payload
from .fake_engine import CMA, FakeEngine

BLOCK_BYTES = 4096
NAMESPACE = Namespace("model", BLOCK_BYTES, 16)
#: The small pool of these tests: the share of it that late transfers may hold is 8 blocks.
DRAM_BYTES, SLAB_BYTES = 256 << 10, 64 << 10


def railed(base: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> StorageNode:
    """A node that serves, with ``engine`` for its rails."""
    monkeypatch.setattr(
        node_module, "open_rails", lambda name, options, state, lock: (NodeRails(engine, CMA, state, lock), "")
    )
    config = StorageConfig((), "127.0.0.1:0", "127.0.0.1:0", base / "node", DRAM_BYTES, slab_bytes=SLAB_BYTES)
    node = StorageNode(config)
    node.start()
    return node


class Writer:
    """A client's connection, its agent, and its memory: blocks ``numbers`` as they are to be stored."""

    def __init__(self, node: StorageNode, agent: str = "writer", numbers: Sequence[int] = range(16)) -> None:
        self.connection = Connection.open(node.channel, Identity.new(), silence_s=2.0)
        self.agent = agent.encode()
        message = pb.OpenNamespace(spec=NAMESPACE.to_spec()).SerializeToString()
        opened = self.connection.call(Kind.OPEN_NAMESPACE, message)
        self.handle = expect(pb.NamespaceHandle, opened, Kind.NAMESPACE_HANDLE).handle
        self.numbers = list(numbers)
        data = b"".join(payload(keys([n]), 0, BLOCK_BYTES) for n in numbers)
        self.memory = np.frombuffer(bytearray(data), np.uint8)

    def open(self, rails: str = "cma", backend: str = "UCX", agent: bytes | None = None) -> pb.OpenRailsOk:
        message = pb.OpenRails(rails=rails, backend=backend, agent=self.agent if agent is None else agent)
        reply = self.connection.call(Kind.OPEN_RAILS, message.SerializeToString())
        return expect(pb.OpenRailsOk, reply, Kind.OPEN_RAILS_OK)

    def register(
        self,
        region: int = 1,
        memory: npt.NDArray[np.uint8] | None = None,
        agent: bytes | None = None,
        device: str = "",
    ) -> str:
        memory = self.memory if memory is None else memory
        message = pb.RegisterRegion(
            region=region,
            address=memory.ctypes.data,
            length=memory.nbytes,
            agent=self.agent if agent is None else agent,
            memory=device,
        )
        reply = self.connection.call(Kind.REGISTER_REGION, message.SerializeToString())
        return expect(pb.RegisterRegionOk, reply, Kind.REGISTER_REGION_OK).method

    def unregister(self, region: int = 1) -> None:
        message = pb.UnregisterRegion(region=region).SerializeToString()
        expect(pb.Empty, self.connection.call(Kind.UNREGISTER_REGION, message), Kind.OK)

    def test(self, region: int, seed: int) -> str:
        message = pb.TestRail(region=region, seed=seed).SerializeToString()
        return expect(pb.TestRailOk, self.connection.call(Kind.TEST_RAIL, message), Kind.TEST_RAIL_OK).problem

    def ready(self) -> Writer:
        """Rails open, memory registered."""
        self.open()
        assert self.register() == "rdma"
        return self

    def pull(
        self,
        numbers: Sequence[int],
        *,
        deadline_ms: int = 1000,
        hash_here: bool = False,
        checksums: bool = False,
        pieces: int = 1,
        salt: str = "",
        wrong: bool = False,
        commit: bool = True,
    ) -> pb.ReserveOk:
        """The node's answer; with ``hash_here`` it is committed too, and what the answer says is what came of that."""
        where = [self.numbers.index(number) for number in numbers]
        cuts = np.linspace(0, BLOCK_BYTES, pieces + 1).astype(np.int64)
        table = np.empty((len(where), pieces, 2), np.int64)
        for row, block in enumerate(where):
            table[row, :, 0] = block * BLOCK_BYTES + cuts[:-1]
            table[row, :, 1] = np.diff(cuts)
        message = pb.Pull(
            reserve=pb.Reserve(ns=self.handle, salt=salt, hashes=keys(list(numbers)), deadline_ms=deadline_ms),
            region=1,
            descriptors=table.tobytes(),
            pieces=pieces,
            checksums=np.array([d ^ wrong for d in self.digests(numbers)], np.uint64).tobytes() if checksums else b"",
            hash_here=hash_here,
        )
        reply = self.connection.call(Kind.PULL, message.SerializeToString())
        answer = expect(pb.ReserveOk, reply, Kind.RESERVE_OK)
        return self.committed(answer) if hash_here and commit and answer.reservation else answer

    def pull_range(self, numbers: Sequence[int], at: int, nbytes: int, reservation: int = 0) -> pb.ReserveOk:
        """Bytes ``at`` to ``at + nbytes`` of the blocks; the first range reserves."""
        table = [(self.numbers.index(number) * BLOCK_BYTES + at, nbytes) for number in numbers]
        reserve = pb.Reserve(ns=self.handle, hashes=keys(list(numbers)), deadline_ms=1000)
        message = pb.Pull(
            reserve=None if reservation else reserve,
            region=1,
            descriptors=np.array(table, np.int64).tobytes(),
            pieces=1,
            reservation=reservation,
            at=at,
            nbytes=nbytes,
        )
        reply = self.connection.call(Kind.PULL, message.SerializeToString())
        return expect(pb.ReserveOk, reply, Kind.RESERVE_OK)

    def committed(self, answer: pb.ReserveOk) -> pb.ReserveOk:
        """The answer after a commit without checksums of the writer's own."""
        granted = [i for i, status in enumerate(answer.status) if status == BlockStatus.RESERVED]
        message = pb.Commit(reservation=answer.reservation, checksums=bytes(8 * len(granted))).SerializeToString()
        done = expect(pb.CommitOk, self.connection.call(Kind.COMMIT, message), Kind.COMMIT_OK).status
        status = bytearray(answer.status)
        for position, each in zip(granted, done, strict=True):
            status[position] = each
        return pb.ReserveOk(status=bytes(status))

    def commit(self, reservation: int, numbers: Sequence[int]) -> list[int]:
        sums = np.array(self.digests(numbers), np.uint64).tobytes()
        message = pb.Commit(reservation=reservation, checksums=sums).SerializeToString()
        return list(expect(pb.CommitOk, self.connection.call(Kind.COMMIT, message), Kind.COMMIT_OK).status)

    def digests(self, numbers: Sequence[int]) -> list[int]:
        rows = self.memory.reshape(-1, BLOCK_BYTES)
        return [xxhash.xxh3_64_intdigest(rows[self.numbers.index(number)].tobytes()) for number in numbers]

    def read(self, numbers: Sequence[int], salt: str = "") -> list[bytes | None]:
        """The blocks as any reader gets them; None for a miss."""
        message = pb.Acquire(ns=self.handle, salt=salt, hashes=keys(list(numbers)), mode=1, deadline_ms=1000)
        reply = self.connection.call(Kind.ACQUIRE, message.SerializeToString())
        status = expect(pb.AcquireOk, reply, Kind.ACQUIRE_OK).status
        found: list[bytes | None] = []
        for each in status:
            data = bytearray(BLOCK_BYTES) if each == 3 else None
            if data is not None:
                self.connection.receive_raw([memoryview(data)])
            found.append(bytes(data) if data is not None else None)
        return found

    def close(self) -> None:
        self.connection.close()
