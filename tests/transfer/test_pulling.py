"""Stores that a node pulls, whatever is left of their time: the commit always carries what was hashed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.keys import Namespace
from kvstrata.proto.status import BlockStatus
from kvstrata.proto.wire import Kind
from kvstrata.transfer.base import Endpoint, Push
from kvstrata.transfer.checksums import checksums
from kvstrata.transfer.connection import SILENCE_S, expect
from kvstrata.transfer.frames import Frame
from kvstrata.transfer.identity import Identity
from kvstrata.transfer.link import NodeLink
from kvstrata.transfer.pulling import COMMIT_AT_ONCE_BYTES, pull
from kvstrata.transfer.regions import Region
from kvstrata.transfer.server import Reply
from kvstrata.transfer.sessions import ServerConnection

Serve = Callable[..., Any]
S = BlockStatus
COUNT = 4


class Puller:
    """A node that reserves every second block of a pull, and says of the others that it has them."""

    def __init__(self) -> None:
        self.status = np.array([S.RESERVED, S.ALREADY_PRESENT] * (COUNT // 2), np.uint8)
        self.pulls: list[pb.Pull] = []
        self.commits: list[pb.Commit] = []

    def open(self, _: ServerConnection, __: Frame) -> Reply:
        return Reply(Kind.NAMESPACE_HANDLE, pb.NamespaceHandle(handle=1).SerializeToString())

    def pull(self, _: ServerConnection, frame: Frame) -> Reply:
        self.pulls.append(expect(pb.Pull, frame, Kind.PULL))
        return Reply(Kind.RESERVE_OK, pb.ReserveOk(reservation=9, status=self.status.tobytes()).SerializeToString())

    def commit(self, _: ServerConnection, frame: Frame) -> Reply:
        self.commits.append(expect(pb.Commit, frame, Kind.COMMIT))
        status = bytes([S.STORED] * (COUNT // 2))
        return Reply(Kind.COMMIT_OK, pb.CommitOk(status=status).SerializeToString())


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("shortly", [True, False])
def test_what_a_node_grants_is_committed_with_its_checksums(serve: Serve, at_once: bool, shortly: bool) -> None:
    block_bytes = COMMIT_AT_ONCE_BYTES // COUNT * (1 if at_once else 2)
    namespace = Namespace("g", block_bytes=block_bytes, block_tokens=16)
    memory = np.random.default_rng(1).integers(0, 256, (COUNT, block_bytes)).astype(np.uint8)
    rows = Region(memory, memory).rows(namespace)
    node = Puller()
    running = serve({Kind.OPEN_NAMESPACE: node.open, Kind.PULL: node.pull, Kind.COMMIT: node.commit})
    link = NodeLink(Endpoint("n1", 7, running.address), [running.address], Identity.new(name="test"))
    link.handle(namespace, time.monotonic() + 5)
    status, durable = np.zeros(COUNT, np.uint8), np.zeros(COUNT, bool)
    deadline = time.monotonic() + (SILENCE_S - 0.01 if shortly else 20)
    hashes = bytes(range(COUNT * namespace.hash_bytes))
    pull(link, Push(namespace, "", hashes, rows, deadline), status, durable)
    assert status.tolist() == [S.STORED, S.ALREADY_PRESENT] * (COUNT // 2)
    assert bool(node.pulls[0].checksums) is at_once
    assert node.commits[0].checksums == checksums(rows)[::2].tobytes()
    link.close()
