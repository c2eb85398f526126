"""Channel handlers that write: reserve, then receive or pull the bytes into the slots, then commit.

The lock is held for bookkeeping only. A reservation whose bytes are on their way is marked as moving, so
that whatever ends it meanwhile cannot free its slots; what ends the move ends the mark, also by an error.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.errors import InvalidArgument
from kvstrata.proto.status import BlockStatus
from kvstrata.proto.wire import Kind
from kvstrata.storage import regions
from kvstrata.storage.messages import parsed, reply, u64s
from kvstrata.storage.receiver import mismatched, receive
from kvstrata.storage.records import Reservation
from kvstrata.storage.regions import ClientRegion, Descriptors, RegionBook
from kvstrata.storage.state import NodeState, Reserved, WriteAsk
from kvstrata.transfer.frames import Frame
from kvstrata.transfer.server import Handler, Reply
from kvstrata.transfer.sessions import ServerConnection

_ABORTED = int(BlockStatus.ABORTED)
_CORRUPT = int(BlockStatus.CORRUPT)
_RESERVED = int(BlockStatus.RESERVED)


class WriteHandlers:
    """Over one :class:`NodeState` and its lock; ``changed`` is called when something became visible."""

    def __init__(
        self,
        state: NodeState,
        lock: threading.Lock,
        region_book: RegionBook,
        changed: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._state = state
        self._lock = lock
        self._regions = region_book
        self._changed = changed
        self._clock = clock

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
        releases = u64s(message.releases)
        key = connection.owner.key
        with self._lock:
            self._state.release(key, releases)
            got = self._state.reserve(key, _ask(message), self._clock())
        return _reserved(got)

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
        return self._committed(self._received(reservation, checksums, wrong))

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
        checksums = u64s(message.checksums)
        with self._lock:
            statuses = self._state.commit(
                connection.owner.key, message.reservation, checksums, message.mask or None, self._clock()
            )
        return self._committed(statuses)

    def _abort(self, connection: ServerConnection, frame: Frame) -> Reply:
        number = parsed(pb.Abort, frame).reservation
        with self._lock:
            self._state.abort(connection.owner.key, number, self._clock())
        return reply(Kind.OK, pb.Empty())

    # ------------------------------------------------------------------ pulled

    def _pull(self, connection: ServerConnection, frame: Frame) -> Reply:
        message = parsed(pb.Pull, frame)
        checksums = u64s(message.checksums)
        releases = u64s(message.reserve.releases)
        key = connection.owner.key
        region = self._regions.find(key, message.region)
        ask = _ask(message.reserve)
        with self._lock:
            self._state.release(key, releases)
            table = self._checked(message, ask, region, checksums)
            got = self._state.reserve(key, ask, self._clock())
            if got.reservation is not None:
                self._state.start_moving(got.reservation)
        if got.reservation is None:
            return _reserved(got)
        granted = [i for i, status in enumerate(got.status) if status == _RESERVED]
        with self._moving(got.reservation):
            regions.pull(region, got.reservation.blocks, table if len(granted) == len(table) else table[granted])
        if checksums:
            return self._pulled_and_committed(got, granted, checksums)
        return self._pulled(got, granted)

    def _checked(self, message: pb.Pull, ask: WriteAsk, region: ClientRegion, checksums: Sequence[int]) -> Descriptors:
        entry = self._state.entry(ask.handle)
        count = len(ask.hashes) // entry.width
        if checksums and len(checksums) != count:
            raise InvalidArgument(f"{len(checksums)} checksums for {count} blocks")
        return regions.read_descriptors(message.descriptors, count, message.pieces, entry.block_bytes, region.nbytes)

    def _pulled(self, got: Reserved, granted: Sequence[int]) -> Reply:
        """The writer commits when it has hashed its bytes."""
        assert got.reservation is not None
        with self._lock:
            alive = self._moved(got.reservation)
        if alive:
            return _reserved(got)
        for position in granted:
            got.status[position] = _ABORTED
        return _reserved(Reserved(got.status, None, got.delta_seq))

    def _pulled_and_committed(self, got: Reserved, granted: Sequence[int], checksums: Sequence[int]) -> Reply:
        """The writer had hashed its bytes before it asked, and may have given up and reused them since."""
        assert got.reservation is not None
        expected = [checksums[i] for i in granted]
        with self._moving(got.reservation):
            wrong = mismatched(got.reservation.blocks, expected)
        done = self._received(got.reservation, expected, wrong)
        for position, status in zip(granted, done, strict=True):
            got.status[position] = status
        self._changed()
        with self._lock:
            sequence = self._state.deltas.answer_seq
        return _reserved(Reserved(got.status, None, sequence))

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

    def _committed(self, statuses: bytearray) -> Reply:
        self._changed()
        with self._lock:
            sequence = self._state.deltas.answer_seq
        return reply(Kind.COMMIT_OK, pb.CommitOk(status=bytes(statuses), delta_seq=sequence))


def _all_aborted(checksums: Sequence[int]) -> bytearray:
    return bytearray([_ABORTED]) * len(checksums)


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


def _reserved(got: Reserved) -> Reply:
    number = got.reservation.id if got.reservation is not None else 0
    return reply(Kind.RESERVE_OK, pb.ReserveOk(status=bytes(got.status), reservation=number, delta_seq=got.delta_seq))


def _check_write(reservation: Reservation, checksums: Sequence[int], raw_bytes: int) -> None:
    blocks = len(reservation.blocks)
    if len(checksums) != blocks:
        raise InvalidArgument(f"{len(checksums)} checksums for the {blocks} blocks of a reservation")
    expected = blocks * reservation.shelf.entry.block_bytes
    if raw_bytes != expected:
        raise InvalidArgument(f"{raw_bytes} bytes for {blocks} blocks: expected {expected}")
