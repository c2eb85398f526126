from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.cli.replay.blocks import HASH_BYTES, Blocking, BlockTable
from kvstrata.cli.replay.traces import Request
from kvstrata.proto.errors import ConfigError


def request(ids: list[int], tokens_in: int) -> Request:
    runs = np.array([[i, i] for i in ids], dtype=np.int64).reshape(-1, 2)
    return Request(0.0, tokens_in, 0, runs)


@st.composite
def prefix_chained(draw: st.DrawFn) -> list[list[int]]:
    """Prompts that branch off one another: an id is new wherever its prefix is."""
    prompts: list[list[int]] = [[]]
    fresh = 0
    for _ in range(draw(st.integers(1, 8))):
        base = draw(st.sampled_from(prompts))
        kept = draw(st.integers(0, len(base)))
        added = draw(st.integers(0, 9))
        prompts.append([*base[:kept], *range(fresh, fresh + added)])
        fresh += added
    return prompts[1:]


def tokens(ids: list[int], block: int) -> list[tuple[int, int]]:
    """Each token as (its trace id, its place in it): equal exactly where the prompts' tokens are equal."""
    return [(i, place) for i in ids for place in range(block)]


@given(prefix_chained(), st.sampled_from([1, 2, 4, 8, 16, 32]), st.integers(0, 7))
def test_blocks_are_equal_exactly_where_all_tokens_up_to_their_end_are(
    prompts: list[list[int]], block_tokens: int, cut: int
) -> None:
    trace_tokens = 8
    table = BlockTable(Blocking(trace_tokens, block_tokens))
    chain = table.chain("")
    seen: dict[tuple[tuple[int, int], ...], int] = {}
    for ids in prompts:
        flat = tokens(ids, trace_tokens)
        flat = flat[: max(0, len(flat) - cut)]
        numbers = chain.numbers(request(ids, len(flat))).tolist()
        assert len(numbers) == len(flat) // block_tokens
        for position, number in enumerate(numbers):
            prefix = tuple(flat[: (position + 1) * block_tokens])
            assert seen.setdefault(prefix, number) == number
    assert sorted(seen.values()) == list(range(len(table)))
    assert len({row.tobytes() for row in table.hashes()}) == len(table)


@given(prefix_chained(), st.sampled_from([4, 8, 24]))
def test_a_chain_gives_what_a_fresh_one_gives(prompts: list[list[int]], block_tokens: int) -> None:
    """The shortcut over a session's last prompt changes nothing."""
    table = BlockTable(Blocking(8, block_tokens))
    chain = table.chain("")
    for ids in prompts:
        asked = request(ids, len(ids) * 8)
        assert chain.numbers(asked).tolist() == table.chain("").numbers(asked).tolist()


def test_hashes_do_not_depend_on_what_came_before() -> None:
    one, other = BlockTable(Blocking(64, 128)), BlockTable(Blocking(64, 128))
    other.chain("").numbers(request([7, 8], 128))
    asked = request([1, 2, 3, 4], 256)
    numbers, others = one.chain("").numbers(asked), other.chain("").numbers(asked)
    here, there = one.hashes()[numbers], other.hashes()[others]
    assert numbers.tolist() != others.tolist()
    assert here.shape == (2, HASH_BYTES)
    assert (here == there).all()


def test_tenants_share_hashes_and_not_blocks() -> None:
    table = BlockTable(Blocking(64, 64))
    asked = request([1, 2], 128)
    mine, yours = table.chain("a").numbers(asked), table.chain("b").numbers(asked)
    assert not set(mine.tolist()) & set(yours.tolist())
    assert (table.hashes()[mine] == table.hashes()[yours]).all()


def test_a_partial_last_id_makes_no_block() -> None:
    table = BlockTable(Blocking(64, 64))
    assert len(table.chain("").numbers(request([1, 2, 3], 150))) == 2
    finer = BlockTable(Blocking(64, 16))
    assert len(finer.chain("").numbers(request([1, 2, 3], 150))) == 9


@pytest.mark.parametrize("block_tokens", [48, 96, 100])
def test_sizes_that_do_not_divide_are_refused(block_tokens: int) -> None:
    with pytest.raises(ConfigError, match="choose a divisor or a multiple of 64"):
        Blocking(64, block_tokens)
