"""The state, its lock, its clock, and whoever carries out its commands.

Every thread of the master comes through here: channel connections, sync streams, HTTP, the tick.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from kvstrata.master import messages as m
from kvstrata.master.content.lookups import LookedUp
from kvstrata.master.directory.probing import Keys
from kvstrata.master.directory.table import fold
from kvstrata.master.journal import Journal
from kvstrata.master.metrics import Metrics
from kvstrata.master.namespaces import Opened
from kvstrata.master.placement import Placed
from kvstrata.master.reuse.lookup_log import Call, LookupLog
from kvstrata.master.reuse.what_if import WhatIf
from kvstrata.master.state import MasterState
from kvstrata.master.stores.base import StateStore
from kvstrata.proto.errors import InvalidArgument, Unavailable
from kvstrata.proto.keys import HASHES_MAX, Namespace, check_salt
from kvstrata.proto.logs import get_logger
from kvstrata.transfer.loops import Loop, Loops

log = get_logger(__name__)

T = TypeVar("T")

TICK_S: Final = 0.25
#: A store that refused a write is tried again after this.
RETRY_S: Final = 1.0
STALLED_DISK_S: Final = 10.0
#: Steps of sharing limits out that one tick makes at most, and the pause after each.
BALANCE_STEPS: Final = 10
BALANCE_BREATH_S: Final = 0.001
OUTBOX_MAX: Final = 20_000
#: A node that has this much to read yet is spared hints.
HINTS_BEHIND_MAX: Final = 256
REMOVE_DEADLINE_MAX_S: Final = 10.0
#: How often a removal that waits for its nodes looks again, should a wake-up be missed.
REMOVE_POLL_S: Final = 0.05


class Outbox:
    """Commands on their way to one node. ``closed`` holds the reason once the session is over."""

    def __init__(self) -> None:
        self._queue: deque[m.Send] = deque()
        self._changed = threading.Condition()
        self.closed: str | None = None

    def put(self, command: m.Send) -> None:
        with self._changed:
            if isinstance(command, m.SendHint | m.SendSurplus) and len(self._queue) >= HINTS_BEHIND_MAX:
                return
            if self.closed is None and len(self._queue) >= OUTBOX_MAX:
                self.closed = "the node does not read what it is sent"
            if isinstance(command, m.SendAck) and self._queue and isinstance(self._queue[-1], m.SendAck):
                self._queue.pop()  # the newer acknowledgement says it all
            self._queue.append(command)
            self._changed.notify()

    def close(self, reason: str) -> None:
        with self._changed:
            self.closed = self.closed or reason
            self._changed.notify()

    def get(self, timeout_s: float) -> m.Send | None:
        """The next command; None after ``timeout_s`` without one, or when closed and empty."""
        with self._changed:
            if not self._queue and self.closed is None:
                self._changed.wait(timeout_s)
            return self._queue.popleft() if self._queue else None


@dataclass(frozen=True, slots=True)
class Removed:
    removed: int
    unreached: list[str]


class Hub:
    """Thread-safe face of :class:`MasterState`."""

    def __init__(
        self,
        store: StateStore,
        rng: random.Random,
        grace_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.started_at = clock()
        self.cluster_id = store.cluster_id()
        self.journal = Journal(store)
        self.metrics = Metrics()
        self._clock = clock
        self._lock = threading.Lock()
        self._confirmed = threading.Condition(self._lock)
        self._state = MasterState(clock(), rng, store.load(), grace_s)
        self.lookup_log = LookupLog(WhatIf(random.Random(rng.getrandbits(64))))
        self._outboxes: dict[int, Outbox] = {}
        self._writer: Loop | None = None

    def start(self, loops: Loops) -> None:
        """Begin to tick, and to write what becomes durable; a slow disk holds up neither nodes nor clients."""
        loops.add(Loop("tick", TICK_S, self._tick))
        loops.add(Loop("what if", TICK_S, self._hear))
        self._writer = loops.add(Loop("journal", RETRY_S, self._write_out, bound_s=STALLED_DISK_S))

    def _tick(self) -> None:
        """Time passed. What is due of sharing limits out is done in steps, between which others have the lock."""
        self.handle(m.Tick())
        for _ in range(BALANCE_STEPS):
            with self._lock:
                commands = self._state.rebalance(self._clock())
                self._deliver(commands or [])
            if commands is None:
                break
            self._settle(commands)
            time.sleep(BALANCE_BREATH_S)

    def _write_out(self) -> None:
        with self._lock:
            serial = self._state.quotas.saved_serial
        if self.journal.flush():
            with self._lock:
                commands = self._state.grants_saved(serial, self._clock())
                self._deliver(commands)
            self._settle(commands)

    def _hear(self) -> None:
        self.lookup_log.hear()

    # ------------------------------------------------------------------ events

    def handle(self, event: m.Event) -> None:
        """Take an event in and carry out what follows."""
        with self._lock:
            commands = self._state.handle(event, self._clock())
            self._deliver(commands)
            if isinstance(event, m.CommandDone):
                self._confirmed.notify_all()
        self._settle(commands)

    def attach(self, event: m.Attach) -> tuple[int, Outbox]:
        """Begin a session: its id, and where its commands will appear.

        Raises :class:`Unavailable` when the state will not have it.
        """
        outbox = Outbox()
        with self._lock:
            commands = self._state.handle(event, self._clock())
            session = next((c.session for c in commands if isinstance(c, m.SendAttached)), None)
            if session is not None:
                self._outboxes[session] = outbox
            self._deliver(commands)
        self._settle(commands)
        if session is None:
            refusal = next((c.reason for c in commands if isinstance(c, m.CloseSession)), "refused")
            raise Unavailable(f"node {event.facts.node_id} cannot attach: {refusal}")
        return session, outbox

    def link_lost(self, session: int) -> None:
        """The stream of ``session`` ended."""
        with self._lock:
            self._outboxes.pop(session, None)
        self.handle(m.LinkLost(session))

    def close_sessions(self, reason: str) -> None:
        """End every sync stream; the nodes look for another master, or wait for this one."""
        with self._lock:
            for outbox in self._outboxes.values():
                outbox.close(reason)

    def _deliver(self, commands: Sequence[m.Command]) -> None:
        """Hand commands to sessions and writes to the journal, under the lock: their order is that of events."""
        self.journal.add(command for command in commands if isinstance(command, m.Save))
        for command in commands:
            if isinstance(command, m.CloseSession):
                outbox = self._outboxes.pop(command.session, None)
                if outbox is not None:
                    outbox.close(command.reason)
            elif isinstance(command, m.Cleared):
                self.lookup_log.gone(command.group, command.salt)
            elif isinstance(command, m.Send):
                outbox = self._outboxes.get(command.session)
                if outbox is not None:
                    outbox.put(command)

    def _settle(self, commands: Iterable[m.Command]) -> None:
        """Have writes made, and log, outside the lock."""
        if self._writer is not None and any(isinstance(command, m.Save) for command in commands):
            self._writer.wake()
        for command in commands:
            if isinstance(command, m.Report):
                log.info(command.event, **command.fields)

    # ------------------------------------------------------------------ clients' calls

    def open_namespace(self, namespace: Namespace) -> tuple[int, int]:
        """(handle, weight epoch) of a namespace."""
        with self._lock:
            opened, commands = self._state.open_namespace(namespace)
            self._deliver(commands)
        self._settle(commands)
        return opened.handle, opened.group.epoch

    def opened(self, handle: int) -> Opened:
        with self._lock:
            return self._state.namespaces.by_handle(handle)

    def named(self, namespace: Namespace) -> Opened:
        """Open a namespace and return it: what gRPC callers do in one step."""
        handle, _ = self.open_namespace(namespace)
        return self.opened(handle)

    def lookup(
        self,
        opened: Opened,
        salt: str,
        hashes: bytes,
        boot_id: str,
        epoch: int | None = None,
        request: str = "",
        avoid: Collection[str] = (),
    ) -> tuple[LookedUp, dict[int, m.NodeFacts]]:
        """Where blocks are, and the nodes that the codes' slots name.

        ``epoch`` is what the asker's handle is pinned to; a named ``request`` can be explained later.
        ``avoid`` as for :meth:`MasterState.lookup`.
        """
        began = time.perf_counter()
        check_salt(salt)
        keys = fold(hashes, _whole(hashes, opened.namespace.hash_bytes))
        with self._lock:
            now = self._clock()
            group = opened.group.number
            answer = self._state.lookup(opened.namespace, group, salt, keys, boot_id, now, epoch, avoid)
            if request:
                self._state.note_lookup(request, opened, salt, keys, answer, now)
            facts = self._state.membership.slot_facts
        self.metrics.looked_up(answer, time.perf_counter() - began)
        if not answer.not_yet:
            self._log(opened, salt, keys, answer.found.present, now)
        return answer, facts

    def place(
        self,
        opened: Opened,
        salt: str,
        hashes: bytes,
        boot_id: str,
        epoch: int | None = None,
        avoid: Collection[str] = (),
    ) -> tuple[Placed, dict[int, m.NodeFacts]]:
        """Where to store blocks, and the nodes that the codes' slots name. Raises as :meth:`MasterState.place`."""
        check_salt(salt)
        keys = fold(hashes, _whole(hashes, opened.namespace.hash_bytes))
        with self._lock:
            now = self._clock()
            placed = self._state.place(opened.namespace, opened.group.number, salt, keys, boot_id, now, epoch, avoid)
            commands = self._state.taken()
            self._deliver(commands)
            facts = self._state.membership.slot_facts
        if commands:
            self._settle(commands)
        self.metrics.placed(np.bincount(placed.states, minlength=4))
        self._log(opened, salt, keys, None, now)
        return placed, facts

    def _log(self, opened: Opened, salt: str, keys: Keys, present: npt.NDArray[np.bool_] | None, now: float) -> None:
        """Have a call heard for the what-if predictions, later."""
        nbytes = opened.namespace.block_bytes * opened.namespace.shard_count
        self.lookup_log.put(Call(opened.group.number, salt, keys, present, nbytes, now))

    def miss(self, report: m.MissReport) -> None:
        with self._lock:
            opened = self._state.namespaces.by_handle(report.handle)
        check_salt(report.salt)
        _whole(report.hashes, opened.namespace.hash_bytes)
        self.handle(report)

    def remove(self, opened: Opened, salt: str, hashes: bytes, deadline_s: float) -> Removed:
        """Remove blocks everywhere; waits at most ``deadline_s`` for the attached nodes to confirm.

        Raises :class:`Unavailable` when nodes are away and the store cannot remember the removal for them.
        """
        check_salt(salt)
        _whole(hashes, opened.namespace.hash_bytes)
        deadline = time.monotonic() + min(deadline_s, REMOVE_DEADLINE_MAX_S)
        removal = self.order(lambda state, now: state.remove(opened.namespace, salt, hashes, now))
        unreached = self.confirmations(removal.command, removal.awaited, deadline)
        if unreached and not self.journal.flush():
            problem = self.journal.problem() or "the state store is slow"
            raise Unavailable(f"removed, but {', '.join(unreached)} may not learn of it after a restart: {problem}")
        return Removed(removal.removed, unreached)

    # ------------------------------------------------------------------ orders to nodes

    def order(self, change: Callable[[MasterState, float], tuple[T, list[m.Command]]]) -> T:
        """Change the state under the lock, and carry out what follows."""
        with self._lock:
            result, commands = change(self._state, self._clock())
            self._deliver(commands)
        self._settle(commands)
        return result

    def confirmations(self, command: int, awaited: frozenset[str], deadline: float) -> list[str]:
        """Wait until the ``awaited`` nodes have confirmed; returns all nodes that have not.

        A node is waited for while it is attached: one that falls silent leaves after ``OFFLINE_S``, nobody is
        sent there any more, and before it serves again it attaches and is told. ``deadline`` is monotonic time.
        """
        with self._lock:
            while True:
                unreached = self._state.unconfirmed(command)
                left = deadline - time.monotonic()
                if left <= 0 or not self._state.attached(awaited.intersection(unreached)):
                    return unreached
                self._confirmed.wait(min(left, REMOVE_POLL_S))

    def heartbeat(self, event: m.Heartbeat) -> bool:
        """True when this incarnation of the node is attached here."""
        self.handle(event)
        with self._lock:
            return self._state.knows(event.node_id, event.incarnation)

    # ------------------------------------------------------------------ health

    def read(self, question: Callable[[MasterState, float], T]) -> T:
        """Ask the state something under the lock. The question must be quick and keep nothing."""
        with self._lock:
            return question(self._state, self._clock())

    def uptime_s(self) -> float:
        return self._clock() - self.started_at


def _whole(hashes: bytes, hash_bytes: int) -> int:
    """``hash_bytes``, if ``hashes`` is a whole number of them within the bound."""
    if len(hashes) % hash_bytes:
        raise InvalidArgument(f"hashes are {len(hashes)} bytes: not a multiple of hash_bytes = {hash_bytes}")
    if len(hashes) > HASHES_MAX * hash_bytes:
        raise InvalidArgument(f"{len(hashes) // hash_bytes} hashes in one call: at most {HASHES_MAX} are allowed")
    return hash_bytes
