"""Deliberate breakages of the shipped code, one at a time: what the simulation must notice.

Each takes away one thing that an invariant rests on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import kvstrata.storage.state as node_state
from kvstrata.master.attachment import Attachment
from kvstrata.master.content.scopes import Scopes
from kvstrata.master.content.tombstones import Tombstones
from kvstrata.master.replication.trims import Trims
from kvstrata.master.tenants.ledger import Ledger, Part
from kvstrata.proto.status import BlockStatus
from kvstrata.storage.eviction.admission import Admission
from kvstrata.storage.eviction.isolated_lru import IsolatedLRU
from kvstrata.storage.inventory import Inventory
from kvstrata.storage.leases import LeaseBook
from kvstrata.storage.masters.commands import Commands
from kvstrata.storage.masters.delta_log import DeltaLog
from kvstrata.storage.masters.fence import Fence
from kvstrata.storage.masters.outbox import Outbox
from kvstrata.storage.records import GONE, IN_FLIGHT, LEAVING, VISIBLE, Block
from kvstrata.storage.reservations import ReservationBook
from kvstrata.storage.tiers.moves import TierMoves


@dataclass(frozen=True, slots=True)
class Mutant:
    """It is noticed within ``seeds``, in words that hold one of ``shows``, under ``options`` if it takes certain faults
    to matter. ``covered``: by what else, so that it is not noticed at all."""

    shows: tuple[str, ...]
    seeds: int
    apply: Callable[[], None]
    options: tuple[str, ...] = ()
    covered: str = ""


def _unchecked(*classes: type) -> None:
    """What a state machine asserts of itself would notice first: readers have to."""
    for each in classes:
        each.check = lambda self: None  # type: ignore[attr-defined]


def _unfinished() -> None:
    """Readers are given blocks that are still being written."""

    def look(shelf: Any, hashes: bytes, width: int, count: int) -> tuple[bytearray, list[Block]]:
        blocks = shelf.blocks if shelf is not None else {}
        found = [blocks.get(hashes[i * width : (i + 1) * width]) for i in range(count)]
        status = bytearray(3 if block is not None else 20 for block in found)
        return status, [block for block in found if block is not None]

    touch = IsolatedLRU.touch
    node_state._look = look
    IsolatedLRU.touch = lambda self, blocks: touch(self, [b for b in blocks if b.state == VISIBLE])  # type: ignore[method-assign]


def _unleased() -> None:
    """What is sent to a reader is not kept from leaving meanwhile."""
    Inventory.pin = lambda self, blocks: None  # type: ignore[method-assign]
    Inventory.unpin = lambda self, blocks: None  # type: ignore[method-assign]
    _unchecked(LeaseBook, TierMoves)


def _slot_reused() -> None:
    """A slot that is to leave is free at once, though it is leased."""
    withdraw = Inventory.withdraw

    def at_once(self: Inventory, block: Block, *rest: Any, **named: Any) -> None:
        found = block.state == VISIBLE
        withdraw(self, block, *rest, **named)
        if found and block.state == LEAVING:
            self._leaving.discard(block)
            self._free(block)

    unpin_each = Inventory.unpin

    def unpin(self: Inventory, blocks: Any) -> None:
        for block in blocks:
            if block.state == GONE:
                block.leases -= 1
            else:
                unpin_each(self, (block,))

    Inventory.withdraw = at_once  # type: ignore[method-assign]
    Inventory.unpin = unpin  # type: ignore[method-assign]
    _unchecked(LeaseBook)


def _early_commit() -> None:
    """A block is published when its bytes begin to come."""
    start = ReservationBook.start_moving

    def published(self: ReservationBook, reservation: Any) -> None:
        start(self, reservation)
        ready = [block for block in reservation.blocks if block.state == IN_FLIGHT]
        self._inventory.publish(reservation.shelf, ready if not reservation.shelf.retired else [])

    def commit(self: ReservationBook, reservation: Any, checksums: Sequence[int], mask: Any) -> bytearray:
        self._forget(reservation)
        index = self._inventory.published
        for block, checksum in zip(reservation.blocks, checksums, strict=True):
            shown = index is not None and block.place >= 0
            if shown:
                index.withdraw(block)
            block.checksum = checksum
            if shown:
                index.publish(block.shelf, [block])
        return bytearray(int(BlockStatus.STORED) for _ in reservation.blocks)

    ReservationBook.start_moving = published  # type: ignore[method-assign]
    ReservationBook.commit = commit  # type: ignore[method-assign]
    _unchecked(ReservationBook)


def _all_let_go() -> None:
    """Every node that has a replica is told that it is one too many."""
    tell = Trims._tell

    def everybody(
        self: Trims, table: Any, group: Any, set_id: int, ids: Any, over: Any, rows: Any, scoped: Any, wanted: int
    ) -> None:
        emit, told = self._emit, [node.attachment for node in self._replicas.sure_of(set_id)]

        def to_all(command: Any) -> None:
            for attachment in told:
                assert attachment is not None
                emit(dataclasses.replace(command, session=attachment.session))

        self._emit = to_all
        try:
            tell(self, table, group, set_id, ids, over, rows, scoped, wanted)
        finally:
            self._emit = emit

    Trims._tell = everybody  # type: ignore[method-assign]


def _raised_early() -> None:
    """A share is raised by what another node was told to give up, and has not."""

    def relax(self: Part) -> None:
        self.peak = max(self.granted, self.rise or 0)

    Part.relax = relax  # type: ignore[method-assign]
    lower = Ledger.out

    def believed(self: Ledger) -> int:
        for part in self.parts.values():
            part.relax()
        return lower(self)

    Ledger.out = believed  # type: ignore[method-assign]


def _lost_deltas() -> None:
    """A node does not send one of two deltas that are due together."""
    due = Outbox._due

    def lossy(self: Outbox, now: float) -> Any:
        before = None
        for message in due(self, now):
            both = {each.WhichOneof("body") for each in (before, message) if each is not None} == {"delta"}
            if before is not None and not (both and before.delta.seq % 2):
                yield before
            before = message
        if before is not None:
            yield before

    Outbox._due = lossy  # type: ignore[method-assign]


def _gaps_passed_over() -> None:
    """A node does not send one of two deltas that are due together, and masters do not mind."""
    _lost_deltas()
    delta = Attachment.delta

    def any_number(self: Attachment, batch: Any, directory: Any, locate: Any) -> Any:
        if self._shadow is None and self.synced and not self._asked and batch.seq > self.applied_seq:
            self.applied_seq = batch.seq - 1
        return delta(self, batch, directory, locate)

    Attachment.delta = any_number  # type: ignore[method-assign]


def _forgotten_hold() -> None:
    """A reader that waited for the SSD never lets go of what it held meanwhile."""
    end_read = TierMoves.end_read

    def forgetful(self: TierMoves, read: Any) -> None:
        read.hold = None
        end_read(self, read)

    TierMoves.end_read = forgetful  # type: ignore[method-assign]


def _no_victim() -> None:
    """Nobody has to leave when there are several tenants."""
    victim = IsolatedLRU.victim

    def fair(self: IsolatedLRU, slot_bytes: int, salt: str, before: int) -> Block | None:
        return victim(self, slot_bytes, salt, before) if len(self._tenants) < 2 else None

    IsolatedLRU.victim = fair  # type: ignore[method-assign]


def _unrecorded() -> None:
    """Removals are confirmed though no device has recorded them."""
    Commands._record = lambda self, removals: ""  # type: ignore[method-assign]


def _risen() -> None:
    """A block that was removed while it was on its way is published all the same."""
    publish, commit = Inventory.publish, ReservationBook.commit

    def all_of_them(self: ReservationBook, reservation: Any, checksums: Sequence[int], mask: Any) -> bytearray:
        if reservation.shelf.retired:  # it would be found by what it breaks in the eviction of whole shelves
            return commit(self, reservation, checksums, mask)
        self._forget(reservation)
        for block, checksum in zip(reservation.blocks, checksums, strict=True):
            block.checksum = checksum
            if block.state != GONE:
                block.state = 0
                reservation.shelf.blocks[block.hash] = block
                self._inventory._leaving.discard(block)
                self._inventory.shelves.setdefault(
                    (reservation.shelf.entry.handle, reservation.shelf.salt), reservation.shelf
                )
        publish(self._inventory, reservation.shelf, reservation.blocks)
        return bytearray([1]) * len(reservation.blocks)

    ReservationBook.commit = all_of_them  # type: ignore[method-assign]
    _unchecked(Inventory, ReservationBook)


def _no_tombstones() -> None:
    """A node that was away is not told what was removed meanwhile."""
    Tombstones.waiting_for = lambda self, node_id: []  # type: ignore[method-assign]


def _no_scopes() -> None:
    """A node that was away is not told what was dropped meanwhile."""
    Scopes.waiting_for = lambda self, node_id: []  # type: ignore[method-assign]


def _old_weights() -> None:
    """A node confirms a new weight epoch without having begun it."""
    node_state.NodeState.set_epoch = lambda self, group, epoch, now: 0  # type: ignore[method-assign]


def _no_share() -> None:
    """A node admits whatever its share says."""
    Admission.allowed = lambda self, salt, slot_bytes, wanted, before: wanted  # type: ignore[method-assign]


def _no_departures() -> None:
    """A node does not tell that blocks have left."""
    record = DeltaLog.record

    def additions(self: DeltaLog, added: bool, *rest: Any, **named: Any) -> None:
        if added:
            record(self, added, *rest, **named)

    DeltaLog.record = additions  # type: ignore[method-assign]


def _no_fence() -> None:
    """A node obeys whoever orders."""
    Fence.admit = lambda self, epoch, leader_id: ""  # type: ignore[method-assign]


def _untold_drops() -> None:
    """Masters that did not order a drop do not hear of it."""
    Outbox.drops = property(lambda self: self._state.drops, lambda self, value: None)  # type: ignore[assignment]


def _early_promotion() -> None:
    """What is read from SSD is published before it has been read."""
    up = TierMoves._up

    def early(self: TierMoves, cold: list[Block], now: float) -> Any:
        moves, refused = up(self, cold, now)
        for move in moves:
            self.promoted(move, [3] * len(move.source), now)
        return moves, refused

    TierMoves._up = early  # type: ignore[method-assign]
    promoted = TierMoves.promoted
    TierMoves.promoted = lambda self, move, statuses, now: None if move.over else promoted(self, move, statuses, now)  # type: ignore[method-assign]


def _sole(*faults: str) -> tuple[str, ...]:
    return "--masters", "1", "--faults", ",".join(faults)


def _several(*faults: str) -> tuple[str, ...]:
    return "--masters", "3", "--faults", ",".join(faults)


_BYTES = ("bytes that nobody wrote", "torn bytes", "has the bytes of", "not committed", "was not written", "INV-3")
_BACK = ("is back on",)
_FAULTS = ("kill node", "cut")

MUTANTS = {
    "unfinished": Mutant(_BYTES, 20, _unfinished),
    "early-commit": Mutant(_BYTES, 20, _early_commit),
    "early-promotion": Mutant(_BYTES, 20, _early_promotion),
    "unleased": Mutant(_BYTES, 20, _unleased),
    "slot-reused": Mutant(_BYTES, 100, _slot_reused),
    "forgotten-hold": Mutant(("INV-5",), 10, _forgotten_hold),
    "no-victim": Mutant(("INV-10",), 10, _no_victim),
    "unrecorded": Mutant(_BACK, 30, _unrecorded, _sole("kill node")),
    "risen": Mutant((*_BACK, "was not written"), 20, _risen),
    "no-tombstones": Mutant(_BACK, 20, _no_tombstones, _sole(*_FAULTS)),
    "no-scopes": Mutant(_BACK, 20, _no_scopes, _sole(*_FAULTS)),
    "old-weights": Mutant(("is back on", "INV-1"), 10, _old_weights),
    "no-share": Mutant(("INV-11",), 20, _no_share, _sole()),
    "raised-early": Mutant(("INV-11",), 20, _raised_early, _sole("stop node", "slow link")),
    "no-departures": Mutant(("INV-7",), 10, _no_departures),
    "gaps-passed-over": Mutant(("INV-7",), 20, _gaps_passed_over),
    "lost-deltas": Mutant((), 20, _lost_deltas, covered="the master, which sees the gap and asks for a snapshot"),
    "untold-drops": Mutant(("INV-7",), 10, _untold_drops, _several()),
    "all-let-go": Mutant(("it was the last",), 20, _all_let_go, _sole()),
    "no-fence": Mutant(("leaders",), 20, _no_fence, _several("stop master", "store cut")),
}
