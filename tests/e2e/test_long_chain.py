"""One chain three times as long as its node's memory, or its tenant's share, through a real pool and the client."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstrata.client import Client, PoolNamespace, Tier
from kvstrata.client.admin import AdminClient
from kvstrata.client.results import StoreResult
from kvstrata.proto import control_pb2 as control
from tests.e2e.real_pool import ANY, Daemon, RealPool, keys, payload
from tests.waiting import until

BLOCK_BYTES = 32 << 10
#: 24 MiB, on a node with 8 MiB of memory.
COUNT = 768
STEP = 64


class Pool(RealPool):
    """One node with 8 MiB of memory."""

    def __init__(self, base: Path, policy: str) -> None:
        self._policy = policy
        super().__init__(base, 1, "8MiB")

    def start_node(self, index: int) -> None:
        name = f"node{index}"
        self.daemons[name] = Daemon(
            "storage", "--master", self.address, "--listen", ANY, "--http", ANY, "--data", str(self._base / name),
            "--dram", self._dram, "--slab", "1MiB", "--ssd", f"{self._base / 'ssd'}=192MiB",
            "--ssd-policy", self._policy, log=self._base / f"{name}.log",
        )  # fmt: skip


class Chain:
    """One conversation: block i follows block i - 1."""

    def __init__(self, client: Client, name: str, salt: str = "") -> None:
        self.client, self.salt = client, salt
        self.ns: PoolNamespace = client.namespace(name, block_bytes=BLOCK_BYTES, block_tokens=16)
        self.hashes = keys(COUNT, name)
        self.data = payload(self.hashes, salt, BLOCK_BYTES)
        self.rows = client.register(self.data).rows(self.ns)

    def store(self, start: int, stop: int) -> StoreResult:
        parent = self.hashes[16 * (start - 1) : 16 * start] if start else None
        packed = self.hashes[16 * start : 16 * stop]
        return self.client.store(self.ns, self.salt, packed, self.rows[start:stop], parent, start)

    def found(self) -> int:
        return self.client.lookup(self.ns, self.salt, self.hashes).hit_blocks

    def load(self, start: int, stop: int) -> np.ndarray:
        """The tiers it came from; every byte is compared."""
        into = np.zeros((stop - start, BLOCK_BYTES), np.uint8)
        rows = self.client.register(into).rows(self.ns)
        result = self.client.load(self.ns, self.salt, self.hashes[16 * start : 16 * stop], rows)
        assert result.loaded.all(), (start, result.reasons)
        assert (into == self.data[start:stop]).all()
        return result.tiers

    def read_back(self) -> None:
        """In pieces, and all of it in one call."""
        for start in range(0, COUNT, STEP):
            self.load(start, start + STEP)
        assert (self.load(0, COUNT) == Tier.SSD).sum() >= COUNT * 3 // 5


@pytest.fixture(scope="module")
def through(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    pool = Pool(tmp_path_factory.mktemp("through"), "write-through")
    yield pool
    pool.end()


@pytest.fixture(params=["shm", "tcp"])
def client(through: Pool, request: pytest.FixtureRequest) -> Iterator[Client]:
    with Client(through.address, transport=request.param, transfer_deadline_ms=20_000, verify="always") as client:
        yield client


def test_in_pieces_and_written_through(client: Client) -> None:
    chain = Chain(client, f"pieces-{client._choice.spec}")
    for start in range(0, COUNT, STEP):
        stored = chain.store(start, start + STEP)
        assert stored.stored.all() and stored.durable.all(), (start, stored.reasons)
    until(lambda: chain.found() == COUNT)
    chain.read_back()


def test_in_one_call(client: Client) -> None:
    """The node has room for a third of it; what is on SSD makes room for the next third."""
    chain = Chain(client, f"once-{client._choice.spec}")
    stored = chain.store(0, COUNT)
    assert stored.stored.all() and stored.durable.all(), stored.reasons
    until(lambda: chain.found() == COUNT)
    chain.read_back()


def test_within_a_share(through: Pool, client: Client) -> None:
    salt = f"small-{client._choice.spec}"
    with AdminClient(through.address) as admin:
        admin.set_tenant(control.TenantPolicy(salt=salt, dram_limit=COUNT // 6 * BLOCK_BYTES))
    chain = Chain(client, f"share-{client._choice.spec}", salt)
    for start in range(0, COUNT, STEP):
        assert chain.store(start, start + STEP).stored.all()
    until(lambda: chain.found() == COUNT)
    chain.read_back()


def test_in_pieces_as_fast_as_memory_is_demoted(tmp_path: Path) -> None:
    pool = Pool(tmp_path, "demote")
    try:
        with Client(pool.address, transfer_deadline_ms=20_000, verify="always") as client:
            chain = Chain(client, "demoted")
            for start in range(0, COUNT, STEP):
                until(lambda start=start: bool(chain.store(start, start + STEP).stored.all()))  # type: ignore[misc]
            until(lambda: chain.found() == COUNT)
            until(lambda: _demoted(pool) == COUNT)  # else what is read from SSD makes what is not there leave
            chain.read_back()
    finally:
        pool.end()


def _demoted(pool: Pool) -> int:
    with urllib.request.urlopen(f"http://{pool.node(0).ready['http']}/healthz", timeout=5) as answer:
        return int(json.loads(answer.read())["counts"]["demoted"])
