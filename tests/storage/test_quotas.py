"""Shares of tenants on a node: what the book says, what admission does by it, how lowered ones drain."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from kvstrata.proto.errors import ConfigError
from kvstrata.proto.keys import Namespace
from kvstrata.proto.status import BlockStatus, Departure, Tier
from kvstrata.storage.eviction.quotas import NodeShare, QuotaBook
from tests.storage.conftest import Node, holds

STORED, PRESENT = int(BlockStatus.STORED), int(BlockStatus.ALREADY_PRESENT)
QUOTA, FULL = int(BlockStatus.QUOTA), int(BlockStatus.FULL)
BLOCK = 4096

MakeNode = Callable[..., Node]


def give(node: Node, *shares: NodeShare, fallback: NodeShare | None = None, ttl_s: float = 0.0) -> None:
    node.state.quotas.apply(shares, [], True, fallback, ttl_s, node.now)


def used(node: Node, salt: str) -> int:
    return node.state.inventory.policy.charges.get(salt, 0)


def reasons(node: Node) -> list[tuple[Departure, str, int]]:
    """(why, whose need, blocks) of all that has left, in order."""
    node.state.deltas.close_batch()
    batches = node.state.deltas.after(0) or []
    return [(r.why, r.cause, len(r.hashes) // 16) for batch in batches for r in batch.runs if not r.added]


# ---------------------------------------------------------------- the book


def test_nothing_is_limited_before_anything_is_known() -> None:
    book = QuotaBook()
    assert book.limit(Tier.DRAM, "x", 1e9) is None and book.floor(Tier.DRAM, "x") == 0 and not book.lapsed(1e9)


def test_shares_replace_change_and_are_forgotten() -> None:
    book = QuotaBook()
    book.apply(
        [NodeShare("a", 10, 20, 1, 2), NodeShare("b", 5)], [], True, NodeShare("", 7, 0), 30.0, 100.0, revision=4
    )
    assert (book.limit(Tier.DRAM, "a", 100.0), book.limit(Tier.SSD, "a", 100.0)) == (10, 20)
    assert (book.floor(Tier.DRAM, "a"), book.floor(Tier.SSD, "a")) == (1, 2)
    assert (book.limit(Tier.DRAM, "new", 100.0), book.limit(Tier.SSD, "new", 100.0)) == (7, 0)
    book.apply([NodeShare("b", 6)], ["a"], False, None, 30.0, 101.0, revision=5)
    assert book.limit(Tier.DRAM, "b", 101.0) == 6 and book.limit(Tier.DRAM, "a", 101.0) == 7
    assert book.revision == 5 and [share.salt for share in book.shares()] == ["b"]
    book.apply([], [], True, None, 0.0, 102.0, revision=6)
    assert book.limit(Tier.DRAM, "b", 102.0) is None and book.shares() == []
    book.check()


def test_shares_lapse_after_their_masters_silence() -> None:
    book = QuotaBook()
    book.apply([NodeShare("a", 10)], [], True, None, 30.0, 100.0)
    assert not book.lapsed(129.9) and book.lapsed(130.0)
    book.renewed(140.0)
    assert not book.lapsed(169.9) and book.lapsed(170.0)
    book.apply([], [], False, None, 0.0, 170.0)
    assert not book.lapsed(1e12), "without a time to live they never lapse"


def test_the_book_outlives_a_restart() -> None:
    book = QuotaBook()
    shares = [NodeShare("a", 10, None, 5, 0), NodeShare("", 0, 0), NodeShare("\u00fc\U0001f600")]
    book.apply(shares, [], True, NodeShare("", 1 << 40, 0), 30.0, 100.0, revision=9)
    again = QuotaBook.from_json(json.loads(json.dumps(book.to_json())))
    assert again.shares() == shares and again.fallback == NodeShare("", 1 << 40, 0) and again.revision == 9
    assert not again.lapsed(1e12), "what is persisted holds until the master says otherwise"
    again.renewed(5.0)
    assert again.lapsed(35.0)
    assert again.version != QuotaBook().version, "whoever derives something from it has to look"


@pytest.mark.parametrize(
    "damage",
    [
        {"format": 2},
        {"shares": []},
        {"shares": {"a": 5}},
        {"shares": {"a": {"dram_limit": -1}}},
        {"shares": {"a": {"dram_limit": 1.5}}},
        {"shares": {"a": {"dram_limit": True}}},
        {"shares": {"a": {"dram_floor": None}}},
        {"shares": {"a": {"dram_limit": 5, "dram_floor": 6}}},
        {"shares": {"a": {"limit": 5}}},
        {"shares": {"s" * 129: {}}},
        {"fallback": None},
        {"fallback": {"dram_floor": 1}},
        {"ttl_s": -1},
        {"ttl_s": float("nan")},
        {"ttl_s": "30"},
        {"revision": None},
        {"revision": -3},
    ],
)
def test_what_is_not_a_saved_book_is_refused(damage: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="shares"):
        QuotaBook.from_json({**QuotaBook().to_json(), **damage})


# ---------------------------------------------------------------- admission


def test_a_full_share_replaces_its_own_oldest_blocks(make_node: MakeNode) -> None:
    node = make_node()
    give(node, NodeShare("a", 10 * BLOCK))
    node.store(range(1000, 1005), salt="b")
    node.store(range(6), salt="a")
    assert node.store(range(100, 108), salt="a") == [STORED] * 8
    assert node.present(range(10), "a") == [0, 1] and len(node.present(range(100, 108), "a")) == 8
    assert used(node, "a") == 10 * BLOCK and len(node.present(range(1000, 1005), "b")) == 5
    assert reasons(node) == [(Departure.QUOTA, "a", 4)]
    assert node.state.counts.evicted_quota == 4 and node.state.counts.evicted == 4


def test_a_store_larger_than_its_share_keeps_its_beginning_and_says_so(make_node: MakeNode) -> None:
    node = make_node()
    give(node, NodeShare("a", 10 * BLOCK + 100))
    assert node.store(range(14), salt="a") == [STORED] * 10 + [QUOTA] * 4
    assert node.state.counts.quota == 4
    assert node.store(range(14), salt="a") == [PRESENT] * 10 + [QUOTA] * 4, "what the call touched stays"
    assert node.state.inventory.take_wanted() == {"a": 8 * BLOCK - 200}
    assert node.state.inventory.take_wanted() == {}


def test_leased_blocks_make_it_visible_that_the_share_is_full(make_node: MakeNode) -> None:
    node = make_node()
    give(node, NodeShare("a", 4 * BLOCK))
    node.store(range(4), salt="a")
    held = node.acquire(range(3), salt="a", seconds=1e6)
    assert node.store(range(10, 13), salt="a") == [STORED, QUOTA, QUOTA]
    assert node.present(range(4), "a") == [0, 1, 2] and all(holds(block, 0) for block in held.blocks)


def test_unknown_tenants_get_the_fallback_and_may_be_denied(make_node: MakeNode) -> None:
    node = make_node()
    give(node, NodeShare("known"), fallback=NodeShare("", 0, 0))
    assert node.store([1, 2], salt="x") == [QUOTA] * 2 and node.store([1], salt="known") == [STORED]
    give(node, fallback=NodeShare("", BLOCK))
    assert node.store([1, 2], salt="x") == [STORED, QUOTA]


def test_a_lapsed_share_only_replaces(make_node: MakeNode) -> None:
    node = make_node()
    give(node, NodeShare("a", 10 * BLOCK), ttl_s=30.0)
    node.store(range(4), salt="a")
    node.now += 30
    assert node.store(range(10, 16), salt="a") == [STORED] * 4 + [QUOTA] * 2
    assert node.store([50], salt="free") == [STORED], "no limit, nothing that could lapse"
    node.state.quotas.renewed(node.now)
    assert node.store(range(20, 26), salt="a") == [STORED] * 6 and used(node, "a") == 10 * BLOCK


def test_blocks_of_all_sizes_count_and_leave(make_node: MakeNode) -> None:
    node = make_node()
    large = node.state.open_namespace(Namespace("large", 20_000, 16))[0]
    slot = node.state.entry(large).slot_bytes
    give(node, NodeShare("a", 6 * BLOCK + slot))
    node.store(range(10), salt="a")
    assert node.store([100], salt="a", handle=large) == [STORED]
    assert used(node, "a") == 6 * BLOCK + slot and node.present(range(10), "a") == list(range(6))


# ---------------------------------------------------------------- lowered shares


def test_a_lowered_share_admits_nothing_and_drains_in_bounded_steps(make_node: MakeNode) -> None:
    node = make_node()
    node.chain(range(40), 10, salt="a")
    node.store(range(100, 110), salt="b")
    give(node, NodeShare("a", 20 * BLOCK))
    assert node.store([500], salt="a") == [QUOTA], "nothing while usage is above"
    steps = []
    while used(node, "a") > 20 * BLOCK:
        steps.append(node.state.inventory.drain(3 * BLOCK))
        node.state.check()
    assert steps == [3 * BLOCK] * 6 + [2 * BLOCK], "excess over bytes a tick, rounded up, is the time it takes"
    assert node.state.inventory.drain(3 * BLOCK) == 0
    assert node.present(range(40), "a") == list(range(20)), "suffixes before prefixes"
    assert len(node.present(range(100, 110), "b")) == 10
    assert reasons(node) == [(Departure.LOWERED, "a", 20)]


def test_a_leased_excess_does_not_hold_up_the_others(make_node: MakeNode) -> None:
    node = make_node()
    for salt in ("a", "b"):
        node.store(range(10), salt=salt)
    lease = node.acquire(range(10), salt="b", seconds=1e6).lease
    give(node, NodeShare("a", 0), NodeShare("b", 0))
    for _ in range(8):
        node.state.inventory.drain(4 * BLOCK)
    assert used(node, "a") == 0 and used(node, "b") == 10 * BLOCK
    assert lease is not None
    node.state.release(Node.SESSION, [lease.id])
    for _ in range(3):
        node.state.inventory.drain(4 * BLOCK)
    assert used(node, "b") == 0


# ---------------------------------------------------------------- floors and fairness


def test_a_flood_takes_nothing_from_whoever_is_within_its_floor(make_node: MakeNode) -> None:
    """FAULTS "isolation": A within its floor and warm, B writes 100 times its limit."""
    node = make_node(slabs=4)
    give(node, NodeShare("a", None, None, 20 * BLOCK), NodeShare("b", 30 * BLOCK))
    node.store(range(20), salt="a")
    for turn in range(300):
        first = 1000 + turn * 10
        assert node.store(range(first, first + 10), salt="b") == [STORED] * 10
        assert used(node, "b") <= 30 * BLOCK
        assert len(node.acquire(range(first, first + 10), salt="b", seconds=0.001).blocks) == 10
        node.now += 1
        node.state.expire(node.now)
    assert node.present(range(20), "a") == list(range(20))


def test_whoever_is_above_its_floor_gives_down_to_it_and_no_further(make_node: MakeNode) -> None:
    node = make_node(slabs=2)
    give(node, NodeShare("a", None, None, 5 * BLOCK))
    node.store(range(node.capacity), salt="a")
    statuses = [node.store([1000 + turn], salt="b")[0] for turn in range(node.capacity - 5)]
    assert set(statuses) == {STORED} and used(node, "a") >= 5 * BLOCK
    for turn in range(200):
        node.store([5000 + turn], salt="c")
    assert used(node, "a") >= 5 * BLOCK


def test_floors_that_fill_the_node_leave_nothing_to_take(make_node: MakeNode) -> None:
    node = make_node(slabs=2)
    give(node, NodeShare("a", None, None, node.capacity * BLOCK))
    node.store(range(node.capacity), salt="a")
    assert node.store([1000], salt="b") == [FULL]
    assert node.store([1000], salt="a") == [STORED], "its own are its own to replace"


def test_a_floor_holds_against_another_slot_size(make_node: MakeNode) -> None:
    node = make_node(slabs=2)
    large = node.state.open_namespace(Namespace("large", 20_000, 16))[0]
    half = node.capacity // 2
    give(node, NodeShare("a", None, None, half * BLOCK))
    node.store(range(half), salt="a")
    for turn in range(10):
        node.store([turn], salt="b", handle=large)
    assert node.present(range(half), "a") == list(range(half))
    assert node.state.counts.slabs_taken_over == 0
