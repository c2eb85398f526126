"""The oracle: what each case should hit, simulated in this process with the replay's own policies.

A request looks its prompt up, and then all its full blocks are cached, before the next request of the
schedule is served. Private caches and the pool are LRU over chains (see :mod:`.chain_lru`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstrata.cli.replay.chain_lru import ChainLRU
from kvstrata.cli.replay.schedule import Schedule, Turn


@dataclass(frozen=True, slots=True)
class Hits:
    """Prompt tokens of each turn by where they came from: int64 [turns] each; the rest is computed."""

    tokens_in: npt.NDArray[np.int64]
    private: npt.NDArray[np.int64]
    pool: npt.NDArray[np.int64]

    @property
    def computed(self) -> npt.NDArray[np.int64]:
        return self.tokens_in - self.private - self.pool

    def rate(self) -> float:
        """Token hit rate, 0 to 1."""
        return _share(self.private + self.pool, self.tokens_in)

    def private_rate(self) -> float:
        return _share(self.private, self.tokens_in)

    def pool_rate(self) -> float:
        return _share(self.pool, self.tokens_in)


def _share(part: npt.NDArray[np.int64], whole: npt.NDArray[np.int64]) -> float:
    total = int(whole.sum())
    return int(part.sum()) / total if total else 0.0


def no_cache(schedule: Schedule) -> Hits:
    """Every token is computed."""
    tokens_in, zero, _ = _empty(schedule)
    return Hits(tokens_in, zero, zero)


def infinite_cache(schedule: Schedule, private: Hits | None = None) -> Hits:
    """The ceiling: a pool that never evicts. ``private`` says what private caches in front of it hit."""
    tokens_in, near, far = _empty(schedule)
    seen = np.zeros(schedule.unique_blocks, dtype=bool)
    for turn in schedule.turns:
        held = seen[turn.blocks[: turn.hit_limit]]
        blocks = len(held) if held.all() else int(held.argmin())
        far[turn.index] = blocks * schedule.block_tokens
        seen[turn.blocks] = True
    if private is not None:
        near = private.private
    return Hits(tokens_in, near, far - near)


def private_caches(schedule: Schedule, engines: int, private_blocks: int) -> Hits:
    """Each engine has a cache of its own, and no pool."""
    tokens_in, private, zero = _empty(schedule)
    caches = [ChainLRU(private_blocks) for _ in range(engines)]
    for turn in schedule.turns:
        chain = turn.blocks.tolist()
        cache = caches[turn.engine]
        private[turn.index] = min(cache.prefix(chain), turn.hit_limit) * schedule.block_tokens
        cache.touch(chain)
    return Hits(tokens_in, private, zero)


def pooled(schedule: Schedule, engines: int, private_blocks: int, pool_blocks: int) -> Hits:
    """Private caches first, then the pool; what neither has is computed and stored in the pool.

    A load or store makes its blocks, and by them their whole chain, the pool's most recent. A prompt that the
    private cache serves whole is not seen by the pool, unless the pool has dropped some of it: then it is
    given back.
    """
    tokens_in, private, pool = _empty(schedule)
    caches = [ChainLRU(private_blocks) for _ in range(engines)]
    shared = ChainLRU(pool_blocks)
    for turn in schedule.turns:
        chain = turn.blocks.tolist()
        near = _serve_private(caches[turn.engine], turn, chain)
        far = max(near, min(shared.prefix(chain[near : turn.hit_limit]) + near, turn.hit_limit))
        if near < len(chain) or shared.prefix(chain) < len(chain):
            shared.touch(chain)
        private[turn.index] = near * schedule.block_tokens
        pool[turn.index] = (far - near) * schedule.block_tokens
    return Hits(tokens_in, private, pool)


def _serve_private(cache: ChainLRU, turn: Turn, chain: list[int]) -> int:
    near = min(cache.prefix(chain), turn.hit_limit)
    cache.touch(chain)
    return near


def _empty(schedule: Schedule) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    turns = len(schedule.turns)
    tokens_in = np.fromiter((turn.tokens_in for turn in schedule.turns), dtype=np.int64, count=turns)
    return tokens_in, np.zeros(turns, dtype=np.int64), np.zeros(turns, dtype=np.int64)
