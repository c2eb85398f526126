"""Orders within a shelf: one machine for both, plain LRU where nothing is protected, and what protection does."""

from __future__ import annotations

import random
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstrata.proto.keys import Namespace
from kvstrata.storage.arena import Arena
from kvstrata.storage.eviction.isolated_lru import IsolatedLRU
from kvstrata.storage.eviction.orders import LruOrder, Order
from kvstrata.storage.eviction.segmented_order import PROTECTED, SegmentedOrder
from kvstrata.storage.eviction.share_duel import SHARES, SMALL_BLOCKS, ShareDuel
from kvstrata.storage.grid import SlotGrid
from kvstrata.storage.inventory import Inventory
from kvstrata.storage.masters.delta_log import DeltaLog
from kvstrata.storage.records import VISIBLE, Block, Counts, NamespaceEntry, Shelf

from .conftest import key

SLOT = 64


class Slots(SlotGrid):
    def room_for(self, slot_bytes: int) -> tuple[int, int]:
        return self.nbytes // slot_bytes, 0


class FixedShare(ShareDuel):
    """A share that nothing changes; a fresh one every so many calls, if there are several."""

    def __init__(self, *shares: float, every: int = 7) -> None:
        super().__init__()
        self._turns, self._calls, self._every = shares, 0, every
        self.share = shares[0]

    def change_to(self, share: float) -> None:
        self._turns, self.share = (share,), share

    def used(self, blocks: object, held: int) -> None:
        self._calls += 1
        self.share = self._turns[self._calls // self._every % len(self._turns)]


class Cache:
    """One tenant on slots without memory."""

    def __init__(self, capacity: int, order: Callable[[], Order]) -> None:
        arena = Arena([Slots(0, capacity * SLOT, [0] * capacity)], capacity * SLOT)
        self.inventory = Inventory(arena, IsolatedLRU(order), DeltaLog(), Counts())
        self.entry = NamespaceEntry(1, Namespace("model", SLOT, 16))

    @property
    def shelf(self) -> Shelf:
        return self.inventory.shelf(self.entry, "")

    def get(self, number: int) -> Block | None:
        block = self.shelf.blocks.get(key(number))
        return block if block is not None and block.state == VISIBLE else None

    def request(self, chain: list[int]) -> int:
        """Load the prefix that is there, store the rest; how many were there."""
        policy, shelf = self.inventory.policy, self.shelf
        there: list[Block] = []
        for number in chain:
            block = self.get(number)
            if block is None:
                break
            there.append(block)
        policy.next_stamp()
        policy.touch(there)
        # Deeper ones cannot be there: they would have held their parents.
        missing = range(len(there), len(chain))
        blocks, _ = self.inventory.admit(shelf, [key(chain[at]) for at in missing], list(missing))
        before = there[-1] if there else None
        for block in blocks:
            self.inventory.link(before, block)
            before = block
        self.inventory.publish(shelf, blocks)
        return len(there)

    def numbers(self, among: range) -> list[int]:
        return [number for number in among if self.get(number) is not None]


ORDERS: dict[str, Callable[[], Order]] = {
    "lru": LruOrder,
    "segmented": lambda: SegmentedOrder(FixedShare(0.5)),
    "shares that change": lambda: SegmentedOrder(FixedShare(0.0, 0.5, 0.25)),
}


class AnyOrder(RuleBasedStateMachine):
    """Chains of a small tree, leases, hints, removals; in any order of eviction."""

    @initialize(which=st.sampled_from(sorted(ORDERS)), capacity=st.integers(4, 12))
    def begin(self, which: str, capacity: int) -> None:
        self.cache = Cache(capacity, ORDERS[which])
        self.capacity = capacity
        self.leased: list[Block] = []

    @rule(branch=st.integers(0, 4), length=st.integers(1, 6))
    def request(self, branch: int, length: int) -> None:
        chain = [0, *(10 * (branch + 1) + depth for depth in range(length - 1))]
        before = len(self.visible())
        evictable = before - len(self.held(chain))
        there = self.cache.request(chain)
        room = self.capacity - before + evictable
        now = [number for number in chain if self.cache.get(number) is not None]
        # Room is made while there is anything that nobody needs, and for no more than was asked.
        assert now == chain[: len(now)] and len(now) == min(len(chain), there + max(0, room))
        assert len(self.visible()) == min(self.capacity, before - there + len(now)), "more left than was asked for"

    def visible(self) -> list[Block]:
        return [block for block in self.cache.inventory.blocks() if block.state == VISIBLE]

    def held(self, chain: list[int]) -> set[Block]:
        """Blocks that no call for ``chain`` may evict: leased, its own, and the parents of those."""
        held = set()
        prefix = []
        for number in chain:
            block = self.cache.get(number)
            if block is None:
                break
            prefix.append(block)
        for block in [*self.leased, *prefix]:
            link: Block | None = block
            while link is not None:
                held.add(link)
                link = link.parent
        return held

    @precondition(lambda self: self.visible())
    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.visible()))
        self.cache.inventory.pin([block])
        self.leased.append(block)

    @precondition(lambda self: self.leased)
    @rule()
    def release(self) -> None:
        self.cache.inventory.unpin([self.leased.pop(0)])

    @precondition(lambda self: self.visible())
    @rule(data=st.data())
    def cool(self, data: st.DataObject) -> None:
        """Said to be of no more use: of what may leave, it is the next."""
        block = data.draw(st.sampled_from(self.visible()))
        self.cache.inventory.policy.cool([block])
        if not block.leases and not block.children:
            assert self.cache.inventory.policy.own_victim("", self.cache.inventory.policy.stamp + 1) is block

    @precondition(lambda self: self.visible())
    @rule(data=st.data(), until=st.integers(1, 3))
    def keep(self, data: st.DataObject, until: int) -> None:
        block = data.draw(st.sampled_from(self.visible()))
        self.cache.inventory.policy.keep([block], self.cache.inventory.now + until)

    @rule()
    def time(self) -> None:
        self.cache.inventory.now += 1
        self.cache.inventory.policy.now = self.cache.inventory.now
        self.cache.inventory.policy.lapse()

    @precondition(lambda self: any(not block.leases for block in self.visible()))
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        leaves = [block for block in self.visible() if not block.leases and not block.children]
        if leaves:
            self.cache.inventory.withdraw(data.draw(st.sampled_from(leaves)), "removed")

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "cache"):
            self.cache.inventory.check()


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


