"""Who leaves: between tenants by fair shares, within one by its order, hints and chains."""

from __future__ import annotations

from collections.abc import Callable

from kvstrata.proto.keys import Namespace
from kvstrata.proto.status import BlockStatus, HintKind
from kvstrata.storage.eviction.isolated_lru import IDLE_S, IsolatedLRU
from kvstrata.storage.eviction.quotas import NodeShare
from kvstrata.storage.records import Shelf
from tests.storage.conftest import Node, key

STORED, FULL = int(BlockStatus.STORED), int(BlockStatus.FULL)
BLOCK = 4096

MakeNode = Callable[..., Node]


def hint(node: Node, numbers: range | list[int], kind: HintKind, until: float = 0.0, salt: str = "") -> int:
    changed = len(node.state.inventory.hint(shelf(node, salt), [key(number) for number in numbers], kind, until))
    node.state.check()
    return changed


def shelf(node: Node, salt: str = "") -> Shelf:
    return node.state.inventory.shelves[node.handle, salt]


def held(node: Node, salt: str) -> int:
    return node.state.inventory.policy.charges.get(salt, 0) // BLOCK


def singly(node: Node, numbers: range, salt: str = "") -> None:
    """Each a chain of its own: nothing is protected by what follows it."""
    for number in numbers:
        node.store([number], salt=salt)


def flood(node: Node, count: int, salt: str = "", start: int = 10_000) -> None:
    for number in range(start, start + count):
        assert node.store([number], salt=salt) == [STORED]


# ---------------------------------------------------------------- between tenants


def test_tenants_without_shares_end_up_equal(make_node: MakeNode) -> None:
    node = make_node(slabs=4)
    for turn in range(60):
        for salt in ("a", "b", "b", "b", "c", "c"):
            node.store([turn * 100 + node.state.counts.stored], salt=salt)
    third = node.capacity // 3
    assert all(abs(held(node, salt) - third) <= 1 for salt in "abc")


