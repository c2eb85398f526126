"""Channel handlers that write: reserve, then receive or pull the bytes into the slots, then commit.

The lock is held for bookkeeping only. A reservation whose bytes are on their way is marked as moving, so
that whatever ends it meanwhile cannot free its slots; what ends the move ends the mark, also by an error. A
one-sided transfer that outlasts its writer's deadline keeps the mark until it has settled (:mod:`.rail_pulls`).

The directory's turn comes when the writer has its answer: nobody waits for it.

With an SSD that is written through, the writing begins in the hold of the lock that makes blocks visible, and an
answer waits, for a part of its writer's deadline, until this node writes none of its blocks to SSD any more, whatever
for: then it says what is durable. Blocks are visible before that. Behind a device that hangs, answers come at once
(:meth:`Movers.flushed`): it costs stores one wait, not one a part.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.errors import InvalidArgument, Unavailable
from kvstrata.proto.status import BlockStatus
from kvstrata.proto.wire import Kind
from kvstrata.storage.leases import MARGIN_S
from kvstrata.storage.records import Reservation
from kvstrata.storage.serving import regions
from kvstrata.storage.serving.messages import parsed, reply, u64s
from kvstrata.storage.serving.permission import check_touch
from kvstrata.storage.serving.pieces import FewPieces
from kvstrata.storage.serving.rail_pulls import Taken
from kvstrata.storage.serving.rail_region import RailRegion
from kvstrata.storage.serving.rails import NodeRails
from kvstrata.storage.serving.reads import WAIT_MAX_S
from kvstrata.storage.serving.receiver import digests, mismatched, receive, receive_range
from kvstrata.storage.serving.regions import ClientRegion, Descriptors, RegionBook
from kvstrata.storage.state import NodeState, Reserved, WriteAsk
from kvstrata.storage.tiers.movers import Movers
from kvstrata.storage.tiers.ssd_policy import SsdPolicy
from kvstrata.transfer.frames import Frame
from kvstrata.transfer.server import Handler, Reply
from kvstrata.transfer.sessions import ServerConnection
from kvstrata.transfer.tracing import TRACING

#: An answer waits for flushes for at most this part of what is left of its writer's deadline: other parts of the same
#: store may follow, and need the rest.
STORE_WAIT_SHARE: Final = 0.5
#: The same of an answer that grants slots, or asks for the commit: blocks that were here before.
WAIT_SHARE_BEFORE: Final = 0.25

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
        key, until = connection.owner.key, self._until(message)
        with self._lock:
            self._state.release(key, releases)
            got = self._state.reserve(key, _ask(message), self._clock())
            durable = self._durable(message, got, until)
        return _reserved(got, durable)

    def _write(self, connection: ServerConnection, frame: Frame) -> Reply:
        message = parsed(pb.Write, frame)
        if message.nbytes:
            return self._write_range(connection, frame, message)
        checksums = u64s(message.checksums)
        key = connection.owner.key
        with self._lock:
            reservation = self._state.find_reservation(key, message.reservation)
            if reservation is not None:
                _check_range(reservation, 0, reservation.shelf.entry.block_bytes)
                _check_sent(reservation, reservation.shelf.entry.block_bytes, frame.raw_bytes, checksums)
                self._state.start_moving(reservation)
            sequence = self._state.deltas.answer_seq
        if reservation is None:
            return self._committed(_all_aborted(checksums), sequence)
        with self._moving(reservation):
            wrong = receive(connection, reservation.blocks, checksums)
        statuses, sequence = self._received(reservation, checksums, wrong)
        return self._committed(statuses, sequence, self._flushed(reservation, statuses))

    def _write_range(self, connection: ServerConnection, frame: Frame, message: pb.Write) -> Reply:
        """The next bytes of every block; the last ones come with checksums, and commit."""
        checksums, key = u64s(message.checksums), connection.owner.key
        with self._lock:
            reservation = self._state.find_reservation(key, message.reservation)
            if reservation is not None:
                _check_range(reservation, message.at, message.nbytes)
                last = message.at + message.nbytes == reservation.shelf.entry.block_bytes
                _check_sent(reservation, message.nbytes, frame.raw_bytes, checksums if last else None)
                self._state.start_moving(reservation)
            sequence = self._state.deltas.answer_seq
        if reservation is None:
            return self._committed(bytearray(), sequence)
        with self._moving(reservation):
            receive_range(connection, reservation, message.nbytes)
        if last:
            found = [state.intdigest() for state in reservation.hashing]
            wrong = [i for i, (digest, expected) in enumerate(zip(found, checksums, strict=True)) if digest != expected]
            statuses, sequence = self._received(reservation, checksums, wrong)
            return self._committed(statuses, sequence, self._flushed(reservation, statuses))
        with self._lock:
            status = _RESERVED if self._moved(reservation, message.nbytes) else _ABORTED
        return self._committed(bytearray((status,)) * len(reservation.blocks), sequence)

    def _received(
        self, reservation: Reservation, checksums: Sequence[int], wrong: Sequence[int]
    ) -> tuple[bytearray, int]:
        """Commit what arrived whole: a status each, and the number to answer with."""
        mask = None
        if wrong:
            mask = bytearray(b"\1") * len(checksums)
            for position in wrong:
                mask[position] = 0
        with self._lock:
            self._state.counts.corrupt += len(wrong)
            if self._moved(reservation):
                key, now = reservation.session, self._clock()
                statuses = self._state.commit(key, reservation.id, checksums, mask, now)
                self._write_through(reservation, statuses)
            else:
                statuses = _all_aborted(checksums)
            sequence = self._state.deltas.answer_seq
        for position in wrong:
            statuses[position] = _CORRUPT
        return statuses, sequence

    def _commit(self, connection: ServerConnection, frame: Frame) -> Reply:
        message = parsed(pb.Commit, frame)
        checksums: Sequence[int] = u64s(message.checksums)
        key = connection.owner.key
        with self._lock:
            reservation = self._state.find_reservation(key, message.reservation)
            if reservation is not None:
                _check_whole(reservation)
                checksums = reservation.digests or checksums
            statuses = self._state.commit(key, message.reservation, checksums, message.mask or None, self._clock())
            if reservation is not None:
                self._write_through(reservation, statuses)
            sequence = self._state.deltas.answer_seq
        durable = self._flushed(reservation, statuses) if reservation is not None else b""
        return self._committed(statuses, sequence, durable)

    def _abort(self, connection: ServerConnection, frame: Frame) -> Reply:
        number = parsed(pb.Abort, frame).reservation
        with self._lock:
            self._state.abort(connection.owner.key, number, self._clock())
        return reply(Kind.OK, pb.Empty())

    # ------------------------------------------------------------------ pulled

    def _pull(self, connection: ServerConnection, frame: Frame) -> Reply:
        message = parsed(pb.Pull, frame)
        if not message.reservation:
            check_touch(connection, self._state, message.reserve)
        checksums = u64s(message.checksums)
        releases = u64s(message.reserve.releases)
        key = connection.owner.key
        region = self._regions.find(key, message.region)
        if isinstance(region, RailRegion) and self._pulls is not None and not message.reservation:
            self._pulls.admit(key)
        ask, until = _ask(message.reserve), self._until(message.reserve)
        with self._lock:
            if message.reservation:
                got, table = self._going_on(key, message, region)
            else:
                self._state.release(key, releases)
                table = self._checked(message, ask, region, checksums)
                got = self._state.reserve(key, ask, self._clock())
            if got.reservation is None:
                return _reserved(got, self._durable(message.reserve, got, until))
            self._state.start_moving(got.reservation)
        whole = len(got.reservation.blocks) == len(got.status)
        granted = range(len(got.status)) if whole else [i for i, s in enumerate(got.status) if s == _RESERVED]
        wanted = table if whole else table[granted]
        if isinstance(region, RailRegion):
            assert self._pulls is not None and not isinstance(wanted, FewPieces)
            with TRACING.span("kvstrata.node.copy"):
                taken, problem = self._pulls.take(region, got.reservation, wanted, message.at)
            if taken is not Taken.ARRIVED:
                with self._lock:
                    durable = self._durable(message.reserve, got, until) if taken is not Taken.FAILED else b""
                return _not_taken(taken, problem, got, granted, durable)
        expected = checksums if whole else [checksums[i] for i in granted] if checksums else ()
        with self._moving(got.reservation):
            blocks = got.reservation.blocks
            if not isinstance(region, RailRegion):
                with TRACING.span("kvstrata.node.copy"):
                    regions.pull(region, blocks, wanted, message.at)
            # Without checksums nothing is visible before the writer has heard that its bytes were read: it may have
            # given up and reused them.
            wrong = mismatched(blocks, expected) if expected else ()
            if message.hash_here:
                got.reservation.digests = digests(blocks)
        if expected:
            return self._pulled_and_committed(message.reserve, got, granted, expected, wrong, until)
        return self._pulled(message, got, granted, until)

    def _going_on(self, key: bytes, message: pb.Pull, region: ClientRegion) -> tuple[Reserved, Descriptors | FewPieces]:
        """The next range of what an earlier pull reserved, as if it was reserved now; nothing where that has ended."""
        reservation = self._state.find_reservation(key, message.reservation)
        if reservation is None:
            return Reserved(bytearray(), None, self._state.deltas.answer_seq), FewPieces([], 1)
        if message.checksums or message.hash_here or not message.nbytes:
            raise InvalidArgument("a range of a reservation's blocks has nbytes, and neither checksums nor hash_here")
        _check_range(reservation, message.at, message.nbytes)
        count = len(reservation.blocks)
        table = regions.read_pieces(message.descriptors, count, message.pieces, message.nbytes, region)
        return Reserved(bytearray((_RESERVED,)) * count, reservation, self._state.deltas.answer_seq), table

    def _checked(
        self, message: pb.Pull, ask: WriteAsk, region: ClientRegion, checksums: Sequence[int]
    ) -> Descriptors | FewPieces:
        entry = self._state.entry(ask.handle)
        count = len(ask.hashes) // entry.width
        if checksums and (message.hash_here or len(checksums) != count):
            raise InvalidArgument(f"{len(checksums)} checksums for {count} blocks: one each, or none and hash_here")
        if message.at or message.nbytes > entry.block_bytes:
            raise InvalidArgument(f"bytes {message.at} and on, {message.nbytes} of them: the first range begins at 0")
        if message.nbytes and (checksums or message.hash_here):
            raise InvalidArgument("a range of blocks is pulled without checksums and without hash_here")
        nbytes = message.nbytes or entry.block_bytes
        return regions.read_pieces(message.descriptors, count, message.pieces, nbytes, region)

    def _pulled(self, message: pb.Pull, got: Reserved, granted: Sequence[int], until: float) -> Reply:
        """The writer commits when it has hashed its bytes, or has heard that this node has."""
        assert got.reservation is not None
        with self._lock:
            alive = self._moved(got.reservation, message.nbytes)
            if not alive:
                for position in granted:
                    got.status[position] = _ABORTED
            durable = self._durable(message.reserve, got, until)
        return _reserved(got, durable, held=alive)

    def _pulled_and_committed(
        self,
        ask: pb.Reserve,
        got: Reserved,
        granted: Sequence[int],
        expected: Sequence[int],
        wrong: Sequence[int],
        until: float,
    ) -> Reply:
        """The writer had hashed its bytes before it asked, and may have given up and reused them since."""
        assert got.reservation is not None
        done, sequence = self._received(got.reservation, expected, wrong)
        for position, status in zip(granted, done, strict=True):
            got.status[position] = status
        if self._through and _STORED in got.status:
            self._changed()
        with self._lock:
            durable = self._durable(ask, got, until)
        answer = pb.ReserveOk(status=bytes(got.status), delta_seq=sequence, durable=durable if any(durable) else b"")
        return Reply(Kind.RESERVE_OK, answer.SerializeToString(), after=self._changed)

    # ------------------------------------------------------------------ on SSD

    def _until(self, ask: pb.Reserve) -> float:
        """When the writer gives up."""
        return self._clock() + ask.deadline_ms / 1e3

    @property
    def _through(self) -> bool:
        return self._movers is not None and self._movers.tiers.policy is SsdPolicy.WRITE_THROUGH

    def _write_through(self, reservation: Reservation, statuses: Sequence[int]) -> None:
        """With the lock held, right after the commit: what it has stored is to be written, if this node does that."""
        if self._through and _STORED in statuses:
            assert self._movers is not None
            blocks = reservation.blocks
            stored = [block for block, status in zip(blocks, statuses, strict=True) if status == _STORED]
            self._movers.write_through(stored)

    def _flushed(self, reservation: Reservation, statuses: Sequence[int]) -> bytes:
        """What an answer to a commit says is on SSD: u8 a block, or nothing."""
        if not self._through or _STORED not in statuses:
            return b""
        shelf, until = reservation.shelf, reservation.deadline - MARGIN_S
        hashes = [block.hash for block in reservation.blocks]
        self._changed()
        with self._lock:
            return self._on_ssd(shelf.entry.handle, shelf.salt, hashes, until, STORE_WAIT_SHARE)

    def _durable(self, ask: pb.Reserve, got: Reserved, until: float) -> bytes:
        """The same of an answer to a reserve or a pull, for what was here before it, too. With the lock held.

        While slots are to be filled, or the commit is to come, the writer needs most of its time for that.
        """
        status = got.status
        if self._movers is None or (_PRESENT not in status and not (self._through and _STORED in status)):
            return b""
        width = len(ask.hashes) // len(status)
        hashes = [ask.hashes[i * width : (i + 1) * width] for i in range(len(status))]
        share = WAIT_SHARE_BEFORE if _RESERVED in status else STORE_WAIT_SHARE
        return self._on_ssd(ask.ns, ask.salt, hashes, until, share)

    def _on_ssd(self, handle: int, salt: str, hashes: Sequence[bytes], until: float, share: float) -> bytes:
        """1 where a block is flushed. A node that writes through waits for what it is writing, for a ``share`` of the
        time until its writer gives up.

        With the lock held: it is let go of while this waits."""
        movers = self._movers
        assert movers is not None
        if not self._through:
            return bytes(movers.tiers.durable(handle, salt, hashes))
        return bytes(movers.flushed(handle, salt, hashes, min((until - self._clock()) * share, WAIT_MAX_S)))

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

    def _moved(self, reservation: Reservation, nbytes: int = 0) -> bool:
        """Its blocks' next ``nbytes`` have arrived, or all that was left; False when it has ended meanwhile."""
        nbytes = nbytes or reservation.shelf.entry.block_bytes - reservation.arrived
        reservation.arrived += nbytes
        self._state.counts.bytes_in += len(reservation.blocks) * nbytes
        return self._state.moved(reservation, self._clock())

    def _committed(self, statuses: bytearray, sequence: int, durable: bytes = b"") -> Reply:
        answer = pb.CommitOk(status=bytes(statuses), delta_seq=sequence, durable=durable if any(durable) else b"")
        return Reply(Kind.COMMIT_OK, answer.SerializeToString(), after=self._changed)