branches = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 7)), min_size=1, max_size=40)


def chain_of(branch: int, length: int) -> list[int]:
    return [0, *(10 * (branch + 1) + depth for depth in range(length - 1))]


@settings(max_examples=60, deadline=None)
@given(branches, st.integers(3, 14))
def test_without_a_protected_share_it_is_plain_lru(calls: list[tuple[int, int]], capacity: int) -> None:
    plain, segmented = Cache(capacity, LruOrder), Cache(capacity, lambda: SegmentedOrder(FixedShare(0.0)))
    for call in calls:
        assert plain.request(chain_of(*call)) == segmented.request(chain_of(*call))
        assert plain.numbers(range(50)) == segmented.numbers(range(50))


def test_every_order_starts_as_plain_lru() -> None:
    assert SegmentedOrder().share == SHARES[0] == 0.0


def in_use(cache: Cache) -> list[int]:
    """A full cache, a chain used twice, then as much that is used once as the cache holds."""
    cache.request(list(range(200, 220)))
    chain = list(range(6))
    cache.request(chain)
    cache.request(chain)
    for number in range(100, 124):
        cache.request([number])
    return cache.numbers(range(6))


def test_what_was_used_again_outlives_what_was_used_once() -> None:
    assert in_use(Cache(20, LruOrder)) == []
    assert in_use(Cache(20, lambda: SegmentedOrder(FixedShare(0.5)))) == list(range(6))


