"""Rubbish on every port of a running pool: each process lives, and every block is still there."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstrata.client import Client
from kvstrata.client.admin import AdminClient
from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto import wire
from kvstrata.proto.wire import Kind
from kvstrata.transfer.identity import Identity
from tests.e2e.real_pool import RealPool, keys, payload
from tests.waiting import until

ROUNDS = 40
CONNECT_S = 10.0


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[RealPool]:
    pool = RealPool(tmp_path, nodes=1)
    yield pool
    pool.end()


def ports(pool: RealPool) -> dict[str, str]:
    master, node = pool.daemons["master"].ready, pool.node().ready
    return {
        "master channel": master["channel"],
        "master grpc": master["grpc"],
        "master http": master["http"],
        "node channel": node["channel"],
        "node http": node["http"],
        "node unix": node["unix"],
    }


def connected(where: str) -> socket.socket:
    if where.startswith("/"):
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(CONNECT_S)
        sock.connect(where)
        return sock
    host, _, port = where.rpartition(":")
    return socket.create_connection((host, int(port)), CONNECT_S)


def messages(random_bytes: random.Random) -> Iterator[bytes]:
    """Noise, half frames, oversized claims, well-formed frames with rubbish inside, another protocol."""
    hello = Identity.new().hello().SerializeToString()
    greeted = wire.encode_header(Kind.HELLO, 1, len(hello)) + hello
    while True:
        noise = random_bytes.randbytes(random_bytes.randrange(1, 3000))
        kind = random_bytes.choice(list(Kind))
        yield noise
        yield greeted + noise
        yield greeted + struct.pack("<2sBBIIQ", b"KV", 1, kind, 1, 0xFFFFFFF0, 0)
        yield greeted + struct.pack("<2sBBIIQ", b"KV", 1, Kind.WRITE, 1, 0, 1 << 35)
        yield greeted + wire.encode_header(kind, 7, len(noise)) + noise
        yield greeted + wire.encode_header(kind, 7, len(noise)) + noise[: len(noise) // 2]
        yield greeted + _acquire_of_rubbish(random_bytes)
        yield b"GET /%s HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n" % noise.hex().encode()


def _acquire_of_rubbish(random_bytes: random.Random) -> bytes:
    """A message that decodes, with values that mean nothing."""
    message = pb.Acquire(
        ns=random_bytes.randrange(1 << 32),
        salt="s" * random_bytes.randrange(300),
        hashes=random_bytes.randbytes(random_bytes.randrange(200)),
        mode=random_bytes.randrange(5),
        deadline_ms=random_bytes.randrange(1 << 32),
        releases=random_bytes.randbytes(random_bytes.randrange(40)),
    ).SerializeToString()
    return wire.encode_header(Kind.ACQUIRE, 3, len(message)) + message


def test_the_pool_outlives_rubbish_on_every_port(pool: RealPool) -> None:
    with Client(pool.address, transport="shm", verify="always") as client:
        ns = client.namespace("model/g", block_bytes=4096, block_tokens=16)
        hashes = keys(50, "garbage")
        data = payload(hashes, "", 4096)
        rows = client.register(data).rows(ns)
        until(lambda: client.store(ns, "", hashes, rows).stored.all())
        rubbish = messages(random.Random(5))
        for _ in range(ROUNDS):
            for where in ports(pool).values():
                # A daemon may hang up before all is written: that is its answer.
                with contextlib.suppress(ConnectionError), connected(where) as sock:
                    sock.sendall(next(rubbish))
        into = np.zeros_like(data)
        loaded = client.load(ns, "", hashes, client.register(into).rows(ns))
        assert loaded.loaded.all() and (into == data).all()
        assert all(daemon.process.poll() is None for daemon in pool.daemons.values())
        with AdminClient(pool.address) as admin:
            assert admin.health().healthy
            until(lambda: all(not n.status.leases and not n.status.reservations for n in admin.nodes()))
