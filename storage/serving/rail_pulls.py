"""Pulls by one-sided transfers: waited for within the writer's deadline, and kept apart when they do not settle.

::

    take() -- settled in time --> ARRIVED, or FAILED: the slots go back
       `-- not --> PENDING: the reservation is doomed, its slots stay taken --> settled --> reap(): the slots go back

A transfer that was posted cannot be recalled: it may write into its slots until it has settled, which for a stopped
writer is when it goes on or dies, whether its session has ended or not. Until then the slots are charged to their
tenant, and nothing of them becomes visible.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Final

from kvstrata.proto.errors import Busy
from kvstrata.storage.leases import MARGIN_S
from kvstrata.storage.records import Reservation
from kvstrata.storage.serving.rail_region import RailRegion
from kvstrata.storage.serving.regions import Descriptors, spread
from kvstrata.storage.state import NodeState
from kvstrata.transfer.rdma.engine import Job, JobState

#: While slots of more than one part in this many of the pool wait for their transfers, no other is begun.
LEFT_SHARE: Final = 8
#: A wait looks this often whether the reservation still stands: its writer may have gone.
LOOK_S: Final = 0.05


class Taken(Enum):
    """What became of a pull's transfer."""

    ARRIVED = "arrived"  #: the bytes are in the slots; the reservation is still marked as moving
    FAILED = "failed"  #: the peer is gone, or refused it
    LATE = "late"  #: it was never posted
    PENDING = "pending"  #: the slots, and the writer's memory, are in use until it settles


class RailPulls:
    """Over one :class:`NodeState` and its lock. :meth:`reap` is called now and then by a loop of the node."""

    def __init__(self, state: NodeState, lock: threading.Lock, clock: Callable[[], float]) -> None:
        self._state = state
        self._lock = lock
        self._clock = clock
        self._left: dict[Reservation, int] = {}
        self._settled: deque[Reservation] = deque()
        #: Pulls by how they ended, and bytes that arrived; never decrease.
        self.counts: Counter[str] = Counter({each.value: 0 for each in Taken} | {"refused": 0, "bytes": 0})

    def admit(self, session: bytes) -> None:
        """Raises :class:`Busy` while earlier transfers of the session, or too many of others, have not settled."""
        with self._lock:
            why = self._why_not(session)
            if why:
                self.counts["refused"] += 1
        if why:
            raise Busy(why)

    def _why_not(self, session: bytes) -> str:
        if any(reservation.session == session for reservation in self._left):
            return "an earlier transfer from this writer has not settled: send the bytes over the channel meanwhile"
        held = sum(self._left.values())
        if held * LEFT_SHARE >= self._state.arena.bytes_total:
            return f"{held} bytes wait for transfers that do not settle: send the bytes over the channel meanwhile"
        return ""

    def take(
        self, region: RailRegion, reservation: Reservation, descriptors: Descriptors, at: int = 0
    ) -> tuple[Taken, str]:
        """Copy each block's pieces into its slot, from byte ``at`` on; how it ended, and why it FAILED.

        ``reservation`` is marked as moving. Unless all ARRIVED, it has ended when this returns or raises.
        """
        try:
            job = region.read(*spread(reservation.blocks, descriptors, at))
        except BaseException:
            self._end(reservation)
            raise
        try:
            self._wait(job, reservation)
        finally:
            taken = self._ended(job, reservation, int(descriptors[:, :, 1].sum()))
        return taken, job.problem

    def _wait(self, job: Job, reservation: Reservation) -> None:
        """Until the job has settled, the writer's deadline has come, or the reservation has ended."""
        deadline = reservation.deadline - MARGIN_S
        while not job.wait(min(deadline, self._clock() + LOOK_S)):
            if reservation.doomed or self._clock() >= deadline:
                return

    def _ended(self, job: Job, reservation: Reservation, nbytes: int) -> Taken:
        if not (job.settled() or job.give_up()):
            self._leave(job, reservation)
            return Taken.PENDING
        taken = _OUTCOMES[job.state]
        if taken is not Taken.ARRIVED:
            self._end(reservation)
        with self._lock:
            self.counts[taken.value] += 1
            if taken is Taken.ARRIVED:
                self.counts["bytes"] += nbytes
        return taken

    def _end(self, reservation: Reservation) -> None:
        """No byte moves any more, and nothing is to become visible."""
        with self._lock:
            now = self._clock()
            if self._state.moved(reservation, now):
                self._state.abort(reservation.session, reservation.id, now)

    def _leave(self, job: Job, reservation: Reservation) -> None:
        with self._lock:
            if not reservation.doomed:
                self._state.abort(reservation.session, reservation.id, self._clock())
            self._left[reservation] = sum(block.slab.slot_bytes for block in reservation.blocks)
            self.counts[Taken.PENDING.value] += 1
        job.then(partial(self._settled.append, reservation))

    def reap(self) -> int:
        """Give back the slots of transfers that have settled since the last call; how many transfers."""
        count = 0
        while self._settled:
            reservation = self._settled.popleft()
            with self._lock:
                del self._left[reservation]
                self._state.moved(reservation, self._clock())
            count += 1
        return count

    def held(self) -> tuple[int, int]:
        """(transfers that nobody waits for and that have not settled, bytes of their slots)."""
        with self._lock:
            return len(self._left), sum(self._left.values())

    def check(self) -> None:
        """Assert that what is kept apart is doomed, and still being moved. With the lock held."""
        for reservation, nbytes in self._left.items():
            assert reservation.busy and reservation.doomed, "slots were given away under a transfer"
            assert nbytes == sum(block.slab.slot_bytes for block in reservation.blocks)
            assert all(block.slab.blocks.get(block.slot) is block for block in reservation.blocks)


_OUTCOMES: Final = {
    JobState.DONE: Taken.ARRIVED,
    JobState.FAILED: Taken.FAILED,
    JobState.DROPPED: Taken.LATE,
}