def test_a_floor_comes_on_top_of_an_equal_part(make_node: MakeNode) -> None:
    node = make_node(slabs=4)
    node.state.quotas.apply([NodeShare("a", None, None, 20 * BLOCK)], [], True, None, 0.0, node.now)
    for turn in range(60):
        for salt in ("a", "b", "b"):
            node.store([turn * 100 + node.state.counts.stored], salt=salt)
    assert abs(held(node, "a") - (20 + (node.capacity - 20) // 2)) <= 1


def test_small_tenants_lose_nothing_while_a_large_one_floods(make_node: MakeNode) -> None:
    node = make_node(slabs=4)
    for salt in ("a", "b", "c"):
        node.store(range(10), salt=salt)
    flood(node, 4 * node.capacity, "big")
    assert all(node.present(range(10), salt) == list(range(10)) for salt in "abc")
    assert held(node, "big") == node.capacity - 30


def test_who_has_been_idle_has_no_part_beyond_its_floor(make_node: MakeNode) -> None:
    node = make_node(slabs=4)
    node.state.quotas.apply([NodeShare("idle", None, None, 5 * BLOCK)], [], True, None, 0.0, node.now)
    node.store(range(20), salt="idle")
    node.store(range(15), salt="a")
    flood(node, node.capacity - 35, "b", start=5000)
    node.now += IDLE_S - 1
    node.acquire(range(15), salt="a", seconds=0.001)
    flood(node, 1, "b", start=20_000)
    assert held(node, "idle") == 20, "not yet"
    node.now += 2
    node.state.expire(node.now)
    flood(node, 60, "b", start=30_000)
    # 45 blocks between the two: they meet where what "idle" has above its floor of 5 is what "b" has above its
    # part, the half of 64 - 5 (slabs have room for 64 blocks, and for 60 beside their tables).
    assert held(node, "a") == 15 and held(node, "idle") == 10


def test_an_idle_tenant_keeps_its_floor(make_node: MakeNode) -> None:
    node = make_node(slabs=2)
    node.state.quotas.apply([NodeShare("idle", None, None, 5 * BLOCK)], [], True, None, 0.0, node.now)
    node.store(range(5), salt="idle")
    node.now += 2 * IDLE_S
    node.store(range(1000, 1000 + node.capacity - 5), salt="b")
    held_by_b = node.acquire(range(1000, 1000 + node.capacity - 5), salt="b", seconds=1e6)
    assert len(held_by_b.blocks) == node.capacity - 5
    assert node.store([7000], salt="c") == [FULL], "all that is left is its floor"
    assert held(node, "idle") == 5


def test_one_tenant_alone_is_plain_lru(make_node: MakeNode) -> None:
    node = make_node(slabs=2)
    singly(node, range(node.capacity))
    node.acquire([3, 5], seconds=0.001)
    node.now += 1
    node.state.expire(node.now)
    flood(node, node.capacity - 2)
    assert node.present(range(node.capacity)) == [3, 5]


def test_a_tenant_without_blocks_is_forgotten(make_node: MakeNode) -> None:
    node = make_node()
    policy = node.state.inventory.policy
    assert isinstance(policy, IsolatedLRU)
    for turn in range(200):
        node.store([1], salt=f"t{turn}")
        node.state.remove(node.namespace, f"t{turn}", key(1), node.now)
    assert not policy._tenants and not policy._active and not policy.charges


def test_order_is_one_across_a_tenants_namespaces(make_node: MakeNode) -> None:
    node = make_node(slabs=2)
    other = node.state.open_namespace(Namespace("other", BLOCK, 16))[0]
    half = node.capacity // 2
    for turn in range(half):
        node.store([turn])
        node.store([turn], handle=other)
    flood(node, half)
    assert (
        node.present(range(half)) == list(range(half - half // 2, half)) or len(node.present(range(half))) == half // 2
    )
    assert len(node.state.inventory.shelves[other, ""].blocks) == half - half // 2


# ---------------------------------------------------------------- hints


def test_what_is_kept_outlives_a_flood_of_its_own_tenant(make_node: MakeNode) -> None:
    """An agent's prefix survives its think time under pressure of its own tenant."""
    node = make_node(slabs=4)
    node.chain(range(12), 4)
    assert hint(node, range(12), HintKind.KEEP, node.now + 60) == 12
    flood(node, 3 * node.capacity)
    assert node.present(range(12)) == list(range(12))
    node.now += 61
    node.state.expire(node.now)
    flood(node, node.capacity, start=50_000)
    assert node.present(range(12)) == []


def test_what_is_kept_is_half_of_what_its_tenant_may_use(make_node: MakeNode) -> None:
    node = make_node(slabs=4)
    node.chain(range(12), 4)
    node.state.quotas.apply([NodeShare("", 12 * BLOCK)], [], True, None, 0.0, node.now)
    assert hint(node, range(12), HintKind.KEEP, node.now + 60) == 6, "of its limit: the beginning"
    node.state.quotas.apply([], [], True, None, 0.0, node.now)
    node.store(range(1000, 1000 + node.capacity // 2), salt="other")
    half = (node.arena.bytes_total // 2) // 2 // BLOCK
    node.chain(range(100, 100 + node.capacity - node.capacity // 2 - 12), 4)
    assert hint(node, range(100, 160), HintKind.KEEP, node.now + 60) == min(60, half), "of its fair share"


def test_forgetting_ends_a_keep(make_node: MakeNode) -> None:
    node = make_node(slabs=2)
    singly(node, range(10))
    singly(node, range(100, 100 + node.capacity - 10))
    hint(node, range(10), HintKind.KEEP, node.now + 1e6)
    assert hint(node, range(5), HintKind.FORGET) == 5
    flood(node, node.capacity)
    assert node.present(range(10)) == [5, 6, 7, 8, 9]


def test_dropped_ones_leave_first_and_deepest_first(make_node: MakeNode) -> None:
    node = make_node(slabs=2)
    node.store(range(node.capacity - 10))
    node.chain(range(1000, 1010), 5)
    assert hint(node, range(1000, 1010), HintKind.DROP) == 10
    flood(node, 4)
    assert node.present(range(1000, 1010)) == list(range(1000, 1006))
    flood(node, 6, start=20_000)
    assert node.present(range(1000, 1010)) == [] and len(node.present(range(node.capacity))) == node.capacity - 10


def test_older_keeps_lapse_first(make_node: MakeNode) -> None:
    node = make_node(slabs=2)
    singly(node, range(node.capacity))
    quarter = node.capacity // 4
    hint(node, range(quarter), HintKind.KEEP, node.now + 1e6)
    hint(node, range(quarter, 2 * quarter), HintKind.KEEP, node.now + 1e6)
    hint(node, range(2 * quarter, 3 * quarter), HintKind.KEEP, node.now + 1e6)
    flood(node, 2 * node.capacity)
    assert node.present(range(node.capacity)) == list(range(quarter, 3 * quarter))


def test_what_is_kept_outlives_newer_blocks_of_another_size(make_node: MakeNode) -> None:
    node = make_node(slabs=4)
    large = node.state.open_namespace(Namespace("large", 20_000, 16))[0]
    slot = node.state.entry(large).slot_bytes
    node.store(range(20))
    node.store([500], handle=large)
    kept = node.state.inventory.shelves[large, ""]
    assert len(node.state.inventory.hint(kept, [key(500)], HintKind.KEEP, node.now + 1e6)) == 1
    node.state.quotas.apply([NodeShare("", 20 * BLOCK + slot)], [], True, None, 0.0, node.now)
    flood(node, 60)
    assert key(500) in kept.blocks and node.state.inventory.policy.charges[""] == 20 * BLOCK + slot


def test_a_keep_does_not_hold_against_another_tenants_claim(make_node: MakeNode) -> None:
    node = make_node(slabs=2)
    node.store(range(node.capacity), salt="greedy")
    hint(node, range(node.capacity), HintKind.KEEP, node.now + 1e6, "greedy")
    flood(node, node.capacity // 2, "b")
    flood(node, node.capacity // 2, "c", start=30_000)
    assert held(node, "greedy") <= node.capacity // 3 + 1


def test_hints_that_end_leave_nothing_behind(make_node: MakeNode) -> None:
    node = make_node(slabs=2)
    policy = node.state.inventory.policy
    assert isinstance(policy, IsolatedLRU)
    node.store(range(20))
    for turn in range(500):
        hint(node, range(turn % 5, 10), HintKind.KEEP, node.now + 1e6)
    assert len(policy._keeps) < 200, "the same blocks kept anew: older entries go"
    hint(node, range(20), HintKind.FORGET)
    assert not policy._keeps.tenants and not any(block.keep for block in node.state.inventory.blocks())


def test_the_coldest_are_looked_at_queue_by_queue(make_node: MakeNode) -> None:
    node = make_node(slabs=2)
    node.store(range(5), salt="a")
    node.store(range(5), salt="b")
    hint(node, [4], HintKind.KEEP, node.now + 1e6, "a")
    seen = [(block.shelf.salt, block.index) for block in node.state.inventory.coldest_blocks(6)]
    assert seen == [("a", 3), ("b", 4), ("a", 2), ("b", 3), ("a", 1), ("b", 2)]
