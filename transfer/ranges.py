"""Blocks that come range by range, so that a reader may begin with the first layers before the last ones are there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstrata.proto.status import BlockStatus
from kvstrata.transfer.base import Fetch, Push, StatusArray
from kvstrata.transfer.regions import BlockView


def cut(blocks: BlockView, ends: Sequence[int]) -> list[BlockView]:
    """``blocks`` once for each byte range, with only the pieces of that range; a piece may be cut in two.

    ``ends``: as :attr:`Fetch.parts`. Blocks that differ in how they are cut in pieces come whole, as one range.
    """
    lengths = blocks.table[:, :, 1]
    if len(ends) < 2 or not len(lengths) or (lengths != lengths[0]).any():
        return [blocks]
    stops = np.cumsum(lengths[0])
    return [_range(blocks, stops, low, high) for low, high in zip([0, *ends[:-1]], ends, strict=True)]


def _range(blocks: BlockView, stops: np.ndarray[tuple[int], np.dtype[np.int64]], low: int, high: int) -> BlockView:
    first = int(np.searchsorted(stops, low, side="right"))
    last = int(np.searchsorted(stops, high, side="left"))
    table = blocks.table[:, first : last + 1].copy()
    skipped = low - (int(stops[first - 1]) if first else 0)
    table[:, 0, 0] += skipped
    table[:, 0, 1] -= skipped
    table[:, -1, 1] -= int(stops[last]) - high
    return BlockView(blocks.region, table, high - low)


def all_written(request: Push) -> bool:
    """Wait until the blocks are in memory as they are to be stored: for what goes whole. False as for ``written``."""
    return request.written is None or request.written(len(request.parts) - 1, request.deadline)


def tell_whole(request: Fetch, status: StatusArray) -> None:
    """All ranges at once, of what is loaded: for what came whole."""
    if request.landed is not None:
        for part in range(len(request.parts)):
            request.landed(part, status == BlockStatus.LOADED)
