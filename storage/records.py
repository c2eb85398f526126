"""What the node keeps for a namespace, a tenant's shelf in it, a block, a lease and a reservation."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvstrata.proto.keys import Namespace
from kvstrata.proto.status import SLOT_ROW, Departure
from kvstrata.storage.grid import SlotGrid
from kvstrata.storage.slab import Slab, slot_size

if TYPE_CHECKING:
    import xxhash

    from kvstrata.storage.eviction.queues import Keep, Queue

#: States of a block. Plain integers: they are compared once a block on the hottest path.
IN_FLIGHT: Final = 0  #: reserved; its key is taken, its bytes are not there yet
VISIBLE: Final = 1  #: committed: may be read
LEAVING: Final = 2  #: not to be found any more; its slot goes when leases or movers let go of it
GONE: Final = 3  #: its slot has been freed


class NamespaceEntry:
    """One namespace by its handle, with what the hot path needs of it at hand. ``epoch`` moves with its group's."""

    __slots__ = ("block_bytes", "epoch", "handle", "namespace", "slot_bytes", "width")

    def __init__(self, handle: int, namespace: Namespace, epoch: int = 0) -> None:
        self.handle = handle
        self.namespace = namespace
        self.epoch = epoch
        self.width = namespace.hash_bytes
        self.block_bytes = namespace.block_bytes
        self.slot_bytes = slot_size(namespace.block_bytes)


class Shelf:
    """All blocks of one tenant in one namespace in one tier: hash -> record, in flight or visible.

    ``epoch`` is the weight epoch of all of them. A ``retired`` shelf is found by nobody any more. ``queue``
    is its place in the eviction policy, ``leases`` are those that stand on its blocks. ``scope``: its number in the
    index that clients read, 0 when none of it is there.
    """

    __slots__ = ("blocks", "entry", "epoch", "leases", "queue", "retired", "salt", "scope")

    def __init__(self, entry: NamespaceEntry, salt: str) -> None:
        self.entry = entry
        self.salt = salt
        self.epoch = entry.epoch
        self.retired = False
        self.scope = 0
        self.blocks: dict[bytes, Block] = {}
        self.queue: Queue | None = None
        self.leases: set[Lease] = set()


class Block:
    """One slot's tenant, in DRAM or on an SSD. ``before`` is the hash of the block before it in its chain, wherever
    that is; ``parent`` the nearest block before it that is here too, most often that one.

    ``children`` counts resident blocks whose parent this is: they leave first. ``child`` is the first of them, None
    when it is not known any more. ``parked`` is set while
    the LRU has taken a protected block out of its order. ``born`` is its stamp when it became visible, so
    that another stamp means that it was used; ``offered`` its stamp when it was last written, or refused,
    to the other tier (0: never). ``hinted`` is why it would leave, once a hint made it the coldest. ``row`` is
    kept by :func:`packed_rows`, empty before. ``place``: where it is in the index that clients read, -1 when it is not.
    """

    __slots__ = (
        "before", "born", "checksum", "child", "children", "generation", "hash", "hinted", "hits", "index", "keep",
        "leases", "mark", "offered", "parent", "parked", "place", "queue", "row", "shelf", "slab", "slot", "stamp",
        "state",
    )  # fmt: skip

    def __init__(self, shelf: Shelf, key: bytes, slab: SlotGrid, slot: int, generation: int, index: int) -> None:
        self.shelf = shelf
        self.hash = key
        self.slab = slab
        self.slot = slot
        self.generation = generation
        self.index = index
        self.checksum = 0
        self.leases = 0
        self.state = IN_FLIGHT
        self.stamp = 0
        self.born = 0
        self.offered = 0
        self.before = b""
        self.parent: Block | None = None
        self.child: Block | None = None
        self.children = 0
        self.parked = False
        self.mark = 0
        self.hits = 0
        self.hinted = Departure.HINT
        self.keep: Keep | None = None
        self.queue: Queue | None = None
        self.row = b""
        self.place = -1

    def made_row(self) -> bytes:
        """Its :data:`SLOT_ROW`, as it must be."""
        return SLOT_ROW.pack(self.slab.index, self.slot, self.offset, self.generation, self.checksum)

    @property
    def offset(self) -> int:
        """Byte offset of its slot in the slab's memfd, or in the extent's device."""
        return self.slab.offset(self.slot)

    @property
    def memory(self) -> Slab:
        """The slab of a block in DRAM."""
        return self.slab  # type: ignore[return-value]  # asked once a block: cast() would be a call more

    def bytes(self) -> memoryview:
        """Its payload, in place, of a block in DRAM. Only for who holds a lease on it or is writing it."""
        slab = self.memory
        start = slab.data_offset + self.slot * slab.slot_bytes
        return slab.view[start : start + self.shelf.entry.block_bytes]


