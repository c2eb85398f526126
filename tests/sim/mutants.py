"""Deliberate breakages of the shipped code, one at a time: what the simulation must notice.

Each takes away one thing that an invariant rests on. ``seeds``: it is noticed within so many, from seed 1 on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import kvstrata.storage.state as node_state
from kvstrata.master.content.scopes import Scopes
from kvstrata.master.content.tombstones import Tombstones
from kvstrata.storage.eviction.admission import Admission
from kvstrata.storage.eviction.isolated_lru import IsolatedLRU
from kvstrata.storage.inventory import Inventory
from kvstrata.storage.masters.commands import Commands
from kvstrata.storage.masters.delta_log import DeltaLog
from kvstrata.storage.masters.fence import Fence
from kvstrata.storage.masters.outbox import Outbox
from kvstrata.storage.records import GONE, Block
from kvstrata.storage.reservations import ReservationBook
from kvstrata.storage.tiers.moves import TierMoves


@dataclass(frozen=True, slots=True)
class Mutant:
    """``breaks`` is the invariant that it is about, ``seeds`` within how many it shows, under ``options`` if it takes
    certain faults to matter."""

    breaks: str
    seeds: int
    apply: Callable[[], None]
    options: tuple[str, ...] = ()


def _unfinished() -> None:
    """Readers are given blocks that are still being written."""

    def look(shelf: Any, hashes: bytes, width: int, count: int) -> tuple[bytearray, list[Block]]:
        blocks = shelf.blocks if shelf is not None else {}
        found = [blocks.get(hashes[i * width : (i + 1) * width]) for i in range(count)]
        status = bytearray(3 if block is not None else 20 for block in found)
        return status, [block for block in found if block is not None]

    node_state._look = look


def _unleased() -> None:
    """What is sent to a reader is not kept from leaving meanwhile."""
    Inventory.pin = lambda self, blocks: None  # type: ignore[method-assign]
    Inventory.unpin = lambda self, blocks: None  # type: ignore[method-assign]


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
    publish = Inventory.publish

    def all_of_them(self: ReservationBook, reservation: Any, checksums: Sequence[int], mask: Any) -> bytearray:
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


MUTANTS = {
    "unfinished": Mutant("INV-2", 20, _unfinished),
    "unleased": Mutant("INV-3", 5, _unleased),
    "forgotten-hold": Mutant("INV-5", 10, _forgotten_hold),
    "no-victim": Mutant("INV-10", 10, _no_victim),
    "unrecorded": Mutant("INV-1", 30, _unrecorded, _sole("kill node")),
    "risen": Mutant("INV-1", 10, _risen),
    "no-tombstones": Mutant("INV-1", 20, _no_tombstones, _sole("kill node", "cut")),
    "no-scopes": Mutant("INV-1", 20, _no_scopes, _sole("kill node", "cut")),
    "old-weights": Mutant("INV-1", 10, _old_weights),
    "no-share": Mutant("INV-11", 20, _no_share, _sole()),
    "no-departures": Mutant("INV-7", 5, _no_departures),
    "no-fence": Mutant("leaders", 20, _no_fence, _several("stop master", "store cut")),
    "untold-drops": Mutant("INV-7", 10, _untold_drops, _several()),
    "early-promotion": Mutant("INV-2", 20, _early_promotion),
}
