"""The node's control state: namespaces, reads, writes, removals, deadlines. Sans-IO.

No clock, socket or file is read here: time comes in as monotonic seconds, memory is the arena's, bytes are
moved by the caller. Not thread-safe: the caller holds one lock around every call. Statuses of a call are
one byte a block (:class:`~kvstrata.proto.status.BlockStatus`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import msgspec
import numpy as np

from kvstrata.proto.errors import FingerprintMismatch, InvalidArgument
from kvstrata.proto.keys import HASHES_MAX, Namespace, check_salt
from kvstrata.proto.logs import get_logger
from kvstrata.proto.status import BlockStatus, Departure, HintKind, Tier
from kvstrata.proto.wire import REPEATS_MAX
from kvstrata.storage.arena import Arena
from kvstrata.storage.copying.book import CopyBook
from kvstrata.storage.copying.draining import Draining
from kvstrata.storage.eviction.isolated_lru import IsolatedLRU
from kvstrata.storage.eviction.orders import LruOrder, Order
from kvstrata.storage.eviction.policy import EvictionPolicy
from kvstrata.storage.eviction.quotas import QuotaBook
from kvstrata.storage.inventory import Inventory
from kvstrata.storage.leases import LeaseBook, granted_seconds
from kvstrata.storage.masters.delta_log import DeltaLog
from kvstrata.storage.namespaces import NamespaceBook
from kvstrata.storage.records import VISIBLE, Block, Counts, Holdings, Lease, NamespaceEntry, Reservation, Shelf
from kvstrata.storage.reservations import ReservationBook
from kvstrata.storage.serving.published import Published
from kvstrata.storage.slab import Slab
from kvstrata.storage.ssd.base import SsdStore

log = get_logger(__name__)

#: A tick frees at most so much, in each tier, of what tenants have above their shares: at 20 ticks a second,
#: 5 GiB a second. A slot may be larger than what is left of it.
DRAIN_BYTES: Final = 256 << 20
#: A tick lets go of at most so many blocks whose shelf is retired: a few milliseconds under the lock.
SWEEP_BLOCKS: Final = 2048
#: A read that a client repeated is told of once; this often it counts to the order of eviction.
TOUCHES_MAX: Final = 2
HINT_MAX_S: Final = 86_400.0
#: Fewer hashes than this are cut by hand: numpy takes some time to begin.
_FEW: Final = 16

_LOADED = int(BlockStatus.LOADED)
_MISSING = int(BlockStatus.MISSING)
_PRESENT = int(BlockStatus.ALREADY_PRESENT)
_RESERVED = int(BlockStatus.RESERVED)
_IN_FLIGHT = int(BlockStatus.IN_FLIGHT)
_FULL = int(BlockStatus.FULL)
_REFUSED = int(BlockStatus.REFUSED)
_ABORTED = int(BlockStatus.ABORTED)


@dataclass(frozen=True, slots=True)
class Holding:
    """What one tenant can read of one namespace in one tier. ``hashes`` is packed."""

    namespace: Namespace
    epoch: int
    salt: str
    tier: Tier
    hashes: bytes


class Acquired(msgspec.Struct, frozen=True):
    """``blocks`` are those with status LOADED, in order; ``lease`` covers them all, None when there are none."""

    status: bytearray
    blocks: list[Block]
    lease: Lease | None
    delta_seq: int


class Reserved(msgspec.Struct, frozen=True):
    """``reservation.blocks`` are those with status RESERVED, in order; None when there are none."""

    status: bytearray
    reservation: Reservation | None
    delta_seq: int


class Touched(msgspec.Struct, frozen=True):
    """Reads of one tenant's blocks that a client did by itself, in their order: ``hashes`` packed, ``calls`` the number
    of blocks of each, ``times`` how often it was done, the last of them in this place."""

    handle: int
    salt: str
    hashes: bytes
    calls: Sequence[int]
    times: Sequence[int]
    epoch: int = 0


class WriteAsk(msgspec.Struct, frozen=True):
    """What a writer asks for: ``hashes`` packed, ``parent`` the hash before them (may be empty)."""

    handle: int
    salt: str
    hashes: bytes
    parent: bytes = b""
    first_index: int = 0
    deadline_ms: int = 0
    epoch: int = 0


class _Sorted(msgspec.Struct):
    """Positions of a write by what is to be done: ``fresh`` are new keys, ``known`` visible blocks.

    ``cold`` are visible on SSD only.
    """

    status: bytearray
    hashes: list[bytes]
    fresh: dict[bytes, int] = {}
    known: list[Block] = []
    cold: list[Block] = []


class NodeState:
    """All state of one node. See the module for who holds the lock and who tells the time."""

    def __init__(
        self,
        arena: Arena[Slab],
        policy: EvictionPolicy | None = None,
        deltas: DeltaLog | None = None,
        ssd: SsdStore | None = None,
        quotas: QuotaBook | None = None,
        order: Callable[[], Order] = LruOrder,
        published: Published | None = None,
    ) -> None:
        self.counts = Counts()
        self.drops = 0  #: deltas do not tell of what went by these
        self.drop_seq = 0  #: who has applied deltas up to here knows of all of them
        self.quotas = quotas or QuotaBook()
        self.deltas = deltas or DeltaLog()
        self.inventory = Inventory(arena, policy or IsolatedLRU(order), self.deltas, self.counts, quotas=self.quotas)
        #: What clients of this host read without asking; None where they all ask.
        self.published = self.inventory.published = published
        self.arena = arena
        self.store = ssd
        self.ssd = self._ssd_tier(ssd, order)
        self._sessions: dict[bytes, Holdings] = {}
        self.leases = LeaseBook(self.inventory, self._sessions)
        self.reservations = ReservationBook(self.inventory, self._sessions)
        self.known = NamespaceBook()
        self.left = False  #: see :meth:`leave`
        #: Copies that masters have ordered; what is removed is not taken any more.
        self.copies = CopyBook()
        #: Whether this node is leaving, and takes no new blocks.
        self.draining = Draining()

    def _ssd_tier(self, store: SsdStore | None, order: Callable[[], Order]) -> Inventory | None:
        """The same bookkeeping over the extents of the node's devices, with a policy of its own."""
        if store is None:
            return None
        return Inventory(
            store.arena,
            IsolatedLRU(order),
            self.deltas,
            self.counts,
            tier=Tier.SSD,
            quotas=self.quotas,
            slot_bytes=lambda entry: store.slot_bytes(entry.block_bytes),
        )

    # ------------------------------------------------------------------ namespaces

    def open_namespace(self, namespace: Namespace, by: str = "") -> tuple[int, int]:
        """(handle, weight epoch). Handles count from 1 and hold for the life of this state. Raises as
        :meth:`NamespaceBook.open`."""
        entry, fresh = self.known.open(namespace, by)
        if fresh and not self.arena.slots_in_a_slab(entry.slot_bytes):
            log.warning(
                "blocks larger than a slab",
                group=namespace.group,
                block_bytes=namespace.block_bytes,
                slab_bytes=self.arena.slab_bytes,
                advice="give the node more DRAM or larger slabs",
            )
        return entry.handle, entry.epoch

    def entry(self, handle: int) -> NamespaceEntry:
        """Raises :class:`FingerprintMismatch` for a handle this state has not given."""
        return self.known.entry(handle)

    def set_epoch(self, group: str, epoch: int, now: float) -> int:
        """Learn a group's weight epoch: from here on nobody finds a block of older weights.

        Returns how many blocks that were. O(shelves): their room comes back later (:meth:`sweep`).
        """
        if not self.known.advance(group, epoch):
            return 0
        return self._retire(group, None, Departure.EPOCH, now)

    def drop(self, group: str, salt: str | None, now: float) -> int:
        """Everything of a group ("": of all) and a tenant (None: of all) goes, as by :meth:`set_epoch`."""
        count = self._retire(group, salt, Departure.DROPPED, now)
        self.drops += 1
        self.drop_seq = self.deltas.mark()
        return count

    def _retire(self, group: str, salt: str | None, why: Departure, now: float) -> int:
        count = 0
        self.copies.retired(group, salt)
        for inventory in self.tiers():
            inventory.now = now
            for shelf in [shelf for shelf in inventory.shelves.values() if in_scope(shelf, group, salt)]:
                count += inventory.retire(shelf, why)
        return count

    def tiers(self) -> list[Inventory]:
        """The inventories of this node, DRAM first."""
        return [self.inventory] if self.ssd is None else [self.inventory, self.ssd]

    # ------------------------------------------------------------------ reading

    def acquire(
        self, session: bytes, handle: int, salt: str, hashes: bytes, seconds: float, now: float, epoch: int = 0
    ) -> Acquired:
        """Lease what is visible of ``hashes`` for ``seconds``, and make it the most recent of its tenant.

        ``seconds`` 0 is for a read that the node performs itself: the caller must end the lease. A reader of
        another weight ``epoch`` than the node's finds nothing.
        """
        self.inventory.now = now
        entry = self.entry(handle)
        count = _count(hashes, entry.width)
        counts = self.counts
        counts.blocks_asked += count
        if epoch != entry.epoch or self.left:
            counts.misses += count
            counts.misses_epoch += count if epoch != entry.epoch else 0
            return Acquired(bytearray([_MISSING]) * count, [], None, self.deltas.answer_seq)
        shelf = self.inventory.shelves.get((handle, salt))
        status, blocks = _look(shelf, hashes, entry.width, count)
        counts.hits += len(blocks)
        counts.misses += count - len(blocks)
        lease = None
        if blocks:
            policy = self.inventory.policy
            policy.next_stamp()
            policy.touch(blocks)
            book = self.leases
            lease = book.grant(session, blocks, seconds, now) if seconds else book.hold(blocks, now, sent=True)
        return Acquired(status, blocks, lease, self.deltas.answer_seq)

    def leave(self) -> None:
        """The node says goodbye: no master will tell it any more what was dropped, so nobody finds anything here from
        now on. Reads that have begun go on."""
        self.left = True
        if self.published is not None:
            self.published.stop()

    def touched(self, touched: Touched, now: float) -> None:
        """A client has read blocks by the index: they count, and become the most recent, as by :meth:`acquire`.

        What has left meanwhile only counts. Raises :class:`InvalidArgument` for calls that do not add up.
        """
        entry = self.entry(touched.handle)
        keys = _split(touched.hashes, entry.width)
        if len(touched.calls) != len(touched.times) or sum(touched.calls) != len(keys):
            raise InvalidArgument(f"{len(touched.calls)} calls with {len(touched.times)} counts for {len(keys)} hashes")
        if not all(touched.calls) or not all(0 < times <= REPEATS_MAX for times in touched.times):
            raise InvalidArgument(f"a read is of 1 block at least, and told of as done 1 to {REPEATS_MAX} times")
        self.inventory.now = now
        read = sum(count * times for count, times in zip(touched.calls, touched.times, strict=True))
        counts = self.counts
        counts.blocks_asked += read
        counts.hits += read
        counts.hits_index += read
        counts.bytes_out += read * entry.block_bytes
        shelf = self.inventory.shelves.get((touched.handle, touched.salt))
        if shelf is None or touched.epoch != entry.epoch:
            return
        policy, start = self.inventory.policy, 0
        for count, times in zip(touched.calls, touched.times, strict=True):
            found = map(shelf.blocks.get, keys[start : start + count])
            blocks = [block for block in found if block is not None and block.state == VISIBLE]
            start += count
            for _ in range(min(times, TOUCHES_MAX)):
                policy.next_stamp()
                policy.touch(blocks)

    def release(self, session: bytes, leases: Sequence[int]) -> None:
        """End leases of this session; those that have ended are passed over."""
        self.leases.release(session, leases)

    def end(self, lease: Lease) -> None:
        self.leases.end(lease)

    def renew(self, session: bytes, lease: int, lease_ms: int, now: float) -> int:
        """Milliseconds for which the lease stands from ``now``; 0 when it is gone or may not be kept."""
        return int(self.leases.renew(session, lease, granted_seconds(lease_ms), now) * 1e3)

    # ------------------------------------------------------------------ writing

    def reserve(self, session: bytes, ask: WriteAsk, now: float) -> Reserved:
        """Give slots to the blocks that are not here, in order, as far as there is room. A draining node refuses them.

        Blocks that are here, in either tier, become the most recent of it, with the call's one stamp, and so
        does the parent.
        """
        self.inventory.now = now
        entry = self.entry(ask.handle)
        check_salt(ask.salt)
        count = _count(ask.hashes, entry.width)
        self._check_write(ask, entry)
        shelf = self.inventory.shelf(entry, ask.salt)
        below = self.ssd.shelves.get((ask.handle, ask.salt)) if self.ssd is not None else None
        found = _sort(shelf, below, ask.hashes, entry.width, count)
        before = shelf.blocks.get(ask.parent) if ask.parent else None
        policy = self.inventory.policy
        policy.next_stamp()
        policy.touch([before, *found.known] if before is not None and before.state == VISIBLE else found.known)
        if below is not None:
            self._touch_below(below, found, b"" if before is not None else ask.parent, now)
        granted = self._admit(shelf, found, ask.first_index)
        self.inventory.link_all(shelf, found.hashes, ask.parent)
        self.counts.already_present += len(found.known) + len(found.cold)
        if not granted:
            return Reserved(found.status, None, self.deltas.answer_seq)
        deadline = now + granted_seconds(ask.deadline_ms)
        reservation = self.reservations.grant(session, shelf, granted, deadline)
        return Reserved(found.status, reservation, self.deltas.answer_seq)

    def _touch_below(self, below: Shelf, found: _Sorted, parent: bytes, now: float) -> None:
        """What the call named and only the SSD has."""
        ssd = self.ssd
        assert ssd is not None
        before = below.blocks.get(parent) if parent else None
        touched = [before, *found.cold] if before is not None and before.state == VISIBLE else found.cold
        if touched:
            ssd.now = now
            ssd.policy.next_stamp()
            ssd.policy.touch(touched)

    def _check_write(self, ask: WriteAsk, entry: NamespaceEntry) -> None:
        if ask.parent and len(ask.parent) != entry.width:
            raise InvalidArgument(f"the parent hash has {len(ask.parent)} bytes, the namespace says {entry.width}")
        if ask.epoch != entry.epoch:
            raise FingerprintMismatch(
                f"the writer's weights are of epoch {ask.epoch}, the node's of {entry.epoch}: open the namespace again"
            )

    def _admit(self, shelf: Shelf, found: _Sorted, first_index: int) -> list[Block]:
        fresh, status = found.fresh, found.status
        if not fresh:
            return []
        if self.draining.refuses or not self.arena.slots_in_a_slab(shelf.entry.slot_bytes):
            for position in fresh.values():
                status[position] = _REFUSED
            self.counts.refused += len(fresh)
            return []
        positions = list(fresh.values())
        granted, refusal = self.inventory.admit(shelf, list(fresh), [first_index + position for position in positions])
        if len(granted) == len(status):
            status[:] = bytes((_RESERVED,)) * len(status)
            return granted
        for position in positions[: len(granted)]:
            status[position] = _RESERVED
        for position in positions[len(granted) :]:
            status[position] = refusal
        refused = len(fresh) - len(granted)
        if refusal == BlockStatus.QUOTA:
            self.counts.quota += refused
        else:
            self.counts.full += refused
        return granted

    def find_reservation(self, session: bytes, number: int) -> Reservation | None:
        """The session's reservation, or None when it has ended: its writer is told ABORTED."""
        return self.reservations.find(session, number)

    def start_moving(self, reservation: Reservation) -> None:
        """See :meth:`ReservationBook.start_moving`."""
        self.reservations.start_moving(reservation)

    def moved(self, reservation: Reservation, now: float) -> bool:
        """The mover is done with the slots. False: the reservation had ended meanwhile."""
        self.inventory.now = now
        return self.reservations.moved(reservation)

    def commit(
        self, session: bytes, number: int, checksums: Sequence[int], mask: Sequence[int] | None, now: float
    ) -> bytearray:
        """Publish a reservation's blocks; a status each. One that has ended publishes nothing: all ABORTED."""
        self.inventory.now = now
        reservation = self.reservations.find(session, number)
        if reservation is not None and reservation.deadline <= now:
            self.reservations.abort(reservation, "reservation expired")
            self.counts.reservations_expired += 1
            reservation = None
        if reservation is None:
            self.counts.aborted += len(checksums)
            return bytearray([_ABORTED]) * len(checksums)
        statuses = self.reservations.commit(reservation, checksums, mask)
        aborted = statuses.count(_ABORTED)
        self.counts.aborted += aborted
        self.counts.stored += len(statuses) - aborted
        return statuses

    def abort(self, session: bytes, number: int, now: float) -> None:
        """Give a reservation up; one that has ended is passed over."""
        self.inventory.now = now
        reservation = self.reservations.find(session, number)
        if reservation is not None:
            self.counts.aborted += len(reservation.blocks)
            self.reservations.abort(reservation)

    # ------------------------------------------------------------------ hints

    def hint(self, handle: int, salt: str, hashes: bytes, epoch: int, kind: HintKind, ttl_s: float, now: float) -> int:
        """What a tenant says of the future of its blocks, for ``ttl_s`` where it asks to keep them.

        Returns how many it changed, in either tier; none when its weight ``epoch`` is not the node's.
        """
        entry = self.entry(handle)
        keys = _split(hashes, entry.width)
        if epoch != entry.epoch:
            return 0
        changed: set[bytes] = set()
        for inventory in self.tiers():
            inventory.now = now
            shelf = inventory.shelves.get((handle, salt))
            if shelf is not None:
                changed.update(inventory.hint(shelf, keys, kind, now + min(ttl_s, HINT_MAX_S)))
        self.counts.hints += len(changed)
        return len(changed)

    def orphaned(self, namespace: Namespace, salt: str, hashes: bytes, epoch: int, now: float) -> int:
        """Nobody finds these blocks any more, for want of a sister shard's: they leave first.

        Returns how many replicas that are, in each tier.
        """
        entry = self.known.find(namespace)
        if entry is None or epoch != entry.epoch:
            return 0
        keys = _split(hashes, entry.width)
        changed = 0
        for inventory in self.tiers():
            inventory.now = now
            shelf = inventory.shelves.get((entry.handle, salt))
            if shelf is not None:
                changed += inventory.orphaned(shelf, keys)
        self.counts.orphaned += changed
        return changed

    def let_go(self, namespace: Namespace, salt: str, hashes: bytes, epoch: int, now: float) -> int:
        """Other nodes have these blocks, and as many replicas are not wanted: they leave, of both tiers.

        What is being read goes with its last reader. Returns how many replicas that are, in each tier.
        """
        entry = self.known.find(namespace)
        if entry is None or epoch != entry.epoch:
            return 0
        keys = dict.fromkeys(_split(hashes, entry.width))
        gone = 0
        for inventory in self.tiers():
            inventory.now = now
            shelf = inventory.shelves.get((entry.handle, salt))
            blocks = [shelf.blocks[key] for key in keys if key in shelf.blocks] if shelf is not None else []
            for block in blocks:
                if block.state == VISIBLE:
                    inventory.withdraw(block, "surplus", Departure.SURPLUS)
                    gone += 1
        self.copies.counts.surplus += gone
        return gone

    # ------------------------------------------------------------------ ends

    def remove(self, namespace: Namespace, salt: str, hashes: bytes, now: float) -> int:
        """Make blocks invisible at once in both tiers, also those being written or moved.

        Returns how many the node knew; one that is in both tiers counts once.
        """
        width = namespace.hash_bytes
        keys = {hashes[start : start + width] for start in range(0, len(hashes), width)}
        self.copies.removed(namespace, salt, keys)
        entry = self.known.find(namespace)
        if entry is None:
            return 0
        gone: set[bytes] = set()
        for inventory in self.tiers():
            inventory.now = now
            shelf = inventory.shelves.get((entry.handle, salt))
            if shelf is not None:
                blocks = [shelf.blocks[key] for key in keys if key in shelf.blocks]
                for block in blocks:
                    inventory.withdraw(block, "removed", Departure.REMOVED)
                gone.update(block.hash for block in blocks)
        self.counts.removed += len(gone)
        return len(gone)

    def expire(self, now: float) -> None:
        """End every lease, reservation and hint whose deadline has come, and give back a bounded bit of room.

        That is what tenants have above their shares, and what :meth:`set_epoch` and :meth:`drop` took away.
        """
        for inventory in self.tiers():
            inventory.now = now
            inventory.ages.note(inventory.policy.stamp, now)
            inventory.drain(DRAIN_BYTES)
            inventory.sweep(SWEEP_BLOCKS)
        self.counts.leases_expired += self.leases.expire(now)
        self.counts.reservations_expired += self.reservations.expire(now)

    @property
    def at_rest(self) -> bool:
        """Whether :meth:`expire` has nothing to end but hints, and nothing to give back: it may come less often.

        A lease or a reservation begins with at least :data:`~kvstrata.storage.leases.MARGIN_S`.
        """
        return not len(self.leases) and not len(self.reservations) and all(each.at_rest for each in self.tiers())

    def session_ended(self, session: bytes, now: float) -> None:
        """A client is gone: everything it held goes."""
        self.inventory.now = now
        holdings = self._sessions.get(session)
        if holdings is not None:
            self.reservations.abort_all(holdings.reservations)
            self.leases.end_all(holdings.leases)

    # ------------------------------------------------------------------ what there is

    def shelves(self) -> list[tuple[Inventory, tuple[int, str]]]:
        """All shelves of both tiers, for a snapshot taken a shelf at a time by :meth:`holding`."""
        return [(inventory, key) for inventory in self.tiers() for key in inventory.shelves]

    def holding(self, inventory: Inventory, key: tuple[int, str]) -> Holding:
        """What is visible on one shelf now; a shelf that has gone meanwhile holds nothing."""
        entry = self.known.entry(key[0])
        return Holding(entry.namespace, entry.epoch, key[1], inventory.tier, inventory.holdings(key))

    def snapshot(self) -> list[Holding]:
        """Everything visible."""
        return [self.holding(inventory, key) for inventory, key in self.shelves()]

    def story(self, namespace: Namespace, salt: str, key: bytes) -> list[tuple[float, str]]:
        """(monotonic seconds, verb) of what happened to a block lately in either tier, oldest first."""
        entry = self.known.find(namespace)
        if entry is None:
            return []
        told = [(inventory, inventory.story.of((entry.handle, salt), key)) for inventory in self.tiers()]
        lines = [
            (at, verb if inventory.tier == Tier.DRAM else f"{verb} ({inventory.tier.name})")
            for inventory, entries in told
            for at, verb in entries
        ]
        return sorted(lines, key=lambda line: line[0])

    @property
    def namespaces(self) -> int:
        """Namespaces that have a handle."""
        return len(self.known)

    @property
    def sessions(self) -> int:
        """Sessions that hold a lease or a reservation."""
        return len(self._sessions)

    def check(self) -> None:
        """Assert every structural invariant. O(blocks)."""
        self.known.check()
        self.copies.check()
        self.draining.check()
        self.leases.check()
        self.reservations.check()
        for inventory in self.tiers():
            inventory.check()
            for (handle, salt), shelf in inventory.shelves.items():
                assert self.known.entry(handle) is shelf.entry and shelf.salt == salt
                assert shelf.epoch == shelf.entry.epoch, "blocks of other weights can be found"