def packed_rows(blocks: Sequence[Block]) -> bytes:
    """A :data:`SLOT_ROW` for each of some visible blocks. Kept from the first reader on: nothing of it changes."""
    pack = SLOT_ROW.pack
    rows: list[bytes] = []
    for block in blocks:
        row = block.row
        if not row:
            slab, slot = block.slab, block.slot
            offset = slab.data_offset + slot * slab.slot_bytes
            row = block.row = pack(slab.index, slot, offset, block.generation, block.checksum)
        rows.append(row)
    return b"".join(rows)


class Lease:
    """The right of one session to read some blocks until ``deadline`` (the node's monotonic seconds).

    ``session`` is empty for reads the node itself does for a caller: those end when they end.
    """

    __slots__ = ("blocks", "deadline", "granted_at", "id", "session", "shelves", "view_bytes")

    def __init__(self, number: int, session: bytes, blocks: list[Block], granted_at: float, deadline: float) -> None:
        self.id = number
        self.session = session
        self.blocks = blocks
        self.shelves: Collection[Shelf] = ()
        self.granted_at = granted_at
        self.deadline = deadline
        self.view_bytes = 0


class Reservation:
    """The right of one session to fill some slots until ``deadline``.

    ``busy`` while a thread of the node moves bytes into the slots: whatever ends the reservation then only
    dooms it, and the slots are freed when the thread says that it is done. ``arrived``: so many bytes of each block
    are the writer's; what is behind them is whatever was in the slots before, and not to be published. ``digests``:
    checksums of its blocks, where the node has hashed them for a writer that cannot. ``hashing``: the same, of what
    came so far of blocks that come in ranges.
    """

    __slots__ = ("arrived", "blocks", "busy", "deadline", "digests", "doomed", "hashing", "id", "session", "shelf")

    def __init__(self, number: int, session: bytes, shelf: Shelf, blocks: list[Block], deadline: float) -> None:
        self.id = number
        self.session = session
        self.shelf = shelf
        self.blocks = blocks
        self.deadline = deadline
        self.busy = False
        self.doomed = False
        self.arrived = 0
        self.digests: list[int] = []
        self.hashing: list[xxhash.xxh3_64] = []


@dataclass(slots=True)
class Counts:
    """Everything the node has counted since its start; never decreases."""

    blocks_asked: int = 0
    hits: int = 0
    misses: int = 0
    misses_epoch: int = 0  #: of those: asked for with another weight epoch than the node's
    stored: int = 0
    already_present: int = 0
    in_flight: int = 0
    full: int = 0
    quota: int = 0
    refused: int = 0
    aborted: int = 0
    corrupt: int = 0
    evicted: int = 0
    evicted_quota: int = 0
    evicted_lowered: int = 0
    evicted_device: int = 0
    retired: int = 0
    slabs_taken_over: int = 0
    removed: int = 0
    hints: int = 0  #: blocks that a hint moved, in either tier
    orphaned: int = 0  #: replicas that were told to leave first, for want of a sister shard's
    leases_expired: int = 0
    reservations_expired: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    hits_index: int = 0  #: of the hits, those that a client of this host read by itself
    hits_ssd: int = 0  #: of the hits, those that were read from SSD for it
    misses_no_room: int = 0  #: of the misses, on SSD, and no memory to read them into
    misses_late: int = 0  #: of the misses, on SSD, and not back in time
    misses_corrupt: int = 0
    misses_read_error: int = 0
    demoted: int = 0  #: written to SSD and flushed
    demoted_bytes: int = 0
    demote_refused: int = 0  #: no room for them on SSD
    demote_failed: int = 0  #: the device did not take them, or they were gone before it had
    evicted_unwritten: int = 0  #: left DRAM with no copy on SSD
    promoted: int = 0  #: read from SSD into DRAM
    promoted_bytes: int = 0
    promote_refused: int = 0  #: no room for them in DRAM
    ssd_corrupt: int = 0  #: on SSD, and not what was written
    ssd_read_errors: int = 0
    scrubbed: int = 0  #: read back for no reader, to see whether they are what was stored
    scrubbed_bytes: int = 0
    scrub_corrupt: int = 0  #: of those, not what was stored, or unreadable: withdrawn


@dataclass(slots=True)
class Holdings:
    """What one session has in its hands."""

    leases: set[int] = field(default_factory=set)
    reservations: set[int] = field(default_factory=set)
    view_bytes: int = 0

    def empty(self) -> bool:
        return not self.leases and not self.reservations
