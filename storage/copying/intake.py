"""Blocks that come from another node, as bookkeeping: which to ask for, where they go, what became of them. Sans-IO.

A piece holds its slots by a reservation of the node's own. Blocks that are to end up on SSD go there straight, and
take no memory from anybody. A copy is charged to its tenant like any block, evicts nothing that was used since it
was used itself, and enters as old as it is; a copy of a busy node's hot block leaves first until somebody reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvstrata.proto.errors import KVError
from kvstrata.proto.status import BlockStatus, CopyReason, Departure, Tier
from kvstrata.storage.copying.book import Copy
from kvstrata.storage.inventory import Inventory
from kvstrata.storage.records import VISIBLE, Block, NamespaceEntry, Reservation
from kvstrata.storage.reservations import ReservationBook
from kvstrata.storage.state import NodeState
from kvstrata.storage.tiers.moves import TierMoves
from kvstrata.storage.tiers.ssd_policy import SsdPolicy
from kvstrata.storage.tiers.write_budget import Allowance

#: Bytes asked for at a time, and at least one block.
PIECE_BYTES: Final = 4 << 20
#: A piece that takes longer than this has lost.
PIECE_S: Final = 30.0
#: Copies are the node's own: this is no client's session.
_NODE: Final = b""

_UNKNOWN = int(BlockStatus.UNKNOWN)
_STORED = int(BlockStatus.STORED)
_PRESENT = int(BlockStatus.ALREADY_PRESENT)
_IN_FLIGHT = int(BlockStatus.IN_FLIGHT)
_ABORTED = int(BlockStatus.ABORTED)


@dataclass(frozen=True, slots=True)
class Told:
    """What the source says of one block: its checksum, its place in its chain, seconds since it was used."""

    checksum: int
    before: bytes
    index: int
    idle_s: float


@dataclass(eq=False, slots=True)
class Piece:
    """Blocks of one order that have slots: ``blocks[i]`` is at ``positions[i]`` of the order."""

    copy: Copy
    positions: list[int]
    blocks: list[Block]
    idle_s: list[float]
    tier: Tier
    reservation: Reservation


class CopyIntake:
    """Over one node's state, and its moves if it has an SSD. Not thread-safe: the node's lock covers it."""

    def __init__(self, state: NodeState, moves: TierMoves | None = None) -> None:
        self._state = state
        self._moves = moves

    # ------------------------------------------------------------------ before the source is asked

    def next_piece(self, copy: Copy, now: float) -> list[int]:
        """Positions to ask the source for now, a few MiB; empty when there are none. All before them are decided."""
        refusal = self._refusal(copy, now)
        if refusal is not None:
            copy.settle(refusal)
            return []
        entry = self._entry(copy)
        wanted: list[int] = []
        room = max(1, PIECE_BYTES // entry.block_bytes)
        while copy.next < len(copy.hashes) and len(wanted) < room:
            position = copy.next
            copy.next += 1
            if copy.status[position] == _UNKNOWN:
                here = self._here(entry, copy.salt, copy.hashes[position])
                if here == _UNKNOWN:
                    wanted.append(position)
                else:
                    copy.status[position] = here
        return wanted

    def _refusal(self, copy: Copy, now: float) -> BlockStatus | None:
        """Why nothing of the order can be taken, or None."""
        if now >= copy.deadline:
            return BlockStatus.LATE
        if self._state.draining.refuses:
            copy.why = "this node is draining"
            return BlockStatus.REFUSED
        try:
            entry = self._entry(copy)
        except KVError as error:
            copy.why = str(error)
            return BlockStatus.REFUSED
        if entry.epoch != copy.epoch:
            copy.why = f"the blocks are of weight epoch {copy.epoch}, this node is at {entry.epoch}"
            return BlockStatus.ABORTED
        if not self._state.arena.slots_in_a_slab(entry.slot_bytes):
            copy.why = "blocks larger than a slab of this node"
            return BlockStatus.REFUSED
        return None

    def _entry(self, copy: Copy) -> NamespaceEntry:
        return self._state.entry(self._state.open_namespace(copy.namespace)[0])

    def _here(self, entry: NamespaceEntry, salt: str, key: bytes) -> int:
        """UNKNOWN when this node has nothing of the block in either tier."""
        for inventory in self._state.tiers():
            shelf = inventory.shelves.get((entry.handle, salt))
            block = shelf.blocks.get(key) if shelf is not None else None
            if block is not None:
                return _PRESENT if block.state == VISIBLE else _IN_FLIGHT
        return _UNKNOWN

    # ------------------------------------------------------------------ when it has answered

    def admit(self, copy: Copy, positions: Sequence[int], told: Sequence[Told], now: float) -> Piece | None:
        """Give slots to what the source has, as far as there is room; None when nothing gets any.

        The others are decided. When there is no room the order ends: what comes after is no warmer.
        """
        refusal = self._refusal(copy, now)
        if refusal is not None:
            copy.settle(refusal)
            return None
        entry = self._entry(copy)
        fresh: dict[bytes, tuple[int, Told]] = {}
        for position, each in zip(positions, told, strict=True):
            key = copy.hashes[position]
            here = self._here(entry, copy.salt, key) if key not in fresh else _IN_FLIGHT
            if copy.status[position] != _UNKNOWN:
                continue  # removed meanwhile
            if here == _UNKNOWN:
                fresh[key] = position, each
            else:
                copy.status[position] = here
        if not fresh:
            return None
        tier = self._tier(copy, entry, now)
        if tier is None:
            copy.settle(BlockStatus.FULL)
            return None
        return self._reserve(copy, entry, fresh, tier, now)

    def _tier(self, copy: Copy, entry: NamespaceEntry, now: float) -> Tier | None:
        """Where the piece goes now; None when it should be on SSD, and today's writes are used up."""
        moves = self._moves
        if copy.tier != Tier.SSD or moves is None or moves.policy is SsdPolicy.OFF:
            return Tier.DRAM
        ssd = moves.ssd.inventory
        if not ssd.arena.slots_in_a_slab(ssd.slot_bytes(entry)):
            return Tier.DRAM
        return None if moves.budget.allowance(now) is Allowance.SPENT else Tier.SSD

    def _books(self, tier: Tier) -> tuple[Inventory, ReservationBook]:
        if tier == Tier.DRAM:
            return self._state.inventory, self._state.reservations
        assert self._moves is not None
        return self._moves.ssd.inventory, self._moves.ssd.reservations

    def _reserve(
        self, copy: Copy, entry: NamespaceEntry, fresh: dict[bytes, tuple[int, Told]], tier: Tier, now: float
    ) -> Piece | None:
        inventory, reservations = self._books(tier)
        inventory.now = now
        shelf = inventory.shelf(entry, copy.salt)
        stamp = inventory.policy.next_stamp()
        # A piece may evict what is colder than the warmest of it.
        idle_s = min(each.idle_s for _, each in fresh.values())
        before = min(stamp, inventory.ages.stamp_at(now - idle_s) + 1)
        blocks, refusal = inventory.admit(shelf, list(fresh), [each.index for _, each in fresh.values()], before)
        admitted = list(fresh.values())[: len(blocks)]
        for block, (_, each) in zip(blocks, admitted, strict=True):
            block.checksum = each.checksum
            block.before = each.before
            if each.before:
                inventory.link(shelf.blocks.get(each.before), block)
        if len(blocks) < len(fresh):
            for position, _ in list(fresh.values())[len(blocks) :]:
                copy.status[position] = refusal
            for position in range(copy.next, len(copy.hashes)):
                if copy.status[position] == _UNKNOWN:
                    copy.status[position] = refusal
            copy.next = len(copy.hashes)
        if not blocks:
            return None
        if tier == Tier.SSD:
            assert self._moves is not None
            self._moves.budget.spend(sum(block.slab.slot_bytes for block in blocks), now)
        reservation = reservations.grant(_NODE, shelf, blocks, now + PIECE_S)
        reservations.start_moving(reservation)
        positions = [position for position, _ in admitted]
        return Piece(copy, positions, blocks, [each.idle_s for _, each in admitted], tier, reservation)

    # ------------------------------------------------------------------ when its bytes are in place, or not

    def commit(self, piece: Piece, outcome: Sequence[int], now: float) -> int:
        """Publish the blocks whose outcome is STORED, unless they were taken away meanwhile; bytes that are here now.

        The others are freed; their outcome is what the order says of them.
        """
        inventory, reservations = self._books(piece.tier)
        inventory.now = now
        mask = bytes(each == _STORED for each in outcome)
        if reservations.moved(piece.reservation):
            checksums = [block.checksum for block in piece.blocks]
            done = reservations.commit(piece.reservation, checksums, mask)
        else:
            done = bytearray([_ABORTED]) * len(piece.blocks)
        stored: list[int] = []
        for row, position in enumerate(piece.positions):
            kept = done[row] == _STORED
            piece.copy.status[position] = _STORED if kept else outcome[row] if not mask[row] else _ABORTED
            if kept:
                stored.append(row)
        nbytes = len(stored) * piece.blocks[0].shelf.entry.block_bytes
        piece.copy.nbytes += nbytes
        if stored:
            self._place(piece, inventory, stored, now)
        return nbytes

    def _place(self, piece: Piece, inventory: Inventory, rows: Sequence[int], now: float) -> None:
        blocks = [piece.blocks[row] for row in rows]
        inventory.story.tell(now, "copied from another node", blocks[0].shelf, blocks)
        if piece.copy.reason == CopyReason.HOT and piece.tier == Tier.DRAM:
            inventory.cool(blocks, Departure.SURPLUS)
            return
        inventory.backdate(blocks, [inventory.ages.stamp_at(now - piece.idle_s[row]) for row in rows])
