"""A bump of the weights while blocks are read, written and promoted: old bytes until it is answered, never after."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from kvstrata.client import Client, PoolNamespace
from kvstrata.client.admin import AdminClient
from kvstrata.proto.errors import FingerprintMismatch
from tests.e2e.real_pool import keys, payload
from tests.e2e.tiered_pool import BLOCK_BYTES, TieredPool
from tests.waiting import until

COUNT = 96
BUMPS = 4


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TieredPool]:
    pool = TieredPool(tmp_path_factory.mktemp("pool"), ssd="64MiB")
    yield pool
    pool.end()


@dataclass(slots=True)
class Weights:
    """A group whose blocks have other bytes at each epoch. ``answered`` is the newest epoch that a bump was answered
    with, ``asked`` the newest that one was asked for."""

    group: str
    hashes: bytes
    answered: int = 0
    asked: int = 0
    data: list[np.ndarray] = field(default_factory=list)

    @classmethod
    def of(cls, group: str, count: int = COUNT) -> Weights:
        hashes = keys(count, group)
        return cls(group, hashes, data=[payload(hashes, f"epoch {n}", BLOCK_BYTES) for n in range(BUMPS + 1)])

    def open(self, client: Client) -> PoolNamespace:
        return client.namespace(self.group, block_bytes=BLOCK_BYTES, block_tokens=16)

    def store(self, client: Client, epoch: int) -> None:
        ns = self.open(client)
        rows = client.register(self.data[epoch].copy()).rows(ns)
        until(lambda: bool(client.store(ns, "", self.hashes, rows).stored.all()), 20)

    def epochs_of(self, rows: np.ndarray, loaded: np.ndarray) -> set[int]:
        """Of which epochs these bytes are; fails on bytes of none, and on torn ones."""
        found = set()
        for position in np.flatnonzero(loaded).tolist():
            of = [epoch for epoch, data in enumerate(self.data) if (data[position] == rows[position]).all()]
            assert of, f"block {position} has bytes that were never stored"
            found.update(of)
        return found


class Reader(threading.Thread):
    """Loads everything again and again with one handle, and judges what came by when it was asked for."""

    def __init__(self, weights: Weights, address: str, transport: str) -> None:
        super().__init__()
        self._weights, self._address, self._transport = weights, address, transport
        self.over = threading.Event()
        self.problem: BaseException | None = None
        self.hits = self.misses = 0

    def run(self) -> None:
        try:
            with Client(
                self._address, transport=self._transport, transfer_deadline_ms=10_000, verify="never"
            ) as client:
                while not self.over.is_set():
                    self._read(client, self._weights.open(client))
        except BaseException as error:
            self.problem = error
            raise

    def _read(self, client: Client, ns: PoolNamespace) -> None:
        weights = self._weights
        into = np.zeros_like(weights.data[0])
        rows = client.register(into).rows(ns)
        for _ in range(5):
            answered = weights.answered
            got = client.load(ns, "", weights.hashes, rows)
            found = weights.epochs_of(into, got.loaded)
            assert found <= {ns.epoch}, f"a handle of epoch {ns.epoch} was given {found}"
            assert not found or ns.epoch >= answered, "old bytes after the bump was answered"
            self.hits += int(got.loaded.sum())
            self.misses += int((~got.loaded).sum())
        client.unregister(rows.region)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_readers_see_old_bytes_until_the_answer_and_never_after(pool: TieredPool, transport: str) -> None:
    weights = Weights.of(f"read/{transport}")
    with Client(pool.address, transfer_deadline_ms=10_000) as writer, AdminClient(pool.address) as admin:
        weights.store(writer, 0)
        readers = [Reader(weights, pool.address, transport) for _ in range(2)]
        for reader in readers:
            reader.start()
        try:
            for epoch in range(1, BUMPS + 1):
                until(lambda: all(reader.hits for reader in readers), 20)
                bumped = admin.bump_epoch(weights.group)
                weights.answered = epoch
                assert (bumped.epoch, list(bumped.unreached)) == (epoch, [])
                weights.store(writer, epoch)  # the same keys, other bytes, in the slots of the old ones
                for reader in readers:
                    reader.hits = 0
        finally:
            for reader in readers:
                reader.over.set()
            for reader in readers:
                reader.join(30)
        assert not any(reader.problem for reader in readers)
        assert all(reader.misses for reader in readers), "nobody read while the weights changed"


def test_a_bump_while_blocks_are_promoted(pool: TieredPool) -> None:
    """Everything is on SSD only; it is read up while the weights change."""
    weights = Weights.of("promoted", 200)
    with Client(pool.address, transfer_deadline_ms=10_000) as client, AdminClient(pool.address) as admin:
        for epoch in range(BUMPS):
            weights.store(client, epoch)
            ns = weights.open(client)
            filler = client.register(np.zeros((128, BLOCK_BYTES), np.uint8)).rows(ns)
            for turn in range(4):
                client.store(ns, "filler", keys(128, f"{epoch}/{turn}"), filler)
            into = np.zeros_like(weights.data[0])
            load = client.load_async(ns, "", weights.hashes, client.register(into).rows(ns))
            time.sleep(0.005 * epoch)  # at another moment of the reading each time
            assert not list(admin.bump_epoch(weights.group).unreached)
            again = client.load(ns, "", weights.hashes, client.register(np.zeros_like(into)).rows(ns))
            assert not again.loaded.any(), "it came up after the answer"
            load.wait(time.monotonic() + 20)
            got = load.result()
            assert weights.epochs_of(into, got.loaded) <= {epoch}
    assert pool.health()["problems"] == []


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_handle_of_older_weights_is_not_given_newer_bytes(pool: TieredPool, transport: str) -> None:
    """Its client knows where the blocks were, and asks the node itself: there are others under these keys now."""
    weights = Weights.of(f"pinned/{transport}")
    with (
        Client(pool.address) as writer,
        Client(pool.address, transport=transport, transfer_deadline_ms=10_000) as reader,
        AdminClient(pool.address) as admin,
    ):
        weights.store(writer, 0)
        old = weights.open(reader)
        into = np.zeros_like(weights.data[0])
        rows = reader.register(into).rows(old)
        until(lambda: bool(reader.load(old, "", weights.hashes, rows).loaded.all()), 20)  # a lookup lags a store
        assert not list(admin.bump_epoch(weights.group).unreached)
        weights.store(writer, 1)
        into[:] = 0
        assert not reader.load(old, "", weights.hashes, rows).loaded.any()
        new = weights.open(reader)
        until(lambda: bool(reader.load(new, "", weights.hashes, rows).loaded.all()), 20)
        got = reader.load(new, "", weights.hashes, rows)
        assert got.loaded.all() and weights.epochs_of(into, got.loaded) == {1}


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_bump_while_blocks_are_stored_leaves_none_of_them(pool: TieredPool, transport: str) -> None:
    weights = Weights.of(f"store/{transport}", 256)
    with (
        Client(pool.address, transport=transport, transfer_deadline_ms=10_000) as writer,
        Client(pool.address, transport=transport, transfer_deadline_ms=10_000) as reader,
        AdminClient(pool.address) as admin,
    ):
        for epoch in range(BUMPS):
            old = weights.open(writer)
            rows = writer.register(weights.data[epoch].copy()).rows(old)
            stores = [
                writer.store_async(old, "", weights.hashes[16 * low : 16 * (low + 64)], rows[low : low + 64])
                for low in range(0, 256, 64)
            ]
            time.sleep(0.004 * epoch)
            assert not list(admin.bump_epoch(weights.group).unreached)
            new = weights.open(reader)
            assert new.epoch == epoch + 1
            for store in stores:
                store.wait(time.monotonic() + 20)
                try:
                    store.result()
                except FingerprintMismatch:
                    continue  # it came after
            into = np.zeros_like(weights.data[0])
            for ns in (old, new):
                got = reader.load(ns, "", weights.hashes, reader.register(into).rows(ns))
                assert not got.loaded.any(), "what was written with old weights can be read"
            assert reader.lookup(new, "", weights.hashes).hit_blocks == 0
