"""What the scheduler relies on: hits, the allocation transaction, loads, ends, admission."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.engine_adapter.hashing import BlockHasher
from kvstrata.engine_adapter.paged.cache.kv_cache_manager import KVCacheManager
from kvstrata.engine_adapter.paged.cache.kv_cache_spec import (
    ChunkedLocalSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    SlidingWindowSpec,
)
from kvstrata.engine_adapter.paged.request import Request, SamplingParams
from kvstrata.proto.errors import InvalidArgument

SIZE = 4
FULL = FullAttentionSpec(block_size=SIZE, num_kv_heads=2, head_size=2)
SWA = SlidingWindowSpec(block_size=SIZE, num_kv_heads=2, head_size=2, sliding_window=8)


def manager_of(*specs: KVCacheSpec, num_blocks: int = 33, step: int = 16, caching: bool = True) -> KVCacheManager:
    groups = tuple(KVCacheGroup(layers=(layer,), spec=spec) for layer, spec in enumerate(specs))
    config = KVCacheConfig(num_blocks=num_blocks, groups=groups, max_model_len=128, max_num_batched_tokens=step)
    return KVCacheManager(config, hash_block_size=SIZE, enable_prefix_caching=caching)


def request(num_tokens: int, name: str = "r", first: int = 0, salt: str = "") -> Request:
    tokens = range(first, first + num_tokens)
    return Request(name, tokens, SamplingParams(), BlockHasher(SIZE), cache_salt=salt)


def prefill(kv: KVCacheManager, of: Request, upto: int | None = None) -> None:
    """Compute ``of`` from its cached prefix to ``upto`` tokens, all by default, in one step."""
    computed = kv.get_computed_blocks(of)
    upto = of.num_tokens if upto is None else upto
    assert kv.allocate_slots(of, upto - computed.num_tokens, computed=computed) is not None
    of.num_computed_tokens = upto
    kv.check()


@pytest.mark.parametrize(("num_tokens", "hit"), [(1, 0), (3, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_a_hit_leaves_the_last_token_to_compute(num_tokens: int, hit: int) -> None:
    kv = manager_of(FULL)
    prefill(kv, request(num_tokens, "first"))
    again = request(num_tokens, "again")
    before = kv.pool.num_free_blocks
    assert kv.get_computed_blocks(again).num_tokens == hit == kv.get_computed_blocks(again).num_tokens
    assert kv.pool.num_free_blocks == before, "asking changes nothing"
    prefill(kv, again)
    shared = hit // SIZE
    first, second = kv.block_ids("first")[0], kv.block_ids("again")[0]
    assert first[:shared] == second[:shared] and not set(first[shared:]) & set(second[shared:])
    assert kv.get_num_common_prefix_blocks(["first", "again"]) == [shared]


def test_another_salt_shares_nothing() -> None:
    kv = manager_of(FULL)
    prefill(kv, request(20, "a", salt="a"))
    assert kv.get_computed_blocks(request(20, "b", salt="b")).num_tokens == 0
    assert kv.get_computed_blocks(request(20, "c", salt="a")).num_tokens == 16


def test_without_prefix_caching_there_are_no_hits() -> None:
    kv = manager_of(FULL, caching=False)
    prefill(kv, request(20, "a"))
    assert kv.get_computed_blocks(request(20, "b")).num_tokens == 0


def test_chunks_and_decode_extend_the_table() -> None:
    kv, it = manager_of(FULL), request(10)
    assert kv.allocate_slots(it, 5) == ([1, 2],)
    it.num_computed_tokens = 5
    assert kv.allocate_slots(it, 3) == ([],), "the second block has room"
    it.num_computed_tokens = 8
    assert kv.allocate_slots(it, 2, num_lookahead_tokens=3) == ([3, 4],)
    it.num_computed_tokens = 10
    assert kv.allocate_slots(it, 1, num_lookahead_tokens=3) == ([],)
    assert kv.block_ids("r") == ([1, 2, 3, 4],)
    assert kv.pool.num_cached_hashes == 2, "ten tokens fill two blocks"
    kv.free(it)
    assert kv.block_ids("r") == ([],) and kv.usage == 0
    kv.free(it)
    kv.check()


def test_none_when_short_and_nothing_has_changed() -> None:
    kv = manager_of(FULL, num_blocks=6)
    old = request(12, "old")
    prefill(kv, old)
    kv.free(old)
    busy = request(8, "busy", first=100)
    prefill(kv, busy)
    # All that is free are the three blocks of the hit: two new ones are too many.
    again = request(20, "again")
    computed = kv.get_computed_blocks(again)
    assert computed.num_tokens == 12 and kv.pool.num_free_blocks == 3
    assert kv.allocate_slots(again, 8, computed=computed) is None
    assert kv.pool.num_free_blocks == 3 and kv.block_ids("again") == ([],)
    assert kv.get_computed_blocks(again) == computed
    kv.check()
    kv.free(busy)
    assert kv.allocate_slots(again, 8, computed=computed) is not None
    kv.check()


def test_cached_free_blocks_count_as_taken() -> None:
    kv = manager_of(FULL, num_blocks=5)
    old = request(12, "old")
    prefill(kv, old)
    kv.free(old)
    again = request(20, "again")
    computed = kv.get_computed_blocks(again)
    assert kv.pool.num_free_blocks == 4 and computed.num_tokens == 12
    assert kv.allocate_slots(again, 8, computed=computed) is None, "three touched and two new of four"
    assert kv.allocate_slots(again, 4, computed=computed) is not None
    kv.check()


def test_blocks_of_a_step_under_way_are_not_found() -> None:
    kv, it = manager_of(FULL), request(12)
    assert kv.allocate_slots(it, 12, delay_cache_blocks=True) is not None
    assert kv.get_computed_blocks(request(12, "other")).num_tokens == 0
    kv.cache_blocks(it, 12)
    kv.cache_blocks(it, 12)
    assert kv.get_computed_blocks(request(12, "other")).num_tokens == 8
    kv.check()


def test_lookahead_and_unknown_tokens_are_not_cached() -> None:
    kv, it = manager_of(FULL), request(7)
    assert kv.allocate_slots(it, 7, num_lookahead_tokens=9) is not None
    kv.cache_blocks(it, 16)
    assert kv.pool.num_cached_hashes == 1
    it.num_computed_tokens = 7
    it.append_output(7)
    kv.allocate_slots(it, 1)
    assert kv.pool.num_cached_hashes == 2


def test_external_tokens_follow_the_local_ones() -> None:
    kv = manager_of(FULL, SWA)
    prefill(kv, request(9, "first"))
    it = request(42, "second")
    computed = kv.get_computed_blocks(it)
    assert computed.num_tokens == 8
    added = kv.allocate_slots(it, 0, computed=computed, num_external_tokens=32, delay_cache_blocks=True)
    assert added is not None and [len(blocks) for blocks in added] == [8, 8]
    full, window = kv.block_ids("second")
    assert 0 not in full and full[:2] == kv.block_ids("first")[0][:2]
    # Until the load has ended well, the window before it is kept: it goes on from there when it fails.
    assert [block_id > 0 for block_id in window] == [True] * 2 + [False] * 6 + [True] * 2
    assert kv.get_computed_blocks(request(42, "other")).num_tokens == 8, "not there yet"
    it.num_computed_tokens = 40
    kv.cache_blocks(it, 40)
    assert kv.get_computed_blocks(request(42, "other")).num_tokens == 40
    assert kv.allocate_slots(it, 2) is not None
    assert [block_id > 0 for block_id in kv.block_ids("second")[1]] == [False] * 8 + [True] * 3
    kv.check()


@pytest.mark.parametrize("loaded", [0, 4, 28])
def test_a_load_that_ended_short_is_computed_in_real_blocks(loaded: int) -> None:
    kv, it = (
        manager_of(FULL, SlidingWindowSpec(block_size=4, num_kv_heads=2, head_size=2, sliding_window=1)),
        request(42),
    )
    assert kv.allocate_slots(it, 0, num_external_tokens=32, delay_cache_blocks=True) is not None
    full = kv.block_ids("r")[0]
    it.num_computed_tokens = loaded
    kv.cache_blocks(it, loaded)
    for _ in range(3):
        count = min(12, it.num_tokens - it.num_computed_tokens)
        assert kv.allocate_slots(it, count) is not None
        end = it.num_computed_tokens + count
        table = kv.block_ids("r")[1]
        assert all(table[position // 4] for position in range(it.num_computed_tokens, end)), "never the null block"
        it.num_computed_tokens = end
        kv.check()
    assert kv.block_ids("r")[0][:8] == full, "full attention computes in the slots it held"
    kv.free(it)
    assert kv.usage == 0


def test_blocks_held_for_a_transfer_outlive_their_request() -> None:
    kv, it = manager_of(FULL, num_blocks=4), request(12)
    prefill(kv, it)
    (held,) = kv.block_ids("r")
    kv.pool.hold(held)
    kv.free(it)
    other = request(12, "other", first=50)
    assert kv.allocate_slots(other, 1) is None and kv.usage == 1
    kv.pool.release(held)
    assert kv.allocate_slots(other, 12) is not None
    kv.check()


def test_the_tail_of_a_freed_request_is_evicted_first() -> None:
    kv, it = manager_of(FULL, num_blocks=11), request(40)
    prefill(kv, it)
    kv.free(it)
    assert kv.allocate_slots(request(12, "other", first=100), 12) is not None
    assert kv.get_computed_blocks(it).num_tokens == 28, "the last three of ten are gone"


def test_a_window_lets_a_long_request_run_in_few_blocks() -> None:
    kv = manager_of(SWA, num_blocks=8, step=8)
    assert kv.can_ever_fit(120) and kv.blocks_needed(120) == 5
    it = request(120)
    while it.num_computed_tokens < 120:
        assert kv.allocate_slots(it, 8) is not None
        it.num_computed_tokens += 8
        assert (kv.pool.num_blocks - 1) - kv.pool.num_free_blocks <= 5
        kv.check()


def test_admission_is_the_sum_over_groups_without_the_null_block() -> None:
    kv = manager_of(FULL, SWA, num_blocks=14, step=16)
    assert kv.blocks_needed(24) == 6 + 6 and kv.can_ever_fit(24)
    assert kv.blocks_needed(28) == 7 + 7 and not kv.can_ever_fit(28)
    it = request(28)
    assert kv.allocate_slots(it, 28) is None and kv.usage == 0
    assert KVCacheManager(kv.config).hash_block_size == SIZE


@given(
    kind=st.sampled_from(["full", "sliding", "chunked"]),
    window=st.integers(1, 40),
    step=st.integers(1, 24),
    length=st.integers(2, 120),
    local=st.integers(0, 20),
    external=st.integers(0, 20),
    loaded=st.booleans(),
)
def test_what_was_admitted_finishes_in_just_the_blocks_it_was_promised(
    kind: str, window: int, step: int, length: int, local: int, external: int, loaded: bool
) -> None:
    specs: dict[str, KVCacheSpec] = {
        "full": FULL,
        "sliding": SlidingWindowSpec(block_size=SIZE, num_kv_heads=2, head_size=2, sliding_window=window),
        "chunked": ChunkedLocalSpec(block_size=SIZE, num_kv_heads=2, head_size=2, chunk_size=window),
    }
    needed = manager_of(specs[kind], step=step).blocks_needed(length)
    kv = manager_of(specs[kind], num_blocks=needed + 1, step=step)
    earlier, it = request(min(local * SIZE + 1, length), "earlier"), request(length)
    while earlier.num_computed_tokens < earlier.num_tokens:
        count = min(step, earlier.num_tokens - earlier.num_computed_tokens)
        assert kv.allocate_slots(earlier, count) is not None
        earlier.num_computed_tokens += count
    kv.free(earlier)
    computed = kv.get_computed_blocks(it)
    it.num_computed_tokens = computed.num_tokens
    brought = min(external * SIZE, (length - 1 - computed.num_tokens) // SIZE * SIZE)
    allocated = kv.allocate_slots(it, 0, computed=computed, num_external_tokens=brought, delay_cache_blocks=True)
    assert allocated is not None
    it.num_computed_tokens += brought if loaded else 0
    while it.num_computed_tokens < length:
        count = min(step, length - it.num_computed_tokens)
        assert kv.allocate_slots(it, count) is not None, f"{it} stands still"
        it.num_computed_tokens += count
    kv.check()


def test_common_prefix_is_what_all_tables_begin_with() -> None:
    kv = manager_of(FULL, SWA, num_blocks=65)
    for name, length in (("a", 30), ("b", 22), ("c", 9)):
        prefill(kv, request(length, name))
    assert kv.get_num_common_prefix_blocks(["a", "b"]) == [5, 0], "the window of b is not at a's head"
    assert kv.get_num_common_prefix_blocks(["a", "b", "c"]) == [2, 0]
    assert kv.get_num_common_prefix_blocks(["a"]) == kv.get_num_common_prefix_blocks([]) == [0, 0]
    prefill(kv, request(30, "d", first=90))
    assert kv.get_num_common_prefix_blocks(["a", "d"]) == [0, 0]


def test_common_prefix_stops_where_another_copy_begins() -> None:
    kv = manager_of(FULL)
    one, two = request(9, "one"), request(9, "two")
    for it in (one, two):
        kv.allocate_slots(it, 9, delay_cache_blocks=True)
    for it in (one, two):
        kv.cache_blocks(it, 9)
    prefill(kv, request(13, "three"))
    prefill(kv, request(13, "four"))
    assert kv.get_num_common_prefix_blocks(["three", "four"]) == [3]
    assert kv.get_num_common_prefix_blocks(["three", "one"]) == [2]
    assert kv.get_num_common_prefix_blocks(["one", "two"]) == [0]


def test_reset_forgets_when_nothing_runs() -> None:
    kv, it = manager_of(FULL), request(12)
    prefill(kv, it)
    assert not kv.reset_prefix_cache()
    kv.free(it)
    assert kv.get_computed_blocks(it).num_tokens == 8
    assert kv.reset_prefix_cache() and kv.get_computed_blocks(it).num_tokens == 0
    kv.check()


def test_the_hash_block_must_divide_every_block() -> None:
    config = manager_of(FULL).config
    with pytest.raises(InvalidArgument, match="must divide"):
        KVCacheManager(config, hash_block_size=3)
