"""Blocks on SSD, weight epochs, hints and durability, over a fake pool: who is asked what, in which order."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.client import BlockStatus, Client, PoolNamespace, Tier
from kvstrata.client.plan import Part, memory_first, positions_of
from kvstrata.proto.errors import FingerprintMismatch, InvalidArgument, Unavailable
from kvstrata.proto.status import HintKind
from tests.client.fake_pool import FakeMaster, FakeNode, packed, split
from tests.waiting import until

SIZE = 64
PIECE = 2  # blocks
S = BlockStatus


@pytest.fixture
def ns(client: Client) -> PoolNamespace:
    return client.namespace("model/a", block_bytes=SIZE, block_tokens=16)


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstrata.client.reading.PIECE_BYTES", PIECE * SIZE)


class World:
    """Node "a" holds blocks 0..n-1, those of ``on_ssd`` on SSD; the client has looked them up."""

    def __init__(self, client: Client, ns: PoolNamespace, master: FakeMaster, node: FakeNode, count: int) -> None:
        self.client, self.ns, self.master, self.node = client, ns, master, node
        self.data = np.random.default_rng(count).integers(1, 255, (count, SIZE), dtype=np.uint8)
        self.hashes = packed(count)
        self.names = split(self.hashes)
        node.put(ns, "", self.hashes, [row.tobytes() for row in self.data])
        master.learn()

    def on_ssd(self, *positions: int) -> World:
        self.node.on_ssd = {self.names[i] for i in positions}
        self.client.lookup(self.ns, "", self.hashes)
        self.node.calls.clear()
        return self

    def load(self, *, loaded: bool = True) -> list[int]:
        """Load all; the tiers they came from."""
        into = np.zeros_like(self.data)
        result = self.client.load(self.ns, "", self.hashes, self.client.register(into).rows(self.ns))
        assert result.loaded.all() == loaded
        assert (into[result.loaded] == self.data[result.loaded]).all()
        return result.tiers.tolist()

    def calls(self) -> list[tuple[str, list[int]]]:
        return [(what, [self.names.index(name) for name in names]) for what, names in self.node.calls]


@pytest.fixture
def world(client: Client, ns: PoolNamespace, master: FakeMaster, nodes: dict[str, FakeNode]) -> Callable[[int], World]:
    return lambda count: World(client, ns, master, nodes["a"], count)


# -------------------------------------------------------------------- loads that overlap


def test_a_load_from_memory_is_one_call(world: Callable[[int], World]) -> None:
    at = world(9).on_ssd()
    assert at.load() == [Tier.DRAM] * 9
    assert at.calls() == [("fetch", list(range(9)))]


def test_what_is_on_ssd_is_asked_for_first_and_fetched_last_in_pieces(world: Callable[[int], World]) -> None:
    at = world(8).on_ssd(1, 4, 5, 6, 7)
    assert at.load() == [0, 1, 0, 0, 1, 1, 1, 1], "where they were when they were asked for, though read ahead"
    assert at.calls() == [
        ("prefetch", [0, 2, 3, 1, 4, 5, 6, 7]),
        ("fetch", [0, 2]),
        ("fetch", [3]),
        ("fetch", [1, 4]),
        ("fetch", [5, 6]),
        ("fetch", [7]),
    ]


def test_a_load_wholly_on_ssd_overlaps_too(world: Callable[[int], World]) -> None:
    at = world(4).on_ssd(0, 1, 2, 3)
    assert at.load() == [Tier.SSD] * 4
    assert at.calls() == [("prefetch", [0, 1, 2, 3]), ("fetch", [0, 1]), ("fetch", [2, 3])]


def test_what_the_node_could_not_read_ahead_is_asked_for_again(world: Callable[[int], World]) -> None:
    at = world(6)
    at.node.read_ahead_max = 3
    at.on_ssd(0, 1, 2, 3, 4, 5)
    assert at.load() == [Tier.SSD] * 6
    assert at.calls() == [
        ("prefetch", [0, 1, 2, 3, 4, 5]),
        ("fetch", [0, 1]),
        ("prefetch", [3, 4, 5]),
        ("fetch", [2, 3]),
        ("prefetch", [5]),
        ("fetch", [4, 5]),
    ]


def test_a_node_that_cannot_read_ahead_still_serves(
    world: Callable[[int], World], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise InvalidArgument("acquire mode 2 is unknown")

    monkeypatch.setattr("tests.client.fake_pool.FakePeer.prefetch", refuse)
    at = world(4).on_ssd(0, 3)
    assert at.load() == [Tier.SSD, 0, 0, Tier.SSD]


def test_blocks_that_cannot_be_read_or_find_no_room_are_misses_and_reported_as_what_they_are(
    world: Callable[[int], World],
) -> None:
    at = world(4)
    at.node.answers = {at.names[1]: S.READ_ERROR, at.names[2]: S.NO_ROOM}
    at.on_ssd(1, 2)
    into = at.client.register(np.zeros_like(at.data)).rows(at.ns)
    result = at.client.load(at.ns, "", at.hashes, into)
    assert result.reasons == {"loaded": 2, "read_error": 1, "no_room": 1}
    assert result.tiers.tolist() == [0, 255, 255, 0]
    until(lambda: len(at.master.reports) == 2)
    told = {(report.hashes, report.status, report.at_store) for report in at.master.reports}
    assert told == {(at.names[1], S.READ_ERROR, False), (at.names[2], S.NO_ROOM, False)}, "each once"


def test_blocks_without_room_are_asked_for_again_in_smaller_pieces(
    world: Callable[[int], World], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstrata.client.reading.PIECE_BYTES", 100 * SIZE)
    at = world(12)
    at.node.room = 8  # blocks a call
    at.on_ssd(*range(10))
    assert len(at.load()) == 12
    assert [names for what, names in at.calls() if what == "fetch"] == [
        [10, 11],
        list(range(10)),
        [8],
        [9],
    ]


def test_pieces_taper_so_that_the_last_copy_is_short(
    world: Callable[[int], World], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstrata.client.reading.PIECE_BYTES", 8 * SIZE)
    monkeypatch.setattr("kvstrata.client.reading.LAST_PIECE_BYTES", 2 * SIZE)
    at = world(24).on_ssd(*range(24))
    at.load()
    assert [len(names) for what, names in at.calls() if what == "fetch"] == [8, 8, 4, 2, 2]


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.integers(1, 5), st.integers(1, 6), st.integers(1, 5))
def test_memory_first_moves_every_position_once_and_in_order(
    on_ssd: list[bool], piece: int, last: int, cut: int
) -> None:
    mask = np.array(on_ssd)
    whole = [Part(7, slice(low, min(low + cut, len(mask)))) for low in range(0, len(mask), cut)]
    parts = memory_first(whole, mask, piece, last)
    served = np.concatenate([positions_of(part.where) for part in parts]).tolist()
    if mask.any():
        assert served == np.flatnonzero(~mask).tolist() + np.flatnonzero(mask).tolist()
        assert all(len(positions_of(part.where)) <= piece and part.node == 7 for part in parts)
    else:
        assert parts == whole


# -------------------------------------------------------------------- prefetch


def test_prefetch_waits_until_the_hit_prefix_is_in_memory(world: Callable[[int], World]) -> None:
    at = world(5).on_ssd(1, 3)
    prefetch = at.client.prefetch(at.ns, "", at.hashes + packed(2, 50))
    until(prefetch.done)
    assert prefetch.wait(0.0) is None, "the node is reading"
    at.node.on_ssd.clear()
    found = prefetch.wait()
    assert found is not None and found.hit_blocks == 5 and prefetch.done()
    first, again = at.calls()[0], at.calls()[-1]
    assert first == ("prefetch", [0, 1, 2, 3, 4]), "blocks in memory are marked as used"
    assert again == ("prefetch", [1, 3]), "only what was being read is asked about again"


def test_prefetch_of_what_is_in_memory_is_one_call(world: Callable[[int], World]) -> None:
    at = world(4).on_ssd()
    assert at.client.prefetch(at.ns, "", at.hashes).wait() is not None
    assert at.calls() == [("prefetch", [0, 1, 2, 3])]


def test_prefetch_from_a_dead_node_is_over_at_once(world: Callable[[int], World]) -> None:
    at = world(4).on_ssd(0)
    at.node.fails = Unavailable("gone")
    found = at.client.prefetch(at.ns, "", at.hashes).wait()
    assert found is not None and found.hit_blocks == 4


# -------------------------------------------------------------------- epochs


def test_every_message_carries_the_pinned_epoch(world: Callable[[int], World], nodes: dict[str, FakeNode]) -> None:
    at = world(3).on_ssd(0)
    at.load()
    at.client.prefetch(at.ns, "", at.hashes).wait()
    with at.client.view(at.ns, "", at.hashes):
        pass
    assert set(at.node.epochs) == {3} and {message.epoch for message in at.master.asked} == {3}
    at.node.blocks.clear()
    at.load(loaded=False)
    until(lambda: bool(at.master.reports))
    assert {report.epoch for report in at.master.reports} == {3}
    client = at.client
    client.store(at.ns, "", at.hashes, client.register(at.data).rows(at.ns))
    assert [message.epoch for message in at.master.placed] == [3]


def test_a_handle_of_older_weights_stores_nothing_until_it_is_opened_again(
    client: Client, ns: PoolNamespace, master: FakeMaster, nodes: dict[str, FakeNode]
) -> None:
    rows = client.register(np.ones((2, SIZE), np.uint8)).rows(ns)
    client.store(ns, "", packed(2), rows)
    master.epoch, master.strict_epoch = 4, True
    with pytest.raises(FingerprintMismatch, match="open it again"):
        client.store(ns, "", packed(2), rows)
    again = client.namespace("model/a", block_bytes=SIZE, block_tokens=16)
    assert again == ns and again.epoch == 4 and ns.epoch == 3, "a pin never moves"
    assert client.store(again, "", packed(2), rows).stored.all()


def test_where_blocks_were_under_older_weights_is_not_used_for_newer_ones(
    client: Client, ns: PoolNamespace, master: FakeMaster, nodes: dict[str, FakeNode]
) -> None:
    nodes["b"].put(ns, "", packed(2), [b"x" * SIZE] * 2)
    master.learn()
    client.lookup(ns, "", packed(2))
    master.epoch = 4
    again = client.namespace("model/a", block_bytes=SIZE, block_tokens=16)
    before = master.lookups
    into = client.register(np.zeros((2, SIZE), np.uint8)).rows(again)
    client.load(again, "", packed(2), into)
    assert master.lookups == before + 1 and master.asked[-1].epoch == 4
    client.load(ns, "", packed(2), into)
    assert master.lookups == before + 1, "the older handle has its own memory"


# -------------------------------------------------------------------- durable, hints, names


def test_a_store_says_what_is_durable(client: Client, ns: PoolNamespace, nodes: dict[str, FakeNode]) -> None:
    nodes["b"].durable = True
    nodes["b"].answers[split(packed(8))[5]] = S.FULL
    result = client.store(ns, "", packed(8), client.register(np.ones((8, SIZE), np.uint8)).rows(ns))
    assert result.durable.tolist() == [False] * 4 + [True, False, True, True], "what is not stored is not durable"
    assert not client.store(ns, "", b"", client.register(np.ones((1, SIZE), np.uint8)).rows(ns)[:0]).durable.size


def test_hints_go_to_the_nodes_that_hold_the_blocks(world: Callable[[int], World]) -> None:
    at = world(3).on_ssd()
    before = at.master.lookups
    assert at.client.keep(at.ns, "", at.hashes, 60) == 3
    assert at.client.forget(at.ns, "", at.hashes[:16]) == 1
    assert at.client.drop(at.ns, "", at.hashes[16:]) == 2
    assert at.node.hints == [
        (HintKind.KEEP, at.hashes, 60.0),
        (HintKind.FORGET, at.hashes[:16], 0.0),
        (HintKind.DROP, at.hashes[16:], 0.0),
    ]
    assert at.master.lookups == before, "a lookup's answer serves the hints that follow it"
    assert at.client.keep(at.ns, "", packed(2, 70), 60) == 0 and at.client.keep(at.ns, "", b"", 1) == 0
    at.node.fails = Unavailable("gone")
    assert at.client.keep(at.ns, "", at.hashes, 60) == 0, "best effort"


@pytest.mark.parametrize("ttl_s", [0, -1, float("nan"), 86_401, True, "60"])
def test_a_time_that_is_none_is_refused(client: Client, ns: PoolNamespace, ttl_s: float) -> None:
    with pytest.raises(InvalidArgument, match="ttl_s"):
        client.keep(ns, "", packed(1), ttl_s)


def test_a_lookup_carries_the_name_of_the_request(client: Client, ns: PoolNamespace, master: FakeMaster) -> None:
    client.lookup(ns, "", packed(1), request="req-7")
    client.lookup(ns, "", packed(1))
    assert [message.request for message in master.asked] == ["req-7", ""]
    with pytest.raises(InvalidArgument, match="256"):
        client.lookup(ns, "", packed(1), request="x" * 257)
