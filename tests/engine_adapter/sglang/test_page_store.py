"""Pages through a pool: bytes come back into other slots, and trouble is a miss."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pytest

from kvstrata.client import BlockStatus, Client, LoadResult, StoreResult
from kvstrata.engine_adapter.sglang.page_store import PageStore
from tests.e2e.real_pool import RealPool
from tests.engine_adapter.sglang.stand_ins import AbsentClient, ArrayPool, Config
from tests.waiting import until


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealPool]:
    real = RealPool(tmp_path_factory.mktemp("pool"))
    yield real
    real.end()


@pytest.fixture
def client(pool: RealPool) -> Iterator[Client]:
    with Client(pool.address, verify="always") as opened:
        yield opened


def names(count: int, chain: str) -> list[str]:
    return [hashlib.sha256(f"{chain}/{i}".encode()).hexdigest() for i in range(count)]


def opened(client: Client, host: ArrayPool, config: Config | None = None) -> PageStore:
    pages = host.pages()
    named = pages.namespace(config or Config(), "")
    namespace = client.namespace(
        named.group,
        block_bytes=named.block_bytes,
        block_tokens=named.block_tokens,
        hash_bytes=named.hash_bytes,
        shard=named.shard,
        shard_count=named.shard_count,
    )
    return PageStore(client, namespace, client.register(host.bytes), pages)


def stored(store: PageStore, keys: list[str], slots: npt.NDArray[np.int64], before: Sequence[str] = ()) -> None:
    """Until all is there: on a busy machine a node may fall silent for longer than a client waits."""
    until(lambda: store.store(keys, slots, before) == [True] * len(keys))
    until(lambda: store.hit_pages(keys[:1]) == 1)


def loaded(store: PageStore, keys: list[str], slots: npt.NDArray[np.int64], expected: list[bool]) -> None:
    until(lambda: store.load(keys, slots) == expected)


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_bytes_come_back_into_other_slots(client: Client, layout: str) -> None:
    here, there = ArrayPool(layout).fill(1), ArrayPool(layout).fill(2)
    writer, reader, keys = opened(client, here), opened(client, there), names(5, layout)
    assert reader.hit_pages(keys) == 0
    source, target = here.slots_of(9, 3, 15, 0, 7), there.slots_of(2, 11, 5, 8, 1)
    untouched = np.setdiff1d(np.arange(there.slots), target)
    before = there.tokens(untouched)
    stored(writer, keys[:2], source[:8])
    stored(writer, keys[2:], source[8:], keys[:2])
    until(lambda: reader.hit_pages(keys) == 5)
    loaded(reader, keys, target, [True] * 5)
    assert (there.tokens(target) == here.tokens(source)).all()
    assert (there.tokens(untouched) == before).all()
    stored(writer, keys, source)  # they are there already


def test_a_hole_ends_the_hit_and_only_it_is_not_loaded(client: Client) -> None:
    host = ArrayPool().fill(3)
    store, keys = opened(client, host), names(4, "hole")
    kept = [keys[0], keys[2], keys[3]]
    stored(store, kept, host.slots_of(0, 2, 3))
    until(lambda: store.hit_pages([keys[3]]) == 1)
    until(lambda: store.hit_pages(keys) == 1)
    loaded(store, keys, host.slots_of(4, 5, 6, 7), [True, False, True, True])
    assert (host.tokens(host.slots_of(4, 6, 7)) == host.tokens(host.slots_of(0, 2, 3))).all()


def test_a_page_is_hit_when_every_rank_has_it(client: Client) -> None:
    hosts = [ArrayPool().fill(4), ArrayPool().fill(5)]
    ranks = [opened(client, host, Config(tp_rank=rank, tp_size=2)) for rank, host in enumerate(hosts)]
    keys = names(2, "ranks")
    until(lambda: all(ranks[0].store(keys, hosts[0].slots_of(0, 1))))
    assert ranks[0].hit_pages(keys) == ranks[1].hit_pages(keys) == 0
    until(lambda: all(ranks[1].store(keys, hosts[1].slots_of(0, 1))))
    until(lambda: ranks[0].hit_pages(keys) == ranks[1].hit_pages(keys) == 2)
    loaded(ranks[0], keys, hosts[0].slots_of(4, 5), [True, True])
    assert (hosts[0].tokens(hosts[0].slots_of(4, 5)) == hosts[0].tokens(hosts[0].slots_of(0, 1))).all()


def test_trouble_is_a_miss(client: Client) -> None:
    host = ArrayPool()
    whole = opened(client, host)
    keys, slots = names(2, "trouble"), host.slots_of(0, 1)
    absent = PageStore(AbsentClient(), whole._namespace, whole._region, whole._pages)
    assert absent.hit_pages(keys) == 0
    assert absent.load(keys, slots) == absent.store(keys, slots) == [False, False]
    assert whole.load(keys, slots[:-1]) == whole.store(keys, slots[:-1]) == [False, False]  # no whole pages
    assert whole.load(keys, slots + host.slots) == [False, False]  # outside of the buffer
    assert whole.hit_pages([]) == 0 and whole.load([], slots[:0]) == whole.store([], slots[:0]) == []
    client.close()
    assert whole.hit_pages(keys) == 0 and whole.load(keys, slots) == whole.store(keys, slots) == [False, False]


def test_pages_are_given_back_when_nothing_touches_them_any_more(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node stands still in the middle of a one-sided read."""
    host = ArrayPool()
    store = opened(client, host)
    asked: list[float] = []

    class Landing:
        def settled(self) -> bool:
            return len(asked) > 2

        def wait(self, deadline: float) -> bool:
            asked.append(deadline)
            return self.settled()

    def load(*_: object) -> LoadResult:
        status = np.array([BlockStatus.PENDING], np.uint8)
        return LoadResult.of(status, np.zeros(1, np.uint8), 0.0, 0, (Landing(),))

    monkeypatch.setattr(client, "load", load)
    assert store.load(names(1, "still"), host.slots_of(0)) == [False]
    assert len(asked) == 3


def test_what_another_writer_stores_now_is_no_failure(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    host = ArrayPool()
    store = opened(client, host)
    status = np.array([BlockStatus.STORED, BlockStatus.IN_FLIGHT, BlockStatus.FULL], np.uint8)
    monkeypatch.setattr(client, "store", lambda *_: StoreResult.of(status, 0.0, 0))
    assert store.store(names(3, "race"), host.slots_of(0, 1, 2)) == [True, True, False]
