"""What caches without bounds would hit: the ceiling of a pool, and of private caches that forget nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvstrata.cli.paged_replay.plan import Turn
from kvstrata.engine_adapter.hashing import BlockHasher

Ints = npt.NDArray[np.int64]


def one_cache(turns: Sequence[Turn], block_tokens: int) -> Ints:
    """Tokens that each turn hits, int64 [turns], when all share one cache of infinite size."""
    return _hits(turns, block_tokens, lambda turn: 0)


def cache_each(turns: Sequence[Turn], block_tokens: int) -> Ints:
    """The same when each engine has an infinite cache of its own."""
    return _hits(turns, block_tokens, lambda turn: turn.engine)


def _hits(turns: Sequence[Turn], block_tokens: int, cache_of: Callable[[Turn], int]) -> Ints:
    """A hit is whole blocks and leaves at least the last token to compute; a turn's own full blocks stay.

    Turns come one after the other. In all, any order hits as much: a block is computed once a cache, whoever
    comes first.
    """
    hasher = BlockHasher(block_tokens)
    root = hasher.root("")
    caches: dict[int, set[bytes]] = {}
    hits = np.zeros(len(turns), dtype=np.int64)
    for place, turn in enumerate(turns):
        hashes: list[bytes] = []
        hasher.extend(root, hashes, turn.tokens.tolist())
        cache = caches.setdefault(cache_of(turn), set())
        limit = (len(turn.tokens) - 1) // block_tokens
        hits[place] = block_tokens * next((i for i, name in enumerate(hashes[:limit]) if name not in cache), limit)
        cache.update(hashes)
    return hits