def in_scope(shelf: Shelf, group: str, salt: str | None) -> bool:
    """Whether a shelf is of the group ("": any) and the tenant (None: any)."""
    return group in ("", shelf.entry.namespace.group) and salt in (None, shelf.salt)


def _count(hashes: bytes, width: int) -> int:
    """Hashes in a packed run; raises :class:`InvalidArgument` when it is not one, or is too long."""
    count, rest = divmod(len(hashes), width)
    if rest:
        raise InvalidArgument(f"packed hashes are {len(hashes)} bytes: not a multiple of hash_bytes = {width}")
    if count > HASHES_MAX:
        raise InvalidArgument(f"{count} hashes in one call: at most {HASHES_MAX}")
    return count


def _split(hashes: bytes, width: int) -> list[bytes]:
    """Raises as :func:`_count`."""
    return _keys(hashes, width, _count(hashes, width))


def _keys(hashes: bytes, width: int, count: int) -> list[bytes]:
    """The first ``count`` hashes of a packed run."""
    if count < _FEW:
        return [hashes[start : start + width] for start in range(0, count * width, width)]
    keys: list[bytes] = np.frombuffer(hashes, _raw(width), count).tolist()
    return keys


@lru_cache
def _raw(width: int) -> np.dtype[np.void]:
    """Bytes as they are, zeros at the end included."""
    return np.dtype((np.void, width))