def _all_aborted(checksums: Sequence[int]) -> bytearray:
    return bytearray([_ABORTED]) * len(checksums)


def _not_taken(taken: Taken, problem: str, got: Reserved, granted: Sequence[int], durable: bytes) -> Reply:
    """Nothing was stored of what was granted. A failure is the rail's, so the connection stays."""
    if taken is Taken.FAILED:
        return reply(Kind.FAILURE, pb.Failure(code=Unavailable.__name__, message=f"the rail failed: {problem}"))
    for position in granted:
        got.status[position] = _PENDING if taken is Taken.PENDING else _LATE
    return _reserved(got, durable, held=False)


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


def _reserved(got: Reserved, durable: bytes = b"", *, held: bool = True) -> Reply:
    """``held``: the writer is to be told of the reservation."""
    answer = pb.ReserveOk(
        status=bytes(got.status),
        reservation=got.reservation.id if held and got.reservation is not None else 0,
        delta_seq=got.delta_seq,
        durable=durable if any(durable) else b"",
    )
    return reply(Kind.RESERVE_OK, answer)


def _check_whole(reservation: Reservation) -> None:
    """Slots hold what was in them before until they are written: another tenant's bytes."""
    if reservation.arrived < reservation.shelf.entry.block_bytes and not reservation.busy:
        raise InvalidArgument(
            f"reservation {reservation.id} was not written whole: send its bytes, or have them pulled, first"
        )


def _check_range(reservation: Reservation, at: int, nbytes: int) -> None:
    """Ranges come in order, each when the one before it has arrived."""
    left = reservation.shelf.entry.block_bytes - reservation.arrived
    if at != reservation.arrived or not 0 < nbytes <= left:
        raise InvalidArgument(
            f"{nbytes} bytes from {at} on, of blocks of which {reservation.arrived} have arrived and {left} are to "
            "come: send ranges in order"
        )


def _check_sent(reservation: Reservation, nbytes: int, raw_bytes: int, checksums: Sequence[int] | None) -> None:
    """``nbytes`` of every block, and a checksum each where ``checksums`` are to come."""
    blocks = len(reservation.blocks)
    if checksums is not None and len(checksums) != blocks:
        raise InvalidArgument(f"{len(checksums)} checksums for the {blocks} blocks of a reservation")
    if raw_bytes != blocks * nbytes:
        raise InvalidArgument(f"{raw_bytes} bytes for {blocks} blocks: expected {blocks * nbytes}")
