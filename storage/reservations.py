"""Write reservations: some slots, one writer, a deadline.

A reservation ends by commit, abort, deadline or its session's death. While a thread of the node moves
bytes into its slots it can only be doomed: its keys are free for others at once, its slots when the thread
is done (:meth:`ReservationBook.moved`), because memory that is being written is not to be reused.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import repeat

from kvstrata.proto.errors import InvalidArgument
from kvstrata.proto.status import BlockStatus
from kvstrata.storage.inventory import Inventory
from kvstrata.storage.records import IN_FLIGHT, LEAVING, Block, Holdings, Reservation, Shelf

_STORED = int(BlockStatus.STORED)
_ABORTED = int(BlockStatus.ABORTED)


class ReservationBook:
    """Not thread-safe: its owner's lock covers it."""

    def __init__(self, inventory: Inventory, sessions: dict[bytes, Holdings]) -> None:
        self._inventory = inventory
        self._sessions = sessions
        self._reservations: dict[int, Reservation] = {}
        self._doomed: set[Reservation] = set()
        self._deadlines: list[tuple[float, int]] = []
        self._last = 0

    def __len__(self) -> int:
        return len(self._reservations) + len(self._doomed)

    def grant(self, session: bytes, shelf: Shelf, blocks: list[Block], deadline: float) -> Reservation:
        self._last += 1
        reservation = Reservation(self._last, session, shelf, blocks, deadline)
        self._reservations[reservation.id] = reservation
        self._sessions.setdefault(session, Holdings()).reservations.add(reservation.id)
        heapq.heappush(self._deadlines, (deadline, reservation.id))
        return reservation

    def find(self, session: bytes, number: int) -> Reservation | None:
        """The session's reservation, or None when it has ended."""
        reservation = self._reservations.get(number)
        return reservation if reservation is not None and reservation.session == session else None

    def start_moving(self, reservation: Reservation) -> None:
        """A thread of the node is about to write into the slots. Raises when another one does."""
        if reservation.busy:
            raise InvalidArgument(f"reservation {reservation.id} is being written already")
        reservation.busy = True

    def moved(self, reservation: Reservation) -> bool:
        """That thread is done. False when the reservation was doomed meanwhile: its slots are free now."""
        reservation.busy = False
        if not reservation.doomed:
            return True
        self._doomed.discard(reservation)
        for block in reservation.blocks:
            self._inventory.drop(block)
        return False

    def commit(self, reservation: Reservation, checksums: Sequence[int], mask: Sequence[int] | None) -> bytearray:
        """Publish the blocks that ``mask`` keeps (all, when None), free the others; a status each.

        Nothing of a retired shelf is published.

        Raises :class:`InvalidArgument`, and leaves the reservation as it was, when lengths do not fit or
        its bytes are still being moved.
        """
        blocks = reservation.blocks
        if len(checksums) != len(blocks) or (mask is not None and len(mask) != len(blocks)):
            raise InvalidArgument(f"{len(checksums)} checksums for the {len(blocks)} blocks of a reservation")
        if reservation.busy:
            raise InvalidArgument(f"reservation {reservation.id} is still being written")
        self._forget(reservation)
        kept: list[Block] = []
        statuses = bytearray((_ABORTED,)) * len(blocks)
        if not reservation.shelf.retired:
            rows = zip(blocks, checksums, mask if mask is not None else repeat(1), strict=False)
            for position, (block, checksum, wanted) in enumerate(rows):
                if wanted and block.state == IN_FLIGHT:
                    block.checksum = checksum
                    kept.append(block)
                    statuses[position] = _STORED
        self._inventory.publish(reservation.shelf, kept)
        if len(kept) < len(blocks):
            rest = [block for block, status in zip(blocks, statuses, strict=True) if status == _ABORTED]
            self._inventory.drop_all(rest, "aborted")
        return statuses

    def abort(self, reservation: Reservation, verb: str = "aborted") -> None:
        """End it: nothing becomes visible. Slots that are being written go when that ends."""
        self._forget(reservation)
        if reservation.busy:
            reservation.doomed = True
            self._doomed.add(reservation)
            for block in reservation.blocks:
                if block.state == IN_FLIGHT:
                    self._inventory.withdraw(block, verb)
            return
        self._inventory.drop_all(reservation.blocks, verb)

    def abort_all(self, numbers: set[int]) -> None:
        for number in list(numbers):
            self.abort(self._reservations[number], "writer gone")

    def expire(self, now: float) -> int:
        """End reservations whose deadline has come; how many."""
        count = 0
        while self._deadlines and self._deadlines[0][0] <= now:
            _, number = heapq.heappop(self._deadlines)
            reservation = self._reservations.get(number)
            if reservation is not None:
                self.abort(reservation, "reservation expired")
                count += 1
        return count

    def named(self) -> set[Block]:
        """All blocks of reservations that stand, and of those whose slots are still being written."""
        return {block for each in (*self._reservations.values(), *self._doomed) for block in each.blocks}

    def _forget(self, reservation: Reservation) -> None:
        del self._reservations[reservation.id]
        holdings = self._sessions[reservation.session]
        holdings.reservations.discard(reservation.id)
        if holdings.empty():
            del self._sessions[reservation.session]

    def check(self) -> None:
        """Assert that each block in flight belongs to one reservation, and that none is named twice."""
        named: list[Block] = []
        for reservation in self._reservations.values():
            assert not reservation.doomed and reservation.id in self._sessions[reservation.session].reservations
            assert all(block.state in (IN_FLIGHT, LEAVING) for block in reservation.blocks)
            named.extend(reservation.blocks)
        for reservation in self._doomed:
            assert reservation.busy and all(block.state == LEAVING for block in reservation.blocks)
            named.extend(reservation.blocks)
        assert len(set(named)) == len(named), "a block is in two reservations"
        in_flight = {block for block in self._inventory.blocks() if block.state == IN_FLIGHT}
        assert in_flight <= set(named), "a block in flight that nobody writes"
        eraser = self._inventory.eraser
        leaving = {block for block in self._inventory.blocks() if block.state == LEAVING and not block.leases}
        if eraser is not None:
            leaving = {block for block in leaving if not eraser.holds(block)}
        assert leaving <= set(named), "a slot that nobody holds and nobody frees"
