"""Takes copies from other nodes: threads, channels to sources, and the bytes in between.

Which blocks, where to and what became of them is :class:`CopyIntake`'s business; which order is next,
:class:`CopyBook`'s. A source that is dead, stopped or cut off ends its orders within the channel's silence bound.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import xxhash

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto import control_pb2 as control
from kvstrata.proto.errors import Busy, KVError, Unavailable
from kvstrata.proto.logs import get_logger
from kvstrata.proto.status import BlockStatus, Tier
from kvstrata.proto.wire import Kind
from kvstrata.storage.copying.bandwidth import Pace
from kvstrata.storage.copying.book import Answer, Copy
from kvstrata.storage.copying.intake import CopyIntake, Piece
from kvstrata.storage.copying.messages import copy_of, granted_of
from kvstrata.storage.records import IN_FLIGHT
from kvstrata.storage.state import NodeState
from kvstrata.storage.tiers.movers import header
from kvstrata.storage.tiers.moves import TierMoves
from kvstrata.transfer.base import Endpoint
from kvstrata.transfer.connection import Connection, expect
from kvstrata.transfer.frames import Late
from kvstrata.transfer.identity import UNIX_PREFIX, Identity, boot_id
from kvstrata.transfer.link import NodeLink
from kvstrata.transfer.loops import Loop, Loops
from kvstrata.transfer.security.tickets import TicketSource

log = get_logger(__name__)

#: Threads: one takes a piece while another waits for its source.
COPIERS: Final = 2
#: An idle copier looks up this often, so that its age shows that it lives.
IDLE_S: Final = 0.5
#: A piece that takes longer than this shows in health: a device that does not take it, or a very small bandwidth.
STUCK_S: Final = 30.0
#: A source is given this long for one piece.
PIECE_S: Final = 10.0
#: Channels to sources that are kept open.
SOURCES_MAX: Final = 16
STOP_S: Final = 2.0
#: An acquire's mode that sends bytes to another node.
COPY: Final = 3

_LOADED = int(BlockStatus.LOADED)
_UNKNOWN = int(BlockStatus.UNKNOWN)
_STORED = int(BlockStatus.STORED)
_CORRUPT = int(BlockStatus.CORRUPT)
_ABORTED = int(BlockStatus.ABORTED)

#: What a source may say of a block that it does not send.
_NOT_GIVEN: Final = frozenset((BlockStatus.MISSING, BlockStatus.CORRUPT, BlockStatus.READ_ERROR, BlockStatus.LATE))

_digest = xxhash.xxh3_64_intdigest


class Copier:
    """Over one node's state and its lock; ``changed`` is called when something became visible, ``tickets`` are what
    other nodes ask for.

    Methods may be called by any thread that does not hold the lock.
    """

    def __init__(
        self,
        state: NodeState,
        lock: threading.Lock,
        pace: Pace,
        moves: TierMoves | None = None,
        changed: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        tickets: TicketSource | None = None,
    ) -> None:
        self.intake = CopyIntake(state, moves)
        #: Called with the bytes of each block that has arrived, before they are verified: for tests.
        self.tamper: Callable[[memoryview], None] | None = None
        self._state = state
        self._book = state.copies
        self._lock = lock
        self._pace = pace
        self._changed = changed
        self._clock = clock
        self._identity = Identity.new("node", tickets=tickets)
        self._boot_id = boot_id()
        self._arrived = threading.Condition()
        self._links: OrderedDict[Endpoint, NodeLink] = OrderedDict()
        self._busy: dict[int, Connection | None] = {}
        self._stopping = False

    def start(self, loops: Loops) -> None:
        """Begin to work; the loops' owner stops them, after :meth:`stop`."""
        for index in range(COPIERS):
            loops.add(Loop(f"copier-{index}", 0.0, self._perform_one, bound_s=STUCK_S))

    def facts(self) -> dict[str, Any]:
        """For health: orders, and what was moved since the start."""
        counts = self._book.counts
        with self._lock:
            moved = {name: getattr(counts, name) for name in counts.__slots__}
            return {"orders": len(self._book), "running": self._book.running, **moved}

    # ------------------------------------------------------------------ orders

    def take(self, message: control.CopyCommand, leader_epoch: int, answer: Answer) -> None:
        """An order of a master. It is answered once, also when it is refused."""
        try:
            copy = copy_of(message, leader_epoch, answer, self._clock())
        except KVError as error:
            with self._lock:
                self._book.counts.orders_refused += 1
            log.warning("an order to copy was refused", command=message.command, reason=str(error))
            answer(control.CopyDone(command=message.command, error=str(error)))
            return
        with self._lock:
            done = self._book.take(copy) if not self._stopping else self._stopped(copy)
        if done is not None:
            answer(done)
            return
        with self._arrived:
            self._arrived.notify()

    def _stopped(self, copy: Copy) -> control.CopyDone:
        copy.settle(BlockStatus.ABORTED)
        return copy.done()

    # ------------------------------------------------------------------ the threads

    def _perform_one(self) -> None:
        with self._lock:
            copy = self._book.next_turn()
        if copy is None:
            with self._arrived:
                self._arrived.wait_for(lambda: self._stopping or self._book.waits, IDLE_S)
            return
        thread = threading.get_ident()
        self._busy[thread] = None
        try:
            self._take_piece(copy)
        except BaseException:
            with self._lock:
                copy.settle(BlockStatus.ABORTED)
                copy.why = "the node failed to take it: its log says why"
            raise
        finally:
            del self._busy[thread]
            with self._lock:
                done = self._book.turn_over(copy)
                if done is not None:
                    self._count(copy)
            if done is not None:
                if copy.why:
                    log.warning("not all of an order was copied", source=copy.source.node_id, reason=copy.why)
                copy.answer(done)

    def _count(self, copy: Copy) -> None:
        counts = self._book.counts
        for status in copy.status:
            if status in (BlockStatus.ALREADY_PRESENT, BlockStatus.IN_FLIGHT):
                counts.present += 1
            elif status == BlockStatus.MISSING:
                counts.missing += 1
            elif status == BlockStatus.CORRUPT:
                counts.corrupt += 1
            elif status in (BlockStatus.QUOTA, BlockStatus.FULL):
                counts.no_room += 1
            elif status != BlockStatus.STORED:
                counts.failed += 1
            else:
                counts.taken += 1

    def _take_piece(self, copy: Copy) -> None:
        with self._lock:
            positions = self.intake.next_piece(copy, self._clock())
        if not positions:
            return
        nbytes = len(positions) * copy.namespace.block_bytes
        if not self._pace.take(nbytes, copy.deadline, lambda: not self._stopping):
            self._settle(copy, BlockStatus.ABORTED if self._stopping else BlockStatus.LATE)
            return
        before = copy.nbytes
        try:
            self._fetch(copy, positions)
        except Late:
            if self._clock() < copy.deadline:  # one slow piece; others may fare better
                self._settle_piece(copy, positions, BlockStatus.LATE)
            else:
                self._settle(copy, BlockStatus.LATE)
        except Busy:
            self._settle(copy, BlockStatus.LATE)
        except Unavailable as error:
            copy.why = str(error)
            self._settle(copy, BlockStatus.ABORTED if self._stopping else BlockStatus.NODE_LOST)
        except KVError as error:
            copy.why = str(error)
            self._settle(copy, BlockStatus.REFUSED)
        finally:
            with self._lock:
                self._book.counts.taken_bytes += copy.nbytes - before
            self._pace.give_back(nbytes - (copy.nbytes - before))
        if copy.nbytes > before:
            self._changed()

    def _settle(self, copy: Copy, status: BlockStatus) -> None:
        """The whole order ends."""
        with self._lock:
            copy.settle(status)

    def _settle_piece(self, copy: Copy, positions: Sequence[int], status: BlockStatus) -> None:
        with self._lock:
            for position in positions:
                if copy.status[position] == _UNKNOWN:
                    copy.status[position] = status

    # ------------------------------------------------------------------ one piece

    def _fetch(self, copy: Copy, positions: Sequence[int]) -> None:
        """Ask the source, receive, verify, publish. Raises as :meth:`Channel.exchange`; then nothing is left of it."""
        deadline = min(copy.deadline, self._clock() + PIECE_S) - self._clock() + time.monotonic()
        link = self._link(copy.source)
        message = pb.Acquire(
            ns=link.handle(copy.namespace, deadline),
            salt=copy.salt,
            hashes=b"".join(copy.hashes[position] for position in positions),
            mode=COPY,
            deadline_ms=max(1, int((deadline - time.monotonic()) * 1e3)),
            epoch=copy.epoch,
        ).SerializeToString()
        with link.channel.exchange(Kind.ACQUIRE, message, deadline) as (connection, frame):
            self._busy[threading.get_ident()] = connection
            if self._stopping:
                raise Unavailable("this node is stopping")
            reply = expect(pb.AcquireOk, frame, Kind.ACQUIRE_OK)
            granted, told = granted_of(reply, copy, positions, frame.raw_bytes)
            with self._lock:
                for position, status in zip(positions, reply.status, strict=True):
                    if status != _LOADED and copy.status[position] == _UNKNOWN:
                        copy.status[position] = status if status in _NOT_GIVEN else BlockStatus.MISSING
                piece = self.intake.admit(copy, granted, told, self._clock())
            if piece is None:
                return  # what is still to come closes the connection
            outcome = [_UNKNOWN] * len(piece.blocks)
            try:
                self._receive(connection, piece, granted, outcome, deadline)
            finally:  # what has arrived whole stays, whatever became of the rest
                with self._lock:
                    self.intake.commit(piece, outcome, self._clock())

    def _receive(
        self, connection: Connection, piece: Piece, granted: Sequence[int], outcome: list[int], deadline: float
    ) -> None:
        """Fill the piece's blocks, in their slots or in a buffer on the way to SSD, and say what came of each."""
        copy, nbytes = piece.copy, piece.copy.namespace.block_bytes
        rows = {position: row for row, position in enumerate(piece.positions)}
        below = piece.tier == Tier.SSD
        memory = memoryview(bytearray(nbytes * (len(granted) if below else 1)))  # or one row, for what is not wanted
        views: list[memoryview] = []
        for place, position in enumerate(granted):
            row = rows.get(position)
            if below:
                views.append(memory[place * nbytes : (place + 1) * nbytes])
            else:
                views.append(piece.blocks[row].bytes() if row is not None else memory)
        whole: dict[int, memoryview] = {}

        def filled(place: int) -> None:
            row = rows.get(granted[place])
            if row is None:
                return
            if self.tamper is not None:
                self.tamper(views[place])
            if _digest(views[place]) != piece.blocks[row].checksum:
                outcome[row] = _CORRUPT
            elif below:
                whole[row] = views[place]
            else:
                outcome[row] = _STORED

        try:
            connection.receive_raw(views, deadline, filled)
        finally:
            self._write(piece, whole, outcome)
            if _CORRUPT in outcome:
                log.warning("blocks arrived corrupt from another node", source=copy.source.node_id)

    def _write(self, piece: Piece, whole: dict[int, memoryview], outcome: list[int]) -> None:
        """To their slots on SSD; what the device does not take is undone."""
        blocks = {row: piece.blocks[row] for row in whole if piece.blocks[row].state == IN_FLIGHT}
        if not blocks:
            return
        store = self._state.store
        assert store is not None
        written = store.write([(block, header(block, block), whole[row]) for row, block in blocks.items()])
        for row, ok in zip(blocks, written, strict=True):
            outcome[row] = _STORED if ok else _ABORTED

    # ------------------------------------------------------------------ sources

    def _link(self, source: Endpoint) -> NodeLink:
        """The channel to a source; by its unix socket when it is on this host."""
        with self._arrived:
            link = self._links.get(source)
            if link is None:
                addresses = [source.channel]
                if source.unix_path and source.boot_id == self._boot_id and Path(source.unix_path).exists():
                    addresses.insert(0, UNIX_PREFIX + source.unix_path)
                link = self._links[source] = NodeLink(source, addresses, self._identity)
            self._links.move_to_end(source)
            old = self._links.popitem(last=False)[1] if len(self._links) > SOURCES_MAX else None
        if old is not None:
            old.channel.close()
        link.channel.probe()  # a source that was away may be back
        return link

    # ------------------------------------------------------------------ end

    def stop(self, timeout_s: float = STOP_S) -> None:
        """Take no more, end what is under way: nothing of it is left after about ``timeout_s``. Safe twice."""
        self._stopping = True
        with self._lock:
            left = self._book.abandon(BlockStatus.ABORTED)
        for copy in left:
            copy.answer(copy.done())
        with self._arrived:
            self._arrived.notify_all()
            links, self._links = list(self._links.values()), OrderedDict()
        until = time.monotonic() + timeout_s
        while self._busy and time.monotonic() < until:
            for connection in list(self._busy.values()):
                if connection is not None:
                    connection.close()  # its thread finds it gone
            time.sleep(0.005)
        if self._busy:
            log.warning("stopping: a copy does not end, going on without it")
        for link in links:
            link.channel.close()
