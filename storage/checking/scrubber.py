"""Reads blocks back and compares them with their checksums, at a bounded rate, never under the node's lock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

import xxhash

from kvstrata.proto.logs import get_logger
from kvstrata.proto.status import BlockStatus, Tier
from kvstrata.storage.checking.scrub import Bad, Batch, Scrub
from kvstrata.storage.ssd.base import Extent, SsdStore

log = get_logger(__name__)

#: A read of the scrub's that the device keeps for longer is given up; readers' calls come first.
READ_S: Final = 5.0
#: Names of blocks in one log line.
NAMED: Final = 4


class Pace:
    """At most ``rate`` bytes a second, from its making on."""

    def __init__(self, rate: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._clock = clock
        self._began = clock()
        self._bytes = 0

    def spend(self, nbytes: int) -> None:
        self._bytes += nbytes

    def wait_s(self) -> float:
        """How long to wait before more is read."""
        return max(0.0, self._began + self._bytes / self._rate - self._clock())


class Scrubber:
    """Over one state's lock. ``changed`` is called when something was withdrawn. ``store`` when there is an SSD."""

    def __init__(
        self,
        lock: threading.Lock,
        changed: Callable[[], None],
        store: SsdStore | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lock = lock
        self._changed = changed
        self._store = store
        self._clock = clock
        self._buffer = memoryview(bytearray())

    def one(self, scrub: Scrub) -> tuple[int, list[Bad]] | None:
        """Read the next batch back: (bytes read, what was withdrawn). None when the round is over."""
        with self._lock:
            batch = scrub.take(self._clock())
        if batch is None:
            return None
        statuses = [BlockStatus.UNKNOWN] * len(batch.blocks)
        try:
            statuses = self._in_memory(batch) if scrub.tier == Tier.DRAM else self._on_ssd(batch)
        finally:
            with self._lock:
                bad = scrub.done(batch, statuses, self._clock())
        if bad:
            _tell(bad)
            self._changed()
        return batch.nbytes, bad

    def _in_memory(self, batch: Batch) -> list[BlockStatus]:
        return [
            BlockStatus.LOADED if xxhash.xxh3_64_intdigest(block.bytes()) == block.checksum else BlockStatus.CORRUPT
            for block in batch.blocks
        ]

    def _on_ssd(self, batch: Batch) -> list[BlockStatus]:
        """What could not be read is tried again alone: a busy device is not a broken one."""
        assert self._store is not None
        views = self._views(batch)
        statuses = self._store.read(batch.blocks, views, timeout_s=READ_S)
        for position, status in enumerate(statuses):
            if status == BlockStatus.READ_ERROR:
                (again,) = self._store.read([batch.blocks[position]], [views[position]], timeout_s=READ_S)
                statuses[position] = again if self._serves(batch, position) else BlockStatus.UNKNOWN
        return statuses

    def _serves(self, batch: Batch, position: int) -> bool:
        """Whether the block's device does: of one that has failed all blocks go anyway, as failed."""
        assert self._store is not None
        extent = batch.blocks[position].slab
        assert isinstance(extent, Extent)
        return self._store.devices()[extent.device].state == "serving"

    def _views(self, batch: Batch) -> list[memoryview]:
        if len(self._buffer) < batch.nbytes:
            self._buffer = memoryview(bytearray(batch.nbytes))
        views, at = [], 0
        for block in batch.blocks:
            nbytes = block.shelf.entry.block_bytes
            views.append(self._buffer[at : at + nbytes])
            at += nbytes
        return views


def _tell(bad: list[Bad]) -> None:
    log.error(
        "blocks are not what was stored: they are misses from now on",
        tier=bad[0].tier.name,
        blocks=len(bad),
        first=[each.block.hash.hex() for each in bad[:NAMED]],
        statuses=sorted({each.status.name for each in bad}),
        advice="test the memory" if bad[0].tier == Tier.DRAM else "look at the device's own error log (smartctl -x)",
    )
