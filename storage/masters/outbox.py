"""What one master is sent, in order: attach, snapshot, deltas, confirmations, status, detach.

A generator that blocks for at most ``BATCH_MAX_S`` at a time; gRPC pulls from it as fast as the master
takes. Each master has its own, with its own place in the delta log. What is due at a moment (:meth:`Outbox.turn`)
waits for nothing and reads no clock.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from kvstrata.proto import control_pb2 as control
from kvstrata.proto.logs import get_logger
from kvstrata.storage.masters.delta_log import DeltaBatch
from kvstrata.storage.masters.usage import Told
from kvstrata.storage.state import Holding, NodeState

log = get_logger(__name__)

#: Changes are gathered for at least this before they are sent, and looked for at most this much later.
BATCH_MIN_S: Final = 0.002
BATCH_MAX_S: Final = 0.05
#: Where changes follow changes they are sent this far apart: a message costs both ends more than a small store.
PACE_S: Final = 0.01
#: The same when the last turn had nothing to say: what becomes visible wakes it, and what leaves can wait as long.
REST_S: Final = 0.25
STATUS_S: Final = 1.0
#: Hashes in one part of a snapshot.
PART_HASHES: Final = 1 << 16
ATTACH_S: Final = 5.0

Message = control.NodeMessage


class Outbox:
    """One session's outgoing side. ``wake`` and the flags may be used from any thread."""

    def __init__(
        self,
        state: NodeState,
        lock: threading.Lock,
        attach: control.Attach,
        status: Callable[[Told], control.NodeStatus],
    ) -> None:
        self.drops: int | None = None  #: of the node's, so many are known to the master; None: it has no inventory yet
        self.attached = threading.Event()
        self.over = False
        self.beat = time.monotonic()
        self.sent_seq = 0
        self._state = state
        self._lock = lock
        self._attach = attach
        self._status = status
        self._told = Told()
        self._changed = threading.Event()
        self._hurried = threading.Event()  #: with it: there is more to say than changes of the inventory
        self._said_at = -PACE_S  #: when changes were sent last
        self._resync = True
        self._detach = ""
        self._next_status = 0.0
        self._told_all = False
        self._answers: deque[Message] = deque()

    # ------------------------------------------------------------------ from other threads

    def wake(self) -> None:
        """Something has changed."""
        if not self._changed.is_set():
            self._changed.set()

    def _hurry(self) -> None:
        """Something is to be said now."""
        self._hurried.set()
        self._changed.set()

    def resume(self, seq: int) -> bool:
        """The master has all deltas up to ``seq``: True when it needs no snapshot to go on from there.

        Drops are not among the deltas: a master that has missed one does.
        """
        with self._lock:
            log = self._state.deltas
            if not max(1, self._state.drop_seq) <= seq < log.open_seq or log.after(seq) is None:
                return False
            self.sent_seq, self._resync, self.drops = seq, False, self._state.drops
        return True

    def knows_drops(self) -> None:
        """The master itself has ordered what was dropped last."""
        self.drops = self._state.drops

    def report_soon(self) -> None:
        """Let the next report be the next that is said."""
        self._next_status = 0.0
        self._hurry()

    def resync(self) -> None:
        """The master wants a snapshot."""
        self._resync = True
        self._hurry()

    def confirm(self, done: control.CommandDone) -> None:
        self.tell(Message(done=done))

    def tell(self, message: Message) -> None:
        """Say this after the deltas of all that has happened so far."""
        self._answers.append(message)
        self._hurry()

    @property
    def waiting(self) -> int:
        """Messages of :meth:`tell` that have not had their turn yet."""
        return len(self._answers)

    def detach(self, reason: str) -> None:
        """Say goodbye after what is still to be said, and end."""
        self._detach = reason
        self._hurry()

    def end(self) -> None:
        """Say nothing more."""
        self.over = True
        self.attached.set()
        self._hurry()

    # ------------------------------------------------------------------ the stream

    def messages(self) -> Iterator[Message]:
        """Everything this session sends, until it is over."""
        yield self.opening()
        self.attached.wait(ATTACH_S)
        while not self.over:
            yield from self.turn(time.monotonic())
            if not self.over and self._changed.wait(REST_S if self._told_all else BATCH_MAX_S):
                self._gather()
                self._changed.clear()
                self._hurried.clear()

    def _gather(self) -> None:
        """Let changes come together: longer where they follow others, unless something else is to be said."""
        time.sleep(BATCH_MIN_S)
        rest = self._said_at + PACE_S - time.monotonic()
        if rest > 0:
            self._hurried.wait(rest)

    def opening(self) -> Message:
        """What comes first; the rest once the master has answered it."""
        return Message(attach=self._attach)

    def turn(self, now: float) -> Iterator[Message]:
        """What is due at ``now``: take all of it, the session is over after a goodbye."""
        self.beat = now
        yield from self._due(now)
        if self._detach:
            yield Message(detach=control.Detach(reason=self._detach))
            self.over = True
        elif now >= self._next_status:
            self._next_status = now + STATUS_S
            yield Message(status=self._status(self._told))

    def _due(self, now: float) -> Iterator[Message]:
        # Confirmations go after the deltas of what they confirm: those that are here now, after all deltas so far.
        answers = [self._answers.popleft() for _ in range(len(self._answers))]
        if self._resync or self.drops != self._state.drops:
            yield from self._snapshot()
            if self._detach and self._resync:
                return  # a goodbye does not wait for the rest of a snapshot
        with self._lock:
            self._state.deltas.close_batch()
            # A drop since: a snapshot comes first, since deltas after it would say that the master knows of it.
            known = self.drops == self._state.drops
            batches = self._state.deltas.after(self.sent_seq) if known else []
        if not known:
            self._changed.set()
        if batches is None:
            self._resync = True  # the log was trimmed past us: the next round sends a snapshot
            self._changed.set()
            batches = []
        self._told_all = not batches and not answers
        if batches:
            self._said_at = now
        for batch in batches:
            yield Message(delta=_delta(batch))
            self.sent_seq = batch.seq
        yield from answers

    def _snapshot(self) -> Iterator[Message]:
        """Shelf by shelf: later ones may already hold what deltas after the cut will say again."""
        self._resync = False
        with self._lock:
            cut = self._state.deltas.close_batch()
            self.drops = self._state.drops
            shelves = self._state.shelves()
        part = control.Snapshot(cut_seq=cut, first=True)
        room = PART_HASHES
        for inventory, key in shelves:
            if self.over or self._detach:
                self._resync = True
                return
            with self._lock:
                holding = self._state.holding(inventory, key)
            width = holding.namespace.hash_bytes
            start = 0
            while start < len(holding.hashes):
                piece = holding.hashes[start : start + room * width]
                part.holdings.append(_holding(holding, piece))
                start += len(piece)
                room -= len(piece) // width
                if not room:
                    yield Message(snapshot=part)
                    part, room = control.Snapshot(cut_seq=cut), PART_HASHES
        part.last = True
        yield Message(snapshot=part)
        self.sent_seq = cut


def _holding(holding: Holding, hashes: bytes) -> control.Holding:
    return control.Holding(
        spec=holding.namespace.to_spec(),
        salt=holding.salt,
        tier=int(holding.tier),
        hashes=hashes,
        epoch=holding.epoch,
    )


def _delta(batch: DeltaBatch) -> control.Delta:
    changes = [
        control.Change(
            added=run.added,
            spec=run.namespace.to_spec(),
            epoch=run.epoch,
            salt=run.salt,
            tier=int(run.tier),
            hashes=run.hashes,
            reason=int(run.why),
            cause=run.cause,
        )
        for run in batch.runs
    ]
    return control.Delta(seq=batch.seq, changes=changes)
