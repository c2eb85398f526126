"""A node's copier on simulated time: the shipped orders, intake and source, with the waiting of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import xxhash

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto import control_pb2 as control
from kvstrata.proto.errors import KVError
from kvstrata.proto.status import BlockStatus, Tier
from kvstrata.proto.wire import Kind
from kvstrata.storage.copying.bandwidth import Pace
from kvstrata.storage.copying.book import Answer, Copy
from kvstrata.storage.copying.copier import COPY, PIECE_S, Copier
from kvstrata.storage.copying.intake import Piece
from kvstrata.storage.copying.messages import granted_of
from tests.sim.clock import Broken, Steps
from tests.sim.memory import scribble
from tests.sim.oracle import BLOCK_BYTES
from tests.sim.wires import Conn, greeted

if TYPE_CHECKING:
    from tests.sim.node_host import NodeHost

COPIERS = 2
_LOADED, _UNKNOWN = int(BlockStatus.LOADED), int(BlockStatus.UNKNOWN)
_STORED, _CORRUPT = int(BlockStatus.STORED), int(BlockStatus.CORRUPT)


class _Orders(Copier):
    """``come`` is called when there is something to do."""

    come: Callable[[], None]

    def take(self, message: control.CopyCommand, leader_epoch: int, answer: Answer) -> None:
        super().take(message, leader_epoch, answer)
        self.come()


class SimCopier:
    """``shipped`` takes the orders; what its threads do is done here in steps."""

    def __init__(self, node: NodeHost) -> None:
        moves = node.ssd.moves if node.ssd is not None else None
        self.shipped = _Orders(node.state, node.lock, Pace(0), moves, node.changed, node.process.clock)
        self.shipped.come = lambda: node.process.after(0.001, self._begin)
        self._node = node
        self._conns: dict[str, Conn] = {}
        self._working = 0

    def _begin(self) -> None:
        if self._working < COPIERS and self._node.state.copies.waits:
            self._working += 1
            self._node.process.start(self._work())

    def _work(self) -> Steps:
        book = self._node.state.copies
        while (copy := book.next_turn()) is not None:
            yield from self._take_piece(copy)
            done = book.turn_over(copy)
            if done is not None:
                copy.answer(done)
        self._working -= 1

    def _take_piece(self, copy: Copy) -> Steps:
        """One piece of an order; how it ends is the shipped copier's rule for each error."""
        clock = self._node.process.clock
        positions = self.shipped.intake.next_piece(copy, clock())
        if not positions:
            return
        before = copy.nbytes
        try:
            yield from self._fetch(copy, positions)
        except Broken as error:
            if str(error) == "late" and clock() < copy.deadline:
                self.shipped._settle_piece(copy, positions, BlockStatus.LATE)
            else:
                copy.settle(BlockStatus.LATE if str(error) == "late" else BlockStatus.NODE_LOST)
        except KVError as error:
            copy.why = str(error)
            copy.settle(BlockStatus.REFUSED)
        self._node.state.copies.counts.taken_bytes += copy.nbytes - before
        if copy.nbytes > before:
            self._node.changed()

    def _fetch(self, copy: Copy, positions: Sequence[int]) -> Steps:
        node, intake = self._node, self.shipped.intake
        conn = self._conns.get(copy.source.channel)
        if conn is None or not conn.open:
            end = yield node.world.network.connect(node.process, copy.source.channel, 0.25)
            conn = self._conns[copy.source.channel] = yield greeted(node.process, end)
        if conn.hello.incarnation != copy.source.incarnation:
            raise Broken("another incarnation")
        opened = yield conn.ask(
            Kind.OPEN_NAMESPACE, pb.OpenNamespace(spec=copy.namespace.to_spec()).SerializeToString(), 1.0
        )
        left = max(0.001, min(copy.deadline, node.process.clock() + PIECE_S) - node.process.clock())
        message = pb.Acquire(
            ns=pb.NamespaceHandle.FromString(opened.message).handle,
            salt=copy.salt,
            hashes=b"".join(copy.hashes[position] for position in positions),
            mode=COPY,
            deadline_ms=max(1, int(left * 1e3)),
            epoch=copy.epoch,
        ).SerializeToString()
        answer = yield conn.ask(Kind.ACQUIRE, message, left)
        reply = pb.AcquireOk.FromString(answer.message)
        granted, told = granted_of(reply, copy, positions, len(answer.raw))
        for position, status in zip(positions, reply.status, strict=True):
            if status != _LOADED and copy.status[position] == _UNKNOWN:
                copy.status[position] = status
        piece = intake.admit(copy, granted, told, node.process.clock())
        if piece is None:
            return
        yield from self._receive(piece, granted, answer.raw)

    def _receive(self, piece: Piece, granted: Sequence[int], raw: bytes) -> Steps:
        """Into the piece's slots, half and half; then what came whole is published."""
        node, outcome = self._node, [_UNKNOWN] * len(piece.blocks)
        places = {position: place for place, position in enumerate(granted)}
        starts = [places[position] * BLOCK_BYTES for position in piece.positions]
        below = piece.tier == Tier.SSD
        if not below:
            scribble(piece.blocks)
        for half in (0, 1):
            yield node.rng.uniform(0.0, 0.05)
            low = half * BLOCK_BYTES // 2
            for block, start in zip(piece.blocks, starts, strict=True):
                if not below:
                    block.bytes()[low : low + BLOCK_BYTES // 2] = raw[start + low : start + low + BLOCK_BYTES // 2]
        whole: dict[int, memoryview] = {}
        for row, (block, start) in enumerate(zip(piece.blocks, starts, strict=True)):
            data = raw[start : start + BLOCK_BYTES]
            if xxhash.xxh3_64_intdigest(data) != block.checksum:
                outcome[row] = _CORRUPT
            elif below:
                whole[row] = memoryview(data)
            else:
                outcome[row] = _STORED
        self.shipped._write(piece, whole, outcome)
        with node.lock:
            self.shipped.intake.commit(piece, outcome, node.process.clock())
