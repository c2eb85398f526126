"""The longest hit and the rows of a load, against a search over tokens."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.engine_adapter.connector.hits import (
    LoadRows,
    block_counts,
    group_blocks,
    longest_hit,
    packed_hashes,
    pools_prefixes,
)
from kvstrata.engine_adapter.connector.layout import GroupLayout, PoolLayout

HASH_TOKENS = 2
ALIGNED = 8


def layout_of(*groups: GroupLayout) -> PoolLayout:
    return PoolLayout(
        groups=groups,
        num_blocks=100,
        num_tensors=2,
        page_bytes=64,
        parts=2,
        hash_block_tokens=HASH_TOKENS,
        hash_bytes=16,
        aligned_tokens=ALIGNED,
    )


def group(block_tokens: int, window: int = 0, layers: int = 1, poolable: bool = True) -> GroupLayout:
    return GroupLayout(
        fingerprint="f", block_tokens=block_tokens, layers=layers, window_tokens=window, poolable=poolable
    )


GROUPS = st.builds(group, st.sampled_from([2, 4, 8]), st.sampled_from([0, 0, 1, 2, 3, 7, 8, 9, 20, 100]))
#: Mostly there, so that long hits happen.
PRESENT = st.lists(st.sampled_from([1, 1, 1, 1, 1, 1, 0]), max_size=24).map(bytes)


def needed_tokens(kind: GroupLayout, local: int, end: int) -> range:
    return range(max(local, end - (kind.window_tokens - 1)) if kind.window_tokens else local, end)


def searched(layout: PoolLayout, present: list[bytes], local: int, limit: int) -> int:
    """Every aligned end, every token."""
    best = local
    for end in range(local + ALIGNED, limit + 1, ALIGNED):
        if all(
            end <= len(have) * kind.block_tokens
            and all(have[token // kind.block_tokens] for token in needed_tokens(kind, local, end))
            for kind, have in zip(layout.groups, present, strict=True)
        ):
            best = end
    return best


@dataclass
class Case:
    layout: PoolLayout
    present: list[bytes]


CASES = st.lists(st.tuples(GROUPS, PRESENT), min_size=1, max_size=3).map(
    lambda pairs: Case(layout_of(*[kind for kind, _ in pairs]), [have for _, have in pairs])
)


@given(case=CASES, local_units=st.integers(0, 6), num_tokens=st.integers(1, 120))
@settings(max_examples=400, deadline=None)
def test_the_longest_hit_is_what_a_search_finds(case: Case, local_units: int, num_tokens: int) -> None:
    local = local_units * ALIGNED
    end = longest_hit(case.layout, case.present, local, num_tokens - 1)
    assert end == searched(case.layout, case.present, local, num_tokens - 1)
    assert 0 <= end - local <= max(0, num_tokens - 1 - local) and (end - local) % ALIGNED == 0


@given(case=CASES, begin=st.integers(0, 4), length=st.integers(1, 5), data=st.data())
@settings(max_examples=200, deadline=None)
def test_a_load_names_the_blocks_that_its_end_needs_and_counts_what_came(
    case: Case, begin: int, length: int, data: st.DataObject
) -> None:
    load = LoadRows(case.layout, begin * ALIGNED, (begin + length) * ALIGNED)
    named = 0
    for index, kind in enumerate(case.layout.groups):
        rows = load.rows(index)
        assert set(rows) == {token // kind.block_tokens for token in needed_tokens(kind, load.begin, load.end)}
        named += len(rows)
    assert load.loaded_tokens(b"\1" * named) == length * ALIGNED
    done = bytes(data.draw(st.lists(st.sampled_from([1, 1, 1, 0]), min_size=named, max_size=named)))
    present, at = [], 0
    for index, kind in enumerate(case.layout.groups):
        rows = load.rows(index)
        have = bytearray(load.end // kind.block_tokens)
        for row in rows:
            have[row] = done[at]
            at += 1
        present.append(bytes(have))
    assert load.loaded_tokens(done) == searched(case.layout, present, load.begin, load.end) - load.begin


def test_a_group_that_no_prefix_determines_ends_all_external_hits() -> None:
    state = layout_of(group(4), group(4, poolable=False))
    assert not pools_prefixes(state)
    assert longest_hit(state, [b"\1" * 8, b"\1" * 8], 8, 31) == 8
    empty = layout_of(group(4), group(4, poolable=False, layers=0))
    assert pools_prefixes(empty)
    assert longest_hit(empty, [b"\1" * 8, b""], 8, 31) == 24
    assert LoadRows(empty, 8, 24).rows(1) == range(0)
    assert not pools_prefixes(layout_of(group(4, layers=0)))


def test_hashes_of_a_group_are_those_of_its_last_hash_blocks() -> None:
    layout = layout_of(group(4), group(2))
    hashes = [bytes([index]) * 16 for index in range(9)]  # 18 tokens
    assert block_counts(layout, len(hashes)) == [4, 9]
    assert packed_hashes(layout, 0, hashes, range(1, 3)) == hashes[3] + hashes[5]
    assert packed_hashes(layout, 0, hashes, range(4)) == hashes[1] + hashes[3] + hashes[5] + hashes[7]
    assert packed_hashes(layout, 1, hashes, range(9)) == b"".join(hashes)
    named = group_blocks(layout, 0, hashes, range(2, 4), [10, 11, 12, 13])
    assert (named.block_ids, named.first_index, named.parent) == ([12, 13], 2, hashes[3])
    assert group_blocks(layout, 0, hashes, range(1), [10]).parent == b""


def test_bytes_of_a_load_count_named_blocks_only() -> None:
    layout = layout_of(group(4, layers=2), group(4, window=5, layers=1))
    load = LoadRows(layout, 8, 32)  # 6 blocks of two layers, one of one layer
    assert load.nbytes == 6 * 128 + 64
