"""How much of an order is to be protected: the shares to choose from are tried out in small.

Miniature simulation (Waldspurger, Saemundsson, Ahmad and Park, USENIX ATC 2017): each share runs a cache of
its own over a sample of the blocks, scaled down as much as the sample, which holds hashes only. The share
whose small cache hits most is the one to use, when it is better by more than chance.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from kvstrata.storage.records import Block

#: Parts of all blocks; none protected is plain LRU, and where every order starts.
SHARES: Final = (0.0, 0.25, 0.5)
#: A small cache holds at least so many blocks, where there are as many, and at most eight times that.
SMALL_BLOCKS: Final = 256
#: Sampled uses between two looks at the scores, and what part of the scores is kept at each.
ROUND: Final = 256
KEPT: Final = 0.9
#: Another share is taken when it hits this part of all uses more often.
MARGIN: Final = 0.01
#: One byte of a hash tells whether the block is sampled.
SHIFT_MAX: Final = 8


class SmallCache:
    """A cache of hashes: used once, and used again (at most ``share`` of all), each least recent first."""

    __slots__ = ("again", "hits", "once", "share")

    def __init__(self, share: float) -> None:
        self.share = share
        self.hits = 0.0
        self.once: OrderedDict[bytes, None] = OrderedDict()
        self.again: OrderedDict[bytes, None] = OrderedDict()

    def use(self, key: bytes, capacity: int) -> None:
        once, again = self.once, self.again
        if key in again:
            self.hits += 1
            again.move_to_end(key)
        elif key in once:
            self.hits += 1
            if self.share:
                del once[key]
                again[key] = None
            else:
                once.move_to_end(key)
        else:
            once[key] = None
        while len(again) > self.share * capacity:
            once[again.popitem(last=False)[0]] = None
        while len(once) + len(again) > capacity:
            (once or again).popitem(last=False)


class ShareDuel:
    """``share`` is the one that does best of late. Some 2 hashes a block at 1,000 blocks, 0.03 at a million."""

    __slots__ = ("_caches", "_seen", "_shift", "_uses", "share")

    def __init__(self) -> None:
        self.share = SHARES[0]
        self._shift = 0
        self._start()

    def _start(self) -> None:
        self._caches = [SmallCache(share) for share in SHARES]
        self._uses = 0.0
        self._seen = 0

    def used(self, blocks: Sequence[Block], held: int) -> None:
        """Blocks of one call, in chain order, are used or new; the order holds ``held`` in all.

        With less than two small caches' worth of blocks there is no duel.
        """
        if held < 2 * SMALL_BLOCKS:
            self.share = SHARES[0]
            return
        shift = self._shift
        if not SMALL_BLOCKS <= held >> shift < 8 * SMALL_BLOCKS and shift != (fits := _shift(held)):
            self._shift = shift = fits
            self._start()
        mask, capacity = (1 << shift) - 1, held >> shift
        sampled = [block.hash for block in reversed(blocks) if not block.hash[0] & mask]
        for cache in self._caches:
            for key in sampled:
                cache.use(key, capacity)
        self._uses += len(sampled)
        self._seen += len(sampled)
        if self._seen >= ROUND:
            self._judge()

    def _judge(self) -> None:
        self._seen = 0
        best = max(self._caches, key=lambda cache: cache.hits)
        now = next(cache for cache in self._caches if cache.share == self.share)
        if best.hits - now.hits > MARGIN * self._uses:
            self.share = best.share
        self._uses *= KEPT
        for cache in self._caches:
            cache.hits *= KEPT

    def check(self) -> None:
        """Assert that no small cache has a block twice, or more than its share."""
        assert self.share in SHARES and 0 <= self._shift <= SHIFT_MAX
        for cache in self._caches:
            assert not cache.once.keys() & cache.again.keys()
            assert 0 <= cache.hits <= self._uses


def _shift(held: int) -> int:
    """The sample, as a power of two, that leaves twice ``SMALL_BLOCKS`` or a little more."""
    return min(max((held // (2 * SMALL_BLOCKS)).bit_length() - 1, 0), SHIFT_MAX)
