"""A client behind a proxy that delays, stalls, resets, cuts short and turns bits: bounded, and right or missed."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvstrata.client import Client, LoadResult
from kvstrata.client.admin import AdminClient
from kvstrata.proto.errors import KVError
from kvstrata.transfer.base import Endpoint, Peer
from kvstrata.transfer.select import TransportChoice
from tests.chaos.proxy import Proxy
from tests.e2e.real_pool import RealPool, keys, payload
from tests.waiting import until

SIZE = 4096
COUNT = 128
#: Of every call here; past it a peer's silence and a shared machine may add something.
DEADLINE_S = 2.0
BOUND_S = DEADLINE_S + 1.0


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealPool]:
    pool = RealPool(tmp_path_factory.mktemp("links"), nodes=1)
    yield pool
    pool.end()


@pytest.fixture
def node_link(pool: RealPool, seed: int) -> Iterator[Proxy]:
    with Proxy(str(pool.node().ready["channel"]), seed) as proxy:
        yield proxy


@pytest.fixture
def master_link(pool: RealPool, seed: int) -> Iterator[Proxy]:
    with Proxy(pool.address, seed) as proxy:
        yield proxy


@pytest.fixture
def client(node_link: Proxy, master_link: Proxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    """Both of its links go through a proxy."""
    connect = TransportChoice.connect

    def through_proxy(self: TransportChoice, endpoint: Endpoint) -> Peer:
        return connect(self, dataclasses.replace(endpoint, channel=node_link.address))

    monkeypatch.setattr(TransportChoice, "connect", through_proxy)
    with Client(master_link.address, transport="tcp", verify="always", transfer_deadline_ms=2000) as client:
        yield client


class Chain:
    """Blocks in the pool, stored over a sound link."""

    def __init__(self, pool: RealPool, client: Client, name: str) -> None:
        self._client = client
        self.ns = client.namespace("model/bad", block_bytes=SIZE, block_tokens=16)
        self.hashes = keys(COUNT, name)
        self.data = payload(self.hashes, "", SIZE)
        self.into = np.zeros_like(self.data)
        self.rows = client.register(self.into).rows(self.ns)
        self.source = client.register(self.data.copy()).rows(self.ns)

    def stored(self) -> Chain:
        until(lambda: self._client.store(self.ns, "", self.hashes, self.source).stored.all())
        until(lambda: self._client.lookup(self.ns, "", self.hashes).hit_blocks == COUNT)
        return self

    def load(self) -> LoadResult:
        """Whatever is loaded is right, in time."""
        self.into[:] = 0
        began = time.monotonic()
        result = self._client.load(self.ns, "", self.hashes, self.rows)
        assert time.monotonic() - began < BOUND_S
        assert (self.into[result.loaded] == self.data[result.loaded]).all(), "wrong bytes"
        return result


def delayed(proxy: Proxy) -> None:
    proxy.delay_s = 0.1  # each way


def lossy(proxy: Proxy) -> None:
    proxy.loss = 0.01


def reset(proxy: Proxy) -> None:
    proxy.reset_after = 10_000


def cut_short(proxy: Proxy) -> None:
    proxy.end_after = 10_000


def flipping(proxy: Proxy) -> None:
    proxy.flip = 0.2


@contextlib.contextmanager
def healed(client: Client, master_link: Proxy, fault: Callable[[Proxy], None]) -> Iterator[Client]:
    """The client goes on. After turned bits another one does: only block bytes have a checksum beside TCP's own, and
    an answer with a wrong bit in a namespace's handle leaves its client with misses."""
    if fault is not flipping:
        yield client
        return
    with Client(master_link.address, transport="tcp", verify="always") as other:
        yield other


FAULTS = [delayed, lossy, reset, cut_short, flipping]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_link_to_a_node(
    pool: RealPool, client: Client, node_link: Proxy, master_link: Proxy, fault: Callable[[Proxy], None]
) -> None:
    chain = Chain(pool, client, fault.__name__).stored()
    assert chain.load().loaded.all()
    fault(node_link)
    came = [int(chain.load().loaded.sum()) for _ in range(5)]
    if fault is lossy:
        assert max(came) == COUNT, "one packet in a hundred is late: the rest comes"
    if fault is delayed:
        # Two tenths of a second there and back are below the silence bound: slow, and alive.
        assert max(came) == COUNT
    if fault in (reset, cut_short):
        assert max(came) < COUNT, "the link broke in each of them"
    fresh = Chain(pool, client, f"{fault.__name__}/stored")
    began = time.monotonic()
    with contextlib.suppress(*((KVError,) if fault is flipping else ())):  # a request that was rightly refused
        client.store(fresh.ns, "", fresh.hashes, fresh.source)
    assert time.monotonic() - began < BOUND_S
    node_link.heal()
    with healed(client, master_link, fault) as client:
        until(lambda: Chain(pool, client, fault.__name__).load().loaded.all())
        Chain(pool, client, f"{fault.__name__}/stored").load()  # what was stored is what was sent, or is not there
    assert pool.node().process.poll() is None


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_link_to_the_master(
    pool: RealPool, client: Client, master_link: Proxy, fault: Callable[[Proxy], None]
) -> None:
    chain = Chain(pool, client, f"m/{fault.__name__}").stored()
    fault(master_link)
    # A turned bit may make a request that is rightly refused, as of a namespace with another layout.
    refusals = (KVError,) if fault is flipping else ()
    for number in range(5):
        with contextlib.suppress(*refusals):
            began = time.monotonic()
            found = client.lookup(chain.ns, "", chain.hashes)
            assert time.monotonic() - began < BOUND_S
            assert found.hit_blocks in (None, 0, COUNT) or fault is flipping
            chain.load()
            fresh = Chain(pool, client, f"m/{fault.__name__}/{number}")
            client.store(fresh.ns, "", fresh.hashes, fresh.source)
    master_link.heal()
    with healed(client, master_link, fault) as client:
        again = Chain(pool, client, f"m/{fault.__name__}")
        until(lambda: client.lookup(again.ns, "", again.hashes).hit_blocks == COUNT)
        until(lambda: again.load().loaded.all())
    assert pool.daemons["master"].process.poll() is None


def test_a_link_that_holds_still_and_one_that_is_reset(pool: RealPool, client: Client, node_link: Proxy) -> None:
    chain = Chain(pool, client, "held").stored()
    node_link.hold()
    began = time.monotonic()
    result = client.load(chain.ns, "", chain.hashes, chain.rows)
    assert not result.loaded.any() and time.monotonic() - began < 1.0
    node_link.go_on()
    until(lambda: chain.load().loaded.all())
    node_link.reset_all()
    until(lambda: chain.load().loaded.all())


def test_nothing_is_held_after_all_that(pool: RealPool) -> None:
    with AdminClient(pool.address) as admin:
        until(lambda: all(not row.status.leases and not row.status.reservations for row in admin.nodes()))
        assert admin.health().healthy