def test_more_than_the_share_goes_back_on_trial_and_can_leave() -> None:
    cache = Cache(20, lambda: SegmentedOrder(FixedShare(0.5)))
    for number in [*range(16), *range(16)]:
        cache.request([number])
    protected = [block.hash for block in cache.inventory.blocks() if block.mark == PROTECTED]
    assert protected == [key(number) for number in range(8, 16)], "half of the 16 that were held"
    for number in range(100, 120):
        cache.request([number])
    assert cache.numbers(range(16)) == list(range(8, 16))


def test_a_call_may_take_the_room_of_protected_blocks() -> None:
    """Nothing but this call and protected blocks: the store is not refused."""
    cache = Cache(20, lambda: SegmentedOrder(FixedShare(0.5)))
    for number in [*range(10), *range(10)]:
        cache.request([number])
    chain = list(range(100, 120))
    assert cache.request(chain[:8]) == 0 and cache.request(chain) == 8
    assert cache.numbers(range(100, 120)) == chain


def test_so_may_one_that_finds_protection_given_up() -> None:
    """What goes back on trial is older than the blocks of the call that puts it there."""
    duel = FixedShare(0.5)
    cache = Cache(20, lambda: SegmentedOrder(duel))
    for number in [*range(200, 220), *range(10), *range(10)]:
        cache.request([number])
    chain = list(range(100, 120))
    assert cache.request(chain[:10]) == 0
    duel.change_to(0.0)
    assert cache.request(chain) == 10
    assert cache.numbers(range(100, 120)) == chain


def test_protection_that_no_longer_pays_is_given_up_little_by_little() -> None:
    duel = FixedShare(0.5)
    cache = Cache(20, lambda: SegmentedOrder(duel))
    for number in [*range(200, 220), *range(10), *range(10)]:
        cache.request([number])
    marked = []
    duel.change_to(0.0)
    for number in range(100, 106):
        marked.append(sum(block.mark == PROTECTED for block in cache.inventory.blocks()))
        cache.request([number])
    assert marked == [10, 8, 6, 4, 2, 0]
    for number in range(200, 220):
        cache.request([number])
    assert cache.numbers(range(10)) == []


# ---------------------------------------------------------------------- the choice of the share


def learnt(cache: Cache, used_again: int, steps: int = 4000) -> int:
    """A set that is used at random while four times as many blocks flow past that never return; its hits."""
    rng = random.Random(1)
    hits = sum(
        cache.request([rng.randrange(used_again)] if step % 5 == 0 else [10_000 + step]) for step in range(steps)
    )
    cache.inventory.check()
    return hits


def test_protection_is_taken_up_where_it_pays() -> None:
    order = SegmentedOrder()
    hits = learnt(Cache(2 * SMALL_BLOCKS, lambda: order), used_again=250)
    assert order.share > 0
    assert hits > learnt(Cache(2 * SMALL_BLOCKS, LruOrder), used_again=250)


def test_it_is_not_where_it_does_not() -> None:
    """What was used lately is used once again, and then never more."""
    order = SegmentedOrder()
    cache = Cache(2 * SMALL_BLOCKS, lambda: order)
    for number in range(2000):
        cache.request([number])
        if number >= 450 and number % 2:
            cache.request([number - 300])
    assert order.share == 0.0
    cache.inventory.check()


def test_few_blocks_are_no_ground_for_a_choice() -> None:
    order = SegmentedOrder()
    cache = Cache(SMALL_BLOCKS, lambda: order)
    learnt(cache, used_again=120, steps=2000)
    assert order.share == 0.0


def test_the_small_caches_stay_small() -> None:
    duel = ShareDuel()
    shelf = Shelf(NamespaceEntry(1, Namespace("model", SLOT, 16)), "")
    slots = Slots(0, SLOT, [0])
    for held in (600, 5_000, 100_000, 1_000_000, 3_000):
        for start in range(0, 8_000, 100):
            blocks = [Block(shelf, key(start + at), slots, 0, 1, at) for at in range(100)]
            duel.used(blocks, held)
        duel.check()
        assert all(len(cache.once) + len(cache.again) <= max(8 * SMALL_BLOCKS, held >> 8) for cache in duel._caches)
