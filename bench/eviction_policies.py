"""Caches of prefix chains by the rules of the literature, and one that knows the future.

All keep what the pool's own keeps: of one call the deeper blocks are the colder, a block with a child in the
cache is no victim, nor is one that the call itself uses.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Sequence

Queue = OrderedDict[int, None]
NEVER = 1 << 60


class ChainCache:
    """``parents`` of all blocks by number, -1 for the first of a chain."""

    def __init__(self, capacity: int, parents: Sequence[int]) -> None:
        self.capacity = capacity
        self._parents = parents
        self._children = [0] * len(parents)
        self._used = [-1] * len(parents)
        self._call = 0
        self._where: dict[int, Queue] = {}
        self._parked: set[int] = set()

    def request(self, chain: list[int]) -> int:
        """Look a chain up, use what is there, store what is not; blocks of its prefix that were there."""
        self._call += 1
        hits = next((at for at, block in enumerate(chain) if block not in self._where), len(chain))
        for block in chain[:hits]:
            self._used[block] = self._call
        self.begin(chain, hits)
        new = chain[hits:]
        excess = len(self._where) + len(new) - self.capacity
        while excess > 0 and (victim := self.victim()) is not None:
            self._evict(victim)
            excess -= 1
        new = new[: len(new) - max(0, excess)]
        for block in reversed(chain[:hits]):
            self._parked.discard(block)
            self.hit(block)
        for block in new:
            self._used[block] = self._call
            if self._parents[block] >= 0:
                self._children[self._parents[block]] += 1
        for block in reversed(new):
            self.take_in(block)
        return hits

    def begin(self, chain: list[int], hits: int) -> None:
        """What a rule wants to know of a call."""

    def hit(self, block: int) -> None:
        raise NotImplementedError

    def take_in(self, block: int) -> None:
        raise NotImplementedError

    def victim(self) -> int | None:
        raise NotImplementedError

    def left(self, block: int, queue: Queue) -> None:
        """What a rule remembers of a block that it has evicted from a queue."""

    def put(self, block: int, queue: Queue) -> None:
        before = self._where.get(block)
        if before is not None:
            before.pop(block, None)
        self._where[block] = queue
        queue[block] = None

    def front(self, queue: Queue) -> int | None:
        while queue:
            block = next(iter(queue))
            if not self._children[block] and self._used[block] != self._call:
                return block
            del queue[block]
            self._parked.add(block)
        return None

    def _evict(self, block: int) -> None:
        queue = self._where.pop(block)
        queue.pop(block, None)
        self.left(block, queue)
        parent = self._parents[block]
        if parent < 0:
            return
        self._children[parent] -= 1
        if not self._children[parent] and parent in self._parked:
            self._parked.discard(parent)
            home = self._where[parent]
            home[parent] = None
            home.move_to_end(parent, last=False)


class Segmented(ChainCache):
    """Segmented LRU with a fixed share."""

    share = 0.5

    def __init__(self, capacity: int, parents: Sequence[int]) -> None:
        super().__init__(capacity, parents)
        self._trial: Queue = OrderedDict()
        self._protected: Queue = OrderedDict()

    def hit(self, block: int) -> None:
        self.put(block, self._protected)
        while len(self._protected) > self.share * self.capacity:
            self.put(next(iter(self._protected)), self._trial)

    def take_in(self, block: int) -> None:
        self.put(block, self._trial)

    def victim(self) -> int | None:
        block = self.front(self._trial)
        return block if block is not None else self.front(self._protected)


class Arc(ChainCache):
    """Adaptive replacement (Megiddo and Modha, FAST 2003)."""

    def __init__(self, capacity: int, parents: Sequence[int]) -> None:
        super().__init__(capacity, parents)
        self._once: Queue = OrderedDict()
        self._again: Queue = OrderedDict()
        self._once_left: Queue = OrderedDict()
        self._again_left: Queue = OrderedDict()
        self._target = 0.0

    def hit(self, block: int) -> None:
        self.put(block, self._again)

    def take_in(self, block: int) -> None:
        once, again = len(self._once_left) or 1, len(self._again_left) or 1
        if block in self._once_left:
            self._target = min(self.capacity, self._target + max(1, again / once))
            del self._once_left[block]
        elif block in self._again_left:
            self._target = max(0, self._target - max(1, once / again))
            del self._again_left[block]
        else:
            self.put(block, self._once)
            return
        self.put(block, self._again)

    def victim(self) -> int | None:
        first, second = (self._once, self._again) if len(self._once) > self._target else (self._again, self._once)
        block = self.front(first)
        return block if block is not None else self.front(second)

    def left(self, block: int, queue: Queue) -> None:
        ghosts = self._once_left if queue is self._once else self._again_left
        ghosts[block] = None
        if len(ghosts) > self.capacity:
            ghosts.popitem(last=False)


class S3Fifo(ChainCache):
    """S3-FIFO (Yang et al., SOSP 2023): a tenth is a small queue that few get beyond."""

    def __init__(self, capacity: int, parents: Sequence[int]) -> None:
        super().__init__(capacity, parents)
        self._small: Queue = OrderedDict()
        self._main: Queue = OrderedDict()
        self._ghosts: Queue = OrderedDict()
        self._uses: Counter[int] = Counter()

    def hit(self, block: int) -> None:
        self._uses[block] = min(3, self._uses[block] + 1)
        queue = self._where[block]
        if block not in queue:  # it was parked
            queue[block] = None

    def take_in(self, block: int) -> None:
        self._uses[block] = 0
        ghost = block in self._ghosts
        self._ghosts.pop(block, None)
        self.put(block, self._main if ghost else self._small)

    def victim(self) -> int | None:
        while True:
            small = self.front(self._small) if len(self._small) > self.capacity // 10 else None
            if small is not None:
                if not self._uses[small]:
                    return small
                self._uses[small] = 0
                self.put(small, self._main)
                continue
            main = self.front(self._main)
            if main is None:
                return self.front(self._small)
            if not self._uses[main]:
                return main
            self._uses[main] -= 1
            self._main.move_to_end(main)

    def left(self, block: int, queue: Queue) -> None:
        if queue is self._small:
            self._ghosts[block] = None
            if len(self._ghosts) > self.capacity:
                self._ghosts.popitem(last=False)


class TinyLfu(ChainCache):
    """W-TinyLFU (Einziger, Friedman and Manes, TOS 2017), window of a tenth, counts that are exact."""

    def __init__(self, capacity: int, parents: Sequence[int]) -> None:
        super().__init__(capacity, parents)
        self._window: Queue = OrderedDict()
        self._trial: Queue = OrderedDict()
        self._protected: Queue = OrderedDict()
        self._counts: Counter[int] = Counter()
        self._counted = 0
        self._window_max = capacity // 10 + 1

    def begin(self, chain: list[int], hits: int) -> None:
        self._counts.update(chain)
        self._counted += len(chain)
        if self._counted > 10 * self.capacity:
            self._counted //= 2
            self._counts = Counter({block: count // 2 for block, count in self._counts.items() if count > 1})

    def hit(self, block: int) -> None:
        if self._where[block] is self._window:
            self.put(block, self._window)
            return
        self.put(block, self._protected)
        while len(self._protected) > 0.8 * (self.capacity - self._window_max):
            self.put(next(iter(self._protected)), self._trial)

    def take_in(self, block: int) -> None:
        self.put(block, self._window)

    def victim(self) -> int | None:
        while True:
            main = self.front(self._trial)
            main = main if main is not None else self.front(self._protected)
            new = self.front(self._window) if len(self._window) > self._window_max else None
            if new is None:
                return main if main is not None else self.front(self._window)
            room = len(self._trial) + len(self._protected) < self.capacity - self._window_max
            if main is None or room:
                self.put(new, self._trial)
            elif self._counts[new] > self._counts[main]:
                self.put(new, self._trial)
                return main
            else:
                return new


class Clairvoyant:
    """Belady's rule: what is used again last leaves first. A bound for all others, as a parent is used before."""

    def __init__(self, capacity: int, chains: Sequence[list[int]], blocks: int) -> None:
        self.capacity = capacity
        upcoming = [NEVER] * blocks
        self._next: list[list[int]] = [[]] * len(chains)
        for at in range(len(chains) - 1, -1, -1):
            self._next[at] = [upcoming[block] for block in chains[at]]
            for block in chains[at]:
                upcoming[block] = at
        self._held: dict[int, int] = {}
        self._heap: list[tuple[int, int, int]] = []
        self._call = 0

    def request(self, chain: list[int]) -> int:
        held = self._held
        hits = next((at for at, block in enumerate(chain) if block not in held), len(chain))
        for depth, (block, use) in enumerate(zip(chain, self._next[self._call], strict=True)):
            held[block] = use
            heapq.heappush(self._heap, (-use, -depth, block))
        self._call += 1
        while len(held) > self.capacity:
            use, _, block = heapq.heappop(self._heap)
            if held.get(block) == -use:
                del held[block]
        return hits
