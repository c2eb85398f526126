"""Threads that move bytes between DRAM and SSD, for readers that wait, for writers that want to be durable,
and in the background. What moves where, and what became of it, is :class:`TierMoves`' business.

Jobs are moves. Those that somebody waits for go before those that nobody waits for yet, and background
demotion holds back, for a bounded time a batch, while anybody waits.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from kvstrata.proto.logs import get_logger
from kvstrata.proto.status import BlockStatus
from kvstrata.storage.records import IN_FLIGHT, VISIBLE, Block
from kvstrata.storage.ssd.base import SlotHeader, SsdStore
from kvstrata.storage.tiers.moves import Move, Read, TierMoves, arrives
from kvstrata.transfer.loops import Loop, Loops

log = get_logger(__name__)

#: Threads that perform jobs: enough for two devices and for one read that hangs.
MOVERS: Final = 4
#: Batches of demotion at once: one is written while another is flushed.
DEMOTERS: Final = 2
#: One batch, one flush a device.
BATCH_BYTES: Final = 4 << 20
#: A turn of the demotion loop ends after this, however much is left.
TURN_S: Final = 1.0
DEMOTE_PERIOD_S: Final = 0.1
#: A background batch lets foreground reads go first for at most this long.
YIELD_S: Final = 0.05
#: An idle mover looks up this often, so that its age shows that it lives.
IDLE_S: Final = 0.5
#: A device that keeps a call for longer than this shows in health.
STUCK_S: Final = 20.0
#: The batch under way when the time for the last flush is over may take as long more.
LET_GO_S: Final = 1.0
#: Reads that fail are logged at most this often.
WARN_S: Final = 5.0
#: The threads' names, also in health.
_READ, _DEMOTE = "ssd-mover", "ssd-demotion"

_LOADED = int(BlockStatus.LOADED)
_LATE = int(BlockStatus.LATE)


class Movers:
    """Over one :class:`TierMoves`, the node's lock and its store; ``changed`` after something became visible."""

    def __init__(
        self,
        tiers: TierMoves,
        store: SsdStore,
        lock: threading.Lock,
        changed: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tiers = tiers
        self._store = store
        self._lock = lock
        self._changed = changed
        self._clock = clock
        self._arrived = threading.Condition(lock)
        tiers.ssd.inventory.taken_away = self._arrived.notify_all
        self._queue = threading.Condition()
        self._wanted: deque[Move] = deque()
        self._ahead: deque[Move] = deque()
        self._busy = 0
        self._stopping = False
        self._warns_at = 0.0

    def start(self, loops: Loops) -> None:
        """Begin to work; the loops' owner stops them, after :meth:`stop`."""
        for index in range(MOVERS):
            loops.add(Loop(f"{_READ}-{index}", 0.0, self._perform_one, bound_s=STUCK_S))
        for index in range(DEMOTERS):
            loops.add(Loop(f"{_DEMOTE}-{index}", DEMOTE_PERIOD_S, self._demote, bound_s=STUCK_S))

    # ------------------------------------------------------------------ for who holds the node's lock

    def fetch(self, read: Read, timeout_s: float) -> None:
        """Have a read's moves performed and wait for all it waits for, at most so long.

        Call with the lock held: it is let go of while this waits.
        """
        self._enqueue(read.moves, self._wanted)
        self._hasten(read.waits)
        self._await(lambda: not read.waiting, timeout_s)

    def ahead(self, moves: Sequence[Move]) -> None:
        """Have moves performed when nobody waits for others. Does not wait."""
        self._enqueue(moves, self._ahead)

    def write_through(self, blocks: Sequence[Block]) -> None:
        """Have blocks of one call written, as far as nobody does already. Does not wait: see :meth:`flushed`.

        Call with the lock held, and in the same hold of it that made them visible: else demotion may take them first,
        whose writes nobody hastens.
        """
        moves: list[Move] = []
        for batch in _batches(blocks):
            move = self.tiers.write_through(batch, self._clock())
            if move is not None:
                moves.append(move)
        self._enqueue(moves, self._wanted)

    def flushed(self, handle: int, salt: str, hashes: Sequence[bytes], timeout_s: float) -> bytearray:
        """1 where a block is on SSD, once this node writes none of them there any more, or after so long.

        The time for which the oldest write has been under way counts: behind a device that has not answered for as long
        as the caller would wait, nobody waits. Else each part of a store waits in its turn, and the last ones are late.

        Call with the lock held: it is let go of while this waits.
        """
        coming = self.tiers.coming(handle, salt, hashes)

        def over() -> bool:
            while coming and not arrives(coming[-1]):
                coming.pop()
            return not coming

        wait_s = timeout_s - self.tiers.writing_s(self._clock())
        if coming and wait_s > 0:
            self._await(over, wait_s)
        return self.tiers.durable(handle, salt, hashes)

    def _await(self, done: Callable[[], bool], timeout_s: float) -> None:
        """In real time, whatever the state's clock says."""
        self._arrived.wait_for(done, timeout_s)

    # ------------------------------------------------------------------ the queue

    def _enqueue(self, moves: Sequence[Move], queue: deque[Move]) -> None:
        if not moves:
            return
        with self._queue:
            if not self._stopping:
                queue.extend(moves)
                self._queue.notify(len(moves))
                return
        for move in moves:
            self._abandon(move)

    def _hasten(self, moves: Sequence[Move]) -> None:
        """Somebody waits for these now."""
        with self._queue:
            for move in moves:
                if move in self._ahead:
                    self._ahead.remove(move)
                    self._wanted.append(move)

    def _perform_one(self) -> None:
        with self._queue:
            if not self._wanted and not self._ahead:
                self._queue.wait(IDLE_S)
            queue = self._wanted or self._ahead
            if not queue:
                return
            foreground = queue is self._wanted
            move = queue.popleft()
            self._busy += foreground
        try:
            self.perform(move)
        finally:
            if foreground:
                with self._queue:
                    self._busy -= 1
                    self._queue.notify_all()

    # ------------------------------------------------------------------ bytes

    def perform(self, move: Move) -> None:
        """Move the bytes of one move, either way, and end it, also by an error. Takes the lock itself."""
        if move.up:
            self._read(move)
        else:
            self._write(move)

    def _read(self, move: Move) -> None:
        statuses: Sequence[int] = [_LATE] * len(move.source)
        try:
            if any(block.state == IN_FLIGHT for block in move.target):
                statuses = self._store.read(move.source, [block.bytes() for block in move.target])
        finally:
            with self._lock:
                self.tiers.promoted(move, statuses, self._clock())
                self._arrived.notify_all()
        self._warn(statuses)
        self._changed()

    def _warn(self, statuses: Sequence[int]) -> None:
        """Counts tell them all; the log one move in a while."""
        now = time.monotonic()
        if any(status != _LOADED for status in statuses) and now >= self._warns_at:
            self._warns_at = now + WARN_S
            log.warning("blocks could not be read from SSD", statuses=_names(statuses))

    def _write(self, move: Move) -> list[bool]:
        flushed = [False] * len(move.source)
        durable: list[bool] = []
        written = any(block.state == VISIBLE for block in move.source)
        try:
            if written:
                flushed = self._store.write(
                    [(to, header(to, of), of.bytes()) for of, to in zip(move.source, move.target, strict=True)]
                )
        finally:
            with self._lock:
                if not written:
                    self.tiers.unspent(move, self._clock())
                durable = self.tiers.demoted(move, flushed, self._clock())
                self._arrived.notify_all()
        self._changed()
        return durable

    # ------------------------------------------------------------------ background

    def _demote(self) -> None:
        """One turn: batches until there is nothing to write, or the turn's time is over."""
        until = time.monotonic() + TURN_S
        while not self._stopping and time.monotonic() < until:
            self._yield()
            with self._lock:
                move = self.tiers.demotions(BATCH_BYTES, self._clock())
            if move is None:
                return
            if not all(self._write(move)):
                return  # the device is in trouble, or the blocks went: not in a hurry then

    def _yield(self) -> None:
        """Let foreground jobs go first, for a bounded time: a stream of them must not fill DRAM with dirt."""
        with self._queue:
            self._queue.wait_for(lambda: self._stopping or not (self._wanted or self._busy), YIELD_S)

    # ------------------------------------------------------------------ end

    def stop(self, flush_s: float) -> None:
        """Take no more work, give up what has not begun, write what is only in DRAM for at most ``flush_s``."""
        with self._queue:
            self._stopping = True
            left = [*self._wanted, *self._ahead]
            self._wanted.clear()
            self._ahead.clear()
            self._queue.notify_all()
        with self._lock:
            for move in left:
                self._abandon(move)
        # In a thread of its own: a device that hangs must not hold up the stop.
        flush = threading.Thread(target=self._flush, args=(flush_s,), name="kvstrata-ssd-flush", daemon=True)
        flush.start()
        flush.join(flush_s + LET_GO_S)
        if flush.is_alive():
            log.warning("stopping: the SSD does not answer, going on without it")

    def _flush(self, flush_s: float) -> None:
        until = time.monotonic() + flush_s
        while time.monotonic() < until:
            with self._lock:
                move = self.tiers.demotions(BATCH_BYTES, self._clock(), everything=True)
            if move is None:
                break
            if not any(self._write(move)):
                log.warning("stopping: the SSD takes no more blocks", blocks=len(move.source))
                break
        else:
            log.warning("stopping: not all blocks could be written to SSD in time", seconds=flush_s)

    def _abandon(self, move: Move) -> None:
        """With the lock held: it has not begun and will not."""
        self.tiers.abandon(move, self._clock())
        self._arrived.notify_all()


def header(target: Block, source: Block) -> SlotHeader:
    """What the slot of ``target`` says when it holds a copy of ``source``."""
    return SlotHeader(
        namespace=target.shelf.entry.namespace,
        epoch=target.shelf.epoch,
        salt=target.shelf.salt,
        hash=target.hash,
        generation=target.generation,
        checksum=source.checksum,
        parent=source.before,
        index=source.index,
        written_at=time.time(),
    )


def _batches(blocks: Sequence[Block]) -> list[Sequence[Block]]:
    if not blocks:
        return []
    step = max(1, BATCH_BYTES // blocks[0].slab.slot_bytes)
    return [blocks[start : start + step] for start in range(0, len(blocks), step)]


def _names(statuses: Sequence[int]) -> dict[str, int]:
    names = [BlockStatus(status).name for status in statuses]
    return {name: names.count(name) for name in dict.fromkeys(names)}
