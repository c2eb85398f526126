"""Any order of events, against an oracle, with real memory underneath.

The oracle knows for each key which version a reader may see: the last committed one, unless it was removed.
Evicted is always allowed; another version, another key's bytes, or bytes that change under a lease never.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from kvstrata.proto.keys import Namespace
from kvstrata.proto.status import BlockStatus, Tier
from kvstrata.storage.arena import dram_arena
from kvstrata.storage.masters.delta_log import DeltaLog
from kvstrata.storage.records import Block, Lease, Reservation
from kvstrata.storage.serving.published import Published
from kvstrata.storage.state import NodeState, WriteAsk

from .conftest import SLAB_BYTES, fill, holds, key, keys

SESSIONS = (b"a" * 16, b"b" * 16)
SALTS = ("", "x")
#: Two sizes, 3 and 15 blocks a slab, in a pool of two slabs: nearly every store has to evict.
SIZES = (20_000, 4096)
SLABS = 2

sessions = st.sampled_from(SESSIONS)
salts = st.sampled_from(SALTS)
sizes = st.sampled_from(range(len(SIZES)))
starts = st.integers(0, 20)
counts = st.integers(1, 16)

Where = tuple[int, str, bytes]


@dataclass(eq=False)
class Writing:
    """A reservation as its writer sees it: the version it writes, and whether a node thread moves its bytes."""

    reservation: Reservation
    session: bytes
    version: int
    moving: bool = False


@dataclass(eq=False)
class Reading:
    """A lease as its reader sees it: what each block held when it was granted, and until when it must."""

    lease: Lease
    session: bytes
    versions: list[tuple[Block, int]]
    until: float


class NodeMachine(RuleBasedStateMachine):
    writings = Bundle("writings")
    readings = Bundle("readings")

    def __init__(self) -> None:
        super().__init__()
        self.arena = dram_arena(SLABS * SLAB_BYTES, SLAB_BYTES)
        self.state = self.make_state()
        self.namespaces = [Namespace(f"model-{size}", size, 16) for size in SIZES]
        self.handles = [self.state.open_namespace(namespace)[0] for namespace in self.namespaces]
        self.now = 100.0
        self.version = 0
        self.epochs = [0] * len(SIZES)
        self.admissible: dict[Where, int] = {}
        self.reading: list[Reading] = []
        self.directory: set[Where] = set()
        self.applied = 0

    def make_state(self) -> NodeState:
        published = Published(1, self.arena.bytes_total)
        return NodeState(self.arena, deltas=DeltaLog(batch_hashes_max=20), published=published)

    def teardown(self) -> None:
        for session in SESSIONS:
            self.state.session_ended(session, self.now)
        self.state.check()
        assert self.state.sessions == 0 and len(self.state.leases) == 0
        self.arena.close()

    # ------------------------------------------------------------------ writing

    @rule(
        target=writings, session=sessions, salt=salts, size=sizes, start=starts, count=counts, wait=st.integers(0, 5000)
    )
    def reserve(self, session: bytes, salt: str, size: int, start: int, count: int, wait: int) -> object:
        parent = key(start - 1) if start else b""
        hashes = keys(range(start, start + count))
        epoch = self.epochs[size]
        ask = WriteAsk(self.handles[size], salt, hashes, parent, start, deadline_ms=wait, epoch=epoch)
        got = self.state.reserve(session, ask, self.now)
        if got.reservation is None:
            assert BlockStatus.RESERVED not in got.status
            return multiple()
        assert got.status.count(BlockStatus.RESERVED) == len(got.reservation.blocks)
        self.version += 1
        for block in got.reservation.blocks:
            fill(block, self.version)
        return Writing(got.reservation, session, self.version)

    @rule(salt=salts, size=sizes, start=starts, count=counts)
    def store(self, salt: str, size: int, start: int, count: int) -> None:
        """A whole write at once, so that there is something to read and to evict."""
        writing = self.reserve(SESSIONS[0], salt, size, start, count, 1000)
        if isinstance(writing, Writing):
            self.commit(writing, drop=-1)

    @rule(writing=consumes(writings), drop=st.integers(-1, 12))
    def commit(self, writing: Writing, drop: int) -> None:
        if writing.moving:
            self.finish_moving(writing)
        blocks = writing.reservation.blocks
        mask = [position != drop for position in range(len(blocks))]
        checksums = [writing.version] * len(blocks)
        done = self.state.commit(writing.session, writing.reservation.id, checksums, mask, self.now)
        for block, status in zip(blocks, done, strict=True):
            if status == BlockStatus.STORED:
                assert self.now < writing.reservation.deadline, "a commit after its deadline"
                self.admissible[self.where(block)] = writing.version
            else:
                assert status == BlockStatus.ABORTED

    @rule(writing=consumes(writings))
    def abort(self, writing: Writing) -> None:
        self.state.abort(writing.session, writing.reservation.id, self.now)
        if writing.moving:
            self.finish_moving(writing)

    @rule(writing=writings)
    def start_moving(self, writing: Writing) -> None:
        alive = self.state.find_reservation(writing.session, writing.reservation.id)
        if alive is not None and not writing.moving:
            self.state.start_moving(alive)
            writing.moving = True

    @rule(writing=writings)
    def moved(self, writing: Writing) -> None:
        if writing.moving:
            self.finish_moving(writing)

    def finish_moving(self, writing: Writing) -> None:
        """The mover's last bytes land only now: whoever else had been given these slots would see them."""
        for block in writing.reservation.blocks:
            fill(block, writing.version)
        writing.moving = False
        self.state.moved(writing.reservation, self.now)

    # ------------------------------------------------------------------ reading

    @rule(
        target=readings, session=sessions, salt=salts, size=sizes, start=starts, count=counts, seconds=st.floats(0.1, 5)
    )
    def acquire(self, session: bytes, salt: str, size: int, start: int, count: int, seconds: float) -> object:
        packed = keys(range(start, start + count))
        got = self.state.acquire(session, self.handles[size], salt, packed, seconds, self.now, self.epochs[size])
        assert got.status.count(BlockStatus.LOADED) == len(got.blocks)
        versions = [(block, self.admissible[self.where(block)]) for block in got.blocks]
        for block, version in versions:
            assert block.checksum == version
        if got.lease is None:
            return multiple()
        reading = Reading(got.lease, session, versions, got.lease.deadline)
        self.reading.append(reading)
        return reading

    @rule(target=readings, session=sessions, pick=st.integers(0, 1000), count=counts, seconds=st.floats(0.1, 5))
    def acquire_what_is_there(self, session: bytes, pick: int, count: int, seconds: float) -> object:
        there = sorted(self.visible())
        if not there:
            return multiple()
        handle, salt, first = there[pick % len(there)]
        number = next(n for n in range(100) if key(n) == first)
        return self.acquire(session, salt, self.handles.index(handle), number, count, seconds)

    @rule(reading=consumes(readings))
    def release(self, reading: Reading) -> None:
        self.forget(reading)
        self.state.release(reading.session, [reading.lease.id])

    @rule(reading=readings, lease_ms=st.integers(0, 4000))
    def renew(self, reading: Reading, lease_ms: int) -> None:
        renewed_ms = self.state.renew(reading.session, reading.lease.id, lease_ms, self.now)
        if renewed_ms:
            assert reading in self.reading
            reading.until = max(reading.until, self.now + renewed_ms / 1e3)

    def forget(self, reading: Reading) -> None:
        if reading in self.reading:
            self.reading.remove(reading)

    # ------------------------------------------------------------------ everything else

    @rule(salt=salts, size=sizes, start=starts, count=st.integers(1, 3))
    def remove(self, salt: str, size: int, start: int, count: int) -> None:
        packed = keys(range(start, start + count))
        self.state.remove(self.namespaces[size], salt, packed, self.now)
        for number in range(start, start + count):
            self.admissible.pop((self.handles[size], salt, key(number)), None)
        handle, epoch = self.handles[size], self.epochs[size]
        assert not self.state.acquire(SESSIONS[0], handle, salt, packed, 1.0, self.now, epoch).blocks

    @rule(size=sizes, really=st.integers(0, 2))
    def weights_change(self, size: int, really: int) -> None:
        """From then on nothing old is found, by readers of either epoch, and the directory forgets it all."""
        if really:
            return
        old, handle = self.epochs[size], self.handles[size]
        self.epochs[size] += 1
        self.state.set_epoch(self.namespaces[size].group, self.epochs[size], self.now)
        self.admissible = {where: version for where, version in self.admissible.items() if where[0] != handle}
        self.directory = {where for where in self.directory if where[0] != handle}
        assert not any(where[0] == handle for where in self.visible())
        for salt, epoch in ((salt, epoch) for salt in SALTS for epoch in (old, self.epochs[size])):
            got = self.state.acquire(SESSIONS[0], handle, salt, keys(range(40)), 1.0, self.now, epoch)
            assert set(got.status) == {BlockStatus.MISSING}

    @rule(limit=st.integers(1, 20))
    def sweep(self, limit: int) -> None:
        used = self.arena.bytes_used
        swept = self.state.inventory.sweep(limit)
        assert swept <= limit and self.arena.bytes_used <= used
        assert swept == limit or not self.state.inventory.retired

    @rule(seconds=st.floats(0.01, 3))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.state.expire(self.now)
        self.reading = [reading for reading in self.reading if reading.until > self.now]

    @rule(session=sessions, really=st.integers(0, 3))
    def session_ends(self, session: bytes, really: int) -> None:
        if really:
            return
        self.state.session_ended(session, self.now)
        self.reading = [reading for reading in self.reading if reading.session != session]

    @rule()
    def master_catches_up(self) -> None:
        last = self.state.deltas.close_batch()
        batches = self.state.deltas.after(self.applied)
        assert batches is not None
        for batch in batches:
            for run in batch.runs:
                if run.tier != Tier.DRAM or run.epoch != self.epochs[self.namespaces.index(run.namespace)]:
                    continue  # as a master does with weights of the past
                handle = self.handles[self.namespaces.index(run.namespace)]
                for start in range(0, len(run.hashes), 16):
                    entry = (handle, run.salt, run.hashes[start : start + 16])
                    (self.directory.add if run.added else self.directory.discard)(entry)
        self.applied = last
        self.state.deltas.trim(last)
        assert self.directory == set(self.visible())

    # ------------------------------------------------------------------ what must always hold

    def where(self, block: Block) -> Where:
        return (block.shelf.entry.handle, block.shelf.salt, block.hash)

    def visible(self) -> dict[Where, Block]:
        found = (block for block in self.state.inventory.blocks() if not block.shelf.retired)
        return {self.where(block): block for block in found if block.queue is not None}

    @invariant()
    def structure_holds(self) -> None:
        self.state.check()

    @invariant()
    def every_readable_block_has_its_bytes(self) -> None:
        for where, block in self.visible().items():
            assert holds(block, self.admissible[where]), "wrong bytes"

    @invariant()
    def leased_bytes_stay_until_the_deadline(self) -> None:
        for reading in self.reading:
            for block, version in reading.versions:
                same = block.generation == block.slab.generations[block.slot]
                assert same != block.shelf.retired, "its reader must see another generation, and no other one"
                assert holds(block, version), "bytes changed under a lease"


TestNodeMachine = NodeMachine.TestCase
TestNodeMachine.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
