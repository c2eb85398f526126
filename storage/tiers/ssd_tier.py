"""A node's SSDs at work: opened, recovered, moved to and from, watched, let go of.

The node owns one of these beside its memory. Without an SSD there is none, and nothing else changes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final

from kvstrata.proto.logs import get_logger
from kvstrata.proto.status import Tier
from kvstrata.storage.ssd.base import DeviceState, SsdStore
from kvstrata.storage.state import NodeState
from kvstrata.storage.tiers.movers import Movers
from kvstrata.storage.tiers.moves import TierBooks, TierMoves
from kvstrata.storage.tiers.recovery import Recovery, recover
from kvstrata.storage.tiers.ssd_policy import SsdPolicy
from kvstrata.storage.tiers.write_budget import WriteBudget
from kvstrata.transfer.loops import Loop, Loops

log = get_logger(__name__)

#: Devices are asked how they are this often.
WATCH_S: Final = 0.5
#: At the end, blocks that are only in memory are written for at most this long.
FLUSH_S: Final = 3.0


class SsdTier:
    """``state`` was made over the store's arena. ``changed`` is called when something became visible."""

    def __init__(
        self,
        store: SsdStore,
        state: NodeState,
        lock: threading.Lock,
        changed: Callable[[], None],
        *,
        policy: SsdPolicy = SsdPolicy.DEMOTE,
        daily_writes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert state.ssd is not None
        self.store = store
        self.recovery: Recovery | None = None
        self._state = state
        self._lock = lock
        self._clock = clock
        self._lost: set[int] = set()
        books = TierBooks(state.inventory, state.leases, state.reservations)
        budget = WriteBudget(daily_writes, clock())
        share = state.quotas
        self.moves = TierMoves(
            books,
            state.ssd,
            state.counts,
            policy=policy,
            budget=budget,
            limit=lambda salt, now: share.limit(Tier.DRAM, salt, now),
        )
        state.inventory.evicted = self.moves.evicted
        self.movers = Movers(self.moves, store, lock, changed, clock)

    def recover(self) -> Recovery:
        """Find what the last run left. Before the node serves."""
        with self._lock:
            self.recovery = found = recover(self.store, self._state, self._clock())
        log.info(
            "SSD scanned",
            blocks=found.blocks,
            stale=found.stale + found.scan.stale,
            damaged=found.scan.damaged,
            seconds=round(found.seconds, 3),
            seconds_per_tb=round(found.seconds_per_tb, 1),
        )
        return found

    def start(self, loops: Loops) -> None:
        self.movers.start(loops)
        loops.add(Loop("ssd-devices", WATCH_S, self._watch, bound_s=10.0))
        for loop in self.store.loops:
            loops.add(loop)

    # ------------------------------------------------------------------ at work

    def problem(self) -> str:
        """Which devices do not serve, and why; empty when all do. The node lives on."""
        failed = [device for device in self.store.devices() if device.state == "failed"]
        return "; ".join(f"SSD {device.path} is out of use: {device.problem}" for device in failed)

    def facts(self) -> dict[str, Any]:
        """For the ready line and health."""
        facts: dict[str, Any] = {"ssd_bytes": self.store.arena.bytes_total, "ssd_policy": self.moves.policy.value}
        if (found := self.recovery) is not None:
            facts |= {
                "ssd_blocks_found": found.blocks,
                "ssd_scan_seconds": round(found.scan.seconds, 3),
                "ssd_scan_seconds_per_tb": round(found.seconds_per_tb, 1),
            }
        return facts

    def _watch(self) -> None:
        """Take failed devices out of the tier, and let old matters lapse."""
        for index, device in enumerate(self.store.devices()):
            if device.state == "failed" and index not in self._lost:
                self._lost.add(index)
                self._lose(index, device)
        with self._lock:
            self.moves.expire(self._clock())

    def _lose(self, index: int, device: DeviceState) -> None:
        assert self._state.ssd is not None
        with self._lock:
            ssd = self._state.ssd
            ssd.now = self._clock()
            lost = sum(ssd.lose(extent) for extent in self.store.arena.slabs if extent.device == index)
        log.error("an SSD is out of use", path=device.path, problem=device.problem, blocks_lost=lost)

    # ------------------------------------------------------------------ end

    def stop(self) -> None:
        """No more moves; write what is only in memory, for a bounded time. The store is closed by :meth:`close`."""
        self.movers.stop(FLUSH_S)

    def close(self) -> None:
        """After the loops have ended."""
        self.store.close()
