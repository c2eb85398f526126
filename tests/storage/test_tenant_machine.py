"""Any order of events on a node with two tiers, under shares that come, rise, fall, lapse and go.

All that :mod:`.test_state_machine` asks of bytes holds here too. On top: what the allocators hold is what is
charged; nobody is above a limit, but for what a lowering left there, which only falls; nobody takes from
others what their floors guarantee.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from kvstrata.proto.status import BlockStatus, HintKind, Tier
from kvstrata.storage.eviction.isolated_lru import IDLE_S, IsolatedLRU
from kvstrata.storage.eviction.quotas import NodeShare, QuotaBook
from kvstrata.storage.inventory import Inventory
from kvstrata.storage.masters.delta_log import DeltaLog
from kvstrata.storage.records import VISIBLE, Block
from kvstrata.storage.serving.published import Published
from kvstrata.storage.state import NodeState
from tests.storage.conftest import SLAB_BYTES, keys
from tests.storage.memory_store import MemoryStore
from tests.storage.test_state_machine import SALTS, NodeMachine, counts, salts, sizes, starts

KIB = 1 << 10
TTL_S = 30.0
limits = st.sampled_from([None, 0, 12 * KIB, 40 * KIB, 100 * KIB])
floors = st.sampled_from([0, 0, 12 * KIB, 50 * KIB])


class TenantMachine(NodeMachine):
    def __init__(self) -> None:
        super().__init__()
        self.last: dict[tuple[Tier, str], int] = {}
        self.lost = 0

    def make_state(self) -> NodeState:
        # One slab that a lost device leaves is enough; slots of both sizes do not fit beside each other in it.
        self.devices = MemoryStore(extents=3, extent_bytes=SLAB_BYTES)
        published = Published(1, self.arena.bytes_total)
        return NodeState(self.arena, deltas=DeltaLog(batch_hashes_max=20), ssd=self.devices, published=published)

    @property
    def ssd(self) -> Inventory:
        assert self.state.ssd is not None
        return self.state.ssd

    def used(self, inventory: Inventory, salt: str) -> int:
        return inventory.policy.charges.get(salt, 0)

    def alive(self, inventory: Inventory, salt: str) -> int:
        """Bytes that a floor guards: blocks of a shelf that is retired are the first to go, whoever wants room."""
        retired = [shelf for shelf in inventory.retired_shelves() if shelf.salt == salt]
        return self.used(inventory, salt) - sum(
            block.slab.slot_bytes for shelf in retired for block in shelf.blocks.values()
        )

    @contextmanager
    def nobody_loses_a_floor_to(self, salt: str) -> Iterator[None]:
        before = {(tier, other): self.alive(tier, other) for tier in self.state.tiers() for other in SALTS}
        yield
        for (tier, other), used in before.items():
            floor = min(used, self.state.quotas.floor(tier.tier, other))
            assert other == salt or self.alive(tier, other) >= floor, f"{salt!r} took from the floor of {other!r}"

    # ------------------------------------------------------------------ shares

    @rule(salt=salts, dram=limits, ssd=limits, dram_floor=floors, ssd_floor=floors, ttl=st.sampled_from([0.0, TTL_S]))
    def share(self, salt: str, dram: int | None, ssd: int | None, dram_floor: int, ssd_floor: int, ttl: float) -> None:
        share = NodeShare(
            salt,
            dram,
            ssd,
            dram_floor if dram is None else min(dram_floor, dram),
            ssd_floor if ssd is None else min(ssd_floor, ssd),
        )
        self.state.quotas.apply([share], [], False, None, ttl, self.now)

    @rule(dram=limits, ssd=limits)
    def whole(self, dram: int | None, ssd: int | None) -> None:
        self.state.quotas.apply([], [], True, NodeShare("", dram, ssd), 0.0, self.now)

    @rule()
    def master_is_heard(self) -> None:
        self.state.quotas.renewed(self.now)

    @rule()
    def shares_outlive_a_restart(self) -> None:
        book = self.state.quotas
        again = QuotaBook.from_json(json.loads(json.dumps(book.to_json())))
        assert again.shares() == book.shares() and again.fallback == book.fallback
        assert again.revision == book.revision and not again.lapsed(1e12)

    @rule(limit=st.sampled_from([4 * KIB, 30 * KIB, 1 << 20]))
    def drain(self, limit: int) -> None:
        for tier in self.state.tiers():
            tier.now = self.now
            used, over = tier.arena.bytes_used, self.excess(tier)
            freed = tier.drain(limit)
            assert tier.arena.bytes_used == used - freed, "what is said to be freed is"
            assert self.excess(tier) <= over
            assert freed < limit + 24 * KIB, "no more than asked, but for a slot"
            if not over:
                assert not freed, "nothing above a share, and still something left"

    def excess(self, tier: Inventory) -> int:
        limits = {salt: self.state.quotas.limit(tier.tier, salt, self.now) for salt in SALTS}
        return sum(max(0, self.used(tier, salt) - limit) for salt, limit in limits.items() if limit is not None)

    @rule(salt=salts, size=sizes, start=starts, count=counts)
    def store_within_floors(self, salt: str, size: int, start: int, count: int) -> None:
        with self.nobody_loses_a_floor_to(salt):
            self.store(salt, size, start, count)

    @rule()
    def somebody_was_idle(self) -> None:
        self.time_passes(IDLE_S / 2)

    # ------------------------------------------------------------------ hints

    @rule(salt=salts, size=sizes, start=starts, count=counts, kind=st.sampled_from(HintKind), seconds=st.floats(0, 900))
    def hint(self, salt: str, size: int, start: int, count: int, kind: HintKind, seconds: float) -> None:
        for tier in self.state.tiers():
            shelf = tier.shelves.get((self.handles[size], salt))
            if shelf is None:
                continue
            hashes = keys(range(start, start + count))
            wanted = [hashes[at : at + 16] for at in range(0, len(hashes), 16)]
            there = {key for key in wanted if key in shelf.blocks and shelf.blocks[key].state == VISIBLE}
            policy = tier.policy
            assert isinstance(policy, IsolatedLRU)
            room = policy._room(policy._tenants[salt])
            changed = len(tier.hint(shelf, wanted, kind, self.now + seconds))
            assert changed <= len(there)
            kept = sum(block.slab.slot_bytes for block in tier.blocks() if block.keep and block.shelf.salt == salt)
            assert kept * 2 <= max(self.used(tier, salt), room) or kind != HintKind.KEEP or not changed

    # ------------------------------------------------------------------ the other tier

    @rule(salt=salts, size=sizes, start=starts, count=counts)
    def demote(self, salt: str, size: int, start: int, count: int) -> None:
        """As bookkeeping: what of these is in DRAM and not on SSD is admitted there, and published."""
        above = self.state.inventory.shelves.get((self.handles[size], salt))
        if above is None:
            return
        ssd = self.ssd
        ssd.now = self.now
        below = ssd.shelf(above.entry, salt)
        source = [block for block in above.blocks.values() if block.state == VISIBLE and block.hash not in below.blocks]
        ssd.policy.next_stamp()
        source = source[:count]
        with self.nobody_loses_a_floor_to(salt):
            target, status = ssd.admit(below, [block.hash for block in source], [block.index for block in source])
        assert len(target) == len(source) or status in (BlockStatus.QUOTA, BlockStatus.FULL)
        ssd.publish(below, target[1:])
        for block in target[:1]:  # one of them did not arrive
            ssd.drop(block)
        for parent, child in itertools.pairwise(target[1:]):
            ssd.link(parent, child)

    @precondition(lambda self: self.lost < 2)
    @rule(index=st.integers(0, 2), really=st.integers(0, 4))
    def a_device_fails(self, index: int, really: int) -> None:
        extent = self.devices.arena.slabs[index]
        if really or self.devices.arena.excluded(extent):
            return
        self.lost += 1
        lost = {block for block in self.ssd.blocks() if block.slab is extent and block.state == VISIBLE}
        total = self.devices.arena.bytes_total
        self.ssd.lose(extent)
        assert self.devices.arena.bytes_total == total - SLAB_BYTES
        assert all(block.state != VISIBLE for block in lost)
        assert not extent.blocks, "nobody held anything there"

    # ------------------------------------------------------------------ what must always hold

    @invariant()
    def nobody_is_above_a_limit_and_what_is_falls(self) -> None:
        for tier in self.state.tiers():
            assert sum(tier.policy.charges.values()) == tier.arena.bytes_used
            for salt in SALTS:
                used, limit = self.used(tier, salt), self.state.quotas.limit(tier.tier, salt, self.now)
                last = self.last.get((tier.tier, salt), 0)
                assert limit is None or used <= limit or used <= last, f"{salt!r} rose to {used} over {limit}"
                if limit is not None and self.state.quotas.lapsed(self.now):
                    assert used <= last, f"{salt!r} grew on a share that had lapsed"
                self.last[tier.tier, salt] = used

    @invariant()
    def what_leaves_first_is_looked_at_without_a_change(self) -> None:
        for tier in self.state.tiers():
            coldest: list[Block] = list(tier.coldest_blocks(10))
            assert coldest == list(tier.coldest_blocks(10)) and len(set(coldest)) == len(coldest)
            assert all(block.state == VISIBLE and not block.shelf.retired for block in coldest)


TestTenantMachine = TenantMachine.TestCase
TestTenantMachine.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