def _look(shelf: Shelf | None, hashes: bytes, width: int, count: int) -> tuple[bytearray, list[Block]]:
    """(status of each, the visible blocks in order). A hash named twice is leased twice."""
    if shelf is None:
        return bytearray([_MISSING]) * count, []
    found = list(map(shelf.blocks.get, _keys(hashes, width, count)))
    blocks = [block for block in found if block is not None and block.state == VISIBLE]
    if len(blocks) == count:
        return bytearray([_LOADED]) * count, blocks
    status = [_LOADED if block is not None and block.state == VISIBLE else _MISSING for block in found]
    return bytearray(status), blocks


def _sort(shelf: Shelf, below: Shelf | None, hashes: bytes, width: int, count: int) -> _Sorted:
    """What is here, what is being written, what is new. A hash named twice is in flight the second time.

    ``below`` is the tenant's shelf on SSD.
    """
    keys = _keys(hashes, width, count)
    here = list(map(shelf.blocks.get, keys))
    found = _all_alike(keys, here, below)
    return found if found is not None else _one_by_one(keys, here, below)


def _all_alike(keys: list[bytes], here: list[Block | None], below: Shelf | None) -> _Sorted | None:
    """As :func:`_one_by_one`, for what most calls are: all new, each once, or all visible; else None."""
    count = len(keys)
    if not any(here):
        fresh = dict(zip(keys, range(count), strict=True))
        if len(fresh) == count and (below is None or below.blocks.keys().isdisjoint(fresh)):
            return _Sorted(bytearray((_FULL,)) * count, keys, fresh)
        return None
    known = [block for block in here if block is not None and block.state == VISIBLE]
    return _Sorted(bytearray((_PRESENT,)) * count, keys, known=known) if len(known) == count else None


def _one_by_one(keys: list[bytes], here: list[Block | None], below: Shelf | None) -> _Sorted:
    found = _Sorted(bytearray((_FULL,)) * len(keys), keys)
    fresh, status = found.fresh, found.status
    lower = below.blocks if below is not None else {}
    for position, (key, block) in enumerate(zip(keys, here, strict=True)):
        if block is None:
            copy = lower.get(key)
            if copy is not None and copy.state == VISIBLE:
                status[position] = _PRESENT
                found.cold.append(copy)
            elif key in fresh:
                status[position] = _IN_FLIGHT
            else:
                fresh[key] = position
        elif block.state == VISIBLE:
            status[position] = _PRESENT
            found.known.append(block)
        else:
            status[position] = _IN_FLIGHT
    return found
