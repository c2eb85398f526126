"""A block of a rank that is several of the pool's: what became of it is what became of its worst shard."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstrata.proto.status import HELD, BlockStatus

Codes = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]

#: The place of each status, the worst first. PENDING before all others: the block's memory is not to be used, whatever
#: became of its other shards. Then whatever is no success, the greater number first. Last what was held: a block of
#: which a shard was stored anew is stored.
_PLACE: Final = 256 - np.arange(256)
_PLACE[BlockStatus.PENDING] = 0
_PLACE[[BlockStatus.STORED, BlockStatus.LOADED, BlockStatus.ALREADY_PRESENT]] = range(257, 257 + len(HELD))


def worst(statuses: Sequence[Codes]) -> Codes:
    """u8[n]: for each row of u8[n] of several shards the status that all of them together have."""
    if len(statuses) == 1:
        return statuses[0]
    stacked = np.stack(statuses)
    chosen: Codes = np.take_along_axis(stacked, _PLACE[stacked].argmin(axis=0)[None], axis=0)[0]
    return chosen


class LandedShards:
    """Tells of a byte range when each of ``count`` shards has told of it. Thread-safe; a shard tells in order."""

    def __init__(self, count: int, landed: Callable[[int, Mask], None]) -> None:
        self._count = count
        self._landed = landed
        self._lock = threading.Lock()
        self._told: dict[int, tuple[int, Mask]] = {}

    def landed(self, part: int, loaded: Mask) -> None:
        """One shard's range ``part`` is in place for the blocks that ``loaded`` (bool[n]) names."""
        with self._lock:
            times, mask = self._told.pop(part, (0, loaded))
            mask = mask & loaded
            if times + 1 < self._count:
                self._told[part] = times + 1, mask
                return
            self._landed(part, mask)
