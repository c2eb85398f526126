"""Processes that store by having a node read their memory one-sidedly, to be stopped and killed by tests.

Run as a program it is their parent: a line of JSON on its standard input forks one, which answers with a line when its
rails are open, and, of one that pulls, with a line after its first pull.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from functools import cache

import numpy as np

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.status import BlockStatus
from kvstrata.proto.wire import Kind
from kvstrata.transfer.connection import Connection, expect
from kvstrata.transfer.identity import Identity
from kvstrata.transfer.rdma.engine import RailEngine
from kvstrata.transfer.rdma.found import find_rails
from kvstrata.transfer.rdma.owner import open_engine
from kvstrata.transfer.rdma.rails import RailMode, RailOptions
from tests.e2e.real_pool import keys, payload

CMA = RailOptions(RailMode.CMA)


def connect(channel: str, session: bytes) -> Connection:
    return Connection.open(channel, Identity(session), silence_s=5.0, connect_s=5.0)


def open_rails(connection: Connection, engine: RailEngine) -> pb.OpenRailsOk:
    message = pb.OpenRails(rails="cma", backend="UCX", agent=engine.connection()).SerializeToString()
    return expect(pb.OpenRailsOk, connection.call(Kind.OPEN_RAILS, message), Kind.OPEN_RAILS_OK)


def register(connection: Connection, engine: RailEngine, memory: np.ndarray) -> None:  # type: ignore[type-arg]
    registered = engine.register(memory.ctypes.data, memory.nbytes)
    message = pb.RegisterRegion(
        region=1, address=memory.ctypes.data, length=memory.nbytes, agent=registered.metadata
    ).SerializeToString()
    answer = expect(pb.RegisterRegionOk, connection.call(Kind.REGISTER_REGION, message), Kind.REGISTER_REGION_OK)
    assert answer.method == "rdma"


def pull(
    connection: Connection, handle: int, hashes: bytes, block_bytes: int, salt: str = "", deadline_ms: int = 5000
) -> list[int]:
    """Blocks 0 to n-1 of region 1, hashed by the node; a status each."""
    count = len(hashes) // 16
    table = np.array([[[row * block_bytes, block_bytes]] for row in range(count)], np.int64)
    message = pb.Pull(
        reserve=pb.Reserve(ns=handle, salt=salt, hashes=hashes, deadline_ms=deadline_ms),
        region=1,
        descriptors=table.tobytes(),
        pieces=1,
        hash_here=True,
    ).SerializeToString()
    answer = expect(pb.ReserveOk, connection.call(Kind.PULL, message), Kind.RESERVE_OK)
    granted = [i for i, status in enumerate(answer.status) if status == BlockStatus.RESERVED]
    status = list(answer.status)
    if granted:
        message = pb.Commit(reservation=answer.reservation, checksums=bytes(8 * len(granted))).SerializeToString()
        done = expect(pb.CommitOk, connection.call(Kind.COMMIT, message), Kind.COMMIT_OK).status
        for position, each in zip(granted, done, strict=True):
            status[position] = each
    return status


def namespace(connection: Connection, block_bytes: int) -> int:
    spec = pb.NamespaceSpec(
        group="model/rails", shard=0, shard_count=1, block_bytes=block_bytes, block_tokens=16, hash_bytes=16
    )
    message = pb.OpenNamespace(spec=spec).SerializeToString()
    return expect(pb.NamespaceHandle, connection.call(Kind.OPEN_NAMESPACE, message), Kind.NAMESPACE_HANDLE).handle


def write(channel: str, session: str, count: int, block_bytes: int, what: str) -> None:
    """``what``: "wait" (somebody pulls in its name), or "pull", again and again, for another tenant each time."""
    hashes, memory = _memory(count, block_bytes)
    engine = open_engine("writer", find_rails(CMA), CMA)
    connection = connect(channel, bytes.fromhex(session))
    open_rails(connection, engine)
    register(connection, engine, memory)
    handle = namespace(connection, block_bytes)
    _say(pid=os.getpid(), handle=handle)
    while what == "wait":
        signal.pause()
    for turn in range(1 << 30):
        begun = time.monotonic()
        pull(connection, handle, hashes, block_bytes, f"{session}-{turn % 4}", 30_000)
        if not turn:
            _say(seconds=time.monotonic() - begun)


@cache
def _memory(count: int, block_bytes: int) -> tuple[bytes, np.ndarray]:  # type: ignore[type-arg]
    hashes = keys(count, "rails")
    return hashes, payload(hashes, "", block_bytes).reshape(-1)


def _say(**what: float) -> None:
    print(json.dumps(what), flush=True)


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        asked = json.loads(line)
        _memory(asked["count"], asked["block_bytes"])
        if not os.fork():
            sys.stdin.close()
            write(**asked)


if __name__ == "__main__":
    main()
