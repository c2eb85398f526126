"""Moves between DRAM and SSD, as bookkeeping: what to demote, what to promote, and what became of it. Sans-IO.

A move holds both ends: the source is leased, the target reserved, so that neither slot is reused while bytes
travel (the movers' business). It ends by :meth:`TierMoves.demoted` or :meth:`TierMoves.promoted`, which
publish what arrived and let go of the rest, whatever happened to the blocks meanwhile: a source that was
removed, dropped or bumped publishes nothing, and neither does a target that was.

The tiers are inclusive: a promoted block keeps its copy on SSD, so that its next eviction costs no write.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvstrata.proto.status import BlockStatus, Departure
from kvstrata.storage.inventory import Inventory
from kvstrata.storage.leases import LeaseBook
from kvstrata.storage.records import IN_FLIGHT, VISIBLE, Block, Counts, Lease, Reservation, Shelf
from kvstrata.storage.reservations import ReservationBook
from kvstrata.storage.tiers.quarantine import Quarantine
from kvstrata.storage.tiers.ssd_policy import SsdPolicy
from kvstrata.storage.tiers.write_budget import Allowance, WriteBudget

#: Blocks of one tenant in one namespace read by one mover at a time, so that several read side by side.
PIECE_BYTES: Final = 4 << 20
#: Demotion keeps the cold end of DRAM clean, down to this part of the DRAM that a node or a tenant may fill. Low,
#: because a burst of reads from SSD evicts as fast as it reads; each block is written once, sooner or later.
LOW_WATERMARK: Final = 0.25
#: Blocks looked at in one search for something to demote: the length of the clean end, at the least.
SCAN_BLOCKS: Final = 4096
#: Found by one search, kept for the batches that follow.
FOUND_BYTES: Final = 64 << 20
#: Prefetches read ahead of their readers by at most one part in this many of DRAM.
AHEAD_SHARE: Final = 4
#: A move that takes longer than this has lost: its targets are given up as soon as its mover lets go.
MOVE_S: Final = 120.0
#: Moves are the node's own: this is no client's session.
_NODE: Final = b""

_NO_ROOM = BlockStatus.NO_ROOM
_LOADED = int(BlockStatus.LOADED)
_IN_FLIGHT = int(BlockStatus.IN_FLIGHT)
_LATE = int(BlockStatus.LATE)
_MISSING = int(BlockStatus.MISSING)


@dataclass(eq=False, slots=True)
class Move:
    """``source[i]`` travels to ``target[i]``; ``parts`` reserve runs of the targets, one shelf each; ``holds`` lease
    the sources likewise.

    ``readers`` wait for what arrives; it is leased for them (``lease``) the moment it is there. ``ahead``:
    nobody asked for it yet. ``failed`` says by hash why something did not arrive.
    """

    source: list[Block]
    target: list[Block]
    parts: list[Reservation]
    holds: list[Lease]
    up: bool
    readers: int = 0
    ahead: bool = False
    over: bool = False
    lease: Lease | None = None
    failed: dict[bytes, BlockStatus] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(block.shelf.entry.block_bytes for block in self.source)


@dataclass(eq=False, slots=True)
class Read:
    """A reader that waits: for moves of its own (``moves``), for those of others too (``waits`` names all).

    ``hold`` keeps what is in DRAM already from leaving for what is coming. ``cold`` are the hashes that were
    on SSD only, ``refused`` those that could not be asked for.
    """

    moves: list[Move] = field(default_factory=list)
    waits: list[Move] = field(default_factory=list)
    hold: Lease | None = None
    cold: set[bytes] = field(default_factory=set)
    refused: dict[bytes, BlockStatus] = field(default_factory=dict)

    @property
    def waiting(self) -> bool:
        return any(not move.over for move in self.waits)

    def why(self, key: bytes) -> BlockStatus:
        """What a block that was on SSD and cannot be leased now is told to be."""
        if key in self.refused:
            return self.refused[key]
        for move in self.waits:
            if key in move.failed:
                return move.failed[key]
            if not move.over and any(block.hash == key for block in move.target):
                return BlockStatus.LATE
        return BlockStatus.MISSING


@dataclass(frozen=True, slots=True)
class TierBooks:
    """One tier: its blocks, who reads them, who writes them."""

    inventory: Inventory
    leases: LeaseBook
    reservations: ReservationBook


class TierMoves:
    """Over both tiers of a node. Not thread-safe: the node's lock covers it.

    ``dram`` has the books of the node's clients, since a promotion's target is a reservation like theirs;
    the books of ``ssd`` are its own. ``limit`` gives a tenant's share of DRAM, None for no limit.
    """

    def __init__(
        self,
        dram: TierBooks,
        ssd: Inventory,
        counts: Counts,
        *,
        policy: SsdPolicy = SsdPolicy.DEMOTE,
        budget: WriteBudget | None = None,
        limit: Callable[[str, float], int | None] = lambda salt, now: None,
    ) -> None:
        self.dram = dram
        self.ssd = TierBooks(ssd, LeaseBook(ssd, {}), ReservationBook(ssd, {}))
        self.counts = counts
        self.policy = policy
        self.budget = budget or WriteBudget(None, 0.0)
        self.quarantine = Quarantine(self.ssd.leases)
        self.ahead_bytes = 0
        self._limit = limit
        self._dirty: deque[Block] = deque()
        self._moves: set[Move] = set()
        self._arriving: dict[Block, Move] = {}
        #: Targets of the moves down, by when they were chosen, the oldest first.
        self._writing: OrderedDict[Block, float] = OrderedDict()
        dram.inventory.copied = self.copied

    # ------------------------------------------------------------------ down

    def demotions(self, limit_bytes: int, now: float, *, everything: bool = False) -> Move | None:
        """The next batch for the SSD: the coldest of DRAM that has no copy there; None when there is none.

        ``everything`` looks beyond the cold end: the node is about to stop.
        """
        allowance = self.budget.allowance(now)
        if self.policy is SsdPolicy.OFF or allowance is Allowance.SPENT:
            return None
        batch = self._take_dirty(limit_bytes, allowance)
        if not batch:
            self._search(allowance, now, everything)
            batch = self._take_dirty(limit_bytes, allowance)
        return self._down(batch, now)

    def write_through(self, blocks: Sequence[Block], now: float) -> Move | None:
        """Blocks of one call that have just become visible; None when nothing of them is to be written."""
        if self.budget.allowance(now) is Allowance.SPENT:
            return None
        return self._down([block for block in blocks if self._to_write(block)][::-1], now)

    def _take_dirty(self, limit_bytes: int, allowance: Allowance) -> list[Block]:
        batch: list[Block] = []
        room = limit_bytes
        while self._dirty and (room > 0 or not batch):
            block = self._dirty.popleft()
            if _worth_it(block, allowance) and self._to_write(block):
                batch.append(block)
                room -= block.slab.slot_bytes
        return batch

    def _to_write(self, block: Block) -> bool:
        """Readable, not offered since it was used last, and not on SSD nor on its way there."""
        if block.state != VISIBLE or block.shelf.retired or block.offered == block.stamp:
            return False
        shelf = self.ssd.inventory.shelves.get((block.shelf.entry.handle, block.shelf.salt))
        return shelf is None or block.hash not in shelf.blocks

    def _search(self, allowance: Allowance, now: float, everything: bool) -> None:
        """Fill the list of what to write, from the cold end, as far as that end is to be clean."""
        inventory = self.dram.inventory
        arena = inventory.arena
        used, total = arena.bytes_used, arena.bytes_total
        # More than half of the SSD: what is written first would leave before it is needed.
        window = min(used - int(LOW_WATERMARK * total), self.ssd.inventory.arena.bytes_total // 2)
        windows: dict[str, int] = {}
        chosen: dict[Block, None] = {}
        found = 0
        for block in inventory.coldest_blocks(inventory.visible if everything else SCAN_BLOCKS):
            nbytes, salt = block.slab.slot_bytes, block.shelf.salt
            if salt not in windows:
                limit = self._limit(salt, now)
                windows[salt] = 0 if limit is None else inventory.policy.charges[salt] - int(LOW_WATERMARK * limit)
            wanted = everything or window > 0 or windows[salt] > 0
            window -= nbytes
            windows[salt] -= nbytes
            if wanted and _worth_it(block, allowance):
                found += self._choose(block, chosen)
                if found >= FOUND_BYTES and not everything:
                    break
        self._dirty.extend(chosen)

    def _choose(self, block: Block, chosen: dict[Block, None]) -> int:
        """A block, and those before it that the policy has set aside because of it: they leave right after it."""
        nbytes = 0
        above: Block | None = block
        while above is not None and above not in chosen and self._to_write(above):
            chosen[above] = None
            nbytes += above.slab.slot_bytes
            above = above.parent if above.parent is not None and above.parent.parked else None
        return nbytes

    def _down(self, batch: Sequence[Block], now: float) -> Move | None:
        """Reserve room on SSD for blocks, coldest first; what gets none is not asked for again until it is used."""
        ssd = self.ssd
        ssd.inventory.now = now
        ssd.inventory.policy.next_stamp()
        shelves: dict[Shelf, list[Block]] = {}
        for block in reversed(batch):
            block.offered = block.stamp
            shelves.setdefault(block.shelf, []).append(block)
        source: list[Block] = []
        target: list[Block] = []
        parts: list[Reservation] = []
        holds: list[Lease] = []
        for shelf, blocks in shelves.items():
            there = ssd.inventory.shelf(shelf.entry, shelf.salt)
            granted = self._reserve(ssd, there, blocks, now)
            self.counts.demote_refused += len(blocks) - len(granted)
            if granted:
                copied = blocks[: len(granted)]
                source.extend(copied)
                target.extend(granted)
                holds.append(self.dram.leases.hold(copied, now))
                parts.append(self._grant(ssd, there, granted, now))
        if not source:
            return None
        self.budget.spend(sum(block.slab.slot_bytes for block in target), now)
        move = Move(source, target, parts, holds, up=False)
        self._moves.add(move)
        self._writing.update(dict.fromkeys(target, now))
        return move

    def demoted(self, move: Move, flushed: Sequence[bool], now: float) -> list[bool]:
        """A mover is done: what was flushed, and still stands, is on SSD from here on. True for those."""
        durable = self._landed(move, flushed, now)
        self.counts.demote_failed += durable.count(False)
        return durable

    def _landed(self, move: Move, flushed: Sequence[bool], now: float) -> list[bool]:
        self.ssd.inventory.now = self.dram.inventory.now = now
        stands = [ok and _stands(block) for ok, block in zip(flushed, move.source, strict=True)]
        durable = self._commit(self.ssd, move, stands, "written")
        self.counts.demoted += sum(durable)
        self.counts.demoted_bytes += sum(b.slab.slot_bytes for b, ok in zip(move.target, durable, strict=True) if ok)
        for block in move.target:
            del self._writing[block]
        self._finish(move, self.dram)
        return durable

    def unspent(self, move: Move, now: float) -> None:
        """Nothing of a move down was written, nor will be: today's writes have that room again."""
        self.budget.refund(sum(block.slab.slot_bytes for block in move.target), now)

    def abandon(self, move: Move, now: float) -> None:
        """It has not begun and will not. What was to be written may be chosen again; readers are late."""
        if move.up:
            self.promoted(move, [_LATE] * len(move.source), now)
            return
        for block in move.source:
            block.offered = 0
        self.unspent(move, now)
        self._landed(move, [False] * len(move.source), now)

    def coming(self, handle: int, salt: str, hashes: Iterable[bytes]) -> list[Block]:
        """Copies on SSD that this node is writing, for demotion or a writer, while :func:`arrives`.

        Not those that another node is sending: they come when their source and the network let them.
        """
        shelf = self.ssd.inventory.shelves.get((handle, salt))
        if shelf is None:
            return []
        return [copy for key in hashes if (copy := shelf.blocks.get(key)) is not None and copy in self._writing]

    def writing_s(self, now: float) -> float:
        """For how long the oldest move down has been under way, in seconds; 0 when there is none."""
        return now - next(iter(self._writing.values()), now)

    def evicted(self, block: Block) -> None:
        """A block has left DRAM to make room: count it when it was nowhere else."""
        if not self.copied(block):
            self.counts.evicted_unwritten += 1

    def copied(self, block: Block) -> bool:
        """Whether a block of DRAM can be read from SSD, too."""
        shelf = self.ssd.inventory.shelves.get((block.shelf.entry.handle, block.shelf.salt))
        copy = shelf.blocks.get(block.hash) if shelf is not None else None
        return copy is not None and copy.state == VISIBLE

    def durable(self, handle: int, salt: str, hashes: Iterable[bytes]) -> bytearray:
        """1 where a block can be read from SSD, also after a crash."""
        shelf = self.ssd.inventory.shelves.get((handle, salt))
        blocks = shelf.blocks if shelf is not None else {}
        return bytearray((b := blocks.get(key)) is not None and b.state == VISIBLE for key in hashes)

    # ------------------------------------------------------------------ up

    def begin_read(self, handle: int, salt: str, hashes: Sequence[bytes], now: float) -> Read | None:
        """What a reader has to wait for; None when nothing it asks for is on SSD only. End it by :meth:`end_read`."""
        here, cold, joined = self._locate(handle, salt, hashes)
        if not cold and not joined:
            return None
        read = Read(cold={block.hash for block in cold}, waits=joined)
        if here:
            self.dram.inventory.policy.next_stamp()
            self.dram.inventory.policy.touch(here)
            read.hold = self.dram.leases.hold(here, now)
        for move in joined:
            read.cold.update(block.hash for block in move.target)
            self._wanted(move)
        read.moves, read.refused = self._up(cold, now)
        read.waits = [*joined, *read.moves]
        for move in read.waits:
            move.readers += 1
        return read

    def end_read(self, read: Read) -> None:
        """The reader has leased what it got, or has given up."""
        if read.hold is not None:
            self.dram.leases.end(read.hold)
        for move in read.waits:
            move.readers -= 1
            if not move.readers and move.lease is not None:
                self.dram.leases.end(move.lease)
                move.lease = None

    def prefetch(self, handle: int, salt: str, hashes: Sequence[bytes], now: float) -> tuple[bytearray, list[Move]]:
        """Ask for blocks ahead of their reader, as far as the bound on that allows: a status each."""
        here, cold, _ = self._locate(handle, salt, hashes)
        if here:
            self.dram.inventory.policy.next_stamp()
            self.dram.inventory.policy.touch(here)
        room = self.dram.inventory.arena.bytes_total // AHEAD_SHARE - self.ahead_bytes
        fits = max(0, room // cold[0].shelf.entry.slot_bytes) if cold else 0
        moves, _ = self._up(cold[:fits], now)
        for move in moves:
            move.ahead = True
            self.ahead_bytes += move.nbytes
        return self._whereabouts(handle, salt, hashes), moves

    def _whereabouts(self, handle: int, salt: str, hashes: Sequence[bytes]) -> bytearray:
        shelf = self.dram.inventory.shelves.get((handle, salt))
        on_ssd = self.durable(handle, salt, hashes)
        status = bytearray([_MISSING]) * len(hashes)
        for position, key in enumerate(hashes):
            block = shelf.blocks.get(key) if shelf is not None else None
            if block is not None:
                status[position] = _LOADED if block.state == VISIBLE else _IN_FLIGHT
            elif on_ssd[position]:
                status[position] = _NO_ROOM
        return status

    def _locate(self, handle: int, salt: str, hashes: Sequence[bytes]) -> tuple[list[Block], list[Block], list[Move]]:
        """(readable in DRAM, readable on SSD only, moves that are bringing some of the others)."""
        shelf = self.dram.inventory.shelves.get((handle, salt))
        below = self.ssd.inventory.shelves.get((handle, salt))
        if below is None and not self._arriving:
            return [], [], []
        blocks = shelf.blocks if shelf is not None else {}
        lower = below.blocks if below is not None else {}
        here: list[Block] = []
        cold: dict[Block, None] = {}
        joined: dict[Move, None] = {}
        for key in hashes:
            block = blocks.get(key)
            if block is None:
                copy = lower.get(key)
                if copy is not None and copy.state == VISIBLE:
                    cold[copy] = None
            elif block.state == VISIBLE:
                here.append(block)
            elif block in self._arriving:
                joined[self._arriving[block]] = None
        return here, list(cold), list(joined)

    def _up(self, cold: list[Block], now: float) -> tuple[list[Move], dict[bytes, BlockStatus]]:
        """Reserve room in DRAM for blocks of one shelf on SSD, by the tenant's own share."""
        if not cold:
            return [], {}
        dram, ssd = self.dram, self.ssd
        dram.inventory.now = ssd.inventory.now = now
        below = cold[0].shelf
        ssd.inventory.policy.next_stamp()
        ssd.inventory.policy.touch(cold)
        dram.inventory.policy.next_stamp()
        there = dram.inventory.shelf(below.entry, below.salt)
        granted = self._reserve(dram, there, cold, now)
        self.counts.promote_refused += len(cold) - len(granted)
        step = max(1, PIECE_BYTES // below.entry.slot_bytes)
        moves: list[Move] = []
        for start in range(0, len(granted), step):
            target, source = granted[start : start + step], cold[start : min(start + step, len(granted))]
            part = self._grant(dram, there, target, now)
            move = Move(source, target, [part], [ssd.leases.hold(source, now)], up=True)
            self._arriving.update(dict.fromkeys(target, move))
            self._moves.add(move)
            moves.append(move)
        return moves, {block.hash: _NO_ROOM for block in cold[len(granted) :]}

    def promoted(self, move: Move, statuses: Sequence[int], now: float) -> None:
        """A mover is done: what was read whole, and still stands, is in DRAM from here on, leased for who waits.

        What the device gave back wrong, or not at all, leaves the SSD; its slot stays in quarantine.
        """
        dram, ssd = self.dram, self.ssd
        dram.inventory.now = ssd.inventory.now = now
        for block, status in zip(move.source, statuses, strict=True):
            if status != _LOADED and _stands(block):
                move.failed[block.hash] = BlockStatus(status)
                self.gone_bad(block, status, now)
        arrived = [status == _LOADED and _stands(block) for status, block in zip(statuses, move.source, strict=True)]
        visible = self._commit(dram, move, arrived, "read from SSD")
        published = [block for block, ok in zip(move.target, visible, strict=True) if ok]
        for block in published:
            block.offered = block.stamp  # its copy is still on SSD
        if published and move.readers:
            move.lease = dram.leases.hold(published, now)
        self.counts.promoted += len(published)
        self.counts.promoted_bytes += len(published) * move.target[0].shelf.entry.block_bytes
        self._wanted(move)
        for block in move.target:
            del self._arriving[block]
        self._finish(move, ssd)

    def gone_bad(self, block: Block, status: int, now: float) -> None:
        """A block that stands on SSD was read as CORRUPT or READ_ERROR: it leaves, its slot goes to quarantine."""
        if status == BlockStatus.CORRUPT:
            self.counts.ssd_corrupt += 1
        elif status == BlockStatus.READ_ERROR:
            self.counts.ssd_read_errors += 1
        else:
            return  # not read at all: the node is stopping
        self.quarantine.add(block, now)
        self.ssd.inventory.withdraw(block, "read wrong from SSD", Departure.CORRUPT)

    def _wanted(self, move: Move) -> None:
        """It is no longer ahead of its reader, or it is over."""
        if move.ahead:
            move.ahead = False
            self.ahead_bytes -= move.nbytes

    # ------------------------------------------------------------------ both ways

    def _reserve(self, tier: TierBooks, shelf: Shelf, blocks: Sequence[Block], now: float) -> list[Block]:
        """Slots in flight for copies of the first so many of ``blocks``, linked as these are."""
        inventory = tier.inventory
        if not inventory.arena.slots_in_a_slab(inventory.slot_bytes(shelf.entry)):
            return []
        inventory.now = now
        granted, _ = inventory.admit(shelf, [block.hash for block in blocks], [block.index for block in blocks])
        there = shelf.blocks.get
        for block, copy in zip(blocks, granted, strict=False):
            copy.checksum = block.checksum
            copy.before = block.before
            if block.before:
                inventory.link(there(block.before), copy)
            # The tail may have gone in a batch before this one.
            child = there(block.child.hash) if block.child is not None else None
            if child is not None and child.before == block.hash:
                inventory.link(copy, child)
        return granted

    def _grant(self, tier: TierBooks, shelf: Shelf, blocks: list[Block], now: float) -> Reservation:
        reservation = tier.reservations.grant(_NODE, shelf, blocks, now + MOVE_S)
        tier.reservations.start_moving(reservation)
        return reservation

    def _commit(self, tier: TierBooks, move: Move, arrived: Sequence[bool], verb: str) -> list[bool]:
        """Publish by part; True for what has become visible."""
        visible: list[bool] = []
        for part in move.parts:
            mask = bytes(arrived[len(visible) : len(visible) + len(part.blocks)])
            checksums = [block.checksum for block in part.blocks]
            if not tier.reservations.moved(part):
                visible.extend([False] * len(mask))
                continue
            stored = [s == BlockStatus.STORED for s in tier.reservations.commit(part, checksums, mask)]
            kept = [block for block, ok in zip(part.blocks, stored, strict=True) if ok]
            tier.inventory.story.tell(tier.inventory.now, verb, part.shelf, kept)
            visible.extend(stored)
        return visible

    def _finish(self, move: Move, source: TierBooks) -> None:
        move.over = True
        self._moves.discard(move)
        for hold in move.holds:
            source.leases.end(hold)

    def expire(self, now: float) -> None:
        """Give up what took too long, let go of old quarantine. Called now and then."""
        self.ssd.inventory.now = now
        self.ssd.reservations.expire(now)
        self.quarantine.expire(now)

    @property
    def moving(self) -> int:
        """Moves under way."""
        return len(self._moves)

    def check(self) -> None:
        """Assert that each move holds both its ends, that nothing moves twice, and the books of the SSD. O(blocks)."""
        self.ssd.inventory.check()
        self.ssd.leases.check()
        self.ssd.reservations.check()
        self.quarantine.check()
        targets = [block for move in self._moves for block in move.target]
        assert len(set(targets)) == len(targets), "a block is the target of two moves"
        up = {block for move in self._moves if move.up for block in move.target}
        assert up == self._arriving.keys(), "arriving blocks and moves differ"
        assert set(targets) - up == self._writing.keys(), "blocks that are being written and moves differ"
        keys = [(b.shelf.entry.handle, b.shelf.salt, b.hash) for b in targets if arrives(b)]
        assert len(set(keys)) == len(keys), "a key moves twice at once"
        for move in self._moves:
            assert not move.over and len(move.source) == len(move.target) == sum(len(p.blocks) for p in move.parts)
            assert all(block.leases for block in move.source), "a source that nobody holds"
            assert all(part.busy for part in move.parts)
        assert self.ahead_bytes == sum(move.nbytes for move in self._moves if move.ahead)


def _stands(block: Block) -> bool:
    return block.state == VISIBLE and not block.shelf.retired


def _worth_it(block: Block, allowance: Allowance) -> bool:
    """When writes are scarce, only what was used since it was stored is worth one."""
    return allowance is Allowance.AMPLE or block.stamp != block.born


def arrives(block: Block) -> bool:
    """Its bytes are being written, and it can still be published: of a retired shelf, none can."""
    return block.state == IN_FLIGHT and not block.shelf.retired
