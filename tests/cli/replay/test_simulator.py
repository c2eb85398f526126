from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.cli.replay import simulator
from kvstrata.cli.replay.costs import CostModel
from kvstrata.cli.replay.schedule import Schedule, Turn
from kvstrata.cli.replay.timing import latencies

BLOCK_TOKENS = 10


def schedule_of(chains: list[tuple[int, list[int]]], closed_loop: bool = False) -> Schedule:
    """One turn of one session a chain, a second apart; the prompt ends five tokens into the next block."""
    turns = [
        Turn(
            index=index,
            session=index % 3,
            engine=engine,
            salt="",
            at_s=float(index),
            think_s=0.0,
            tokens_in=len(chain) * BLOCK_TOKENS + 5,
            tokens_out=0,
            blocks=np.array(chain, dtype=np.int32),
            hit_limit=len(chain),
        )
        for index, (engine, chain) in enumerate(chains)
    ]
    return Schedule("drawn", closed_loop, BLOCK_TOKENS, 3, tuple(turns), np.zeros((64, 16), np.uint8))


class Lru:
    """A list, coldest first."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.held = capacity, list[int]()

    def prefix(self, chain: list[int]) -> int:
        return next((i for i, block in enumerate(chain) if block not in self.held), len(chain))

    def touch(self, chain: list[int]) -> None:
        self.held = [block for block in self.held if block not in chain] + chain[::-1]
        self.held = self.held[max(0, len(self.held) - self.capacity) :]


# Chains of a tree: a block's number names its path, as a chained hash does.
paths = st.lists(st.integers(0, 1), min_size=0, max_size=4).map(
    lambda turns: [(1 << (depth + 1)) + int("".join(map(str, turns[: depth + 1])), 2) for depth in range(len(turns))]
)
traffic = st.lists(st.tuples(st.integers(0, 1), paths), max_size=25)


@given(traffic, st.integers(0, 6), st.integers(0, 12))
def test_the_pool_case_equals_the_brute_force(chains: list[tuple[int, list[int]]], private: int, pool: int) -> None:
    hits = simulator.pooled(schedule_of(chains), 2, private, pool)
    caches, shared = [Lru(private), Lru(private)], Lru(pool)
    for index, (engine, chain) in enumerate(chains):
        near = caches[engine].prefix(chain)
        far = near + shared.prefix(chain[near:])
        caches[engine].touch(chain)
        if near < len(chain) or any(block not in shared.held for block in chain):
            shared.touch(chain)
        assert hits.private[index] == near * BLOCK_TOKENS
        assert hits.pool[index] == (far - near) * BLOCK_TOKENS


@given(traffic, st.integers(0, 6))
def test_cases_are_ordered(chains: list[tuple[int, list[int]]], private: int) -> None:
    """More cache never hits less, on chains that nothing but capacity evicts."""
    schedule = schedule_of(chains)
    ceiling = simulator.infinite_cache(schedule)
    endless = simulator.pooled(schedule, 2, private, 1000)
    alone = simulator.private_caches(schedule, 2, private)
    assert (endless.private + endless.pool == ceiling.pool).all()
    assert (endless.private == alone.private).all()
    behind = simulator.infinite_cache(schedule, alone)
    assert (behind.private == endless.private).all()
    assert (behind.pool == endless.pool).all()
    assert simulator.no_cache(schedule).rate() == 0.0
    assert (ceiling.computed + ceiling.pool == ceiling.tokens_in).all()


def test_what_private_caches_serve_looks_cold_to_the_pool() -> None:
    chains = [(0, [1]), (1, [2]), (0, [1]), (1, [3]), (1, [1])]
    # Room for two: block 1 was used last, but the pool has not seen that, and drops it for 3.
    hits = simulator.pooled(schedule_of(chains), 2, 1, 2)
    assert hits.private.tolist() == [0, 0, 10, 0, 0]
    assert hits.pool.tolist() == [0, 0, 0, 0, 0]


def test_hits_stop_at_the_limit() -> None:
    whole = schedule_of([(0, [1, 2]), (0, [1, 2])])
    limited = Schedule("", False, BLOCK_TOKENS, 1, tuple(_limited(t) for t in whole.turns), whole.hashes)
    assert simulator.private_caches(limited, 1, 9).private.tolist() == [0, 10]
    assert simulator.infinite_cache(limited).pool.tolist() == [0, 10]
    both = simulator.pooled(limited, 1, 9, 9)
    assert (both.private.tolist(), both.pool.tolist()) == ([0, 10], [0, 0])


def _limited(turn: Turn) -> Turn:
    return Turn(*(getattr(turn, name) for name in Turn.__slots__[:-1]), hit_limit=1)


def test_latency_is_queue_and_load_and_prefill() -> None:
    costs = CostModel(prefill_tokens_s=10, attention_pairs_s=1e30, load_bytes_s=10, kv_bytes_a_token=1)
    schedule = schedule_of([(0, [1, 2]), (0, [1, 2])])
    none = latencies(schedule, simulator.no_cache(schedule), costs)
    assert none.ttft_s.tolist() == [2.5, 1.5 + 2.5]
    pool = latencies(schedule, simulator.pooled(schedule, 1, 0, 9), costs)
    assert pool.load_s.tolist() == [0, 2.0]
    assert pool.prefill_s.tolist() == [2.5, 0.5]
    assert pool.queue_s.tolist() == [0, 1.5]


def test_a_closed_loop_session_waits_for_its_answer() -> None:
    costs = CostModel(prefill_tokens_s=1, attention_pairs_s=1e30)
    chains = [(index % 3, [1, 2]) for index in range(6)]
    open_loop = latencies(schedule_of(chains), simulator.no_cache(schedule_of(chains)), costs)
    closed = latencies(schedule_of(chains, closed_loop=True), simulator.no_cache(schedule_of(chains)), costs)
    assert closed.queue_s.max() == 0
    assert open_loop.queue_s.max() == 22.0


def test_attention_makes_long_prompts_dearer_than_linear() -> None:
    costs = CostModel()
    assert costs.prefill_s(0, 200_000) > 2.5 * costs.prefill_s(0, 100_000)
    assert costs.prefill_s(100_000, 1_000) > costs.prefill_s(0, 1_000)
    together, apart = costs.prefill_s(0, 2000), costs.prefill_s(0, 1000) + costs.prefill_s(1000, 1000)
    assert abs(together - apart) < 1e-9
