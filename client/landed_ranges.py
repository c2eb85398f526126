"""What has landed of a read whose ranges are told as they come: merged over nodes, replicas and rounds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np
from msgspec.structs import replace

from kvstrata.client import moving
from kvstrata.client.counters import Counters
from kvstrata.client.plan import Where
from kvstrata.proto.errors import KVError
from kvstrata.proto.status import BlockStatus
from kvstrata.transfer.base import Fetch, Fetched, Mask, Peer, StatusArray

_LOADED: Final = int(BlockStatus.LOADED)


class LandedRanges:
    """One call's ranges. ``told(k, mask)`` is called in order of k, once each, from any thread but one at a time.

    Range k is told when every block of the call has it, or is ``over``: bool[count], not asked for any more. A block
    that was told of and failed after that is over: whoever heard of it may have read what was wrong, so no other
    replica may make it LOADED.

    When ``told`` raises, nothing is told any more; the error is ``problem``, to be raised once the call has ended:
    inside a transfer it would take the transfer's answer with it, and what of that is pending.
    """

    def __init__(self, count: int, parts: tuple[int, ...], told: Callable[[int, Mask], None]) -> None:
        self.parts = parts
        self.over: Mask = np.zeros(count, np.bool_)
        self._told = told
        self.problem: Exception | None = None
        self._lock = threading.Lock()
        self._next = 0  # ranges before this one were told
        self._named: Mask = np.zeros(count, np.bool_)  # in any range that was told
        self._reached = np.zeros(count, np.int64)  # leading ranges that are in place

    def fetch(self, peer: Peer, request: Fetch, where: Where | None, counters: Counters) -> Fetched:
        """An attempt at one node for the blocks at ``where`` (None: all)."""
        at = slice(None) if where is None else where
        try:
            told = replace(request, parts=self.parts, landed=partial(self._landed, at))
            fetched = moving.fetch(peer, told, counters)
        except KVError:
            self._ended(at, np.zeros(len(request.blocks), np.bool_))
            raise
        self._ended(at, fetched.status == _LOADED)
        return fetched

    def finish(self, status: StatusArray) -> None:
        """The call has ended: what was not told yet is told of what is LOADED."""
        with self._lock:
            loaded = status == _LOADED
            self._reached[:] = np.where(loaded, len(self.parts), 0)
            self.over |= ~loaded
            self._tell()

    def _landed(self, where: Where, part: int, mask: Mask) -> None:
        with self._lock:
            reached = self._reached[where]
            self._reached[where] = np.where(mask & (reached == part), part + 1, reached)
            self._tell()

    def _ended(self, where: Where, loaded: Mask) -> None:
        with self._lock:
            self._reached[where] = np.where(loaded, len(self.parts), 0)
            self.over[where] |= ~loaded & self._named[where]
            self._tell()

    def _tell(self) -> None:
        while self._next < len(self.parts) and bool(((self._reached > self._next) | self.over).all()):
            part, self._next = self._next, self._next + 1
            mask = (self._reached > part) & ~self.over
            self._named |= mask
            if self.problem is None:
                try:
                    self._told(part, mask)
                except Exception as error:  # noqa: BLE001  raised when the call has ended
                    self.problem = error
