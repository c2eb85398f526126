"""Random schedules against an oracle that knows which token's KV each slot holds.

The oracle writes what a forward pass or a load would write, and reads what attention would read: a block handed out
too early, a hit on other tokens, a window cut too short or a load counted too long all show as a wrong history.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar, NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstrata.engine_adapter.hashing import BlockHasher
from kvstrata.engine_adapter.paged.cache.kv_cache_manager import KVCacheManager
from kvstrata.engine_adapter.paged.cache.kv_cache_spec import (
    ChunkedLocalSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from kvstrata.engine_adapter.paged.cache.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from kvstrata.engine_adapter.paged.request import Request, RequestStatus, SamplingParams

STEP_TOKENS = 8
OUTPUT_MAX = 6
LOOKAHEAD = 2
HASH_BLOCK = 2

Slot = tuple[int, int]  # block id, offset
History = tuple[int, str, tuple[int, ...]]  # group, salt, all tokens up to the slot's own


class Load(NamedTuple):
    """A load under way: ``rows`` of each group are held and will be written, for tokens ``[begin, end)``."""

    request: Request
    begin: int
    end: int
    rows: list[range]
    tables: tuple[list[int], ...]

    @property
    def held(self) -> list[int]:
        return [table[index] for table, rows in zip(self.tables, self.rows, strict=True) for index in rows]


def pages(block_size: int) -> dict[str, int]:
    return {"block_size": block_size, "num_kv_heads": 12 // block_size, "head_size": 2}


class AgainstOracle(RuleBasedStateMachine):
    specs: ClassVar[tuple[KVCacheSpec, ...]]
    num_blocks: int

    @initialize(fewer=st.integers(0, 6))
    def begin(self, fewer: int) -> None:
        self.num_blocks -= fewer  # admission is tight for one size or another
        groups = tuple(KVCacheGroup(layers=(layer,), spec=spec) for layer, spec in enumerate(self.specs))
        self.config = KVCacheConfig(
            num_blocks=self.num_blocks, groups=groups, max_model_len=64, max_num_batched_tokens=STEP_TOKENS
        )
        self.kv = KVCacheManager(self.config, hash_block_size=HASH_BLOCK, events=True)
        self.hasher = BlockHasher(HASH_BLOCK)
        self.slots: dict[Slot, History] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.loading: list[Load] = []
        self.orphans: list[Load] = []
        self.stores: list[tuple[list[int], dict[Slot, History]]] = []
        self.findable: set[tuple[int, bytes]] = set()
        self.names = 0

    # -- what the model and the pool do with the memory

    def history(self, request: Request, group: int, position: int) -> History:
        return group, request.cache_salt, tuple(request.token_ids[: position + 1])

    def write(self, request: Request, tables: tuple[list[int], ...], group: int, position: int) -> None:
        size = self.specs[group].block_size
        block_id = tables[group][position // size]
        assert block_id != 0, f"{request} writes position {position} of group {group} to the null block"
        self.slots[block_id, position % size] = self.history(request, group, position)

    def needed(self, group: int, position: int) -> range:
        match self.specs[group]:
            case SlidingWindowSpec(sliding_window=window):
                return range(max(position - window + 1, 0), position + 1)
            case ChunkedLocalSpec(chunk_size=chunk):
                return range(position // chunk * chunk, position + 1)
            case MambaSpec():
                return range(0)
        return range(position + 1)

    def forward(self, request: Request, count: int) -> None:
        tables = self.kv.block_ids(request.request_id)
        first = request.num_computed_tokens
        for group, spec in enumerate(self.specs):
            if isinstance(spec, MambaSpec):
                continue
            for position in range(first, first + count):
                self.write(request, tables, group, position)
            for position in range(first, first + count):
                for read in self.needed(group, position):
                    slot = tables[group][read // spec.block_size], read % spec.block_size
                    assert self.slots.get(slot) == self.history(request, group, read), (
                        f"{request}: position {position} of group {group} reads another token's KV at {read}"
                    )

    # -- what a scheduler does

    @rule(
        family=st.integers(0, 2),
        length=st.one_of(st.integers(1, 48), st.sampled_from([1, 3, 4, 5, 11, 12, 13, 24])),
        salt=st.sampled_from(["", "", "tenant"]),
    )
    def arrive(self, family: int, length: int, salt: str) -> None:
        # Families 0 and 1 share their first 13 tokens.
        tokens = [position if position < 13 else position + 100 * family for position in range(length)]
        if family == 2:
            tokens = [7] * length
        if not self.kv.can_ever_fit(length + OUTPUT_MAX + LOOKAHEAD):
            return
        self.names += 1
        self.waiting.append(Request(f"r{self.names}", tokens, SamplingParams(), self.hasher, cache_salt=salt))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), external=st.integers(0, 4), count=st.integers(1, STEP_TOKENS), late=st.booleans())
    def admit(self, data: Any, external: int, count: int, late: bool) -> None:
        request = data.draw(st.sampled_from(self.waiting))
        computed = self.kv.get_computed_blocks(request)
        aligned, local = self.config.aligned_tokens, computed.num_tokens
        assert local == self.longest_hit(request)
        assert computed == self.kv.get_computed_blocks(request)
        self.hit_holds_what_it_says(request, computed.blocks, local)
        external = min(external * aligned, (request.num_tokens - 1 - local) // aligned * aligned)
        if any(isinstance(spec, MambaSpec) for spec in self.specs):
            external = 0  # no pool has a state
        count = 0 if external else min(count, request.num_tokens - local)
        free = self.kv.pool.num_free_blocks
        added = self.kv.allocate_slots(
            request,
            count,
            computed=computed,
            num_external_tokens=external,
            delay_cache_blocks=bool(external) or late,
        )
        if added is None:
            assert not self.alone(), f"{request} fits when it runs alone"
            assert self.kv.pool.num_free_blocks == free and not any(self.kv.block_ids(request.request_id))
            return
        for table, new, known in zip(self.kv.block_ids(request.request_id), added, computed.blocks, strict=True):
            assert table == [block.block_id for block in known] + new
        self.waiting.remove(request)
        request.num_computed_tokens = local
        if external:
            self.begin_load(request, local, local + external)
        else:
            self.running.append(request)
            self.computed(request, count, late)

    def longest_hit(self, request: Request) -> int:
        """By trying every length against what the events say can be found."""
        aligned = self.config.aligned_tokens
        ends = range((request.num_tokens - 1) // aligned * aligned, 0, -aligned)
        return next((end for end in ends if self.findable_for(request, end)), 0)

    def findable_for(self, request: Request, end: int) -> bool:
        for group, spec in enumerate(self.specs):
            if isinstance(spec, MambaSpec):
                return False
            stride = spec.block_size // HASH_BLOCK
            for index in {position // spec.block_size for position in self.needed(group, end) if position < end}:
                if (group, request.block_hashes[(index + 1) * stride - 1]) not in self.findable:
                    return False
        return True

    def hit_holds_what_it_says(self, request: Request, tables: tuple[Any, ...], local: int) -> None:
        for group, (spec, blocks) in enumerate(zip(self.specs, tables, strict=True)):
            assert len(blocks) * spec.block_size == local
            for position in range(local):
                block = blocks[position // spec.block_size]
                slot = block.block_id, position % spec.block_size
                assert block.is_null or self.slots[slot] == self.history(request, group, position)

    def begin_load(self, request: Request, begin: int, end: int) -> None:
        rows = [
            range(max(begin, self.needed(group, end).start) // spec.block_size, end // spec.block_size)
            for group, spec in enumerate(self.specs)
        ]
        load = Load(request, begin, end, rows, self.kv.block_ids(request.request_id))
        assert 0 not in load.held, "a load into the null block"
        self.kv.pool.hold(load.held)
        self.loading.append(load)
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS

    def land(self, load: Load, good_end: int) -> None:
        """The load's memory is written: right up to ``good_end``, garbage after it."""
        for group, (spec, rows) in enumerate(zip(self.specs, load.rows, strict=True)):
            for position in range(rows.start * spec.block_size, rows.stop * spec.block_size):
                if position < good_end:
                    self.write(load.request, load.tables, group, position)
                else:
                    block_id = load.tables[group][position // spec.block_size]
                    self.slots[block_id, position % spec.block_size] = group, "garbage", ()

    def usable_ends(self, load: Load) -> list[int]:
        """Where the load may have ended: every group then has the window before the end."""
        return [
            end
            for end in range(load.begin, load.end + 1, self.config.aligned_tokens)
            if end == load.begin
            or all(
                set(range(max(load.begin, self.needed(g, end).start) // spec.block_size, end // spec.block_size))
                <= set(load.rows[g])
                for g, spec in enumerate(self.specs)
            )
        ]

    @precondition(lambda self: self.loading)
    @rule(data=st.data())
    def load_ends(self, data: Any) -> None:
        load = data.draw(st.sampled_from(self.loading))
        end = data.draw(st.sampled_from(self.usable_ends(load)))
        self.loading.remove(load)
        self.land(load, end)
        self.kv.pool.release(load.held)
        load.request.num_computed_tokens = end
        self.kv.cache_blocks(load.request, end)
        load.request.status = RequestStatus.RUNNING
        self.running.append(load.request)

    @precondition(lambda self: self.orphans)
    @rule(data=st.data())
    def orphan_lands(self, data: Any) -> None:
        load = data.draw(st.sampled_from(self.orphans))
        self.orphans.remove(load)
        self.land(load, load.begin)
        self.kv.pool.release(load.held)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, STEP_TOKENS), ahead=st.sampled_from([0, LOOKAHEAD]), late=st.booleans())
    def step(self, data: Any, count: int, ahead: int, late: bool) -> None:
        request = data.draw(st.sampled_from(self.running))
        count = min(count, request.num_tokens - request.num_computed_tokens, STEP_TOKENS - ahead)
        free, before = self.kv.pool.num_free_blocks, self.kv.block_ids(request.request_id)
        added = self.kv.allocate_slots(request, count, num_lookahead_tokens=ahead, delay_cache_blocks=late)
        if added is None:
            assert not self.alone(), f"{request} fits when it runs alone"
            assert self.kv.pool.num_free_blocks >= free
            return
        tables = self.kv.block_ids(request.request_id)
        for table, old, new in zip(tables, before, added, strict=True):
            assert table[len(table) - len(new) :] == new
            assert all(now in (0, then) for now, then in zip(table[: len(table) - len(new)], old, strict=False))
        self.computed(request, count, late)

    def computed(self, request: Request, count: int, late: bool) -> None:
        self.forward(request, count)
        request.num_computed_tokens += count
        if late:
            self.kv.cache_blocks(request, request.num_computed_tokens)
        if request.num_computed_tokens == request.num_tokens:
            if request.num_output_tokens < OUTPUT_MAX:
                request.append_output(request.num_tokens % 3)
            else:
                self.leave(request)

    def leave(self, request: Request) -> None:
        self.kv.free(request)
        assert not any(self.kv.block_ids(request.request_id))
        self.running = [other for other in self.running if other is not request]
        for load in [load for load in self.loading if load.request is request]:
            self.loading.remove(load)
            self.orphans.append(load)

    @precondition(lambda self: self.running or self.loading)
    @rule(data=st.data(), comes_back=st.booleans())
    def stop(self, data: Any, comes_back: bool) -> None:
        """An abort, or a preemption."""
        request = data.draw(st.sampled_from([*self.running, *(load.request for load in self.loading)]))
        self.leave(request)
        request.num_computed_tokens = 0
        if comes_back:
            self.waiting.append(request)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def hold(self, data: Any) -> None:
        """A store begins: the blocks' content must stay as it is until it ends."""
        request = data.draw(st.sampled_from(self.running))
        held = []
        for group, table in enumerate(self.kv.block_ids(request.request_id)):
            held += table[: request.num_computed_tokens // self.specs[group].block_size]
        self.kv.pool.hold(held)
        self.stores.append((held, {slot: kept for slot, kept in self.slots.items() if slot[0] in set(held) - {0}}))

    @precondition(lambda self: self.stores)
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        held, content = self.stores.pop(data.draw(st.integers(0, len(self.stores) - 1)))
        assert all(self.slots[slot] == kept for slot, kept in content.items()), "a held block was written"
        self.kv.pool.release(held)

    @rule()
    def reset(self) -> None:
        unused = not (self.running or self.loading or self.orphans or any(any(held) for held, _ in self.stores))
        assert self.kv.reset_prefix_cache() == (unused or self.kv.usage == 0)
        if unused:
            assert not any(self.kv.get_computed_blocks(request).num_tokens for request in self.waiting)

    def alone(self) -> bool:
        return not (len(self.running) + len(self.loading) > 1 or self.orphans or self.stores)

    # -- what always holds

    @invariant()
    def structures_agree(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.check()
        live = [self.kv.block_ids(request.request_id) for request in self.running]
        live += [self.kv.block_ids(load.request.request_id) for load in self.loading]
        tables = [[block_id for block_id in table if block_id] for owner in live for table in owner]
        references = Counter(block_id for table in tables for block_id in table)
        shared = [block_id for block_id, count in references.items() if count > 1]
        assert all(self.kv.pool._blocks[block_id].block_hash is not None for block_id in shared)
        held = [load.held for load in self.loading + self.orphans] + [held for held, _ in self.stores]
        references.update(block_id for ids in held for block_id in ids if block_id)
        assert references == Counter(
            {block.block_id: block.ref_count for block in self.kv.pool._blocks if block.ref_count}
        )
        assert self.kv.pool.num_free_blocks == self.num_blocks - 1 - len(references)

    @invariant()
    def events_tell_what_can_be_found(self) -> None:
        if not hasattr(self, "kv"):
            return
        for event in self.kv.take_events():
            match event:
                case BlockStored():
                    self.findable |= {(event.group, block_hash) for block_hash in event.hashes}
                case BlockRemoved():
                    gone = {(event.group, block_hash) for block_hash in event.hashes}
                    assert gone <= self.findable
                    self.findable -= gone
                case AllBlocksCleared():
                    self.findable.clear()
        assert self.findable == {(group, block_hash) for (block_hash, group), _ in self.kv.pool._cached.items()}

    def teardown(self) -> None:
        if not hasattr(self, "kv"):
            return
        for request in [*self.running, *(load.request for load in self.loading)]:
            self.leave(request)
        for load in self.orphans:
            self.kv.pool.release(load.held)
        for held, _ in self.stores:
            self.kv.pool.release(held)
        assert self.kv.usage == 0 and self.kv.pool.num_free_blocks == self.num_blocks - 1
        assert self.kv.reset_prefix_cache() and self.kv.pool.num_cached_hashes == 0
        self.kv.check()


class Full(AgainstOracle):
    specs, num_blocks = (FullAttentionSpec(**pages(4)),), 18


class Sliding(AgainstOracle):
    specs, num_blocks = (SlidingWindowSpec(**pages(4), sliding_window=18),), 14


class FullAndSliding(AgainstOracle):
    specs, num_blocks = (FullAttentionSpec(**pages(4)), SlidingWindowSpec(**pages(6), sliding_window=7)), 26


class TwoWindowsAndChunks(AgainstOracle):
    specs = (
        SlidingWindowSpec(**pages(2), sliding_window=1),
        SlidingWindowSpec(**pages(4), sliding_window=9),
        ChunkedLocalSpec(**pages(4), chunk_size=10),
    )
    num_blocks = 30


class FullAndState(AgainstOracle):
    specs, num_blocks = (FullAttentionSpec(**pages(4)), MambaSpec(block_size=4, shapes=((2, 24),))), 24


SETTINGS = settings(max_examples=40, stateful_step_count=40, deadline=None)
for machine in (Full, Sliding, FullAndSliding, TwoWindowsAndChunks, FullAndState):
    machine.TestCase.settings = SETTINGS
TestFull = Full.TestCase
TestSliding = Sliding.TestCase
TestFullAndSliding = FullAndSliding.TestCase
TestTwoWindowsAndChunks = TwoWindowsAndChunks.TestCase
TestFullAndState = FullAndState.TestCase
