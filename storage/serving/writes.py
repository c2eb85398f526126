"""Channel handlers that write: reserve, then receive or pull the bytes into the slots, then commit.

The lock is held for bookkeeping only. A reservation whose bytes are on their way is marked as moving, so
that whatever ends it meanwhile cannot free its slots; what ends the move ends the mark, also by an error. A
one-sided transfer that outlasts its writer's deadline keeps the mark until it has settled (:mod:`.rail_pulls`).

With an SSD that is written through, an answer waits for the flush within its writer's deadline, and says what
is durable. Blocks are visible before that.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.errors import InvalidArgument, Unavailable
from kvstrata.proto.status import BlockStatus
from kvstrata.proto.wire import Kind
from kvstrata.storage.leases import MARGIN_S
from kvstrata.storage.records import Reservation
from kvstrata.storage.serving import regions
from kvstrata.storage.serving.messages import parsed, reply, u64s
from kvstrata.storage.serving.permission import check_touch
from kvstrata.storage.serving.rail_pulls import Taken
from kvstrata.storage.serving.rail_region import RailRegion
from kvstrata.storage.serving.rails import NodeRails
from kvstrata.storage.serving.receiver import digests, mismatched, receive
from kvstrata.storage.serving.regions import ClientRegion, Descriptors, RegionBook
from kvstrata.storage.state import NodeState, Reserved, WriteAsk
from kvstrata.storage.tiers.movers import Movers
from kvstrata.storage.tiers.ssd_policy import SsdPolicy
from kvstrata.transfer.frames import Frame
from kvstrata.transfer.server import Handler, Reply
from kvstrata.transfer.sessions import ServerConnection
from kvstrata.transfer.tracing import TRACING

_ABORTED = int(BlockStatus.ABORTED)
_LATE = int(BlockStatus.LATE)
_PENDING = int(BlockStatus.PENDING)
_CORRUPT = int(BlockStatus.CORRUPT)
_RESERVED = int(BlockStatus.RESERVED)
_STORED = int(BlockStatus.STORED)
_PRESENT = int(BlockStatus.ALREADY_PRESENT)


class WriteHandlers:
    """Over one :class:`NodeState` and its lock; ``changed`` is called when something became visible.

    ``movers`` when the node has an SSD, ``rails`` when it can take bytes by one-sided transfers.
    """

    def __init__(
        self,
        state: NodeState,
        lock: threading.Lock,
        region_book: RegionBook,
        changed: Callable[[], None],
        clock: Callable[[], float],
        movers: Movers | None = None,
        rails: NodeRails | None = None,
    ) -> None:
        self._state = state
        self._lock = lock
        self._regions = region_book
        self._changed = changed
        self._clock = clock
        self._movers = movers
        self._pulls = rails.pulls if rails is not None else None

    def handlers(self) -> dict[int, Handler]:
        return {
            Kind.RESERVE: self._reserve,
            Kind.WRITE: self._write,
            Kind.PULL: self._pull,
            Kind.COMMIT: self._commit,
            Kind.ABORT: self._abort,
        }

    # ------------------------------------------------------------------ in two halves

    def _reserve(self, connection: ServerConnection, frame: Frame) -> Reply:
        message = parsed(pb.Reserve, frame)
        check_touch(connection, self._state, message)
        releases = u64s(message.releases)
        key = connection.owner.key
        with self._lock:
            self._state.release(key, releases)
            got = self._state.reserve(key, _ask(message), self._clock())
            durable = self._present_on_ssd(message, got.status)
        return _reserved(got, durable)

    def _write(self, connection: ServerConnection, frame: Frame) -> Reply:
        message = parsed(pb.Write, frame)
        checksums = u64s(message.checksums)
        key = connection.owner.key
        with self._lock:
            reservation = self._state.find_reservation(key, message.reservation)
            if reservation is not None:
                _check_write(reservation, checksums, frame.raw_bytes)
                self._state.start_moving(reservation)
        if reservation is None:
            return self._committed(_all_aborted(checksums))
        with self._moving(reservation):
            wrong = receive(connection, reservation.blocks, checksums)
        statuses = self._received(reservation, checksums, wrong)
        return self._committed(statuses, self._written_through(reservation, statuses))

    def _received(self, reservation: Reservation, checksums: Sequence[int], wrong: Sequence[int]) -> bytearray:
        """Commit what arrived whole."""
        mask = None
        if wrong:
            mask = bytearray(b"\1") * len(checksums)
            for position in wrong:
                mask[position] = 0
        statuses = self._finish(reservation, checksums, mask)
        for position in wrong:
            statuses[position] = _CORRUPT
        if wrong:
            with self._lock:
                self._state.counts.corrupt += len(wrong)
        return statuses

    def _commit(self, connection: ServerConnection, frame: Frame) -> Reply:
        message = parsed(pb.Commit, frame)
        checksums: Sequence[int] = u64s(message.checksums)
        key = connection.owner.key
        with self._lock:
            reservation = self._state.find_reservation(key, message.reservation)
            if reservation is not None and reservation.digests:
                checksums = reservation.digests
            statuses = self._state.commit(key, message.reservation, checksums, message.mask or None, self._clock())
        durable = self._written_through(reservation, statuses) if reservation is not None else b""
        return self._committed(statuses, durable)

    def _abort(self, connection: ServerConnection, frame: Frame) -> Reply:
        number = parsed(pb.Abort, frame).reservation
        with self._lock:
            self._state.abort(connection.owner.key, number, self._clock())
        return reply(Kind.OK, pb.Empty())

    # ------------------------------------------------------------------ pulled

    def _pull(self, connection: ServerConnection, frame: Frame) -> Reply:
        message = parsed(pb.Pull, frame)
        check_touch(connection, self._state, message.reserve)
        checksums = u64s(message.checksums)
        releases = u64s(message.reserve.releases)
        key = connection.owner.key
        region = self._regions.find(key, message.region)
        if isinstance(region, RailRegion) and self._pulls is not None:
            self._pulls.admit(key)
        ask = _ask(message.reserve)
        with self._lock:
            self._state.release(key, releases)
            table = self._checked(message, ask, region, checksums)
            got = self._state.reserve(key, ask, self._clock())
            if got.reservation is not None:
                self._state.start_moving(got.reservation)
            durable = self._present_on_ssd(message.reserve, got.status)
        if got.reservation is None:
            return _reserved(got, durable)
        granted = [i for i, status in enumerate(got.status) if status == _RESERVED]
        wanted = table if len(granted) == len(table) else table[granted]
        if isinstance(region, RailRegion):
            assert self._pulls is not None
            with TRACING.span("kvstrata.node.copy"):
                taken, problem = self._pulls.take(region, got.reservation, wanted)
            if taken is not Taken.ARRIVED:
                return _not_taken(taken, problem, got, granted, durable)
        else:
            with self._moving(got.reservation), TRACING.span("kvstrata.node.copy"):
                regions.pull(region, got.reservation.blocks, wanted)
        if checksums:
            return self._pulled_and_committed(got, granted, [checksums[i] for i in granted], durable)
        if message.hash_here:
            # Not visible before the writer has heard that its bytes were read: it may have given up and reused them.
            with self._moving(got.reservation):
                got.reservation.digests = digests(got.reservation.blocks)
        return self._pulled(got, granted, durable)

    def _checked(self, message: pb.Pull, ask: WriteAsk, region: ClientRegion, checksums: Sequence[int]) -> Descriptors:
        entry = self._state.entry(ask.handle)
        count = len(ask.hashes) // entry.width
        if checksums and (message.hash_here or len(checksums) != count):
            raise InvalidArgument(f"{len(checksums)} checksums for {count} blocks: one each, or none and hash_here")
        return regions.read_descriptors(message.descriptors, count, message.pieces, entry.block_bytes, region.nbytes)

    def _pulled(self, got: Reserved, granted: Sequence[int], durable: bytes) -> Reply:
        """The writer commits when it has hashed its bytes, or has heard that this node has."""
        assert got.reservation is not None
        with self._lock:
            alive = self._moved(got.reservation)
        if alive:
            return _reserved(got, durable)
        for position in granted:
            got.status[position] = _ABORTED
        return _reserved(Reserved(got.status, None, got.delta_seq), durable)

    def _pulled_and_committed(
        self, got: Reserved, granted: Sequence[int], expected: Sequence[int], durable: bytes
    ) -> Reply:
        """The writer had hashed its bytes before it asked, and may have given up and reused them since."""
        assert got.reservation is not None
        with self._moving(got.reservation):
            wrong = mismatched(got.reservation.blocks, expected)
        done = self._received(got.reservation, expected, wrong)
        for position, status in zip(granted, done, strict=True):
            got.status[position] = status
        self._changed()
        flushed = bytearray(durable or len(got.status))
        for position, flag in zip(granted, self._written_through(got.reservation, done), strict=False):
            flushed[position] = flag
        with self._lock:
            sequence = self._state.deltas.answer_seq
        return _reserved(Reserved(got.status, None, sequence), bytes(flushed))

    # ------------------------------------------------------------------ on SSD

    def _present_on_ssd(self, message: pb.Reserve, statuses: bytearray) -> bytes:
        """u8 a block: 1 where it was here before, and on SSD. With the lock held. Empty without an SSD."""
        if self._movers is None or _PRESENT not in statuses:
            return b""
        width = len(message.hashes) // len(statuses)
        hashes = [message.hashes[i * width : (i + 1) * width] for i in range(len(statuses))]
        return bytes(self._movers.tiers.durable(message.ns, message.salt, hashes))

    def _written_through(self, reservation: Reservation, statuses: Sequence[int]) -> bytes:
        """Wait for what has been stored to be flushed, if this node writes through: u8 a block, or nothing."""
        movers = self._movers
        if movers is None or movers.tiers.policy is not SsdPolicy.WRITE_THROUGH:
            return b""
        stored = [block for block, status in zip(reservation.blocks, statuses, strict=True) if status == _STORED]
        shelf = reservation.shelf
        with self._lock:
            movers.write_through(stored, reservation.deadline - MARGIN_S - self._clock())
            hashes = [block.hash for block in reservation.blocks]
            return bytes(movers.tiers.durable(shelf.entry.handle, shelf.salt, hashes))

    # ------------------------------------------------------------------ ends of a move

    @contextlib.contextmanager
    def _moving(self, reservation: Reservation) -> Iterator[None]:
        """Bytes move inside; when that fails, nothing of the reservation remains."""
        try:
            yield
        except BaseException:
            with self._lock:
                now = self._clock()
                if self._state.moved(reservation, now):
                    self._state.abort(reservation.session, reservation.id, now)
            raise

    def _finish(self, reservation: Reservation, checksums: Sequence[int], mask: Sequence[int] | None) -> bytearray:
        """The bytes are in the slots: commit, if the reservation still stands."""
        with self._lock:
            if not self._moved(reservation):
                return _all_aborted(checksums)
            return self._state.commit(reservation.session, reservation.id, checksums, mask, self._clock())

    def _moved(self, reservation: Reservation) -> bool:
        self._state.counts.bytes_in += len(reservation.blocks) * reservation.shelf.entry.block_bytes
        return self._state.moved(reservation, self._clock())

    def _committed(self, statuses: bytearray, durable: bytes = b"") -> Reply:
        self._changed()
        with self._lock:
            sequence = self._state.deltas.answer_seq
        answer = pb.CommitOk(status=bytes(statuses), delta_seq=sequence, durable=durable if any(durable) else b"")
        return reply(Kind.COMMIT_OK, answer)


def _all_aborted(checksums: Sequence[int]) -> bytearray:
    return bytearray([_ABORTED]) * len(checksums)


def _not_taken(taken: Taken, problem: str, got: Reserved, granted: Sequence[int], durable: bytes) -> Reply:
    """Nothing was stored of what was granted. A failure is the rail's, so the connection stays."""
    if taken is Taken.FAILED:
        return reply(Kind.FAILURE, pb.Failure(code=Unavailable.__name__, message=f"the rail failed: {problem}"))
    for position in granted:
        got.status[position] = _PENDING if taken is Taken.PENDING else _LATE
    return _reserved(Reserved(got.status, None, got.delta_seq), durable)


def _ask(message: pb.Reserve) -> WriteAsk:
    return WriteAsk(
        handle=message.ns,
        salt=message.salt,
        hashes=message.hashes,
        parent=message.parent,
        first_index=message.first_index,
        deadline_ms=message.deadline_ms,
        epoch=message.epoch,
    )


def _reserved(got: Reserved, durable: bytes = b"") -> Reply:
    answer = pb.ReserveOk(
        status=bytes(got.status),
        reservation=got.reservation.id if got.reservation is not None else 0,
        delta_seq=got.delta_seq,
        durable=durable if any(durable) else b"",
    )
    return reply(Kind.RESERVE_OK, answer)


def _check_write(reservation: Reservation, checksums: Sequence[int], raw_bytes: int) -> None:
    blocks = len(reservation.blocks)
    if len(checksums) != blocks:
        raise InvalidArgument(f"{len(checksums)} checksums for the {blocks} blocks of a reservation")
    expected = blocks * reservation.shelf.entry.block_bytes
    if raw_bytes != expected:
        raise InvalidArgument(f"{raw_bytes} bytes for {blocks} blocks: expected {expected}")
