from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.cli.replay.chain_lru import ChainLRU


class BruteForce:
    """Stamps and depths in a dict; evicts by looking at everything."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held: dict[int, tuple[int, int]] = {}
        self.stamp = 0

    def touch(self, chain: list[int]) -> None:
        self.stamp += 1
        for depth, block in enumerate(chain):
            self.held[block] = (self.stamp, -depth)
        while len(self.held) > self.capacity:
            del self.held[min(self.held, key=self.held.__getitem__)]

    def coldest_first(self) -> list[int]:
        return sorted(self.held, key=self.held.__getitem__)


chains = st.lists(st.integers(0, 12), max_size=8, unique=True)


@given(st.integers(0, 10), st.lists(chains, max_size=30))
def test_equals_the_brute_force(capacity: int, touched: list[list[int]]) -> None:
    lru, oracle = ChainLRU(capacity), BruteForce(capacity)
    for chain in touched:
        expected = next((i for i, block in enumerate(chain) if block not in oracle.held), len(chain))
        assert lru.prefix(chain) == expected
        lru.touch(chain)
        oracle.touch(chain)
        lru.check()
        assert lru.coldest_first() == oracle.coldest_first()


def test_a_chain_longer_than_the_cache_keeps_its_head() -> None:
    lru = ChainLRU(3)
    lru.touch([1, 2, 3, 4, 5])
    assert lru.prefix([1, 2, 3, 4, 5]) == 3


def test_a_negative_capacity_is_refused() -> None:
    with pytest.raises(ValueError, match="-1 blocks"):
        ChainLRU(-1)
