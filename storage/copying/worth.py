"""In which order a leaving node's blocks are to be saved: what is worth most per byte first. Sans-IO.

A block's worth is how often it seems to be asked for: its uses, over the time since the last one. A prefix is worth
what the best block after it is, since that one is of no use without it. Tenants take turns by bytes, so that no
tenant's cold blocks are saved at the price of another's hot ones, nor the other way round.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstrata.storage.records import Block

#: Seconds without a use that are taken for nothing: what was used a moment ago is not worth infinitely much.
IDLE_MIN_S: Final = 10.0
#: A tenant's turn, and at least one block.
TURN_BYTES: Final = 8 << 20

#: Seconds since each of some stamps.
IdleSeconds = Callable[[npt.NDArray[np.int64]], npt.NDArray[np.float64]]


def by_worth(blocks: Sequence[Block], idle_s: IdleSeconds) -> tuple[list[float], list[Block]]:
    """(worth per byte, block) of one shelf's blocks, the best first, a prefix before what follows it.

    O(n log n); reads the blocks, changes nothing. A million take a few seconds.
    """
    if not blocks:
        return [], []
    count, nbytes = len(blocks), blocks[0].shelf.entry.block_bytes
    stamp = np.fromiter((block.stamp for block in blocks), np.int64, count)
    hits = np.fromiter((block.hits for block in blocks), np.int64, count)
    index = np.fromiter((block.index for block in blocks), np.int64, count)
    worth = (1 + hits) / ((idle_s(stamp) + IDLE_MIN_S) * nbytes)
    place = {block.hash: row for row, block in enumerate(blocks)}
    before = np.fromiter((place.get(block.before, -1) for block in blocks), np.int64, count)
    before[(before >= 0) & (index[before] >= index)] = -1  # clients say what is before what, and could close a ring
    deepest = np.argsort(-index, kind="stable")
    depth = index[deepest]
    for rows in np.split(deepest, np.flatnonzero(depth[1:] != depth[:-1]) + 1):
        rows = rows[before[rows] >= 0]
        np.maximum.at(worth, before[rows], worth[rows])
    order = np.lexsort((index, -worth))
    return worth[order].tolist(), [blocks[row] for row in order.tolist()]


@dataclass(slots=True)
class _Queue:
    worth: list[float]
    blocks: list[Block]
    next: int = 0


@dataclass(slots=True)
class _Tenant:
    #: (-worth of its next, serial, shelf's queue)
    shelves: list[tuple[float, int, _Queue]] = field(default_factory=list)


def in_turns(ordered: Sequence[tuple[list[float], list[Block]]]) -> Iterator[list[Block]]:
    """Runs of blocks of one shelf each, over all shelves: by worth within a tenant, by bytes between tenants."""
    tenants: dict[str, _Tenant] = {}
    serial = count()
    for worth, blocks in ordered:
        if blocks:
            tenant = tenants.setdefault(blocks[0].shelf.salt, _Tenant())
            heapq.heappush(tenant.shelves, (-worth[0], next(serial), _Queue(worth, blocks)))
    turns = [(0, next(serial), tenant) for tenant in tenants.values()]
    heapq.heapify(turns)
    while turns:
        given, _, tenant = heapq.heappop(turns)
        run = _turn(tenant, serial)
        yield run
        if tenant.shelves:
            nbytes = len(run) * run[0].shelf.entry.block_bytes
            heapq.heappush(turns, (given + nbytes, next(serial), tenant))


def _turn(tenant: _Tenant, serial: Iterator[int]) -> list[Block]:
    _, _, queue = heapq.heappop(tenant.shelves)
    other = -tenant.shelves[0][0] if tenant.shelves else 0.0
    start = queue.next
    most = max(1, TURN_BYTES // queue.blocks[start].shelf.entry.block_bytes)
    end = start + 1
    while end < len(queue.blocks) and end - start < most and queue.worth[end] >= other:
        end += 1
    queue.next = end
    if end < len(queue.blocks):
        heapq.heappush(tenant.shelves, (-queue.worth[end], next(serial), queue))
    return queue.blocks[start:end]
